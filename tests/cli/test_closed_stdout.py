"""Output that does not arrive: a reader that goes away, a disk that is full. Nothing is done because of it then."""

from __future__ import annotations

import os
import shlex
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strawq import Pool, Prompt, Sample, VersionSpan
from strawq.samples import Group
from tests.cli.conftest import command as start_words
from tests.cli.conftest import start

GROUPS = 160
PIPE_BYTES = 65_536  # what Linux keeps for a reader
LINES = ("collect", "collect --json", "collect --keep")
RESULTS = ("inspect", "log -n 0 --json", "failed list", "archive ls", "--help", "--version")


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A pool whose ready groups are more than a pipe holds."""
    with Pool.init(tmp_path / "pool") as opened:
        queue = opened.queue()
        queue.submit([Prompt(group_id=f"g{number}", text="?" * (PIPE_BYTES // GROUPS)) for number in range(GROUPS)])
        for lease in queue.acquire(GROUPS):
            work = queue.open(lease)
            spans = (VersionSpan(0, 2, "1"),)
            sample = Sample(0, np.arange(2), np.full(2, -0.5), versions=spans, status="completed", reward=1.0)
            queue.complete(work, Group(work.task, work.group.prompt, (sample,)))
        return tmp_path / "pool"


def words_for(command: str, pool: Path) -> list[object]:
    verb, *options = command.split()
    if verb == "collect":
        return [verb, pool, "-n", GROUPS, *options]
    if command.endswith(("--help", "--version")):
        return [verb, *options]
    subverb = [options.pop(0)] if options and not options[0].startswith("-") else []
    return [verb, *subverb, pool, *options]


def environment(unbuffered: str) -> dict[str, str]:
    """Unbuffered, Python's stdout takes less than it is given, and says so only in a return value."""
    return {**os.environ, "PYTHONUNBUFFERED": unbuffered}


def trained(pool: Path) -> tuple[int, int]:
    """Groups that count as trained, and those that are ready."""
    with Pool.open(pool) as opened:
        counts = opened.queue().counts()
    return counts.trained, counts.ready


@pytest.mark.parametrize(("command", "unbuffered"), [*product(LINES, ("", "1"))])
def test_a_reader_that_stops_in_the_middle_gets_no_batch_counted(command: str, unbuffered: str, pool: Path) -> None:
    process = start(*words_for(command, pool), env=environment(unbuffered))
    assert process.stdout is not None and process.stderr is not None
    with process.stderr as talk:
        os.read(process.stdout.fileno(), 100)  # the pipe is full behind it: not all can be written before it closes
        process.stdout.close()
        assert (process.wait(60), talk.read()) == (141, "")
    assert trained(pool) == (0, GROUPS)


@pytest.mark.parametrize(("command", "unbuffered"), [*product(LINES, ("", "1")), *product(RESULTS, ("",))])
def test_nobody_reads_at_all(command: str, unbuffered: str, pool: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start(*words_for(command, pool), stdout=write, env=environment(unbuffered))
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")
    assert trained(pool) == (0, GROUPS)


@pytest.mark.parametrize(("command", "unbuffered"), [*product(LINES, ("", "1")), *product(RESULTS, ("",))])
def test_there_is_no_stdout_to_begin_with(command: str, unbuffered: str, pool: Path) -> None:
    """As under a program that closes what it does not need: like a reader that is gone, and no file takes its place."""
    words = shlex.join([*start_words(*words_for(command, pool))])
    done = subprocess.run(
        ["sh", "-c", f"exec {words} >&-"], stderr=subprocess.PIPE, text=True, timeout=60, env=environment(unbuffered)
    )
    assert (done.returncode, done.stderr) == (141, "")
    assert trained(pool) == (0, GROUPS)


def test_there_are_no_streams_at_all(pool: Path) -> None:
    words = shlex.join(start_words("checkpoint", pool, "dark"))
    done = subprocess.run(["sh", "-c", f"exec {words} <&- >&- 2>&-"], timeout=60)
    assert done.returncode == 141
    with Pool.open(pool) as opened:
        assert [point.name for point in opened.checkpoints()] == ["dark"]


@pytest.mark.parametrize(("command", "unbuffered"), [*product(LINES, ("", "1")), *product(RESULTS, ("",))])
def test_a_full_disk_is_one_line_and_nothing_is_counted(command: str, unbuffered: str, pool: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start(*words_for(command, pool), stdout=full, env=environment(unbuffered))
        _, err = process.communicate(timeout=60)
    assert process.returncode == 6
    assert "No space left" in err and err.count("\n") == 1
    assert trained(pool) == (0, GROUPS)


def test_an_error_that_cannot_be_printed_either_keeps_its_exit_code(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start("inspect", tmp_path / "absent", "--json", stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "is not a directory" in err and err.count("\n") == 1


def test_talk_that_nobody_hears_ends_nothing(pool: Path, tmp_path: Path) -> None:
    for name, closed in (("pipe", True), ("disk", False)):
        out: Any
        if closed:
            read, out = os.pipe()
            os.close(read)
        else:
            out = os.open("/dev/full", os.O_WRONLY)
        process = start("collect", pool, "-n", GROUPS // 4, "-vv", stderr=out, stdout=subprocess.PIPE)
        os.close(out)
        lines, _ = process.communicate(timeout=60)
        assert process.returncode == 0, name
        assert lines.count("\n") == GROUPS // 4
    assert trained(pool) == (GROUPS // 2, GROUPS // 2)
