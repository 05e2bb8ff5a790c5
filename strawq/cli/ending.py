"""How a command ends before it has its answer, and what it says of that with `--json`.

The rule: one object is written, whoever comes first: the answer, the error, or that of a process that is ended by
force. What was reached until then is in it, where the verb says so.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, ClassVar

from strawq.cli.output import one_line, print_json, say
from strawq.errors import StorageFailed
from strawq_workers.signals import Handlers, Number


class Interrupted(KeyboardInterrupt):
    """Ctrl-C."""

    kind: ClassVar[str] = "interrupted"
    exit_code: ClassVar[int] = 130


class Terminated(BaseException):
    """SIGTERM: leave through every `with`, so that leases are given back."""

    kind: ClassVar[str] = "terminated"
    exit_code: ClassVar[int] = 143


Stopped = type[Interrupted] | type[Terminated]

_reached: dict[str, Any] = {}


def reached(**what: Any) -> None:
    """Called by a verb as it goes on: what of its answer it has already, for an object that says why there is no
    more."""
    _reached.update(what)


def stopped_by(number: int) -> Stopped:
    return Interrupted if number == Number.SIGINT else Terminated


class Ending:
    """Of one command."""

    def __init__(self, as_json: bool) -> None:
        _reached.clear()
        self._as_json = as_json
        self._writer = threading.Lock()
        self.handlers = Handlers(_leave, say, self._by_force)

    def claim(self) -> None:
        """From now on the one object is the answer's. If it is being written already, the process is being ended, and
        this waits for that."""
        self._writer.acquire()

    def tell(self, kind: str, message: str) -> None:
        """Say what went wrong, in a line and in the object."""
        say(message)
        self._write(kind, message)

    def stopped(self, kind: Stopped) -> int:
        """Say that a signal has ended the command; returns the exit code."""
        with contextlib.suppress(BrokenPipeError):
            self.tell(kind.kind, kind.kind)
        return kind.exit_code

    def _write(self, kind: str, message: str) -> None:
        if self._as_json and self._writer.acquire(blocking=False):
            with contextlib.suppress(StorageFailed):  # it has been said on stderr
                error = {"kind": kind, "message": one_line(message)}
                print_json({"error": {**error, "reached": _reached} if _reached else error})

    def _by_force(self, number: Number) -> None:
        kind = stopped_by(number).kind
        with contextlib.suppress(BrokenPipeError):
            self._write(kind, f"{kind}: ended at once; leases that were not given back expire")


def _leave(number: Number) -> None:
    raise stopped_by(number)
