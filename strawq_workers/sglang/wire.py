"""SGLang's `/generate` as data: a request becomes a JSON body, a body or stream chunk becomes a typed `Chunk`.

The rule: what the engine would not survive or would silently ignore is refused here, before it is sent (SGLang does not
check token ids, and one that is out of range kills the server; `ignore_eos` switches off `stop_token_ids`). On the way
back nothing is guessed: a field of a wrong type is a typed error. Base64 goes from the received buffer straight into
bytes that numpy wraps, so 30,000 tokens × 48 layers × 8 experts never exist as Python integers.

Pure: no clock, no network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from strawq.errors import BadInput, EngineUnavailable, Misaligned
from strawq_workers.sglang.versions import ReportedSpan

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample one response. Defaults are those of RL training: the model's own distribution.

    `seed` reproduces only on an engine that runs with `--enable-deterministic-inference`. `extra` goes to the engine
    unchanged (`regex`, `custom_params`, ...); it may not repeat a field named here."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sequence to continue.

    `input_ids`: int32 [p], prompt and kept prefix. `top_logprobs`: k most likely tokens per output position (0: none).
    `routed_experts` asks for R3 rows from absolute position `routed_start` on, so that a resume fetches only the new
    ones."""

    input_ids: Int32s
    sampling: Sampling
    logprobs: bool = True
    top_logprobs: int = 0
    routed_experts: bool = False
    routed_start: int = 0


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a request and its answer are checked against. `layers`, `topk` are those of R3 rows; 0 means not known.
    `experts` bounds expert ids, `context_tokens` prompt + budget; 0 leaves them unchecked."""

    vocab_size: int
    layers: int = 0
    topk: int = 0
    experts: int = 0
    context_tokens: int = 0


class Finish(msgspec.Struct, frozen=True):
    """Why a sequence ended. `status_code` is set where the engine gave up on a request by itself."""

    type: str
    message: str | None = None
    matched: int | str | list[int] | None = None
    status_code: int | None = None


class Meta(msgspec.Struct, frozen=True):
    """`meta_info`. Everything is optional here, since each chunk carries its part; `stream.Accumulator` says what must
    be there."""

    id: str | None = None
    finish_reason: Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    num_retractions: int | None = None
    weight_version: str | None = None
    weight_versions: list[ReportedSpan] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    output_token_logprobs_length: int | None = None
    output_top_logprobs: list[list[tuple[float | None, int, str | None]] | None] | None = None
    output_top_logprobs_val_flat_b64: bytes | None = None
    output_top_logprobs_idx_flat_b64: bytes | None = None
    output_top_logprobs_val_flat_b64_dtype: str | None = None
    output_top_logprobs_idx_flat_b64_dtype: str | None = None
    output_top_logprobs_shape: tuple[int, int] | None = None
    output_top_logprobs_null_prefix: int | None = None
    output_topk_token_ids: bytes | None = None
    output_topk_log_probs: bytes | None = None
    output_topk_shape: tuple[int, int] | None = None
    routed_experts: bytes | None = None
    routed_experts_start_len: int | None = None


_NO_ERROR = msgspec.Raw(b"null")


class Chunk(msgspec.Struct, frozen=True):
    """One answer body, or one frame of a stream. `error` is a frame that refuses the request."""

    output_ids: list[int] | None = None
    meta_info: Meta | None = None
    index: int | None = None
    error: msgspec.Raw = _NO_ERROR

    @property
    def refused(self) -> bool:
        return self.error is not _NO_ERROR and bytes(self.error) != b"null"


_DECODER = msgspec.json.Decoder(Chunk)
_LIST_DECODER = msgspec.json.Decoder(list[Chunk])
_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_DEFAULTS = Sampling(max_new_tokens=0)
_OMIT_AT_DEFAULT = ("min_p", "min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty")


def check_request(request: GenerateRequest, shape: ModelShape) -> None:
    """Refuses what the engine must never see. Raises `BadInput` that names the field and the value."""
    ids, sampling = np.asarray(request.input_ids), request.sampling
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BadInput("input_ids must be a one-dimensional integer array")
    if ids.size == 0:
        raise BadInput("input_ids is empty: an engine cannot continue nothing")
    for name, tokens in (("input_ids", ids), ("stop_token_ids", np.asarray(sampling.stop_token_ids, dtype=np.int64))):
        wrong = (tokens < 0) | (tokens >= shape.vocab_size)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise BadInput(f"{name}[{at}] is {int(tokens[at])}, outside the vocabulary of {shape.vocab_size} tokens")
    if sampling.ignore_eos and sampling.stop_token_ids:
        raise BadInput("ignore_eos switches stop_token_ids off in SGLang: set one of them")
    if sampling.max_new_tokens < 0:
        raise BadInput(f"max_new_tokens is {sampling.max_new_tokens}: the budget is overspent")
    for name in _FLOATS:
        if not math.isfinite(getattr(sampling, name)):
            raise BadInput(f"{name} is {getattr(sampling, name)}, which is no number to sample with")
    repeated = set(sampling.extra) & (set(Sampling.__struct_fields__) | {"sampling_seed", "n"})
    if repeated:
        raise BadInput(f"sampling.extra repeats {sorted(repeated)}: set the field itself (one request is one sequence)")
    if request.top_logprobs < 0 or (request.top_logprobs and not request.logprobs):
        raise BadInput(f"top_logprobs is {request.top_logprobs}: it must be positive, and needs logprobs")
    if shape.context_tokens and ids.size + sampling.max_new_tokens > shape.context_tokens:
        raise BadInput(
            f"{ids.size} input tokens + max_new_tokens {sampling.max_new_tokens} exceed the context of "
            f"{shape.context_tokens} tokens"
        )
    if request.routed_experts:
        if not (shape.layers and shape.topk):
            raise BadInput(
                "routed experts need the model's layers and experts per token: give them in ModelShape(layers=, topk=)"
            )
        if not 0 <= request.routed_start <= ids.size:
            raise BadInput(f"routed_start is {request.routed_start}, outside [0, {ids.size}] (the input's length)")


def encode_request(request: GenerateRequest, rid: str, *, stream: bool) -> bytes:
    """The JSON body of `POST /generate`. `rid` must be fresh and of a fixed length: SGLang aborts by prefix."""
    sampling = request.sampling
    params: dict[str, Any] = dict(sampling.extra)
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "ignore_eos", "skip_special_tokens"):
        params[name] = getattr(sampling, name)
    for name in _OMIT_AT_DEFAULT:
        if getattr(sampling, name) != getattr(_DEFAULTS, name):
            params[name] = getattr(sampling, name)
    # Text is not read back, and trimming it has been known to trim the stop token of the ids as well.
    params |= {"no_stop_trim": True, "spaces_between_special_tokens": False}
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.input_ids.tolist(),
        "sampling_params": params,
        "stream": stream,
    }
    if request.logprobs:
        body["return_logprob"] = True
    if request.top_logprobs:
        body["top_logprobs_num"] = request.top_logprobs
        if not stream:  # SGLang refuses the flat form in a stream
            body |= {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    if request.routed_experts:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routed_start}
    return msgspec.json.encode(body)


def decode_chunk(payload: bytes | bytearray | memoryview, *, what: str) -> Chunk:
    """One JSON answer or stream frame. `EngineUnavailable` if it is not JSON (cut off, or a proxy's page); `Misaligned`
    for a field of a wrong type, named by its path."""
    try:
        return _DECODER.decode(payload)
    except msgspec.ValidationError as wrong:
        raise Misaligned(f"{what}: the engine's answer has a field of a wrong type: {wrong}") from wrong
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        raise EngineUnavailable(f"{what}: the engine's answer is not JSON: {broken}") from broken


def decode_chunks(payloads: Sequence[bytes], *, what: str) -> Iterable[Chunk]:
    """Stream frames, all in one call: entering the decoder costs as much as a small frame. Where one is not as it
    should be, those before it are yielded first, and the error is `decode_chunk`'s."""
    if len(payloads) > 1:
        try:
            chunks = _LIST_DECODER.decode(b"[" + b",".join(payloads) + b"]")
        except (msgspec.MsgspecError, UnicodeDecodeError):
            chunks = []
        if len(chunks) == len(payloads):
            return chunks
    return (decode_chunk(payload, what=what) for payload in payloads)


def top_logprobs_of(meta: Meta, *, what: str) -> tuple[Int32s, Float32s] | None:
    """Flat base64 top-k of the last chunk as (ids int32 [n, k], log-probs float32 [n, k]), or None if the engine sent
    none."""
    ids, logprobs, shape = (
        meta.output_top_logprobs_idx_flat_b64,
        meta.output_top_logprobs_val_flat_b64,
        meta.output_top_logprobs_shape,
    )
    if ids is None and logprobs is None:  # engines patched for score centering name them otherwise
        ids, logprobs, shape = meta.output_topk_token_ids, meta.output_topk_log_probs, meta.output_topk_shape
    if ids is None and logprobs is None:
        return None
    if ids is None or logprobs is None or shape is None:
        raise Misaligned(f"{what}: top log-probs came without their ids, values or shape")
    if meta.output_top_logprobs_val_flat_b64_dtype not in (None, "float32") or (
        meta.output_top_logprobs_idx_flat_b64_dtype not in (None, "int32")
    ):
        raise Misaligned(f"{what}: top log-probs are not float32 with int32 ids")
    if meta.output_top_logprobs_null_prefix:
        raise Misaligned(f"{what}: {meta.output_top_logprobs_null_prefix} output positions have no top log-probs")
    rows, width = shape
    if rows < 0 or width < 0 or len(ids) != 4 * rows * width or len(logprobs) != 4 * rows * width:
        raise Misaligned(f"{what}: top log-probs of {len(ids)} and {len(logprobs)} bytes do not fill {rows} × {width}")
    return (
        np.frombuffer(ids, dtype="<i4").reshape(rows, width),
        np.frombuffer(logprobs, dtype="<f4").reshape(rows, width),
    )


def routes_of(raw: bytes, rows: int, shape: ModelShape, *, what: str) -> Int32s:
    """R3 bytes as int32 [rows, layers, topk], without a copy. The engine sends no shape, so the count must be exact."""
    expected = rows * shape.layers * shape.topk
    if len(raw) != 4 * expected:
        raise Misaligned(
            f"{what}: {len(raw)} bytes of routed experts; {rows} rows × {shape.layers} layers × {shape.topk} experts "
            f"need {4 * expected}"
        )
    routes = np.frombuffer(raw, dtype="<i4").reshape(rows, shape.layers, shape.topk)
    if routes.size and (int(routes.min()) < 0 or (shape.experts and int(routes.max()) >= shape.experts)):
        row = int(np.argmax(((routes < 0) | (routes >= (shape.experts or 1 << 30))).any(axis=(1, 2))))
        raise Misaligned(
            f"{what}: row {row} of the routed experts holds an id outside [0, {shape.experts or 'experts'})"
        )
    return routes
