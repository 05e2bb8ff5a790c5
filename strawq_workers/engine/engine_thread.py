"""The thread that computes, and the only way to reach it from the event loop.

The rule: the scheduler is touched by this one thread. The event loop sends it functions, which run between two steps,
and is told of progress by callbacks on the loop. So the loop keeps answering while the model computes, and an abort
takes effect within a step.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from strawq_workers.engine.request import Request
from strawq_workers.engine.scheduler import Scheduler

T = TypeVar("T")


class EngineStopped(Exception):
    """The compute thread has ended: by `stop`, or by a fault that is this exception's cause."""


class EngineThread:
    """Runs one scheduler. Create it on the event loop; `start`, then `call`, then `stop`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._commands: deque[tuple[Callable[[Scheduler], Any], asyncio.Future[Any]]] = deque()
        self._wakeup = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="strawq-engine", daemon=True)
        self.ended: asyncio.Future[BaseException | None] = self._loop.create_future()

    def start(self) -> None:
        self._thread.start()

    async def call(self, function: Callable[[Scheduler], T]) -> T:
        """Run `function` on the compute thread between two steps, and return or raise what it does."""
        future = self._send(function)
        return await future

    def post(self, function: Callable[[Scheduler], Any]) -> None:
        """Like `call` without waiting; what the function raises goes to the loop's exception handler."""
        self._send(function).add_done_callback(_observe)

    async def stop(self) -> None:
        """End the thread after the step that it is in. Requests in flight get no answer."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        await self.ended

    def _send(self, function: Callable[[Scheduler], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        with self._wakeup:
            if self._stopping:
                future.set_exception(EngineStopped("the engine is stopping"))
            else:
                self._commands.append((function, future))
                self._wakeup.notify()
        return future

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 (handed to whoever awaits `ended`: a thread has nobody else)
            failure = error
        with self._wakeup:
            self._stopping = True
            left = list(self._commands)
            self._commands.clear()
        self._on_loop(lambda: self._finish(failure, [future for _, future in left]))

    def _turn(self) -> bool:
        """One turn: commands, then a step. False when it is time to end."""
        with self._wakeup:
            if not self._commands and not self._stopping:
                wait = self._scheduler.wait_seconds(time.monotonic())
                if wait is None or wait > 0:
                    self._wakeup.wait(wait)
            if self._stopping:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for function, future in commands:
            self._answer(function, future)
        self._scheduler.step(time.monotonic())
        touched, self._scheduler.touched = self._scheduler.touched, []
        if touched:
            self._on_loop(lambda: _notify(touched))
        return True

    def _answer(self, function: Callable[[Scheduler], Any], future: asyncio.Future[Any]) -> None:
        try:
            value = function(self._scheduler)
        except Exception as error:  # noqa: BLE001 (raised again where the caller awaits)
            refused = error
            self._on_loop(lambda: None if future.done() else future.set_exception(refused))
        else:
            self._on_loop(lambda: None if future.done() else future.set_result(value))

    def _on_loop(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _finish(self, failure: BaseException | None, left: list[asyncio.Future[Any]]) -> None:
        for future in left:
            if not future.done():
                future.set_exception(EngineStopped("the engine has stopped"))
        if not self.ended.done():
            self.ended.set_result(failure)


def _notify(requests: list[Request]) -> None:
    for request in requests:
        if request.notify is not None:
            request.notify()


def _observe(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and isinstance(future.exception(), Exception):
        error = future.exception()
        if not isinstance(error, EngineStopped):
            future.get_loop().call_exception_handler({"message": "engine command failed", "exception": error})
