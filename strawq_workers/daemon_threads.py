"""An event loop's threads that nobody waits for.

The rule: hooks run in them, and others' code may stand still for ever. So neither the loop's end nor the interpreter's
waits for a call under way; what has to be done before either is awaited by whoever asked for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Call = Callable[[], None]


class DaemonThreads(ThreadPoolExecutor):
    """As many threads as the default executor has, made as they are needed. (Event loops take no other class.)"""

    def __init__(self) -> None:
        self._most = min(32, (os.cpu_count() or 1) + 4)
        super().__init__(self._most)
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._made = self._busy = 0
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                _settle(future, fn, args, kwargs)

        with self._guard:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.put(call)
            self._busy += 1
            if self._made < min(self._busy, self._most):
                self._made += 1
                threading.Thread(target=self._work, name="strawq-hooks", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends threads as they become idle. Calls that wait are still made; none is waited for."""
        del wait, cancel_futures
        with self._guard:
            if not self._closed:
                self._closed = True
                for _ in range(self._made):
                    self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            with self._guard:
                self._busy -= 1


def _settle(future: Future[T], fn: Callable[..., T], args: Any, kwargs: Any) -> None:
    try:
        answer = fn(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 (it is raised where the answer is waited for)
        future.set_exception(error)
    else:
        future.set_result(answer)
