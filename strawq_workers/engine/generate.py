"""From the body of `/generate` to single requests.

The rule: everything that can be refused is refused here, before a request reaches the scheduler. SGLang does not
check token ids and its scheduler dies of one that is out of range; here such an id is a 400 that names it.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.refusals import BadBody, Refused
from strawq_workers.engine.sampling import DEFAULT_MAX_NEW_TOKENS, SamplingParams, parse_sampling
from strawq_workers.engine.vocabulary import VOCAB_SIZE, encode_text

# SGLang keeps a few tokens of the context for itself: with 512 it takes prompts of up to 506.
RESERVED_TOKENS = 6


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `/generate` that mean something here. Others are ignored, as SGLang does."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool = False
    return_flat_raw_output_top_logprobs: bool = False
    return_flat_raw_top_logprobs: bool = False
    return_flat_raw_top_logprobs_b64: bool = False
    return_output_topk: bool = False
    return_sampling_mask: bool = False
    return_prompt_token_ids: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer is to carry besides tokens. logprob_start is None when no input log-probs are wanted."""

    logprobs: bool = False
    logprob_start: int | None = None
    top: int = 0
    token_ids: tuple[int, ...] = ()
    text_in_logprobs: bool = False
    flat_output: bool = False
    flat_both: bool = False
    flat_base64: bool = False
    output_topk: bool = False
    sampling_mask: bool = False
    prompt_ids: bool = False
    routes: bool = False
    routes_start: int = 0


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. index is its place in a batch answer (None: the answer is not a list)."""

    rid: str
    prompt: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    wanted: Wanted
    index: int | None = None


def decode_body(raw: bytes) -> GenerateBody:
    """Parse the bytes of a body. Raises BadBody."""
    try:
        return msgspec.json.decode(raw, type=GenerateBody)
    except msgspec.DecodeError as error:
        raise BadBody(f"{{'type': 'value_error', 'loc': ('body',), 'msg': '{error}'}}") from None


def specs_of(body: GenerateBody, options: EngineOptions) -> list[RequestSpec]:
    """The sequences that a body asks for, in order of the answer. Raises Refused or UnknownSamplingField."""
    prompts, many = _prompts(body, options)
    count = len(prompts)
    raw = body.sampling_params or {}
    params = [parse_sampling(each) for each in _spread("sampling_params", raw, count)]
    copies = {p.n for p in params}
    if len(copies) > 1:
        raise Refused("The parallel_sample_num should be the same for all samples in sample params.")
    n = copies.pop()
    wanted = [_wanted(body, place, count, len(prompt), options) for place, prompt in enumerate(prompts)]
    rids = _rids(body.rid, count, n)
    specs: list[RequestSpec] = []
    for place, prompt in enumerate(prompts):
        limit = _check_length(len(prompt), params[place], options)
        _check_tokens("input_ids", prompt)
        if options.skip_tokenizer_init and params[place].stops:
            raise Refused(
                f"stop={params[place].stop!r} is unavailable when skip_tokenizer_init=True (requires tokenizer to "
                "decode tokens to text for matching)."
            )
        for copy in range(n):
            specs.append(
                RequestSpec(
                    rid=rids[place * n + copy],
                    prompt=tuple(prompt),
                    params=params[place],
                    max_new_tokens=limit,
                    wanted=wanted[place],
                    index=len(specs) if many or n > 1 else None,
                )
            )
    return specs


def _prompts(body: GenerateBody, options: EngineOptions) -> tuple[list[list[int]], bool]:
    """The prompts, and whether they came as a batch. Ids win over text when both are given."""
    ids = body.input_ids
    if ids is not None:
        if not ids or any(isinstance(each, list) and not each for each in ids):
            raise Refused("input_ids cannot be empty.")
        flat = [each for each in ids if isinstance(each, int)]
        nested = [each for each in ids if isinstance(each, list)]
        if flat and nested:
            raise Refused("input_ids mixes token ids and lists of token ids.")
        return (nested, True) if nested else ([flat], False)
    if body.text is None:
        raise Refused("Either text, input_ids or input_embeds should be provided.")
    if options.skip_tokenizer_init:
        raise Refused(
            "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. "
            "Please provide input_ids or re-initialize the engine with skip_tokenizer_init=False."
        )
    texts = [body.text] if isinstance(body.text, str) else body.text
    encoded = [encode_text(text) for text in texts]
    if not encoded or not all(encoded):
        raise Refused("text cannot be empty.")
    return encoded, not isinstance(body.text, str)


def _spread(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise Refused(f"{name} has {len(value)} entries for a batch of {count}.")
    return value


def _rids(given: str | list[str] | None, count: int, n: int) -> list[str]:
    """One rid per sequence. A string for several sequences is numbered; an abort by it reaches them all by prefix."""
    total = count * n
    if given is None:
        return [uuid.uuid4().hex for _ in range(total)]
    if isinstance(given, str):
        return [given] if total == 1 else [f"{given}_{i}" for i in range(total)]
    if len(given) != count:
        raise Refused(f"rid has {len(given)} entries for a batch of {count}.")
    return given if n == 1 else [f"{rid}_{copy}" for rid in given for copy in range(n)]


def _wanted(body: GenerateBody, place: int, count: int, prompt_length: int, options: EngineOptions) -> Wanted:
    logprobs = bool(_spread("return_logprob", body.return_logprob, count)[place])
    start = _spread("logprob_start_len", body.logprob_start_len, count)[place]
    if logprobs and start is not None and start >= prompt_length:
        raise Refused(f"logprob_start_len={start} is higher than the number of input tokens {prompt_length}.")
    top = _spread("top_logprobs_num", body.top_logprobs_num, count)[place] or 0
    if not 0 <= top <= VOCAB_SIZE:
        raise Refused(f"top_logprobs_num must be in [0, {VOCAB_SIZE}], got {top}.")
    ids: Any = body.token_ids_logprob or []
    if ids and isinstance(ids[0], list):
        ids = _spread("token_ids_logprob", ids, count)[place]
    _check_tokens("token_ids_logprob", ids)
    routes = body.return_routed_experts and options.enable_return_routed_experts
    if routes and body.routed_experts_start_len < 0:
        raise Refused(f"routed_experts_start_len must be at least 0, got {body.routed_experts_start_len}.")
    if routes and body.routed_experts_start_len > prompt_length:
        raise Refused(
            f"recv_req.routed_experts_start_len={body.routed_experts_start_len} is higher than the number of input "
            f"tokens len(req.origin_input_ids)={prompt_length}. Please use a smaller routed_experts_start_len."
        )
    flat_both = body.return_flat_raw_top_logprobs
    if body.stream and (flat_both or body.return_flat_raw_output_top_logprobs):
        raise Refused("flat top logprobs are not available on a stream.")
    return Wanted(
        logprobs=logprobs,
        logprob_start=start if logprobs and start is not None and start >= 0 else None,
        top=top if logprobs else 0,
        token_ids=tuple(ids) if logprobs else (),
        text_in_logprobs=body.return_text_in_logprobs and not options.skip_tokenizer_init,
        flat_output=body.return_flat_raw_output_top_logprobs or flat_both,
        flat_both=flat_both,
        flat_base64=body.return_flat_raw_top_logprobs_b64,
        output_topk=body.return_output_topk or options.output_topk,
        sampling_mask=body.return_sampling_mask,
        prompt_ids=body.return_prompt_token_ids,
        routes=routes,
        routes_start=body.routed_experts_start_len if routes else 0,
    )


def _check_tokens(field: str, tokens: Any) -> None:
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < VOCAB_SIZE:
            raise Refused(f"{field} holds {token!r}, outside the vocabulary [0, {VOCAB_SIZE}). SGLang would die of it.")


def _check_length(prompt_length: int, params: SamplingParams, options: EngineOptions) -> int:
    """The request's budget of new tokens. Raises Refused where prompt and budget do not fit the context."""
    context = options.context_length
    if prompt_length >= context:
        raise Refused(
            f"The input ({prompt_length} tokens) is longer than the model's context length ({context} tokens)."
        )
    longest = context - RESERVED_TOKENS
    if params.max_new_tokens is None:
        limit = min(DEFAULT_MAX_NEW_TOKENS, context - prompt_length)
    else:
        limit = params.max_new_tokens
    if prompt_length + limit > context:
        raise Refused(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
            f"a total of {prompt_length + limit} tokens: {prompt_length} tokens from the input messages and {limit} "
            "tokens for the completion. Please reduce the number of tokens in the input messages or the completion to "
            "fit within the limit."
        )
    if prompt_length > longest:
        raise Refused(
            f"Input length ({prompt_length} tokens) exceeds the maximum allowed length ({longest} tokens). Use a "
            "shorter input or enable --allow-auto-truncate."
        )
    return limit
