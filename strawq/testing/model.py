"""What a pool promises, as plain dictionaries: the model that a state machine compares the real pool with.

It knows nothing of logs, files or commits. A task is a row; a lease is a session's name in it; a branch is a
dictionary of rows; a checkpoint is a copy of one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from strawq.inspection import TaskCounts


@dataclass
class TaskRow:
    """One group. `session` holds it, `batch` contains it, `end` is how it ended; all empty if it is pending."""

    name: str
    saved: int = 0
    ready: bool = False
    session: str = ""
    attempt: int = 0
    batch: str = ""
    failed: bool = False
    failures: int = 0
    expirations: int = 0
    end: str = ""

    @property
    def pending(self) -> bool:
        return not (self.session or self.batch or self.failed or self.end)


@dataclass
class BatchRow:
    tasks: tuple[str, ...]
    consumer: str
    session: str
    delivery: int


@dataclass
class BranchRows:
    tasks: dict[str, TaskRow] = field(default_factory=dict)
    batches: dict[str, BatchRow] = field(default_factory=dict)
    cursors: dict[str, str] = field(default_factory=dict)
    versions: list[str] = field(default_factory=list)
    paused: bool = False


@dataclass
class PlainModel:
    """The whole pool. `alive` are sessions that nobody has ended."""

    max_attempts: int
    max_expirations: int
    active: str = "main"
    branches: dict[str, BranchRows] = field(default_factory=lambda: {"main": BranchRows()})
    checkpoints: dict[str, BranchRows] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)

    @property
    def rows(self) -> BranchRows:
        return self.branches[self.active]

    def holds(self, branch: str, session: str, task: str, attempt: int) -> bool:
        """Whether this lease is current: only then may anything that it says count."""
        row = self.rows.tasks.get(task) if branch == self.active else None
        return row is not None and session in self.alive and (row.session, row.attempt) == (session, attempt)

    def holds_batch(self, branch: str, session: str, batch: str, delivery: int) -> bool:
        row = self.rows.batches.get(batch) if branch == self.active else None
        return row is not None and (row.session, row.delivery) == (session, delivery)

    def leasable(self) -> tuple[list[str], list[str]]:
        """Pending tasks that are partial, and those that are fresh."""
        rows = [(key, row) for key, row in self.rows.tasks.items() if row.pending and not row.ready]
        return [key for key, row in rows if row.saved], [key for key, row in rows if not row.saved]

    def ready(self) -> list[str]:
        return [key for key, row in self.rows.tasks.items() if row.pending and row.ready]

    def waiting_batch(self, consumer: str) -> str:
        """The oldest batch of this consumer that nobody holds; empty if there is none."""
        names = [name for name, row in self.rows.batches.items() if not row.session and row.consumer == consumer]
        return min(names, key=lambda name: int(name[1:]), default="")

    def lease(self, task: str, session: str, attempt: int) -> None:
        row = self.rows.tasks[task]
        assert row.pending and not row.ready, f"{task} was not to be leased: {row}"
        assert attempt == row.attempt + 1, f"{task}: attempt {attempt} follows {row.attempt}"
        row.session, row.attempt = session, attempt
        self.alive.add(session)

    def report(self, task: str, outcome: str, saved: int, retryable: bool = True) -> None:
        row = self.rows.tasks[task]
        row.saved = max(row.saved, saved)
        if outcome == "save":
            return
        row.session = ""
        if outcome == "complete":
            assert not row.ready and not row.end, f"{task} was accepted twice"
            row.ready = True
        elif outcome == "drop":
            row.end = "dropped"
        elif outcome == "fail":
            row.failures += 1
            row.failed = not retryable or row.failures >= self.max_attempts

    def end_session(self, session: str, expired: bool) -> None:
        """Leases and batches come back; only a process that was lost is held against its tasks."""
        assert session, "every session has a name"
        self.alive.discard(session)
        for row in self.rows.tasks.values():
            if row.session == session:
                row.session = ""
                row.expirations += expired and not row.ready
                row.failed = expired and not row.ready and row.expirations >= self.max_expirations
        for batch in self.rows.batches.values():
            if batch.session == session:
                batch.session = ""

    def take(self, batch: str, tasks: tuple[str, ...], consumer: str, session: str, delivery: int) -> None:
        known = self.rows.batches.get(batch)
        if known is None:
            assert delivery == 1
            assert all(self.rows.tasks[task].pending and self.rows.tasks[task].ready for task in tasks)
        else:
            assert not known.session and delivery == known.delivery + 1
            assert (known.tasks, known.consumer) == (tasks, consumer)
        for task in tasks:
            self.rows.tasks[task].batch = batch
        self.rows.batches[batch] = BatchRow(tasks, consumer, session, delivery)
        self.alive.add(session)

    def end_batch(self, batch: str, trained: bool, dropped: tuple[str, ...] = ()) -> None:
        for task in self.rows.batches.pop(batch).tasks:
            row = self.rows.tasks[task]
            assert not row.end, f"{task} ended twice"
            row.batch = ""
            if trained:
                row.end = "dropped" if task in dropped else "trained"

    def may_drop(self, task: str) -> bool:
        """Nobody has it in hand: neither a worker nor the consumer of a batch."""
        row = self.rows.tasks[task]
        return not (self.rows.batches[row.batch].session if row.batch else row.session or row.end)

    def drop(self, task: str) -> None:
        """A batch that loses a group is broken up: its others are ready again."""
        row = self.rows.tasks[task]
        if row.batch:
            self.end_batch(row.batch, trained=False)
        row.failed, row.failures, row.expirations, row.end = False, 0, 0, "dropped"

    def may_publish(self, version: str) -> bool:
        """Words may always come; a number only if it is above every number before it, whatever stands between."""
        versions = self.rows.versions
        numbers = [int(old) for old in versions if old.isdigit()]
        return versions[-1:] == [version] or not version.isdigit() or int(version) > max(numbers, default=-1)

    def checkpoint(self, name: str) -> None:
        self.checkpoints[name] = copy.deepcopy(self.rows)

    def roll_back(self, target: str, branch: str) -> None:
        """A new branch as the target was, with nobody holding anything, paused as it is now; the old one stays as it
        is."""
        rows = copy.deepcopy(self.checkpoints[target] if target in self.checkpoints else self.branches[target])
        for task in rows.tasks.values():
            task.session = ""
        for batch in rows.batches.values():
            batch.session = ""
        rows.paused = self.rows.paused
        self.branches[branch], self.active = rows, branch

    def counts(self) -> TaskCounts:
        rows = list(self.rows.tasks.values())
        live = [row for row in rows if not row.end]

        def fits(row: TaskRow, stage: str, place: str) -> bool:
            at = "batch" if row.batch else "failed" if row.failed else "leased" if row.session else "pending"
            return at == place and stage == ("ready" if row.ready else "partial" if row.saved else "fresh")

        def count(stage: str, place: str) -> int:
            return sum(fits(row, stage, place) for row in live)

        return TaskCounts(
            fresh_pending=count("fresh", "pending"),
            fresh_leased=count("fresh", "leased"),
            partial_pending=count("partial", "pending"),
            partial_leased=count("partial", "leased"),
            ready=count("ready", "pending"),
            in_batch=sum(bool(row.batch) for row in live),
            trained=sum(row.end == "trained" for row in rows),
            dropped=sum(row.end == "dropped" for row in rows),
            failed=sum(row.failed for row in live),
            total=len(rows),
        )
