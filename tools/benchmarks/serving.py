"""One side of a comparison as a process: it does one piece of work for each line that it is sent, and answers with
what it took. Needs nothing of either queue, so that each side may run in an environment of its own.

A line is JSON, `{"work": name, ...arguments}`; the answer is one too, `{"answer": value}` or `{"error": text}`. The
side ends when its input does.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Work = Callable[..., Any]


def serve(works: Mapping[str, Work]) -> None:
    """Answer requests on stdin until it ends. Whatever else a library prints goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"answer": works[request.pop("work")](**request)}
        except Exception:  # noqa: BLE001 - the other process is told, and stops
            reply = {"error": traceback.format_exc()}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what the call returned."""
    start = time.perf_counter()
    value = call()
    return time.perf_counter() - start, value
