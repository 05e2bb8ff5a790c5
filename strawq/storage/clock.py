"""Time and chance as a port, so that a simulation can own them. Neither decides what is accepted."""

from __future__ import annotations

import random
import time
import uuid
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds on this process's own clock."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970, for people to read."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def new_id(self) -> str:
        """32 hex characters that nobody else has."""
        ...

    def jitter(self) -> float:
        """A number in [0, 1)."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def new_id(self) -> str:
        return uuid.uuid4().hex

    def jitter(self) -> float:
        return random.random()
