"""Many strands of control on one thread, and a clock that moves only when all of them wait.

A strand runs until it sleeps, waits for a lock or ends; then the strand with the earliest time goes on. Nothing else
decides the order, so what a seed draws as durations is the whole schedule: the same seed, the same history.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from greenlet import getcurrent, greenlet

from strawq.storage.faulty import Crash


class Owner(Protocol):
    """The simulated process that a strand belongs to."""

    dead: bool
    frozen_until: float


class Strand:
    """One line of control: what a thread is in a real process."""

    __slots__ = ("name", "owner", "switch_to")

    def __init__(self, name: str, owner: Owner | None, switch_to: greenlet) -> None:
        self.name = name
        self.owner = owner
        self.switch_to = switch_to


class Scheduler:
    """`now` is true time in seconds; only the simulation sees it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.current: Strand | None = None
        self.strands: dict[Strand, None] = {}
        self._queue: list[tuple[float, int, Strand]] = []
        self._turns = 0
        self._hub = getcurrent()

    def spawn(self, name: str, body: Callable[[], object], owner: Owner | None = None, after_s: float = 0.0) -> Strand:
        """Run `body` as a strand that starts in `after_s` seconds. `Crash` ends it quietly; any other exception ends
        `run`."""

        def run() -> None:
            try:
                body()
            except Crash:
                if owner is not None and not owner.dead:
                    self.died(owner)
            finally:
                self.strands.pop(strand, None)

        strand = Strand(name, owner, greenlet(run, self._hub))
        self.strands[strand] = None
        self.wake(strand, after_s)
        return strand

    def died(self, owner: Owner) -> None:
        """The process is dead: each of its strands meets `Crash` where it waits."""
        owner.dead = True
        for strand in list(self.strands):
            if strand.owner is owner and strand is not self.current:
                self.wake(strand)

    def wake(self, strand: Strand, after_s: float = 0.0) -> None:
        self._turns += 1
        heapq.heappush(self._queue, (self.now + after_s, self._turns, strand))

    def sleep(self, seconds: float) -> None:
        """Let others run for `seconds`. Outside of all strands time just moves on."""
        if self.current is None:
            self.now += seconds
            return
        self.wake(self.current, seconds)
        self.park()

    def park(self) -> None:
        """Wait until somebody wakes this strand."""
        self._hub.switch()

    def run(self, until: float = float("inf")) -> None:
        """Run strands in the order of their times until none is left before `until`."""
        while self._queue and self._queue[0][0] <= until:
            when, _, strand = heapq.heappop(self._queue)
            if strand not in self.strands:
                continue
            self.now = max(self.now, when)
            owner = strand.owner
            if owner is not None and not owner.dead and owner.frozen_until > self.now:
                self.wake(strand, owner.frozen_until - self.now)
                continue
            self.current = strand
            try:
                if owner is not None and owner.dead and not strand.switch_to:
                    del self.strands[strand]  # It had not started.
                elif owner is not None and owner.dead:
                    strand.switch_to.throw(Crash(f"{strand.name}: its process is dead"))
                else:
                    strand.switch_to.switch()
            finally:
                self.current = None
        if until != float("inf"):
            self.now = max(self.now, until)

    def end(self) -> None:
        """Unwind every strand that is left."""
        for strand in list(self.strands):
            if strand.owner is not None:
                strand.owner.dead = True
            self.strands.pop(strand, None)
            self.current = strand
            try:
                if strand.switch_to:
                    strand.switch_to.throw(Crash("the simulation is over"))
            except Crash:
                continue
            finally:
                self.current = None


class TurnLock:
    """A lock for strands, first come first served: stands in for `threading.Lock`, or `RLock` if `reentrant`."""

    def __init__(self, scheduler: Scheduler, reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._reentrant = reentrant
        self._owner: object = None
        self._depth = 0
        self._waiting: deque[Strand] = deque()

    def locked(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> bool:
        strand = self._scheduler.current
        me: object = strand or self._scheduler
        if self._owner is me and not self._reentrant:
            raise AssertionError(f"{strand.name if strand else 'the hub'} takes a lock that it holds: a real one hangs")
        while self._depth and self._owner is not me:
            if strand is None:
                raise AssertionError("a strand holds a lock that the hub waits for")
            self._waiting.append(strand)
            self._scheduler.park()
        self._owner, self._depth = me, self._depth + 1
        return True

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:
                self._scheduler.wake(self._waiting.popleft())
