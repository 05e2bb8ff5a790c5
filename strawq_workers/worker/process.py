"""A worker as a process: open the pool and the engines, run, leave.

The rule: the first SIGTERM or SIGINT ends the work in good order (requests aborted, prefixes saved, leases given back),
whatever hooks do; the second one ends the process at once; then the leases that are left expire, and nothing that was
saved is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from strawq.errors import BadInput
from strawq.pool import Pool
from strawq.upkeep import Upkeep
from strawq_workers.daemon_threads import DaemonThreads
from strawq_workers.sglang.fleet import Fleet
from strawq_workers.signals import Number, first_signal
from strawq_workers.worker.hooks import Hooks
from strawq_workers.worker.loop import Worker, make_admission
from strawq_workers.worker.metrics import Counters, WorkerSummary, log_line
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.place import Place
from strawq_workers.worker.source import PoolSource

log = logging.getLogger("strawq.worker")

HOOKS_S = 15.0
"""Of the last reports, when generate functions have had `abort_timeout_s`, and so long again to be cancelled."""
ENDING_S = 30.0
"""The same, and of what follows."""


def run_worker(pool: str | os.PathLike[str], options: WorkerOptions) -> WorkerSummary:
    """Work on the pool in directory `pool` until its queue is sealed and empty, or until a signal. Blocks.

    Raises `BadInput` (options, hooks), `EngineUnavailable` (no engine has answered for `engine_timeout_s`),
    `OperatorNeeded` (storage); before that, everything in hand has been given back."""
    return asyncio.run(_until_a_signal(pool, options))


async def _until_a_signal(pool: str | os.PathLike[str], options: WorkerOptions) -> WorkerSummary:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.set_default_executor(DaemonThreads())

    def told(number: Number) -> None:
        log.warning("%s: giving back what is in hand; a second signal ends at once", number.name)
        stop.set()

    def on_signal(number: Number) -> None:
        loop.call_soon_threadsafe(told, number)

    # Not a handler of the loop's: a hook may stand still on the loop, and the second signal is heard nevertheless.
    with first_signal(on_signal, log.warning, ENDING_S + 2 * options.abort_timeout_s):
        return await work(pool, options, stop=stop)


async def work(
    pool: str | os.PathLike[str],
    options: WorkerOptions,
    *,
    stop: asyncio.Event | None = None,
    started: Callable[[Worker], None] | None = None,
) -> WorkerSummary:
    """As `run_worker`, on a running event loop, until `stop` is set. `started` gets the worker before its first
    lease."""
    stop = stop or asyncio.Event()
    hooks = Hooks(options)
    opened = await asyncio.to_thread(Pool.open, Path(pool), role=options.role, lease_seconds=options.lease_seconds)
    queue: PoolSource | None = None
    upkeep = Upkeep(opened, options.gc_seconds)
    try:
        if options.online_gc:
            upkeep.start()
        queue = await asyncio.to_thread(PoolSource, opened, options.queue, options.io_concurrency)
        fleet = await open_fleet(options, stop)
        if fleet is None:
            return WorkerSummary(reason="signal", seconds=0.0, counters=Counters())
        async with fleet:
            place = Place(options, queue, fleet, hooks, make_admission(options, fleet))
            summary = await run_until(Worker(place), stop, started)
        log.info("ended (%s): %s", summary.reason, log_line(summary.counters, 0))
        return summary
    finally:
        await _apart(upkeep.close)
        if queue is not None:
            await queue.close()
        await _apart(opened.close)


async def _apart(call: Callable[[], None]) -> None:
    """In a thread of its own: not in the loop's, where hooks may stand still."""
    thread = ThreadPoolExecutor(1)
    await asyncio.get_running_loop().run_in_executor(thread, call)
    thread.shutdown(wait=False)


async def run_until(
    worker: Worker, stop: asyncio.Event, started: Callable[[Worker], None] | None = None
) -> WorkerSummary:
    """Run the worker until its work ends or `stop` is set. Answers and raises as `Worker.run`. Groups that cannot be
    given back in time, for a tokenize hook that stands still say, are left to the end of the session."""
    if started is not None:
        started(worker)

    async def pass_on() -> None:
        await stop.wait()
        worker.place.stop("signal")
        await asyncio.sleep(HOOKS_S + 2 * worker.place.options.abort_timeout_s)
        for task, run in list(worker.runs.items()):
            log.warning("task %s is not given back: what it waits for stands still", run.task)
            run.lose("the worker has to end")
            task.cancel()

    passing = asyncio.ensure_future(pass_on())
    try:
        return await worker.run()
    finally:
        passing.cancel()


async def open_fleet(options: WorkerOptions, stop: asyncio.Event) -> Fleet | None:
    """The engines, checked, or None if the worker was told to stop before one answered. Raises `EngineUnavailable`,
    or `BadInput` for what every request would be refused for."""
    opening = asyncio.ensure_future(Fleet.open(options.engines, options.engine_options()))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        both: set[asyncio.Future[object]] = {opening, stopping}  # type: ignore[arg-type]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            fleet = opening.result()
            try:
                _check_engines(fleet, options)
            except BaseException:
                await fleet.close()
                raise
            return fleet
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        return None
    finally:
        stopping.cancel()


def _check_engines(fleet: Fleet, options: WorkerOptions) -> None:
    for engine in fleet.engines:
        if options.routed_experts and engine.connected and engine.server.enable_return_routed_experts is False:
            raise BadInput(
                f"{engine.url} does not capture routed experts: start it with --enable-return-routed-experts, or run "
                "the worker without routed_experts"
            )
    if options.pause_policy == "in_place" and any(engine.state == "held" for engine in fleet.engines):
        # Whoever has paused them may be loading weights: to continue them is not for a worker that has just come.
        log.warning(
            "engines are paused as the worker starts; they go on at the next resume, or by /continue_generation"
        )
