"""Saying what happens: bars on a terminal, lines elsewhere, nothing for programs.

The rule: talk goes to stderr; stdout is for answers.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strawq.errors import TryAgain

if TYPE_CHECKING:
    from strawq_workers.demo import DemoSummary


class Narrator:
    """Says what happens: bars in a terminal, else lines."""

    def __init__(self, say: Callable[[str], None], bars: Any = None, tasks: tuple[Any, ...] = ()) -> None:
        self.say = say
        self._bars = bars
        self._tasks = tasks

    def show(self, trained: int, batches: int, accepted: int) -> None:
        if self._bars is not None:
            for task, value in zip(self._tasks, (accepted, trained, batches), strict=True):
                self._bars.update(task, completed=value)


@contextlib.contextmanager
def narrator(prompts: int, batches: int, silent: bool, say: Callable[[str], None] | None) -> Iterator[Narrator]:
    if silent:
        yield Narrator(lambda _: None)
    elif say is not None or not sys.stderr.isatty():
        yield Narrator(say or (lambda text: print(text, file=sys.stderr, flush=True)))
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bars:
            tasks = (
                bars.add_task("groups accepted", total=prompts),
                bars.add_task("groups trained", total=prompts),
                bars.add_task("batches", total=batches),
            )
            yield Narrator(lambda text: console.print(text, soft_wrap=True), bars, tasks)


@contextlib.contextmanager
def kept_to_look_at(pool: Path, logs: Path) -> Iterator[None]:
    """Around a demo: one that did not get there says what it leaves, and what is in the way of another try."""
    try:
        yield
    except TryAgain as error:
        raise TryAgain(
            f"{error}; pool and logs are kept to look at: for another try name another directory, or "
            f"`{_removal(pool, logs)}` first"
        ) from error


def _removal(pool: Path | str, logs: Path | str) -> str:
    return f"rm -rf {shlex.quote(str(pool))} {shlex.quote(str(logs))}"


def describe(summary: DemoSummary) -> str:
    """The summary for a person."""
    s = summary
    rows = [
        ("groups accepted", f"{s.groups_accepted}, taken in {s.batches} batches"),
        ("tokens generated", f"{s.tokens_generated} by the engine, {s.tokens_accepted} in accepted groups"),
        ("tokens resumed", f"{s.tokens_resumed} loaded from the pool instead of generated again"),
        ("generated again", f"{s.tokens_again} tokens that the killed worker had not saved yet"),
        ("leases expired", str(s.leases_expired)),
        ("saved prefixes", f"{s.prefixes_kept} of {s.prefixes_saved} begin the answers that were handed in"),
        ("policy versions", f"{', '.join(s.policy_versions_seen)}; {s.groups_of_two_versions} groups made by two"),
        ("duplicates", str(s.duplicates)),
        ("lost", str(s.lost)),
        ("time", f"{s.seconds:g} s"),
    ]
    unseen = [] if s.leases_expired else ["a takeover from a killed worker"]
    unseen += [] if s.groups_of_two_versions else ["a change of weights under a running group"]
    if unseen:
        rows.append(("not shown", f"{' and '.join(unseen)}: groups were finished too soon; ask for more of them"))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name.ljust(width)}  {value}" for name, value in rows]
    verdict = "Nothing was lost." if s.sound else "THE AUDIT FOUND A FAULT."
    after = [
        f"Look inside:  strawq inspect {s.pool}",
        f"Logs:         {s.logs}",
        f"Remove both:  {_removal(s.pool, s.logs)}",
    ]
    return "\n".join([verdict, *lines, "", *after])
