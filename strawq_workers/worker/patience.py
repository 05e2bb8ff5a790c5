"""How long storage may be unwell before a worker gives up.

The rule: a disk that is full for a moment, or a mount that comes back, costs no work. Groups and leases stay in hand,
nothing new is leased, and what was refused is tried again at growing pauses, for `limit_s`, or a few seconds once the
worker has been told to stop. Then the error goes on, and so does every later one, at once. What alone cannot be read,
while the pool can, is not waited for: that is one group's trouble and not storage's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from strawq.errors import OutcomeUnknown, StorageFailed, StrawqError
from strawq_workers.telling import Telling
from strawq_workers.worker.metrics import Counters

log = logging.getLogger("strawq.worker")

T = TypeVar("T")
PAUSE_S = 0.1
PAUSE_MAX_S = 5.0
ENDING_S = 10.0
READ_TRIES = 4


class Patience:
    """Of one worker. Belongs to its event loop."""

    def __init__(self, limit_s: float, counters: Counters) -> None:
        self.well = asyncio.Event()
        """Set while no call is being tried again."""
        self.well.set()
        self._limit_s = limit_s
        self._counters = counters
        self._trying = 0
        self.given_up = False
        """Storage has refused for too long."""
        self._ending_at = math.inf
        self._again = asyncio.Event()
        self._telling = Telling()

    def end(self) -> None:
        """The worker has been told to stop."""
        if self._ending_at == math.inf:
            self._ending_at = time.monotonic()
            self._wake()

    async def call(self, make: Callable[[], Awaitable[T]], ending_s: float = ENDING_S) -> T:
        """What `make()` answers, called again while storage refuses, which must be safe (one request id). Raises the
        last refusal when that has lasted too long; once the worker is told to stop, after `ending_s`."""
        began, pause = math.inf, PAUSE_S
        try:
            while True:
                try:
                    answer = await make()
                except (StorageFailed, OutcomeUnknown) as error:
                    now = time.monotonic()
                    if began == math.inf:
                        began = now
                        self._trying += 1
                        self.well.clear()
                    end = min(began + self._limit_s, max(began, self._ending_at) + ending_s)
                    if self.given_up or now >= end:
                        self._give_up(now - began, ending_s)
                        raise
                    self._counters.retries += 1
                    self._tell(error)
                else:
                    if began < math.inf:
                        self._works(time.monotonic() - began)
                    return answer
                with contextlib.suppress(asyncio.TimeoutError):
                    wait = min(pause * (0.5 + random.random() / 2), end - now)
                    await asyncio.wait_for(self._again.wait(), wait)
                pause = min(2 * pause, PAUSE_MAX_S)
        finally:
            if began < math.inf:
                self._trying -= 1
                if not self._trying:
                    self.well.set()

    async def read(self, make: Callable[[], Awaitable[T]], look: Callable[[], Awaitable[object]]) -> T:
        """What `make()` reads, called again a few times, and for as long as `look()` at the pool is refused too. Raises
        the refusal that is left: of this alone, or of storage (`given_up`)."""
        pause = PAUSE_S
        for _ in range(READ_TRIES - 1):
            try:
                return await make()
            except StorageFailed as error:
                self._counters.retries += 1
                log.info("read again: %s", error)
            await asyncio.sleep(pause * (0.5 + random.random() / 2))
            pause *= 2
            await self.call(look)
        return await make()

    def _tell(self, error: StrawqError) -> None:
        level = logging.WARNING if self._telling.due("refused") else logging.INFO
        why = " ".join(str(error).split())
        log.log(level, "storage refuses: %s; what is in hand is kept, and tried again for %g s", why, self._limit_s)

    def _works(self, seconds: float) -> None:
        if self._trying == 1:
            log.warning("storage works again after %.1f s", seconds)
            self._telling.due("")
        self._wake()  # what else is being tried again may as well be tried now

    def _give_up(self, seconds: float, ending_s: float) -> None:
        if not self.given_up and (ending_s or seconds >= self._limit_s):
            self.given_up = True
            log.error("storage has refused for %.1f s: what is saved stays, and is resumed once leases expire", seconds)

    def _wake(self) -> None:
        self._again.set()
        self._again = asyncio.Event()
