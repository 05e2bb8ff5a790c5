"""Checkpoints, branches, epochs and trimming: decisions about what may be forgotten, and what never is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from strawq.core import commands as c
from strawq.core import events as e
from strawq.core.apply_lifetime import moves
from strawq.core.names import (
    quoted,
    require_digests,
    require_name,
    require_named_branch,
    require_queue,
    require_session,
)
from strawq.core.state import State, pin_key
from strawq.errors import BadInput, Gone
from strawq.limits import METADATA_BYTES

Answer = e.AnyEvent | e.Refusal


def _checkpoint(state: State, command: c.TakeCheckpoint) -> Answer:
    require_name(command.name, "checkpoint")
    require_named_branch(state, command.branch)
    if command.name in state.checkpoints or command.name in state.branches:
        raise BadInput(f"the name {command.name!r} is taken by a checkpoint or branch; choose another or drop it first")
    if len(command.metadata.encode()) > METADATA_BYTES:
        raise BadInput(f"the metadata of checkpoint {command.name} is larger than {METADATA_BYTES} bytes")
    if sum(len(text.encode()) for pair in command.bindings for text in pair) > METADATA_BYTES:
        raise BadInput(f"the bindings of checkpoint {command.name} are larger than {METADATA_BYTES} bytes")
    return e.Checkpointed(
        name=command.name,
        seq=state.seq + 1,
        metadata=command.metadata,
        bindings=tuple(sorted(command.bindings)),
        time_ms=command.time_ms,
    )


def _absent(what: str, name: str, there: Iterable[str]) -> str:
    return f"there is no {what} {quoted(name)} (there are: {', '.join(there) or 'none'})"


def _drop_checkpoint(state: State, command: c.DropCheckpoint) -> Answer:
    if command.name not in state.checkpoints:
        raise BadInput(_absent("checkpoint", command.name, state.checkpoints))
    return e.CheckpointDropped(name=command.name)


def _rollback(state: State, command: c.Rollback) -> Answer:
    checkpoint = state.checkpoints.get(command.target)
    branch = state.branches.get(command.target)
    if checkpoint is None and branch is None:
        names = ", ".join([*state.checkpoints, *(name for name in state.branches if name != state.active.row)])
        raise BadInput(
            f"there is no checkpoint or branch {quoted(command.target)} to roll back to (there are: {names or 'none'})"
        )
    if command.target == state.active.row:
        raise BadInput(f"branch {command.target} is the active one already")
    bound = dict(checkpoint.bindings) if checkpoint else {}
    for name, digest in command.bindings:
        if bound.get(name) != digest:
            raise BadInput(
                f"checkpoint {command.target} was bound to {name[:80]} = {bound.get(name, '(nothing)')[:80]}, not "
                f"{digest[:80]}: "
                "the files are not of one step"
            )
    name = command.branch or _free_branch(state)
    require_name(name, "branch")
    if name in state.branches or name in state.checkpoints:
        raise BadInput(f"the name {name!r} is taken by a branch or checkpoint; choose another")
    paused = state.branch.meta.pause is not None
    return e.RolledBack(target=command.target, branch=name, left=state.active.row, paused=paused)


def _free_branch(state: State) -> str:
    number = state.meta.branches + 2
    while f"branch-{number}" in state.branches or f"branch-{number}" in state.checkpoints:
        number += 1
    return f"branch-{number}"


def _drop_branch(state: State, command: c.DropBranch) -> Answer:
    if command.name not in state.branches:
        raise BadInput(_absent("branch", command.name, state.branches))
    if command.name == state.active.row:
        raise BadInput(f"branch {command.name} is active; roll back to another one before dropping it")
    return e.BranchDropped(name=command.name)


def _pin(state: State, command: c.PinObjects) -> Answer:
    require_session(state, command.session)
    require_name(command.name, "pin")
    for digest in command.objects:
        if digest not in state.objects:
            raise Gone(f"object {digest[:12]} cannot be pinned: nothing reaches it any more, it may be gone")
    return e.Pinned(session=command.session, name=command.name, objects=tuple(sorted(set(command.objects))))


def _unpin(state: State, command: c.Unpin) -> Answer:
    if pin_key(command.session, command.name) not in state.pins:
        return e.Refusal("done", f"there is no pin {command.name} of session {command.session}")
    return e.Unpinned(session=command.session, name=command.name)


def _keep_archive(state: State, command: c.KeepArchive) -> Answer:
    require_name(command.name, "archive")
    queue = require_queue(state, command.queue)
    require_named_branch(state, command.branch)
    if command.name in state.archives:
        raise BadInput(f"there is an archive {command.name!r} already; choose another name or delete it first")
    if len(command.metadata.encode()) > METADATA_BYTES:
        raise BadInput(f"the metadata of archive {command.name} is larger than {METADATA_BYTES} bytes")
    tasks = tuple(dict.fromkeys(command.tasks))
    missing = [key for key in tasks if key not in queue.tasks]
    if missing or not tasks:
        named = ", ".join(missing[:4]) or "none were named"
        raise BadInput(f"archive {command.name} can keep only groups that are live: {named}")
    return e.Archived(
        name=command.name, queue=command.queue, tasks=tasks, metadata=command.metadata, time_ms=command.time_ms
    )


def _drop_archive(state: State, command: c.DropArchive) -> Answer:
    if command.name not in state.archives:
        raise BadInput(_absent("archive", command.name, state.archives))
    return e.ArchiveDropped(name=command.name)


def _open_epoch(state: State, command: c.OpenEpoch) -> Answer:
    if command.epoch <= state.meta.epoch:
        return e.Refusal("done", f"epoch {state.meta.epoch} is open")
    if command.epoch != state.meta.epoch + 1:
        raise BadInput(f"epoch {command.epoch} does not follow epoch {state.meta.epoch}")
    return e.EpochOpened(epoch=command.epoch)


def _close_epoch(state: State, command: c.CloseEpoch) -> Answer:
    if command.epoch <= state.meta.closed_epoch:
        return e.Refusal("done", f"epoch {command.epoch} is closed")
    if command.epoch >= state.meta.epoch:
        raise BadInput(f"epoch {command.epoch} is the open one; open the next before closing it")
    return e.EpochClosed(epoch=command.epoch)


def _trim(state: State, command: c.Trim) -> Answer:
    if command.number <= state.meta.trims:
        return e.Refusal("done", f"trim {command.number} is logged")
    if command.number != state.meta.trims + 1:
        raise BadInput(f"trim {command.number} does not follow trim {state.meta.trims}")
    return e.Trimmed(number=command.number, floor=command.floor)


def _move_objects(state: State, command: c.MoveObjects) -> Answer:
    require_digests(command.objects)
    moved = []
    for ref in command.objects:
        row = state.objects.get(ref.digest)
        if row is None or not moves(row.ref, ref):
            continue
        if ref.epoch <= state.meta.closed_epoch:
            return e.Refusal(
                "epoch_closed", f"object {ref.digest[:12]} was moved into epoch {ref.epoch}, which is closed"
            )
        if ref.epoch > state.meta.epoch or (ref.bytes, ref.rows) != (row.ref.bytes, row.ref.rows):
            raise BadInput(
                f"object {ref.digest[:12]} of {row.ref.bytes} bytes cannot move into epoch {ref.epoch} with "
                f"{ref.bytes} (open epoch: {state.meta.epoch})"
            )
        moved.append(ref)
    return e.ObjectsMoved(objects=tuple(moved)) if moved else e.Refusal("done", "these objects have moved already")


LIFETIME: dict[type, Callable[[State, Any], Answer]] = {
    c.TakeCheckpoint: _checkpoint,
    c.DropCheckpoint: _drop_checkpoint,
    c.Rollback: _rollback,
    c.DropBranch: _drop_branch,
    c.PinObjects: _pin,
    c.Unpin: _unpin,
    c.KeepArchive: _keep_archive,
    c.DropArchive: _drop_archive,
    c.OpenEpoch: _open_epoch,
    c.CloseEpoch: _close_epoch,
    c.Trim: _trim,
    c.MoveObjects: _move_objects,
}
