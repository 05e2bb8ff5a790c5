"""Arrow columns, built from and read as NumPy and plain Python values.

The rule: a column costs a few microseconds however it is used. Columns are built whole (one call into Arrow each,
per-token data from one concatenated buffer), and read row by row through the buffers, so that one row of a large
object costs one row. Reading by slices of typed buffers cannot leave them, whatever the bytes say.

This module imports pyarrow; import it lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from strawq.errors import BadInput

Array = npt.NDArray[Any]
Cell = Callable[[int], Any]
"""Gives the value of row i: int, float, str, bytes, an array (list of numbers), a list of tuples (list of structs),
or None."""

# Arrow's names; pyarrow before 26 imports pandas to answer this.
_DTYPES = {"uint8": np.uint8, "int32": np.int32, "int64": np.int64, "float": np.float32, "double": np.float64}
_OFFSET_MAX = (1 << 31) - 1
_SAME_ROWS_MAX = 256
_SAME_CHARACTERS_MAX = 64
"""Most columns of a publication hold one value in every row, the same as in the publication before. Short ones of
those are kept."""


def plain(values: Sequence[Any], kind: Any) -> Any:
    """A column of Python scalars, str or bytes; None is null."""
    try:
        if 0 < len(values) <= _SAME_ROWS_MAX and _is_same(values):
            return _same(kind, len(values), values[0])
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise BadInput(f"a value does not fit an Arrow column of {kind}: {error}") from error


def _is_same(values: Sequence[Any]) -> bool:
    """Whether every row holds the same None, int or short str (a float would not do: 0.0 equals -0.0)."""
    first = values[0]
    if first is None:
        return all(value is None for value in values)
    if type(first) is str:
        return len(first) <= _SAME_CHARACTERS_MAX and all(value == first for value in values)
    return type(first) is int and all(type(value) is int and value == first for value in values)


@lru_cache(maxsize=512, typed=True)
def _same(kind: Any, count: int, value: Any) -> Any:
    return pa.array([value] * count, kind)


def lists(arrays: Sequence[Array | None], kind: Any) -> Any:
    """A column of lists of numbers from one-dimensional arrays of that type; None is null."""
    if 0 < len(arrays) <= _SAME_ROWS_MAX and not any(array is not None and len(array) for array in arrays):
        missing = sum(array is None for array in arrays)
        if missing in (0, len(arrays)):
            return _no_lists(kind, len(arrays), missing > 0)
    return _lists_of(arrays, kind)


@lru_cache(maxsize=256)
def _no_lists(kind: Any, count: int, null: bool) -> Any:
    return _lists_of([None if null else np.empty(0, np.uint8)] * count, kind)


def _lists_of(arrays: Sequence[Array | None], kind: Any) -> Any:
    present = [array for array in arrays if array is not None]
    offsets = [0, *accumulate(0 if array is None else len(array) for array in arrays)]
    if offsets[-1] > _OFFSET_MAX:
        raise BadInput(f"{offsets[-1]} values in one Arrow column: publish fewer groups at once")
    flat = present[0] if len(present) == 1 else np.concatenate(present) if present else np.empty(0, np.uint8)
    values = pa.Array.from_buffers(kind.value_type, offsets[-1], [None, pa.py_buffer(np.ascontiguousarray(flat))])
    validity = None
    if len(present) < len(arrays):
        validity = pa.py_buffer(np.packbits([array is not None for array in arrays], bitorder="little"))
    return pa.Array.from_buffers(
        kind,
        len(arrays),
        [validity, pa.py_buffer(np.array(offsets, np.int32))],
        null_count=len(arrays) - len(present),
        children=[values],
    )


def structs(rows: Sequence[Sequence[tuple[Any, ...]]], kind: Any) -> Any:
    """A column of lists of structs; each struct a tuple in the order of its fields."""
    if any(rows):
        return plain(rows, kind)
    return _no_structs(kind, len(rows)) if len(rows) <= _SAME_ROWS_MAX else _no_structs.__wrapped__(kind, len(rows))


@lru_cache(maxsize=256)
def _no_structs(kind: Any, count: int) -> Any:
    offsets = pa.py_buffer(np.zeros(count + 1, np.int32))
    return pa.Array.from_buffers(kind, count, [None, offsets], null_count=0, children=[pa.array([], kind.value_type)])


def cells(array: Any) -> Cell:
    """A reader of one column's rows that works on its buffers; arrays it gives are views, read-only."""
    kind = array.type
    if array.offset:
        raise ValueError("cells reads whole columns")
    if array.null_count == len(array):
        return _nothing
    buffers = array.buffers()
    if pa.types.is_list(kind):
        return _nullable(array, _lists(array))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        offsets, data, text = _offsets(array), memoryview(buffers[2] or b""), pa.types.is_string(kind)
        if text:
            return _nullable(array, lambda row: str(data[offsets[row] : offsets[row + 1]], "utf-8"))
        return _nullable(array, lambda row: bytes(data[offsets[row] : offsets[row + 1]]))
    numbers = _numbers(array).tolist()
    return _nullable(array, numbers.__getitem__)


def _nothing(_row: int) -> None:
    return None


def _numbers(array: Any) -> Array:
    return np.frombuffer(array.buffers()[1] or b"", _DTYPES[str(array.type)], count=len(array))


def _offsets(array: Any) -> list[int]:
    # An empty column may come without offsets.
    if len(array) == 0:
        return [0]
    offsets: list[int] = np.frombuffer(array.buffers()[1], np.int32, count=len(array) + 1).tolist()
    return offsets


def _lists(array: Any) -> Cell:
    offsets, child = _offsets(array), array.values
    if not pa.types.is_struct(child.type):
        numbers = _numbers(child)
        return lambda row: numbers[offsets[row] : offsets[row + 1]]
    fields = [cells(child.field(index)) for index in range(child.type.num_fields)]
    return lambda row: [tuple(field(at) for field in fields) for at in range(offsets[row], offsets[row + 1])]


def _nullable(array: Any, value: Cell) -> Cell:
    if array.null_count == 0:
        return value
    valid = np.unpackbits(np.frombuffer(array.buffers()[0], np.uint8), bitorder="little")[: len(array)].tolist()
    return lambda row: value(row) if valid[row] else None
