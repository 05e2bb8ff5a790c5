"""One simulated world: a pool in memory, its processes, their misfortunes, and the end at which all work is done.

`simulate(seed)` runs it. The same seed gives the same history, byte for byte: its digest says so.
"""

from __future__ import annotations

import random
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import blake3

from strawq.core.events import Expired
from strawq.errors import StrawqError
from strawq.limits import FORMAT_VERSION
from strawq.model import PoolHeader, QueueConfig
from strawq.pool import DEFAULT_QUEUE
from strawq.storage import layout
from strawq.storage.faulty import Crash, Fault, FaultPlan
from strawq.storage.files import Buffer
from strawq.storage.header import create_pool
from strawq.storage.memory import CrashPolicy
from strawq.storage.replay import genesis
from strawq.testing.simulation import actors, operators
from strawq.testing.simulation.book import Book
from strawq.testing.simulation.host import Process
from strawq.testing.simulation.scheduler import Scheduler
from strawq.testing.simulation.settings import Settings, draw, small
from strawq.testing.simulation.truth import Truth, WatchedFiles
from strawq.testing.simulation.violation import Violation, require

_STORM: dict[Fault, float] = {"eio": 0.6, "lost_eio": 0.3, "lost_etimedout": 0.3, "enospc": 0.2, "estale": 0.2}
_HOSTS = 3


@dataclass
class Slot:
    """A place for one process of a role; when it dies another takes it."""

    role: str
    make: Callable[[World, Process], actors.Actor]
    strands: int
    process: Process | None = None
    generation: int = 0
    again_at: float = 0.0


class Weather:
    """Who owns the misfortunes; they end when it does."""

    def __init__(self) -> None:
        self.dead = False
        self.frozen_until = 0.0


class World:
    """All that there is in one run. `trace` keeps the newest lines; `say` and `note` feed the digest of the history."""

    def __init__(self, settings: Settings, listen: Callable[[str], object] | None = None) -> None:
        self.settings = settings
        self.chance = random.Random(f"chaos-{settings.seed}")
        self.scheduler = Scheduler()
        self.memory = WatchedFiles("link" if settings.links else "rename")
        self.book = Book(settings.max_expirations)
        self.truth = Truth(self.memory, self.book)
        self.processes_of_sessions: dict[str, Process] = {}
        self.beats: defaultdict[str, list[float]] = defaultdict(list)
        self.trace: deque[str] = deque(maxlen=120)
        self.calls = 0
        self.power_cuts = 0
        self.torn_entries = 0
        self.cut_at_publish = False
        self.mended_at = -1e9
        self._listen = listen
        self._history = blake3.blake3()
        self.processes: list[Process] = []
        self._cuts_at = sorted(self.chance.uniform(1, settings.duration_s) for _ in range(settings.power_cuts))
        self.slots = [
            *(Slot("worker", actors.Worker, 1 + (i == 0)) for i in range(settings.workers)),
            Slot("producer", actors.Producer, 1),
            Slot("producer", actors.Producer, 1),
            Slot("trainer", actors.Trainer, 1),
            Slot("trainer", actors.Trainer, 1),
            Slot("operator", operators.Operator, 1),
            Slot("collector", operators.Collector, 1),
            Slot("collector", operators.Collector, 1),
            Slot("auditor", operators.Auditor, 1),
        ]

    def create(self) -> None:
        """Make the pool and its queue, without misfortunes."""
        header = PoolHeader(
            FORMAT_VERSION, f"{self.chance.getrandbits(128):032x}", "simulated", "local", "2026-01-01T00:00:00+00:00",
            "link" if self.settings.links else "rename",
        )  # fmt: skip
        create_pool(self.memory, header)
        self.truth.tips[0] = genesis(header.pool_id)
        self.memory.truth = self.truth
        self.memory.beat = self._beat
        self.truth.watch_expiry = self._expired
        self.truth.watch_mending = self._mended
        first = self.process("first", {})
        first.pool.configure(
            DEFAULT_QUEUE,
            QueueConfig(
                max_attempts=self.settings.max_attempts,
                max_expirations=self.settings.max_expirations,
                max_ready=self.settings.max_ready,
            ),
        )
        first.dead = first.files.dead = True

    # What is recorded.

    def note(self, who: str, moment: str, kind: str, path: str) -> None:
        """One file call, for the digest."""
        self.calls += 1
        self._history.update(f"{self.scheduler.now:.6f} {who} {moment} {kind} {path}\n".encode())
        if self._listen is not None and moment == "before":
            self._line(f"{who:<14} {kind} {path}")

    def say(self, who: str, what: str) -> None:
        self._history.update(what.encode())
        self._line(f"{who:<14} {what}")

    def _line(self, text: str) -> None:
        line = f"{self.scheduler.now:9.4f} {text}"
        self.trace.append(line)
        if self._listen is not None:
            self._listen(line)

    def digest(self) -> str:
        """Of every call, every answer, and every byte that is left on the mount."""
        final = self._history.copy()
        for path in self.memory.everything():
            final.update(path.encode() + self.memory.read(path))
        return final.hexdigest()

    def _beat(self, path: str, _data: Buffer) -> None:
        if path.startswith("sessions/"):
            self.beats[path.partition("/")[2].removesuffix(".json")].append(self.scheduler.now)

    def _expired(self, event: Expired, instance: str) -> None:
        """Clocks decide only when, but not at random: who beats is not taken for dead. What counts is what the
        observer could have seen when it began to look."""
        process = self.processes_of_sessions[event.session]
        looked = next(one.round_at for one in self.processes if one.instance == instance)
        silent = looked - max((at for at in self.beats[event.session] if at <= looked), default=-1e9)
        require(
            process.dead or silent > 0.6 * self.settings.lease_s,
            f"session {event.session} of {process.name} was expired ({event.reason}); it beat {silent:.2f} s before",
        )

    # Processes.

    def process(self, name: str, rates: dict[Fault, float], crash: bool = False) -> Process:
        number = len(self.processes)
        crash_at = (self.chance.randint(5, 600), self.chance.choice(["before", "within", "after"])) if crash else None
        plan = FaultPlan(seed=self.chance.getrandbits(32), rates=rates, crash_at=crash_at)  # type: ignore[arg-type]
        self.processes.append(Process(self, name, f"host-{number % _HOSTS}", plan))
        return self.processes[-1]

    def start(self, slot: Slot) -> None:
        if slot.process is not None:
            self.memory.forget(slot.process.files._hear_of_removal)
        slot.generation += 1
        name = f"{slot.role}{self.slots.index(slot)}.{slot.generation}"
        process = slot.process = self.process(name, self.settings.rates, crash=self.chance.random() < 0.3)
        for number in range(slot.strands):
            actor = slot.make(self, process)
            self.scheduler.spawn(f"{name}/{number}", actor.run, process, self.chance.uniform(0, 0.2))  # type: ignore[attr-defined]
        for thread, act in (("heart", self.beat), ("watch", self.watch)):
            self.scheduler.spawn(
                f"{name}/{thread}", partial(self.keep, process, act), process, self.chance.uniform(0, 0.5)
            )

    def beat(self, process: Process) -> None:
        process.pool.keeper.beat()

    def watch(self, process: Process) -> None:
        process.round_at = self.scheduler.now
        process.pool.keeper.watch()

    def keep(self, process: Process, act: Callable[[Process], object]) -> None:
        """A thread of the process's session, with the patience that the real one has."""
        while True:
            process.clock.sleep(min(self.settings.lease_s / 4, 1.0))
            try:
                act(process)
            except (OSError, StrawqError) as error:
                process.must_live()
                self.say(process.name, f"session: {type(error).__name__}: {error}")
                require(
                    not isinstance(error, StrawqError) or error.kind not in ("request_conflict", "bad_input"),
                    f"the session of {process.name} was refused: {error}",
                )

    # Misfortunes.

    def chaos(self) -> None:
        while True:
            self.scheduler.sleep(self.chance.expovariate(1 / self.settings.chaos_s))
            if self._cuts_at and self._cuts_at[0] <= self.scheduler.now:
                self._cuts_at.pop(0)
                if self.chance.random() < 0.5:
                    self.cut_power()
                else:
                    self.cut_at_publish = True
                continue
            alive = [slot for slot in self.slots if slot.process is not None and not slot.process.dead]
            if alive:
                self.strike(self.chance.choice(alive))

    def strike(self, slot: Slot) -> None:
        process = slot.process
        assert process is not None, "only a slot with a process is struck"
        kind = self.chance.choices(["kill", "freeze", "storm"], [3, 5, 1])[0]
        if kind == "kill":
            self.kill(slot)
        elif kind == "freeze":
            seconds = self.chance.choice([0.3, 1.0, 2.5]) * self.settings.lease_s * self.chance.uniform(0.5, 1.5)
            self.say(process.name, f"freezes for {seconds:.2f} s")
            process.frozen_until = self.scheduler.now + seconds
            if self.chance.random() < 0.5:
                process.clock.stop(seconds)
        elif self.settings.rates["eio"]:
            self.say(process.name, "its mount is sick")
            process.files.plan = FaultPlan(rates=_STORM)
            process.stormy = True
            self.scheduler.spawn(
                f"{process.name}/storm", lambda: self.calm(process), None, self.chance.uniform(0.1, 2.0)
            )

    def calm(self, process: Process) -> None:
        process.files.plan = FaultPlan(rates=self.settings.rates)
        self.scheduler.sleep(2.0)
        process.stormy = False

    def kill(self, slot: Slot) -> None:
        process = slot.process
        if process is not None and not process.dead:
            self.say(process.name, "is killed")
            process.files.dead = True
            self.scheduler.died(process)
        slot.again_at = self.scheduler.now + self.chance.uniform(0.05, 1.0)

    def cut_power(self) -> None:
        self.say("everything", "loses power")
        for slot in self.slots:
            self.kill(slot)
        newest = layout.entry(self.truth.seq)
        loose = self.truth.seq > self.truth.acknowledged_seq and not self.memory.is_durable(newest)
        torn = loose and self.chance.random() < self.settings.torn
        policies: list[CrashPolicy] = ["mixed", "keep"] if torn else ["drop", "mixed", "mixed"]
        self.memory.crash(self.chance, self.chance.choice(policies))
        if torn and self.memory.holds(newest):
            self.say("everything", f"has torn {newest}")
            self.memory.tear(newest, self.chance)
            self.torn_entries += 1
        else:
            torn = False
        self.power_cuts += 1
        self.truth.power_cut(self.truth.seq if torn else 0)

    def _mended(self) -> None:
        self.mended_at = self.scheduler.now

    def torn_lately(self) -> bool:
        """Whether a process that looked at the newest entry may have seen half of it, and have waited since."""
        return bool(self.truth.torn) or self.scheduler.now - self.mended_at < 4.0

    def published(self, path: str) -> None:
        """A name has appeared and nobody was told: a good moment for a power cut."""
        if self.cut_at_publish and path.startswith("log/"):
            self.cut_at_publish = False
            self.cut_power()
            raise Crash(f"the power went after the publish of {path}")

    def supervise(self) -> None:
        while True:
            for slot in self.slots:
                if slot.process is None or (slot.process.dead and self.scheduler.now >= slot.again_at):
                    self.start(slot)
            self.scheduler.sleep(0.2)

    def accepted(self) -> int:
        return sum(note.stage == "ready" for note in self.book.line.notes.values())

    # The run.

    def run(self) -> None:
        weather = Weather()
        self.scheduler.spawn("chaos", self.chaos, weather)
        self.scheduler.spawn("supervisor", self.supervise, weather)
        try:
            self.scheduler.run(self.settings.duration_s)
            self.scheduler.died(weather)
            self.cut_at_publish = False
            self.finish()
        finally:
            self.memory.truth = None
            self.scheduler.end()

    def finish(self) -> None:
        """No more faults: everything that was submitted can be brought to its end, and what is left is bounded."""
        from strawq.testing.simulation.ending import finish_all

        finish_all(self)


@dataclass(frozen=True)
class History:
    """What came of one seed."""

    seed: int
    digest: str
    entries: int
    calls: int
    accepted: int
    events: dict[str, int]
    ghosts: int
    power_cuts: int
    torn: int


def simulate(seed: int, listen: Callable[[str], Any] | None = None, settings: Settings | None = None) -> History:
    """Run the world of `seed`. `Violation` says what broke, and how to see it again; `listen` hears every line."""
    chosen = settings or draw(seed)
    with small(chosen.limits):
        world = World(chosen, listen)
        try:
            world.create()
            world.run()
        except Exception as error:
            where = "".join(traceback.format_exception(error)) if not isinstance(error, Violation) else str(error)
            lines = "\n".join(world.trace) if listen is None else ""
            raise Violation(
                f"{lines}\nseed {seed}, {world.scheduler.now:.4f} s, entry {world.truth.seq}: {where}\n"
                f"again: python -m tools.campaign --seed {seed}"
            ) from error
        counts = dict(sorted(world.book.counts.items()))
        return History(
            seed,
            world.digest(),
            world.truth.seq,
            world.calls,
            world.accepted(),
            counts,
            world.truth.ghosts,
            world.power_cuts,
            world.torn_entries,
        )
