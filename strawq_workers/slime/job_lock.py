"""One job for one directory, for as long as its process lives.

The rule: who holds the lock is a process, not a file. The kernel lets go of it when the process dies, however it dies;
a child that was forked does not hold it (POSIX record locks, not flock, whose locks a fork shares).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from pathlib import Path

from strawq.errors import BadInput, StorageFailed

_held: set[tuple[int, int]] = set()  # of this process, to which record locks exclude nothing
_guard = threading.Lock()


class JobLock:
    """Holds `path` from construction to `close()`. `BadInput` with who holds it if another job does, `StorageFailed`
    if the mount does not lock."""

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._what = what
        self._pid = os.getpid()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _guard:
                # Looked at before it is opened: closing any descriptor of the file lets go of this process's lock.
                if path.exists() and _identity(path.stat()) in _held:
                    raise BadInput(self._refusal("this process"))
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o664)
                self._key = _identity(os.fstat(self._fd))
                self._take()
                _held.add(self._key)
        except OSError as error:
            raise StorageFailed(f"the lock {path} cannot be taken ({error}); a job needs a mount with locks") from error

    def _take(self) -> None:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 200, 0).decode("utf-8", "replace").strip() or "unknown"
            os.close(self._fd)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise BadInput(self._refusal(holder)) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"pid {self._pid} on {socket.gethostname()}\n".encode(), 0)

    def _refusal(self, holder: str) -> str:
        return (
            f"Another training job owns {self._what} (lock {self._path}, held by {holder}): stop it, or choose "
            "another directory"
        )

    def close(self) -> None:
        """Let go. In a forked child: nothing, the parent holds it."""
        with _guard:
            if self._fd >= 0 and os.getpid() == self._pid:
                os.close(self._fd)
                _held.discard(self._key)
            self._fd = -1


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
