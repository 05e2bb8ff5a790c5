"""The command line. Its rule: results go to stdout, talk goes to stderr, the exit code says what to do next, and no
traceback ever reaches a user.

A verb is a function in a module whose name ends in `_verbs`, marked with `@verb` (see `app`). It returns an `Answer`;
printing it as text or as JSON, and turning errors into one line and an exit code, happens here and in `errors`.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Nothing is raised."""
    with _ended_at_once():
        from strawq.cli.errors import guarded
        from strawq.standard_output import open_standard_streams

    open_standard_streams()
    return guarded(list(sys.argv[1:] if argv is None else argv))


@contextlib.contextmanager
def _ended_at_once() -> Iterator[None]:
    """While modules are imported there is nothing to give back: Ctrl-C just ends the process, without a traceback."""
    python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not python or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
