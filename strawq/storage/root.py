"""A pool is one directory: what was opened first stays what every later call works in, or there is no call.

A path is only how it was found. A directory that was moved away, replaced by a copy, removed, or whose mount was
detached so that its path leads to an empty mount point, is not made again and not entered: what would be acknowledged
there is in no pool. A file system that was mounted again at the same path is the same directory: it has the inode
that was opened, and the same `strawq.json`.
"""

from __future__ import annotations

import contextlib
import errno
import os

from strawq.storage import layout
from strawq.storage.descriptors import OpenDirectory, identity
from strawq.storage.failure import Displaced

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_HEADER = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_HEADER_BYTES_MAX = 1 << 20
_DIRECTORY_MODE = 0o775


class Root:
    """The directory at `path`, from its first `open` on. Symbolic links in the path are the user's own and are
    followed. Without a lock, as the cache that uses it; two threads that open it at once find the same."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._header: bytes | None = None
        # Held open, so that the inode cannot be given to another directory meanwhile.
        self._held: OpenDirectory | None = None

    def open(self) -> OpenDirectory:
        """A descriptor of the directory. `Displaced` if the path leads to another one by now, or nowhere."""
        known = self._identity
        try:
            opened = OpenDirectory(os.open(self.path, _ROOT))
        except (FileNotFoundError, NotADirectoryError) as error:
            if known is None:
                raise
            raise self._displaced() from error
        found = opened.identity
        if known is None:
            self._header = _read_header(opened)
        elif (found != known or self._held is None) and not (
            found[1] == known[1] and _read_header(opened) == self._header
        ):
            raise self._displaced()
        self._identity, self._held = found, opened
        return opened

    def make(self) -> None:
        """Create the directory and its parents, durably, unless it was opened before."""
        if self._identity is None:
            _make(self.path)

    def is_here(self) -> bool:
        """Whether the path leads to the directory that was opened. Costs one `stat`."""
        if self._identity is None:
            return True
        try:
            return identity(os.stat(self.path)) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False

    def let_go(self) -> None:
        """Hold no descriptor, so that the mount can be taken down. What was opened is remembered."""
        self._held = None

    def _displaced(self) -> Displaced:
        return Displaced(
            errno.ENXIO,
            f"{self.path} is not the directory any more that this process has opened: it was moved, replaced or "
            "removed, or its mount is gone; put it back (or mount it), or start this process again where the pool "
            "is now",
            self.path,
        )


def _read_header(directory: OpenDirectory) -> bytes | None:
    try:
        fd = os.open(layout.HEADER, _HEADER, dir_fd=directory.fd)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, _HEADER_BYTES_MAX)
    finally:
        os.close(fd)


def _make(path: str) -> None:
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, _DIRECTORY_MODE)
    fd = os.open(parent, _ROOT)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
