"""What the processes of a simulation do: workers, producers, trainers; see `operators` for those that look after the
pool.

Each behaves as a good client does. `OutcomeUnknown`: ask again with the same request. "Nothing happened": try again or
leave it. `Fenced`: drop the work. Anything else that a public call raises is a fault of the pool, and ends the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from strawq.archives import save_archive
from strawq.errors import BadInput, Damaged, Fenced, Gone, OutcomeUnknown, RequestConflict, StrawqError
from strawq.handles import Batch, Held, Lease
from strawq.queue import Queue
from strawq.testing.simulation.book import Note, Promise
from strawq.testing.simulation.content import begun_anew, grown, in_memory, make_prompt, mistakes, tokens_of
from strawq.testing.simulation.host import Process
from strawq.testing.simulation.violation import Violation, require
from strawq.work import Change, Work

if TYPE_CHECKING:
    from strawq.testing.simulation.world import World

T = TypeVar("T")
PROMPTS_MAX = 40
SEALED = "is sealed"
_ASK_TRIES = 12


class Actor:
    """The strand of a process, with what every role needs."""

    def __init__(self, world: World, process: Process) -> None:
        self.world, self.process = world, process
        self.chance = process.chance
        self.book = world.book

    def wait(self, mean_s: float) -> None:
        self.process.clock.sleep(self.chance.expovariate(1 / mean_s))

    @property
    def queue(self) -> Queue:
        return self.process.pool.queue()

    def request(self) -> str:
        return f"r-{self.chance.getrandbits(64):016x}"

    def ask(self, call: Callable[[], T], bad_input: bool | str = False, gone: bool = False) -> T | None:
        """What `call` answers; None if it was refused or given up. `bad_input`: it may be told that it asks for
        something wrong (in these words, if it is a string)."""
        for _ in range(_ASK_TRIES):
            self.process.must_live()
            try:
                return call()
            except OutcomeUnknown:
                if self.chance.random() < 0.1:
                    return None
            except Fenced:
                return None
            except BadInput as error:
                words = bad_input if isinstance(bad_input, str) else ""
                if bad_input and words in str(error) and not isinstance(error, RequestConflict):
                    return None
                self.process.must_live()
                raise Violation(f"{self.process.name} asked for nothing wrong and was refused: {error}") from error
            except (Damaged, Gone) as error:
                self.process.must_live()
                if isinstance(error, Gone) and gone:
                    return None
                if not self.process.excused:
                    raise Violation(f"{self.process.name} was told of damage that is not there: {error}") from error
            except StrawqError:
                if self.chance.random() < 0.3:
                    return None
            self.wait(0.1)
        return None

    def check(self, group: Any, task: str, note: Note) -> None:
        wrong = mistakes(group, task, note.group_id, note.tokens)
        require(not wrong, f"{self.process.name} read task {task}: {'; '.join(wrong)}")

    def read(self, held: Held, current: Callable[[], bool]) -> Any | None:
        """The group as it is stored, held against the books; None if it is not this process's any more."""
        for _ in range(_ASK_TRIES):
            note = self.book.line.notes.get(held.task.id)
            if note is None or not current():
                return None
            want = Note(note.group_id, tokens=note.tokens)
            try:
                group = in_memory(self.process.pool.payloads.load(held))
            except StrawqError as error:
                self.process.must_live()
                if isinstance(error, Damaged | Gone) and current() and not self.process.excused:
                    raise Violation(f"{self.process.name} cannot read task {held.task.id}: {error}") from error
                self.wait(0.05)
                continue
            if not current():
                return None
            self.check(group, held.task.id, want)
            return group
        return None

    def is_current(self, lease: Lease) -> bool:
        note = self.book.line.notes.get(lease.task)
        owner = (lease.session, lease.attempt)
        return self.book.branch == lease.branch and note is not None and note.lease == owner

    def promise(self, changes: list[Change]) -> str:
        request = self.request()
        tokens = {change.work.task: tokens_of(change.group) for change in changes if change.group is not None}
        self.book.promises[request] = Promise(tokens=tokens)
        return request


class Worker(Actor):
    """Leases groups, grows them token by token, hands them in; sometimes asks twice, or with what it has lost."""

    def run(self) -> None:
        held: list[Work] = []
        old: list[Work] = []
        while True:
            self.wait(0.1)
            if len(held) < 3 and self.chance.random() < 0.6:
                held += self.lease(self.chance.choice([1, 1, 2]))
            if held:
                self.go_on(held, old)
            if old and self.chance.random() < 0.15:
                self.haunt(self.chance.choice(old))
            if self.chance.random() < 0.01:
                self.ask(lambda: self.process.pool.close())
                held.clear()

    def lease(self, count: int) -> list[Work]:
        request = self.request()
        answer = self.ask(lambda: self.queue.acquire(count, request_id=request))
        works = []
        for lease in answer or ():
            group = self.read(lease.held, functools.partial(self.is_current, lease))
            if group is not None:
                works.append(Work(lease, group))
        return works

    def go_on(self, held: list[Work], old: list[Work]) -> None:
        work = held.pop(self.chance.randrange(len(held)))
        outcomes = ["save", "save", "yield", "complete", "complete", "complete", "drop", "fail"]
        weights = [4, 4, 3, 3, 3, 3, 0.7, 1.5]
        changes = [self.change(work, self.chance.choices(outcomes, weights)[0])]
        if held and self.chance.random() < 0.2:
            second = held[-1]
            if (second.lease.session, second.lease.branch) == (work.lease.session, work.lease.branch):
                changes.append(self.change(held.pop(), "save"))
        request = self.promise(changes)
        receipt = self.ask(lambda: self.queue.report(changes, request_id=request))
        for change in changes:
            if receipt is not None and receipt.counts(change.work.task) and change.outcome == "save":
                held.append(change.work)
            else:
                old.append(change.work)
        del old[:-5]

    def change(self, work: Work, outcome: Any) -> Change:
        group = None
        if outcome in ("save", "yield", "complete"):
            count = (
                0
                if outcome != "save" and self.chance.random() < 0.2 and work.group.samples
                else self.chance.randint(1, 3)
            )
            version = self.world.truth.state.branch.meta.policy_version
            group = grown(work.group, work.task, work.lease.attempt, count, version, outcome == "complete")
        reason = self.chance.choice(["filtered", "engine error"])
        return Change(work, outcome, group, reason, retryable=self.chance.random() < 0.7)

    def haunt(self, work: Work) -> None:
        """Report work again that has ended, or that another has: it must not count."""
        changes = [self.change(work, self.chance.choice(["save", "complete", "drop", "yield"]))]
        request = self.promise(changes)
        self.ask(lambda: self.queue.report(changes, request_id=request))


class Producer(Actor):
    """Reads a data set in order. Two processes with one producer name race for each next piece."""

    name = "data"

    def run(self) -> None:
        while True:
            self.wait(0.4)
            if sum(not note.ended for note in self.book.line.notes.values()) < 14 and self.submitted() < PROMPTS_MAX:
                self.submit()

    def submitted(self) -> int:
        return len(self.book.line.notes)

    def submit(self) -> None:
        count, request = self.chance.randint(1, 4), self.request()
        if self.chance.random() < 0.2:
            names = [f"{request}:{i}" for i in range(count)]
            self.book.promises[request] = Promise(tuple(names))
            self.ask(lambda: self.queue.submit(map(make_prompt, names), request_id=request), bad_input=SEALED)
            return
        at = self.ask(lambda: self.queue.cursor(self.name))
        if at is None:
            return
        first = int(at or "0")
        names = [f"{self.name}:{first + i}" for i in range(count)]
        self.book.promises[request] = Promise(tuple(names))
        self.ask(
            lambda: self.queue.submit(
                map(make_prompt, names), producer=self.name, cursor=str(first + count), expect=at, request_id=request
            ),
            bad_input=SEALED,
        )


class Trainer(Actor):
    """Takes batches, reads every group, finishes or returns them, or dies with them."""

    consumer = "trainer"
    texts: dict[str, Note]

    def run(self) -> None:
        while True:
            self.wait(0.3)
            if self.chance.random() < 0.15:
                self.take_back()
            self.step(self.chance.randint(1, 3), self.chance.random() < 0.3, 0.7)

    def take_back(self) -> None:
        """Take complete groups out of what is ready: some begin anew, the others go back as they were."""
        request = self.request()
        answer = self.ask(lambda: self.queue.acquire(2, stages=("ready",), request_id=request))
        changes = []
        for lease in answer or ():
            group = self.read(lease.held, functools.partial(self.is_current, lease))
            if group is not None and self.chance.random() < 0.6:
                anew = begun_anew(group, lease.task)
                changes.append(Change(Work(lease, group), "yield", anew, rewrite=True))
            elif group is not None:
                changes.append(Change(Work(lease, group), "yield"))
        if changes:
            report = self.promise(changes)
            self.ask(lambda: self.queue.report(changes, request_id=report))

    def step(self, count: int, fewer: bool, finishing: float) -> bool:
        request = self.request()
        taken = self.ask(lambda: self.queue.take_batch(count, consumer=self.consumer, fewer=fewer, request_id=request))
        batch = taken.batch if taken is not None else None
        if batch is None:
            return False
        for held in batch.groups:
            self.read(held, lambda: self.holds(batch))
        pinned = self.chance.random() < 0.3 and self.pin(batch)
        if self.chance.random() < 0.15:
            self.archive(batch)
        if finishing < 1:
            self.wait(0.3)
        self.end(batch, finishing)
        if pinned:
            self.wait(0.5)
            self.read_pinned(batch)
        return True

    def pin(self, batch: Batch) -> bool:
        """Keep the batch's data beyond its end, for as long as this session lives."""
        self.texts = {held.task.id: self.book.line.notes[held.task.id] for held in batch.groups if self.holds(batch)}
        self.texts = {task: Note(note.group_id, tokens=note.tokens) for task, note in self.texts.items()}
        self.ask(lambda: self.process.pool.pin(batch.id, batch.groups), bad_input=True, gone=True)
        return batch.id in self.pins() and len(self.texts) == len(batch.groups)

    def archive(self, batch: Batch) -> None:
        """Keep the batch's groups beyond their end, whoever lives."""
        name, request = f"a{self.chance.randrange(4)}", self.request()
        self.ask(
            lambda: save_archive(self.process.pool, name, "rollout", batch.tasks, request_id=request), bad_input=True
        )

    def pins(self) -> set[str]:
        pins = self.world.truth.state.pins
        return {pin.name for pin in pins.values() if pin.session == self.process.pool.keeper.current}

    def read_pinned(self, batch: Batch) -> None:
        """Whatever has become of the batch meanwhile: what is pinned is there."""
        for held in batch.groups:
            if batch.id not in self.pins():
                return
            try:
                group = in_memory(self.process.pool.payloads.load(held))
            except StrawqError as error:
                self.process.must_live()
                gone = isinstance(error, Damaged | Gone) and batch.id in self.pins() and not self.process.excused
                require(not gone, f"{self.process.name} cannot read pinned task {held.task.id}: {error}")
                continue
            self.check(group, held.task.id, self.texts[held.task.id])
        self.ask(lambda: self.process.pool.unpin(batch.id))

    def holds(self, batch: Batch) -> bool:
        parcel = self.book.line.parcels.get(batch.id)
        owner = (parcel.session, parcel.delivery) if parcel is not None else ("", 0)
        return self.book.branch == batch.branch and owner == (batch.session, batch.delivery)

    def end(self, batch: Batch, finishing: float) -> None:
        if self.chance.random() >= finishing:
            if self.chance.random() < 0.7:
                request = self.request()
                self.ask(lambda: self.queue.return_batch(batch, request_id=request))
            return
        dropped = [(task, "too old") for task in batch.tasks if self.chance.random() < 0.1]
        request = self.request()
        self.ask(lambda: self.queue.finish_batch(batch, dropped=dropped, request_id=request))
