"""Sampling parameters, and one batched sampling step.

The rule: a log-prob is always that of the full distribution at temperature 1, after logit_bias, penalties and
min_new_tokens have moved the logits, and before temperature, top_k, top_p and min_p. (SGLang does this with
SGLANG_RETURN_ORIGINAL_LOGPROB=1; its default divides by the temperature first.) A sampled token is a pure function of
(logits, parameters, seed, absolute position), so that a continuation under the same `sampling_seed` draws what the
uninterrupted request would have drawn.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from strawq_workers.engine.model import Floats
from strawq_workers.engine.refusals import Refused, UnknownSamplingField
from strawq_workers.engine.vocabulary import EOS_ID, VOCAB_SIZE

DEFAULT_MAX_NEW_TOKENS = 128
_MASK64 = (1 << 64) - 1
# Parameters of SGLang that ask for something this engine does not have. Left at None they are accepted.
_NOT_HERE = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "beam_width", "watermark", "choice")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's sampling parameters, with its names, order and defaults."""

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: Any = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    beam_width: Any = None
    watermark: Any = None
    choice: Any = None

    @property
    def stops(self) -> tuple[bytes, ...]:
        """Stop strings as UTF-8, empty ones left out."""
        given = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        return tuple(text.encode("utf-8", errors="surrogatepass") for text in given if text)

    @property
    def touches_logits(self) -> bool:
        return bool(
            self.logit_bias
            or self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
            or self.min_new_tokens
        )

    @property
    def filters(self) -> bool:
        return 0 < self.top_k < VOCAB_SIZE or self.top_p < 1.0 or self.min_p > 0.0


def parse_sampling(raw: dict[str, Any]) -> SamplingParams:
    """Check one `sampling_params` object. Raises UnknownSamplingField or Refused."""
    known = SamplingParams.__struct_fields__
    for name in raw:
        if name not in known:
            expected = ", ".join(f"`{field}`" for field in known)
            raise UnknownSamplingField(f"unknown field `{name}`, expected one of {expected}")
    try:
        params = msgspec.convert(raw, SamplingParams)
    except msgspec.ValidationError as error:
        raise UnknownSamplingField(f"sampling_params: {error}") from None
    _check(params)
    return params


def _check(params: SamplingParams) -> None:
    for name in _NOT_HERE:
        if getattr(params, name) not in (None, False):
            raise Refused(f"sampling parameter {name} is not available in the embedded engine. Leave it out.")
    limit = DEFAULT_MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise Refused(f"temperature must be a non-negative finite number, got {params.temperature:g}.")
    if not 0.0 < params.top_p <= 1.0:
        raise Refused(f"top_p must be in (0, 1], got {params.top_p:g}.")
    if not 0.0 <= params.min_p <= 1.0:
        raise Refused(f"min_p must be in [0, 1], got {params.min_p:g}.")
    if params.top_k < 1 and params.top_k != -1:
        raise Refused(f"top_k must be -1 (disable) or at least 1, got {params.top_k}.")
    for name in ("frequency_penalty", "presence_penalty"):
        if not -2.0 <= getattr(params, name) <= 2.0:
            raise Refused(f"{name} must be in [-2, 2], got {getattr(params, name):g}.")
    if not 0.0 < params.repetition_penalty <= 2.0:
        raise Refused(f"repetition_penalty must be in (0, 2], got {params.repetition_penalty:g}.")
    if limit < 0:
        raise Refused(f"max_new_tokens must be at least 0, got {limit}.")
    if not 0 <= params.min_new_tokens <= limit:
        raise Refused(f"min_new_tokens must be in [0, max_new_tokens], got {params.min_new_tokens}.")
    if params.n < 1:
        raise Refused(f"n must be at least 1, got {params.n}.")
    for token in params.logit_bias or {}:
        if not (token.isdecimal() and int(token) < VOCAB_SIZE):
            raise Refused(f"logit_bias must have keys in [0, {VOCAB_SIZE - 1}], got {token}.")


def seed_of(engine_seed: int, arrival: int) -> int:
    """Seed of a request that gave none: depends on the engine's seed and on how many came before it."""
    return int.from_bytes(hashlib.sha256(f"{engine_seed}:{arrival}".encode()).digest()[:8], "little")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): splitmix64 of their mix."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((z ^ (z >> 31)) >> 11) * (1.0 / (1 << 53))


def adjust(row: Floats, params: SamplingParams, tokens: Sequence[int], prompt_length: int) -> None:
    """Apply penalties, logit_bias and min_new_tokens in place to one row of logits [V]."""
    output = tokens[prompt_length:]
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(tokens))
        row[seen] = np.where(
            row[seen] > 0, row[seen] / params.repetition_penalty, row[seen] * params.repetition_penalty
        )
    if (params.frequency_penalty or params.presence_penalty) and output:
        counts = np.bincount(np.asarray(output), minlength=VOCAB_SIZE)
        row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    for token, bias in (params.logit_bias or {}).items():
        row[int(token)] += bias
    if len(output) < params.min_new_tokens:
        row[[EOS_ID, *(t for t in params.stop_token_ids or () if 0 <= t < VOCAB_SIZE)]] = -1e9


def keep_mask(scaled: Floats, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Which tokens top_k, then top_p, then min_p leave, from logits already divided by the temperature. [V] bool."""
    order = np.argsort(-scaled, kind="stable")
    probs = np.exp(scaled[order] - scaled[order[0]])
    if 0 < params.top_k < len(probs):
        probs[params.top_k :] = 0.0
    probs /= probs.sum()
    keep = probs > 0.0
    if params.top_p < 1.0:
        keep &= np.cumsum(probs) - probs <= params.top_p
    if params.min_p > 0.0:
        keep &= probs >= params.min_p * probs[0]
    mask = np.zeros(len(probs), dtype=np.bool_)
    mask[order[keep]] = True
    return mask


def sample(
    logits: Floats, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], dict[int, tuple[npt.NDArray[np.bool_], float]]]:
    """Draw one token per row of logits [N, V].

    Returns the tokens, and for each row with top_k, top_p or min_p its mask [V] and the log-prob of the token within
    it.
    """
    temperatures = np.array([p.temperature for p in params])
    greedy = temperatures == 0.0
    scaled = logits / np.where(greedy, 1.0, temperatures)[:, None]
    masks = {i: keep_mask(scaled[i], p) for i, p in enumerate(params) if p.filters and not greedy[i]}
    for i, mask in masks.items():
        scaled[i, ~mask] = -np.inf
    probs = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    cumulative = np.cumsum(probs, axis=1)
    draws = np.array([uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)])
    # argmax of "sum so far > draw" is the first such token; a token of probability 0 never is.
    drawn = (cumulative > (draws * cumulative[:, -1])[:, None]).argmax(axis=1)
    tokens = np.where(greedy, logits.argmax(axis=1), drawn)
    within = {i: (mask, float(np.log(probs[i, tokens[i]] / cumulative[i, -1]))) for i, mask in masks.items()}
    return [int(token) for token in tokens], within
