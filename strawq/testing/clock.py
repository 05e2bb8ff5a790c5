"""A clock that only moves when it is told to, and chance from one seed: the same seed gives the same history."""

from __future__ import annotations

import random


class SimulatedClock:
    """Implements `strawq.storage.clock.Clock`. `sleep` moves the time on; nothing ever waits."""

    def __init__(self, seed: int = 0, start_seconds: float = 1000.0, wall_offset_ms: int = 1_700_000_000_000) -> None:
        self.now = start_seconds
        self.wall_offset_ms = wall_offset_ms
        self.chance = random.Random(seed)

    def twin(self) -> SimulatedClock:
        """Another clock that goes on from here exactly as this one will."""
        twin = SimulatedClock(0, self.now, self.wall_offset_ms)
        twin.chance.setstate(self.chance.getstate())
        return twin

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


class HostClock:
    """One host's clocks in a world: time passes for all at once, but each monotonic clock has its own origin, and each
    wall clock says what it likes (`wall_jump_ms` is free to change, also backwards)."""

    def __init__(self, base: SimulatedClock, origin_seconds: float = 0.0, wall_jump_ms: int = 0) -> None:
        self.base = base
        self.origin_seconds = origin_seconds
        self.wall_jump_ms = wall_jump_ms

    def monotonic(self) -> float:
        return self.base.now + self.origin_seconds

    def wall_ms(self) -> int:
        return self.base.wall_ms() + self.wall_jump_ms

    def sleep(self, seconds: float) -> None:
        self.base.sleep(seconds)

    def new_id(self) -> str:
        return self.base.new_id()

    def jitter(self) -> float:
        return self.base.jitter()
