"""The batch of each rollout, found again by the rollout's number.

The rule: rollout n has one batch, the same groups from when it is taken until it is finished, whoever dies in between:
it is taken under the consumer name `rollout-<n>`. A finished rollout is finished once, and asking again changes
nothing. All of it is on the branch that the trainer's model is of: one that somebody else has left gives no batch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from strawq.errors import BadInput, Fenced, TryAgain
from strawq.handles import Batch, Held, Lease, Taken
from strawq.model import Session
from strawq.pool import Pool
from strawq.work import unchanged
from strawq_workers.age_gate import AgeGate
from strawq_workers.asking import sure
from strawq_workers.collector import POLL_MAX_S, POLL_S, CollectedBatch
from strawq_workers.slime.checkpoint import CONSUMER, is_up_to
from strawq_workers.slime.lineage import require_line
from strawq_workers.stale_groups import AgeLimit

logger = logging.getLogger("strawq.slime")

EXACT_TRIES = 200
LEASES = 1024
EXPIRY_LEASES = 3
"""So many of its own lease times after it died a holder is taken for dead by somebody, with room to spare."""


class OpenBatch(msgspec.Struct, frozen=True):
    """A batch that was taken and not finished, who has it, and what is in it."""

    consumer: str
    batch: Batch
    holder: Session | None


class RolloutBatches:
    """Batches of one queue by rollout. Safe from one thread at a time.

    `branch` is the line of history that the trainer's model has been trained on."""

    def __init__(self, pool: Pool, queue_name: str) -> None:
        self._pool = pool
        self._queue_name = queue_name
        self._mine: dict[int, CollectedBatch] = {}
        self._gate = AgeGate(pool, queue_name, AgeLimit())
        self.branch = pool.branch()

    def follow(self, branch: str) -> None:
        """The model was loaded anew, and is of this branch: what this process has taken does not count any more."""
        self.branch = branch
        self._mine.clear()

    def require_branch(self, active: str | None = None) -> None:
        """`BranchMoved` if the pool was rolled back by somebody else: the model has seen groups that are ready
        again."""
        require_line(self._pool, self.branch, active or self._pool.branch())

    def collected(self, rollout_id: int) -> CollectedBatch | None:
        """The batch of that rollout, if this process has it."""
        return self._mine.get(rollout_id)

    def collect(
        self,
        rollout_id: int,
        count: int,
        *,
        timeout: float | None = None,
        fewer: bool = False,
        limit: AgeLimit | None = None,
    ) -> CollectedBatch | None:
        """The rollout's batch: the one that it has, else `count` ready groups no older than `limit` asks; None when the
        queue is sealed and used up. `TryAgain` after `timeout` seconds; `fewer` says that the data have ended: what is
        ready by then is taken, if there is any, however old."""
        if rollout_id < 0 or count < 1:
            raise BadInput(f"rollout {rollout_id} with {count} groups: both are counted from 0 and 1")
        known = self._mine.get(rollout_id)
        self.require_branch()
        if known is not None:
            return known
        delay, started = POLL_S, time.monotonic()
        self._gate.limit = limit or AgeLimit()
        while True:
            left = None if timeout is None else started + timeout - time.monotonic()
            late = left is not None and left <= 0
            if (before := self._taken_before(rollout_id)) is not None:
                return self._keep(rollout_id, before)
            missing = _held_elsewhere(self._open(rollout_id))
            if not missing and not fewer:
                missing = self._gate.blocked(f"{CONSUMER}{rollout_id}", count)
            if not missing:
                taken = self._take(rollout_id, count, fewer and late)
                if taken.batch is not None and not fewer and self._gate.outgrown(taken.batch):
                    self._return(taken.batch)
                    continue
                if taken.batch is not None:
                    return self._keep(rollout_id, taken.batch)
                if taken.status == "sealed":
                    return None
                missing = taken.detail
            if late:
                raise TryAgain(f"no batch of {count} groups for rollout {rollout_id}: {missing}")
            time.sleep(delay if left is None else min(delay, max(left, 0.001)))
            delay = min(2 * delay, POLL_MAX_S)

    def begun_anew(self) -> dict[str, float]:
        """What was too old for a batch since the last call, under the names of the metrics that it adds to."""
        return self._gate.added()

    def _take(self, rollout_id: int, count: int, fewer: bool) -> Taken:
        queue = self._pool.queue(self._queue_name)
        consumer = f"{CONSUMER}{rollout_id}"
        taken = sure(
            self._pool,
            lambda request: queue.take_batch(count, consumer=consumer, fewer=fewer, request_id=request),
        )
        if taken.batch is not None and taken.batch.branch != self.branch:
            self._return(taken.batch)
            self.require_branch(taken.batch.branch)
        return taken

    def _keep(self, rollout_id: int, batch: Batch) -> CollectedBatch:
        if batch.delivery > 1:
            logger.info("rollout %d gets its batch %s again (delivery %d)", rollout_id, batch.id, batch.delivery)
        self._mine[rollout_id] = CollectedBatch(self._pool, batch, self._pool.policy_version())
        return self._mine[rollout_id]

    def take_exactly(self, rollout_id: int, complete: Callable[[], Sequence[str]]) -> list[str]:
        """Make the groups that `complete` hands in, and no others, the rollout's batch; returns their tasks. Groups of
        others that are ready meanwhile are leased until the batch is taken."""
        tasks: list[str] = []
        for tried in range(EXACT_TRIES):
            aside = self._lease_ready()
            try:
                if not tried:
                    tasks = list(complete())
                if not tasks:
                    return []
                self._put_back(lease for lease in aside if lease.task in tasks)
                taken = self._taken_before(rollout_id) or self._take(rollout_id, len(tasks), False).batch
            finally:
                self._put_back(lease for lease in aside if lease.task not in tasks)
            if taken is not None and set(taken.tasks) == set(tasks):
                self._keep(rollout_id, taken)
                return tasks
            if taken is not None:
                self._return(taken)
            time.sleep(min(0.002 * (tried + 1), 0.1))
        raise TryAgain(f"the {len(tasks)} groups of rollout {rollout_id} were never ready without others'")

    def _taken_before(self, rollout_id: int) -> Batch | None:
        """The rollout's batch, if this process has taken it and the answer was lost."""
        found = self._open(rollout_id)
        return found.batch if found is not None and self._is_mine(found) else None

    def _lease_ready(self) -> list[Lease]:
        queue = self._pool.queue(self._queue_name)
        found: list[Lease] = []
        while True:
            answer = sure(self._pool, lambda request: queue.acquire(LEASES, stages=("ready",), request_id=request))
            found += answer.leases
            if len(answer) < LEASES:
                return found

    def _put_back(self, leases: Iterable[Lease]) -> None:
        changes = [unchanged(lease) for lease in leases]
        if changes:
            with contextlib.suppress(Fenced):  # the session was lost: they are back already
                queue = self._pool.queue(self._queue_name)
                sure(self._pool, lambda request: queue.report(changes, request_id=request))

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self, rollout_id: int) -> None:
        """The rollout is trained. Nothing happens if it has no open batch."""
        while (found := self._open(rollout_id)) is not None:
            self._finish(rollout_id, found)
        self._mine.pop(rollout_id, None)

    def finish_up_to(self, rollout_id: int) -> None:
        """Finish this rollout and earlier ones."""
        for found in self._all_open():
            if is_up_to(found.consumer, rollout_id):
                self.finish(_number(found.consumer))

    def _finish(self, rollout_id: int, found: OpenBatch) -> None:
        batch = found.batch
        if not self._is_mine(found):
            taken = self._take_again(rollout_id)
            if taken is None:
                return
            if (taken.branch, taken.number) != (batch.branch, batch.number):
                # That one has ended in between, and these are groups that nobody has trained.
                self._return(taken)
                self._mine.pop(rollout_id, None)
                return
            batch = taken
        queue = self._pool.queue(self._queue_name)
        try:
            sure(self._pool, lambda _: queue.finish_batch(batch))
        except Fenced as error:
            # The session was lost, or the pool rolled back, in between: what stands there now decides.
            again = self._open(rollout_id)
            if again is None:
                logger.warning("batch %s of rollout %d is not open any more: %s", batch.id, rollout_id, error)
            elif self._is_mine(again) and again.batch.delivery == batch.delivery:
                raise
            else:
                self._finish(rollout_id, again)

    def _take_again(self, rollout_id: int) -> Batch | None:
        """The open batch of that rollout in this process's present session, whoever had it before; None if it has ended
        meanwhile. A dead holder is waited for until it has expired; `TryAgain` names one that lives."""
        self._mine.pop(rollout_id, None)
        end: float | None = None
        while (found := self._open(rollout_id)) is not None:
            try:
                taken = self.collect(rollout_id, 1, timeout=0)
                return None if taken is None else taken.batch
            except TryAgain as missing:
                now = time.monotonic()
                if end is None:
                    end = now + EXPIRY_LEASES * (found.holder.lease_seconds if found.holder is not None else 0.0)
                    logger.warning("rollout %d is to be finished: %s", rollout_id, missing)
                if now >= end:
                    raise
            time.sleep(POLL_MAX_S)
        return None

    def give_back_open(self) -> int:
        """Make the groups of batches that an earlier process left ready again, for a sampler that takes groups and
        not batches. Returns how many."""
        count = 0
        while left := [found for found in self._all_open() if not self._is_mine(found)]:
            for found in left:
                taken = self._take_again(_number(found.consumer))
                if taken is not None:
                    count += len(taken.groups) * self._return(taken)
                    self._mine.pop(_number(found.consumer), None)
        return count

    def _return(self, batch: Batch) -> bool:
        """Whether its groups are ready again. With its session lost in between the batch is open still, and
        nobody's."""
        queue = self._pool.queue(self._queue_name)
        try:
            sure(self._pool, lambda request: queue.return_batch(batch, request_id=request))
        except Fenced as error:
            logger.warning("batch %s is not given back yet: %s", batch.id, error)
            return False
        return True

    # -- looking --------------------------------------------------------------------------------------------------

    def _open(self, rollout_id: int) -> OpenBatch | None:
        for found in self._all_open():
            if found.consumer == f"{CONSUMER}{rollout_id}":
                return found
        return None

    def open_tasks(self, rollout_id: int) -> tuple[str, ...]:
        """The groups of the rollout's batch, whoever has it; none if it has no open one."""
        found = self._open(rollout_id)
        return () if found is None else tuple(found.batch.tasks)

    def _is_mine(self, found: OpenBatch) -> bool:
        return bool(found.batch.session) and found.batch.session == self._pool.keeper.current

    def _all_open(self) -> list[OpenBatch]:
        def view(machine: Any) -> tuple[str, list[OpenBatch]]:
            state = machine.state
            queue = state.branch.queues[self._queue_name]
            found = []
            for row in queue.batches.values():
                if not row.consumer.startswith(CONSUMER) or not _number_text(row.consumer).isdigit():
                    continue
                tasks = [queue.tasks[key] for key in row.tasks]
                groups = tuple(
                    Held(task, {part.object: state.objects[part.object] for part in task.parts}) for task in tasks
                )
                batch = Batch(
                    self._queue_name, state.active.row, row.session, row.id, row.number, row.attempt, row.consumer,
                    groups,
                )  # fmt: skip
                found.append(OpenBatch(row.consumer, batch, state.sessions.get(row.session)))
            return state.active.row, found

        active, found = self._pool.log.refresh(view)
        self.require_branch(active)
        return list(found)


def _number_text(consumer: str) -> str:
    return consumer.removeprefix(CONSUMER)


def _number(consumer: str) -> int:
    return int(_number_text(consumer))


def _held_elsewhere(found: OpenBatch | None) -> str:
    """Who has the batch, in words; empty if it can be taken. A dead holder is expired by the heartbeat thread."""
    if found is None or not found.batch.session:
        return ""
    where = f"{found.holder.host}, pid {found.holder.pid}" if found.holder is not None else "unknown"
    return f"batch {found.batch.id} is open in session {found.batch.session} ({where}); it comes back when that is dead"
