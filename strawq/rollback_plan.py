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
from strawq.core.state import Branch, State
from strawq.errors import BadInput
from strawq.inspection import TaskCounts, count_tasks


class QueueChange(msgspec.Struct, frozen=True):
    """Counts of one queue; None where the queue does not exist."""

    now: TaskCounts | None
    then: TaskCounts | None


class RollbackPlan(msgspec.Struct, frozen=True):
    """`branch` would be active and go on from `target`, which is of log position `base_seq`; `left` would be left at
    `head_seq`. `leases_ended` counts groups and batches in the hands of live sessions."""

    target: str
    branch: str
    base_seq: int
    left: str
    head_seq: int
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
    now, leases = _counts(old), _held(old)
    mark = state.journal.mark()
    try:
        apply(state, event, state.seq + 1, {})
        then = _counts(state.branch)
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
        version_now=old.meta.policy_version,
        version_then=version,
        leases_ended=leases,
        queues={name: QueueChange(now.get(name), then.get(name)) for name in names},
    )


def _counts(branch: Branch) -> dict[str, TaskCounts]:
    return {name: count_tasks(branch.queues[name]) for name in branch.queues}


def _held(branch: Branch) -> int:
    queues = [branch.queues[name] for name in branch.queues]
    tasks = sum(len(keys) for queue in queues for keys in queue.held.values())
    return tasks + sum(len(keys) for queue in queues for session, keys in queue.held_batches.items() if session)
