"""Verbs about single tasks: dead letters, and tasks that are to end without training."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strawq.cli.app import group, verb
from strawq.cli.options import PoolPath, QueueName, once, opened, pick_queue
from strawq.cli.output import Answer, plural, table

if TYPE_CHECKING:
    from strawq.core.machine import Machine
    from strawq.model import Task
    from strawq.queue import Queue

Tasks = Annotated[list[str], typer.Argument(metavar="[TASK]...", help="Ids of tasks.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]

TASKS_PER_COMMAND = 1000

group("failed", "Show dead letters, send them back to work, or end them.")


@verb("list", under="failed")
def list_failed(pool: PoolPath, queue: QueueName = "") -> Answer:
    """Show the dead letters of a queue, each with its last reason."""
    with opened(pool) as open_pool:
        chosen = pick_queue(open_pool, queue)
        tasks = chosen.dead_letters()
    rows = [(t.id, t.stage, t.failures, t.expirations, t.tokens, t.reason) for t in tasks]
    heads = ("task", "stage", "failures", "expirations", "tokens", "reason")
    data = {"queue": chosen.name, "failed": [dict(zip(heads, row, strict=True)) for row in rows]}
    return Answer(data, table(heads, rows) if rows else f"queue {chosen.name} has no dead letters")


@verb("retry", under="failed")
def retry_failed(pool: PoolPath, tasks: Tasks = [], everything: All = False, queue: QueueName = "") -> Answer:  # noqa: B006
    """Send dead letters back to work; their attempts count from nought."""
    with opened(pool) as open_pool:
        chosen = pick_queue(open_pool, queue)
        wanted = _wanted(tasks, everything, chosen.dead_letters())
        done = [task for part in _parts(wanted) for task in once(open_pool, None, partial(_retry, chosen, part))]
    return _no_letters("retried", chosen.name, wanted, done)


@verb("drop", under="failed")
def drop_failed(
    pool: PoolPath,
    tasks: Tasks = [],  # noqa: B006 (typer copies it)
    everything: All = False,
    reason: Annotated[str, typer.Option("--reason", help="Counted with the queue's drop reasons.")] = "failed",
    queue: QueueName = "",
) -> Answer:
    """End dead letters without training on them."""
    with opened(pool) as open_pool:
        chosen = pick_queue(open_pool, queue)
        dead = chosen.dead_letters()
        wanted = _wanted(tasks, everything, dead)
        known = {task.id for task in dead}
        parts = _parts([task for task in wanted if task in known])
        done = [task for part in parts for task in once(open_pool, None, partial(_drop, chosen, part, reason))]
    return _no_letters("dropped", chosen.name, wanted, done)


@verb("drop")
def drop(
    pool: PoolPath,
    tasks: Annotated[list[str], typer.Argument(metavar="TASK...", help="Ids of tasks.", show_default=False)],
    reason: Annotated[str, typer.Option("--reason", show_default=False, help="Why; counted with the drop reasons.")],
    queue: QueueName = "",
) -> Answer:
    """End tasks that nobody holds without training on them.

    These are pending or ready, in a batch of nobody, or dead letters.
    """
    with opened(pool) as open_pool:
        chosen = pick_queue(open_pool, queue)
        done = [task for part in _parts(tasks) for task in once(open_pool, None, partial(_drop, chosen, part, reason))]
        wanted = list(dict.fromkeys(tasks))
        rest = _untouched(wanted, done)
        why = open_pool.log.refresh(partial(_held, open_pool.path, chosen.name, rest))
    return _outcome("dropped", chosen.name, done, rest, "; ".join(why))


def _retry(queue: Queue, tasks: list[str], request: str) -> tuple[str, ...]:
    return queue.retry_failed(tasks, request_id=request)


def _drop(queue: Queue, tasks: list[str], reason: str, request: str) -> tuple[str, ...]:
    return queue.drop_tasks(tasks, reason, request_id=request)


def _wanted(tasks: list[str], everything: bool, dead: list[Task]) -> list[str]:
    from strawq.errors import BadInput

    if everything == bool(tasks):
        raise BadInput("name tasks, or use --all")
    return [task.id for task in dead] if everything else list(dict.fromkeys(tasks))


def _parts(tasks: list[str]) -> list[list[str]]:
    return [tasks[at : at + TASKS_PER_COMMAND] for at in range(0, len(tasks), TASKS_PER_COMMAND)]


def _untouched(wanted: list[str], done: list[str]) -> list[str]:
    counted = set(done)
    return [task for task in wanted if task not in counted]


def _no_letters(what: str, queue: str, wanted: list[str], done: list[str]) -> Answer:
    from strawq.limits import NAME_BYTES

    rest = _untouched(wanted, done)
    named = ", ".join(task[:NAME_BYTES] for task in rest)
    return _outcome(
        what, queue, done, rest, f"{named}: no dead letters of that queue (`strawq failed list POOL` shows those)"
    )


def _held(pool: str, queue: str, tasks: list[str], machine: Machine) -> list[str]:
    """Why each of these tasks is not to be dropped."""
    from strawq.core.apply import batch_number
    from strawq.limits import NAME_BYTES

    rows, batches = machine.state.branch.queues[queue].tasks, machine.state.branch.queues[queue].batches
    found = []
    for name in tasks:
        task = rows.get(name)
        if task is None:
            found.append(f"{name[:NAME_BYTES]} is not started, has ended or is unknown")
            continue
        batch = batches.get(batch_number(task.batch)) if task.batch else None
        session = batch.session if batch is not None else task.session
        where = f"in batch {batch.id} of" if batch is not None else "leased by"
        found.append(
            f"{name} is {where} session {session} (if its process is dead: `strawq sessions expire {pool} {session}`)"
            if session
            else f"{name} was held by somebody just now"
        )
    return found


def _outcome(what: str, queue: str, done: list[str], untouched: list[str], why: str) -> Answer:
    """Tasks that stayed as they are make it exit code 1: a script must not take them for done."""
    data: dict[str, Any] = {"queue": queue, what: done, "untouched": untouched}
    text = f"{plural(len(done), 'task')} {what}"
    if untouched:
        text += f"; left alone: {why}"
    return Answer(data, text, 1 if untouched else 0)
