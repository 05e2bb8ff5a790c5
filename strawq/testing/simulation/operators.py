"""Those who look after a simulated pool: an operator, collectors that also trim and repair, an auditor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from strawq.archives import delete_archive, held_by
from strawq.errors import Damaged, Gone, StrawqError
from strawq.garbage import collect_garbage
from strawq.handles import Held
from strawq.merging import merge_objects
from strawq.testing.simulation.actors import Actor
from strawq.testing.simulation.book import Note
from strawq.testing.simulation.content import in_memory
from strawq.testing.simulation.violation import require
from strawq.trimming import trim_log


class Operator(Actor):
    """Checkpoints, rolls back, pauses, publishes versions, looks after dead letters."""

    KINDS: ClassVar[dict[str, int]] = {
        "checkpoint": 5,
        "rollback": 6,
        "drop checkpoint": 2,
        "drop branch": 3,
        "pause": 1,
        "acknowledge": 1,
        "publish version": 2,
        "retry": 4,
        "drop": 2,
        "snapshot": 1,
        "seal": 1,
        "read archive": 2,
        "drop archive": 1,
    }

    def run(self) -> None:
        self.version = 0
        while True:
            self.wait(0.15)
            pool = self.ask(lambda: self.process.pool)
            if pool is None:
                continue
            if self.book.line.sealed and self.chance.random() < 0.3:
                self.seal(False)
            kind = self.chance.choices(list(self.KINDS), list(self.KINDS.values()))[0]
            getattr(self, kind.replace(" ", "_"))()

    def do(self, call: Callable[[str], object]) -> None:
        """With a request id: asked again after a lost reply, it has happened once and is answered."""
        request = self.request()
        self.ask(lambda: call(request), bad_input=True)

    def pick(self, names: list[str], act: Callable[..., object]) -> None:
        if names:
            name = self.chance.choice(names)
            self.do(lambda request: act(name, request_id=request))

    def checkpoint(self) -> None:
        name = f"c{self.chance.randrange(6)}"
        taken: list[int] = []
        self.do(lambda request: taken.append(self.process.pool.checkpoint(name, request_id=request)))
        events = self.book.taken.get(name, [])
        require(not taken or taken[0] in events, f"checkpoint {name} was taken at {events}, and {taken} was answered")

    def rollback(self) -> None:
        if self.chance.random() < 0.6:
            self.pick([*self.book.kept, *self.book.branches], self.process.pool.rollback)

    def drop_checkpoint(self) -> None:
        self.pick(list(self.book.kept), self.process.pool.drop_checkpoint)

    def drop_branch(self) -> None:
        self.pick(list(self.book.branches), self.process.pool.drop_branch)

    def pause(self) -> None:
        self.do(lambda request: self.process.pool.pause(request_id=request))
        self.wait(0.4)
        self.do(lambda request: self.process.pool.resume(request_id=request))

    def acknowledge(self) -> None:
        self.ask(self.process.pool.acknowledge_pause, bad_input=True)

    def publish_version(self) -> None:
        """Numbers and words in turn: a word does not open the way back."""
        self.version += 1
        version = self.version // 2 if self.version % 4 else f"word-{self.version}"
        self.do(lambda request: self.process.pool.publish_version(version, request_id=request))

    def snapshot(self) -> None:
        self.ask(self.process.pool.snapshot)

    def seal(self, sealed: bool = True) -> None:
        self.do(lambda request: self.queue.seal(sealed, request_id=request))

    def drop_archive(self) -> None:
        self.pick(list(self.book.archives), lambda name, **given: delete_archive(self.process.pool, name, **given))

    def read_archive(self) -> None:
        """Whatever has become of the groups meanwhile: what is kept is there, as it was."""
        names = list(self.book.archives)
        name = self.chance.choice(names) if names else ""
        found = self.ask(lambda: held_by(self.process.pool, name), bad_input=True)
        if found is None:
            return
        archive, groups = found
        for held in groups:
            try:
                group = in_memory(self.process.pool.payloads.load(held))
            except StrawqError as error:
                self.process.must_live()
                kept = self.book.archives.get(name)
                there = kept is not None and kept.seq == archive.seq and not self.process.excused
                gone = isinstance(error, Damaged | Gone) and there
                require(not gone, f"{self.process.name} cannot read task {held.task.id} of archive {name}: {error}")
                continue
            kept = self.book.archives.get(name)
            if kept is not None and kept.seq == archive.seq:
                self.check(group, held.task.id, kept.notes[held.task.id])

    def retry(self) -> None:
        self.dead_letters("retry")

    def drop(self) -> None:
        self.dead_letters("drop")

    def dead_letters(self, kind: str) -> None:
        letters = self.ask(lambda: self.queue.dead_letters()) or []
        tasks = [task.id for task in letters if self.chance.random() < 0.7]
        if tasks and kind == "retry":
            self.do(lambda request: self.queue.retry_failed(tasks, request_id=request))
        elif tasks and self.chance.random() < 0.3:
            self.do(lambda request: self.queue.drop_tasks(tasks, "hopeless", request_id=request))
        elif kind == "drop":
            self.pick(self.book.waiting(), lambda task, **given: self.queue.drop_tasks([task], "damaged", **given))


class Collector(Actor):
    """Garbage collection, trimming, merging and repair; two of them may run at once."""

    def run(self) -> None:
        while True:
            self.wait(0.7)
            if self.world.truth.torn:
                self.ask(lambda: self.process.pool.log.void_tip())
            elif self.chance.random() < 0.2:
                self.ask(lambda: merge_objects(self.process.pool))
            elif self.chance.random() < 0.5:
                patience = self.chance.choice([0.0, 0.1, 0.5])
                self.ask(lambda: collect_garbage(self.process.pool, wait_seconds=patience))  # noqa: B023
            else:
                keep = self.chance.choice([0, 0, 3, 10])
                self.ask(lambda: trim_log(self.process.pool, keep_entries=keep, snapshots_kept=2))  # noqa: B023


class Auditor(Actor):
    """Opens the pool as a newcomer, and reads all that there is."""

    def run(self) -> None:
        while True:
            self.wait(1.5)
            self.ask(self.look)

    def look(self) -> None:
        pool = self.process.pool
        held: list[Held] = []
        notes: dict[str, Note] = {}

        def see(machine: Any) -> None:
            state = machine.state
            self.world.truth.follows(machine.seq, pool.log.tip, self.process.name)
            self.world.truth.same(state, self.process.name)
            if machine.seq == self.world.truth.seq:
                for name in state.branch.queues:
                    for task in state.branch.queues[name].tasks.values():
                        note = self.book.line.notes[task.id]
                        notes[task.id] = Note(note.group_id, tokens=note.tokens)
                        held.append(Held(task, {part.object: state.objects[part.object] for part in task.parts}))

        pool.log.refresh(see)
        for one in held:
            try:
                group = in_memory(pool.payloads.load(one))
            except Gone:
                reached = self.world.truth.state.objects
                if all(part.object in reached for part in one.task.parts):
                    raise
                continue
            self.check(group, one.task.id, notes[one.task.id])
        pool.inspect()
