"""A simulated process on a simulated host: its own view of the files, its own wrong clock, its own pool.

Several strands may share one process, as threads do; the locks of the log and of the session are theirs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from strawq.errors import BadInput, Fenced, OutcomeUnknown, StrawqError
from strawq.model import Session
from strawq.pool import Pool
from strawq.session import SessionKeeper
from strawq.storage.faulty import Crash, FaultPlan, FaultyFiles, Moment
from strawq.testing.simulation.scheduler import TurnLock
from strawq.testing.simulation.violation import Violation

if TYPE_CHECKING:
    from strawq.testing.simulation.world import World


class HostClock:
    """This host's idea of time. Its wall clock is hours off and steps; its monotonic clock drifts, and stands still
    while the host is paused as a virtual machine."""

    def __init__(self, world: World, process: Process, chance: random.Random) -> None:
        self._world, self._process, self._chance = world, process, chance
        self._rate = chance.uniform(0.95, 1.05)
        self._start = chance.uniform(0, 1e6)
        self._wall_s = 1.7e9 + chance.uniform(-3600, 3600)
        self._stopped_s = 0.0
        self._stopped: tuple[float, float] | None = None

    def stop(self, seconds: float) -> None:
        """The host's monotonic clock stands still for so long: it is a virtual machine that was paused."""
        now = self._world.scheduler.now
        self._stopped_s = now - self._running()
        self._stopped = (now, now + seconds)

    def _running(self) -> float:
        now = self._world.scheduler.now
        if self._stopped is None:
            return now - self._stopped_s
        start, end = self._stopped
        return now - self._stopped_s - (min(now, end) - start)

    def monotonic(self) -> float:
        return self._start + self._running() * self._rate

    def wall_ms(self) -> int:
        if self._chance.random() < 0.02:
            self._wall_s += self._chance.uniform(-3600, 3600)
        return int((self._wall_s + self._world.scheduler.now) * 1000)

    def sleep(self, seconds: float) -> None:
        self._process.must_live()
        self._world.scheduler.sleep(seconds)

    def new_id(self) -> str:
        return f"{self._chance.getrandbits(128):032x}"

    def jitter(self) -> float:
        return self._chance.random()


class FreeLock:
    """An advisory lock that excludes nobody. Contention is believed for a while after a lost race, as on a real
    mount."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._until = -1.0

    @property
    def contended(self) -> bool:
        return self._clock.monotonic() < self._until

    def lost_race(self) -> None:
        self._until = self._clock.monotonic() + 0.2

    @contextmanager
    def held(self, meanwhile: Callable[[], None] | None = None) -> Iterator[None]:
        """Whoever finds it taken (by lot) does what it would do while it waits."""
        if meanwhile is not None and self.contended and self._clock.jitter() < 0.5:
            meanwhile()
        yield


class Process:
    """`name` is unique. `host` groups processes that can see each other die."""

    def __init__(self, world: World, name: str, host: str, plan: FaultPlan) -> None:
        self.world, self.name, self.host = world, name, host
        self.chance = random.Random(f"{world.settings.seed}-{name}")
        self.clock = HostClock(world, self, self.chance)
        self.files = FaultyFiles(world.memory, plan, clock=self.clock.monotonic)
        self.files.hook = self._at_call
        self.dead = False
        self.frozen_until = 0.0
        self.stormy = False
        self.round_at = 0.0
        self._pool: Pool | None = None
        self._opening = TurnLock(world.scheduler)

    def must_live(self) -> None:
        if self.dead:
            raise Crash(f"{self.name} is dead")

    def _at_call(self, moment: Moment, kind: str, path: str) -> None:
        self.world.note(self.name, moment, kind, path)
        if moment == "before":
            self.world.scheduler.sleep(self.chance.expovariate(1 / self.world.settings.call_s))
            self.must_live()
        elif moment == "after" and kind == "publish":
            self.world.published(path)

    @property
    def excused(self) -> bool:
        """Whether it may be told of damage: its mount is sick, or the newest entry is torn, or was a moment ago."""
        return self.stormy or self.world.torn_lately()

    @property
    def instance(self) -> str:
        return self._pool.instance if self._pool is not None else ""

    @property
    def pool(self) -> Pool:
        """The pool, opened by the first strand that wants it."""
        if self._pool is None:
            with self._opening:
                if self._pool is None:
                    self._pool = self._open()
        return self._pool

    def _open(self) -> Pool:
        pool = Pool(
            self.files,
            role=self.name,
            lease_seconds=self.world.settings.lease_s,
            clock=self.clock,
            lock=FreeLock(self.clock),
            background=False,
            keeper=self._keeper,
        )
        scheduler = self.world.scheduler
        log: Any = pool.log
        log._lead = TurnLock(scheduler)
        log.commit = self._recorded(log.commit, log)
        keeper: Any = pool.keeper
        keeper._lock = TurnLock(scheduler, reentrant=True)
        return pool

    def _keeper(
        self, log: Any, clock: Any, instance: str, role: str, lease_seconds: float, background: bool
    ) -> SessionKeeper:
        def identify(session: str, role: str, lease_seconds: float) -> Session:
            self.world.processes_of_sessions[session] = self
            return Session(session, host=self.host, pid=0, role=role, lease_seconds=lease_seconds)

        def known_dead(session: Session) -> bool:
            return session.host == self.host and self.world.processes_of_sessions[session.id].dead

        return SessionKeeper(log, clock, instance, role, lease_seconds, background, identify, known_dead)

    def _recorded(self, commit: Callable[..., Any], log: Any) -> Callable[..., Any]:
        """Commit, and hold every answer against the true history."""
        truth, book = self.world.truth, self.world.book

        def recorded(
            command: Any, payloads: Mapping[str, Any] | None = None, view: Callable[[Any], Any] | None = None
        ) -> Any:
            book.asked(command, self.name)
            raw: list[Any] = [None]

            def look(answer: Any) -> Any:
                raw[0] = answer
                return view(answer) if view is not None else answer

            try:
                answer = commit(command, payloads, look)
            except StrawqError as error:
                self.must_live()
                self.world.say(
                    self.name, f"{type(command).__name__} {command.request}: {type(error).__name__}: {error}"
                )
                self._refused(command, error)
                raise
            self.must_live()
            event = raw[0]
            self.world.say(self.name, f"{event}")
            if not log._lead.locked():
                truth.follows(log.machine.seq, log.tip, self.name)
            if event is not None and hasattr(event, "request") and event.request:
                known = book.events.get(command.request, [])
                if not known:
                    raise Violation(f"{self.name} was answered {event}, which is not in the true history")
                if all(event != stood for _, stood in known):
                    raise Violation(f"{self.name} was answered {event}, and the true history says {known}")
                truth.acknowledged(min(seq for seq, stood in known if stood == event), self.name)
            return answer

        return recorded

    def _refused(self, command: Any, error: StrawqError) -> None:
        """A caller that is told that nothing happened must be right; and one that asks again is answered, for as long
        as the pool remembers."""
        book, truth = self.world.book, self.world.truth
        if isinstance(error, BadInput | Fenced) and self.pool.log.machine.seq == truth.seq:
            known = truth.state.branch.answer_of.get(command.request) if command.request else None
            if known is not None:
                raise Violation(f"{self.name} asked again and was refused ({error}); the answer is {known.event}")
        if isinstance(error, OutcomeUnknown):
            book.unknown.add(command.request)
        elif command.request not in book.unknown and len(book.askers[command.request]) == 1:
            if command.request in book.events:
                raise Violation(
                    f"{self.name} was told that nothing happened ({type(error).__name__}: {error}), and "
                    f"{book.events[command.request]} stands in the log"
                )
            book.denied[command.request] = f"{type(error).__name__}: {error}"
