"""docs/cli.md and the command line say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from strawq.cli.app import EXIT_CODES
from tests.cli.conftest import Run
from tests.cli.tree import options, verbs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def section(words: str) -> str:
    found = re.search(rf"^### strawq {words}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/cli.md has no section '### strawq {words}'"
    return found[1]


@pytest.mark.parametrize("words", sorted(verbs()))
def test_every_verb_and_option_is_documented(words: str) -> None:
    text = section(words)
    for option in options(verbs()[words]):
        if option.name in ("as_json", "verbosity", "help"):
            continue
        for name in (*option.opts, *option.secondary_opts, str(option.envvar)):
            assert f"`{name}`" in text, f"{name} of `strawq {words}` is not in docs/cli.md"


@pytest.mark.parametrize("words", sorted(verbs()))
def test_no_option_is_documented_that_is_gone(words: str) -> None:
    named = set(re.findall(r"^\| `(-[^`]*)`", section(words), re.MULTILINE))
    assert named <= {name for option in options(verbs()[words]) for name in option.opts}


def test_no_verb_is_documented_that_is_gone() -> None:
    assert set(re.findall(r"^### strawq (.+)$", PAGE, re.MULTILINE)) == set(verbs())


def test_every_exit_code_is_documented() -> None:
    for code in EXIT_CODES:
        assert f"| {code} |" in PAGE


def test_the_error_kinds_are_those_of_the_code() -> None:
    """Those of each class that gives itself one, wherever it stands; the command line adds two."""
    kinds = {"usage", "fault"}
    for path in (file for package in ("strawq", "strawq_workers") for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for line in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(line, (ast.Assign, ast.AnnAssign)) and isinstance(line.value, ast.Constant):
                    target = line.targets[0] if isinstance(line, ast.Assign) else line.target
                    if isinstance(target, ast.Name) and target.id == "kind":
                        kinds.add(str(line.value.value))
    assert {"bad_input", "error", "hook_failed"} <= kinds, "the code is read as it is written"
    (sentence,) = re.findall(r"`kind` is a stable word: (.*?)Fields are only ever added", PAGE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == kinds


@pytest.mark.parametrize("words", [(), ("archive",), ("failed",), ("sessions",)])
def test_each_summary_fits_into_eighty_columns(
    words: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = run(*words, "--help").out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(commands) > 1
    assert [line for line in commands if line.endswith("...") or not line.endswith((".", "`"))] == []
