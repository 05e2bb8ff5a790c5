"""Fully asynchronous rollouts in memory: one worker goes on in the background, and each call takes what is complete.

The rule: a call takes exactly the groups that it asked for, those first that were started first, and the rest stay. The
worker starts nothing new while as many complete groups wait as it may have in hand (or as a call asks for, if that is
more), so memory is bounded and nothing ever blocks on a full queue. When it ends, everything goes back to the data
source.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import Any

from strawq.errors import StrawqError, TryAgain
from strawq_workers.rollout.aging import batch_ages, begin_batch, begin_stale_anew, waits_for_older
from strawq_workers.rollout.measures import drop_metrics
from strawq_workers.rollout.selection import select
from strawq_workers.rollout.settings import batch_size, codec, options_of
from strawq_workers.rollout.station import Interrupted, RolloutFailed, Station
from strawq_workers.rollout.synchronous import mark_begun, served_version
from strawq_workers.worker.hooks import Hooks
from strawq_workers.worker.loop import Worker, make_admission
from strawq_workers.worker.memory import Entry, MemorySource
from strawq_workers.worker.metrics import metrics_of
from strawq_workers.worker.place import Place, first_of
from strawq_workers.worker.process import run_until

log = logging.getLogger("strawq.rollout")

LOOK_S = 0.2
CLOSE_S = 60.0


class Taken:
    """A batch that was taken: its entries, and the same as the data source's samples."""

    def __init__(self, entries: list[Entry], samples: list[list[Any]], metrics: dict[str, float]) -> None:
        self.entries = entries
        self.samples = samples
        self.metrics = metrics


class InBackground:
    """The worker of one data source. Made and closed by callers' threads; everything else runs on the station's
    loop."""

    def __init__(self, args: Any, station: Station) -> None:
        self._station = station
        self._options = options_of(args)
        self._stop = asyncio.Event()
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._failure: BaseException | None = None
        self._rollout_id = 0
        self._said: set[str] = set()
        self.source: MemorySource
        self.worker: Worker
        self._running: Future[None] = station.loop.start(self._run())

    # -- for callers' threads -----------------------------------------------------------------------------------

    def take(self, args: Any, rollout_id: int) -> Taken:
        """`rollout_batch_size` groups. Raises `RolloutFailed` once for each group that failed for good, and what ended
        the worker."""
        count = batch_size(args)
        return self._station.loop.call(lambda stop: self._take(count, rollout_id, stop), undo=self.put_back)

    def take_samples(self, args: Any, rollout_id: int) -> tuple[list[list[Any]], dict[str, float]]:
        """The batch after the user's hooks on it; if they raise, it is the next one again."""
        try:
            taken = self.take(args, rollout_id)
        except BaseException:
            if self._over.is_set() and self._station.running is self:
                # The next call begins anew; what is here goes back first.
                self._station.stop_running()
            raise
        try:
            return select(args, taken.samples, self._station.data_source), taken.metrics
        except BaseException:
            self.put_back(taken)
            raise

    def put_back(self, taken: Taken) -> None:
        """Nothing came of the batch: its groups are the next that are taken."""

        async def put(_stop: asyncio.Event) -> None:
            self.source.put_back(taken.entries)
            self.source.arrived.set()

        self._station.loop.call(put)

    def pause(self, reason: str, timeout_s: float) -> bool:
        """Hold generation still for an update of the weights; returns whether it stood still in time."""

        async def hold(stop: asyncio.Event) -> bool:
            await first_of(self._begun, self._over, stop)
            if not self._begun.is_set():
                return True
            self.source.pause(reason)
            self.worker.watcher.look_now.set()
            await first_of(self.source.acknowledged, self._over, stop, timeout=timeout_s)
            return self.source.acknowledged.is_set() or self._over.is_set()

        return self._station.loop.call(hold)

    def resume(self, version: str) -> None:
        """Go on, under new weights."""

        async def go_on(_stop: asyncio.Event) -> None:
            if self._begun.is_set():
                self.source.resume(version)
                self.worker.watcher.look_now.set()
                self.worker.place.changed.set()

        self._station.loop.call(go_on)

    def close(self) -> None:
        """Stop the worker and give everything back to the data source. `TryAgain` if that takes longer than
        `CLOSE_S`."""

        async def stop(_stop: asyncio.Event) -> None:
            self._stop.set()
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._running)), CLOSE_S)

        try:
            self._station.loop.call(stop)
        except asyncio.TimeoutError as error:
            raise TryAgain(f"the rollout worker has not ended within {CLOSE_S:g} s: its hooks stand still") from error

    # -- on the loop --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        options = self._options
        source = MemorySource(self._station.returns, codec())
        try:
            fleet = await self._station.fleet(options, self._stop)
            place = Place(options, source, fleet, Hooks(options), make_admission(options, fleet))
            source.ready_max = place.admission.limits.groups
            begin_batch(source, options, options.batch_groups)
            source.policy_version = place.served = await served_version(fleet)
            self.source, self.worker = source, Worker(place)
            self._begun.set()
            summary = await run_until(self.worker, self._stop)
            log.info("the rollout worker has ended (%s)", summary.reason)
        except (StrawqError, OSError) as error:
            self._failure = error
        except Exception as error:
            self._failure = RolloutFailed(f"the rollout worker ended by {type(error).__name__}: {error}")
            log.exception("the rollout worker ended by a fault")
        try:
            # Complete groups stay for those who ask, also when nothing more comes.
            self._over.set()
            await self._stop.wait()
        finally:
            try:
                await source.give_back(lambda sample: mark_begun(sample, self._rollout_id))
            finally:
                await source.close()

    async def _take(self, count: int, rollout_id: int, stop: asyncio.Event) -> Taken:
        self._rollout_id = rollout_id
        await first_of(self._begun, self._over, stop)
        if not self._begun.is_set():
            raise self._failure or Interrupted(f"rollout {rollout_id} was told to stop")
        source, place = self.source, self.worker.place
        source.ready_max = max(place.admission.limits.groups, count)
        begin_batch(source, self._options, count)
        place.changed.set()
        source.policy_version = await served_version(place.fleet) or source.policy_version
        place.served = source.policy_version  # what is handed in from now on is judged by that
        while self._waits(count):
            self._raise_dead(place)
            if stop.is_set():
                raise Interrupted(f"rollout {rollout_id} was told to stop with {source.ready} of {count} groups")
            if self._over.is_set():
                if self._failure is not None:
                    raise self._failure
                log.warning("the data have ended with %d of %d groups", source.ready, count)
                break
            source.arrived.clear()
            await first_of(source.arrived, self._over, stop, timeout=LOOK_S)
        return await self._taken(count, rollout_id, stop)

    def _waits(self, count: int) -> bool:
        """Whether the batch is not there yet. What is too old for it begins anew, while somebody works."""
        if not self._over.is_set():
            begin_stale_anew(self.source, self.worker.place)
        return self.source.ready < count or waits_for_older(
            self.source, self._options, self.worker.runs.values(), count
        )

    async def _taken(self, count: int, rollout_id: int, stop: asyncio.Event) -> Taken:
        source, place = self.source, self.worker.place
        entries = source.take(count)
        source.untrained = len(entries)
        place.changed.set()
        try:
            samples = await source.samples(entries)
            source.policy_version = await served_version(place.fleet) or source.policy_version
            ages = batch_ages(entries, source.policy_version, self._options)
            if stop.is_set():
                raise Interrupted(f"rollout {rollout_id} was told to stop")
        except BaseException:
            source.put_back(entries)
            raise
        rates = self._station.rates
        drops = rates.drops_since_last(place.drop_reasons)
        metrics = {**drop_metrics(drops, len(entries)), **metrics_of(place.counters)}
        metrics.update({**rates.since_last(place.counters), **ages})
        metrics["rollout/groups/ready"] = source.ready
        metrics["rollout/groups/in_flight"] = len(self.worker.runs)
        return Taken(entries, samples, metrics)

    def _raise_dead(self, place: Place) -> None:
        """A group that failed for good is told once; it goes back to the data source when the worker ends."""
        for task, reason in place.dead.items():
            if task not in self._said:
                self._said.add(task)
                raise RolloutFailed(f"group {task}: {reason}")
