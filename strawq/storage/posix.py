"""The Files port on a POSIX mount: ext4, XFS, tmpfs, JuiceFS, NFS.

The rules it keeps:

- Every call works below a directory descriptor that was opened component by component with O_NOFOLLOW, so a symbolic
  link planted in the pool leads nowhere: the call fails with ENOTDIR or ELOOP. Anything that is not a regular file is
  refused before it is read.
- The descriptors are a bounded cache, for speed only. One whose path leads elsewhere by now, or whose mount
  went away (ESTALE, ENOTCONN, ...), is dropped and the path is walked again, so a remounted pool works without a
  restart.
- All of it happens in the directory that was opened first (`root`): once it is known it is never made again, and
  nothing is staged for a path that leads to another one. Of descriptors that are left from before, some could lead
  into the old directory and some into the new one.
- Data are flushed with fsync, not fdatasync: a staged file always grows from nothing, so fdatasync must write the
  inode too and saves nothing (measured on ext4 and JuiceFS: no difference), while fsync is the call that every FUSE
  and NFS server implements.
- A failed fsync is never repeated on the same file: the kernel reports a lost page once and calls the file clean
  afterwards. The staged file is thrown away instead.
- Calls that only look (read, size, names) and remove are tried once more after ESTALE or a lost mount. `stage` and
  `publish` are not: what they did is unknown.

Modes are 0o664 for files and 0o775 for directories, less the umask. Names that begin with a dot are not strawq's
(`.nfs*`, JuiceFS's `.config`) and are not listed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from strawq.storage.descriptors import (
    OpenDirectory,
    OpenFile,
    identity,
    made_ahead,
    read_into,
    write_all,
    write_head_last,
)
from strawq.storage.exclusive import Primitive, Step, link_exclusive, rename_exclusive
from strawq.storage.files import Buffer, LateHead
from strawq.storage.root import Root

_T = TypeVar("_T")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK does nothing to a regular file; it keeps a planted FIFO from blocking the open for ever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FILE_MODE = 0o664
_DIRECTORY_MODE = 0o775

_DIRECTORIES_OPEN_MAX = 128
_MKDIR_TRIES_MAX = 3
_READ_OPEN_SECONDS = 1.0

# The descriptor is useless from here on, whatever became of the call.
_MOUNT_LOST = frozenset({errno.ESTALE, errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.EIO, errno.EBADF})
# The whole mount is: held descriptors would only keep it from being taken down.
_CLIENT_LOST = frozenset({errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV})
_LINK_REFUSED = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_RENAME_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class PosixFiles:
    """The directory `root` as Files. `primitive` is the exclusive step of `publish`; where the file system refuses it
    (EPERM, EINVAL, ...) the other one is used from then on: both are exclusive against each other, so they may mix.

    `drafts` is the directory where `replace` writes before it renames; "" means beside the file, under a name with a
    dot. In a pool it is the staging directory, so that what a killed process leaves there is seen and collected."""

    def __init__(self, root: str | os.PathLike[str], primitive: Primitive = "link", drafts: str = "") -> None:
        self.root = os.path.abspath(os.fspath(root))
        self._root = Root(self.root)
        self.drafts = drafts
        self.primitive: Primitive = primitive
        self._directories: dict[str, OpenDirectory] = {}
        self._reading: OpenFile | None = None
        self._clock = itertools.count(1)
        self._token = secrets.token_hex(8)

    @property
    def keeps_staged(self) -> bool:
        """Whether the staged name is still there after `publish` (then the caller removes it when it has time)."""
        return self.primitive == "link"

    def close(self) -> None:
        """Let go of all descriptors (so that the mount can be taken down). The next call opens them again."""
        self._directories.clear()
        self._reading = None
        self._root.let_go()

    # The directory cache has no lock, so that a fork in the middle of another thread's call cannot leave one held.
    # Each step is a single dict operation; two threads that open one directory at once just open it twice.

    def _directory(self, path: str) -> OpenDirectory:
        found = self._directories.get(path)
        if found is None:
            found = self._open_directory(path)
        found.used = next(self._clock)
        return found

    def _open_directory(self, path: str) -> OpenDirectory:
        if path == "":
            opened = self._root.open()
        else:
            parent, _, name = path.rpartition("/")
            if name in ("", ".", "..") or path[0] == "/":
                raise ValueError(f"{path!r} is not a relative path below the pool")
            at = self._directory(parent)
            try:
                opened = OpenDirectory(os.open(name, _DIRECTORY, dir_fd=at.fd))
            except FileNotFoundError:
                if not self._is_dead(at, parent):
                    raise
                self._forget(parent)
                opened = OpenDirectory(os.open(name, _DIRECTORY, dir_fd=self._directory(parent).fd))
        if len(self._directories) >= _DIRECTORIES_OPEN_MAX:
            oldest = min(list(self._directories.items()), key=lambda item: item[1].used)
            self._directories.pop(oldest[0], None)
        self._directories[path] = opened
        return opened

    def _forget(self, path: str) -> None:
        """Drop the directory, all that is below it, and all above it: any of them may be the removed one."""
        for known in list(self._directories):
            if path in ("", known) or known == "" or known.startswith(path + "/") or path.startswith(known + "/"):
                self._directories.pop(known, None)

    def _is_dead(self, directory: OpenDirectory, path: str) -> bool:
        """Whether the path leads elsewhere by now. The link count does not tell: JuiceFS keeps a removed directory in
        its trash, where it has one, and looks up nothing in it."""
        try:
            return identity(os.stat(f"{self.root}/{path}")) != directory.identity
        except OSError:
            return True

    def _in(self, path: str, call: Callable[[int, str], _T], *, again: bool = False) -> _T:
        """Run `call(directory fd, name)` for the path. A directory that was removed under us is looked up anew;
        `again` says that the call may also be repeated after the mount was lost."""
        parent, _, name = path.rpartition("/")
        if path[:1] == "/":
            raise ValueError(f"{path!r} is not a relative path below the pool")
        cached = parent in self._directories
        try:
            directory = self._directory(parent)
            try:
                return call(directory.fd, name)
            except FileNotFoundError:
                if not cached or not self._is_dead(directory, parent):
                    raise
        except OSError as error:
            if error.errno not in _MOUNT_LOST:
                raise
            self._lose(error)
            if not again:
                raise
        self._forget(parent)
        return call(self._directory(parent).fd, name)

    def _require_root(self) -> None:
        """Before anything is written: `Displaced` if the path does not lead to the directory that was opened. If it
        does through another mount by now, that is used from here on."""
        try:
            if self._root.is_here():
                return
        except OSError as error:
            self._lose(error)
            raise
        self._directories.clear()
        self._directory("")

    def _lose(self, error: OSError) -> None:
        self._directories.clear()
        if error.errno in _CLIENT_LOST:
            self._root.let_go()

    def stage(self, path: str, buffers: Sequence[Buffer]) -> int:
        self._require_root()
        fd = self._in(path, lambda at, name: os.open(name, _NEW, _FILE_MODE, dir_fd=at))
        try:
            try:
                if isinstance(buffers, LateHead) and os.major(os.fstat(fd).st_dev):
                    # On a disk of our own. A network mount would rather have one write from start to end.
                    size = write_head_last(fd, buffers)
                else:
                    size = write_all(fd, made_ahead(buffers, 0) if isinstance(buffers, LateHead) else buffers)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            # The name was ours alone and never published. If it cannot go either, it is collected as staging; the
            # first error counts.
            with contextlib.suppress(OSError):
                self.remove(path)
            raise
        return size

    def publish(self, staged: str, path: str) -> None:
        step, other, refused = self._steps()
        try:
            self._two(staged, path, step)
        except OSError as error:
            if error.errno not in refused:
                raise
            self._two(staged, path, other)
            self.primitive = "rename" if self.primitive == "link" else "link"

    def _steps(
        self,
    ) -> tuple[Callable[[int, str, int, str], None], Callable[[int, str, int, str], None], frozenset[int]]:
        if self.primitive == "link":
            return link_exclusive, rename_exclusive, _LINK_REFUSED
        return rename_exclusive, link_exclusive, _RENAME_REFUSED

    def _two(self, source: str, target: str, step: Step) -> None:
        source_parent, _, source_name = source.rpartition("/")

        def call(at: int, name: str) -> None:
            # `directory` holds the descriptor open while the step runs.
            directory = self._directory(source_parent)
            try:
                step(directory.fd, source_name, at, name)
            except FileNotFoundError:
                if not self._is_dead(directory, source_parent):
                    raise
                self._forget(source_parent)
                directory = self._directory(source_parent)
                step(directory.fd, source_name, at, name)

        self._in(target, call)

    def replace(self, path: str, data: Buffer) -> None:
        self._require_root()
        try:
            self._replace(path, data)
        except (FileNotFoundError, FileExistsError):
            # A process that stands still in between may find its draft collected; and a draft's name is taken only by
            # a call of ours whose reply was lost.
            self._replace(path, data)

    def _replace(self, path: str, data: Buffer) -> None:
        parent, _, name = path.rpartition("/")
        number = f"{os.getpid()}.{next(self._clock)}"
        if self.drafts:
            draft = f"{self.drafts}/{self._token}-{number}"
        else:
            draft = f"{parent}/.{name}.{self._token}.{number}".lstrip("/")
        fd = self._in(draft, lambda at, name: os.open(name, _NEW, _FILE_MODE, dir_fd=at), again=True)
        try:
            try:
                write_all(fd, (data,))
            finally:
                os.close(fd)
            self._two(draft, path, _rename)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(draft)
            raise

    def read(self, path: str) -> bytes:
        def call(at: int, name: str) -> bytes:
            fd = os.open(name, _READ, dir_fd=at)
            try:
                size = _regular_size(os.fstat(fd), path)
                data = os.read(fd, size)
                if len(data) == size:
                    return data
                pieces = [data]
                while data:
                    data = os.read(fd, size)
                    pieces.append(data)
                return b"".join(pieces)
            finally:
                os.close(fd)

        return self._in(path, call, again=True)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        # Consecutive reads of one file share a descriptor for a second, no longer than a removed file may be seen: an
        # open costs a network mount as much as reading a megabyte.
        opened = self._reading
        if opened is not None and opened.path == path and time.monotonic() < opened.until:
            try:
                if os.fstat(opened.fd).st_nlink:
                    return read_into(opened.fd, offset, buffer)
            except OSError as error:
                if error.errno not in _MOUNT_LOST:
                    raise
            self._reading = None

        def call(at: int, name: str) -> int:
            found = OpenFile(path, os.open(name, _READ, dir_fd=at), time.monotonic() + _READ_OPEN_SECONDS)
            _regular_size(os.fstat(found.fd), path)
            count = read_into(found.fd, offset, buffer)
            self._reading = found
            return count

        return self._in(path, call, again=True)

    def size(self, path: str) -> int:
        return self._in(
            path, lambda at, name: _regular_size(os.stat(name, dir_fd=at, follow_symlinks=False), path), again=True
        )

    def names(self, path: str) -> list[str]:
        # A descriptor's read position is shared by all its users, so a listing opens the directory for itself.
        def call(at: int, _: str) -> list[str]:
            fd = os.open(".", _DIRECTORY, dir_fd=at)
            try:
                found = [name for name in os.listdir(fd) if not name.startswith(".")]
                if not found:
                    # A removed directory looks just like an empty one: only the path can tell, and `_in` asks it.
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                return sorted(found)
            finally:
                os.close(fd)

        try:
            return self._in(path + "/" if path else "", call, again=True)
        except FileNotFoundError:
            return []

    def remove(self, path: str) -> bool:
        try:
            self._in(path, lambda at, name: os.unlink(name, dir_fd=at), again=True)
        except FileNotFoundError:
            return False
        return True

    def make_directory(self, path: str) -> None:
        if path == "":
            self._root.make()
            self._require_root()
            self._directory("").durable = True
            return
        if not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise ValueError(f"{path!r} is not a relative path below the pool")
        known = self._directories.get(path)
        if known is not None and known.durable and not self._is_dead(known, path):
            return
        parent = path.rpartition("/")[0]
        for tries_left in reversed(range(_MKDIR_TRIES_MAX)):
            self.make_directory(parent)
            try:
                with contextlib.suppress(FileExistsError):
                    self._in(path, lambda at, name: os.mkdir(name, _DIRECTORY_MODE, dir_fd=at), again=True)
                # Also when another process made it: its name may not be durable yet.
                self.sync_directory(parent)
                self._directories.pop(path, None)
                self._directory(path).durable = True
                return
            except FileNotFoundError:
                # A parent was removed meanwhile, or EEXIST came from a stale entry of a removed directory.
                self._forget(path)
                if not tries_left:
                    raise

    def remove_directory(self, path: str) -> bool:
        if path == "":
            raise ValueError("the pool's own directory is not removed through the port")
        try:
            self._in(path, lambda at, name: os.rmdir(name, dir_fd=at), again=True)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                return False
            raise
        finally:
            self._forget(path)
        return True

    def sync_directory(self, path: str) -> None:
        self._in(path + "/" if path else "", lambda at, _: os.fsync(at))


def _rename(source_at: int, source: str, target_at: int, target: str) -> None:
    os.rename(source, target, src_dir_fd=source_at, dst_dir_fd=target_at)


def _regular_size(found: os.stat_result, path: str) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.ELOOP if stat.S_ISLNK(found.st_mode) else errno.EISDIR, "not a regular file", path)
    return found.st_size
