"""Fold the events of lifetime: checkpoints, branches, pins, archives, epochs, trims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from strawq.core import events as e
from strawq.core.image import freeze_branch, thaw_branch
from strawq.core.state import Branch, State, pin_key
from strawq.model import Archive, BranchRow, Checkpoint, ObjectRef, Pin, StoredObject

Where = Mapping[str, int]
"""Offsets of inline objects in the payload of the entry that carries the event, by digest."""

replace = msgspec.structs.replace


def _checkpointed(state: State, event: e.Checkpointed, seq: int, _where: Where) -> None:
    branch = state.branch
    objects = _reached(branch)
    for digest in objects:
        state.hold(digest, 1)
    state.checkpoints.put(
        event.name,
        Checkpoint(
            name=event.name,
            branch=state.active.row,
            seq=seq,
            policy_version=branch.meta.policy_version,
            image=freeze_branch(branch),
            objects=objects,
            metadata=event.metadata,
            bindings=event.bindings,
            time_ms=event.time_ms,
        ),
    )


def _reached(branch: Branch) -> tuple[str, ...]:
    """Digests of all objects that the branch's rows refer to, each once."""
    digests: set[str] = set()
    for name in branch.queues:
        queue = branch.queues[name]
        digests.update(submission.object for submission in queue.submissions.values())
        digests.update(part.object for task in queue.tasks.values() for part in task.parts)
    return tuple(sorted(digests))


def _checkpoint_dropped(state: State, event: e.CheckpointDropped, _seq: int, _where: Where) -> None:
    for digest in state.checkpoints[event.name].objects:
        state.hold(digest, -1)
    state.checkpoints.drop(event.name)


def _rolled_back(state: State, event: e.RolledBack, seq: int, _where: Where) -> None:
    """Freeze the branch that is left, thaw the target as a new one. Every lease of the old branch ends here."""
    checkpoint = state.checkpoints.get(event.target)
    source = checkpoint or state.branches[event.target]
    left, old = state.branches[state.active.row], state.branch
    objects = _reached(old)
    for digest in objects:
        state.hold(digest, 1)
    state.branches.put(
        left.id,
        replace(left, image=freeze_branch(old), objects=objects, left_seq=seq, policy_version=old.meta.policy_version),
    )
    new = thaw_branch(source.image, state.journal)
    _hold_branch(state, new, 1)
    _hold_branch(state, old, -1)
    for name in new.queues:
        queue = new.queues[name]
        for session in sorted(queue.held):
            for key in sorted(queue.held[session]):
                queue.tasks.put(key, replace(queue.tasks[key], session=""))
        for batch in queue.batches.values():
            queue.batches.put(batch.number, replace(batch, session=""))
    # A pause holds until it is ended, wherever the log goes on; whoever has acknowledged it did so for other work.
    pause = old.meta.pause if event.paused else None
    new.change(pause=replace(pause, acknowledged=()) if pause is not None else None, forgotten_seq=seq)
    # What was answered on the line that is left is not remembered on this one, but for what holds on every line.
    if event.left:
        _carry_answers(old, new)
    parent = checkpoint.branch if checkpoint else event.target
    base = checkpoint.seq if checkpoint else state.branches[event.target].left_seq
    state.branches.put(event.branch, BranchRow(event.branch, parent=parent, source=event.target, base_seq=base))
    state.branch_cell.put(new)
    state.active.put(event.branch)
    state.change(branches=state.meta.branches + 1)


_OF_THE_POOL = (
    e.Checkpointed, e.CheckpointDropped, e.RolledBack, e.BranchDropped, e.Archived, e.ArchiveDropped,
)  # fmt: skip
"""Events whose effect no rollback takes back: whoever asks again on another branch asks about what is there."""


def _carry_answers(old: Branch, new: Branch) -> None:
    """The oldest of them go when the next answer is remembered, if they are too many."""
    for row in old.answered.values():
        if isinstance(row.event, _OF_THE_POOL) and row.request not in new.answer_of:
            meta = new.meta
            new.answered.put(meta.answered_next, row)
            new.change(answered_next=meta.answered_next + 1, answered_weight=meta.answered_weight + row.weight)


def _hold_branch(state: State, branch: Branch, by: int) -> None:
    for name in branch.queues:
        queue = branch.queues[name]
        for submission in queue.submissions.values():
            state.hold(submission.object, by)
        for task in queue.tasks.values():
            state.hold_parts(task.parts, by)


def _branch_dropped(state: State, event: e.BranchDropped, _seq: int, _where: Where) -> None:
    for digest in state.branches[event.name].objects:
        state.hold(digest, -1)
    state.branches.drop(event.name)


def _epoch_opened(state: State, event: e.EpochOpened, _seq: int, _where: Where) -> None:
    state.change(epoch=event.epoch)


def _epoch_closed(state: State, event: e.EpochClosed, _seq: int, _where: Where) -> None:
    state.change(closed_epoch=event.epoch)


def _trimmed(state: State, event: e.Trimmed, _seq: int, _where: Where) -> None:
    state.change(trims=event.number, floor=max(event.floor, state.meta.floor))


def moves(old: ObjectRef, new: ObjectRef) -> bool:
    """Objects move to younger epochs only, so none comes back to a place that collection may have cleared. Tensors
    stay where they are, and their records with them."""
    return old.epoch < new.epoch and not old.pack


def _objects_moved(state: State, event: e.ObjectsMoved, _seq: int, _where: Where) -> None:
    for ref in event.objects:
        row = state.objects.get(ref.digest)
        if row is not None and moves(row.ref, ref):
            state.objects.put(ref.digest, StoredObject(ref, row.count))


def _pinned(state: State, event: e.Pinned, _seq: int, _where: Where) -> None:
    key = pin_key(event.session, event.name)
    for digest in event.objects:
        state.hold(digest, 1)
    if key in state.pins:
        drop_pin(state, key)
    state.pins.put(key, Pin(event.session, event.name, event.objects))


def _unpinned(state: State, event: e.Unpinned, _seq: int, _where: Where) -> None:
    drop_pin(state, pin_key(event.session, event.name))


def drop_pin(state: State, key: str) -> None:
    for digest in state.pins[key].objects:
        state.hold(digest, -1)
    state.pins.drop(key)


def _archived(state: State, event: e.Archived, seq: int, _where: Where) -> None:
    queue = state.branch.queues[event.queue]
    tasks = tuple(queue.tasks[key] for key in event.tasks)
    objects = tuple(sorted({part.object for task in tasks for part in task.parts}))
    for digest in objects:
        state.hold(digest, 1)
    archive = Archive(event.name, event.queue, state.active.row, seq, tasks, objects, event.metadata, event.time_ms)
    state.archives.put(event.name, archive)


def _archive_dropped(state: State, event: e.ArchiveDropped, _seq: int, _where: Where) -> None:
    for digest in state.archives[event.name].objects:
        state.hold(digest, -1)
    state.archives.drop(event.name)


APPLY_LIFETIME: dict[type, Callable[[State, Any, int, Where], None]] = {
    e.Checkpointed: _checkpointed,
    e.CheckpointDropped: _checkpoint_dropped,
    e.RolledBack: _rolled_back,
    e.BranchDropped: _branch_dropped,
    e.EpochOpened: _epoch_opened,
    e.EpochClosed: _epoch_closed,
    e.Trimmed: _trimmed,
    e.ObjectsMoved: _objects_moved,
    e.Pinned: _pinned,
    e.Unpinned: _unpinned,
    e.Archived: _archived,
    e.ArchiveDropped: _archive_dropped,
}
