"""The state of a pool: what is leased, partial, ready, in a batch, and where the input stands. Its size follows live
work, not history.

Fresh prompts are ranges of rows, not entries; a task comes into being when its row is leased. Ended tasks leave
counters and a bounded ring of receipts. Derived indexes (order of work, who holds what, counts) are kept by the
tables' watches and never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, TypeVar

import msgspec
from sortedcontainers import SortedList

from strawq.core.events import AnyEvent
from strawq.core.tables import Cell, Journal, Table
from strawq.limits import DROP_REASONS, RECEIPTS_KEPT
from strawq.model import (
    UNVERSIONED,
    Archive,
    Batch,
    BranchRow,
    Checkpoint,
    End,
    Pause,
    Pin,
    Producer,
    QueueConfig,
    Receipt,
    Session,
    Slice,
    Stage,
    StoredObject,
    Submission,
    Task,
    policy_number,
)

Place = Literal["pending", "leased", "batch", "failed"]

K = TypeVar("K", str, int)

_RANK = {"ready": 0, "partial": 1, "fresh": 2}
_LAST = 1 << 62


def task_key(number: int, row: int) -> str:
    return f"{number}-{row}"


def task_order(number: int, row: int) -> int:
    """First in, first out: by submission, then by row."""
    return number << 32 | row


def place(task: Task) -> Place:
    if task.failed:
        return "failed"
    if task.batch:
        return "batch"
    return "leased" if task.session else "pending"


def pin_key(session: str, name: str) -> str:
    return f"{session}/{name}"


class QueueRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A queue's settings and counters. `dropped` counts by reason."""

    config: QueueConfig
    sealed: bool = False
    submitted: int = 0
    trained: int = 0
    dropped: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    accepted: int = 0
    tokens: int = 0
    expirations: int = 0
    receipts_first: int = 0
    receipts_next: int = 0


class Queue:
    """One queue of the active branch."""

    def __init__(self, journal: Journal, row: QueueRow) -> None:
        self.cell: Cell[QueueRow] = Cell(journal, row)
        self.producers: Table[str, Producer] = Table(journal)
        self.submissions: Table[int, Submission] = Table(journal, self._watch_submission)
        self.tasks: Table[str, Task] = Table(journal, self._watch_task)
        self.batches: Table[int, Batch] = Table(journal, self._watch_batch)
        self.receipts: Table[int, Receipt] = Table(journal, self._watch_receipt)
        # Derived.
        self.order: SortedList[tuple[int, int, int, str]] = SortedList()
        self.open_submissions: SortedList[int] = SortedList()
        self.held: dict[str, set[str]] = {}
        self.held_batches: dict[str, set[int]] = {}
        self.counts: dict[tuple[Stage, Place], int] = {}
        self.unstarted = 0
        self.receipt_of: dict[str, Receipt] = {}

    @property
    def row(self) -> QueueRow:
        return self.cell.row

    def change(self, **fields: object) -> None:
        self.cell.put(msgspec.structs.replace(self.cell.row, **fields))

    def count(self, stage: Stage, where: Place) -> int:
        return self.counts.get((stage, where), 0)

    def leased(self) -> int:
        return sum(self.count(stage, "leased") for stage in ("fresh", "partial", "ready"))

    def pending(self, stage: Stage) -> Iterator[str]:
        """Ids of pending tasks in the order of work, without the rows that nobody has leased yet."""
        rank = _RANK[stage]
        for key in self.order.irange((rank,), (rank + 1,)):
            yield key[3]

    def receipt(self, task: str) -> Receipt | None:
        return self.receipt_of.get(task)

    def end(self, task: Task, end: End, reason: str = "") -> None:
        """Remove the task, count it, and remember how it ended. The caller has released its parts."""
        self.tasks.drop(task.id)
        row = self.row
        self.receipts.put(row.receipts_next, Receipt(task.id, task.attempt, end, reason))
        first, following = row.receipts_first, row.receipts_next + 1
        while following - first > RECEIPTS_KEPT:
            self.receipts.drop(first)
            first += 1
        if end == "trained":
            self.change(trained=row.trained + 1, receipts_first=first, receipts_next=following)
        else:
            reasons = _counted(row.reasons, reason)
            self.change(dropped=row.dropped + 1, reasons=reasons, receipts_first=first, receipts_next=following)

    def _watch_task(self, old: Task | None, new: Task | None) -> None:
        if old is not None:
            where = place(old)
            self.counts[old.stage, where] -= 1
            if where == "pending":
                self.order.remove(_order_key(old))
            if old.session:
                _discard(self.held, old.session, old.id)
        if new is not None:
            where = place(new)
            self.counts[new.stage, where] = self.counts.get((new.stage, where), 0) + 1
            if where == "pending":
                self.order.add(_order_key(new))
            if new.session:
                self.held.setdefault(new.session, set()).add(new.id)

    def _watch_submission(self, old: Submission | None, new: Submission | None) -> None:
        if old is not None:
            self.unstarted -= old.end - old.next
        if new is not None:
            self.unstarted += new.end - new.next
        if old is None and new is not None:
            self.open_submissions.add(new.number)
        elif new is None and old is not None:
            self.open_submissions.remove(old.number)

    def _watch_batch(self, old: Batch | None, new: Batch | None) -> None:
        if old is not None:
            _discard(self.held_batches, old.session, old.number)
        if new is not None:
            self.held_batches.setdefault(new.session, set()).add(new.number)

    def _watch_receipt(self, old: Receipt | None, new: Receipt | None) -> None:
        if old is not None:
            self.receipt_of.pop(old.task, None)
        if new is not None:
            self.receipt_of[new.task] = new


def _order_key(task: Task) -> tuple[int, int, int, str]:
    version = _LAST if task.version == UNVERSIONED else task.version
    return (_RANK[task.stage], version, task.order, task.id)


def _discard(index: dict[str, set[K]], key: str, item: K) -> None:
    items = index[key]
    items.discard(item)
    if not items:
        del index[key]


def _counted(reasons: tuple[tuple[str, int], ...], reason: str) -> tuple[tuple[str, int], ...]:
    counts = dict(reasons)
    name = reason if reason in counts or len(counts) < DROP_REASONS else "other"
    counts[name] = counts.get(name, 0) + 1
    return tuple(sorted(counts.items()))


class Answered(msgspec.Struct, frozen=True, omit_defaults=True):
    """A command of the recent past and its answer."""

    request: str
    event: AnyEvent
    weight: int


class Meta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counters that no rollback turns back (ids are never used twice), and where lifetime stands."""

    submissions: int = 0
    batches: int = 0
    branches: int = 0
    epoch: int = 1
    closed_epoch: int = 0
    trims: int = 0
    floor: int = 0


class BranchMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What goes with the active branch besides its queues."""

    policy_version: str = ""
    highest_number: int = UNVERSIONED
    """Of the versions before `policy_version`, kept only while that one is a word: see `highest_number`."""
    pause: Pause | None = None
    answered_first: int = 0
    answered_next: int = 0
    answered_weight: int = 0
    forgotten_seq: int = 0
    """Sequence number of the newest answer that is no longer remembered."""


def highest_number(meta: BranchMeta) -> int:
    """The highest policy version with a number that was published on this branch or on the way to it; `UNVERSIONED`
    if none was. A number is its own mark, so the state of pools that never had a word is what it always was."""
    return max(meta.highest_number, policy_number(meta.policy_version))


class Branch:
    """The active branch."""

    def __init__(self, journal: Journal, meta: BranchMeta) -> None:
        self.cell: Cell[BranchMeta] = Cell(journal, meta)
        self.queues: Table[str, Queue] = Table(journal)
        self.answered: Table[int, Answered] = Table(journal, self._watch_answer)
        self.answer_of: dict[str, Answered] = {}

    @property
    def meta(self) -> BranchMeta:
        return self.cell.row

    def change(self, **fields: object) -> None:
        self.cell.put(msgspec.structs.replace(self.cell.row, **fields))

    def _watch_answer(self, old: Answered | None, new: Answered | None) -> None:
        if old is not None:
            self.answer_of.pop(old.request, None)
        if new is not None:
            self.answer_of[new.request] = new


class State:
    """Everything that the log says, folded up to entry `seq`."""

    def __init__(self) -> None:
        self.seq = 0
        self.journal = Journal()
        self.cell: Cell[Meta] = Cell(self.journal, Meta())
        self.sessions: Table[str, Session] = Table(self.journal)
        self.objects: Table[str, StoredObject] = Table(self.journal)
        self.checkpoints: Table[str, Checkpoint] = Table(self.journal)
        self.branches: Table[str, BranchRow] = Table(self.journal)
        self.pins: Table[str, Pin] = Table(self.journal)
        self.archives: Table[str, Archive] = Table(self.journal)
        self.active: Cell[str] = Cell(self.journal, "main")
        self.branch_cell: Cell[Branch] = Cell(self.journal, Branch(self.journal, BranchMeta()))
        self.branches.put("main", BranchRow("main"))
        self.journal.clear()

    @property
    def meta(self) -> Meta:
        return self.cell.row

    @property
    def branch(self) -> Branch:
        return self.branch_cell.row

    def change(self, **fields: object) -> None:
        self.cell.put(msgspec.structs.replace(self.cell.row, **fields))

    def hold(self, digest: str, by: int, incoming: dict[str, StoredObject] | None = None) -> None:
        """Add `by` references to an object; the row goes with the last of them."""
        row = self.objects.get(digest)
        if row is None:
            row = (incoming or {})[digest]
        count = row.count + by
        if count:
            self.objects.put(digest, msgspec.structs.replace(row, count=count))
        else:
            self.objects.drop(digest)

    def hold_all(self, counts: Mapping[str, int], incoming: dict[str, StoredObject] | None = None) -> None:
        """As `hold` for each object, once: what one event refers to lies in few objects."""
        for digest, by in counts.items():
            if by:
                self.hold(digest, by, incoming)

    def hold_parts(self, parts: Iterable[Slice], by: int, incoming: dict[str, StoredObject] | None = None) -> None:
        for part in parts:
            self.hold(part.object, by, incoming)
