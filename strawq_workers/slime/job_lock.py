"""One job for one directory, for as long as its process lives.

The rule: who holds the lock is a process, not a file, and it is the file system that lets go of it: when the process
dies, however it dies, or, if the client of a distributed mount died before it, when the mount's server gives that
client up (JuiceFS: after about a minute). A job that finds the lock in the name of a process that is known to be dead
waits for that. A child that was forked does not hold the lock (POSIX record locks, not flock, whose locks a fork
shares).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from strawq.errors import BadInput, StorageFailed, TryAgain
from strawq.model import Session
from strawq.session import known_dead, this_process

logger = logging.getLogger("strawq.slime")

WAIT_S = 150.0
POLL_S = 1.0

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: set[tuple[int, int]] = set()  # of this process, to which record locks exclude nothing
_guard = threading.Lock()


class JobLock:
    """Holds `path` from construction to `close()`. `BadInput` with who holds it if another job does, `StorageFailed`
    if the mount does not lock or is gone. While a process that is dead holds it, construction waits for `WAIT_S`, then
    raises `TryAgain`; `wait` is called with the seconds to sleep, and may raise."""

    def __init__(self, path: Path, what: str, wait: Callable[[float], Any] = time.sleep) -> None:
        self._path = path
        self._what = what
        self._pid = os.getpid()
        self._fd = -1
        waited = 0.0
        while (holder := self._take()) is not None:
            if not known_dead(holder):
                raise BadInput(self._refusal(f"held by {_name(holder)}") + _HINT)
            why = f"lock {path} is held for {_name(holder)}, which is dead, as a mount whose client was killed does"
            if waited >= WAIT_S:
                raise TryAgain(f"{why}: {what} is not free after {WAIT_S:g} s; look at the mount's clients")
            if not waited:
                logger.warning("%s for about a minute; waiting until it is free", why)
            wait(POLL_S)
            waited += POLL_S

    def _take(self) -> Session | None:
        """None if the lock is ours now, else who holds it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _guard:
                # Looked at before it is opened: closing any descriptor of the file lets go of this process's lock.
                if self._path.exists() and _identity(self._path.stat()) in _held:
                    raise BadInput(self._refusal("held by this process"))
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o664)
                try:
                    holder = _lock(fd)
                    key = _identity(os.fstat(fd))
                except BaseException:
                    os.close(fd)
                    raise
                if holder is not None:
                    os.close(fd)
                    return holder
                self._fd, self._key = fd, key
                _held.add(key)
                return None
        except OSError as error:
            remedy = "a job needs a mount with locks" if error.errno in _NO_LOCKS else "look at the mount"
            raise StorageFailed(f"cannot take the lock {self._path}: {error.strerror}; {remedy}") from error

    def _refusal(self, why: str) -> str:
        return (
            f"Another training job owns {self._what} (lock {self._path}, {why}): stop it, or choose another directory"
        )

    def close(self) -> None:
        """Let go. In a forked child: nothing, the parent holds it. `StorageFailed` if the mount is gone; the lock is
        not this process's any more then either."""
        with _guard:
            fd, self._fd = self._fd, -1
            if fd < 0 or os.getpid() != self._pid:
                return
            _held.discard(self._key)
            try:
                os.close(fd)
            except OSError as error:
                raise StorageFailed(
                    f"cannot let go of the lock {self._path}: {error.strerror}; look at the mount"
                ) from error


_HINT = "; the lock of a job whose mount's client was killed is free after about a minute"
_NOBODY = Session(id="", host="", pid=0)


def _lock(fd: int) -> Session | None:
    """None if the lock is ours now, and says so; else who holds it, as far as the file says."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        try:
            return msgspec.json.decode(os.pread(fd, 2000, 0), type=Session)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return _NOBODY  # it has only just taken it
    data = msgspec.json.encode(this_process("", "job", 0.0)) + b"\n"
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))
    return None


def _name(holder: Session) -> str:
    return f"pid {holder.pid} on {holder.host}" if holder is not _NOBODY else "an unknown process"


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
