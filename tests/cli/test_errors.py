"""However a command ends: one line, the documented exit code, and never a traceback."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from strawq import errors
from strawq.cli.app import EXIT_CODES
from strawq.pool import Pool
from strawq.storage.posix import PosixFiles
from tests.cli.conftest import Run, command, start, write_lines


def every_error() -> list[type[errors.StrawqError]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.StrawqError)]
    assert len(kinds) > 10
    return kinds


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The disk takes no new file."""

    def call(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(PosixFiles, "stage", call)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_pool_that_cannot_be_written_to_is_named(
    number: int, run: Run, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, number)
    for words in (("seal", pool), ("checkpoint", pool, "x"), ("gc", pool)):
        told = run(*words, code=None).err
        assert not told or (str(pool) in told and "another user" not in told), words


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_worker_that_may_not_write_says_so_before_it_waits_for_engines(
    number: int, run: Run, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, number)
    told = run("work", pool, "--engine", "http://127.0.0.1:1", "--engine-timeout-s", 600, code=6).err
    assert str(pool) in told and "engine" not in told


@pytest.mark.parametrize("kind", every_error())
def test_an_error_of_strawq_is_one_line_and_its_exit_code(
    kind: type[errors.StrawqError], run: Run, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise kind("the thing\nis \x1b[31mwrong")

    monkeypatch.setattr(Pool, "inspect", fail)
    ran = run("inspect", pool, code=kind.exit_code)
    assert ran.out == ""
    assert ran.err == "strawq: the thing is \\x1b[31mwrong\n"
    as_json = run("inspect", pool, "--json", code=kind.exit_code)
    assert as_json.data == {"error": {"kind": kind.kind, "message": "the thing is \\x1b[31mwrong"}}
    assert as_json.err == ran.err
    assert kind.exit_code in EXIT_CODES


def test_an_unexpected_error_keeps_its_traceback_in_a_file(
    run: Run, pool: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(Pool, "inspect", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ran = run("inspect", pool, "--json", code=1)
    assert ran.data["error"]["kind"] == "fault"
    assert "this is a fault of strawq: ZeroDivisionError: surprise" in ran.err
    assert ran.err.count("\n") == 1
    (log,) = tmp_path.glob("strawq-fault-*.log")
    assert str(log) in ran.err
    assert "Traceback (most recent call last)" in log.read_text()
    assert "surprise" in log.read_text()


def test_debugging_shows_the_traceback(
    pool: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from strawq.cli import main

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(Pool, "inspect", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("STRAWQ_DEBUG", "1")
    assert main(["inspect", str(pool)]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_is_told_even_if_its_file_cannot_be_written(
    run: Run, pool: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(Pool, "inspect", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    assert "surprise" in run("inspect", pool, code=1).err


def test_usage_errors_are_one_line_with_the_verbs_help(run: Run) -> None:
    err = run("inspect", "--foo", code=2).err
    assert err.startswith("strawq: No such option")
    assert err.endswith("; see `strawq inspect --help`\n")
    assert err.count("\n") == 1
    assert run("sessions", "expire", "p", code=2).err.endswith("; see `strawq sessions expire --help`\n")
    ran = run("submit", "p", "f", "--batch", "many", "--json", code=2)
    assert ran.data["error"]["kind"] == "usage"
    assert ran.err.count("\n") == 1
    assert run("nonsense", "--json", code=2).data["error"]["kind"] == "usage"


def test_json_after_two_dashes_is_no_option(run: Run) -> None:
    assert run("inspect", "--", "--json", code=2).out == ""


def test_a_directory_that_is_no_pool(run: Run, tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "absent", "is not a directory"),
        (tmp_path, "is not a pool"),
        (write_lines(tmp_path / "file"), "is not a directory"),
        ("", "no directory"),
        ("a\0b", "no directory"),
    ):
        ran = run("inspect", path, "--json", code=2)
        assert words in ran.data["error"]["message"]


def test_a_pool_of_a_newer_format(run: Run, pool: Path) -> None:
    header = pool / "strawq.json"
    header.write_text(header.read_text().replace('"format_version": 1', '"format_version": 99'))
    ran = run("inspect", pool, "--json", code=2)
    assert ran.data["error"]["kind"] == "format_unsupported"
    assert "99" in ran.err


def test_a_damaged_header(run: Run, pool: Path) -> None:
    (pool / "strawq.json").write_bytes(b"\0" * 100)
    assert run("inspect", pool, "--json", code=6).data["error"]["kind"] == "damaged"


def test_a_full_disk(run: Run, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "?"})

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PosixFiles, "stage", full)
    ran = run("submit", pool, file, "--json", code=6)
    assert ran.data["error"]["kind"] == "storage_failed"
    assert "No space left" in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/passwd", "", "x" * 300, "a\nb", "-x", ".hidden", "ａ", "a\0b"])
def test_names_are_never_paths(name: str, run: Run, pool: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "?"})
    before = sorted(path for path in tmp_path.rglob("*") if "log" not in path.parts)
    refused = [
        ("init", tmp_path / "new", f"--run-id={name}"),
        ("init", tmp_path / "new", f"--queue={name}"),
        ("checkpoint", pool, "--", name),
        ("checkpoint", pool, "--delete", "--", name),
        ("rollback", pool, "--", name),
        ("rollback", pool, "--dry-run", "--", name),
        ("sessions", "expire", pool, "--", name),
    ]
    if name:
        refused += [
            ("inspect", pool, f"--queue={name}"),
            ("submit", pool, file, f"--queue={name}"),
            ("submit", pool, file, f"--producer={name}"),
            ("branch", pool, f"--delete={name}"),
        ]
    for words in refused:
        ran = run(*words, code=2)
        assert ran.err.count("\n") == 1, ran.err
    assert sorted(path for path in tmp_path.rglob("*") if "log" not in path.parts) == before
    assert run("inspect", pool, "--json").data["head_seq"] == 1


def test_a_reader_that_goes_away_is_no_error(pool: Path) -> None:
    process = start("inspect", pool, "--json", bufsize=0)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141
    process.stderr.close()


def test_a_full_output_is_told(pool: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(command("inspect", pool), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 6
    assert done.stderr == "strawq: the result could not be written to stdout: No space left on device\n"


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_a_command_with_one_line(number: int, code: int, word: str, pool: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = start("submit", pool, fifo)
    # The command has opened its end when ours can be opened: from then on it waits for rows that never come.
    with os.fdopen(_open_for_reader(fifo, process), "wb"):
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, "", f"strawq: {word}\n")


def _open_for_reader(fifo: Path, process: subprocess.Popen[str]) -> int:
    while process.poll() is None:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            time.sleep(0.01)
    pytest.fail(f"the command ended at its start: {process.communicate()}")
