"""A small mixture-of-experts decoder in NumPy: the weights, and the arithmetic of one block.

The rule: every number is a pure function of (sizes, seed, weight version, tokens). There is no state here but the
key/value cache that the caller passes in, and no randomness after the weights are drawn. All arithmetic is float64:
the order in which requests are batched then moves results by some 1e-15 only, so that a greedy continuation or an
expert choice does not depend on who else was in the batch.

Architecture: token embedding; `layers` times (RMS norm, rotary causal attention with 2 heads, RMS norm, router, top-k
of `num_experts` SiLU experts, gates renormalised over the chosen); RMS norm; head. The head carries a fixed unigram
bias (text looks like letters) and an EOS bias that rises with the absolute position, so that answers end after
plausible, varied lengths. The schedule knows only the position, never where the prompt ended: prompt + prefix
continues exactly as if uninterrupted.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import numpy.typing as npt

from strawq_workers.engine.vocabulary import BYTE_OFFSET, EOS_ID, VOCAB_SIZE

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

HEADS = 2
PERTURBATION = 0.06
EOS_BIAS = -1.8
EOS_BIAS_PER_TOKEN = 1.0 / 160.0
_LETTERS = "etaoinshrdlcumwfgypbvk"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes. hidden is divisible by 2 * HEADS; expert_hidden is the width of one expert."""

    hidden: int = 32
    layers: int = 2
    num_experts: int = 8
    experts_per_token: int = 2
    expert_hidden: int = 32
    context_length: int = 4096

    @property
    def head_dim(self) -> int:
        return self.hidden // HEADS


class Layer(msgspec.Struct, frozen=True):
    """Weights of one block, float64. qkv [d, 3d], out [d, d], router [d, E], up [d, E*f], down [E*f, d]."""

    qkv: Floats
    out: Floats
    router: Floats
    up: Floats
    down: Floats


class Weights(msgspec.Struct, frozen=True):
    """All weights of one version. embed [V, d], head [d, V], bias [V]."""

    version: str
    embed: Floats
    head: Floats
    bias: Floats
    layers: tuple[Layer, ...]


def _generator(seed: int, label: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}\0{label}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def unigram_bias() -> Floats:
    """Log-odds of each token before the model speaks: letters and spaces often, other bytes rarely. Shape [V]."""
    bias = np.full(VOCAB_SIZE, -7.0)
    for byte in range(0x20, 0x7F):
        bias[byte + BYTE_OFFSET] = -3.0
    for rank, letter in enumerate(_LETTERS):
        bias[ord(letter) + BYTE_OFFSET] = 1.0 - 0.1 * rank
    for digit in b"0123456789":
        bias[digit + BYTE_OFFSET] = -0.5
    bias[ord(" ") + BYTE_OFFSET] = 1.3
    bias[ord("\n") + BYTE_OFFSET] = -2.0
    bias[EOS_ID] = EOS_BIAS
    return bias


def draw_weights(config: ModelConfig, seed: int, version: str) -> Weights:
    """Weights of `version`: drawn from `seed`, moved by a perturbation drawn from (seed, version)."""
    base, moved = _generator(seed, "base"), _generator(seed, "version:" + version)
    d, wide = config.hidden, config.num_experts * config.expert_hidden

    def matrix(rows: int, columns: int, scale: float) -> Floats:
        drawn = base.standard_normal((rows, columns)) + PERTURBATION * moved.standard_normal((rows, columns))
        return np.ascontiguousarray(drawn * (scale / np.sqrt(rows)))

    embed = matrix(VOCAB_SIZE, d, np.sqrt(VOCAB_SIZE))
    layers = tuple(
        Layer(
            qkv=matrix(d, 3 * d, 1.4),
            out=matrix(d, d, 1.0),
            router=matrix(d, config.num_experts, 2.0),
            up=matrix(d, wide, 1.4),
            # An expert's fan-in is its own width, not that of all experts together.
            down=matrix(wide, d, 1.4 * np.sqrt(config.num_experts)),
        )
        for _ in range(config.layers)
    )
    return Weights(version=version, embed=embed, head=matrix(d, VOCAB_SIZE, 1.1), bias=unigram_bias(), layers=layers)


def rotary_table(config: ModelConfig) -> tuple[Floats, Floats]:
    """cos and sin of the rotary embedding, each [context_length, head_dim / 2]."""
    half = config.head_dim // 2
    angles = np.outer(np.arange(config.context_length), 1.0 / (1000.0 ** (np.arange(half) / half)))
    return np.cos(angles), np.sin(angles)


def rms_norm(x: Floats) -> Floats:
    """x / rms(x) over the last axis. No learned gain: it would fold into the next matrix."""
    scale: Floats = 1.0 / np.sqrt(np.einsum("nd,nd->n", x, x) / x.shape[1] + 1e-6)
    return x * scale[:, None]


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotary embedding of x [N, HEADS, head_dim] with cos, sin [N, head_dim / 2]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos[:, None, :], sin[:, None, :]
    out = np.empty_like(x)
    np.subtract(a * c, b * s, out=out[..., :half])
    np.add(a * s, b * c, out=out[..., half:])
    return out


def route(router_logits: Floats, experts_per_token: int) -> tuple[Ints, Floats]:
    """The chosen experts and their gates: ids int32 [N, k], best first; gates float64 [N, k], each row sums to 1."""
    order = np.argsort(-router_logits, axis=1, kind="stable")[:, :experts_per_token]
    chosen = np.take_along_axis(router_logits, order, axis=1)
    gates = np.exp(chosen - chosen[:, :1])
    gates /= gates.sum(axis=1, keepdims=True)
    return order.astype(np.int32), gates


def experts_output(layer: Layer, h: Floats, ids: Ints, gates: Floats, num_experts: int) -> Floats:
    """Sum of the chosen experts' outputs, [N, d].

    All experts run as two dense products with the gates of those not chosen at zero: the same sum, and at these sizes
    faster than gathering weights per token.
    """
    rows = h.shape[0]
    mask = np.zeros((rows, num_experts))
    np.put_along_axis(mask, ids, gates, axis=1)
    up = h @ layer.up
    up /= 1.0 + np.exp(-up)
    weighted = up.reshape(rows, num_experts, -1) * mask[:, :, None]
    out: Floats = weighted.reshape(rows, -1) @ layer.down
    return out


def head_logits(weights: Weights, x: Floats, positions: npt.NDArray[np.int64]) -> Floats:
    """Logits [N, V] of the token that follows each row; positions [N] are those of the rows themselves."""
    logits: Floats = rms_norm(x) @ weights.head
    logits *= 1.6
    logits += weights.bias
    logits[:, EOS_ID] += EOS_BIAS_PER_TOKEN * positions
    return logits


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities over the last axis, [N, V]."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    out: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out
