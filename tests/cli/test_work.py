"""The two ends of a running queue, with the embedded engine: what `work` hands in is what `collect` writes, once."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strawq import Pool
from strawq_workers.engine.options import EngineOptions
from strawq_workers.worker.options import WorkerOptions
from tests.cli.conftest import Run, start, write_lines
from tests.cli.tree import options, verbs


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    process = start("engine", "--json")
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    yield url
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.fixture
def filled(pool: Path, run: Run, tmp_path: Path) -> Path:
    """Six prompts, two answers wanted for each, and no more to come."""
    rows = ({"prompt": f"{number} + {number} =", "id": f"g{number}"} for number in range(6))
    run("submit", pool, write_lines(tmp_path / "a.jsonl", *rows), "--group-size", 2, "--id-key", "id", "--seal")
    return pool


def tasks(run: Run, pool: Path) -> Any:
    return run("inspect", pool, "--json").data["queues"]["rollout"]["tasks"]


@pytest.mark.parametrize(
    ("verb", "struct", "renamed"), [("work", WorkerOptions, {"engines": "engine"}), ("engine", EngineOptions, {})]
)
def test_every_field_of_the_options_has_an_option_and_its_default(
    verb: str, struct: type[msgspec.Struct], renamed: dict[str, str]
) -> None:
    """`None` and empty collections are "" on a command line; `processes` decides `workers`; the only queue is taken."""
    known = {option.name: option for option in options(verbs()[verb])}
    for field in msgspec.structs.fields(struct):
        option = known[renamed.get(field.name, field.name)]
        if field.name in ("engines", "queue", "workers"):
            continue
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        given = option.default() if callable(option.default) else option.default
        assert (given or None) == (default or None), field.name


def test_what_is_generated_is_collected_once(run: Run, filled: Path, engine: str, tmp_path: Path) -> None:
    ended = run("work", filled, "--engine", engine, "--max-new-tokens", 8, "--json").data
    assert (ended["reason"], ended["counters"]["groups_accepted"]) == ("sealed", 6)
    assert tasks(run, filled)["ready"] == 6

    kept = run("collect", filled, "-n", 2, "--keep", "--json").data
    assert [len(record["samples"]) for record in kept["records"]] == [2, 2]
    assert tasks(run, filled)["ready"] == 6

    printed = run("collect", filled, "-n", 1)
    assert "1 group in 1 batch" in printed.err
    first = json.loads(printed.out)
    assert first["prompt"]["text"] == "0 + 0 ="
    assert all(len(sample["tokens"]) == len(sample["logprobs"]) for sample in first["samples"])

    shown = run("collect", filled, "-n", 2, "--json").data
    assert (shown["batches"], shown["groups"], shown["finished"]) == (1, 2, True)
    out = tmp_path / "out.jsonl"
    summary = run("collect", filled, "-n", 2, "--batches", 0, "--out", out, "--json").data
    assert (summary["groups"], summary["sealed"]) == (3, True)
    records = [first, *shown["records"], *map(json.loads, out.read_text().splitlines())]
    assert [record["group_id"] for record in records] == [f"g{number}" for number in range(6)]
    assert tasks(run, filled)["trained"] == 6
    assert run("collect", filled, "-n", 2, "--json").data["sealed"] is True


def test_several_processes_share_the_work(filled: Path, engine: str, run: Run) -> None:
    process = start("work", filled, "-e", engine, "--max-new-tokens", 8, "--processes", 2, "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    answer = json.loads(out)
    assert (answer["groups_accepted"], answer["failed"], len(answer["workers"])) == (6, 0, 2)
    assert "Traceback" not in err and " INFO " not in err, "as much as a single process says"


@pytest.mark.parametrize("processes", [1, 2])
def test_one_signal_ends_workers_in_good_order(
    processes: int, run: Run, pool: Path, engine: str, tmp_path: Path
) -> None:
    """The queue is not sealed: only the signal ends them, and they give back what they hold."""
    run("submit", pool, write_lines(tmp_path / "a.jsonl", {"prompt": "?"}), "--group-size", 2)
    words = ["--processes", processes, "--max-new-tokens", 8, "--json"]
    process = start("work", pool, "-e", engine, *words)
    with Pool.open(pool) as opened:
        while process.poll() is None and (
            opened.queue().counts().ready < 1 or len(opened.inspect().sessions) < processes
        ):
            time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    answer = json.loads(out)
    assert [worker["reason"] for worker in answer.get("workers", [answer])] == ["signal"] * processes
    assert run("inspect", pool, "--json").data["sessions"] == []


def test_a_batch_whose_lines_were_not_written_is_not_finished(
    run: Run, filled: Path, engine: str, tmp_path: Path
) -> None:
    run("work", filled, "-e", engine, "--max-new-tokens", 8)
    for extra in ((), ("--json",), ("--keep",)):
        with open("/dev/full", "w") as full:
            process = start("collect", filled, "-n", 2, *extra, stdout=full)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 6
        assert "No space left" in err
        assert "Traceback" not in err
        assert tasks(run, filled)["trained"] == 0
    ran = run("collect", filled, "-n", 2, "--out", tmp_path / "absent" / "out", "--json", code=2)
    assert "cannot be written" in ran.data["error"]["message"]
    assert (
        "is no collected group"
        in run("collect", filled, "-n", 2, "--out", write_lines(tmp_path / "x", "[1]"), code=2).err
    )
    assert tasks(run, filled)["ready"] == 6


def test_not_enough_groups_is_try_again(run: Run, pool: Path) -> None:
    ran = run("collect", pool, "-n", 2, "--timeout", 0, "--json", code=4)
    assert ran.data["error"]["kind"] == "try_again"
    assert "is a worker running?" in ran.err
    assert "--keep only shows" in run("collect", pool, "-n", 1, "--keep", "--out", "x", code=2).err
    strict = ("--staleness-policy", "drop")
    for words, told in (
        (("collect", pool, "-n", 1, *strict), "--staleness-policy drop says how --max-staleness is kept"),
        (("collect", pool, "-n", 1, "--keep", "--max-staleness", 1, *strict), "--keep only shows"),
        (("collect", pool, "-n", 1, "--stale-drops-max", 4), "--stale-drops-max is of --staleness-policy drop"),
        (("work", pool, "--engine", "http://127.0.0.1:9", *strict), "--staleness-policy drop says how"),
    ):
        assert told in run(*words, code=2).err


@pytest.mark.parametrize("processes", [1, 2])
def test_an_engine_that_is_not_there(processes: int, filled: Path) -> None:
    words = ["-e", "http://127.0.0.1:1", "--engine-timeout-s", 0.5, "--processes", processes]
    process = start("work", filled, *words)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "127.0.0.1:1" in err
    assert "no engine yet, asking again" in err, "waiting is visible"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--group-size", 0), "--group-size is 0"),
        (("--temperature", -1), "Invalid value for '--temperature'"),
        (("--sampling-extra", "[]"), "--sampling-extra is not a JSON object"),
        (("--hook-args", "{"), "--hook-args is not a JSON object"),
        (("--workers", 2, "--worker-index", 2), "--worker-index is 2"),
        (("--processes", 3, "--workers", 2), "--processes 3 from --worker-index 0 on are more than --workers 2"),
        (("--reward", "no.such:hook"), "no.such"),
        (("--queue", "absent"), "there is no queue 'absent'"),
        (("--engine", "not a url"), "not a url"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused_at_the_start(
    words: tuple[Any, ...], message: str, run: Run, filled: Path
) -> None:
    ran = run("work", filled, "-e", "http://127.0.0.1:1", "--engine-timeout-s", 0.5, *words, code=2)
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_an_address_in_use(run: Run, engine: str) -> None:
    ran = run("engine", "--port", engine.rpartition(":")[2], code=2)
    assert "cannot listen on" in ran.err
    assert "is 4" in run("engine", "--context-length", 4, code=2).err


def test_an_engine_says_its_url_first(tmp_path: Path) -> None:
    process = start("engine", "--port", 0)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_demo_is_one_json_object(tmp_path: Path) -> None:
    done = start("demo", "--json", "--dir", tmp_path / "pool", "--batches", 2, "--groups", 4, stdin=subprocess.DEVNULL)
    out, err = done.communicate(timeout=150)
    assert done.returncode == 0, err
    summary = json.loads(out)
    assert (summary["groups_accepted"], summary["lost"], summary["duplicates"]) == (8, 0, 0)
    assert summary["leases_expired"] >= 1
    assert "Traceback" not in err
