"""One stretch of generated tokens, with everything that was captured about them, aligned.

The rule: a `Segment` exists only if its ids, log-probs, versions, routes and top-k cover the same tokens. An answer
that does not line up is refused (`Misaligned`), the attempt fails, and the caller still has the prefix that it sent.
Nothing is padded, cut to fit or filled with placeholders.

Pure: no clock, no network.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from strawq.errors import BadInput, EngineUnavailable, Misaligned
from strawq.model import VersionSpan
from strawq_workers.sglang.stream import Accumulator
from strawq_workers.sglang.versions import spans_between, spans_of_marks, spans_reported
from strawq_workers.sglang.wire import (
    Finish,
    Float32s,
    GenerateRequest,
    Int32s,
    ModelShape,
    Sampling,
    routes_of,
    top_logprobs_of,
)

FinishReason = Literal["stop", "length", "abort"]

LOGPROB_SLACK = 1e-3
"""A log-prob may exceed 0 by so much: bfloat16 engines round."""


class Segment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The answer to one request: n output tokens after an input of p tokens.

    `output_ids` int32 [n]; a stop token is included. `logprobs` float32 [n], None if not asked for. `versions` cover
    [0, n). `routed_experts` int32 [p + n - 1 - routed_start, layers, topk]; `top_ids` int32 and `top_logprobs` float32,
    both [n, k]. `finish` is "abort" where generation can be continued from here; `cut` says that the connection, not
    the engine, ended it. `sampling` is what the log-probs belong to: a resume under other options makes a mixed
    distribution."""

    output_ids: Int32s
    logprobs: Float32s | None
    versions: tuple[VersionSpan, ...]
    finish: FinishReason
    prompt_tokens: int
    sampling: Sampling
    routed_experts: Int32s | None = None
    routed_start: int = 0
    top_ids: Int32s | None = None
    top_logprobs: Float32s | None = None
    cached_tokens: int = 0
    retractions: int = 0
    engine_url: str = ""
    cut: bool = False

    @property
    def tokens(self) -> int:
        """n, the number of output tokens."""
        return int(self.output_ids.size)


def empty_segment(
    request: GenerateRequest, finish: FinishReason, *, engine_url: str = "", cut: bool = False
) -> Segment:
    """The answer without tokens: stopped before the first one, or no budget left."""
    return Segment(
        output_ids=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32) if request.logprobs else None,
        versions=(),
        finish=finish,
        prompt_tokens=int(request.input_ids.size),
        sampling=request.sampling,
        routed_start=request.routed_start,
        engine_url=engine_url,
        cut=cut,
    )


def finish_of(finish: Finish | None, *, what: str) -> FinishReason:
    """Why the engine ended. `BadInput` or `EngineUnavailable` if it gave up with a status; `Misaligned` for an unknown
    reason."""
    if finish is None:
        raise Misaligned(f"{what}: the answer has no finish_reason")
    if finish.type == "abort" and finish.status_code is not None and finish.status_code >= 400:
        text = f"{what}: the engine gave up with status {finish.status_code}: {finish.message}"
        raise BadInput(text) if 400 <= finish.status_code < 500 else EngineUnavailable(text)
    if finish.type == "stop":
        return "stop"
    if finish.type == "length":
        return "length"
    if finish.type == "abort":
        return "abort"
    raise Misaligned(f"{what}: finish_reason {finish.type!r} is none of stop, length, abort")


def segment_of(
    answer: Accumulator, request: GenerateRequest, shape: ModelShape, *, rid: str, before: str, after: str, url: str
) -> Segment:
    """The whole answer to `request`, checked. `before` and `after` are the versions read around it, used if the engine
    sent no spans.

    Raises `Misaligned` for missing, null or contradictory fields, `BadInput` when R3 was asked of an engine that does
    not capture it."""
    what, meta = answer.what, answer.last
    finish = finish_of(meta.finish_reason, what=what)
    if finish == "abort" and request.routed_experts and meta.routed_experts is None:
        # Aborted in the queue: whatever it had made before a retract has lost its routes, so none of it can be kept.
        return empty_segment(request, "abort", engine_url=url)
    if meta.id is None or meta.id != rid:
        raise Misaligned(f"{what}: meta_info.id is {meta.id!r}: the answer belongs to another request")
    n = answer.complete()
    prompt = int(request.input_ids.size)
    # A request that was aborted while it queued answers without prompt_tokens.
    if (meta.prompt_tokens is None and n > 0 and finish != "abort") or meta.prompt_tokens not in (None, prompt):
        raise Misaligned(f"{what}: prompt_tokens is {meta.prompt_tokens}, {prompt} input tokens were sent")
    if n > request.sampling.max_new_tokens:
        raise Misaligned(f"{what}: {n} output tokens exceed max_new_tokens {request.sampling.max_new_tokens}")
    if meta.weight_versions is not None:
        versions = spans_reported(meta.weight_versions, n, what=what)
    else:
        versions = spans_between(before, meta.weight_version or after, n)
    ids = _ids(answer, shape)
    top_ids, top_logprobs = _tops(answer, request, ids)
    return Segment(
        output_ids=ids,
        logprobs=_logprobs(answer, request, ids),
        versions=versions,
        finish=finish,
        prompt_tokens=prompt,
        sampling=request.sampling,
        routed_experts=_routes(answer, request, shape, n),
        routed_start=request.routed_start,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        cached_tokens=meta.cached_tokens or 0,
        retractions=meta.num_retractions or 0,
        engine_url=url,
    )


def segment_of_cut(
    answer: Accumulator, request: GenerateRequest, shape: ModelShape, *, before: str, url: str
) -> Segment:
    """What a stream had brought when it broke off, as an aborted segment: the tokens up to which every field came.

    R3 rows arrive only in the last chunk: where they were asked for, nothing of the stream can be kept."""
    keep = len(answer.ids.values)
    if request.logprobs:
        keep = min(keep, len(answer.logprobs.values))
    if request.top_logprobs:
        keep = min(keep, len(answer.tops.values))
    if request.routed_experts:
        keep = 0
    if keep == 0:
        return empty_segment(request, "abort", engine_url=url, cut=True)
    for values in (answer.ids.values, answer.logprobs.values, answer.tops.values):
        del values[keep:]
    ids = _ids(answer, shape)
    top_ids, top_logprobs = _tops(answer, request, ids)
    return Segment(
        output_ids=ids,
        logprobs=_logprobs(answer, request, ids),
        versions=spans_of_marks(before, answer.marks, keep),
        finish="abort",
        prompt_tokens=int(request.input_ids.size),
        sampling=request.sampling,
        routed_start=request.routed_start,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        cached_tokens=answer.last.cached_tokens or 0,
        engine_url=url,
        cut=True,
    )


def _ids(answer: Accumulator, shape: ModelShape) -> Int32s:
    ids = np.asarray(answer.ids.values, dtype=np.int64)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size):
        raise Misaligned(f"{answer.what}: an output id is outside the vocabulary of {shape.vocab_size} tokens")
    return ids.astype(np.int32)


def _logprobs(answer: Accumulator, request: GenerateRequest, ids: Int32s) -> Float32s | None:
    if not request.logprobs:
        return None
    triples = answer.logprobs.values
    if len(triples) != ids.size:
        raise Misaligned(f"{answer.what}: {ids.size} output tokens, but output_token_logprobs has {len(triples)}")
    for at, (logprob, token, _) in enumerate(triples):
        if logprob is None or not logprob <= LOGPROB_SLACK or logprob == -np.inf:
            raise Misaligned(f"{answer.what}: the log-prob of output token {at} is {logprob}")
        if token != ids[at]:
            raise Misaligned(f"{answer.what}: log-prob {at} belongs to token {token}, but output_ids has {ids[at]}")
    return np.fromiter((triple[0] for triple in triples), dtype=np.float32, count=len(triples))


def _tops(answer: Accumulator, request: GenerateRequest, ids: Int32s) -> tuple[Int32s | None, Float32s | None]:
    k, n, what = request.top_logprobs, ids.size, answer.what
    if not k:
        return None, None
    if n == 0:
        return np.empty((0, k), dtype=np.int32), np.empty((0, k), dtype=np.float32)
    flat = top_logprobs_of(answer.last, what=what)
    if flat is None:
        rows = answer.tops.values
        if len(rows) != n or any(row is None or len(row) != k or any(v is None for v, _, _ in row) for row in rows):
            raise Misaligned(f"{what}: {n} output tokens, but output_top_logprobs does not hold {k} values for each")
        top_ids = np.array([[token for _, token, _ in row] for row in rows], dtype=np.int32)
        top_logprobs = np.array([[value for value, _, _ in row] for row in rows], dtype=np.float32)
    else:
        top_ids, top_logprobs = flat
    if top_ids.shape != (n, k):
        raise Misaligned(f"{what}: top log-probs have the shape {top_ids.shape}, {(n, k)} was due")
    if not (top_logprobs <= LOGPROB_SLACK).all() or (top_ids < 0).any():
        raise Misaligned(f"{what}: top log-probs hold a value above 0, NaN or a negative id")
    return top_ids, top_logprobs


def _routes(answer: Accumulator, request: GenerateRequest, shape: ModelShape, n: int) -> Int32s | None:
    if not request.routed_experts or n == 0:
        return None
    meta = answer.last
    if meta.routed_experts is None:
        raise BadInput(
            f"{answer.what}: the engine sent no routed experts. Start it with "
            "--enable-return-routed-experts, and reach it directly: sglang-router drops the request's field"
        )
    if meta.routed_experts_start_len not in (None, request.routed_start):
        raise Misaligned(
            f"{answer.what}: routes start at {meta.routed_experts_start_len}, {request.routed_start} was asked for"
        )
    rows = int(request.input_ids.size) + n - 1 - request.routed_start
    return routes_of(meta.routed_experts, rows, shape, what=answer.what)
