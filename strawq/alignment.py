"""What a sample must be like at the door: every part covers the same tokens, and no number is impossible.

The rule: a capture that does not line up is refused with the counts, before anything is written, so that what is
stored is aligned and the group falls back to its last good prefix. Reading back checks the counts again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from strawq.errors import BadInput, Misaligned
from strawq.rows import Rows, dtype_name, shape_of, values
from strawq.samples import STATUSES, Group, Sample, TopK, prompt_length

_SCAN_BYTES = 1 << 20


def check_group(group: Group) -> None:
    """`check_sample` on every sample, and no sample index twice."""
    indices = [sample.index for sample in group.samples]
    if len(set(indices)) != len(indices):
        raise BadInput(f"group {group.task_id or group.prompt.group_id}: sample indices {indices} are not distinct")
    for sample in group.samples:
        check_sample(sample, prompt_length(group.prompt, sample))


def check_sample(sample: Sample, prompt_tokens: int | None, *, since: int = 0) -> None:
    """Refuse a sample whose parts do not cover the same tokens (`Misaligned`, with the counts) or hold impossible
    numbers (`BadInput`).

    Log-probs of sampled tokens are finite; rows of SC may hold -inf (a token cut off), never NaN or +inf. Values are
    looked at from response token `since` on; counts always."""
    count, what = len(sample.tokens), f"sample {sample.index}"
    if sample.status not in STATUSES:
        raise BadInput(f"{what}: status {sample.status!r} is none of {', '.join(STATUSES)}")
    if sample.logprobs is not None:
        _same(what, "logprobs", len(sample.logprobs), count)
        if not np.isfinite(sample.logprobs[since:]).all():
            raise BadInput(f"{what}: log-probs of sampled tokens must be finite")
    _same(what, "loss_mask", len(sample.loss_mask), count)
    at = 0
    for span in sample.versions:
        if span.start != at or span.end < span.start:
            raise Misaligned(f"{what}: version span [{span.start}, {span.end}) follows token {at}; spans must join")
        at = span.end
    _same(what, "version spans", at, count)
    at = 0
    for info in sample.segments:
        if not at <= info.start <= info.end <= count:
            raise Misaligned(f"{what}: segment [{info.start}, {info.end}) after token {at} of {count} response tokens")
        at = info.end
    _check_routes(sample, what, prompt_tokens, since)
    _check_sc(sample, what, since)
    for name, rows in sample.token_tensors.items():
        _same(what, f"tensor {name!r}", len(rows), count)


def _same(what: str, name: str, count: int, tokens: int) -> None:
    if count != tokens:
        raise Misaligned(f"{what}: {name} cover {count} tokens, the response has {tokens}")


def _check_routes(sample: Sample, what: str, prompt_tokens: int | None, since: int) -> None:
    rows = sample.r3
    if rows is None:
        return
    if prompt_tokens is None:
        raise Misaligned(f"{what}: r3 needs the prompt's token ids, which the prompt does not have")
    shape, expected = shape_of(rows), max(prompt_tokens + len(sample.tokens) - 1, 0)
    if len(shape) != 3 or shape[0] != expected:
        raise Misaligned(
            f"{what}: r3 has shape {list(shape)}; expected {expected} rows [layers, top_k] "
            f"({prompt_tokens} prompt + {len(sample.tokens)} response tokens - 1)"
        )
    kind = np.dtype(dtype_name(rows)).kind
    if kind not in "iu":
        raise BadInput(f"{what}: r3 holds {dtype_name(rows)}; expert ids are whole numbers")
    if kind == "u":
        return  # No id can be negative, and -1 is out of bounds for the comparison below.
    first = prompt_tokens + since - 1 if since else 0
    for at, piece in _pieces(rows, first):
        # Engines pad with rows of -1 where no token was routed. The bits of all ids together tell whether one is
        # negative, in half the time of a maximum per row.
        if np.bitwise_or.reduce(piece, axis=None) >= 0:
            continue
        empty = piece.reshape(len(piece), -1).max(axis=1, initial=-1) < 0
        if piece.size and empty.any():
            raise Misaligned(f"{what}: r3 row {at + int(empty.argmax())} is -1 throughout: no token produced it")


def _check_sc(sample: Sample, what: str, since: int) -> None:
    sc = sample.sc
    if sc is None:
        return
    ids, logprobs, first = shape_of(sc.ids), shape_of(sc.logprobs), since
    if ids != logprobs:
        raise Misaligned(f"{what}: SC ids have shape {list(ids)}, SC log-probs {list(logprobs)}")
    if isinstance(sc, TopK):
        if len(ids) != 2:
            raise Misaligned(f"{what}: top-k ids have shape {list(ids)}; expected [{len(sample.tokens)}, k]")
        _same(what, "top-k rows", ids[0], len(sample.tokens))
    else:
        _same(what, "top-p offsets less one", len(sc.offsets) - 1, len(sample.tokens))
        if len(ids) != 1 or sc.offsets[0] != 0 or sc.offsets[-1] != ids[0] or (np.diff(sc.offsets) < 0).any():
            raise Misaligned(f"{what}: top-p offsets run from {sc.offsets[0]} to {sc.offsets[-1]} over ids {list(ids)}")
        first = int(sc.offsets[since])
    if dtype_name(sc.ids) == "bfloat16" or np.dtype(dtype_name(sc.ids)).kind not in "iu":
        raise BadInput(f"{what}: SC ids are {dtype_name(sc.ids)}; token ids are whole numbers")
    for at, piece in _pieces(sc.logprobs, first):
        # max() of an array with a NaN is NaN.
        if piece.size and not piece.max() < np.inf:
            raise BadInput(f"{what}: SC log-probs hold NaN or +inf in rows {at} to {at + len(piece)}")


def _pieces(rows: Rows, first: int) -> Iterable[tuple[int, npt.NDArray[Any]]]:
    shape = shape_of(rows)
    step = max(1, _SCAN_BYTES // max(1, 4 * int(np.prod(shape[1:]))))
    return ((at, values(rows, at, min(at + step, shape[0]))) for at in range(first, shape[0], step))
