"""Directories for the logs of child processes, which go when their owner goes, however it dies.

The rule: a directory is its owner's for as long as the owner holds the lock on a file in it, which the kernel lets go
of when the process dies. Whoever makes the next one removes those whose owner is dead. What is kept on purpose has no
such file any more, and is nobody's to remove.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

OWNED = ".owned"


class Scratch:
    """A new directory `<temporary directory>/<prefix>…` of this process, `path`."""

    def __init__(self, prefix: str) -> None:
        sweep(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # Locked before it has its name: whoever finds the name finds it locked.
        staged = self.path / f"{OWNED}.new"
        self._fd = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        staged.rename(self.path / OWNED)

    def close(self, *, keep: bool = False) -> None:
        """Remove it, or with `keep` leave it for people to read."""
        if self._fd < 0:
            return
        if keep:
            (self.path / OWNED).unlink(missing_ok=True)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(prefix: str) -> None:
    """Remove this user's directories of that prefix whose owner has died."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another's, or another process is faster
            if path.lstat().st_uid == os.getuid() and not path.is_symlink() and _left(path / OWNED):
                shutil.rmtree(path, ignore_errors=True)


def _left(owned: Path) -> bool:
    """Whether nobody holds the lock any more."""
    fd = os.open(owned, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
