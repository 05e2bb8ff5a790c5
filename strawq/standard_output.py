"""Results on stdout. The rule: they are written whole, or whoever wrote them is told.

A stream may take less than it is given and only say how much (Python's own do, unbuffered), and what stands in a
buffer is not written yet. So nothing is done because of a result before `write_stdout` has returned.
"""

from __future__ import annotations

import contextlib
import os
import sys

from strawq.errors import StorageFailed


def write_stdout(data: str | bytes) -> None:
    """Write all of it (bytes as they are, text as stdout encodes it), and flush. `BrokenPipeError` if nobody reads
    any more; `StorageFailed` if it cannot be written for another reason, such as a full disk. Part of it may have
    been written then; the rest is forgotten."""
    try:
        sys.stdout.flush()
        stream = getattr(sys.stdout, "buffer", None)
        if stream is None:  # a stand-in that takes text alone
            sys.stdout.write(data if isinstance(data, str) else data.decode())
        else:
            if isinstance(data, str):
                data = data.encode(sys.stdout.encoding or "utf-8", sys.stdout.errors or "strict")
            left = memoryview(data)
            while left:
                left = left[_taken(stream.write(left)) :]
        sys.stdout.flush()
    except BrokenPipeError:
        forget_stdout()
        raise
    except OSError as error:
        forget_stdout()
        raise StorageFailed(f"the result could not be written to stdout: {error.strerror}") from error


def _taken(count: int | None) -> int:
    if count is None:  # set not to block, by another program that has it open
        raise BlockingIOError("it does not take any more, and does not wait")
    return count


def open_standard_streams() -> None:
    """Give streams that the program was started without (`>&-`) something to stand for them: stdout a pipe that nobody
    reads, the others the null device. A file that is opened later would get their number, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        if name == "stdout":
            read, given = os.pipe()
            os.close(read)
        else:
            given = os.open(os.devnull, os.O_RDWR)
        if given != number:
            os.dup2(given, number)
            os.close(given)
        os.set_inheritable(number, True)
        setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 (for as long as we run)


def forget_stdout() -> None:
    """Nobody reads any more: the interpreter's last flush must not complain."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
