"""One request while it lives in the engine.

The rule: only the scheduler writes it, lists only grow, `published` is raised after them, and `closed` is set last of
all. Another thread may therefore read, without a lock, the first `published` entries of every per-token list, and
everything once `closed` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from strawq_workers.engine.generate import RequestSpec
from strawq_workers.engine.model import Floats, Ints
from strawq_workers.engine.vocabulary import EOS_ID, token_bytes

ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE: dict[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}


class TopRows:
    """The k most likely tokens of successive positions: ids and log-probs, both lists of arrays [k], best first."""

    __slots__ = ("ids", "logprobs")

    def __init__(self) -> None:
        self.ids: list[Ints] = []
        self.logprobs: list[Floats] = []

    def add(self, row: Floats, k: int) -> None:
        best = np.argsort(-row, kind="stable")[:k].astype(np.int32)
        self.ids.append(best)
        self.logprobs.append(row[best])


class Request:
    """State of one sequence: tokens is prompt + output, `computed` of them cached; routes [>= computed, layers, k]."""

    def __init__(self, spec: RequestSpec, seed: int, routes_shape: tuple[int, int], now: float) -> None:
        self.spec = spec
        self.seed = seed
        self.tokens: list[int] = list(spec.prompt)
        self.prompt_length = len(spec.prompt)
        self.arrived = now
        self.notify: Callable[[], None] | None = None
        self.streams = False
        self.slot: int | None = None
        self.computed = 0
        self.cached = 0
        self.retractions = 0
        self.due = 0.0
        self.routes: Ints = np.zeros((self.prompt_length + 32, *routes_shape), dtype=np.int32)
        self.spans: list[tuple[str, int, int]] = []
        self.version = ""
        self.logprobs: list[float] = []
        self.top = TopRows()
        self.token_ids_logprobs: list[Floats] = []
        self.sampling_masks: list[list[int]] = []
        self.sampling_logprobs: list[float] = []
        self.input_logprobs: list[float] = []
        self.input_top = TopRows()
        self.input_token_ids_logprobs: list[Floats] = []
        self.data = bytearray()
        self.text_end: int | None = None
        self.published = 0
        self.closed = False
        self.finish: dict[str, Any] | None = None
        stop_ids = {EOS_ID, *(spec.params.stop_token_ids or ())}
        self._stop_ids = frozenset() if spec.params.ignore_eos else frozenset(stop_ids)
        self._stops = spec.params.stops

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    def store_routes(self, start: int, rows: Ints) -> None:
        """Put rows [T, layers, k] at positions start.. (recomputed ones overwrite, as in SGLang)."""
        end = start + len(rows)
        if end > len(self.routes):
            grown = np.zeros((max(end, 2 * len(self.routes)), *self.routes.shape[1:]), dtype=np.int32)
            grown[:start] = self.routes[:start]
            self.routes = grown
        self.routes[start:end] = rows

    def append(self, token: int, version: str) -> None:
        """Take a sampled token that the weights of `version` made."""
        if self.spans and self.spans[-1][0] == version:
            name, start, end = self.spans[-1]
            self.spans[-1] = (name, start, end + 1)
        else:
            self.spans.append((version, self.output_length, self.output_length + 1))
        self.version = version
        self.tokens.append(token)
        before = len(self.data)
        self.data += token_bytes(token, skip_special=self.spec.params.skip_special_tokens)
        self.finish = self._finish_of(token, before)

    def _finish_of(self, token: int, before: int) -> dict[str, Any] | None:
        trim = not self.spec.params.no_stop_trim
        if token in self._stop_ids:
            self.text_end = before if trim else None
            return {"type": "stop", "matched": token}
        for stop in self._stops:
            at = self.data.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                self.text_end = at if trim else None
                return {"type": "stop", "matched": stop.decode("utf-8", errors="surrogatepass")}
        if self.output_length >= self.spec.max_new_tokens:
            return {"type": "length", "length": self.output_length}
        return None

    def live_tokens(self) -> npt.NDArray[np.int32]:
        """The tokens that are in the cache, int32 [computed]."""
        return np.asarray(self.tokens[: self.computed], dtype=np.int32)
