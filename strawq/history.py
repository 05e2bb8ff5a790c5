"""History as people read it: who did what, when, entry by entry, newest first; or one group's life from its
submission to its end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from strawq.core import events as e
from strawq.core.machine import Machine
from strawq.core.names import quoted
from strawq.core.state import task_key
from strawq.errors import BadInput, Damaged

if TYPE_CHECKING:
    from strawq.pool import Pool


class LogLine(msgspec.Struct, frozen=True):
    """One event of an entry. `who` is the process that committed it."""

    seq: int
    time_ms: int
    who: str
    event: str
    text: str


class Beginning(msgspec.Struct, frozen=True):
    """Where readable history begins, and whether older entries were trimmed."""

    seq: int
    trimmed: bool


def beginning(pool: Pool) -> Beginning:
    floor: int = pool.log.refresh(lambda machine: machine.state.meta.floor)
    return Beginning(max(1, floor), floor > 1)


def read_history(pool: Pool, *, newest_first: bool = True, limit: int = 0) -> Iterator[LogLine]:
    """Lines of every entry that is still there; at most `limit` entries if that is positive."""
    first = beginning(pool).seq
    head: int = pool.log.peek(lambda machine: machine.seq)
    numbers = range(head, first - 1, -1) if newest_first else range(first, head + 1)
    for count, seq in enumerate(numbers):
        if limit and count >= limit:
            return
        for line, event in _events(pool, seq):
            yield line if event is None else msgspec.structs.replace(line, text=describe(event))


def follow_task(pool: Pool, task: str) -> Iterator[LogLine]:
    """Everything that history still tells about one task, oldest first. `BadInput`, at the end, if there never was such
    a task; nothing if that cannot be known, since what was trimmed may have told of it."""
    numbers = re.fullmatch("([0-9]{1,18})-([0-9]{1,18})", task)
    if numbers is None:
        raise BadInput(f"{quoted(task)} is not a task id; one looks like 3-17 (submission and row)")
    number, row = map(int, numbers.groups())
    task = task_key(number, row)
    session = ""
    batch = ""
    seen = False
    first = beginning(pool)
    whole = not first.trimmed
    head, submissions = pool.log.refresh(lambda machine: (machine.seq, machine.state.meta.submissions))
    for seq in range(first.seq, head + 1):
        for line, event in _events(pool, seq):
            if event is None:
                whole = False
                continue
            text = _about(event, task, number, row, session, batch)
            # A rollback befalls all tasks, but those that come later.
            if text and (seen or not isinstance(event, e.RolledBack)):
                seen = True
                yield msgspec.structs.replace(line, text=text)
            session, batch = _holders(event, task, session, batch)
    if not seen and (whole or not 0 < number <= submissions):
        raise BadInput(f"there never was a task {task} in {pool.path} (submissions so far: {submissions or 'none'})")


def _events(pool: Pool, seq: int) -> Iterator[tuple[LogLine, e.AnyEvent | None]]:
    """The events of an entry; None stands for an entry that cannot be read, or that declares another void."""
    try:
        entry = pool.log.read_entry(seq)
    except Damaged as error:
        yield LogLine(seq, 0, "", "damaged", str(error)), None
        return
    if entry is None:
        return
    line = entry.line
    who = line.session[:12]
    if line.voids:
        yield LogLine(seq, line.time_ms, who, "void", f"entry {line.voids} was never whole"), None
    for event in Machine().decode(seq, line.events):
        yield LogLine(seq, line.time_ms, who, kind(event), ""), event


def kind(event: e.AnyEvent) -> str:
    return str(event.__struct_config__.tag)


def describe(event: e.AnyEvent) -> str:
    """One line about an event."""
    match event:
        case e.Submitted():
            source = f" by producer {event.producer}" if event.producer else ""
            return f"{event.rows} prompts to {event.queue}{source} (tasks {', '.join(f'{n}-*' for n in event.numbers)})"
        case e.Acquired():
            names = _some(task for task, _ in event.leases)
            return f"{len(event.leases)} groups of {event.queue} leased by {event.session}: {names}"
        case e.Reported():
            outcomes = Counter(item.outcome for item in event.items)
            said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            refused = f"; {len(event.refused)} refused" if event.refused else ""
            names = _some(item.task for item in event.items)
            return f"{said or 'nothing'} in {event.queue} from {event.session}: {names}{refused}"
        case e.BatchTaken():
            again = f", delivery {event.attempt}" if event.attempt > 1 else ""
            return f"batch {event.batch} of {len(event.tasks)} groups of {event.queue} to {event.consumer}{again}"
        case e.BatchFinished() | e.BatchReturned():
            return f"batch {event.batch} of {event.queue}"
        case e.Joined():
            who = event.session
            return f"session {who.id} of {who.role or 'a process'} on {who.host}, pid {who.pid}"
        case e.Left() | e.Expired():
            reason = event.reason if isinstance(event, e.Expired) else ""
            return f"session {event.session}{': ' + reason if reason else ''}"
        case e.ObjectsMoved():
            places = {(ref.epoch, ref.name) for ref in event.objects}
            return f"{len(event.objects)} objects into {len(places)} files of epoch {event.objects[0].epoch}"
        case e.RolledBack():
            return f"to {event.target}, going on as {event.branch}"
        case e.Configured():
            values = msgspec.structs.asdict(event.config)
            return f"{event.queue}: {', '.join(f'{name} {value}' for name, value in values.items())}"
        case e.TasksDropped() | e.FailedRetried():
            why = f" ({event.reason})" if isinstance(event, e.TasksDropped) else ""
            return f"{len(event.tasks)} groups of {event.queue}: {_some(iter(event.tasks))}{why}"
        case _:
            fields = {
                name: getattr(event, name) for name in event.__struct_fields__ if name not in ("request", "content")
            }
            return ", ".join(
                f"{name} {_short(value)}" for name, value in fields.items() if value not in ("", (), None, 0)
            )


def _some(tasks: Iterator[str]) -> str:
    names = list(tasks)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _about(event: e.AnyEvent, task: str, number: int, row: int, session: str, batch: str) -> str:
    """What the event says of the task; empty if nothing."""
    match event:
        case e.Submitted() if number in event.numbers and row < event.objects[event.numbers.index(number)].rows:
            return f"submitted to {event.queue} (row {row} of submission {number})"
        case e.Acquired():
            attempts = dict(event.leases)
            return f"leased by {event.session}, attempt {attempts[task]}" if task in attempts else ""
        case e.Reported():
            for item in event.items:
                if item.task == task:
                    more = f", {item.tokens} tokens" if item.tokens else ""
                    dead = "; it is a dead letter now" if task in event.dead else ""
                    return (
                        f"{item.outcome}, attempt {item.attempt}{more}{': ' + item.reason if item.reason else ''}{dead}"
                    )
            for name, attempt, why in event.refused:
                if name == task:
                    return f"a report of attempt {attempt} was refused: {why}"
            return ""
        case e.BatchTaken() if task in event.tasks:
            return f"in batch {event.batch}, delivery {event.attempt}"
        case e.BatchFinished() if batch and event.batch == batch:
            dropped = dict(event.dropped).get(task)
            return f"dropped with batch {batch}: {dropped}" if dropped is not None else f"trained with batch {batch}"
        case e.BatchReturned() if batch and event.batch == batch:
            return f"batch {batch} was returned; ready again"
        case e.Expired() | e.Left() if session and event.session == session:
            return f"its session {session} {'expired' if isinstance(event, e.Expired) else 'left'}; the lease is free"
        case e.TasksDropped() | e.FailedRetried() if task in event.tasks:
            return f"dropped: {event.reason}" if isinstance(event, e.TasksDropped) else "sent back to work"
        case e.RolledBack():
            return f"the pool was rolled back to {event.target}, on branch {event.branch}"
        case _:
            return ""


def _holders(event: e.AnyEvent, task: str, session: str, batch: str) -> tuple[str, str]:
    """Who holds the task after the event: a session, a batch."""
    match event:
        case e.Acquired() if task in dict(event.leases):
            return event.session, ""
        case e.Reported() if any(item.task == task and item.outcome != "save" for item in event.items):
            return "", batch
        case e.BatchTaken() if task in event.tasks:
            return session, event.batch
        case e.BatchReturned() | e.BatchFinished() if event.batch == batch:
            return session, ""
        case e.Expired() | e.Left() if event.session == session:
            return "", batch
        case e.RolledBack():
            return "", ""
        case _:
            return session, batch
