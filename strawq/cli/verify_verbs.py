"""The verb that asks whether everything promised is still there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from strawq.cli.app import verb
from strawq.cli.options import PoolPath, opened
from strawq.cli.output import Answer, one_line, plural, size

Progress = Callable[[str, int, int], None]


@verb("verify")
def verify(
    pool: PoolPath,
    full: Annotated[bool, typer.Option("--full", help="Read every payload byte and compare its digest.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="First repair what can be without losing anything.")] = False,
) -> Answer:
    """Check log, snapshots, state and objects. Exit code 1 if there are findings.

    Each finding names the object, what depends on it, and the remedy.
    """
    from strawq.verification import verify as check

    with opened(pool) as open_pool, _bar() as progress:
        done = check(open_pool, full=full, repair=repair, progress=progress)
    lines = [f"repaired: {sentence}" for sentence in done.repaired]
    for finding in done.findings:
        lines.append(f"{finding.what}: {finding.problem}")
        lines += [f"    needed by {name}" for name in finding.depends]
        lines.append(f"    remedy: {finding.remedy}")
    hashed = f", {size(done.bytes_hashed)} of payload read" if full else ""
    lines.append(
        f"{plural(len(done.findings), 'finding') if done.findings else 'clean'}: entries {done.oldest_entry} to "
        f"{done.head_seq}, {plural(done.snapshots, 'snapshot')}, {plural(done.objects, 'object')}{hashed}"
    )
    return Answer(done, "\n".join(map(one_line, lines)), exit_code=1 if done.findings else 0)


@contextmanager
def _bar() -> Iterator[Progress]:
    """A bar on stderr, if that is a terminal: one line for each thing that is checked."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    with Bar(console=Console(file=sys.stderr), transient=True) as bar:
        lines: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in lines:
                lines[what] = bar.add_task(what, total=total)
            bar.update(lines[what], completed=done, total=total)

        yield show
