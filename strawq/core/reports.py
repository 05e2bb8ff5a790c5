"""What workers report of leased tasks: progress, yield, completion, drop, failure. This is where fencing decides.

A report counts only for the task's current attempt, held by the reporting session. Exactly one completion of a group
stands: it may be replaced, or taken back by new content that is not handed in as complete, only by one who has leased
the complete group. A repeat of an accepted report is recognised, and anything else from a former holder is stale.
"""

from __future__ import annotations

import msgspec

from strawq.core import events as e
from strawq.core.commands import Report, ReportItem
from strawq.core.names import cut_text, require_branch, require_objects, require_queue, require_session
from strawq.core.state import Queue, State
from strawq.errors import BadInput, Fenced
from strawq.limits import PARTS_PER_TASK
from strawq.model import Task


def decide_report(state: State, command: Report) -> e.Reported | e.Refusal:
    require_branch(state, command.branch)
    queue = require_queue(state, command.queue)
    require_session(state, command.session)
    if not command.items:
        raise BadInput("a report names at least one task")
    closed = require_objects(state, command.objects)
    if closed is not None:
        return closed
    rows = {ref.digest: ref.rows for ref in command.objects}
    accepted: list[ReportItem] = []
    refused: list[tuple[str, int, e.Refused]] = []
    dead: list[str] = []
    seen: set[str] = set()
    for item in command.items:
        if item.task in seen:
            raise BadInput(f"task {item.task} is reported twice in one command")
        seen.add(item.task)
        task = queue.tasks.get(item.task)
        if task is None or task.session != command.session or task.attempt != item.attempt:
            refused.append((item.task, item.attempt, _standing(queue, task, item)))
            continue
        if item.parts and item.after not in (0, len(task.parts)):
            # An earlier report counted whose answer never arrived. The same rows are not added twice; other rows would
            # not follow, so the caller is told to drop the work, and what is saved goes back to whoever leases it.
            if task.parts[item.after :] != item.parts:
                refused.append((item.task, item.attempt, "conflict"))
                accepted.append(ReportItem(item.task, item.attempt, "yield"))
                continue
            item = msgspec.structs.replace(item, parts=(), tokens=0)
            if item.outcome == "save":
                refused.append((item.task, item.attempt, "repeated"))
                continue
        _require_parts(state, task, item, rows)
        if item.outcome == "fail" and (not item.retryable or task.failures + 1 >= queue.row.config.max_attempts):
            dead.append(item.task)
        accepted.append(item if not item.reason else _with_short_reason(item))
    if not accepted and not any(why == "repeated" for _, _, why in refused):
        names = ", ".join(f"{task} (attempt {attempt}: {why})" for task, attempt, why in refused)
        raise Fenced(f"none of these leases is current: {names}; somebody else has the work, drop it")
    return e.Reported(
        queue=command.queue,
        session=command.session,
        items=tuple(accepted),
        objects=tuple(ref for ref in command.objects if _used(ref.digest, accepted)),
        refused=tuple(refused),
        dead=tuple(dead),
    )


def _standing(queue: Queue, task: Task | None, item: ReportItem) -> e.Refused:
    """Why a report does not count: it happened before, it happened otherwise, or the work is another's."""
    if task is None:
        receipt = queue.receipt(item.task)
        if receipt is None or receipt.attempt != item.attempt:
            return "stale"
        if item.outcome == "complete":
            return "repeated"
        return "repeated" if item.outcome == "drop" and receipt.end == "dropped" else "conflict"
    if task.attempt != item.attempt or task.session:
        return "stale"
    matches = task.parts[len(task.parts) - len(item.parts) :] == item.parts
    if item.outcome == "complete":
        if task.stage != "ready":
            return "stale"
        return "repeated" if matches else "conflict"
    if item.outcome == "fail":
        return "repeated" if task.failed and task.reason == item.reason else "stale"
    return "repeated" if item.outcome == "yield" and matches and task.stage != "ready" and item.parts else "stale"


def _require_parts(state: State, task: Task, item: ReportItem, rows: dict[str, int]) -> None:
    if len(task.parts) + len(item.parts) > PARTS_PER_TASK:
        raise BadInput(f"task {task.id} would have more than {PARTS_PER_TASK} parts; save progress less often")
    if item.tokens < 0:
        raise BadInput(f"task {task.id} reports {item.tokens} tokens")
    if item.parts and item.outcome in ("drop", "fail"):
        raise BadInput(f"task {task.id}: parts go with save, yield and complete, not with {item.outcome}")
    if item.outcome == "complete" and len(task.parts) + len(item.parts) < 2:
        raise BadInput(f"task {task.id} cannot be complete: it has no data but its prompt")
    for part in item.parts:
        known = rows.get(part.object)
        if known is None:
            stored = state.objects.get(part.object)
            known = stored.ref.rows if stored is not None else None
        if known is None:
            raise BadInput(
                f"task {task.id} refers to object {part.object[:12]}, which the command does not bring and the pool "
                "does not hold"
            )
        if not 0 <= part.start < part.stop <= known:
            raise BadInput(f"task {task.id} refers to rows {part.start} to {part.stop} of an object of {known} rows")


def _with_short_reason(item: ReportItem) -> ReportItem:
    return msgspec.structs.replace(item, reason=cut_text(item.reason))


def _used(digest: str, items: list[ReportItem]) -> bool:
    return any(part.object == digest for item in items for part in item.parts)
