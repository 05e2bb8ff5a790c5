"""Memory of arrays that nobody holds any more, kept for the next ones.

Memory fresh from the kernel is zeroed, page by page, at first touch: for rows that come out of the page cache this
costs more than reading, hashing and widening them together. So large arrays are made in mappings that come back here
when the last view of them is gone, up to a bound. What is in a spare is whatever was there before; only arrays that are
about to be filled whole are made in one.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SMALLEST_BYTES = 1 << 20
"""Smaller arrays are left to the allocator, which keeps its own."""


class _Loan(np.ndarray[Any, np.dtype[np.uint8]]):
    """A mapping as an array. NumPy makes it the base of every view (for a plain array it would skip it), so it lives
    for exactly as long as the last of them."""


class Spares:
    """Keeps up to `keep_bytes` of mappings between two uses. Safe from many threads."""

    def __init__(self, keep_bytes: int) -> None:
        self.keep_bytes = keep_bytes
        self._free: dict[int, list[mmap.mmap]] = {}
        self._held = 0
        self._lock = threading.Lock()
        # A finaliser may run anywhere, also inside our own lock: it only appends here.
        self._returned: deque[mmap.mmap] = deque()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """As `numpy.empty`: an array of that shape that owns its memory alone, with anything in it."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < SMALLEST_BYTES:
            return np.empty(shape, dtype)
        memory = self._take(_rounded(size))
        loan = _Loan((len(memory),), np.uint8, buffer=memory)
        weakref.finalize(loan, self._returned.append, memory).atexit = False
        return np.ndarray(shape, dtype, buffer=loan)

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            while self._returned:
                memory = self._returned.popleft()
                if self._held + len(memory) <= self.keep_bytes:
                    self._free.setdefault(len(memory), []).append(memory)
                    self._held += len(memory)
            alike = self._free.get(size)
            if alike:
                self._held -= size
                return alike.pop()
            self._make_room(size)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _make_room(self, size: int) -> None:
        """Let spares of other sizes go when what is needed now would not fit beside them: sizes change with time."""
        for other in list(self._free):
            while self._held + size > self.keep_bytes and self._free[other]:
                self._free[other].pop()
                self._held -= other
            if not self._free[other]:
                del self._free[other]


def _rounded(size: int) -> int:
    """The size of the mapping: at most an eighth more, so that arrays of about one size share spares."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
