"""Directories of logs are gone when their owner is, also one that was killed, and kept ones are nobody's to remove."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from strawq_workers.scratch import Scratch, sweep

OWNER = """
import sys, time
from strawq_workers.scratch import Scratch
scratch = Scratch("strawq-test-")
(scratch.path / "engine.log").write_text("x")
print(scratch.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_is_in_use_is_not(temporary: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        assert left.parent == temporary
        with Scratch("strawq-test-") as mine:
            assert left.is_dir() and mine.path.is_dir()
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            sweep("strawq-test-")
            assert mine.path.is_dir() and not left.exists()
        assert os.listdir(temporary) == []
    finally:
        owner.kill()
        owner.communicate()


def test_what_is_kept_and_what_is_not_ours_stays(temporary: Path) -> None:
    kept = Scratch("strawq-test-")
    kept.close(keep=True)
    kept.close()
    (temporary / "strawq-test-file").write_text("x")
    (temporary / "strawq-test-empty").mkdir()
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / ".owned").write_text("")
    (temporary / "strawq-test-link").symlink_to(temporary / "elsewhere")
    before = sorted(os.listdir(temporary))
    sweep("strawq-test-")
    assert sorted(os.listdir(temporary)) == before and (temporary / "elsewhere" / ".owned").exists()
