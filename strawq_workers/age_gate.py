"""What the age of groups asks for before a trainer may take its batch.

The rule: under `oldest_first` a batch waits for an older group whenever leaving it behind would make it miss the
budget, as far as versions are saved. Under `drop` a complete group that got too old while it waited is taken out of
what is ready, and its prompt goes back without tokens and without a burned attempt, unless it was dropped as often as
allowed, or the input has ended and nobody may be left to work on it: then it is delivered late. A batch that was taken
before comes again as it is.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec

from strawq.errors import Fenced
from strawq.handles import Leases
from strawq.model import UNVERSIONED, policy_number
from strawq.pool import Pool
from strawq.work import Change, unchanged
from strawq_workers.admission.staleness import Candidate, StalenessBudget
from strawq_workers.asking import sure
from strawq_workers.stale_groups import AgeLimit, begun_anew
from strawq_workers.worker.generation import generated_tokens

log = logging.getLogger("strawq.collector")

GROUPS_AT_ONCE = 64
"""So many are in memory at most while they are begun anew."""


class _Look(msgspec.Struct, frozen=True):
    """What there is of a queue. `open`: the consumer has a batch already, and nothing is chosen. `over`: nothing but
    what is ready will ever come."""

    served: int
    ready: tuple[Candidate, ...] = ()
    unfinished: tuple[Candidate, ...] = ()
    open: bool = False
    over: bool = False


class AgeGate:
    """The gate of one queue. Not safe from many threads."""

    def __init__(self, pool: Pool, queue: str, limit: AgeLimit) -> None:
        self._pool = pool
        self._queue = queue
        self.limit = limit
        self._late: set[str] = set()
        self._groups = self._tokens = 0

    def blocked(self, consumer: str, count: int) -> str:
        """Why the consumer's next batch of `count` groups must wait, in words; empty if it need not. Begins anew what
        is too old for it."""
        if self.limit.max_staleness < 0 or self.limit.policy == "admit":
            return ""
        look = self._look(consumer)
        if look.open or look.served == UNVERSIONED:
            return ""
        if self.limit.policy == "drop":
            return self._begin_anew(consumer)
        budget = StalenessBudget(self.limit.max_staleness, "oldest_first", batch_groups=count)
        waiting = budget.select(look.ready, look.unfinished, served_version=look.served).waiting_for
        if not waiting:
            return ""
        return f"older groups come first ({', '.join(waiting[:4])}): without them max_staleness would be exceeded"

    def added(self) -> dict[str, float]:
        """What was begun anew since the last call, under the names of the metrics that it adds to."""
        found = {
            "rollout/staleness/dropped_groups": float(self._groups),
            "rollout/regenerated_tokens": float(self._tokens),
        }
        self._groups = self._tokens = 0
        return found

    # -- inside -------------------------------------------------------------------------------------------------

    def _look(self, consumer: str) -> _Look:
        def view(machine: Any) -> _Look:
            branch = machine.state.branch
            queue = branch.queues[self._queue]
            served = policy_number(branch.meta.policy_version)
            if any(batch.consumer == consumer for batch in queue.batches.values()):
                return _Look(served, open=True)
            ready: list[Candidate] = []
            unfinished: list[Candidate] = []
            for task in queue.tasks.values():
                version = None if task.version == UNVERSIONED else task.version
                if not (task.batch or task.failed):
                    done = task.stage == "ready" and task.pending
                    (ready if done else unfinished).append(Candidate(task.id, task.id, version, task.order))
            over = queue.row.sealed and not unfinished and not queue.unstarted
            return _Look(served, tuple(ready), tuple(unfinished), over=over)

        look: _Look = self._pool.log.refresh(view)
        return look

    def _too_old(self, consumer: str) -> set[str]:
        """Complete groups beyond the budget that are not known to be delivered late."""
        look = self._look(consumer)
        if look.over:
            return set()
        last = look.served - self.limit.max_staleness
        found = {one.group for one in look.ready if one.oldest_version is not None and one.oldest_version < last}
        self._late &= found
        return found - self._late

    def _begin_anew(self, consumer: str) -> str:
        while old := self._too_old(consumer):
            # The oldest come first, so all that are too old are among the first of what is ready.
            answer = self._lease_ready(len(old) + len(self._late))
            if answer.status == "paused":
                return (
                    f"complete groups ({len(old)}) are older than max_staleness = {self.limit.max_staleness} allows, "
                    f"and begin anew when admission is resumed (paused: {answer.detail or 'no reason given'})"
                )
            if not any(lease.task in old for lease in answer.leases):
                return ""  # somebody else has them
            given = [unchanged(lease) for lease in answer.leases]
            try:
                while given:
                    self._judge(given[:GROUPS_AT_ONCE])
                    del given[:GROUPS_AT_ONCE]
            finally:
                self._report(given)
        return ""

    def _lease_ready(self, count: int) -> Leases:
        queue = self._pool.queue(self._queue)
        return sure(self._pool, lambda request: queue.acquire(count, stages=("ready",), request_id=request))

    def _judge(self, changes: list[Change]) -> None:
        """Report these leases, those of groups that are too old without a token; all are given back if one cannot be
        read."""
        queue, served = self._pool.queue(self._queue), self._pool.policy_version()
        groups = tokens = 0
        late = set()
        for at, change in enumerate(changes):
            task = change.work.task
            if task in self._late:
                continue
            work = queue.open(change.work.lease)
            samples = {sample.index: sample for sample in work.group.samples}
            if self.limit.verdict(work.group, samples.values(), served, log) != "drop":
                late.add(task)
            else:
                log.info("group %s is dropped as stale at policy version %s, and its prompt starts anew", task, served)
                anew = msgspec.structs.replace(work.group, samples=tuple(begun_anew(samples).values()))
                changes[at] = Change(work, "reopen", anew, rewrite=True)
                groups, tokens = groups + 1, tokens + sum(map(generated_tokens, samples.values()))
        self._report(changes)
        self._late |= late
        self._groups, self._tokens = self._groups + groups, self._tokens + tokens

    def _report(self, changes: list[Change]) -> None:
        if changes:
            with contextlib.suppress(Fenced):  # the session was lost: they are ready again already
                queue = self._pool.queue(self._queue)
                sure(self._pool, lambda request: queue.report(changes, request_id=request))
