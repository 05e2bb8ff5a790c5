"""Packs: the tensors of one publication in one plain safetensors file.

The header is safetensors' own JSON. Its `__metadata__` holds, for each tensor, the dtype it was given in, the rows
per chunk and the BLAKE3 of every chunk; the file's name is the BLAKE3 of the header. So the name vouches for the
header and the header for every byte behind it: each payload byte is hashed once, from memory, and some rows can be
verified without the rest.

Integers are stored in the narrowest type that holds all their values; nothing else is changed. Every tensor starts at
a multiple of 64 bytes; safetensors forbids gaps, so short tensors named `pad/...` fill them.

A chunk is as many whole rows as fit 256 KiB. Larger chunks make a slice read more than it needs (1,000 rows of R3 are
0.4 to 1.5 MB), and no longer stay in a core's L2 cache between copy and hash; smaller ones cost header bytes and
calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from strawq.errors import BadInput, Damaged, FormatUnsupported
from strawq.limits import CHUNK_BYTES, PACK_HEADER_BYTES
from strawq.rows import STORABLE, Rows, bits, dtype_name, shape_of

Array = npt.NDArray[Any]

PACK_VERSION = "1"
ALIGNMENT_BYTES = 64
_CHUNKS_PER_WRITE = 4
"""In one buffer handed to the file system: it stays in a core's cache between narrowing, hashing and writing."""
_DIGEST_HEX = 64
_PAD = "pad/"

_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_NAMES = {code: name for name, code in _SAFETENSORS.items()}


class HeaderTooLong(BadInput):
    """The tensors do not fit one pack, whose header every reader must accept; fewer of them may."""


class PackPlan:
    """A pack that is laid out and ready to be staged: `files.stage(path, plan.buffers)`.

    `buffers` is the file in order: the header, then views of the arrays that were given, or narrowed copies that are
    made when they are asked for, so a plan holds no second copy. What is handed out is hashed on the way, once;
    `header` and `digest` (hex, the file's name) hash what has not been. The arrays must not change before that.
    `bytes` is the size of the file."""

    def __init__(self, sources: list[_Source], entries: dict[str, Any]) -> None:
        self._sources, self._entries = sources, entries
        self._header = b""
        text = self._text()
        if len(text) > PACK_HEADER_BYTES:
            raise HeaderTooLong(
                f"{len(sources)} tensors make a header of {len(text)} bytes, over {PACK_HEADER_BYTES}: hand in fewer "
                "or larger tensors with one group"
            )
        self.header_bytes = 8 + len(text)
        self.bytes = self.header_bytes + sum(source.size for source in sources)
        self.buffers = _Buffers(self, sources)
        self.staged = ""
        """Where the bytes lie already, if they have been staged and nobody has published that file yet."""

    def _text(self) -> bytes:
        metadata = self._entries["__metadata__"]
        for source in self._sources:
            metadata[source.key] = f"{source.given} {source.chunk_rows} {source.digests()}"
        text = msgspec.json.encode(self._entries)
        return text + b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)

    @property
    def header(self) -> bytes:
        if not self._header:
            for source in self._sources:
                source.hash_rest()
            text = self._text()
            self._header = len(text).to_bytes(8, "little") + text
        return self._header

    @property
    def digest(self) -> str:
        return blake3(self.header).hexdigest()


class _Source:
    """One tensor to be stored: its rows, and what they become."""

    __slots__ = ("_hashed", "_rows", "chunk_rows", "given", "key", "row_bytes", "rows", "shape", "stored")

    def __init__(self, key: str, rows: Rows) -> None:
        self.key, self._rows, self.given, self.shape = key, rows, dtype_name(rows), shape_of(rows)
        self.rows = self.shape[0] if self.shape else 1
        inner = math.prod(self.shape[1:])
        step = max(1, CHUNK_BYTES // max(1, inner * STORABLE[self.given].itemsize))
        self.stored = self._narrowest(step)
        self.row_bytes = inner * STORABLE[self.stored].itemsize
        self.chunk_rows = max(1, CHUNK_BYTES // max(1, self.row_bytes))
        self._hashed: list[str] = []

    @property
    def size(self) -> int:
        return self.rows * self.row_bytes

    def _narrowest(self, step: int) -> str:
        dtype = np.dtype(self.given) if self.given != "bfloat16" else STORABLE["float16"]
        if dtype.kind not in "iu" or dtype.itemsize == 1 or 0 in self.shape:
            return self.given
        # The bits of all values together bound them from above; a negative one sets the sign.
        union = 0
        for start in range(0, self.rows, step):
            union |= int(np.bitwise_or.reduce(self._piece(start, start + step), axis=None))
        low = 0 if union >= 0 else min(int(self._piece(a, a + step).min()) for a in range(0, self.rows, step))
        high = union if union >= 0 else max(int(self._piece(a, a + step).max()) for a in range(0, self.rows, step))
        fitting = ("uint8", "uint16", "uint32") if low >= 0 else ("int8", "int16", "int32")
        for name in fitting:
            limits = np.iinfo(name)
            if limits.min <= low and high <= limits.max and STORABLE[name].itemsize < dtype.itemsize:
                return name
        return self.given

    def _piece(self, start: int, stop: int) -> Array:
        return bits(self._rows, start, min(stop, self.rows))

    def data(self, start: int, stop: int) -> memoryview:
        """The stored bytes of rows `[start, stop)`: a view if they are in memory like that already."""
        piece = np.ascontiguousarray(self._piece(start, stop), STORABLE[self.stored])
        return piece.reshape(-1).view(np.uint8).data

    def piece(self, start: int, stop: int) -> memoryview:
        """As `data`, whose rows begin with a chunk. Its chunks are hashed now if it is their turn."""
        data = self.data(start, stop)
        if start == len(self._hashed) * self.chunk_rows:
            step = self.chunk_rows * self.row_bytes
            self._hashed += [blake3(data[at : at + step]).hexdigest() for at in range(0, len(data), step)]
        return data

    def hash_rest(self) -> None:
        for start in range(len(self._hashed) * self.chunk_rows, self.rows if self.size else 0, self.chunk_rows):
            self.piece(start, min(start + self.chunk_rows, self.rows))

    def digests(self) -> str:
        """The chunks' digests, one after the other; zeros for what has not been hashed."""
        chunks = -(-self.rows // self.chunk_rows) if self.size else 0
        return "".join(self._hashed) + "0" * (_DIGEST_HEX * (chunks - len(self._hashed)))


class _Buffers(Sequence[memoryview]):
    """The file's bytes in order, made piece by piece when asked for.

    `late_bytes` is the size of the first of them, the header: asked for last, it costs nothing more, for the others
    were hashed on their way out."""

    def __init__(self, plan: PackPlan, sources: Sequence[_Source]) -> None:
        self._plan = plan
        self.late_bytes = plan.header_bytes
        self._pieces: list[tuple[_Source, int, int]] = []
        for source in sources:
            step = _CHUNKS_PER_WRITE * source.chunk_rows
            if source.size:
                self._pieces += [(source, at, min(at + step, source.rows)) for at in range(0, source.rows, step)]

    def __len__(self) -> int:
        return len(self._pieces) + 1

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        if index in (0, -len(self)):
            return memoryview(self._plan.header)
        source, start, stop = self._pieces[index - 1 if index > 0 else index]
        return source.piece(start, stop)


def plan_pack(tensors: Iterable[tuple[str, Rows]]) -> PackPlan:
    """Lay out the tensors, in order, under their keys. Looks at integers to narrow them; hashes and writes nothing.

    Raises `BadInput` for a dtype that cannot be stored, a key given twice or kept for padding, `HeaderTooLong` for a
    header over the limit."""
    sources: list[_Source] = []
    entries: dict[str, Any] = {"__metadata__": {}}
    metadata: dict[str, str] = entries["__metadata__"]
    metadata["strawq.kind"], metadata["strawq.version"] = "tensors", PACK_VERSION
    end = 0
    for key, rows in tensors:
        if key in entries or key in metadata or key.startswith(_PAD) or not key:
            raise BadInput(f"tensor key {key!r} is empty, reserved, or given twice")
        if gap := -end % ALIGNMENT_BYTES:
            end = _lay_out(_Source(f"{_PAD}{len(sources)}", np.zeros(gap, np.uint8)), sources, entries, end)
        end = _lay_out(_Source(key, rows), sources, entries, end)
    return PackPlan(sources, entries)


def _lay_out(source: _Source, sources: list[_Source], entries: dict[str, Any], start: int) -> int:
    end = start + source.size
    sources.append(source)
    entries[source.key] = {
        "dtype": _SAFETENSORS[source.stored],
        "shape": list(source.shape),
        "data_offsets": [start, end],
    }
    return end


class PackedTensor(NamedTuple):
    """Where one tensor lies: `offset` in the file, its shape, the dtype given and stored, and a digest per chunk of
    rows."""

    offset: int
    shape: tuple[int, ...]
    given: str
    stored: str
    chunk_rows: int
    digests: str

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * STORABLE[self.stored].itemsize

    def chunks(self, start: int, stop: int) -> range:
        """The numbers of the chunks that hold rows `[start, stop)`."""
        return range(start // self.chunk_rows, -(-stop // self.chunk_rows))

    def is_chunk(self, number: int, data: memoryview) -> bool:
        """Whether `data` is what was published as chunk `number`."""
        return blake3(data).hexdigest() == self.digests[number * _DIGEST_HEX : (number + 1) * _DIGEST_HEX]


class PackHeader:
    """A verified header. Finding a tensor costs one lookup; entries are parsed when they are asked for."""

    __slots__ = ("_entries", "_metadata", "bytes", "path", "size")

    def __init__(self, path: str, data: bytes | memoryview) -> None:
        self.path, self.bytes = path, len(data)
        try:
            entries = msgspec.json.decode(data[8:], type=dict[str, Any])
            metadata = entries.pop("__metadata__", {})
            ends = [entry["data_offsets"][1] for entry in entries.values()]
        except (msgspec.MsgspecError, KeyError, IndexError, TypeError, ValueError) as error:
            raise Damaged(f"{path} has no safetensors header: {error}") from error
        if not isinstance(metadata, dict) or metadata.get("strawq.kind") != "tensors":
            raise Damaged(f"{path} is a safetensors file, but not one of strawq's packs")
        if metadata.get("strawq.version") != PACK_VERSION:
            raise FormatUnsupported(
                f"{path}: pack of version {metadata.get('strawq.version')}, this strawq reads {PACK_VERSION}"
            )
        self._entries, self._metadata = entries, metadata
        self.size: int = self.bytes + max(ends, default=0)

    @property
    def keys(self) -> list[str]:
        return list(self._entries)

    def tensor(self, key: str) -> PackedTensor:
        """`Damaged` if the pack has no such tensor."""
        try:
            entry, (given, chunk_rows, digests) = self._entries[key], self._metadata[key].split(" ")
            start, end = entry["data_offsets"]
            found = PackedTensor(
                self.bytes + start, tuple(entry["shape"]), given, _NAMES[entry["dtype"]], int(chunk_rows), digests
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{self.path} has no tensor {key!r}") from error
        chunks = len(found.chunks(0, found.rows)) if found.row_bytes else 0
        if end - start != found.rows * found.row_bytes or len(digests) != chunks * _DIGEST_HEX or given not in STORABLE:
            raise Damaged(f"{self.path}: the entry of tensor {key!r} contradicts itself")
        return found
