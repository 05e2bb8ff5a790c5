"""What a rollback would change, found out by doing it to the folded state and taking it back.

The rule: the plan is the same decision and the same fold as the real step, so it cannot promise anything else.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from strawq.core.apply import apply
from strawq.core.commands import Rollback
from strawq.core.decide import decide
from strawq.core.events import RolledBack
from strawq.core.state import Branch, Queue, State
from strawq.errors import BadInput
from strawq.inspection import TaskCounts, count_tasks
from strawq.model import UNVERSIONED


class QueueChange(msgspec.Struct, frozen=True):
    """Counts of one queue; None where the queue does not exist.

    `brought_back` groups would be there again that are not now: they have ended, or are of another branch. `set_aside`
    groups are there now and would not be, or not with all that they have now; what they have stays with the branch that
    is left. `prefixes` unfinished groups with `prefix_tokens` tokens would be gone on from. `oldest_version` is the
    least version with a number among the tokens that would be there (None: none has one)."""

    now: TaskCounts | None
    then: TaskCounts | None
    brought_back: int
    set_aside: int
    prefixes: int
    prefix_tokens: int
    oldest_version: int | None


class RollbackPlan(msgspec.Struct, frozen=True):
    """`branch` would be active and go on from `target`, which is of log position `base_seq`; `left` would be left at
    `head_seq`. `paused`: admission would stay paused. `leases_ended` counts groups and batches in the hands of live
    sessions."""

    target: str
    branch: str
    base_seq: int
    left: str
    head_seq: int
    paused: bool
    version_now: str
    version_then: str
    leases_ended: int
    queues: dict[str, QueueChange]


def plan_rollback(
    state: State, target: str, bindings: Mapping[str, str] | None = None, branch: str = ""
) -> RollbackPlan:
    """The plan; `state` is as before when this returns. `BadInput` as the rollback itself would say."""
    event = decide(state, Rollback(request="", target=target, branch=branch, bindings=tuple((bindings or {}).items())))
    if not isinstance(event, RolledBack):
        raise BadInput(f"a rollback to {target} is not possible now: {event}")
    left, old = state.active.row, state.branch
    now, leases = _queues(old), _held(old)
    mark = state.journal.mark()
    try:
        apply(state, event, state.seq + 1, {})
        then = _queues(state.branch)
        base, version = state.branches[event.branch].base_seq, state.branch.meta.policy_version
    finally:
        state.journal.undo(mark)
    names = sorted({*now, *then})
    return RollbackPlan(
        target=target,
        branch=event.branch,
        base_seq=base,
        left=left,
        head_seq=state.seq,
        paused=event.paused,
        version_now=old.meta.policy_version,
        version_then=version,
        leases_ended=leases,
        queues={name: _change(now.get(name, _Look(None)), then.get(name, _Look(None))) for name in names},
    )


class _Look:
    """What one branch says of one queue. Prompts that nobody has leased yet are ranges of rows by submission."""

    def __init__(self, queue: Queue | None) -> None:
        self.counts = count_tasks(queue) if queue else None
        self.begun = {task.id: task for task in queue.tasks.values()} if queue else {}
        self.rows = {row.number: (row.next, row.end) for row in queue.submissions.values()} if queue else {}

    def waits(self, key: str) -> bool:
        """Whether the group is a prompt that nobody has leased yet."""
        number, row = map(int, key.split("-"))
        start, end = self.rows.get(number, (0, 0))
        return start <= row < end

    def missing_in(self, other: _Look) -> int:
        """Groups that are in work, or to come, here and not in `other`."""
        count = sum(key not in other.begun and not other.waits(key) for key in self.begun)
        for number, (start, end) in self.rows.items():
            there = other.rows.get(number, (end, end))
            count += end - start - max(0, min(end, there[1]) - max(start, there[0]))
        return count - sum(self.waits(key) for key in other.begun)

    def less_in(self, other: _Look) -> int:
        """Groups of both that have fewer tokens in `other`, or are not complete there."""
        pairs = (
            (task, other.begun.get(key)) for key, task in self.begun.items() if key in other.begun or other.waits(key)
        )
        return sum(
            task.tokens > (there.tokens if there else 0)
            or (task.stage == "ready" and (not there or there.stage != "ready"))
            for task, there in pairs
        )


def _queues(branch: Branch) -> dict[str, _Look]:
    return {name: _Look(branch.queues[name]) for name in branch.queues}


def _change(now: _Look, then: _Look) -> QueueChange:
    prefixes = [task for task in then.begun.values() if task.stage == "partial"]
    versions = [task.version for task in then.begun.values() if task.version != UNVERSIONED]
    return QueueChange(
        now=now.counts,
        then=then.counts,
        brought_back=then.missing_in(now),
        set_aside=now.missing_in(then) + now.less_in(then),
        prefixes=len(prefixes),
        prefix_tokens=sum(task.tokens for task in prefixes),
        oldest_version=min(versions, default=None),
    )


def _held(branch: Branch) -> int:
    queues = [branch.queues[name] for name in branch.queues]
    tasks = sum(len(keys) for queue in queues for keys in queue.held.values())
    return tasks + sum(len(keys) for queue in queues for session, keys in queue.held_batches.items() if session)
