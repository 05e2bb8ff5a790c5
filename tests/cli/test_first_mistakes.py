"""What a newcomer gets wrong in the first minutes is answered with a remedy, and never obeyed by the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run


def test_a_queue_named_twice_is_refused(run: Run, tmp_path: Path) -> None:
    assert "names a twice" in run("init", tmp_path / "p", "-q", "a", "-q", "a", code=2).err
    assert not (tmp_path / "p").exists()


def test_a_pause_reason_cannot_drive_the_terminal(run: Run, pool: Path) -> None:
    run("pause", pool, "--reason", "x\x1b[2Jy")
    assert "\x1b" not in run("inspect", pool).out


def test_an_environment_variable_is_named_after_its_option(
    run: Run, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRAWQ_RESUME_POLICY_VERSION", "7")
    assert run("resume", pool, "--json").data["policy_version"] == "7"


def test_a_hook_that_cannot_be_imported_says_what_to_do(run: Run, pool: Path) -> None:
    failed = run("work", pool, "--engine", "http://127.0.0.1:1", "--reward", "no_such_module:fn", code=2)
    assert "PYTHONPATH" in failed.err
