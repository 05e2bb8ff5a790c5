"""An event loop in a thread of its own, on which the engines' connections and background work live between calls.

The rule: a caller that is interrupted (Ctrl-C, an exception raised by a signal handler) first tells the work to stop
and waits until it has given back what it holds; then the interruption goes on. A second one does not wait. Nothing
waits for a hook that stands still in its thread, and no task of a hook's that exits ends the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from strawq.errors import BadInput
from strawq_workers.daemon_threads import DaemonThreads

log = logging.getLogger("strawq.rollout")

T = TypeVar("T")
CLOSE_S = 10.0


class LoopThread:
    """Runs coroutines for callers in other threads."""

    def __init__(self, name: str = "strawq-rollout") -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._ended:
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001 (see below)
                # `sys.exit()` in a task that the user's code has made: the task has it, for whoever awaits it, and
                # asyncio raises it here as well. Signals do not come to this thread.
                log.warning("a task raised %s on the rollout's event loop, which goes on", type(error).__name__)

    def _end(self) -> None:
        self._ended = True
        self._loop.stop()

    def call(
        self, work: Callable[[asyncio.Event], Coroutine[Any, Any, T]], undo: Callable[[T], Any] | None = None
    ) -> T:
        """Run `work(stop)` and return or raise what it does. It must end soon after `stop` is set. `undo` is called
        with an answer that comes too late for an interrupted caller."""
        if threading.current_thread() is self._thread:
            raise BadInput("a rollout was asked for from inside the rollout's own event loop")
        stop = asyncio.Event()
        future: Future[T] = asyncio.run_coroutine_threadsafe(work(stop), self._loop)
        try:
            return future.result()
        except BaseException as interruption:
            if future.done() and future.exception() is interruption:
                raise
            self._loop.call_soon_threadsafe(stop.set)
            # What it raises does not count any more: the caller is being interrupted.
            if future.exception() is None and undo is not None:
                undo(future.result())
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` in the background."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the loop. Nothing may be running on it any more."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(timeout=CLOSE_S)
        if not self._thread.is_alive():
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
