"""What the processes of a drill do: submit, generate, train, clean up, and watch.

The rule: an acknowledgement is in the ledger before the next call. Work that was fenced is dropped, as any worker
must.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from strawq.core.commands import Outcome
from strawq.core.events import AnyEvent
from strawq.core.machine import Machine
from strawq.drill.content import chunk_count, faults, grown, make_prompt, prompt_index
from strawq.drill.ledger import Line
from strawq.drill.life import Stage
from strawq.errors import Fenced
from strawq.garbage import collect_garbage
from strawq.handles import Batch, Leases
from strawq.merging import merge_objects
from strawq.queue import Queue
from strawq.samples import Group
from strawq.trimming import trim_log
from strawq.work import Change, Work

PRODUCER = "drill"
WAITING_PROMPTS = 64
BATCH_GROUPS = 4
KEEP_ENTRIES, TRIM_STEP = 100, 10
"""Few, so that the log is trimmed over and over while it is struck; enough for the watcher, which is less than a second
behind."""
MERGE_ENOUGH = 4
COLLECT_WAIT_SECONDS = 1.0
WATCH_SECONDS = 0.05


class Watched(msgspec.Struct, frozen=True):
    """One entry as the watcher read it. `gap`: it was trimmed before it was read."""

    seq: int
    events: tuple[AnyEvent, ...] = ()
    gap: bool = False


def submit(stage: Stage) -> None:
    """Keeps prompts waiting. The producer's cursor is the number of the next prompt."""
    while not stage.done:
        counts = stage.queue.counts()
        if counts.fresh_pending > WAITING_PROMPTS:
            stage.nap(0.02)
            continue
        start = int(stage.queue.cursor(PRODUCER) or 0)
        count = stage.chance.randint(1, 24)
        try:
            stage.ledger.write(Line("submitted", cursor=stage.ask(partial(_submit, stage.queue, start, count))))
        except Fenced:
            stage.nap(0.02)  # An earlier life of this producer was faster: its cursor is read again.


def _submit(queue: Queue, start: int, count: int, request: str) -> int:
    end = start + count
    told = queue.submit(
        [make_prompt(index) for index in range(start, end)],
        producer=PRODUCER,
        cursor=str(end),
        expect=str(start) if start else "",
        request_id=request,
    )
    return int(told.cursor)


def _acquire(queue: Queue, count: int, request: str) -> Leases:
    return queue.acquire(count, request_id=request)


def _return(queue: Queue, batch: Batch, request: str) -> None:
    queue.return_batch(batch, request_id=request)


def _finish(queue: Queue, batch: Batch, _request: str) -> None:
    queue.finish_batch(batch)  # Its request is named by the delivery.


def work(stage: Stage) -> None:
    while not stage.done:
        count = stage.chance.randint(1, 4)
        try:
            leases = stage.ask(partial(_acquire, stage.queue, count))
        except Fenced:
            continue
        if leases.status == "sealed":
            return
        if not leases:
            stage.nap(0.05)
        held = []
        for lease in leases:
            opened = stage.queue.open(lease)
            for fault in faults(opened.group, lease.task, lease.attempt):
                stage.fault(fault)
            held.append(opened)
        if len(held) > 1 and stage.chance.random() < 0.3:
            _report(stage, [_ending(stage, piece, "complete") for piece in held])
            continue
        for piece in held:
            _generate(stage, piece)


def _generate(stage: Stage, piece: Work) -> None:
    for _ in range(stage.chance.randint(0, 3)):
        if not _report(stage, [Change(piece, "save", _more(stage, piece))]):
            return
        stage.nap(0.01)
    fate = stage.chance.random()
    if fate < 0.1 and not stage.life.finishing:
        _report(stage, [_ending(stage, piece, "yield")])
    elif fate < 0.15:
        _report(stage, [Change(piece, "drop", None, "drill")])
    elif fate < 0.2 and not stage.life.finishing:
        _report(stage, [Change(piece, "fail", None, "drill")])
    elif fate < 0.25 and not stage.life.finishing:
        stage.nap(stage.life.lease_seconds / 4)  # A straggler: it holds its lease through a kill, likely.
        _report(stage, [_ending(stage, piece, "complete")])
    else:
        _report(stage, [_ending(stage, piece, "complete")])


def _more(stage: Stage, piece: Work) -> Group:
    return grown(piece.group, piece.task, piece.lease.attempt, stage.life.number)


def _ending(stage: Stage, piece: Work, outcome: Outcome) -> Change:
    return Change(piece, outcome, _more(stage, piece))


_SAID = {"save": "saved", "yield": "saved", "complete": "completed", "drop": "dropped", "fail": "failed"}


def _report(stage: Stage, changes: Sequence[Change]) -> bool:
    """Whether the report of all of them stands; what stands is in the ledger."""
    try:
        told = stage.ask(lambda request: stage.queue.report(changes, request_id=request))
    except Fenced:
        return False
    stands = [change for change in changes if told.counts(change.work.task)]
    for task in told.conflict:
        stage.fault(f"task {task}: its report was refused as a conflict")
    stage.ledger.write(
        *(
            Line(
                _SAID[change.outcome],
                task=change.work.task,
                attempt=change.work.lease.attempt,
                chunks=chunk_count(change.work.group),
                index=prompt_index(change.work.group.prompt),
            )
            for change in stands
        )
    )
    return len(stands) == len(changes)


def train(stage: Stage) -> None:
    while not stage.done:
        try:
            taken = stage.ask(lambda request: stage.queue.take_batch(BATCH_GROUPS, request_id=request))
        except Fenced:
            continue
        batch = taken.batch
        if batch is None:
            if taken.status == "sealed":
                return
            stage.nap(0.05)
            continue
        try:
            lines = _read(stage, batch)
        except Fenced:
            continue
        stage.ledger.write(*lines)
        fate = stage.chance.random()
        try:
            if fate < 0.1 and not stage.life.finishing:
                stage.ask(partial(_return, stage.queue, batch))
                continue
            stage.ask(partial(_finish, stage.queue, batch))
        except Fenced:
            continue
        stage.ledger.write(Line("finished", batch=batch.id, delivery=batch.delivery))


def _read(stage: Stage, batch: Batch) -> list[Line]:
    lines = []
    for held, group in zip(batch.groups, stage.queue.read_batch(batch), strict=True):
        for fault in faults(group, held.task.id, held.task.attempt):
            stage.fault(fault)
        index = prompt_index(group.prompt)
        lines.append(Line("read", held.task.id, held.task.attempt, chunk_count(group), index, batch.id, batch.delivery))
    return lines


def clean(stage: Stage) -> None:
    """Collects garbage, trims the log and merges files, over and over; joins, so that it also looks after the dead."""
    stage.pool.keeper.require()
    turns: list[Callable[[str], object]] = [
        lambda _: collect_garbage(stage.pool, wait_seconds=COLLECT_WAIT_SECONDS),
        lambda _: stage.pool.snapshot(),
        lambda _: trim_log(stage.pool, keep_entries=KEEP_ENTRIES, snapshots_kept=2, step=TRIM_STEP),
        lambda _: merge_objects(stage.pool, enough=MERGE_ENOUGH),
    ]
    while not stage.done:
        stage.ask(stage.chance.choice(turns))
        stage.nap(0.05)


def watch(stage: Stage) -> None:
    """Copies the history to local disk before it is trimmed. It is never struck."""
    seq = 1
    with open(stage.life.path("history"), "ab") as copy:
        while True:
            done = stage.done
            head: int = stage.pool.log.refresh(lambda machine: machine.seq)
            while seq <= head:
                entry = stage.pool.log.read_entry(seq)
                if entry is None:
                    row = Watched(seq, gap=True)
                else:
                    row = Watched(seq, tuple(Machine().decode(seq, entry.line.events)))
                copy.write(msgspec.json.encode(row) + b"\n")
                seq += 1
            copy.flush()
            if done:
                os.fsync(copy.fileno())
                return
            time.sleep(WATCH_SECONDS)


ROLES: dict[str, Callable[[Stage], None]] = {
    "submitter": submit,
    "worker": work,
    "trainer": train,
    "cleaner": clean,
    "watcher": watch,
}
