"""Verbs about single tasks: dead letters, and tasks that are to end without training."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strawq.cli.app import group, verb
from strawq.cli.options import PoolPath, QueueName, once, opened, pick_queue
from strawq.cli.output import Answer, plural, table

if TYPE_CHECKING:
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
    return _outcome("retried", chosen.name, wanted, done, NO_LETTERS)


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
    return _outcome("dropped", chosen.name, wanted, done, NO_LETTERS)


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
    return _outcome("dropped", chosen.name, list(dict.fromkeys(tasks)), done, HELD)


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


NO_LETTERS = "which are no dead letters of that queue (`strawq failed list` shows those)"
HELD = "which are leased, in a batch that a consumer has in hand, not started, ended or unknown"


def _outcome(what: str, queue: str, wanted: list[str], done: list[str], why: str) -> Answer:
    """Tasks that stayed as they are make it exit code 1: a script must not take them for done."""
    from strawq.limits import NAME_BYTES

    counted = set(done)
    untouched = [task for task in wanted if task not in counted]
    data: dict[str, Any] = {"queue": queue, what: done, "untouched": untouched}
    text = f"{plural(len(done), 'task')} {what}"
    if untouched:
        text += f"; not these, {why}: {', '.join(task[:NAME_BYTES] for task in untouched)}"
    return Answer(data, text, 1 if untouched else 0)
