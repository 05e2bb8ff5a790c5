"""One engine: generate, abort, pause, weights. What it is and whether it lives is in `watched`.

The rule: every attempt has a random request id of a fixed length, never used before and never empty, for SGLang aborts
by prefix. An abort is done when the request's answer is here or the engine is idle, not when the engine said 200; after
the deadline the connection is closed, so that a late answer has nowhere to arrive. A cancelled caller's request is
aborted on the engine too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from strawq.errors import BadInput, EngineUnavailable, StrawqError, TryAgain
from strawq_workers.sglang.arrivals import DECODE_IN_THREAD_BYTES, READ_EVERY_S, arriving, decoded, decoded_frames
from strawq_workers.sglang.flight import Flight, StopSignal, wait_any
from strawq_workers.sglang.options import EngineOptions
from strawq_workers.sglang.refusal import refusal_in_stream
from strawq_workers.sglang.segment import Segment, empty_segment, segment_of, segment_of_cut
from strawq_workers.sglang.stream import FrameParser
from strawq_workers.sglang.watched import PauseMode, WatchedEngine
from strawq_workers.sglang.wire import Chunk, GenerateRequest, ModelShape, check_request, encode_request

__all__ = ["EngineClient", "PauseMode"]

log = logging.getLogger("strawq.engines")

RID_BYTES = 16
HELD_KEPT = 4096
CHASES = 3


class EngineClient(WatchedEngine):
    """One engine. `await connect()` before use, `await close()` at the end."""

    def __init__(self, url: str, options: EngineOptions | None = None, shape: ModelShape | None = None) -> None:
        super().__init__(url, options, shape)
        self.controllers: Callable[[], Sequence[EngineClient]] = lambda: [self]
        self._reports_spans = False
        self._flights: dict[str, Flight] = {}
        self._held: deque[str] = deque(maxlen=HELD_KEPT)
        self._errands: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    async def probe(self) -> None:
        """As `WatchedEngine.probe`; nobody waits any longer for the answers of an engine that is dead."""
        await super().probe()
        if self.failed_probes >= self.options.dead_after:
            dead = f"{self.url} is dead ({self.failed_probes} probes failed): {self.last_error}"
            for flight in list(self._flights.values()):
                flight.give_up(EngineUnavailable(dead))

    # -- generation ---------------------------------------------------------------------------------------------

    async def attempt(self, request: GenerateRequest, stop: StopSignal | None = None) -> Segment:
        """One try, under a fresh request id.

        When `stop` is set, the request is aborted and the tokens made so far come back as a segment that ends in
        "abort". Raises `BadInput` (the request is wrong), `Misaligned` (the answer is), `EngineUnavailable` (try again,
        here or elsewhere)."""
        if request.routed_experts and self.server.enable_return_routed_experts is False:
            raise BadInput(f"{self.url} does not capture routed experts: start it with --enable-return-routed-experts")
        check_request(request, self.shape)
        if request.sampling.max_new_tokens == 0:
            return empty_segment(request, "length", engine_url=self.url)
        before = self.model.version if self._reports_spans else await self.weight_version()
        if stop is not None and stop.is_set():
            return empty_segment(request, "abort", engine_url=self.url)
        rid = secrets.token_hex(RID_BYTES)
        flight = Flight(rid, f"{self.url} request {rid}", at_door=self.paused is not None)
        streamed = self.options.stream
        if streamed is None:
            # Top-k comes as compact base64 in whole answers only.
            streamed = self.server.incremental_streaming_output is True and not request.top_logprobs
        body = encode_request(request, rid, stream=streamed)
        flight.sending = asyncio.ensure_future(self._exchange(flight, body))
        self._flights[rid] = flight
        try:
            await self._await_or_stop(flight, stop)
            await asyncio.wait({flight.sending})  # given up is not yet over
            return await self._settle(flight, request, before)
        except asyncio.CancelledError:
            self._abort_later(rid)
            raise
        finally:
            del self._flights[rid]
            if not flight.sending.done():
                flight.sending.cancel()
                self._run_on(flight.sending)

    async def _exchange(self, flight: Flight, body: bytes) -> None:
        what = flight.answer.what
        async with self.transport.generation(body, what=what) as answer:
            if answer.content_type == "text/event-stream":
                await self._read_stream(flight, answer)
                return
            whole = await self.transport.read_whole(answer, what=what)
            flight.received += len(whole)
        self._take(flight, await decoded(whole, what=what))

    async def _read_stream(self, flight: Flight, answer: aiohttp.ClientResponse) -> None:
        frames = FrameParser()
        what = flight.answer.what
        every = min(READ_EVERY_S, self.options.idle_grace_s / 2)
        until = asyncio.get_running_loop().time() + self.options.request_timeout_s
        async for data in arriving(answer.content, every, until):
            flight.received += len(data)
            if flight.received > self.options.answer_bytes_max:
                raise EngineUnavailable(
                    f"{what}: the stream is longer than answer_bytes_max {self.options.answer_bytes_max}"
                )
            payloads = frames.feed(data)
            for chunk in await decoded_frames(payloads, what=what):
                self._take(flight, chunk)
            if frames.done:
                break
        if not flight.answer.ended:
            raise EngineUnavailable(
                f"{what}: the stream ended after {flight.answer.total} tokens without a finish reason"
            )

    def _take(self, flight: Flight, chunk: Chunk) -> None:
        if chunk.refused:
            raise refusal_in_stream(bytes(chunk.error), what=flight.answer.what)
        flight.answer.add(chunk)

    async def _await_or_stop(self, flight: Flight, stop: StopSignal | None) -> None:
        if stop is None:
            await asyncio.wait({flight.sending})
            return
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({flight.sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if not flight.sending.done():
            await self._abort_flight(flight)

    async def _settle(self, flight: Flight, request: GenerateRequest, before: str) -> Segment:
        """The segment of a flight whose sending is over, or the reason why there is none."""
        answer, shape = flight.answer, self.shape
        error: BaseException | None = flight.failure
        if error is None and flight.sending.cancelled():
            return self._salvage(flight, request, before)
        if error is None:
            error = flight.sending.exception()
        if isinstance(error, EngineUnavailable):
            self._abort_later(flight.rid)
            kept = self._salvage(flight, request, before) if self.options.salvage and flight.failure is None else None
            if kept is not None and kept.tokens:
                log.warning("kept %d tokens of a request that broke off: %s", kept.tokens, error)
                return kept
            raise error
        if error is not None:
            raise error
        if answer.withdrawn:
            return self._salvage(flight, request, before)
        after = ""
        if answer.last.weight_versions is not None:
            self._reports_spans = True
        else:
            self._reports_spans = False
            after = answer.last.weight_version or await self.weight_version()
        args = {"rid": flight.rid, "before": before, "after": after, "url": self.url}
        if flight.received > DECODE_IN_THREAD_BYTES:
            return await asyncio.to_thread(segment_of, answer, request, shape, **args)
        return segment_of(answer, request, shape, **args)

    def _salvage(self, flight: Flight, request: GenerateRequest, before: str) -> Segment:
        return segment_of_cut(flight.answer, request, self.shape, before=before, url=self.url)

    # -- abort --------------------------------------------------------------------------------------------------

    async def _abort_flight(self, flight: Flight) -> None:
        """Aborts one request by its own id until its answer is here. The abort is sent again and again: one that
        overtakes its request is ignored by the engine."""
        await self._abort_until({"rid": flight.rid}, lambda: [flight], self.options.abort_deadline_s, wait_idle=False)

    async def abort_all(self, deadline_s: float | None = None) -> None:
        """Aborts everything on the engine, other clients' requests too, and returns when it is idle.

        Requests of this client end as aborted segments. Raises `EngineUnavailable` if the engine is not idle by the
        deadline."""
        deadline_s = deadline_s or self.options.abort_deadline_s
        await self._abort_until({"abort_all": True}, lambda: list(self._flights.values()), deadline_s, wait_idle=True)

    async def _abort_until(
        self, body: dict[str, Any], flights: Callable[[], list[Flight]], deadline_s: float, *, wait_idle: bool
    ) -> None:
        clock = asyncio.get_running_loop().time
        started = quiet_since = clock()
        received, said = -1, "it has not been asked"
        while True:
            pending = [flight for flight in flights() if not flight.sending.done()]
            if not pending and not wait_idle:
                return
            idle = False
            try:
                for engine in self.controllers():
                    await engine.transport.control("POST", "/abort_request", body)
                loads = [await engine.loads() for engine in self.controllers()]
                idle = all(load.idle for load in loads)
                said = f"{sum(x.running for x in loads)} requests run and {sum(x.waiting for x in loads)} wait"
            except StrawqError as failed:
                said = str(failed)
            pending = [flight for flight in pending if not flight.sending.done()]
            if idle and not pending:
                return
            # Requests at the door are not in the engine, and its load stands still while it is paused.
            idle = idle or (bool(pending) and all(flight.at_door for flight in pending))
            seen = sum(flight.received for flight in pending)
            if not idle or seen != received:
                quiet_since, received = clock(), seen
            elif clock() - quiet_since >= self.options.idle_grace_s:
                # Held at the door of a paused engine: it ignores aborts of these, and would run them after `continue`.
                for flight in pending:
                    flight.give_up(None)
                    self._held.append(flight.rid)
            if clock() - started >= deadline_s:
                late = EngineUnavailable(
                    f"{self.url} did not end its work within {deadline_s:g} s after the abort: {said}. "
                    "A late answer is discarded"
                    + (f". It is paused ({self.paused}): continue it" if self.paused else "")
                )
                for flight in pending:
                    flight.give_up(late)
                if wait_idle:
                    raise late
                return
            await wait_any([flight.sending for flight in pending], self.options.abort_poll_s)

    def _abort_later(self, rid: str) -> None:
        """Tells the engine in the background that nobody waits for `rid` any more; a whole answer's broken connection
        is noticed late."""

        async def tell() -> None:
            try:
                for engine in self.controllers():
                    await engine.transport.control(
                        "POST", "/abort_request", {"rid": rid}, timeout_s=self.options.probe_timeout_s
                    )
            except StrawqError as failed:
                log.info("request %s may run on: %s", rid, failed)

        self._run_on(asyncio.ensure_future(tell()))

    def _run_on(self, task: asyncio.Task[None]) -> None:
        """Keeps a task that nobody awaits until `close`. Its outcome is of no more interest: `tell` logs, a sending was
        given up."""

        def over(done: asyncio.Task[None]) -> None:
            self._errands.discard(done)
            if not done.cancelled() and done.exception() is not None:
                log.debug("after the end of a request: %s", done.exception())

        self._errands.add(task)
        task.add_done_callback(over)

    # -- control ------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stops generation. `abort` ends running requests with their tokens, `in_place` freezes them, `retract` queues
        them again."""
        await self.transport.control(
            "POST", "/pause_generation", {"mode": mode}, timeout_s=self.options.pause_timeout_s
        )
        self.paused = mode

    async def resume(self) -> None:
        """`/continue_generation`: frozen and held requests go on."""
        await self.transport.control("POST", "/continue_generation", {}, timeout_s=self.options.pause_timeout_s)
        self.paused = None
        self._run_on(asyncio.ensure_future(self._chase([*self._held])))
        self._held.clear()
        self.doubted.set()  # ask at once whether it takes requests again

    async def _chase(self, rids: list[str]) -> None:
        """Requests that were given up at the door enter now, though nobody listens. An abort that comes too early is
        ignored."""
        for _ in range(CHASES if rids else 0):
            await asyncio.sleep(self.options.abort_poll_s)
            for rid in rids:
                self._abort_later(rid)

    async def flush_cache(self, deadline_s: float = 30.0) -> None:
        """Empties the prefix cache. The engine refuses while it is busy; raises `TryAgain` if it stays so until the
        deadline."""
        clock = asyncio.get_running_loop().time
        end = clock() + deadline_s
        while True:
            status, _ = await self.transport.control_status("POST", "/flush_cache")
            if status < 400:
                return
            if status != 400:
                raise EngineUnavailable(f"POST {self.url}/flush_cache: status {status}")
            if clock() >= end:
                raise TryAgain(
                    f"{self.url} was busy for {deadline_s:g} s and did not flush its cache: "
                    "abort or await its requests first"
                )
            await asyncio.sleep(self.options.abort_poll_s)

    async def update_weights_from_disk(self, model_path: str, weight_version: str, *, flush_cache: bool = True) -> None:
        """Loads weights. Unpaused, SGLang waits for running requests. `flush_cache` must be False under an `in_place`
        pause."""
        body = {"model_path": model_path, "weight_version": weight_version, "flush_cache": flush_cache}
        await self.transport.control("POST", "/update_weights_from_disk", body, timeout_s=self.options.update_timeout_s)

    async def close(self) -> None:
        """Ends requests in flight, lets the last aborts out, closes connections."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.give_up(EngineUnavailable(f"the client of {self.url} was closed"))
        await wait_any([flight.sending for flight in flights], self.options.probe_timeout_s, every=True)
        await wait_any(list(self._errands), self.options.probe_timeout_s, every=True)
        await self.transport.close()
