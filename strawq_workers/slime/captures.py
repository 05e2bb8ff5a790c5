"""R3 and SC captures of slime's samples, under slime's names, as rows, and back.

The rule: a capture covers all the tokens it is for, or is refused with the counts: R3 has one row less than there are
tokens, SC one row (or span) for each response token. What comes back is of the kind that was given: list, list of
chunks, NumPy array or torch tensor, in the same dtype.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from strawq.errors import BadInput, Misaligned
from strawq.rows import RowList, Rows, part, torch_rows, values
from strawq.samples import Sample, TopK, TopP

ROUTES = "rollout_routed_experts"
TOP_K_IDS, TOP_K_LOG_PROBS = "rollout_topk_token_ids", "rollout_topk_log_probs"
TOP_P_IDS, TOP_P_OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
TOP_P_LOG_PROBS = "rollout_top_p_log_probs"
FIELDS = (ROUTES, TOP_K_IDS, TOP_K_LOG_PROBS, TOP_P_IDS, TOP_P_OFFSETS, TOP_P_LOG_PROBS)

_AXES = {ROUTES: 3, TOP_K_IDS: 2, TOP_K_LOG_PROBS: 2, TOP_P_IDS: 1, TOP_P_OFFSETS: 1, TOP_P_LOG_PROBS: 1}
_LIST_DTYPE = {TOP_K_LOG_PROBS: np.float32, TOP_P_LOG_PROBS: np.float32}


class Captured(msgspec.Struct, frozen=True, eq=False):
    """Rows of a sample; `kinds` says what was given; `left` names the fields that strawq has no tensor for."""

    routes: Rows | None = None
    sc: TopK | TopP | None = None
    kinds: dict[str, Any] = {}
    left: frozenset[str] = frozenset()


def encode(given: Mapping[str, Any], tokens: int, count: int, what: str) -> Captured:
    """Captures of a sample of `tokens` tokens, `count` of them the response's. Raises `Misaligned`, `BadInput`."""
    there = {name: given[name] for name in FIELDS if given.get(name) is not None and _size(given[name])}
    left = {name for name in FIELDS if given.get(name) is not None and name not in there}
    rows: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    for name, value in there.items():
        found = _rows(value, name, f"{what}.{name}")
        if found is None:
            left.add(name)
        else:
            rows[name], kinds[name] = found
    _check_counts(there, rows, tokens, count, what)
    sc: TopK | TopP | None = None
    if rows.keys() >= {TOP_K_IDS, TOP_K_LOG_PROBS}:
        sc = TopK(rows[TOP_K_IDS], rows[TOP_K_LOG_PROBS])
    elif rows.keys() >= {TOP_P_IDS, TOP_P_OFFSETS, TOP_P_LOG_PROBS}:
        offsets = rows[TOP_P_OFFSETS]
        sc = TopP(rows[TOP_P_IDS], rows[TOP_P_LOG_PROBS], values(offsets, 0, len(offsets)))
    kept = {ROUTES, *((TOP_K_IDS, TOP_K_LOG_PROBS) if isinstance(sc, TopK) else ())}
    if isinstance(sc, TopP):
        kept |= {TOP_P_IDS, TOP_P_OFFSETS, TOP_P_LOG_PROBS}
    left |= rows.keys() - kept
    kinds = {name: kind for name, kind in kinds.items() if name in kept}
    return Captured(rows.get(ROUTES), sc, kinds, frozenset(left))


def decode(sample: Sample, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The captures of a sample under slime's names; tensors are read."""
    rows: dict[str, Any] = {}
    if sample.r3 is not None:
        rows[ROUTES] = sample.r3
    if isinstance(sample.sc, TopK):
        rows |= {TOP_K_IDS: sample.sc.ids, TOP_K_LOG_PROBS: sample.sc.logprobs}
    elif isinstance(sample.sc, TopP):
        rows |= {TOP_P_IDS: sample.sc.ids, TOP_P_LOG_PROBS: sample.sc.logprobs, TOP_P_OFFSETS: sample.sc.offsets}
    return {name: _value(found, kinds.get(name)) for name, found in rows.items()}


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


def _check_counts(there: Mapping[str, Any], rows: Mapping[str, Any], tokens: int, count: int, what: str) -> None:
    wanted = {ROUTES: tokens - 1, TOP_K_IDS: count, TOP_K_LOG_PROBS: count, TOP_P_OFFSETS: count + 1}
    for name, expected in wanted.items():
        if name in there:
            size = len(rows[name]) if name in rows else len(there[name])
            if size != expected:
                raise Misaligned(
                    f"{what}: incomplete capture: {name} has {size} rows, expected {expected} ({tokens} tokens, "
                    f"{count} of them the response's)"
                )


def _rows(value: Any, name: str, path: str) -> tuple[Rows, Any] | None:
    """The rows of a capture and the kind of what was given; None if rows would not give it back as it is."""
    if isinstance(value, (list, tuple)):
        if type(value) is list and all(hasattr(item, "shape") and len(item.shape) == _AXES[name] for item in value):
            kinds = [[_kind(item), len(item)] for item in value]
            return (value[0] if len(value) == 1 else RowList(value)), ["chunks", kinds]
        return _rows_of_list(value, name, path)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise BadInput(f"Unsupported durable Sample field type: {type(value).__name__} at {path}; give an array")
    if len(value.shape) != _AXES[name]:
        raise Misaligned(f"{path} has shape {list(value.shape)}; expected {_AXES[name]} axes")
    if isinstance(value, np.ndarray) and name == TOP_P_OFFSETS and value.dtype != np.int32:
        return None
    return value, _kind(value)


def _rows_of_list(value: Any, name: str, path: str) -> tuple[Rows, Any] | None:
    dtype = _LIST_DTYPE.get(name, np.int32)
    try:
        wide = np.asarray(value)
    except ValueError as error:
        raise Misaligned(f"{path}: rows of different lengths: {error}") from error
    if wide.ndim != _AXES[name] or wide.dtype.kind not in "iuf":
        raise Misaligned(f"{path} has shape {list(wide.shape)} of {wide.dtype}; expected {_AXES[name]} axes of numbers")
    with np.errstate(over="ignore"):
        narrow = wide.astype(dtype)
    return (narrow, "list") if narrow.tolist() == value else None


def _kind(value: Any) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return "torch"
    return "numpy" if isinstance(value, np.ndarray) else ""


def _value(rows: Rows, kind: Any) -> Any:
    if isinstance(kind, list):
        return _chunks(rows, kind[1])
    if kind == "list":
        return values(rows, 0, len(rows)).tolist()
    if kind == "torch" or (not kind and torch_is_there()):
        return torch_rows(rows)
    return np.array(values(rows, 0, len(rows)))


def _chunks(rows: Rows, kinds: list[list[Any]]) -> list[Any]:
    """The chunks that were given, and one of the rows that came since."""
    found, at = [], 0
    for kind, count in [*kinds, [kinds[-1][0], len(rows)]]:
        end = min(at + count, len(rows))
        if end > at:
            found.append(_value(part(rows, at, end), kind))
        at = end
    return found


@functools.cache
def torch_is_there() -> bool:
    return importlib.util.find_spec("torch") is not None
