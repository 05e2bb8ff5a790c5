"""What may happen, written a second time and in another way than `core`: plain books about each task, kept from the
log by an observer that knows every command, every payload and every process.

The rule: each event that stands in the log was allowed to, says this module, from what came before and from what its
command said. It shares no line with `decide` and `apply`, so that a mistake there is not made here too.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from strawq.core import commands as c
from strawq.core import events as e
from strawq.testing.simulation.violation import Violation, require


@dataclass
class Note:
    """One task on one line of history. `tokens` are what the group holds when everything accepted is read back."""

    group_id: str
    stage: str = "fresh"
    lease: tuple[str, int] | None = None
    attempt: int = 0
    tokens: tuple[int, ...] = ()
    batch: str = ""
    failed: bool = False
    ended: str = ""
    lost: int = 0


@dataclass
class Parcel:
    tasks: tuple[str, ...]
    session: str
    delivery: int


@dataclass
class Line:
    """One line of history: what a branch or checkpoint holds."""

    notes: dict[str, Note] = field(default_factory=dict)
    parcels: dict[str, Parcel] = field(default_factory=dict)
    cursors: dict[str, int] = field(default_factory=dict)
    producers: dict[str, str] = field(default_factory=dict)
    paused: bool = False
    sealed: bool = False
    versions: tuple[int, ...] = ()


@dataclass
class Kept:
    """An archive: what its groups were at entry `seq`."""

    seq: int
    notes: dict[str, Note]


@dataclass
class Promise:
    """What the caller of a request means by it: the prompts of a submission, or the tokens each group will hold."""

    prompts: tuple[str, ...] = ()
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Book:
    """The books of one pool. `asked` before each commit, `happened` for each event of the true history, in order."""

    def __init__(self, max_expirations: int) -> None:
        self.commands: defaultdict[str, list[c.AnyCommand]] = defaultdict(list)
        self.promises: dict[str, Promise] = {}
        self.askers: defaultdict[str, set[str]] = defaultdict(set)
        self.denied: dict[str, str] = {}
        self.unknown: set[str] = set()
        self._max_expirations = max_expirations
        self.restart()

    def restart(self) -> None:
        """Empty books, but what was asked and promised: for a history that is told again from its start."""
        self.line = Line()
        self.branch = "main"
        self.kept: dict[str, Line] = {}
        self.branches: dict[str, Line] = {}
        self.archives: dict[str, Kept] = {}
        self.taken: defaultdict[str, list[int]] = defaultdict(list)
        self.seq = 0
        self.sessions: set[str] = set()
        self.numbers: set[int] = set()
        self.batches: set[int] = set()
        self.events: dict[str, list[tuple[int, e.AnyEvent]]] = {}
        self.counts: defaultdict[str, int] = defaultdict(int)

    def asked(self, command: c.AnyCommand, who: str) -> None:
        self.askers[command.request].add(who)
        self.commands[command.request].append(command)
        self.denied.pop(command.request, None)

    def happened(self, event: e.AnyEvent, seq: int) -> None:
        self.seq = seq
        commands = self.commands[event.request]
        require(bool(commands), f"entry {seq} holds an event that nobody asked for: {event}")
        require(
            event.request not in self.denied,
            f"entry {seq} holds an event of request {event.request}, whose caller was told that nothing happened "
            f"({self.denied.get(event.request)})",
        )
        known = self.events.setdefault(event.request, [])
        branches = {getattr(command, "branch", "") for command in commands}
        require(
            isinstance(event, e.Submitted | e.Checkpointed | e.RolledBack | e.Sealed)
            or branches <= {""}
            or self.branch in branches,
            f"entry {seq} holds an event of branch {branches} while {self.branch} is active: {event}",
        )
        self.counts[type(event).__name__] += 1
        rule = getattr(self, f"_{type(event).__name__.lower()}", None)
        if rule is not None:
            rule(event, commands)
        known.append((seq, event))

    # One rule for each kind of event.

    def _joined(self, event: e.Joined, _: Any) -> None:
        require(event.session.id not in self.sessions, f"session {event.session.id} joined twice")
        self.sessions.add(event.session.id)

    def _left(self, event: e.Left, _: Any) -> None:
        self._release(event.session)

    def _expired(self, event: e.Expired, _: Any) -> None:
        for note in self.line.notes.values():
            if note.lease and note.lease[0] == event.session and note.stage != "ready":
                note.lost += 1
                note.failed = note.lost >= self._max_expirations
        self._release(event.session)

    def _release(self, session: str) -> None:
        require(session in self.sessions, f"session {session} ended twice")
        self.sessions.discard(session)
        for note in self.line.notes.values():
            if note.lease and note.lease[0] == session:
                note.lease = None
        for parcel in self.line.parcels.values():
            if parcel.session == session:
                parcel.session = ""

    def _submitted(self, event: e.Submitted, commands: Iterable[c.Submit]) -> None:
        promise = self.promises[event.request]
        require(not self.line.sealed, "prompts entered a sealed queue")
        require(not set(event.numbers) & self.numbers, f"submission numbers {event.numbers} are used twice")
        self.numbers.update(event.numbers)
        require(event.rows == len(promise.prompts), f"{event.rows} prompts entered, {len(promise.prompts)} were given")
        keys = [f"{n}-{row}" for n, ref in zip(event.numbers, event.objects, strict=True) for row in range(ref.rows)]
        for key, group_id in zip(keys, promise.prompts, strict=True):
            self.line.notes[key] = Note(group_id)
        if event.producer:
            self._moved(event, promise, list(commands))

    def _moved(self, event: e.Submitted, promise: Promise, commands: list[c.Submit]) -> None:
        """Cursor and prompts move together: the first prompt is the one that the cursor stood at."""
        before = self.line.cursors.get(event.producer, 0)
        expected = tuple(f"{event.producer}:{before + i}" for i in range(len(promise.prompts)))
        require(
            promise.prompts == expected,
            f"producer {event.producer} stood at {before} and submitted {promise.prompts}: prompts are lost or doubled",
        )
        require(
            any(command.expect in (None, self.line.producers.get(event.producer, "")) for command in commands),
            f"producer {event.producer} moved its cursor from another place than it expected",
        )
        self.line.cursors[event.producer] = before + len(promise.prompts)
        self.line.producers[event.producer] = event.cursor

    def _acquired(self, event: e.Acquired, commands: Iterable[c.Acquire]) -> None:
        asked = [set(command.stages) for command in commands]
        require(not self.line.paused or {"ready"} in asked, "a lease was given while admission is paused")
        require(event.session in self.sessions, f"session {event.session} is not live and was given leases")
        for key, attempt in event.leases:
            note = self.line.notes.get(key)
            if note is None:
                raise Violation(f"task {key} was leased and never submitted on branch {self.branch}")
            require(self._pending(note), f"task {key} was leased to {event.session} while it is {note}")
            require(
                any(note.stage in stages for stages in asked),
                f"task {key} is {note.stage} and was leased to one who did not ask for that",
            )
            require(attempt > note.attempt, f"task {key} was leased with attempt {attempt} after {note.attempt}")
            note.lease, note.attempt = (event.session, attempt), attempt

    @staticmethod
    def _pending(note: Note) -> bool:
        return note.lease is None and not (note.batch or note.failed or note.ended)

    def _reported(self, event: e.Reported, _: Any) -> None:
        promise = self.promises.get(event.request, Promise())
        for item in event.items:
            note = self.line.notes.get(item.task)
            if note is None:
                raise Violation(f"task {item.task} was reported and never submitted on branch {self.branch}")
            require(
                note.lease == (event.session, item.attempt),
                f"a {item.outcome} of task {item.task} by {event.session}, attempt {item.attempt}, was accepted; its "
                f"lease is {note.lease} ({note})",
            )
            require(event.session in self.sessions, f"session {event.session} is not live and its report was accepted")
            before = note.stage
            if item.parts:
                note.tokens = promise.tokens[item.task]
                note.stage = "partial"
            if item.outcome != "save":
                note.lease = None
            if item.outcome == "complete":
                require(before != "ready", f"task {item.task} was accepted twice")
                note.stage = "ready"
            elif item.outcome == "drop":
                note.ended = "dropped"
            elif item.outcome == "fail":
                note.failed = item.task in event.dead

    def _versionpublished(self, event: e.VersionPublished, _: Any) -> None:
        if event.version.isdigit():
            number, before = int(event.version), self.line.versions
            require(all(number > old for old in before), f"version {number} was published on a line that had {before}")
            self.line.versions = (*before, number)

    def _sealed(self, event: e.Sealed, _: Any) -> None:
        self.line.sealed = event.sealed

    def _batchtaken(self, event: e.BatchTaken, commands: Iterable[c.TakeBatch]) -> None:
        require(event.session in self.sessions, f"session {event.session} is not live and was given a batch")
        parcel = self.line.parcels.get(event.batch)
        if parcel is not None:
            require(not parcel.session, f"batch {event.batch} is held by {parcel.session} and was delivered again")
            require(parcel.tasks == event.tasks, f"batch {event.batch} holds other groups when delivered again")
            require(event.attempt > parcel.delivery, f"batch {event.batch} was delivered again under the same number")
            parcel.session, parcel.delivery = event.session, event.attempt
            return
        require(event.number not in self.batches, f"batch {event.batch} was delivered after its end")
        self.batches.add(event.number)
        waiting = [
            key for key, note in self.line.notes.items() if note.stage != "ready" and not (note.ended or note.failed)
        ]
        require(
            any(len(event.tasks) == command.count or command.fewer for command in commands)
            or (self.line.sealed and not waiting),
            f"batch {event.batch} is smaller than was asked for, and is not the last: {waiting[:4]} are under way",
        )
        for key in event.tasks:
            note = self.line.notes[key]
            require(self._pending(note) and note.stage == "ready", f"task {key} went into {event.batch} while {note}")
            note.batch = event.batch
        self.line.parcels[event.batch] = Parcel(event.tasks, event.session, event.attempt)

    def waiting(self) -> list[str]:
        """Tasks of batches that wait to be delivered again."""
        return [key for parcel in self.line.parcels.values() if not parcel.session for key in parcel.tasks]

    def _held(self, batch: str, commands: Iterable[Any]) -> Parcel:
        parcel = self.line.parcels.get(batch)
        if parcel is None:
            raise Violation(f"batch {batch} was finished or returned and is not open on branch {self.branch}")
        require(
            any((parcel.session, parcel.delivery) == (command.session, command.attempt) for command in commands),
            f"batch {batch} is held by {parcel.session or 'nobody'}, delivery {parcel.delivery}, and another ended it",
        )
        return parcel

    def _batchfinished(self, event: e.BatchFinished, commands: Iterable[c.FinishBatch]) -> None:
        dropped = dict(event.dropped)
        for key in self._held(event.batch, commands).tasks:
            note = self.line.notes[key]
            note.batch, note.ended = "", "dropped" if key in dropped else "trained"
        del self.line.parcels[event.batch]

    def _batchreturned(self, event: e.BatchReturned, commands: Iterable[c.ReturnBatch]) -> None:
        for key in self._held(event.batch, commands).tasks:
            self.line.notes[key].batch = ""
        del self.line.parcels[event.batch]

    def _failedretried(self, event: e.FailedRetried, _: Any) -> None:
        for key in event.tasks:
            require(self.line.notes[key].failed, f"task {key} is no dead letter and was retried as one")
            self.line.notes[key].failed, self.line.notes[key].lost = False, 0

    def _tasksdropped(self, event: e.TasksDropped, _: Any) -> None:
        for batch in {self.line.notes[key].batch for key in event.tasks} - {""}:
            parcel = self.line.parcels.pop(batch)
            require(not parcel.session, f"a task was dropped out of batch {batch}, which {parcel.session} has in hand")
            for key in parcel.tasks:
                self.line.notes[key].batch = ""
        for key in event.tasks:
            note = self.line.notes[key]
            require(note.failed or self._pending(note), f"task {key} was dropped while {note}")
            note.ended, note.failed = "dropped", False

    def _paused(self, _event: e.Paused, _: Any) -> None:
        self.line.paused = True

    def _resumed(self, _event: e.Resumed, _: Any) -> None:
        self.line.paused = False

    def _checkpointed(self, event: e.Checkpointed, _: Any) -> None:
        require(event.name not in self.kept, f"checkpoint {event.name} was taken twice")
        require(event.seq == self.seq, f"checkpoint {event.name} says that it is of entry {event.seq}")
        self.taken[event.name].append(event.seq)
        self.kept[event.name] = copy.deepcopy(self.line)

    def _checkpointdropped(self, event: e.CheckpointDropped, _: Any) -> None:
        del self.kept[event.name]

    def _rolledback(self, event: e.RolledBack, _: Any) -> None:
        source = self.kept.get(event.target) or self.branches[event.target]
        self.branches[self.branch] = self.line
        require(event.branch not in self.branches, f"branch {event.branch} was made twice")
        paused = self.line.paused
        require(event.paused == paused, f"the rollback says paused={event.paused}, and the pool was {paused}")
        self.line, self.branch = copy.deepcopy(source), event.branch
        self.line.paused = paused
        for note in self.line.notes.values():
            note.lease = None
        for parcel in self.line.parcels.values():
            parcel.session = ""

    def _branchdropped(self, event: e.BranchDropped, _: Any) -> None:
        require(event.name != self.branch, f"branch {event.name} was dropped while active")
        del self.branches[event.name]

    def _archived(self, event: e.Archived, _: Any) -> None:
        require(event.name not in self.archives, f"archive {event.name} was made twice")
        notes = {key: self.line.notes[key] for key in event.tasks}
        for key, note in notes.items():
            require(not note.ended, f"archive {event.name} keeps task {key}, which has ended")
        self.archives[event.name] = Kept(
            self.seq, {key: Note(note.group_id, tokens=note.tokens) for key, note in notes.items()}
        )

    def _archivedropped(self, event: e.ArchiveDropped, _: Any) -> None:
        del self.archives[event.name]
