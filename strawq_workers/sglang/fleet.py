"""Several engines as one: the least loaded takes the next request, dead ones are left out and taken back when they
return.

The rule: a passing failure is retried, here or elsewhere, until `retry_s` is over, and a permanent one never. Requests
beyond `concurrency` per engine wait in this process. What makes no sense is asked of another engine, and counts against
the one that answered so (`trials`). Controls (abort, pause, weights) go to *every* engine directly, because a router
does not pass them on; one that is not reached is named in an error, a dead one is paused on its return, before work.

A router is used for plain requests only. It drops fields that it does not know without an error, so requests for R3
rows go round it unless a trial at the start came back with rows.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Set
from typing import Any

from strawq.errors import BadInput, EngineUnavailable, Misaligned, StrawqError
from strawq_workers.sglang.client import EngineClient, PauseMode
from strawq_workers.sglang.flight import AbortUnconfirmed, AnyOf, StopSignal, sleep_or
from strawq_workers.sglang.info import RouterWorker, RouterWorkers, decode_info
from strawq_workers.sglang.options import EngineOptions
from strawq_workers.sglang.segment import Segment, empty_segment
from strawq_workers.sglang.transport import Transport
from strawq_workers.sglang.trials import blame, passes_routes, try_again
from strawq_workers.sglang.wire import GenerateRequest, ModelShape, check_request
from strawq_workers.telling import Telling

log = logging.getLogger("strawq.engines")


class Fleet:
    """Engines behind one face. Make it with `await Fleet.open(urls, ...)`, end it with `close()` or `async with`."""

    def __init__(self, options: EngineOptions, shape: ModelShape | None) -> None:
        self.options = options
        self._given_shape = shape
        self._engines: dict[str, EngineClient] = {}
        self._routers: dict[str, EngineClient] = {}
        self._router_passes_routes: dict[str, bool] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._halts: set[asyncio.Event] = set()
        self._turn = 0
        self._closed = False
        self.paused: PauseMode | None = None

    @classmethod
    async def open(
        cls, urls: Sequence[str], options: EngineOptions | None = None, shape: ModelShape | None = None
    ) -> Fleet:
        """Engines, or routers whose engines are found through them. Returns when one engine is up; `EngineUnavailable`
        after `start_timeout_s`, `BadInput` if an engine cannot be used as it is."""
        if not urls:
            raise BadInput("no engine URL was given")
        fleet = cls(options or EngineOptions(), shape)
        try:
            await fleet._start(urls)
        except BaseException:
            await fleet.close()
            raise
        return fleet

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._wake(len(self._waiters))
        await asyncio.gather(*(client.close() for client in [*self._routers.values(), *self._engines.values()]))

    @property
    def engines(self) -> tuple[EngineClient, ...]:
        return tuple(self._engines.values())

    @property
    def slots(self) -> int:
        """Requests that may be in flight at once on the engines that live (C · E)."""
        return self.options.concurrency * sum(engine.state in ("up", "held") for engine in self.engines)

    @property
    def shape(self) -> ModelShape:
        """Of the first engine that has answered. Raises `EngineUnavailable` if none has."""
        for engine in self.engines:
            if engine.connected:
                return engine.shape
        raise self._nobody()

    # -- start, health, routers -----------------------------------------------------------------------------------

    async def _start(self, urls: Sequence[str]) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + self.options.start_timeout_s
        pending = list(dict.fromkeys(url.rstrip("/") for url in urls))
        delay, telling = self.options.backoff_s, Telling(clock)
        while True:
            refused: EngineUnavailable | None = None
            for url in list(pending):
                try:
                    await self._adopt(url)
                    pending.remove(url)
                except EngineUnavailable as failed:
                    refused = failed
            for engine in self.engines:
                if engine.state not in ("up", "held"):
                    await self._probe(engine)
                if isinstance(engine.unusable, BadInput):
                    raise engine.unusable
            if any(engine.state in ("up", "held") for engine in self.engines) or clock() >= end:
                break
            if telling.due(waited_for := str(refused or self._nobody())):
                log.warning("no engine yet, asking again for %.0f s: %s", max(0.0, end - clock()), waited_for)
            await asyncio.sleep(delay)
            delay = min(2 * delay, self.options.backoff_max_s)
        for url in pending:  # not reachable: taken for an engine that is down, and asked again by its watcher
            self._add_engine(url)
        if not any(engine.state in ("up", "held") for engine in self.engines):
            if refused is not None:
                raise EngineUnavailable(f"{refused}; start the engine, or correct its URL") from refused
            raise self._nobody()
        for url, router in self._routers.items():
            await router.probe()
            self._router_passes_routes[url] = await passes_routes(router, self.shape)

    async def _adopt(self, url: str) -> None:
        workers = await self._workers_of(url)
        if workers is None:
            self._add_engine(url)
            return
        if url not in self._routers:
            router = EngineClient(url, self.options, self._given_shape)
            router.ready_path = "/readiness"
            router.controllers = lambda: self.engines
            self._routers[url] = router
            self._keep(f"router {url}", self._follow(router))
        if not workers:
            raise EngineUnavailable(f"the router {url} lists no workers yet")
        for worker in workers:
            self._add_engine(worker.url)

    async def _workers_of(self, url: str) -> list[RouterWorker] | None:
        transport = self._routers[url].transport if url in self._routers else Transport(url, self.options)
        try:
            status, body = await transport.control_status("GET", "/workers")
        finally:
            if url not in self._routers:
                await transport.close()
        if status in (404, 405):
            return None
        if status >= 400:
            raise EngineUnavailable(f"GET {url}/workers: status {status}")
        return decode_info(body, RouterWorkers, what=f"GET {url}/workers").workers

    def _add_engine(self, url: str) -> None:
        url = url.rstrip("/")
        if url not in self._engines:
            self._engines[url] = EngineClient(url, self.options, self._given_shape)
            self._keep(f"engine {url}", self._watch(self._engines[url]))

    def _keep(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs a watcher for the fleet's life. One that ends by a fault of ours is reported, for nobody awaits it
        before `close`."""

        def over(done: asyncio.Task[None]) -> None:
            if not done.cancelled() and done.exception() is not None:
                log.error("the watcher of %s has died", name, exc_info=done.exception())

        task = asyncio.ensure_future(work)
        task.add_done_callback(over)
        self._tasks[name] = task

    async def _watch(self, engine: EngineClient) -> None:
        while not self._closed:
            await sleep_or(engine.doubted, self.options.probe_interval_s)
            if engine.doubted.is_set():
                await asyncio.sleep(self.options.backoff_s * (0.5 + random.random() / 2))
            engine.doubted.clear()
            await self._probe(engine)
            if self.paused is None:
                await try_again(engine, at_once=not any(other.state == "up" for other in self.engines))

    async def _probe(self, engine: EngineClient) -> None:
        was = engine.state
        await engine.probe()
        if engine.state in ("up", "held", "aside"):
            try:
                if was in ("new", "down") and (mode := self.paused) is not None:
                    engine.state, engine.paused = "held", None  # no work before the pause; the next probe finds out
                    await engine.pause(mode)
                    if self.paused is None:  # resumed meanwhile, past this one
                        await engine.resume()
                engine.load = await engine.loads()
            except StrawqError as failed:
                engine.load = None
                log.debug("no load from %s: %s", engine.url, failed)
                if self.paused is not None and engine.paused is None:
                    engine.state = "down"
        if engine.state != was:
            self._wake(self.options.concurrency)

    async def _follow(self, router: EngineClient) -> None:
        """Takes in the engines that a router registers later. One that it drops stays until its own probes fail."""
        while not self._closed:
            await asyncio.sleep(self.options.probe_interval_s)
            try:
                await self._adopt(router.url)
                await router.probe()
            except StrawqError as failed:
                log.info("router %s: %s", router.url, failed)

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, stop: StopSignal | None = None) -> Segment:
        """The answer to one request from whichever engine is free.

        When `stop` is set, or on `abort_all`, the request ends as a segment with finish "abort" and the tokens made so
        far. Raises `BadInput`, `Misaligned` (the answers of every engine that is up make no sense), or
        `EngineUnavailable` once passing failures have lasted for `retry_s`."""
        check_request(request, self._given_shape or self.shape)
        halt = asyncio.Event()
        signal: StopSignal = halt if stop is None else AnyOf(halt, stop)
        self._halts.add(halt)
        try:
            return await self._retrying(request, signal)
        finally:
            self._halts.discard(halt)

    async def _retrying(self, request: GenerateRequest, stop: StopSignal) -> Segment:
        clock = asyncio.get_running_loop().time
        end, delay = clock() + self.options.retry_s, self.options.backoff_s
        avoid: set[str] = set()
        while True:
            engine = await self._claim(request, stop, end, avoid)
            if engine is None:
                return empty_segment(request, "abort")
            sent = clock()
            try:
                segment = await engine.attempt(request, stop)
                if segment.finish != "abort":
                    engine.record.sound()
                return segment
            except Misaligned as wrong:
                avoid.add(engine.url)
                others = [other.url for other in self.engines if other.state == "up" and other.url not in avoid]
                blame(engine, request, wrong, others)
                if not others:
                    raise
                continue
            except EngineUnavailable as failed:
                if stop.is_set():
                    raise AbortUnconfirmed(str(failed), engine.url) from failed
                engine.doubt(failed)
                now = clock()
                # Time that an engine spent at work on this request is not time spent retrying.
                end += now - sent if now - sent > self.options.backoff_max_s else 0.0
                if now + delay >= end:
                    raise EngineUnavailable(
                        f"no engine answered within {self.options.retry_s:g} s of tries: {failed}"
                    ) from failed
                log.info("trying again in %.1f s: %s", delay, failed)
            finally:
                engine.claimed -= 1
                self._wake(1)
            await sleep_or(stop, delay * (0.5 + random.random() / 2))
            delay = min(2 * delay, self.options.backoff_max_s)

    async def _claim(
        self, request: GenerateRequest, stop: StopSignal, end: float, avoid: Set[str]
    ) -> EngineClient | None:
        """An engine with a free slot; None if `stop` came first. Waits while some engine is up and merely full."""
        clock = asyncio.get_running_loop().time
        started = clock()
        while not stop.is_set():
            if self._closed:
                raise EngineUnavailable("the fleet was closed")
            engine = self._choose(request, avoid)
            if engine is not None:
                engine.claimed += 1
                return engine
            # Engines that are full or paused are waited for as long as a request may take, and cost no retry.
            alive = any(engine.state in ("up", "held") and engine.url not in avoid for engine in self.engines)
            limit = max(end, started + self.options.request_timeout_s) if alive else end
            if clock() >= limit:
                raise self._nobody()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            stopping = asyncio.ensure_future(stop.wait())
            try:
                both: set[asyncio.Future[Any]] = {waiter, stopping}
                await asyncio.wait(both, timeout=max(0.0, limit - clock()), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                elif stop.is_set():
                    self._wake(1)  # the slot that this one was woken for is somebody else's now
        return None

    def _choose(self, request: GenerateRequest, avoid: Set[str]) -> EngineClient | None:
        plain = not request.sampling.extra and request.sampling.seed is None and not request.top_logprobs
        up = sum(engine.state == "up" for engine in self.engines)
        for url, router in self._routers.items():
            passes = plain and (not request.routed_experts or self._router_passes_routes.get(url, False))
            if (
                self.options.prefer_router
                and passes
                and router.state == "up"
                and url not in avoid
                and router.claimed < up * self.options.concurrency
            ):
                return router
        usable = [e for e in self.engines if e.state == "up" and e.url not in avoid]
        free = [e for e in usable if e.claimed < self.options.concurrency]
        if not free:
            return None
        self._turn += 1
        turn = self._turn % len(free)
        # Load that others put on an engine counts as well, as of its last probe; equals take turns.
        return min(free[turn:] + free[:turn], key=lambda engine: engine.pressure)

    def _wake(self, count: int) -> None:
        while count > 0 and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _nobody(self) -> EngineUnavailable:
        said = "; ".join(engine.last_error for engine in self.engines) or "none is known"
        return EngineUnavailable(f"no engine of {len(self._engines)} is up: {said}")

    # -- control ------------------------------------------------------------------------------------------------

    async def abort_all(self, deadline_s: float | None = None) -> None:
        """Ends every request of this fleet, running or waiting for a slot, as aborted segments, and returns when all
        engines are idle.

        Other clients' requests on the same engines are aborted too. Raises `EngineUnavailable` naming each engine that
        is not idle."""
        for halt in list(self._halts):
            halt.set()
        await self._everywhere("abort", lambda engine: engine.abort_all(deadline_s))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Pauses every engine; one that returns later is paused on its return. Idempotent: repeat it after an error."""
        self.paused = mode
        await self._everywhere("pause", lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """Continues every engine."""
        self.paused = None
        await self._everywhere("resume", lambda engine: engine.resume())
        self._wake(len(self._waiters))

    async def flush_cache(self, deadline_s: float = 30.0) -> None:
        await self._everywhere("flush", lambda engine: engine.flush_cache(deadline_s))

    async def update_weights_from_disk(self, model_path: str, weight_version: str, *, flush_cache: bool = True) -> None:
        """Loads one set of weights into every engine."""
        await self._everywhere(
            "update weights",
            lambda engine: engine.update_weights_from_disk(model_path, weight_version, flush_cache=flush_cache),
        )

    async def weight_versions(self) -> dict[str, str]:
        """URL to weight version ("" if an engine reports none), for engines that live."""
        up = [engine for engine in self.engines if engine.state in ("up", "held")]
        versions = await asyncio.gather(*(engine.weight_version() for engine in up))
        return {engine.url: version for engine, version in zip(up, versions, strict=True)}

    async def _everywhere(self, verb: str, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        """`call` on every engine that is not known to be dead; the first kind of failure is raised, naming all engines
        that failed."""
        engines = [engine for engine in self.engines if engine.failed_probes < self.options.dead_after]
        results = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, StrawqError):
                raise failure
        if not engines:
            raise self._nobody()
        if failures:
            text = "; ".join(str(failure) for failure in failures)
            kind = BadInput if all(isinstance(failure, BadInput) for failure in failures) else EngineUnavailable
            raise kind(f"could not {verb} {len(failures)} of {len(engines)} engines: {text}") from failures[0]
