"""What one process was told, on local disk: a line is durable before the process goes on.

Killed between an acknowledgement and its line, the process knows nothing of it: the audit then expects less, never
something wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """`op` is submitted, saved, completed, dropped, read, finished, or fault. `chunks` counts those of the first
    sample; `index` is the prompt's number; `cursor` that of the producer."""

    op: str
    task: str = ""
    attempt: int = 0
    chunks: int = 0
    index: int = -1
    batch: str = ""
    delivery: int = 0
    cursor: int = 0
    text: str = ""


class Ledger:
    """Appends to a file of its own, one `write` and one fsync for each call."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o664)

    def write(self, *lines: Line) -> None:
        os.write(self._fd, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def read_ledgers(directory: Path) -> Iterator[tuple[str, Line]]:
    """The lines of all processes, each with the name of its ledger. One that a kill has cut off was never relied
    on."""
    decoder = msgspec.json.Decoder(Line)
    for path in sorted(directory.glob("*.ledger")):
        whole = path.read_bytes().split(b"\n")[:-1]
        for line in whole:
            yield path.stem, decoder.decode(line)
