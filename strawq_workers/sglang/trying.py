"""Trying a small call again while no engine answers it.

The rule: that nobody answers now is passing. The call is made again at growing pauses, with jitter, until its time is
over or the caller has to stop; then the last failure is raised.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from strawq.errors import EngineUnavailable
from strawq_workers.sglang.flight import StopSignal, sleep_or
from strawq_workers.sglang.options import EngineOptions

T = TypeVar("T")


async def until_answered(
    call: Callable[[], Awaitable[T]],
    options: EngineOptions,
    stop: StopSignal,
    end: float,
    tell: Callable[[EngineUnavailable], None],
) -> T:
    """What `call()` answers. It is called again while it raises `EngineUnavailable`, up to `end` (the event loop's
    clock) or until `stop` is set; `tell` gets each failure that is not the last. Raises what `call` raises."""
    pause = options.backoff_s
    while True:
        try:
            return await call()
        except EngineUnavailable as failed:
            if stop.is_set() or asyncio.get_running_loop().time() + pause >= end:
                raise
            tell(failed)
        await sleep_or(stop, pause * (0.5 + random.random() / 2))
        pause = min(2 * pause, options.backoff_max_s)
