"""Key/value rows of finished and prefilled sequences, to be used again by a request that begins with the same tokens.

The rule: what is returned was computed from exactly the tokens that it is returned for. Flushing forgets everything;
a weight update without a flush keeps rows of the old weights, as SGLang's radix cache does.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np
import numpy.typing as npt

from strawq_workers.engine.model import Floats, Ints

MAX_ENTRIES = 64
MAX_TOKENS = 65_536


class Prefix(msgspec.Struct, frozen=True):
    """Rows of one token sequence. keys, values [layers, HEADS, T, head_dim]; routes int32 [T, layers, k]."""

    tokens: npt.NDArray[np.int32]
    keys: Floats
    values: Floats
    routes: Ints


class PrefixCache:
    """Least recently used prefixes, at most MAX_ENTRIES of them and MAX_TOKENS tokens in all."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, Prefix] = OrderedDict()
        self.tokens = 0

    def find(self, tokens: npt.NDArray[np.int32], limit: int) -> tuple[Prefix, int] | None:
        """The entry that shares the longest beginning with `tokens`, and how many tokens of it (at most `limit`)."""
        best: bytes | None = None
        best_length = 0
        for key, entry in self._entries.items():
            length = min(len(entry.tokens), limit)
            if length <= best_length or entry.tokens[0] != tokens[0]:
                continue
            differs = np.flatnonzero(entry.tokens[:length] != tokens[:length])
            shared = int(differs[0]) if len(differs) else length
            if shared > best_length:
                best, best_length = key, shared
        if best is None:
            return None
        self._entries.move_to_end(best)
        return self._entries[best], best_length

    def add(self, prefix: Prefix) -> None:
        """Remember a sequence; one that it extends is dropped."""
        key = prefix.tokens.tobytes()
        for shorter in [other for other in self._entries if key.startswith(other)]:
            self.tokens -= len(self._entries.pop(shorter).tokens)
        self._entries[key] = prefix
        self.tokens += len(prefix.tokens)
        while self._entries and (len(self._entries) > MAX_ENTRIES or self.tokens > MAX_TOKENS):
            _, oldest = self._entries.popitem(last=False)
            self.tokens -= len(oldest.tokens)

    def flush(self) -> None:
        self._entries.clear()
        self.tokens = 0
