"""A clock that only moves when it is told to, and chance from one seed: the same seed gives the same history."""

from __future__ import annotations

import random


class SimulatedClock:
    """Implements `strawq.storage.clock.Clock`. `sleep` moves the time on; nothing ever waits."""

    def __init__(self, seed: int = 0, start_seconds: float = 1000.0, wall_offset_ms: int = 1_700_000_000_000) -> None:
        self.now = start_seconds
        self.wall_offset_ms = wall_offset_ms
        self.chance = random.Random(seed)

    def monotonic(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return self.wall_offset_ms + int(self.now * 1000)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def new_id(self) -> str:
        return f"{self.chance.getrandbits(128):032x}"

    def jitter(self) -> float:
        return self.chance.random()
