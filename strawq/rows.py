"""Arrays whose first axis runs over tokens, wherever they are: in NumPy, in torch, in several pieces, or still in a
pack.

The rule: nothing here copies or reads more rows than it is asked for, and no value changes on the way. NumPy has no
bfloat16; where one is asked for as NumPy it comes as float32, which holds every bfloat16 exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from strawq.errors import BadInput, Misaligned

Array = npt.NDArray[Any]

STORABLE = {
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "uint16": np.dtype("<u2"),
    "int16": np.dtype("<i2"),
    "uint32": np.dtype("<u4"),
    "int32": np.dtype("<i4"),
    "uint64": np.dtype("<u8"),
    "int64": np.dtype("<i8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # its bits
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
"""Names of the dtypes that can be stored, and the NumPy dtype of their bits."""

_BASE64_CHARACTERS = 1 << 18
"""Characters decoded in one call that holds the interpreter lock: well under a millisecond, so that heartbeats go
on."""


def whole_numbers(given: Any, dtype: Any, what: str, *, least: int | None = None) -> Array:
    """`given` (array, tensor or list) as an array of this integer dtype, every value as it was; an array that has the
    dtype is only held against `least`. `BadInput` names the first value that is no whole number (a bool is one in
    8 bits, as in masks), is less than `least`, or does not fit."""
    kind = np.dtype(dtype)
    bounds = np.iinfo(kind)
    low = int(bounds.min) if least is None else least
    if isinstance(given, np.ndarray) and given.dtype == kind:
        if least is not None and given.size and given.min() < least:
            raise BadInput(f"{what}: {_first_odd(given, given, low, int(bounds.max))}")
        return given
    try:
        array = np.asarray(given)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise BadInput(f"{what}: {error}") from error
    if not array.size:
        return array.astype(kind)
    flags = kind.itemsize == 1
    whole = array.dtype.kind in ("iub" if flags else "iu")
    if whole and not flags and isinstance(given, (list, tuple)):
        whole = bool not in set(map(type, given))  # in a list with numbers NumPy makes them numbers
    if not whole or int(array.min()) < low or int(array.max()) > bounds.max:
        raise BadInput(f"{what}: {_first_odd(given, array, low, int(bounds.max))}")
    return array.astype(kind)


def _first_odd(given: Any, array: Array, low: int, high: int) -> str:
    values = given if isinstance(given, (list, tuple)) and array.ndim == 1 else array.reshape(-1).tolist()
    for at, value in enumerate(values):
        number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            return f"{value!r:.60} at {at} is no whole number from {low} to {high}"
    return f"{array.dtype} where whole numbers are needed"


class Rows(Protocol):
    """What every holder of rows offers: `numpy.ndarray`, `torch.Tensor`, `RowList` and the lazy rows of a pack.

    `shape[0]` counts rows. `rows[a:b]` gives rows as an array; on lazy rows it reads and verifies just the chunks it
    touches."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...


def dtype_name(rows: Rows) -> str:
    """The dtype's name in the words that NumPy and torch share (`int32`, `bfloat16`). `BadInput` for one that cannot
    be stored."""
    name = rows.dtype.name if isinstance(rows.dtype, np.dtype) else str(rows.dtype).removeprefix("torch.")
    if name not in STORABLE:
        raise BadInput(f"dtype {name} cannot be stored: convert to one of {', '.join(STORABLE)}")
    return str(name)


def shape_of(rows: Rows) -> tuple[int, ...]:
    return tuple(int(size) for size in rows.shape)


def bits(rows: Rows, start: int, stop: int) -> Array:
    """Rows `[start, stop)` as a NumPy array of the stored bits (bfloat16 as uint16), without a copy where memory
    allows."""
    own = getattr(rows, "bits", None)
    return own(start, stop) if own is not None else _host(rows if rows.shape == () else rows[start:stop])


def _host(piece: Any) -> Array:
    if isinstance(piece, np.ndarray):
        return piece if piece.dtype.isnative else piece.astype(piece.dtype.newbyteorder("="))
    piece = piece.detach().cpu()
    if dtype_name(piece) == "bfloat16":
        import torch

        bfloat16_bits: Array = piece.view(torch.int16).numpy().view(np.uint16)
        return bfloat16_bits
    array: Array = piece.numpy()
    return array


def values(rows: Rows, start: int, stop: int) -> Array:
    """Rows `[start, stop)` as a NumPy array of their values: as `bits`, but bfloat16 as float32."""
    raw = bits(rows, start, stop)
    return widen_bfloat16(raw) if dtype_name(rows) == "bfloat16" else raw


def widen_bfloat16(raw: Array) -> Array:
    """The float32 values, same shape, of bfloat16 bits held as uint16."""
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def torch_rows(rows: Rows, start: int = 0, stop: int | None = None) -> Any:
    """Rows `[start, stop)` as a `torch.Tensor` in the dtype they were given; shares memory with the array that was
    read."""
    import torch

    first, last, _ = slice(start, stop).indices(len(rows))
    raw = np.require(bits(rows, first, last), requirements=["C", "W"])
    if dtype_name(rows) == "bfloat16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(raw)


def part(rows: Rows, start: int, stop: int) -> Rows:
    """Rows `[start, stop)` in the dtype they have, unread if they are lazy."""
    own = getattr(rows, "part", None)
    result: Rows = own(start, stop) if own is not None else rows[start:stop]
    return result


def head(rows: Rows, count: int) -> Rows:
    """The first `count` rows, unread if they are lazy."""
    return part(rows, 0, count)


def span(rows: Rows, key: Any) -> tuple[int, int]:
    """The bounds `(start, stop)` of a slice of step 1 over `rows`. `BadInput` for any other index."""
    if not isinstance(key, slice) or key.step not in (None, 1):
        raise BadInput(f"rows are read by slices of step 1, such as rows[0:10], not by {key!r}")
    start, stop, _ = key.indices(len(rows))
    return start, max(start, stop)


class RowList:
    """Rows in several pieces, oldest first, alike in dtype and inner shape. A slice touches only the pieces it
    overlaps."""

    __slots__ = ("_starts", "pieces")

    def __init__(self, pieces: Sequence[Rows]) -> None:
        first = pieces[0]
        for piece in pieces:
            if dtype_name(piece) != dtype_name(first) or shape_of(piece)[1:] != shape_of(first)[1:]:
                raise Misaligned(
                    f"rows of {dtype_name(piece)} {list(shape_of(piece)[1:])} cannot follow rows of "
                    f"{dtype_name(first)} {list(shape_of(first)[1:])}: keep dtype and shape the same over one sample"
                )
        self.pieces = tuple(pieces)
        self._starts = [0]
        for piece in pieces:
            self._starts.append(self._starts[-1] + len(piece))

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *shape_of(self.pieces[0])[1:])

    @property
    def dtype(self) -> str:
        return dtype_name(self.pieces[0])

    def _touched(self, start: int, stop: int) -> Iterator[tuple[Rows, int, int]]:
        for piece, first in zip(self.pieces, self._starts, strict=False):
            low, high = max(start - first, 0), min(stop - first, len(piece))
            if low < high:
                yield piece, low, high

    def bits(self, start: int, stop: int) -> Array:
        touched = list(self._touched(start, stop))
        if len(touched) == 1:
            return bits(*touched[0])
        out = np.empty((max(stop - start, 0), *self.shape[1:]), STORABLE[self.dtype])
        at = 0
        for piece, low, high in touched:
            into = getattr(piece, "read_into", None)
            if into is not None:
                into(low, high, out[at : at + high - low])
            else:
                out[at : at + high - low] = bits(piece, low, high)
            at += high - low
        return out

    def __getitem__(self, key: Any) -> Array:
        return values(self, *span(self, key))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        whole = values(self, 0, len(self))
        return whole if dtype is None else whole.astype(dtype)

    def part(self, start: int, stop: int) -> Rows:
        kept = [part(*touched) for touched in self._touched(start, stop)]
        if not kept:
            return part(self.pieces[0], 0, 0)
        return kept[0] if len(kept) == 1 else RowList(kept)


def append_rows(rows: Rows | None, more: Rows) -> Rows:
    """`rows` followed by `more`; copies and reads nothing. `Misaligned` if dtype or inner shape differ."""
    if rows is None or len(rows) == 0:
        return more
    if len(more) == 0:
        return rows
    before = rows.pieces if isinstance(rows, RowList) else (rows,)
    return RowList([*before, *(more.pieces if isinstance(more, RowList) else (more,))])


def rows_from_base64(
    text: str | bytes, inner: tuple[int, ...], *, dtype: str = "int32", count: int | None = None
) -> Array:
    """Decode an engine's base64 capture (little-endian, C order) into an array `[rows, *inner]` of `dtype`.

    No Python list in between, and no second copy of the array. `Misaligned` if the bytes are not whole rows, or not
    `count` of them; `BadInput` if the text is not base64."""
    stored = STORABLE[dtype]
    width = stored.itemsize * math.prod(inner)
    padding = 2 if text[-2:] in ("==", b"==") else 1 if text[-1:] in ("=", b"=") else 0
    size = len(text) // 4 * 3 - padding
    if len(text) % 4 or width == 0:
        raise BadInput(f"not base64: {len(text)} characters, for rows of {width} bytes")
    rows = size // width
    if size != rows * width or (count is not None and count != rows):
        wanted = "" if count is None else f"{count} rows, "
        raise Misaligned(f"capture has {size} bytes; expected {wanted}{width} bytes per row {list(inner)} of {dtype}")
    out = np.empty((rows, *inner), stored)
    flat = out.reshape(-1).view(np.uint8)
    at = 0
    for first in range(0, len(text), _BASE64_CHARACTERS):
        piece = text[first : first + _BASE64_CHARACTERS]
        last = first + len(piece) == len(text)
        try:
            # About twice as fast as binascii, and strict about the alphabet.
            data = msgspec.convert(piece if isinstance(piece, str) else piece.decode("ascii"), bytes)
        except (msgspec.ValidationError, ValueError) as error:
            raise BadInput(f"capture is not base64 near character {first}: {error}") from error
        if len(data) != len(piece) // 4 * 3 - (padding if last else 0):
            raise BadInput(f"capture is not base64 near character {first}: padding inside")
        flat[at : at + len(data)] = np.frombuffer(data, np.uint8)
        at += len(data)
    return out
