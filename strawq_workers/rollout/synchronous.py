"""One rollout, from its first lease to its batch; nothing goes on after it.

The rule: when it returns or raises, no request is in flight, and every group that it fetched was kept, dropped by the
filter, or given back: fetched = kept + dropped + returned. With partial rollout unfinished groups go back with their
prefixes, else as they came (samples that had finished stay finished). Surplus that is complete goes back complete.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from strawq.errors import BadInput, BranchMoved, EngineUnavailable, TryAgain
from strawq.handles import Leases
from strawq_workers.admission.refill import RolloutPlan
from strawq_workers.asking import publish_if_newer
from strawq_workers.rates import summed
from strawq_workers.rollout.aging import batch_ages
from strawq_workers.rollout.failures import remedy
from strawq_workers.rollout.intake import STOPPED, PlanIntake
from strawq_workers.rollout.measures import WorkRates, rollout_metrics
from strawq_workers.rollout.selection import select
from strawq_workers.rollout.settings import StrawSource, batch_size, codec, options_of, surplus
from strawq_workers.rollout.station import Interrupted, RolloutFailed, Station
from strawq_workers.sglang.fleet import Fleet
from strawq_workers.stale_groups import AgeLimit
from strawq_workers.worker.freshness import age_limit
from strawq_workers.worker.hooks import Hooks
from strawq_workers.worker.loop import Worker, make_admission
from strawq_workers.worker.memory import MemorySource
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.place import Place
from strawq_workers.worker.process import run_until
from strawq_workers.worker.source import PoolSource, WorkSource

log = logging.getLogger("strawq.rollout")

Samples = list[list[Any]]
COLLECT_S = 30.0


def from_memory(args: Any, rollout_id: int, station: Station) -> tuple[Samples, dict[str, float]]:
    """A batch from the groups of an in-memory data source, generated now. It may be smaller when the data have
    ended."""
    options, count = synchronous_options(args), batch_size(args)

    async def work(stop: asyncio.Event) -> tuple[Samples, dict[str, float]]:
        fleet = await station.fleet(options, stop)
        source = MemorySource(station.returns, codec())
        source.policy_version = await served_version(fleet)
        plan = RolloutPlan(count, max_surplus=surplus(args))
        samples: Samples = []
        try:
            metrics = await generate(station, options, source, plan, fleet, stop)
            entries = source.take(count)
            try:
                metrics.update(batch_ages(entries, source.policy_version, options))
                samples = await source.samples(entries)
                if stop.is_set():
                    raise Interrupted(f"rollout {rollout_id} was told to stop")
            except BaseException:
                source.put_back(entries)
                samples = []
                raise
            return samples, metrics
        finally:
            try:
                await source.give_back(lambda sample: mark_begun(sample, rollout_id))
            except BaseException:
                await source.run(station.returns.keep, samples)
                raise
            finally:
                await source.close()

    samples, metrics = station.loop.call(work, undo=lambda late: station.returns.add_samples(late[0]))
    try:
        return select(args, samples, station.data_source), metrics
    except BaseException:
        station.returns.add_samples(samples)
        raise


def from_pool(args: Any, rollout_id: int, station: Station, straw: StrawSource) -> tuple[Samples, dict[str, float]]:
    """The batch of this rollout, generated on the pool as far as it is not there yet."""
    options, count = synchronous_options(args), batch_size(args)
    metrics: dict[str, float] = {}
    limit = age_limit(options)

    if limit.max_staleness >= 0:
        station.loop.call(lambda stop: engines_of(station, options, straw, stop))
    samples = collected(straw, rollout_id, count, limit)
    if samples is None:
        ready = straw.pool.queue(straw.queue_name).counts().ready

        async def work(stop: asyncio.Event) -> dict[str, float]:
            fleet = await engines_of(station, options, straw, stop)
            source = await asyncio.to_thread(FilledSource, straw, options.io_concurrency)
            plan = RolloutPlan(max(1, count - ready), max_surplus=surplus(args))
            try:
                return await generate(station, options, source, plan, fleet, stop)
            finally:
                await source.close()

        metrics = station.loop.call(work)
        short = metrics["rollout/groups/missing"] > 0
        samples = straw.collect(rollout_id, count, timeout=0 if short else COLLECT_S, fewer=short, limit=limit)
    if samples:
        metrics = summed(metrics, straw.batch_metrics(rollout_id, options.max_staleness))
    return select(args, samples, station.data_source), metrics


def synchronous_options(args: Any) -> WorkerOptions:
    """The worker's options for one rollout. What is generated is trained next, so nothing has to be admitted less for
    the staleness budget; beyond it the policy `drop` still holds."""
    options = options_of(args)
    budget = options.max_staleness if options.staleness_policy == "drop" else -1
    return msgspec.structs.replace(options, max_staleness=budget, batch_groups=0)


def collected(straw: StrawSource, rollout_id: int, count: int, limit: AgeLimit) -> Samples | None:
    """The batch, if it was delivered before or enough is ready; None if groups are missing."""
    try:
        return straw.collect(rollout_id, count, timeout=0, limit=limit)
    except TryAgain:
        return None


class FilledSource(PoolSource):
    """A queue whose prompts come from the data source as they are needed: as many as are leased, no more."""

    def __init__(self, straw: StrawSource, io_concurrency: int) -> None:
        super().__init__(straw.pool, straw.queue_name, io_concurrency)
        self._straw = straw

    async def acquire(self, count: int = 1, *, begun_only: bool = False, request_id: str | None = None) -> Leases:
        try:
            filled = await self.run(self._straw.fill, count)
        except BranchMoved as error:
            # Not this worker's to go on with: it ends, and the trainer is told when it asks for the batch.
            return Leases("sealed", (), str(error))
        leases = await super().acquire(count, begun_only=begun_only, request_id=request_id)
        if leases.status == "backpressured" and not await self.run(self._leased):
            # Nobody will take what is ready before the batch is complete, and nothing more may be started.
            raise BadInput(
                f"queue {self._straw.queue_name} holds back before the batch is complete ({leases.detail}): raise its "
                f"max_ready and max_leased (`strawq queue {self.pool.path} {self._straw.queue_name}`)"
            )
        if not filled and leases.status == "empty" and await self.run(self._ended):
            return Leases("sealed", (), "the data have ended")
        return leases

    def _leased(self) -> int:
        counts = self._straw.pool.queue(self._straw.queue_name).counts()
        return counts.fresh_leased + counts.partial_leased

    def _ended(self) -> bool:
        counts = self._straw.pool.queue(self._straw.queue_name).counts()
        return not (counts.fresh_pending + counts.fresh_leased + counts.partial_pending + counts.partial_leased)


async def generate(
    station: Station, options: WorkerOptions, source: WorkSource, plan: RolloutPlan, fleet: Fleet, stop: asyncio.Event
) -> dict[str, float]:
    """Run a worker on `source` until the plan is done, and close the plan's account. Raises `RolloutFailed`,
    `Interrupted`, and what ends a worker; nothing is in flight then."""
    place = Place(options, source, fleet, Hooks(options), make_admission(options, fleet))
    place.served = await served_version(fleet)
    intake, rates = PlanIntake(plan, place), WorkRates()
    try:
        summary = await run_until(Worker(place, intake), stop)
    finally:
        station.account = plan.close()
    if intake.last.action == "failed":
        dead = "" if source.pool is None else f"; dead letters: {len(place.dead)}, {remedy(source.pool)}"
        raise RolloutFailed(intake.last.reason + dead)
    if summary.reason != STOPPED and plan.missing and stop.is_set():
        raise Interrupted(f"the rollout was told to stop with {plan.kept_count} of {plan.target} groups")
    if plan.missing:
        log.warning("%s", intake.last.reason or f"the rollout ended ({summary.reason}) with {plan.kept_count} groups")
    return {**plan.metrics(), **rollout_metrics(station.account, plan.missing, summary, rates)}


async def engines_of(station: Station, options: WorkerOptions, straw: StrawSource, stop: asyncio.Event) -> Fleet:
    """The engines; the pool knows afterwards which weights they have. A trainer that updates them may not know of it,
    and ages count from there."""
    fleet = await station.fleet(options, stop)
    await asyncio.to_thread(publish_if_newer, straw.pool, await served_version(fleet), straw.branch)
    return fleet


async def served_version(fleet: Fleet) -> str:
    """What a living engine says of its weights; empty if none does."""
    for engine in fleet.engines:
        if engine.state in ("up", "held"):
            try:
                return await engine.weight_version()
            except EngineUnavailable as failed:
                engine.doubt(failed)  # it was alive a moment ago: requests wait for it, and nobody fails for this
    return ""


def mark_begun(sample: Any, rollout_id: int) -> None:
    """slime's note of the rollout in which a sample was begun."""
    metadata = getattr(sample, "metadata", None)
    if isinstance(metadata, dict):
        metadata.setdefault("start_rollout_id", rollout_id)
