"""Lazy, verified rows out of packs.

The rule: no byte of a pack reaches a caller before its BLAKE3 was compared, and no more chunks are read than the rows
that were asked for lie in. Files are read into our own memory (`Files.read_into`), never mapped, so a truncated file
is an error and not a SIGBUS. An answer of the file system that looks wrong (absent, short, other bytes) is asked for
again after a moment before it is believed: shared mounts show new files late. Nothing wrong is remembered."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from strawq.errors import Damaged, Gone, StorageFailed
from strawq.limits import (
    CHUNK_BYTES,
    PACK_HEADER_BYTES,
    PACK_HEADER_CACHE_BYTES,
    READ_AGAIN_SECONDS,
    READ_SPARE_BYTES,
)
from strawq.rows import STORABLE, Rows, span, torch_rows, values
from strawq.storage.clock import Clock, SystemClock
from strawq.storage.files import Files
from strawq.storage.packs import PackedTensor, PackHeader
from strawq.storage.spares import Spares

if TYPE_CHECKING:
    from strawq.storage.records import TensorRef

Array = npt.NDArray[Any]
Answer = TypeVar("Answer")

_HEADER_GUESS_BYTES = 16 << 10
_READ_BYTES = 4 * CHUNK_BYTES
"""One read: large beside the call that makes it, and small enough to stay in a core's cache between reading, hashing
and widening."""
_DECODED = 4
"""A header in memory by its bytes on disk, measured: parsed entries are larger than their text."""
_READERS = min(8, 4 * (os.cpu_count() or 1))
"""Threads that read one large tensor, the caller's own among them: reading, hashing and widening all let go of the
interpreter. A network mount answers several requests at once, so more than there are cores help."""


class PackReader:
    """Reads packs of one pool. Safe from many threads. Keeps verified headers, about `cache_bytes` of memory.

    `again` are the pauses, in seconds, after which a wrong answer is asked for again."""

    def __init__(
        self,
        files: Files,
        *,
        clock: Clock | None = None,
        again: Sequence[float] = READ_AGAIN_SECONDS,
        cache_bytes: int = PACK_HEADER_CACHE_BYTES,
    ) -> None:
        self._files, self._again, self._cache_bytes = files, tuple(again), cache_bytes
        self._clock = clock or SystemClock()
        self._headers: OrderedDict[tuple[str, str], PackHeader] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()
        self.spares = Spares(READ_SPARE_BYTES)
        self._threads: ThreadPoolExecutor | None = None
        self._threads_of = 0

    def header(self, path: str, digest: str) -> PackHeader:
        """The verified header of the pack at `path` whose name says `digest`. `Gone`, `Damaged`, `StorageFailed`."""
        with self._lock:
            known = self._headers.get((path, digest))
            if known is not None:
                self._headers.move_to_end((path, digest))
                return known
        header = self._patiently(lambda: self._read_header(path, digest))
        with self._lock:
            if self._headers.setdefault((path, digest), header) is header:
                self._held += _DECODED * header.bytes
            while self._held > self._cache_bytes and len(self._headers) > 1:
                self._held -= _DECODED * self._headers.popitem(last=False)[1].bytes
        return header

    def rows(self, path: str, ref: TensorRef, label: str = "") -> StoredRows:
        """The rows that a record refers to, in the pack at `path`, unread. `label` names the record in messages."""
        return StoredRows(self, path, ref.pack, ref.key, ref.shape, ref.dtype, label)

    def verify(self, path: str, digest: str) -> int:
        """Check every byte of a pack, header, padding and size included; return its size in bytes. `Damaged`,
        `Gone`."""
        header = self._patiently(lambda: self._read_header(path, digest))
        found = self._patiently(lambda: self._size(path))
        if found != header.size:
            raise Damaged(f"{path} has {found} bytes, its header says {header.size}")
        for key in header.keys:
            tensor = header.tensor(key)
            rows = StoredRows(self, path, digest, key, tensor.shape, tensor.given)
            for start, stop in rows.blocks(0, tensor.rows):
                self.read_chunks(rows, start, stop, np.empty((stop - start) * tensor.row_bytes, np.uint8))
        return found

    def read_chunks(self, rows: StoredRows, start: int, stop: int, out: Array) -> None:
        """Read rows `[start, stop)` of the tensor, whole chunks, into the flat uint8 array `out` and verify them."""
        if out.size:
            self._patiently(lambda: self._read_chunks(rows, start, stop, out))

    def in_parallel(self, work: Callable[[Iterator[tuple[int, int]]], None], blocks: list[tuple[int, int]]) -> None:
        """Run `work` on shares of `blocks` in several threads, this one among them; returns when all are done. Each
        share is an iterator; the first error of any of them is raised."""
        shared = iter(blocks)  # `next` on a list's iterator is one step of the interpreter: safe to share
        helpers = min(_READERS, len(blocks)) - 1
        if helpers < 1:
            work(shared)
            return
        with self._lock:
            if self._threads is None or self._threads_of != os.getpid():  # a fork leaves its parent's threads behind
                self._threads, self._threads_of = ThreadPoolExecutor(_READERS, "strawq-read"), os.getpid()
            waiting = [self._threads.submit(work, shared) for _ in range(helpers)]
        try:
            work(shared)
        finally:
            for _ in shared:  # after an error here, leave the others nothing to do
                pass
            failures = [future.exception() for future in waiting if not future.cancel()]
        for failure in failures:
            if failure is not None:
                raise failure

    def _read_chunks(self, rows: StoredRows, start: int, stop: int, out: Array) -> None:
        tensor, view = rows.tensor, out.data
        got = self._read(rows.path, tensor.offset + start * tensor.row_bytes, view)
        if got != len(view):
            raise Damaged(
                f"{rows.what(start, stop)}: the file ends {len(view) - got} bytes early; restore it or drop the group"
            )
        step = tensor.chunk_rows * tensor.row_bytes
        for at, number in enumerate(tensor.chunks(start, stop)):
            if not tensor.is_chunk(number, view[at * step : (at + 1) * step]):
                first = number * tensor.chunk_rows
                last = min(first + tensor.chunk_rows, tensor.rows)
                raise Damaged(
                    f"{rows.what(first, last)}: not the bytes that were published; restore it or drop the group"
                )

    def _read_header(self, path: str, digest: str) -> PackHeader:
        data = bytearray(_HEADER_GUESS_BYTES)
        got = self._read(path, 0, memoryview(data))
        length = 8 + int.from_bytes(data[:8], "little")
        if got < 8 or length > PACK_HEADER_BYTES + 8:
            raise Damaged(f"{path} is not a pack: {got} bytes read, header of {length} bytes claimed")
        if length > got == len(data):
            data += bytearray(length - got)
            got += self._read(path, got, memoryview(data)[got:])
        if length > got or blake3(memoryview(data)[:length]).hexdigest() != digest:
            raise Damaged(f"{path}: the header is not the one that was published (truncated, changed or another file)")
        return PackHeader(path, memoryview(data)[:length])

    def _size(self, path: str) -> int:
        try:
            return self._files.size(path)
        except FileNotFoundError as error:
            raise Gone(f"pack {path} is not there: removed by garbage collection or by hand") from error
        except OSError as error:
            raise StorageFailed(f"pack {path} cannot be read: {error}") from error

    def _read(self, path: str, offset: int, buffer: memoryview) -> int:
        try:
            return self._files.read_into(path, offset, buffer)
        except FileNotFoundError as error:
            raise Gone(f"pack {path} is not there: removed by garbage collection or by hand") from error
        except OSError as error:
            raise StorageFailed(f"pack {path} cannot be read: {error}") from error

    def _patiently(self, attempt: Callable[[], Answer]) -> Answer:
        for pause in self._again:
            try:
                return attempt()
            except (Damaged, Gone):
                self._clock.sleep(pause)
        return attempt()


class StoredRows:
    """Rows `[first, first + len)` of one tensor in a pack, read when asked for.

    `rows[a:b]` reads and verifies the chunks in which those rows lie, and gives a NumPy array in the dtype that was
    given (bfloat16 as float32); `rows.torch(a, b)` gives a torch tensor, bfloat16 included. `Damaged` and `Gone` name
    file and record."""

    __slots__ = ("_count", "_first", "_reader", "_shape", "_tensor", "digest", "dtype", "key", "label", "path")

    def __init__(
        self,
        reader: PackReader,
        path: str,
        digest: str,
        key: str,
        shape: tuple[int, ...],
        dtype: str,
        label: str = "",
    ) -> None:
        self._reader, self.path, self.digest, self.key, self.label = reader, path, digest, key, label
        self._shape, self.dtype = shape, dtype
        self._first, self._count = 0, shape[0] if shape else 1
        self._tensor: PackedTensor | None = None

    @property
    def tensor(self) -> PackedTensor:
        """What the pack's header says about the tensor. `Damaged` if that is not what the record says."""
        if self._tensor is None:
            tensor = self._reader.header(self.path, self.digest).tensor(self.key)
            if tensor.shape != self._shape or tensor.given != self.dtype:
                raise Damaged(
                    f"{self.what(0, self._count)}: the record says {self.dtype} {list(self._shape)}, "
                    f"the pack {tensor.given} {list(tensor.shape)}"
                )
            self._tensor = tensor
        return self._tensor

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"StoredRows({self.dtype}, {list(self.shape)}, {self.path}:{self.key})"

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape_for(self._count)

    def what(self, start: int, stop: int) -> str:
        label = f" ({self.label})" if self.label else ""
        return f"{self.path}: tensor {self.key}{label}, rows {start} to {stop}"

    def __getitem__(self, key: Any) -> Array:
        return values(self, *span(self, key))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        whole = values(self, 0, self._count)
        return whole if dtype is None else whole.astype(dtype)

    def torch(self, start: int = 0, stop: int | None = None) -> Any:
        """Rows `[start, stop)` as a torch tensor, without a copy of what was read."""
        return torch_rows(self, start, stop)

    def part(self, start: int, stop: int) -> Rows:
        start, stop, _ = slice(start, stop).indices(self._count)
        fewer = StoredRows(self._reader, self.path, self.digest, self.key, self._shape, self.dtype, self.label)
        fewer._first, fewer._count = self._first + start, max(stop - start, 0)
        return fewer

    def bits(self, start: int, stop: int) -> Array:
        """Rows `[start, stop)` as stored bits in the dtype that was given."""
        tensor, first, last = self.tensor, self._first + start, self._first + max(stop, start)
        if tensor.stored == tensor.given and first < last:
            low, high = self._aligned(first, last)
            if (high - low) * tensor.row_bytes <= _READ_BYTES:
                # One read, one check, and a view: cheaper than copying the rows out of their chunks.
                raw = np.empty((high - low) * tensor.row_bytes, np.uint8)
                self._reader.read_chunks(self, low, high, raw)
                return self._typed(raw, high - low)[first - low : last - low].reshape(self._shape_for(last - first))
        out = self._reader.spares.empty(self._shape_for(last - first), STORABLE[tensor.given])
        self.read_into(start, stop, out)
        return out

    def _shape_for(self, count: int) -> tuple[int, ...]:
        return (count, *self._shape[1:]) if self._shape else ()

    def read_into(self, start: int, stop: int, out: Array) -> None:
        """Read rows `[start, stop)` into the C-contiguous `out`, an array of their shape in the dtype that was
        given."""
        tensor, first, last = self.tensor, self._first + start, self._first + stop
        out = out.reshape(max(last - first, 0), *tensor.shape[1:])

        def read(blocks: Iterator[tuple[int, int]]) -> None:
            scratch = np.empty(0, np.uint8)
            for low, high in blocks:
                size = (high - low) * tensor.row_bytes
                if tensor.stored == tensor.given and first <= low and high <= last:
                    whole = out[low - first : high - first].reshape(-1).view(np.uint8)
                    self._reader.read_chunks(self, low, high, whole)
                    continue
                if scratch.size < size:
                    scratch = np.empty(size, np.uint8)
                self._reader.read_chunks(self, low, high, scratch[:size])
                begin, end = max(low, first), min(high, last)
                out[begin - first : end - first] = self._typed(scratch[:size], high - low)[begin - low : end - low]

        self._reader.in_parallel(read, self.blocks(first, last))

    def _aligned(self, start: int, stop: int) -> tuple[int, int]:
        rows = self.tensor.chunk_rows
        return start // rows * rows, min(-(-stop // rows) * rows, self.tensor.rows)

    def _typed(self, raw: Array, rows: int) -> Array:
        return raw.view(STORABLE[self.tensor.stored]).reshape(rows, *self.tensor.shape[1:])

    def blocks(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Runs of whole chunks that cover rows `[start, stop)`, each of about one read."""
        if start >= stop:
            return []
        low, high = self._aligned(start, stop)
        chunk = max(1, self.tensor.chunk_rows * self.tensor.row_bytes)
        step = max(1, _READ_BYTES // chunk) * self.tensor.chunk_rows
        return [(at, min(at + step, high)) for at in range(low, high, step)]
