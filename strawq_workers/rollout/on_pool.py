"""Fully asynchronous rollouts on a pool: worker processes anywhere generate, and each call collects what is ready.

The rule: a batch is the oldest ready groups, whoever made them, so a slow worker holds nobody up and an accepted group
of a lost one is in the pool anyway. Prompts are submitted ahead by a bounded number, and the queue's own backpressure
bounds what is ready. A call that waits says what for, and ends with one error when no worker is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec

from strawq.errors import BadInput, EngineUnavailable, TryAgain
from strawq.pool import Pool
from strawq_workers.admission.slots import total_slots
from strawq_workers.rates import Rates, summed
from strawq_workers.rollout.failures import Failures
from strawq_workers.rollout.local_workers import LocalWorkers
from strawq_workers.rollout.selection import refuse_all_samples_hook, select
from strawq_workers.rollout.settings import StrawSource, batch_size, config_of, local_workers, options_of, worker_wait_s
from strawq_workers.rollout.station import Station
from strawq_workers.rollout.synchronous import engines_of
from strawq_workers.slime.lineage import require_line
from strawq_workers.stale_groups import AgeLimit
from strawq_workers.worker.freshness import age_limit
from strawq_workers.worker.options import WorkerOptions

log = logging.getLogger("strawq.rollout")

COLLECT_S = 0.5
SAY_S = 30.0
BATCHES_AHEAD = 2
PAUSE_S = 60.0
WORKER_ROLE = "worker"


class WorkersLost(TryAgain):
    """Groups are missing and nobody makes them. What was accepted stays in the pool: start a worker, call again."""

    kind = "workers_lost"


class OnPool:
    """The consumer's end of one data source on a pool. Used by one caller's thread at a time."""

    def __init__(self, args: Any, station: Station, straw: StrawSource) -> None:
        refuse_all_samples_hook(args)
        self._station = station
        self._straw = straw
        self._options = msgspec.structs.replace(options_of(args), queue=straw.queue_name, role=WORKER_ROLE)
        self._slots = _slots(self._options)
        self.workers: LocalWorkers | None = None
        self._failures = Failures(straw.pool, straw.queue_name, max(self._options.refusals_max, self._slots))
        self._rates = Rates(straw.pool, straw.queue_name)
        self._limit = age_limit(self._options)
        self._asks_engines = True
        _bound(straw.pool, straw.queue_name, batch_size(args), self._slots)
        count = local_workers(args)
        if count:
            self._on_loop(lambda: self._start(count))

    def take(self, args: Any, rollout_id: int) -> tuple[list[list[Any]], dict[str, float]]:
        """The batch of this rollout. Raises `WorkersLost`, and `RolloutFailed` if group after group fails for good;
        what is in the pool stays there."""
        if self._options.max_staleness == 0 and rollout_id:
            # Nothing may be started before the batch before is trained; who asks for the next one has trained it.
            self._straw.finish(rollout_id - 1)
        if self._asks_engines:
            self._station.loop.call(self._learn)
        samples = self._wait_for(rollout_id, batch_size(args), worker_wait_s(args))
        metrics = self._metrics(rollout_id, samples)
        return select(args, samples, self._station.data_source), metrics

    async def _learn(self, stop: asyncio.Event) -> None:
        try:
            await engines_of(self._station, self._options, self._straw, stop)
        except EngineUnavailable as error:
            # Workers elsewhere may reach them all the same, and waiting each time would hold the trainer up.
            self._asks_engines = False
            log.warning(
                "which weights the engines have is not asked any more, they cannot be reached from here: %s", error
            )

    def _wait_for(self, rollout_id: int, count: int, wait_s: float) -> list[list[Any]]:
        seen = said = time.monotonic()
        ahead = BATCHES_AHEAD * count + self._slots
        while True:
            # In this order: what was pending a moment ago may be judged by now, and is no end of the data.
            nothing_left = self._used_up()
            over = not self._straw.fill(ahead) and nothing_left
            if self.workers is not None:
                self._on_loop(self.workers.look)
            try:
                # When nothing more comes nothing can begin anew, or be waited for.
                limit = AgeLimit() if over else self._limit
                batch = self._straw.collect(rollout_id, count, timeout=COLLECT_S, limit=limit)
            except TryAgain as error:
                missing = error
            else:
                # While this batch is trained on nobody else fills the queue, and the workers go on.
                self._straw.fill(ahead)
                return batch
            now, progressed = time.monotonic(), self._progress()
            self._failures.check(rollout_id, over)
            if over:
                log.warning("the data have ended before the batch of %d was complete", count)
                return self._straw.collect(rollout_id, count, timeout=0, fewer=True)
            if progressed or live_workers(self._straw.pool):
                seen = now
            given_up = "" if self.workers is None else self.workers.given_up()
            if now - seen > (0 if given_up else wait_s):
                raise WorkersLost(self._lost(given_up, now - seen, missing))
            if now - said > SAY_S:
                said = now
                log.warning("rollout %d waits: %s; %s", rollout_id, missing, self._failures.words() or "no group fails")

    def close(self) -> None:
        """End the local workers; they give back what they have."""
        workers, self.workers = self.workers, None
        if workers is not None:
            self._on_loop(workers.close)

    # -- inside -------------------------------------------------------------------------------------------------

    def _start(self, count: int) -> None:
        self.workers = LocalWorkers(self._straw.pool.path, self._options, count)

    def _on_loop(self, call: Any) -> None:
        """On the station's thread: a child process ends with the thread that started it, and callers' threads end."""

        async def run(_stop: asyncio.Event) -> None:
            call()

        self._station.loop.call(run)

    def _progress(self) -> bool:
        """Whether groups were accepted since the last look."""
        moved = self._failures.look()
        if moved and self.workers is not None:
            self.workers.progressed()
        return moved

    def _used_up(self) -> bool:
        counts = self._straw.pool.queue(self._straw.queue_name).counts()
        return not (counts.fresh_pending + counts.fresh_leased + counts.partial_pending + counts.partial_leased)

    def _lost(self, given_up: str, seconds: float, missing: TryAgain) -> str:
        why = given_up or f"no worker has been alive for {seconds:.0f} s"
        return (
            f"no rollout worker is left: {why}; start one with `strawq work {self._straw.pool.path} --engine URL`, or "
            f"let the rollout start them (--rollout-workers N). Accepted groups are safe in the pool ({missing})"
            + (f". {self._failures.words()}" if self._failures.in_a_row else "")
        )

    def _metrics(self, rollout_id: int, samples: list[list[Any]]) -> dict[str, float]:
        ages = self._straw.batch_metrics(rollout_id, self._options.max_staleness) if samples else {}
        seen = self._straw.pool.inspect()
        counts = seen.queues[self._straw.queue_name].tasks
        self._failures.tell()
        return {
            **summed(self._rates.since_last(), ages),
            "rollout/groups/ready": counts.ready,
            "rollout/groups/in_flight": counts.fresh_leased + counts.partial_leased,
            "rollout/groups/failed": counts.failed,
            "rollout/workers/live": len(live_workers(self._straw.pool)),
            "rollout/workers/restarts": 0 if self.workers is None else self.workers.restarts,
        }


def live_workers(pool: Pool) -> list[str]:
    """Sessions of other processes that lease groups, or say that they are workers."""
    own = pool.keeper.current
    return [
        session.id
        for session in pool.inspect().sessions
        if session.id != own and (session.leases or session.role.startswith(WORKER_ROLE))
    ]


def pause_workers(straw: StrawSource, reason: str, timeout_s: float = PAUSE_S) -> bool:
    """Pause admission, if it is not paused, and wait until every live worker has acknowledged; returns whether all
    have. A worker that dies meanwhile is not waited for. `BranchMoved` if the pool was rolled back."""
    pool = straw.pool
    if pool.inspect().paused is None:
        pool.pause(reason, branch=straw.branch)
    end = time.monotonic() + timeout_s
    while True:
        seen = pool.inspect()
        require_line(pool, straw.branch, seen.branch)
        acknowledged = set() if seen.paused is None else set(seen.paused.acknowledged)
        waiting = [session for session in live_workers(pool) if session not in acknowledged]
        if not waiting:
            return True
        if time.monotonic() > end:
            log.warning("%d workers have not acknowledged the pause (%s)", len(waiting), ", ".join(waiting))
            return False
        time.sleep(0.05)


def _bound(pool: Pool, queue: str, batch: int, slots: int) -> None:
    """Backpressure, where the queue has none of its own. `BadInput` if its own leaves no room for a batch."""
    config = config_of(pool, queue)
    if not config.max_ready:
        pool.configure(queue, msgspec.structs.replace(config, max_ready=BATCHES_AHEAD * batch + slots))
    elif config.max_ready < batch:
        raise BadInput(
            f"queue {queue} holds back at max_ready = {config.max_ready} groups, and a batch has {batch}: "
            f"`strawq queue {pool.path} {queue} --max-ready N`"
        )


def _slots(options: WorkerOptions) -> int:
    """Groups that all workers together may have in hand, as far as these options say."""
    return max(1, total_slots(options.concurrency, len(options.engines)) // options.samples)
