"""What a verb hands back, and how that is printed: data for `--json`, lines for people.

The rule: the data are made first, and the text is made from the same data, so that both say the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from strawq.standard_output import write_stdout

T = TypeVar("T")


class Answer:
    """Result of a verb: `data` (a mapping or msgspec struct: the JSON object; None if the verb has printed for
    itself), `text` for people, and the exit code. `settle` is called at the end with whether the answer was written."""

    __slots__ = ("data", "exit_code", "settle", "text")

    def __init__(
        self, data: Any, text: str = "", exit_code: int = 0, settle: Callable[[bool], None] | None = None
    ) -> None:
        self.data = data
        self.text = text
        self.exit_code = exit_code
        self.settle = settle


def show(answer: Answer, as_json: bool) -> None:
    """Write it to stdout. Raises as `write_stdout`; nothing is settled as written then."""
    written = False
    try:
        if as_json and answer.data is not None:
            print_json(answer.data)
        elif answer.text and not as_json:
            write_stdout(answer.text.rstrip("\n") + "\n")
        written = True
    finally:
        if answer.settle is not None:
            answer.settle(written)


def print_json(data: Any) -> None:
    import msgspec

    write_stdout(msgspec.json.encode(data).decode() + "\n")


def say(text: str) -> None:
    """Talk: a line on stderr. That nobody hears it ends nothing."""
    with contextlib.suppress(OSError):
        print(f"strawq: {one_line(text)}", file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """The text in one line, with what a terminal would obey made visible."""
    return "".join(char if char.isprintable() else " " if char in "\n\r\t" else repr(char)[1:-1] for char in text)


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns by their widths; numbers to the right."""
    cells = [[one_line(_cell(value)) for value in row] for row in rows]
    kinds = [all(_is_number(row[at]) for row in cells) for at in range(len(headings))]
    widths = [max(len(row[at]) for row in [list(headings), *cells]) for at in range(len(headings))]
    lines = []
    for row in [list(headings), *cells]:
        padded = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, kinds, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return "yes" if value is True else "no" if value is False else str(value)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(".", "", 1).lstrip("+-").isdigit()


def size(count: int) -> str:
    """Bytes for people."""
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{count} B" if unit == "B" else f"{number:.1f} {unit}"


def plural(count: int, thing: str) -> str:
    ending = "" if count == 1 else "es" if thing.endswith(("ch", "x")) else "s"
    return f"{count} {thing}{ending}"


def progress(items: Iterable[T], total: int, what: str, start: int = 0) -> Iterator[T]:
    """The items, with a bar on stderr if that is a terminal. An item may be a sized batch; `total` and `start` count
    what is inside."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        line = bar.add_task(what, total=total, completed=start)
        for item in items:
            yield item
            bar.advance(line, len(item) if isinstance(item, list) else 1)
