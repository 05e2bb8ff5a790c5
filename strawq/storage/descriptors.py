"""Open files and directories that close themselves when nobody uses them any more, and how many bytes go through
one."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from strawq.storage.files import Buffer, LateHead

_BUFFERS_PER_WRITE_MAX = 1024  # IOV_MAX on Linux
_BYTES_PER_WRITE = 1 << 20
_WRITEBACK_BYTES = 4 << 20
_MADE_AHEAD = 2
_START_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE

_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def identity(found: os.stat_result) -> tuple[int, int]:
    """What makes it the same directory: its file system and its number in there."""
    return found.st_dev, found.st_ino


class OpenDirectory:
    """An open directory. It closes itself when the cache and the last call that uses it have let go."""

    __slots__ = ("durable", "fd", "identity", "used")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.identity = identity(os.fstat(fd))
        self.used = 0
        self.durable = False  # its own name is known to be durable in its parent

    def __del__(self) -> None:
        os.close(self.fd)


class OpenFile:
    """A file that was read a moment ago, and may be read through the same descriptor until the monotonic time
    `until`."""

    __slots__ = ("fd", "path", "until")

    def __init__(self, path: str, fd: int, until: float) -> None:
        self.path = path
        self.fd = fd
        self.until = until

    def __del__(self) -> None:
        os.close(self.fd)


def read_into(fd: int, offset: int, buffer: memoryview) -> int:
    """Fill the buffer from `offset`; return the bytes read, fewer only at the end of the file."""
    view = buffer.cast("B")
    done = 0
    while done < view.nbytes:
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_all(fd: int, buffers: Iterable[Buffer], *, start_writeback: bool = False) -> int:
    """Write all bytes of the buffers in order, from the descriptor's position on; return their number. A short write
    is continued, so the error behind it shows. Buffers that are made when asked for are let go as soon as they are
    written.

    `start_writeback` has the disk begin while the rest is being made. It promises nothing: fsync does."""
    total = waiting = 0
    started = at = os.lseek(fd, 0, os.SEEK_CUR) if start_writeback else 0
    views: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if not view.nbytes:
            continue
        views.append(view)
        waiting += view.nbytes
        if waiting >= _BYTES_PER_WRITE or len(views) == _BUFFERS_PER_WRITE_MAX:
            total += _write(fd, views)
            views, waiting = [], 0
            if start_writeback:
                started = _write_back(fd, started, at + total)
    return total + (_write(fd, views) if views else 0)


def _write_back(fd: int, start: int, end: int) -> int:
    """Start writing back the file from `start` up to the last whole block before `end`; return where that ends. A page
    that is still to be added to must not be on its way to the disk: the next write would wait for it."""
    end -= end % _WRITEBACK_BYTES
    if end > start and _sync_file_range is not None:
        _sync_file_range(fd, start, end - start, _START_WRITEBACK)
        return end
    return start


def _write(fd: int, views: list[memoryview]) -> int:
    total = sum(view.nbytes for view in views)
    first = 0
    while first < len(views):
        written = os.writev(fd, views[first:])
        while first < len(views) and written >= views[first].nbytes:
            written -= views[first].nbytes
            first += 1
        if written:
            views[first] = views[first][written:]
    return total


def write_head_last(fd: int, buffers: LateHead) -> int:
    """Write the buffers into the empty file `fd`, the first of them at the end; return the number of bytes."""
    os.lseek(fd, buffers.late_bytes, os.SEEK_SET)
    total = write_all(fd, made_ahead(buffers, 1), start_writeback=True)
    os.lseek(fd, 0, os.SEEK_SET)
    return total + write_all(fd, (buffers[0],))


def made_ahead(buffers: LateHead, first: int) -> Iterator[Buffer]:
    """The buffers from `first` on, in order; while one is being written, a thread makes the next."""
    if len(buffers) - first < 2 * _MADE_AHEAD:
        yield from (buffers[at] for at in range(first, len(buffers)))
        return
    with ThreadPoolExecutor(1, "strawq-pack") as maker:
        coming: deque[Future[Buffer]] = deque()
        for at in range(first, len(buffers)):
            coming.append(maker.submit(buffers.__getitem__, at))
            if len(coming) > _MADE_AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
