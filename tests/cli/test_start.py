"""What every start of the command line must do: answer at once, in one shape, with an environment variable for
every option."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strawq.version import VERSION
from tests.cli.conftest import Run, command, write_lines
from tests.cli.tree import options, verbs

SECONDS_MAX = 0.4


def test_help_answers_in_time() -> None:
    took = []
    for _ in range(12):
        took.append(seconds_beside_waiting_for_a_processor(command("--help")))
        if took[-1] < SECONDS_MAX:
            return
    pytest.fail(f"strawq --help took {min(took):.2f} s at best")


def seconds_beside_waiting_for_a_processor(words: list[str]) -> float:
    """How long a process lives, without the time in which others ran in its place: what an idle machine would take."""
    begun = time.monotonic()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    took = time.monotonic() - begun
    account = Path(f"/proc/{process.pid}/schedstat")  # nanoseconds on a processor, and waiting for one; not everywhere
    waited = int(account.read_text().split()[1]) / 1e9 if account.exists() else 0.0
    assert process.wait() == 0
    return took - waited


def test_help_of_all_verbs_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom strawq.cli import main\nassert main(['--help']) == 0\n"
        "assert 'pydantic' not in sys.modules\n"
        "assert main(['submit', '--help']) == 0\n"
        "heavy = {'numpy', 'pyarrow', 'aiohttp', 'asyncio', 'fsspec', 'blake3', 'strawq.pool'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version(run: Run) -> None:
    assert run("--version").out == f"strawq {VERSION}\n"


def test_no_command_is_usage_and_shows_the_help(run: Run) -> None:
    ran = run(code=2)
    assert "Commands:" in ran.out + ran.err


@pytest.mark.parametrize("words", sorted(verbs()))
def test_every_verb_has_help_json_verbose_and_exit_codes(words: str, run: Run) -> None:
    text = run(*words.split(), "--help").out
    for part in ("--json", "--verbose", "-v", "Exit codes:", "  6    operator needed"):
        assert part in text
    assert verbs()[words].help


@pytest.mark.parametrize("words", sorted(verbs()))
def test_every_option_has_an_environment_variable(words: str) -> None:
    for option in options(verbs()[words]):
        names = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
        assert names, f"{words} {option.opts}"
        assert all(name.startswith("STRAWQ_") for name in names)


def test_variables_do_not_collide() -> None:
    """One variable means one thing: the same option of several verbs, or the option of one verb."""
    meaning: dict[str, set[tuple[str, ...]]] = {}
    for verb in verbs().values():
        for option in options(verb):
            meaning.setdefault(str(option.envvar), set()).add(tuple(option.opts))
    assert {name: found for name, found in meaning.items() if len(found) > 1} == {}


def test_variables_are_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRAWQ_INIT_RUN_ID", "from-outside")
    monkeypatch.setenv("STRAWQ_INIT_QUEUE", "one two")
    run("init", tmp_path / "pool")
    monkeypatch.setenv("STRAWQ_JSON", "1")
    view = run("inspect", tmp_path / "pool").data
    assert (view["run_id"], list(view["queues"])) == ("from-outside", ["one", "two"])
    monkeypatch.setenv("STRAWQ_QUEUE", "two")
    monkeypatch.setenv("STRAWQ_SUBMIT_INPUT_KEY", "q")
    file = write_lines(tmp_path / "a.jsonl", {"q": "?"})
    assert run("submit", tmp_path / "pool", file).data["queue"] == "two"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
    environment = {**os.environ, "_STRAWQ_COMPLETE": f"source_{shell}"}
    done = subprocess.run(command(), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "_STRAWQ_COMPLETE" in done.stdout


def test_completion_proposes_verbs() -> None:
    environment = {
        **os.environ, "_STRAWQ_COMPLETE": "complete_bash", "COMP_WORDS": "strawq insp", "COMP_CWORD": "1",
    }  # fmt: skip
    done = subprocess.run(command(), env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["inspect"]
