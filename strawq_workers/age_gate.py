"""What the age of groups asks for before a trainer may take its batch.

The rule: under `oldest_first` a batch waits for an older group whenever leaving it behind would make it miss the
budget, as far as versions are saved. Under `drop` a complete group that got too old while it waited is leased, and its
prompt goes back without tokens and without a burned attempt. It is delivered late if it was dropped as often as
allowed, if it cannot begin anew, and if the input has ended, for nobody may be left to work on it. A batch that was
taken before comes again as it is.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from strawq.errors import BadInput, Damaged, Fenced, Gone, Misaligned
from strawq.handles import Batch, Leases
from strawq.model import UNVERSIONED, policy_number
from strawq.pool import Pool
from strawq.work import Change, unchanged
from strawq_workers.admission.staleness import Candidate, StalenessBudget
from strawq_workers.asking import sure
from strawq_workers.stale_groups import AgeLimit, begun_anew
from strawq_workers.worker.generation import generated_tokens

log = logging.getLogger("strawq.collector")

CANNOT = "group %s is older than max_staleness allows, and cannot begin anew: %s"
GROUPS_AT_ONCE = 64
TOKENS_AT_ONCE = 1 << 20
"""Groups are read and given back in portions of at most so many, or one."""


class _Ready(msgspec.Struct, frozen=True):
    """What there is of a queue. `old`: complete groups beyond the budget, the oldest first. `open`: the consumer has a
    batch already, and nothing is chosen. `over`: nothing will come but what is complete."""

    old: tuple[str, ...] = ()
    open: bool = False
    over: bool = False


class AgeGate:
    """The gate of one queue. Not safe from many threads."""

    def __init__(self, pool: Pool, queue: str, limit: AgeLimit) -> None:
        self._pool = pool
        self._queue = queue
        self.limit = limit
        self._late: set[str] = set()
        self._clean = True
        """False while complete groups are leased here, or may be."""
        self._groups = self._tokens = 0

    def blocked(self, consumer: str, count: int) -> str:
        """Why the consumer's next batch of `count` groups must wait, in words; empty if it need not. Begins anew what
        is too old for it. Raises what storage raises."""
        if self._strict:
            self._begin_anew(consumer)
            return ""
        if self.limit.max_staleness < 0 or self.limit.policy == "admit":
            return ""
        return self._waits_for(consumer, count)

    def outgrown(self, batch: Batch) -> bool:
        """Whether a version was published between the look and the take, and the batch is too old by now: it goes back
        then, and the next look finds it."""
        return self._strict and batch.delivery == 1 and bool(self._undelivered(self._look("", batch=batch)))

    def added(self) -> dict[str, float]:
        """What was begun anew since the last call, under the names of the metrics that it adds to."""
        found = {
            "rollout/staleness/dropped_groups": float(self._groups),
            "rollout/regenerated_tokens": float(self._tokens),
        }
        self._groups = self._tokens = 0
        return found

    # -- oldest_first -------------------------------------------------------------------------------------------

    def _waits_for(self, consumer: str, count: int) -> str:
        def view(machine: Any) -> tuple[list[Candidate], list[Candidate], str]:
            branch = machine.state.branch
            queue = branch.queues[self._queue]
            ready: list[Candidate] = []
            unfinished: list[Candidate] = []
            if any(batch.consumer == consumer for batch in queue.batches.values()):
                return ready, unfinished, ""  # one that is delivered again is not chosen anew
            for task in queue.tasks.values():
                version = None if task.version == UNVERSIONED else task.version
                if not (task.batch or task.failed):
                    done = task.stage == "ready" and task.pending
                    (ready if done else unfinished).append(Candidate(task.id, task.id, version, task.order))
            return ready, unfinished, branch.meta.policy_version

        ready, unfinished, served = self._pool.log.refresh(view)
        budget = StalenessBudget(self.limit.max_staleness, "oldest_first", batch_groups=count)
        number = policy_number(served)
        waiting = budget.select(ready, unfinished, served_version=None if number == UNVERSIONED else number).waiting_for
        if not waiting:
            return ""
        return f"older groups come first ({', '.join(waiting[:4])}): without them max_staleness would be exceeded"

    # -- drop ---------------------------------------------------------------------------------------------------

    @property
    def _strict(self) -> bool:
        return self.limit.policy == "drop" and self.limit.max_staleness >= 0

    def _look(self, consumer: str, held: int = 0, batch: Batch | None = None) -> _Ready:
        """At what is ready, or at a batch that was taken. `held`: groups that are leased here."""

        def view(machine: Any) -> _Ready:
            branch = machine.state.branch
            queue = branch.queues[self._queue]
            unfinished = queue.unstarted + queue.leased() - held
            unfinished += queue.count("fresh", "pending") + queue.count("partial", "pending")
            last = policy_number(branch.meta.policy_version) - self.limit.max_staleness
            old = []
            for key in queue.pending("ready") if batch is None else batch.tasks:
                task = queue.tasks.get(key)
                if task is None or task.version == UNVERSIONED or task.version >= last:
                    break  # the oldest come first, those without a number last
                old.append(key)
            taken = batch is None and any(each.consumer == consumer for each in queue.batches.values())
            return _Ready(tuple(old), taken, queue.row.sealed and unfinished <= 0)

        look: _Ready = self._pool.log.refresh(view)
        return look

    def _undelivered(self, look: _Ready) -> set[str]:
        """Groups that are too old and are not known to be delivered late."""
        return set() if look.over or look.open else {*look.old} - self._late

    def _begin_anew(self, consumer: str) -> None:
        queue = self._pool.queue(self._queue)
        if not self._clean:
            self._give_back([unchanged(lease) for lease in queue.leased(("ready",))])
            self._clean = True
        while old := self._undelivered(look := self._look(consumer)):
            self._late &= {*look.old}
            self._clean = False
            leases = self._lease_ready(len(old) + len(self._late))
            changes = [unchanged(lease) for lease in leases]
            # While these are leased no worker takes the queue for used up; before, the last one may have.
            if not self._look(consumer, held=len(leases)).over:
                changes = self._settle(changes)
            self._give_back(changes)
            self._clean = True
            if not any(lease.task in old for lease in leases):
                return  # somebody else has them

    def _lease_ready(self, count: int) -> Leases:
        """The oldest come first, so all that are too old are among the first of what is ready."""
        queue = self._pool.queue(self._queue)
        return sure(self._pool, lambda request: queue.acquire(count, stages=("ready",), request_id=request))

    def _settle(self, changes: list[Change]) -> list[Change]:
        """Begin anew what can, portion by portion; returns what goes back as it is."""
        rest: list[Change] = []
        while changes:
            portion, changes = _portion(changes)
            judged = [self._judged(change) for change in portion]
            rest += [change for change in judged if change.group is None]
            self._give_back([change for change in judged if change.group is not None])
        return rest

    def _judged(self, change: Change) -> Change:
        """The same, or one that begins the group anew."""
        task = change.work.task
        if task in self._late:
            return change
        try:
            work = self._pool.queue(self._queue).open(change.work.lease)
            samples = {sample.index: sample for sample in work.group.samples}
            served = self._pool.policy_version()
            if self.limit.verdict(work.group, samples.values(), served, log) == "drop":
                log.info("group %s is dropped as stale at policy version %s, and its prompt starts anew", task, served)
                anew = msgspec.structs.replace(work.group, samples=tuple(begun_anew(samples).values()))
                return Change(work, "yield", anew, rewrite=True)
        except (Damaged, Gone) as error:
            log.warning(CANNOT, task, error)
        self._late.add(task)
        return change

    def _give_back(self, changes: list[Change]) -> None:
        if not changes:
            return
        queue = self._pool.queue(self._queue)
        tokens = {change.work.task: sum(map(generated_tokens, change.work.group.samples)) for change in changes}
        try:
            receipt = sure(self._pool, lambda request: queue.report(changes, request_id=request))
        except Fenced as error:
            log.info("%d complete groups are ready again already: %s", len(changes), error)
            return
        except (BadInput, Misaligned) as error:
            if all(change.group is None for change in changes):
                raise
            if len(changes) == 1:
                task = changes[0].work.task
                log.warning(CANNOT, task, error)
                self._late.add(task)
                changes = [unchanged(changes[0].work.lease)]
            for change in changes:
                self._give_back([change])
            return
        anew = [change.work.task for change in changes if change.group is not None]
        counted = [task for task in anew if receipt.counts(task)]
        self._groups += len(counted)
        self._tokens += sum(tokens[task] for task in counted)


def _portion(changes: list[Change]) -> tuple[list[Change], list[Change]]:
    """The first ones that may be in memory together, and the others."""
    tokens, count = 0, 0
    while count < min(GROUPS_AT_ONCE, len(changes)) and tokens < TOKENS_AT_ONCE:
        tokens += changes[count].work.lease.held.task.tokens
        count += 1
    return changes[:count], changes[count:]
