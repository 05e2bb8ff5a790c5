"""The two system calls that give a file a name only if nobody has it: the one atomic step that a commit rests on.

Both raise `FileExistsError` when the name is taken, by anything, and exclude each other.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

Primitive = Literal["link", "rename"]

Step = Callable[[int, str, int, str], None]
"""(source directory fd, source name, target directory fd, target name)"""

_RENAME_NOREPLACE = 1


def _load_renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int
    call: Callable[[int, bytes, int, bytes, int], int] = function
    return call


_renameat2 = _load_renameat2()


def rename_exclusive(source_fd: int, source: str, target_fd: int, target: str) -> None:
    """`renameat2(RENAME_NOREPLACE)`: move the name only if the target is free, else `FileExistsError`."""
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, "this C library has no renameat2", target)
    if _renameat2(source_fd, os.fsencode(source), target_fd, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), source, None, target)


def link_exclusive(source_fd: int, source: str, target_fd: int, target: str) -> None:
    """`linkat`: give the file a second name if that is free, else `FileExistsError`."""
    os.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)


def race(step: Step, fds: list[int], number: int) -> list[int]:
    """In a thread for each directory descriptor, give `s<number>.<thread>` the name `t<number>`, all at once.

    Returns the errno of each, 0 for success. One 0 and EEXIST for all others is what exclusive means."""
    barrier = threading.Barrier(len(fds))

    def run(racer: int) -> int:
        barrier.wait()
        try:
            step(fds[racer], f"s{number}.{racer}", fds[racer], f"t{number}")
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    with ThreadPoolExecutor(len(fds)) as pool:
        return list(pool.map(run, range(len(fds))))
