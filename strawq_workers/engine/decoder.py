"""Running the model: one key/value cache for all running requests, prefill in pieces, decode in batches.

The rule: row p of a slot's cache and route p of its request are written together, when token p is fed. Slots in use
are 0..B-1 without holes, so that a decode step reads the cache as a view and copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from strawq_workers.engine.model import (
    HEADS,
    Floats,
    Ints,
    ModelConfig,
    Weights,
    draw_weights,
    experts_output,
    head_logits,
    rms_norm,
    rotary_table,
    rotate,
    route,
)

_FIRST_CAPACITY = 128

# (layer, q, k, v), each of q, k, v [N, HEADS, head_dim]: stores k and v, returns the mixed values [N, HEADS, head_dim].
Attend = Callable[[int, Floats, Floats, Floats], Floats]


class Decoder:
    """The model with its cache. keys and values are float64 [layers, slots, HEADS, capacity, head_dim]."""

    def __init__(self, config: ModelConfig, seed: int, version: str) -> None:
        self.config = config
        self.seed = seed
        self.weights: Weights = draw_weights(config, seed, version)
        self._cos, self._sin = rotary_table(config)
        self._keys = np.zeros(self._shape(1, _FIRST_CAPACITY))
        self._values = np.zeros(self._shape(1, _FIRST_CAPACITY))

    def load(self, version: str) -> None:
        """Change to the weights of `version`. The cache stays: whoever wants it recomputed feeds the tokens again."""
        self.weights = draw_weights(self.config, self.seed, version)

    def extend(self, slot: int, tokens: npt.NDArray[np.int32], start: int) -> tuple[Floats, Ints]:
        """Feed tokens [T] at positions start.. of one slot, whose rows below `start` are there.

        Returns the hidden rows [T, d] and the expert routes int32 [T, layers, experts_per_token].
        """
        end = start + len(tokens)
        self._reserve(slot + 1, end)
        positions = np.arange(start, end)
        hidden_future = np.where(np.arange(end)[None, :] > positions[:, None], -np.inf, 0.0)

        def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
            keys, values = self._keys[layer, slot], self._values[layer, slot]
            keys[:, start:end] = k.transpose(1, 0, 2)
            values[:, start:end] = v.transpose(1, 0, 2)
            scores = q.transpose(1, 0, 2) @ keys[:, :end].transpose(0, 2, 1) + hidden_future
            mixed: Floats = (_softmax(scores) @ values[:, :end]).transpose(1, 0, 2)
            return mixed

        return self._run(tokens, positions, attend)

    def decode(
        self, slots: list[int], tokens: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> tuple[Floats, Ints]:
        """Feed one token [B] to each slot, at positions [B]. Returns hidden [B, d] and routes int32 [B, layers, k]."""
        count, longest = len(slots), int(positions.max()) + 1
        self._reserve(max(slots) + 1, longest)
        rows = np.asarray(slots)
        dense = bool((rows == np.arange(count)).all())
        hidden_future = np.where(np.arange(longest)[None, :] > positions[:, None], -np.inf, 0.0)[:, None, :]

        def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
            keys, values = self._keys[layer], self._values[layer]
            keys[rows, :, positions] = k
            values[rows, :, positions] = v
            live_keys = keys[:count, :, :longest] if dense else keys[rows, :, :longest]
            live_values = values[:count, :, :longest] if dense else values[rows, :, :longest]
            scores = (live_keys @ q[..., None])[..., 0] + hidden_future
            mixed: Floats = (_softmax(scores)[:, :, None, :] @ live_values)[:, :, 0, :]
            return mixed

        return self._run(tokens, positions, attend)

    def logits(self, hidden: Floats, positions: npt.NDArray[np.int64]) -> Floats:
        """Logits float64 [N, V] after hidden rows [N, d] at positions [N]."""
        return head_logits(self.weights, hidden, positions)

    def move(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` cache rows of slot `source` to slot `target` (a hole is being filled)."""
        self._keys[:, target, :, :rows] = self._keys[:, source, :, :rows]
        self._values[:, target, :, :rows] = self._values[:, source, :, :rows]

    def save(self, slot: int, rows: int) -> tuple[Floats, Floats]:
        """Copies of the first `rows` cache rows of a slot, each [layers, HEADS, rows, head_dim]."""
        return self._keys[:, slot, :, :rows].copy(), self._values[:, slot, :, :rows].copy()

    def restore(self, slot: int, keys: Floats, values: Floats, rows: int) -> None:
        """Put the first `rows` rows of what `save` returned into a slot."""
        self._reserve(slot + 1, rows)
        self._keys[:, slot, :, :rows] = keys[:, :, :rows]
        self._values[:, slot, :, :rows] = values[:, :, :rows]

    def _run(
        self, tokens: npt.NDArray[np.int32], positions: npt.NDArray[np.int64], attend: Attend
    ) -> tuple[Floats, Ints]:
        config, count = self.config, len(tokens)
        cos, sin = self._cos[positions], self._sin[positions]
        x = self.weights.embed[tokens]
        routes = np.empty((count, config.layers, config.experts_per_token), dtype=np.int32)
        for index, layer in enumerate(self.weights.layers):
            qkv = (rms_norm(x) @ layer.qkv).reshape(count, 3, HEADS, config.head_dim)
            q = rotate(qkv[:, 0], cos, sin) / np.sqrt(config.head_dim)
            k = rotate(qkv[:, 1], cos, sin)
            x = x + attend(index, q, k, qkv[:, 2]).reshape(count, -1) @ layer.out
            h = rms_norm(x)
            ids, gates = route(h @ layer.router, config.experts_per_token)
            routes[:, index] = ids
            x += experts_output(layer, h, ids, gates, config.num_experts)
        return x, routes

    def _shape(self, slots: int, capacity: int) -> tuple[int, int, int, int, int]:
        return self.config.layers, slots, HEADS, capacity, self.config.head_dim

    def _reserve(self, slots: int, rows: int) -> None:
        _, have_slots, _, have_rows, _ = self._keys.shape
        if slots <= have_slots and rows <= have_rows:
            return
        want_slots = have_slots if slots <= have_slots else max(slots, 2 * have_slots)
        want_rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows)
        for name in ("_keys", "_values"):
            grown = np.zeros(self._shape(want_slots, want_rows))
            grown[:, :have_slots, :, :have_rows] = getattr(self, name)
            setattr(self, name, grown)


def _softmax(scores: Floats) -> Floats:
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
