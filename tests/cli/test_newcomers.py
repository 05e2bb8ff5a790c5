"""What newcomers ran into: each gets one line that names the thing and the remedy, and the right exit code."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Run

LONG = "n" * 300


def test_a_pool_cannot_be_made_where_a_file_is(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_text("mine")
    ran = run("init", tmp_path / "file", code=2)
    assert "is not a directory; choose a new directory" in ran.err
    ran = run("init", tmp_path / "file" / "pool", code=2)
    assert f"{tmp_path / 'file'} is not a directory" in ran.err and "choose another place" in ran.err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "-q", LONG),
        ("checkpoint", LONG),
        ("checkpoint", LONG, "--delete"),
        ("rollback", LONG),
        ("branch", "--delete", LONG),
        ("archive", "load", LONG),
        ("sessions", "expire", LONG),
        ("log", "--task", LONG),
    ],
    ids=lambda words: "-".join(word for word in words if word != LONG),
)
def test_a_name_that_is_much_too_long_is_not_echoed_whole(pool: Path, run: Run, words: tuple[str, ...]) -> None:
    verb = words[:2] if words[0] in ("archive", "sessions") else words[:1]
    ran = run(*verb, pool, *words[len(verb) :], code=2)
    assert "n" * 64 in ran.err and "n" * 80 not in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_path_that_is_too_long_is_bad_input_and_no_fault_of_strawq(tmp_path: Path, run: Run) -> None:
    assert "is not a directory" in run("inspect", tmp_path / LONG, code=2).err
    assert "too long" in run("init", tmp_path / LONG, code=2).err


def test_dead_letters_that_are_none_are_named_as_such(pool: Path, run: Run) -> None:
    for verb in ("retry", "drop"):
        ran = run("failed", verb, pool, "9-9", code=1)
        assert "9-9" in ran.out and "no dead letters" in ran.out and "strawq failed list" in ran.out
        assert "leased" not in ran.out
        assert len(run("failed", verb, pool, LONG, code=1).out) < 300


def test_a_port_in_use_is_bad_input(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran = run("engine", "--port", str(taken.getsockname()[1]), code=2)
    assert "choose another --host or --port" in ran.err
