"""Fold one event into the state. Total and deterministic: an event that stands in the log is never refused here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from strawq.core import events as e
from strawq.core.apply_lifetime import APPLY_LIFETIME, Where, drop_pin
from strawq.core.commands import ReportItem
from strawq.core.state import Answered, Branch, Queue, QueueRow, State, highest_number, task_order
from strawq.limits import REQUESTS_KEPT
from strawq.model import (
    UNVERSIONED,
    Batch,
    Pause,
    Producer,
    Slice,
    Stage,
    StoredObject,
    Submission,
    Task,
    policy_number,
)

replace = msgspec.structs.replace


def apply(state: State, event: e.AnyEvent, seq: int, where: Where) -> None:
    """Make `event` of entry `seq` true. Changes go to `state.journal`, so that the caller can undo them."""
    _APPLY[type(event)](state, event, seq, where)
    if event.request and not _shows(event):
        _remember(state.branch, event, seq)


def _shows(event: e.AnyEvent) -> bool:
    """A move into a merged file is not remembered for a repeat: where the objects are says all that its answer says,
    and hundreds of places would be kept twice."""
    return isinstance(event, e.ObjectsMoved) and any(ref.file for ref in event.objects)


def _remember(branch: Branch, event: e.AnyEvent, seq: int) -> None:
    """Keep the answer for a late retry, and forget the oldest ones beyond the bound."""
    weight = len(event.items) if isinstance(event, e.Reported) else len(getattr(event, "leases", ())) or 1
    meta = branch.meta
    first, total, forgotten = meta.answered_first, meta.answered_weight + weight, meta.forgotten_seq
    branch.answered.put(meta.answered_next, Answered(event.request, event, weight))
    while total > REQUESTS_KEPT and first < meta.answered_next:
        total -= branch.answered[first].weight
        branch.answered.drop(first)
        first += 1
        forgotten = seq
    branch.change(
        answered_first=first, answered_next=meta.answered_next + 1, answered_weight=total, forgotten_seq=forgotten
    )


def _incoming(objects: tuple[Any, ...], seq: int, where: Where) -> dict[str, StoredObject]:
    rows = {}
    for ref in objects:
        inline = ref.epoch == 0
        rows[ref.digest] = StoredObject(ref, 0, seq if inline else 0, where.get(ref.digest, 0) if inline else 0)
    return rows


def _configured(state: State, event: e.Configured, _seq: int, _where: Where) -> None:
    queue = state.branch.queues.get(event.queue)
    if queue is None:
        state.branch.queues.put(event.queue, Queue(state.journal, QueueRow(event.config)))
    else:
        queue.change(config=event.config)


def _joined(state: State, event: e.Joined, seq: int, _where: Where) -> None:
    state.sessions.put(event.session.id, replace(event.session, joined_seq=seq))


def _left(state: State, event: e.Left, _seq: int, _where: Where) -> None:
    _release_session(state, event.session, expired=False)


def _expired(state: State, event: e.Expired, _seq: int, _where: Where) -> None:
    _release_session(state, event.session, expired=True)


def _release_session(state: State, session: str, expired: bool) -> None:
    """Leases go back to their last durable input; batches wait for redelivery. Only a lost process counts against the
    task, and not against one that was complete: it was no work that killed the process."""
    for name in state.branch.queues:
        queue = state.branch.queues[name]
        for number in sorted(queue.held_batches.get(session, ())):
            queue.batches.put(number, replace(queue.batches[number], session=""))
        held = sorted(queue.held.get(session, ()))
        for key in held:
            task = queue.tasks[key]
            lost = expired and task.stage != "ready"
            expirations = task.expirations + lost
            dead = lost and expirations >= queue.row.config.max_expirations
            reason = f"lost with its process {expirations} times" if dead else task.reason
            queue.tasks.put(key, replace(task, session="", expirations=expirations, failed=dead, reason=reason))
        if expired and held:
            queue.change(expirations=queue.row.expirations + len(held))
    for key in [key for key in state.pins if state.pins[key].session == session]:
        drop_pin(state, key)
    if session in state.sessions:
        state.sessions.drop(session)


def _submitted(state: State, event: e.Submitted, seq: int, where: Where) -> None:
    queue = state.branch.queues[event.queue]
    incoming = _incoming(event.objects, seq, where)
    for number, ref in zip(event.numbers, event.objects, strict=True):
        queue.submissions.put(number, Submission(number, ref.digest, 0, ref.rows))
        state.hold(ref.digest, 1, incoming)
    if event.numbers:
        state.change(submissions=event.numbers[-1])
    if event.producer:
        known = queue.producers.get(event.producer)
        count = known.submissions + 1 if known else 1
        queue.producers.put(event.producer, Producer(event.producer, event.cursor, count))
    queue.change(submitted=queue.row.submitted + event.rows)


def _sealed(state: State, event: e.Sealed, _seq: int, _where: Where) -> None:
    state.branch.queues[event.queue].change(sealed=event.sealed)


def _acquired(state: State, event: e.Acquired, _seq: int, _where: Where) -> None:
    queue = state.branch.queues[event.queue]
    begun: dict[int, Submission] = {}
    holds: Counter[str] = Counter()
    for key, attempt in event.leases:
        task = queue.tasks.get(key)
        if task is not None:
            queue.tasks.put(key, replace(task, session=event.session, attempt=attempt))
            continue
        # A row that is leased for the first time becomes a task.
        number, row = map(int, key.split("-"))
        submission = begun.get(number) or queue.submissions[number]
        begun[number] = replace(submission, next=row + 1)
        part = Slice(submission.object, row, row + 1)
        holds[part.object] += 1
        queue.tasks.put(
            key, Task(key, task_order(number, row), "fresh", (part,), attempt=attempt, session=event.session)
        )
    for number, submission in begun.items():
        if submission.next < submission.end:
            queue.submissions.put(number, submission)
        else:
            queue.submissions.drop(number)
            holds[submission.object] -= 1
    state.hold_all(holds)


def _reported(state: State, event: e.Reported, seq: int, where: Where) -> None:
    queue = state.branch.queues[event.queue]
    incoming = _incoming(event.objects, seq, where)
    state.hold_all(Counter(part.object for item in event.items for part in item.parts), incoming)
    accepted = tokens = 0
    for item in event.items:
        task = queue.tasks[item.task]
        if item.parts:
            task = _grown(task, item)
            tokens += item.tokens
        if item.outcome == "save":
            queue.tasks.put(task.id, task)
        elif item.outcome == "yield":
            queue.tasks.put(task.id, replace(task, session=""))
        elif item.outcome == "complete":
            # One that was leased complete and is handed in anew has been counted.
            accepted += queue.tasks[item.task].stage != "ready"
            queue.tasks.put(task.id, replace(task, session="", stage="ready", reason=""))
        elif item.outcome == "fail":
            dead = item.task in event.dead
            queue.tasks.put(
                task.id, replace(task, session="", failures=task.failures + 1, failed=dead, reason=item.reason)
            )
        else:
            state.hold_parts(task.parts, -1)
            queue.end(task, "dropped", item.reason)
    if accepted or tokens:
        queue.change(accepted=queue.row.accepted + accepted, tokens=queue.row.tokens + tokens)


def _grown(task: Task, item: ReportItem) -> Task:
    # A report that adds parts gives the oldest version of the whole group as it is then: a rewrite can make it younger.
    version = item.version if item.parts else task.version
    # Whatever changes a complete group without handing it in again takes it back: nobody has said of this that it is
    # complete.
    stage: Stage = "partial"
    return replace(task, parts=task.parts + item.parts, tokens=task.tokens + item.tokens, version=version, stage=stage)


def _batch_taken(state: State, event: e.BatchTaken, _seq: int, _where: Where) -> None:
    queue = state.branch.queues[event.queue]
    for key in event.tasks:
        queue.tasks.put(key, replace(queue.tasks[key], batch=event.batch))
    batch = Batch(event.batch, event.number, event.tasks, event.consumer, event.session, event.attempt)
    queue.batches.put(event.number, batch)
    if event.number > state.meta.batches:
        state.change(batches=event.number)


def batch_number(batch: str) -> int:
    """The number in a batch id such as `b12`; 0 if it is not one."""
    return int(batch[1:]) if batch[:1] == "b" and batch[1:].isascii() and batch[1:].isdigit() else 0


def _batch_finished(state: State, event: e.BatchFinished, _seq: int, _where: Where) -> None:
    queue = state.branch.queues[event.queue]
    batch = queue.batches[batch_number(event.batch)]
    dropped = dict(event.dropped)
    released: Counter[str] = Counter()
    for key in batch.tasks:
        task = queue.tasks[key]
        released.subtract(part.object for part in task.parts)
        if key in dropped:
            queue.end(task, "dropped", dropped[key])
        else:
            queue.end(task, "trained")
    state.hold_all(released)
    queue.batches.drop(batch.number)


def _batch_returned(state: State, event: e.BatchReturned, _seq: int, _where: Where) -> None:
    _break_up(state.branch.queues[event.queue], batch_number(event.batch))


def _break_up(queue: Queue, number: int) -> None:
    for key in queue.batches[number].tasks:
        queue.tasks.put(key, replace(queue.tasks[key], batch=""))
    queue.batches.drop(number)


def _failed_retried(state: State, event: e.FailedRetried, _seq: int, _where: Where) -> None:
    queue = state.branch.queues[event.queue]
    for key in event.tasks:
        queue.tasks.put(key, replace(queue.tasks[key], failed=False, failures=0, expirations=0, reason=""))


def _tasks_dropped(state: State, event: e.TasksDropped, _seq: int, _where: Where) -> None:
    queue = state.branch.queues[event.queue]
    # A batch is delivered again as it was or not at all: one that loses a group is broken up, the others are ready.
    for batch in dict.fromkeys(queue.tasks[key].batch for key in event.tasks):
        if batch:
            _break_up(queue, batch_number(batch))
    for key in event.tasks:
        task = queue.tasks[key]
        state.hold_parts(task.parts, -1)
        queue.end(task, "dropped", event.reason)


def _version_published(state: State, event: e.VersionPublished, _seq: int, _where: Where) -> None:
    _serve(state.branch, event.version)


def _serve(branch: Branch, version: str) -> None:
    """What the log says holds, whichever number it is: entries of before the rule may have one that goes back."""
    is_word = policy_number(version) == UNVERSIONED
    branch.change(policy_version=version, highest_number=highest_number(branch.meta) if is_word else UNVERSIONED)


def _paused(state: State, event: e.Paused, _seq: int, _where: Where) -> None:
    state.branch.change(pause=Pause(event.reason, event.session))


def _pause_acknowledged(state: State, event: e.PauseAcknowledged, _seq: int, _where: Where) -> None:
    pause = state.branch.meta.pause
    assert pause is not None, "decide acknowledges only a pause that is on"
    names = tuple(sorted({*pause.acknowledged, event.session}))
    state.branch.change(pause=replace(pause, acknowledged=names))


def _resumed(state: State, event: e.Resumed, _seq: int, _where: Where) -> None:
    state.branch.change(pause=None)
    if event.version:
        _serve(state.branch, event.version)


_APPLY: dict[type, Callable[[State, Any, int, Where], None]] = {
    e.Configured: _configured,
    e.Joined: _joined,
    e.Left: _left,
    e.Expired: _expired,
    e.Submitted: _submitted,
    e.Sealed: _sealed,
    e.Acquired: _acquired,
    e.Reported: _reported,
    e.BatchTaken: _batch_taken,
    e.BatchFinished: _batch_finished,
    e.BatchReturned: _batch_returned,
    e.FailedRetried: _failed_retried,
    e.TasksDropped: _tasks_dropped,
    e.VersionPublished: _version_published,
    e.Paused: _paused,
    e.PauseAcknowledged: _pause_acknowledged,
    e.Resumed: _resumed,
    **APPLY_LIFETIME,
}
