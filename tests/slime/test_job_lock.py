"""One job for one directory: a lock that outlives its job is waited for, and a mount that is gone is said to be."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from strawq.errors import BadInput, StorageFailed, TryAgain
from strawq.model import Session
from strawq.storage.process import this_process
from strawq_workers.slime import job_lock
from strawq_workers.slime.job_lock import POLL_S, WAIT_S, JobLock
from tools.juicefs.volume import Volume

HOLD = """
import sys, pathlib
from strawq_workers.slime.job_lock import JobLock
lock = JobLock(pathlib.Path(sys.argv[1]), "pool x")
print("held", flush=True)
sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """A process that has the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    with process:
        process.wait(20)


class Mount:
    """Stands in for a mount that keeps the locks of a client that was killed, until `gives_up`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gives_up = False
        self.slept = 0.0
        self._lockf = fcntl.lockf
        monkeypatch.setattr(job_lock.fcntl, "lockf", self.lockf)

    def lockf(self, fd: int, how: int) -> None:
        if not self.gives_up:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self._lockf(fd, how)

    def wait(self, seconds: float) -> None:
        self.slept += seconds
        if self.slept >= 62:
            self.gives_up = True


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The lock of a job that was killed."""
    path = tmp_path / "locks" / "job.lock"
    kill(hold(path))
    return path


def test_a_lock_that_a_mount_keeps_for_a_dead_job_is_waited_for_and_says_why(
    left: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mount = Mount(monkeypatch)
    with caplog.at_level(logging.WARNING, "strawq.slime"):
        JobLock(left, "pool x", mount.wait).close()
    assert mount.slept == 62
    (said,) = caplog.messages
    assert f"lock {left} is held for pid " in said and "which is dead" in said and "client was killed" in said


def test_a_lock_that_is_never_let_go_of_is_not_waited_for_for_ever(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mount(monkeypatch)
    slept: list[float] = []
    with pytest.raises(TryAgain, match=f"which is dead.*pool x is not free after {WAIT_S:g} s"):
        JobLock(left, "pool x", slept.append)
    assert sum(slept) == WAIT_S == len(slept) * POLL_S and not mount.gives_up


def test_a_job_that_takes_the_lock_meanwhile_is_a_live_one(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Mount(monkeypatch)

    def another_takes_it(_seconds: float) -> None:
        left.write_bytes(msgspec.json.encode(this_process("", "job", 0.0)))

    with pytest.raises(BadInput, match=f"held by pid {os.getpid()} on .*: stop it"):
        JobLock(left, "pool x", another_takes_it)


@pytest.mark.parametrize("change", ["host", "unknown"])
def test_a_job_that_may_live_elsewhere_is_refused_at_once_with_how_long_a_dead_ones_lock_lasts(
    left: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    Mount(monkeypatch)
    holder = msgspec.json.decode(left.read_bytes(), type=Session)
    if change == "host":
        left.write_bytes(msgspec.json.encode(msgspec.structs.replace(holder, host="other", boot="another boot")))
    else:
        left.write_bytes(b"")

    def wait(_seconds: float) -> None:
        raise AssertionError("waited for a job that may live")

    name = f"pid {holder.pid} on other" if change == "host" else "an unknown process"
    with pytest.raises(BadInput, match=f"held by {name}.*: stop it.*client was killed is free after about a minute"):
        JobLock(left, "pool x", wait)


def test_a_mount_that_is_gone_is_a_storage_error_when_the_lock_is_taken_and_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.lock"
    lock = JobLock(path, "pool x")
    gone = OSError(errno.ENOTCONN, "Transport endpoint is not connected")
    close = os.close

    def closes_and_says_so(fd: int) -> None:
        close(fd)
        raise gone

    with monkeypatch.context() as patch:
        patch.setattr(job_lock.os, "close", closes_and_says_so)
        with pytest.raises(StorageFailed, match=f"cannot let go of the lock {path}.*not connected; look at the mount"):
            lock.close()
        lock.close()
    JobLock(path, "pool x").close()  # nothing of the lock that was lost is left in this process

    def not_connected(*_: object) -> None:
        raise gone

    monkeypatch.setattr(job_lock.os, "open", not_connected)
    with pytest.raises(StorageFailed, match=f"cannot take the lock {path}.*not connected; look at the mount"):
        JobLock(path, "pool x")


def test_a_mount_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(job_lock.fcntl, "lockf", no_locks)
    with pytest.raises(StorageFailed, match="a job needs a mount with locks"):
        JobLock(tmp_path / "job.lock", "pool x")


@pytest.mark.juicefs
@pytest.mark.campaign
def test_juicefs_lets_go_of_the_lock_of_a_client_that_was_killed(
    juicefs: Volume, caplog: pytest.LogCaptureFixture
) -> None:
    client = juicefs.mount(f"doomed-{os.urandom(4).hex()}")
    name = f"lock-{os.urandom(4).hex()}"
    holder = hold(client.path / name)
    client.kill()
    kill(holder)
    client.unmount()
    client = juicefs.mount(client.path.name)
    try:
        with caplog.at_level(logging.WARNING, "strawq.slime"):
            JobLock(client.path / name, "pool x").close()
        assert len(caplog.messages) == 1 and "which is dead" in caplog.messages[0]
    finally:
        client.unmount()
