"""The verb that tells what happened."""

from __future__ import annotations

import datetime
from itertools import islice
from typing import Annotated

import typer

from strawq.cli.app import verb
from strawq.cli.options import PoolPath, opened
from strawq.cli.output import Answer, one_line


@verb("log")
def log(
    pool: PoolPath,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="At most so many entries (0: all).")] = 20,
    task: Annotated[
        str, typer.Option("--task", metavar="ID", show_default=False, help="The life of one group, oldest first.")
    ] = "",
    oldest_first: Annotated[bool, typer.Option("--oldest-first", help="Begin with the oldest entry.")] = False,
) -> Answer:
    """Show who did what and when, or what befell one group."""
    from strawq.history import beginning, follow_task, read_history

    with opened(pool) as open_pool:
        first = beginning(open_pool)
        if task:
            life = follow_task(open_pool, task)
            lines = list(islice(life, limit) if limit else life)
        else:
            lines = list(read_history(open_pool, newest_first=not oldest_first, limit=limit))
    text = [f"{line.seq:>8}  {_when(line.time_ms)}  {line.who or '-':<12}  {line.event}: {line.text}" for line in lines]
    if task and not lines:
        text.append(f"history says nothing of task {task}")
    if first.trimmed:
        text.append(f"history begins at entry {first.seq}; older ones were trimmed")
    data = {"begins_at": first.seq, "trimmed": first.trimmed, "events": lines}
    return Answer(data, "\n".join(map(one_line, text)))


def _when(time_ms: int) -> str:
    if not time_ms:
        return "-" * 19
    moment = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%d %H:%M:%S")
