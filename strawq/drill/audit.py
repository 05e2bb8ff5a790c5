"""What the processes of a drill were told, held against the history of the pool and against its end.

The rule: the history is folded here a second time, by plain dictionaries, without a line of `core`; so the audit does
not believe what it audits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from strawq.core import events as e
from strawq.drill.ledger import Line, read_ledgers
from strawq.drill.roles import Watched


@dataclass
class Account:
    """The history, folded. A holder is (attempt, session); an end is trained, dropped or failed."""

    rows: dict[int, int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    cursor: int = 0
    live: set[str] = field(default_factory=set)
    holder: dict[str, tuple[int, str]] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    batches: dict[str, tuple[int, str, tuple[str, ...]]] = field(default_factory=dict)
    deliveries: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    seq: int = 0
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def prompts(self) -> int:
        return sum(self.rows.values())

    def tasks(self) -> Iterator[tuple[str, int]]:
        """Each task that was submitted, and the number of its prompt."""
        for number, rows in self.rows.items():
            for row in range(rows):
                yield f"{number}-{row}", self.first[number] + row

    def fold(self, seq: int, event: e.AnyEvent) -> None:
        where = f"entry {seq}"
        match event:
            case e.Submitted():
                self._submitted(where, event)
            case e.Joined():
                self.live.add(event.session.id)
            case e.Left() | e.Expired():
                self._gone(event.session)
            case e.Acquired():
                self._acquired(where, event)
            case e.Reported():
                self._reported(where, event)
            case e.BatchTaken():
                self._taken(where, event)
            case e.BatchFinished():
                tasks = self._let_go(where, event.batch, event.attempt)
                for task in tasks:
                    if task in self.ended:
                        self.duplicated.append(f"{where}: task {task} is trained, and had ended as {self.ended[task]}")
                    self.ended[task] = "trained"
                self.finished[event.batch] = event.attempt
            case e.BatchReturned():
                self._let_go(where, event.batch, event.attempt)
            case _:
                return

    def _submitted(self, where: str, event: e.Submitted) -> None:
        if int(event.cursor) != self.cursor + event.rows:
            known = f"{where}: {event.rows} prompts move the cursor from {self.cursor} to {event.cursor}"
            (self.lost if int(event.cursor) > self.cursor + event.rows else self.duplicated).append(known)
        start = self.cursor
        for number, ref in zip(event.numbers, event.objects, strict=True):
            self.rows[number], self.first[number] = ref.rows, start
            start += ref.rows
        self.cursor = int(event.cursor)

    def _gone(self, session: str) -> None:
        self.live.discard(session)
        self.holder = {task: held for task, held in self.holder.items() if held[1] != session}
        for batch, (attempt, holder, tasks) in self.batches.items():
            if holder == session:
                self.batches[batch] = (attempt, "", tasks)

    def _acquired(self, where: str, event: e.Acquired) -> None:
        if event.session not in self.live:
            self.stale.append(f"{where}: leases for session {event.session}, which is not live")
        for task, attempt in event.leases:
            if task in self.holder or attempt <= self.attempts.get(task, 0):
                self.stale.append(f"{where}: task {task} is leased twice, as attempt {attempt}")
            if task in self.accepted or task in self.ended:
                self.duplicated.append(f"{where}: task {task} is leased after it was accepted or had ended")
            self.holder[task] = (attempt, event.session)
            self.attempts[task] = attempt

    def _reported(self, where: str, event: e.Reported) -> None:
        for item in event.items:
            if self.holder.get(item.task) != (item.attempt, event.session):
                self.stale.append(f"{where}: {item.outcome} of task {item.task}, attempt {item.attempt}, was accepted")
            if item.outcome == "save":
                continue
            self.holder.pop(item.task, None)
            if item.outcome == "complete":
                if item.task in self.accepted or item.task in self.ended:
                    self.duplicated.append(f"{where}: task {item.task} was accepted a second time")
                self.accepted[item.task] = item.attempt
            elif item.outcome == "drop":
                self.ended[item.task] = "dropped"
            elif item.task in event.dead:
                self.ended[item.task] = "failed"

    def _taken(self, where: str, event: e.BatchTaken) -> None:
        if event.attempt <= self.deliveries.get(event.batch, 0) or event.session not in self.live:
            self.stale.append(f"{where}: batch {event.batch} is taken as delivery {event.attempt}")
        elsewhere = {task for batch, held in self.batches.items() if batch != event.batch for task in held[2]}
        for task in event.tasks:
            if task in elsewhere or task in self.ended or task not in self.accepted:
                self.duplicated.append(f"{where}: task {task} of batch {event.batch} is not ready")
        self.deliveries[event.batch] = event.attempt
        self.batches[event.batch] = (event.attempt, event.session, event.tasks)

    def _let_go(self, where: str, batch: str, attempt: int) -> tuple[str, ...]:
        held = self.batches.pop(batch, None)
        if held is None or held[0] != attempt or held[1] not in self.live:
            self.stale.append(f"{where}: batch {batch} ends under delivery {attempt}, which is not current")
        return held[2] if held else ()


def fold_history(path: Path) -> Account:
    """The whole history as the watcher copied it."""
    account = Account()
    decoder = msgspec.json.Decoder(Watched)
    for line in path.read_bytes().splitlines():
        row = decoder.decode(line)
        if row.gap:
            account.other.append(f"entry {row.seq} was trimmed before the watcher read it: nothing is proven behind it")
        for event in row.events:
            account.fold(row.seq, event)
        account.seq = row.seq
    return account


def settle(account: Account, ledgers: Path) -> None:
    """Every prompt has ended once, and everything that a process was told is so."""
    indices = dict(account.tasks())
    account.lost += [f"task {task} never ended" for task in indices if task not in account.ended]
    account.duplicated += [f"task {task} ended, and nobody submitted it" for task in account.ended.keys() - indices]
    reads: dict[str, int] = {}
    saved: dict[str, int] = {}
    completed: dict[str, int] = {}
    for who, line in read_ledgers(ledgers):
        if line.index >= 0 and indices.get(line.task) != line.index:
            account.other.append(f"{who}: task {line.task} answers prompt {line.index}, not {indices.get(line.task)}")
        _compare(account, who, line, completed)
        if line.op == "read" and reads.setdefault(line.task, line.chunks) != line.chunks:
            account.other.append(f"{who}: task {line.task} had {reads[line.task]} chunks, and now {line.chunks}")
        if line.op in ("saved", "completed"):
            saved[line.task] = max(saved.get(line.task, 0), line.chunks)
    for task, end in account.ended.items():
        if end == "trained" and reads.get(task, -1) < saved.get(task, 0):
            account.lost.append(f"task {task}: {saved[task]} chunks were saved, {reads.get(task, 0)} reached a trainer")


def _compare(account: Account, who: str, line: Line, completed: dict[str, int]) -> None:
    if line.op == "fault":
        account.other.append(line.text)
    elif line.op == "submitted" and line.cursor > account.cursor:
        account.lost.append(f"{who} was told that its cursor is {line.cursor}; the pool's ends at {account.cursor}")
    elif line.op == "completed":
        if completed.setdefault(line.task, line.attempt) != line.attempt:
            account.duplicated.append(f"{who}: task {line.task} was acknowledged twice, under two attempts")
        elif account.accepted.get(line.task) != line.attempt:
            account.lost.append(f"{who} was told that task {line.task}, attempt {line.attempt}, is accepted; it is not")
    elif line.op == "dropped" and account.ended.get(line.task) != "dropped":
        account.lost.append(f"{who} was told that task {line.task} is dropped; it is not")
    elif line.op == "finished" and account.finished.get(line.batch) != line.delivery:
        account.lost.append(f"{who} was told that batch {line.batch} is finished; it is not")
