"""Saying what happens: bars on a terminal, lines elsewhere, nothing for programs.

The rule: talk goes to stderr; stdout is for answers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


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
