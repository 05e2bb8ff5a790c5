"""The worker's loop: lease as many groups as there is room for, run them, end in good order.

The rule: one asyncio task per group, all file work in the queue's threads, and nothing is leased for which there is no
slot. The loop ends when the queue is sealed and empty, when it is told to stop, or when it cannot go on; in each case
what is in hand goes back with its prefix first.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from typing import Protocol

from strawq.errors import BadInput, Fenced, OperatorNeeded, OutcomeUnknown, StorageFailed, TryAgain
from strawq.handles import Lease, Leases
from strawq_workers.admission.reservations import Admission
from strawq_workers.sglang.fleet import Fleet
from strawq_workers.telling import Telling
from strawq_workers.worker.counts import keep_counts, leave_counts
from strawq_workers.worker.group import GroupRun
from strawq_workers.worker.metrics import WorkerSummary, log_line, watch_loop
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.place import Place, first_of
from strawq_workers.worker.reporting import words
from strawq_workers.worker.share import limits_of
from strawq_workers.worker.watching import Watcher

log = logging.getLogger("strawq.worker")

IDLE_S = 0.05
IDLE_MAX_S = 1.0
ACQUIRE_TRIES = 12


class Intake(Protocol):
    """Says how many groups a worker leases next, and hears what becomes of each. Called on the worker's event loop.
    A worker without one fills its free slots."""

    def want(self, room: int) -> int:
        """Groups to lease now, at most `room`; 0 to wait until a group has ended."""

    def none(self, answer: Leases) -> None:
        """There was nothing to lease; `answer` says why."""

    def leased(self, lease: Lease) -> None: ...

    def ended(self, run: GroupRun) -> None:
        """`run.end` says how."""


class Worker:
    """Runs groups until there is a reason to end. `await run()` once."""

    def __init__(self, place: Place, intake: Intake | None = None) -> None:
        self.place = place
        self.intake = intake
        self.runs: dict[asyncio.Task[None], GroupRun] = {}
        self.watcher = Watcher(place, lambda: list(self.runs.values()))
        self._leased = 0

    async def run(self) -> WorkerSummary:
        """Returns how it ended; raises what it could not go on with, after everything in hand has been given back."""
        clock = asyncio.get_running_loop().time
        started = clock()
        around = [
            asyncio.ensure_future(watch_loop(self.place.counters, self.place.fleet)),
            asyncio.ensure_future(self._log_at_times()),
            asyncio.ensure_future(self.watcher.run()),
            asyncio.ensure_future(keep_counts(self.place, lambda: len(self.runs))),
        ]
        for task in around:
            task.add_done_callback(self._over)
        admitting = asyncio.ensure_future(self._admit())
        admitting.add_done_callback(self._over)
        try:
            await asyncio.wait({admitting})
            await self._finish()
        finally:
            for task in (*around, admitting):
                task.cancel()
            await asyncio.gather(*around, return_exceptions=True)
            await leave_counts(self.place, 0, clock() - started)
        if self.place.fatal is not None:
            raise self.place.fatal
        place = self.place
        return WorkerSummary(
            reason=place.reason,
            seconds=round(clock() - started, 3),
            counters=place.counters,
            policy_versions=tuple(place.versions),
            drop_reasons=dict(place.drop_reasons),
            failures=tuple(place.failures),
        )

    # -- admission ----------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        place, delay = self.place, IDLE_S
        while not place.stopping.is_set():
            place.changed.clear()
            if not place.patience.well.is_set():
                await first_of(place.patience.well, place.stopping)
                continue
            await self.watcher.before_admission()
            self._resize()
            room = self._room()
            if room < 1:
                if place.options.groups_max and self._leased >= place.options.groups_max and not self.runs:
                    place.stop("groups_max")
                    return
                await first_of(place.changed, place.stopping, timeout=IDLE_MAX_S)
                continue
            if place.engine_trouble is not None:
                # An engine failed a group for good, and another one lives: not at once the same again.
                place.engine_trouble = None
                await first_of(place.stopping, timeout=IDLE_MAX_S)
                continue
            answer = await self._acquire(room)
            if answer is None or place.stopping.is_set():
                self._give_back(answer)
                return
            if len(answer):
                delay = IDLE_S
                for lease in answer:
                    self._start(lease)
                continue
            if self.intake is not None:
                self.intake.none(answer)
            if answer.status == "sealed" and not self.runs:
                place.stop("sealed")
                return
            if answer.status == "paused" and not self.watcher.paused:
                self.watcher.look_now.set()
            await first_of(place.changed, place.stopping, timeout=delay * (0.5 + random.random() / 2))
            delay = min(2 * delay, IDLE_MAX_S)

    def _room(self) -> int:
        room = self.place.admission.free_groups()
        if self.place.options.groups_max:
            room = min(room, self.place.options.groups_max - self._leased)
        return room if self.intake is None else self.intake.want(room)

    def _resize(self) -> None:
        """Engines that a router brings later, and workers that come and go, change the share."""
        admission, engines, peers = self.place.admission, len(self.place.fleet.engines), self.watcher.peers
        limits = limits_of(self.place.options, engines, peers, self.place.queue.session)
        if limits != admission.limits:
            shared = f", {len(peers)} workers" if not self.place.options.workers else ""
            counted = f"{engines} engine{'s' * (engines != 1)}"
            log.info("%s%s: this worker's share is now %d groups", counted, shared, limits.groups)
            admission.resize(limits)

    async def _acquire(self, room: int) -> Leases | None:
        """Leases, or why there are none; None if the worker has to stop."""
        delay, tries = IDLE_S, 0
        begun = min(room, self.place.admission.begun_only())
        request = self.place.queue.new_request()
        while not self.place.stopping.is_set():
            try:
                return await self.place.patience.call(
                    functools.partial(
                        self.place.queue.acquire, begun or room, begun_only=bool(begun), request_id=request
                    ),
                    ending_s=0.0,
                )
            except Fenced:
                request = self.place.queue.new_request()  # session or branch have changed once more in between
            except (StorageFailed, OutcomeUnknown) as error:
                if not self.place.stopping.is_set():
                    self.place.stop("storage", error)
                return None
            except (TryAgain, OperatorNeeded) as error:
                tries += 1
                self.place.counters.retries += 1
                log.warning("no lease, try %d: %s", tries, words(error))
                if tries >= ACQUIRE_TRIES:
                    self.place.stop("storage", error)
                    return None
            except BadInput as error:
                self.place.stop("refused", error)
                return None
            await first_of(self.place.stopping, timeout=delay)
            delay = min(2 * delay, IDLE_MAX_S)
        return None

    def _start(self, lease: Lease) -> None:
        place = self.place
        self._leased += 1
        place.counters.groups_leased += 1
        run = GroupRun(place, lease)
        if self.intake is not None:
            self.intake.leased(lease)
        place.admission.reserve(run.attempt, range(place.options.samples), begun=lease.stage == "partial")
        task = asyncio.ensure_future(run.run())
        self.runs[task] = run
        task.add_done_callback(self._ended)

    def _give_back(self, answer: Leases | None) -> None:
        """Leases that came while the worker was told to stop go through their runs, which give them back at once."""
        for lease in answer or ():
            self._start(lease)

    def _ended(self, task: asyncio.Task[None]) -> None:
        run = self.runs.pop(task)
        if self.intake is not None:
            self.intake.ended(run)
        else:
            self.place.stop_if_all_fail()  # an intake has its own word on groups that fail
        self.place.changed.set()
        self._over(task)
        if run.end == "stale":
            self.watcher.look_now.set()

    def _over(self, task: asyncio.Task[None]) -> None:
        """A task that ends by a fault of ours ends the worker, with everybody else's work given back."""
        if not task.cancelled() and task.exception() is not None:
            self.place.stop("fault", task.exception())

    # -- the end ------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Ends the requests, lets each group give back what it has, and the last reports out."""
        while self.runs:
            for run in self.runs.values():
                run.stop.set()
            self.place.changed.clear()
            await asyncio.wait(list(self.runs), timeout=IDLE_MAX_S)
        await self.place.reporter.close()

    async def _log_at_times(self) -> None:
        telling = Telling(asyncio.get_running_loop().time)
        while True:
            await asyncio.sleep(self.place.options.log_seconds)
            log.info("%s", log_line(self.place.counters, len(self.runs)))
            down = [engine for engine in self.place.fleet.engines if engine.state not in ("up", "held")]
            if telling.due("; ".join(engine.last_error for engine in down)):
                counted = f"{len(down)} engines are" if len(down) != 1 else "1 engine is"
                log.warning("%s down: %s", counted, "; ".join(engine.last_error for engine in down))


def make_admission(options: WorkerOptions, fleet: Fleet) -> Admission:
    return Admission(limits_of(options, len(fleet.engines)))
