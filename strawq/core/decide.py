"""May this command happen, and what exactly would happen? Reads the state, changes nothing.

Fencing lives here: a report counts only for the (task, attempt, session) that is current on the active branch. Clocks
play no part. Raises `BadInput`, `Fenced`, `BranchMoved` or `RequestConflict`; answers "not now" with a `Refusal`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strawq.core import commands as c
from strawq.core import events as e
from strawq.core.apply import batch_number
from strawq.core.content import content_digest
from strawq.core.lifetime import LIFETIME
from strawq.core.names import (
    cut_text,
    require_branch,
    require_name,
    require_named_branch,
    require_objects,
    require_queue,
    require_request,
    require_session,
)
from strawq.core.reports import decide_report
from strawq.core.state import Queue, State, highest_number, task_key
from strawq.errors import BadInput, Fenced, RequestConflict
from strawq.limits import METADATA_BYTES, ROWS_PER_OBJECT
from strawq.model import UNVERSIONED, Stage, policy_number

Answer = e.AnyEvent | e.Refusal


def decide(state: State, command: c.AnyCommand) -> Answer:
    """The event that `command` causes in `state`, the first answer if it has been answered before, or a refusal."""
    require_request(command.request)
    try:
        content = content_digest(command)
    except UnicodeEncodeError as error:
        # Refused here, command by command: other threads' commands wait in the same group commit.
        raise BadInput(f"{kind_of(command)}: some text in it is not Unicode (a lone surrogate): {error}") from error
    known = state.branch.answer_of.get(command.request) if command.request else None
    if known is not None:
        if known.event.content != content:
            raise RequestConflict(
                f"request {command.request!r} was used before with other content; use a new id for a new command"
            )
        return known.event
    answer = _DECIDE[type(command)](state, command)
    if isinstance(answer, e.Refusal) or not command.request:
        return answer
    return e.identified(answer, command.request, content)


def kind_of(command: c.AnyCommand) -> str:
    return str(command.__struct_config__.tag)


def answered(state: State, command: c.AnyCommand) -> e.AnyEvent | None:
    """The first answer to a command that the state remembers."""
    known = state.branch.answer_of.get(command.request)
    return known.event if known is not None else None


def _configure(state: State, command: c.Configure) -> Answer:
    require_name(command.queue, "queue")
    config = command.config
    for name in ("max_attempts", "max_expirations"):
        if getattr(config, name) < 1:
            raise BadInput(f"{name} must be at least 1, not {getattr(config, name)}")
    for name in ("max_ready", "max_leased"):
        if getattr(config, name) < 0:
            raise BadInput(f"{name} must not be negative; 0 means no bound")
    queue = state.branch.queues.get(command.queue)
    if queue is not None and queue.row.config == config:
        return e.Refusal("done", f"queue {command.queue} has these settings already")
    return e.Configured(queue=command.queue, config=config)


def _join(state: State, command: c.Join) -> Answer:
    require_name(command.session.id, "session")
    if command.session.id in state.sessions:
        raise BadInput(f"session {command.session.id} has joined already; a process takes a fresh id on every start")
    return e.Joined(session=command.session)


def _leave(state: State, command: c.Leave) -> Answer:
    if command.session not in state.sessions:
        return e.Refusal("done", f"session {command.session} is not there")
    return e.Left(session=command.session)


def _expire(state: State, command: c.Expire) -> Answer:
    if command.session not in state.sessions:
        return e.Refusal("done", f"session {command.session} is not there")
    return e.Expired(session=command.session, reason=cut_text(command.reason))


def _submit(state: State, command: c.Submit) -> Answer:
    require_named_branch(state, command.branch)
    queue = require_queue(state, command.queue)
    if queue.row.sealed:
        raise BadInput(
            f"queue {command.queue} is sealed: no further prompts are taken; `strawq seal POOL --queue {command.queue} "
            "--open` opens it again"
        )
    if command.producer:
        require_name(command.producer, "producer")
    if len(command.cursor.encode()) > METADATA_BYTES:
        raise BadInput(f"the cursor of producer {command.producer} is larger than {METADATA_BYTES} bytes")
    known = queue.producers.get(command.producer) if command.producer else None
    cursor = known.cursor if known else ""
    if command.expect is not None and command.expect != cursor:
        raise Fenced(
            f"producer {command.producer} of queue {command.queue} stands at cursor {cursor[:80]!r}, not "
            f"{command.expect[:80]!r}: "
            "somebody else has submitted; go on from its cursor"
        )
    for ref in command.objects:
        if not 0 < ref.rows <= ROWS_PER_OBJECT:
            raise BadInput(f"object {ref.digest[:12]} has {ref.rows} prompts; 1 to {ROWS_PER_OBJECT} are allowed")
    closed = require_objects(state, command.objects)
    if closed is not None:
        return closed
    first = state.meta.submissions + 1
    numbers = tuple(range(first, first + len(command.objects)))
    return e.Submitted(
        queue=command.queue, numbers=numbers, objects=command.objects, producer=command.producer, cursor=command.cursor
    )


def _seal(state: State, command: c.Seal) -> Answer:
    queue = require_queue(state, command.queue)
    if queue.row.sealed == command.sealed:
        return e.Refusal("done", f"queue {command.queue} is {'sealed' if command.sealed else 'open'} already")
    return e.Sealed(queue=command.queue, sealed=command.sealed)


def _acquire(state: State, command: c.Acquire) -> Answer:
    require_branch(state, command.branch)
    queue = require_queue(state, command.queue)
    require_session(state, command.session)
    if command.count < 1:
        raise BadInput(f"count must be at least 1, not {command.count}")
    if state.branch.meta.pause is not None and command.stages != ("ready",):
        return e.Refusal("paused", state.branch.meta.pause.reason)
    keys = _next(queue, "ready", command.count) if "ready" in command.stages else []
    most = _most(queue, command.count, len(keys))
    if "partial" in command.stages:
        keys += _next(queue, "partial", most - len(keys))
    fresh = min(most - len(keys), _fresh_room(queue, command.count))
    if "fresh" in command.stages and fresh > 0:
        keys += _next_fresh(queue, fresh)
    leases = [(key, task.attempt + 1 if (task := queue.tasks.get(key)) else 1) for key in keys]
    if leases:
        return e.Acquired(queue=command.queue, session=command.session, leases=tuple(leases))
    if (most < 1 and command.stages != ("ready",)) or (fresh < 1 and "fresh" in command.stages):
        return e.Refusal(
            "backpressured",
            f"{queue.count('ready', 'pending')} groups are ready, {queue.leased()} leased, "
            f"{queue.count('partial', 'pending')} partial",
        )
    if (
        queue.row.sealed
        and not queue.leased()
        and not queue.unstarted
        and not any(True for _ in queue.order.irange((1,)))
    ):
        return e.Refusal("sealed", f"queue {command.queue} is sealed and has no work left")
    return e.Refusal("empty", f"queue {command.queue} has no work just now")


def _most(queue: Queue, count: int, complete: int) -> int:
    """How many of `count` groups may be leased, `complete` of which are: those are never held back, since leasing them
    starts nothing, and whoever does may be the one who makes room."""
    bound = queue.row.config.max_leased
    return max(complete, min(count, bound - queue.leased())) if bound else count


def _fresh_room(queue: Queue, unbounded: int) -> int:
    """How many groups may be begun. Those that were begun, and went back, count: they come first, and a trainer that
    waits for the oldest may wait for one of them."""
    bound = queue.row.config.max_ready
    begun = queue.leased() + queue.count("ready", "pending") + queue.count("partial", "pending")
    return bound - begun if bound else unbounded


def _next(queue: Queue, stage: Stage, count: int) -> list[str]:
    keys: list[str] = []
    for key in queue.pending(stage):
        if len(keys) == count:
            break
        keys.append(key)
    return keys


def _next_fresh(queue: Queue, count: int) -> list[str]:
    """Fresh prompts, first in first out: rows that came back merged with rows that nobody has leased yet."""
    returned = _next(queue, "fresh", count)
    keys: list[str] = []
    at = 0
    for number in queue.open_submissions:
        submission = queue.submissions[number]
        row = submission.next
        while row < submission.end and len(keys) < count:
            if at < len(returned) and queue.tasks[returned[at]].order < (number << 32 | row):
                keys.append(returned[at])
                at += 1
            else:
                keys.append(task_key(number, row))
                row += 1
        if len(keys) == count:
            return keys
    return keys + returned[at : at + count - len(keys)]


def _take_batch(state: State, command: c.TakeBatch) -> Answer:
    require_branch(state, command.branch)
    queue = require_queue(state, command.queue)
    require_session(state, command.session)
    require_name(command.consumer, "consumer")
    if command.count < 1:
        raise BadInput(f"count must be at least 1, not {command.count}")
    for number in sorted(queue.held_batches.get("", ())):
        batch = queue.batches[number]
        if batch.consumer == command.consumer:
            return e.BatchTaken(
                queue=command.queue, batch=batch.id, number=number, attempt=batch.attempt + 1, tasks=batch.tasks,
                consumer=batch.consumer, session=command.session,
            )  # fmt: skip
    keys = _next(queue, "ready", command.count)
    unfinished = queue.unstarted + queue.leased() + queue.count("fresh", "pending") + queue.count("partial", "pending")
    last = queue.row.sealed and not unfinished
    if not keys:
        # A batch of this consumer that another session has open comes back if that session is dead: no end before that.
        for batch in queue.batches.values() if last else ():
            if batch.consumer == command.consumer and batch.session != command.session:
                return e.Refusal(
                    "empty", f"batch {batch.id} of this consumer is in the hands of session {batch.session}"
                )
        return e.Refusal("sealed" if last else "empty", f"queue {command.queue} has no ready groups")
    if len(keys) < command.count and not (command.fewer or last):
        return e.Refusal("empty", f"{len(keys)} of {command.count} groups are ready")
    number = state.meta.batches + 1
    return e.BatchTaken(
        queue=command.queue, batch=f"b{number}", number=number, attempt=1, tasks=tuple(keys), consumer=command.consumer,
        session=command.session,
    )  # fmt: skip


def _require_batch(state: State, command: c.FinishBatch | c.ReturnBatch) -> Any:
    require_branch(state, command.branch)
    queue = require_queue(state, command.queue)
    batch = queue.batches.get(batch_number(command.batch))
    if batch is None:
        raise Fenced(
            f"batch {command.batch} is not open in queue {command.queue}: it was finished or returned, or never taken"
        )
    if (batch.session, batch.attempt) != (command.session, command.attempt):
        raise Fenced(f"batch {command.batch} has been delivered again (delivery {batch.attempt}); drop this one")
    return batch


def _finish_batch(state: State, command: c.FinishBatch) -> Answer:
    batch = _require_batch(state, command)
    for key, _ in command.dropped:
        if key not in batch.tasks:
            raise BadInput(f"task {key} is not in batch {batch.id}")
    dropped = tuple((key, cut_text(reason)) for key, reason in command.dropped)
    return e.BatchFinished(queue=command.queue, batch=batch.id, attempt=batch.attempt, dropped=dropped)


def _return_batch(state: State, command: c.ReturnBatch) -> Answer:
    batch = _require_batch(state, command)
    return e.BatchReturned(queue=command.queue, batch=batch.id, attempt=batch.attempt)


def _retry_failed(state: State, command: c.RetryFailed) -> Answer:
    queue = require_queue(state, command.queue)
    require_named_branch(state, command.branch)
    keys = [key for key in dict.fromkeys(command.tasks) if key in queue.tasks and queue.tasks[key].failed]
    if not keys:
        return e.Refusal("done", "none of these tasks is a dead letter")
    return e.FailedRetried(queue=command.queue, tasks=tuple(keys))


def _nobodys(queue: Queue, key: str) -> bool:
    """Whether no process has this task in hand: a batch whose consumer is gone is nobody's until it is delivered
    again."""
    task = queue.tasks[key]
    if task.batch:
        return not queue.batches[batch_number(task.batch)].session
    return task.failed or task.pending


def _drop_tasks(state: State, command: c.DropTasks) -> Answer:
    queue = require_queue(state, command.queue)
    require_named_branch(state, command.branch)
    keys = tuple(key for key in dict.fromkeys(command.tasks) if key in queue.tasks and _nobodys(queue, key))
    if not keys:
        return e.Refusal(
            "done",
            "none of these tasks can be dropped: they are leased, in a batch that is held, not started, or ended",
        )
    return e.TasksDropped(queue=command.queue, tasks=keys, reason=cut_text(command.reason))


def _publish_version(state: State, command: c.PublishVersion) -> Answer:
    require_named_branch(state, command.branch)
    _require_version(state, command.version)
    if command.version == state.branch.meta.policy_version:
        return e.Refusal("done", f"policy version {command.version} is published already")
    return e.VersionPublished(version=command.version)


def _require_version(state: State, version: str) -> None:
    if not version or len(version) > 128 or not version.isprintable():
        raise BadInput("a policy version is 1 to 128 printable characters")
    meta = state.branch.meta
    number, highest = policy_number(version), highest_number(meta)
    if UNVERSIONED != number <= highest and version != meta.policy_version:
        raise BadInput(
            f"policy version {version} is not above {highest}, the highest published on this branch (now: "
            f"{meta.policy_version}); a version goes back only through a rollback to a checkpoint"
        )


def _pause(state: State, command: c.PauseAdmission) -> Answer:
    require_named_branch(state, command.branch)
    if state.branch.meta.pause is not None:
        return e.Refusal("done", "admission is paused already")
    return e.Paused(reason=cut_text(command.reason), session=command.session)


def _acknowledge(state: State, command: c.AcknowledgePause) -> Answer:
    pause = state.branch.meta.pause
    require_session(state, command.session)
    if pause is None or command.session in pause.acknowledged:
        return e.Refusal("done", "there is no pause to acknowledge")
    return e.PauseAcknowledged(session=command.session)


def _resume(state: State, command: c.Resume) -> Answer:
    require_named_branch(state, command.branch)
    if command.version:
        _require_version(state, command.version)
    if state.branch.meta.pause is None and command.version in ("", state.branch.meta.policy_version):
        return e.Refusal("done", "admission is not paused")
    return e.Resumed(version=command.version)


_DECIDE: dict[type, Callable[[State, Any], Answer]] = {
    c.Configure: _configure,
    c.Join: _join,
    c.Leave: _leave,
    c.Expire: _expire,
    c.Submit: _submit,
    c.Seal: _seal,
    c.Acquire: _acquire,
    c.Report: decide_report,
    c.TakeBatch: _take_batch,
    c.FinishBatch: _finish_batch,
    c.ReturnBatch: _return_batch,
    c.RetryFailed: _retry_failed,
    c.DropTasks: _drop_tasks,
    c.PublishVersion: _publish_version,
    c.PauseAdmission: _pause,
    c.AcknowledgePause: _acknowledge,
    c.Resume: _resume,
    **LIFETIME,
}
