"""What a pool looks like at one log position, as data: the answer of `strawq inspect`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from strawq.core.state import Queue, State
from strawq.model import Archive, Checkpoint, Pause, PoolHeader

Kept = TypeVar("Kept", Checkpoint, Archive)


class TaskCounts(msgspec.Struct, frozen=True):
    """Each submitted prompt is counted once; `total` is their sum."""

    fresh_pending: int
    fresh_leased: int
    partial_pending: int
    partial_leased: int
    ready: int
    in_batch: int
    trained: int
    dropped: int
    failed: int
    total: int


class QueueView(msgspec.Struct, frozen=True):
    tasks: TaskCounts
    sealed: bool
    submitted: int
    accepted: int
    tokens: int
    expirations: int
    drop_reasons: dict[str, int]
    batches: list[str]
    producers: dict[str, str]


class SessionView(msgspec.Struct, frozen=True):
    """`state` is `live`: sessions that left or were expired are not listed."""

    id: str
    host: str
    pid: int
    role: str
    state: str
    leases: int
    batches: int


class CheckpointView(msgspec.Struct, frozen=True):
    name: str
    branch: str
    seq: int
    policy_version: str
    time_ms: int


class BranchView(msgspec.Struct, frozen=True):
    name: str
    active: bool
    parent: str
    source: str
    base_seq: int
    left_seq: int


class ObjectCounts(msgspec.Struct, frozen=True):
    """Files that the state reaches, and what rides inside the log."""

    files: int
    bytes: int
    inline: int
    inline_bytes: int


class Inspection(msgspec.Struct, frozen=True):
    format_version: int
    run_id: str
    pool_id: str
    branch: str
    head_seq: int
    policy_version: str
    paused: Pause | None
    epoch: int
    queues: dict[str, QueueView]
    sessions: list[SessionView]
    checkpoints: list[CheckpointView]
    branches: list[BranchView]
    objects: ObjectCounts
    damage: tuple[str, ...] = ()


def count_tasks(queue: Queue) -> TaskCounts:
    """Counts of one queue; `ready` includes ready groups that a reader holds."""
    row = queue.row
    fresh_pending = queue.unstarted + queue.count("fresh", "pending")
    fresh_leased = queue.count("fresh", "leased")
    partial_pending, partial_leased = queue.count("partial", "pending"), queue.count("partial", "leased")
    ready = queue.count("ready", "pending") + queue.count("ready", "leased")
    in_batch = queue.count("ready", "batch")
    failed = sum(queue.count(stage, "failed") for stage in ("fresh", "partial", "ready"))
    live = fresh_pending + fresh_leased + partial_pending + partial_leased + ready + in_batch + failed
    return TaskCounts(
        fresh_pending, fresh_leased, partial_pending, partial_leased, ready, in_batch, row.trained, row.dropped, failed,
        live + row.trained + row.dropped,
    )  # fmt: skip


def by_position(kept: Iterable[Kept]) -> list[Kept]:
    """Checkpoints or archives as they came to be: `rollout-10` after `rollout-2`."""
    return sorted(kept, key=lambda each: each.seq)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key of names by the numbers in them: `branch-10` after `branch-2`."""
    pieces = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]


def inspect_state(state: State, header: PoolHeader, damage: tuple[str, ...] = ()) -> Inspection:
    branch = state.branch
    queues = {name: branch.queues[name] for name in branch.queues}
    merged: set[tuple[int, str]] = set()
    files = inline = file_bytes = inline_bytes = 0
    for row in state.objects.values():
        if row.ref.epoch:
            if row.ref.file:
                merged.add((row.ref.epoch, row.ref.file))
            else:
                files += 2 if row.ref.pack else 1
            file_bytes += row.ref.bytes + row.ref.pack_bytes
        else:
            inline += 1
            inline_bytes += row.ref.bytes
    return Inspection(
        format_version=header.format_version,
        run_id=header.run_id,
        pool_id=header.pool_id,
        branch=state.active.row,
        head_seq=state.seq,
        policy_version=branch.meta.policy_version,
        paused=branch.meta.pause,
        epoch=state.meta.epoch,
        queues={name: _view(queue) for name, queue in queues.items()},
        sessions=[
            SessionView(
                session.id,
                session.host,
                session.pid,
                session.role,
                "live",
                sum(len(queue.held.get(session.id, ())) for queue in queues.values()),
                sum(len(queue.held_batches.get(session.id, ())) for queue in queues.values()),
            )
            for session in state.sessions.values()
        ],
        checkpoints=[
            CheckpointView(point.name, point.branch, point.seq, point.policy_version, point.time_ms)
            for point in by_position(state.checkpoints.values())
        ],
        branches=[
            BranchView(row.id, row.id == state.active.row, row.parent, row.source, row.base_seq, row.left_seq)
            for row in sorted(state.branches.values(), key=lambda row: _natural(row.id))
        ],
        objects=ObjectCounts(files + len(merged), file_bytes, inline, inline_bytes),
        damage=damage,
    )


def _view(queue: Queue) -> QueueView:
    row = queue.row
    return QueueView(
        tasks=count_tasks(queue),
        sealed=row.sealed,
        submitted=row.submitted,
        accepted=row.accepted,
        tokens=row.tokens,
        expirations=row.expirations,
        drop_reasons=dict(row.reasons),
        batches=[batch.id for batch in queue.batches.values()],
        producers={producer.id: producer.cursor for producer in queue.producers.values()},
    )
