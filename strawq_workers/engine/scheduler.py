"""Which request computes next: admission, continuous batching, abort, pause, weight updates.

The rule: it is a plain state machine without threads or clocks of its own (`step(now)`), and a token belongs to the
weights that were loaded when it was sampled: weights change between two steps only.

A request is held (the engine is paused, or a weight update waits for those before it), waiting (no free slot),
running, or finished. Pausing aborts the others, freezes them in place, or retracts them (they give their slots back
and are computed again).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from strawq_workers.engine.decoder import Decoder
from strawq_workers.engine.generate import RequestSpec
from strawq_workers.engine.model import Floats, ModelConfig, log_softmax
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.prefix_cache import Prefix, PrefixCache
from strawq_workers.engine.refusals import Refused
from strawq_workers.engine.request import ABORTED, ABORTED_IN_QUEUE, Request
from strawq_workers.engine.sampling import adjust, sample, seed_of

PREFILL_TOKENS_PER_STEP = 256


class WeightUpdate(msgspec.Struct, frozen=True):
    """A change of weights that waits for its moment. version None keeps the one that is loaded."""

    version: str | None
    flush_cache: bool
    done: Callable[[str | None], None]  # called with None, or with why it was refused


class Loads(msgspec.Struct, frozen=True):
    """Counts for `/v1/loads`."""

    running: int
    waiting: int
    held: int
    weight_updates: int
    used_tokens: int
    cached_tokens: int
    generated_tokens: int
    paused: bool


class Scheduler:
    """All requests of one engine, and its model."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.config = ModelConfig(
            hidden=options.hidden_size,
            layers=options.num_layers,
            num_experts=options.num_experts,
            experts_per_token=options.experts_per_token,
            context_length=options.context_length,
        )
        self.decoder = Decoder(self.config, options.seed, options.weight_version)
        self.version = options.weight_version
        self.paused: str | None = None
        self.touched: list[Request] = []
        self.generated_tokens = 0
        self._cache = PrefixCache()
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._held: deque[Request] = deque()
        self._updates: deque[WeightUpdate] = deque()
        self._arrivals = 0

    # --- requests come and go ---------------------------------------------------------------------------------------

    def submit(self, specs: Iterable[RequestSpec], now: float, *, streams: bool = False) -> list[Request]:
        """Take the requests of one HTTP call, all or none. Raises Refused for a rid that is already in flight."""
        specs = list(specs)
        live = {request.spec.rid for request in self._all()}
        for spec in specs:
            if spec.rid in live:
                raise Refused(f"Duplicate request ID detected: {spec.rid}")
            live.add(spec.rid)
        taken: list[Request] = []
        for spec in specs:
            seed = spec.params.sampling_seed
            seed = seed_of(self.options.seed, self._arrivals) if seed is None else seed
            self._arrivals += 1
            request = Request(spec, seed, (self.config.layers, self.config.experts_per_token), now)
            request.streams = streams
            request.version = self.version
            taken.append(request)
        (self._held if self.paused or self._updates else self._waiting).extend(taken)
        return taken

    def abort(self, rid_prefix: str | None) -> int:
        """End every request whose rid begins with `rid_prefix` (SGLang matches by prefix); None ends all."""
        hit = [r for r in self._all() if rid_prefix is None or r.spec.rid.startswith(rid_prefix)]
        self.end(hit)
        return len(hit)

    def end(self, requests: Iterable[Request]) -> None:
        """Abort exactly these requests, where they are not finished yet."""
        for request in requests:
            if request.finish is not None:
                continue
            request.finish = ABORTED if request.output_length else ABORTED_IN_QUEUE
            if request.slot is not None:
                self._leave(request)
            for queue in (self._waiting, self._held):
                if request in queue:
                    queue.remove(request)
            self._publish(request)
        self._apply_updates()

    def _all(self) -> list[Request]:
        return [*self._running, *self._waiting, *self._held]

    # --- pause, weights, cache --------------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """Stop computing. abort ends all, in_place freezes, retract gives the slots back, to compute again later."""
        self.paused = mode
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for request in reversed(self._running):
                request.slot, request.computed = None, 0
                request.retractions += 1
                self._waiting.appendleft(request)
            self._running = []
        self._apply_updates()

    def resume(self) -> None:
        self.paused = None
        self._release_held()

    def update(self, update: WeightUpdate, *, abort_all: bool) -> None:
        """Change weights now if paused or idle; else when the requests before this call have ended."""
        self._updates.append(update)
        if abort_all:
            self.abort(None)
        self._apply_updates()

    def flush(self) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests hold or are about to take slots."""
        if self._running or (self._waiting and not self.paused):
            return False
        self._cache.flush()
        return True

    def loads(self) -> Loads:
        return Loads(
            running=len(self._running),
            waiting=len(self._waiting),
            held=len(self._held),
            weight_updates=len(self._updates),
            used_tokens=sum(len(request.tokens) for request in self._running),
            cached_tokens=self._cache.tokens,
            generated_tokens=self.generated_tokens,
            paused=self.paused is not None,
        )

    def _apply_updates(self) -> None:
        while self._updates and (self.paused or not (self._running or self._waiting)):
            update = self._updates.popleft()
            if update.flush_cache and self._running:
                update.done("Cache flush failed: requests are frozen in place. Send flush_cache=false.")
                continue
            if update.version is not None:
                self.decoder.load(update.version)
                self.version = update.version
            if update.flush_cache:
                self._cache.flush()
            update.done(None)
        self._release_held()

    def _release_held(self) -> None:
        if not self.paused and not self._updates:
            self._waiting.extend(self._held)
            self._held.clear()

    # --- one step ---------------------------------------------------------------------------------------------------

    def wait_seconds(self, now: float) -> float | None:
        """How long until there is something to compute: 0 now, None never (until a call changes something)."""
        if self.paused:
            return None
        if self._waiting and len(self._running) < self.options.max_running_requests:
            return 0.0
        if not self._running:
            return None
        return max(0.0, min(request.due for request in self._running) - now)

    def step(self, now: float) -> None:
        """Prefill up to PREFILL_TOKENS_PER_STEP tokens, then decode one token of each other request that is due."""
        if self.paused:
            return
        self._admit()
        ready = self._prefill()
        decoding = [r for r in self._running if r.due <= now and len(r.tokens) - r.computed == 1 and r not in ready]
        hidden = list(ready.values())
        if decoding:
            rows, routes = self.decoder.decode(
                [r.slot for r in decoding if r.slot is not None],
                np.array([r.tokens[-1] for r in decoding], dtype=np.int32),
                np.array([r.computed for r in decoding], dtype=np.int64),
            )
            hidden.append(rows)
            for request, row in zip(decoding, routes, strict=True):
                request.store_routes(request.computed, row[None])
                request.computed += 1
        batch = [*ready, *decoding]
        if batch:
            self._sample(batch, np.concatenate(hidden), now)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.options.max_running_requests:
            request = self._waiting.popleft()
            slot = request.slot = len(self._running)
            self._running.append(request)
            start = request.spec.wanted.logprob_start
            fresh = request.retractions == 0
            # Input log-probs need the rows themselves, so cached rows serve only positions before the first wanted one.
            limit = len(request.tokens) - 1 if start is None or not fresh else min(start, len(request.tokens) - 1)
            found = self._cache.find(np.asarray(request.tokens, dtype=np.int32), limit)
            if found is not None:
                prefix, rows = found
                self.decoder.restore(slot, prefix.keys, prefix.values, rows)
                request.store_routes(0, prefix.routes[:rows])
                request.computed = rows
            if fresh:
                request.cached = request.computed

    def _prefill(self) -> dict[Request, Floats]:
        """Feed prompts. Returns, for each request whose last token was fed, its last hidden row [1, d]."""
        ready: dict[Request, Floats] = {}
        budget = PREFILL_TOKENS_PER_STEP
        for request in self._running:
            todo = len(request.tokens) - request.computed
            if budget <= 0 or (todo == 1 and request.output_length):
                continue
            count, start = min(todo, budget), request.computed
            budget -= count
            assert request.slot is not None
            chunk = np.asarray(request.tokens[start : start + count], dtype=np.int32)
            hidden, routes = self.decoder.extend(request.slot, chunk, start)
            request.store_routes(start, routes)
            request.computed += count
            self._input_logprobs(request, hidden, start)
            if count == todo:
                ready[request] = hidden[-1:]
                self._remember(request)
        return ready

    def _input_logprobs(self, request: Request, hidden: Floats, start: int) -> None:
        wanted = request.spec.wanted
        if wanted.logprob_start is None or request.retractions:
            return
        first = max(start, wanted.logprob_start)
        last = min(start + len(hidden), request.prompt_length - 1)
        if first >= last:
            return
        positions = np.arange(first, last)
        logprobs = log_softmax(self.decoder.logits(hidden[first - start : last - start], positions))
        for position, row in zip(positions, logprobs, strict=True):
            request.input_logprobs.append(float(row[request.tokens[position + 1]]))
            if wanted.top:
                request.input_top.add(row, wanted.top)
            if wanted.token_ids:
                request.input_token_ids_logprobs.append(row[list(wanted.token_ids)])

    def _sample(self, batch: list[Request], hidden: Floats, now: float) -> None:
        logits = self.decoder.logits(hidden, np.array([r.computed - 1 for r in batch], dtype=np.int64))
        for request, row in zip(batch, logits, strict=True):
            if request.spec.params.touches_logits:
                adjust(row, request.spec.params, request.tokens, request.prompt_length)
        logprobs = log_softmax(logits)
        params = [r.spec.params for r in batch]
        tokens, within = sample(logits, params, [r.seed for r in batch], [r.computed for r in batch])
        pace = self.options.tokens_per_second
        for place, (request, token) in enumerate(zip(batch, tokens, strict=True)):
            if request.spec.max_new_tokens == 0:
                request.finish = {"type": "length", "length": 0}
            else:
                self._record(request, logprobs[place], token, within.get(place))
                self.generated_tokens += 1
            if pace is not None:
                # A late step is made up for, by one token at most.
                base = max(request.due, now - 1.0 / pace) if request.due else now
                request.due = base + 1.0 / pace
            if request.finish is not None:
                self._leave(request)
            if request.finish is not None or request.streams:
                self._publish(request)
        self._apply_updates()

    def _record(self, request: Request, row: Floats, token: int, within: tuple[np.ndarray, float] | None) -> None:
        wanted = request.spec.wanted
        request.logprobs.append(float(row[token]))
        if wanted.top:
            request.top.add(row, wanted.top)
        if wanted.token_ids:
            request.token_ids_logprobs.append(row[list(wanted.token_ids)])
        if wanted.sampling_mask:
            mask, logprob = within if within is not None else (np.ones(len(row), dtype=bool), float(row[token]))
            kept = np.flatnonzero(mask)
            request.sampling_masks.append([int(t) for t in kept[np.argsort(-row[kept], kind="stable")]])
            request.sampling_logprobs.append(logprob)
        request.append(token, self.version)

    def _publish(self, request: Request) -> None:
        request.published = request.output_length
        request.closed = request.finish is not None
        self.touched.append(request)

    def _remember(self, request: Request) -> None:
        if request.slot is not None and request.computed:
            keys, values = self.decoder.save(request.slot, request.computed)
            routes = request.routes[: request.computed].copy()
            self._cache.add(Prefix(request.live_tokens(), keys, values, routes))

    def _leave(self, request: Request) -> None:
        """Free the slot of a running request; the last slot moves into the hole."""
        self._remember(request)
        hole = request.slot
        last = self._running.pop()
        if last is not request:
            assert hole is not None and last.slot is not None
            self.decoder.move(last.slot, hole, last.computed)
            last.slot = hole
            self._running[hole] = last
        request.slot = None
