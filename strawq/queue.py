"""One queue of a pool: submit prompts, lease groups, save and complete them, take batches.

Every call that changes something is one commit. It takes an optional `request_id`: asked again with the same content
it returns the first answer; the same id with other content is `RequestConflict`. "Not now" is an answer with a
`status`, not an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from strawq.core import commands as c
from strawq.core import events as e
from strawq.core.commands import ReportItem
from strawq.core.machine import Machine
from strawq.core.state import State
from strawq.errors import BadInput, Fenced, Gone, StrawqError
from strawq.handles import Batch, Held, Lease, Leases, Reported, Submitted, Taken
from strawq.inspection import TaskCounts, count_tasks
from strawq.model import ObjectRef, Slice, Stage, Task
from strawq.payloads import require_prompts
from strawq.storage.files import Buffer
from strawq.work import Change, Work

if TYPE_CHECKING:
    from strawq.pool import Pool
    from strawq.samples import Group, Prompt

LEASES_PER_COMMAND = 1024


class Queue:
    """See the module's docstring. Safe from many threads; `strawq.aio.AsyncQueue` is its twin for event loops."""

    def __init__(self, pool: Pool, name: str) -> None:
        self.pool = pool
        self.name = name

    # Input.

    def submit(
        self,
        prompts: Iterable[Prompt],
        *,
        producer: str = "",
        cursor: str = "",
        expect: str | None = None,
        request_id: str | None = None,
    ) -> Submitted:
        """Add prompts, in order. The producer's `cursor` moves in the same commit; with `expect`, only from that
        value (`Fenced` otherwise), so that two producers never submit the same rows."""
        prompts = list(prompts)
        require_prompts(prompts)
        publications = list(self.pool.payloads.split_prompts(prompts))
        request = self._request(request_id)

        def commit(objects: tuple[ObjectRef, ...], inline: dict[str, Buffer]) -> Any:
            command = c.Submit(
                request=request, queue=self.name, objects=objects, producer=producer, cursor=cursor, expect=expect
            )
            return self.pool.commit(command, inline)

        event = self.pool.payloads.publish(publications, commit)
        return Submitted(event.numbers, event.rows, event.cursor)

    def move_cursor(
        self, producer: str, cursor: str, *, expect: str | None = None, request_id: str | None = None
    ) -> None:
        """Set a producer's cursor without a prompt: a note that goes with the branch, its checkpoints and rollbacks."""
        command = c.Submit(
            request=self._request(request_id), queue=self.name, objects=(), producer=producer, cursor=cursor,
            expect=expect,
        )  # fmt: skip
        self.pool.commit(command)

    def cursor(self, producer: str) -> str:
        """Where the producer stands; empty if it has never submitted."""
        known = self._look(lambda state: state.branch.queues[self.name].producers.get(producer))
        return known.cursor if known else ""

    def seal(self, sealed: bool = True, *, request_id: str | None = None) -> None:
        """Say that no further prompts will come: then the last batch may be smaller, and `acquire` ends with
        `sealed`."""
        self.pool.commit(c.Seal(request=self._request(request_id), queue=self.name, sealed=sealed))

    # Leases.

    def acquire(
        self, count: int = 1, *, stages: Sequence[Stage] = ("partial", "fresh"), request_id: str | None = None
    ) -> Leases:
        """Lease up to `count` groups: partial before fresh, then by the oldest policy version, then first in, first
        out."""
        command = c.Acquire(
            request=self._request(request_id),
            queue=self.name,
            branch=self.pool.branch(),
            session=self.pool.keeper.require(),
            count=min(count, LEASES_PER_COMMAND),
            stages=tuple(stages),
        )
        answer = self._leasing(command, self._leases)
        return Leases(answer.status, (), answer.detail) if isinstance(answer, e.Refusal) else answer

    def _leases(self, machine: Machine, event: e.Acquired) -> Leases:
        tasks = machine.state.branch.queues[self.name].tasks
        branch = machine.state.active.row
        leases = []
        for key, attempt in event.leases:
            task = tasks.get(key)
            if task is not None and (task.session, task.attempt) == (event.session, attempt):
                held = _held(machine.state, task)
                leases.append(Lease(self.name, branch, event.session, key, attempt, held))
        return Leases("acquired", tuple(leases))

    def leased(self, stages: Sequence[Stage] = ("ready", "partial", "fresh")) -> tuple[Lease, ...]:
        """What this process's session holds of these stages, by the log: the way back to leases whose reply was
        lost."""
        session = self.pool.keeper.require()

        def view(machine: Machine) -> tuple[Lease, ...]:
            tasks = machine.state.branch.queues[self.name].tasks.values()
            branch = machine.state.active.row
            return tuple(
                Lease(self.name, branch, session, task.id, task.attempt, _held(machine.state, task))
                for task in tasks
                if task.session == session and task.stage in stages
            )

        held: tuple[Lease, ...] = self.pool.log.refresh(view)
        return held

    def open(self, lease: Lease) -> Work:
        """Read what is saved of the group. `Damaged` or `Gone` name the object if that is not possible."""
        return Work(lease, self.pool.payloads.load(lease.held))

    def report(self, changes: Sequence[Change], *, request_id: str | None = None) -> Reported:
        """Report many pieces of work in one commit, normally with one object written. Work whose lease is not current
        does not count: it is named in the receipt; if that is true of all of it, `Fenced` is raised."""
        if not changes:
            raise BadInput("a report names at least one piece of work")
        first = changes[0].work.lease
        if any(
            change.work.lease.branch != first.branch or change.work.lease.session != first.session for change in changes
        ):
            raise BadInput("one report is of one session on one branch; report them apart")
        publications, items = self._grown(changes)
        request = self._request(request_id)

        def commit(objects: tuple[ObjectRef, ...], inline: dict[str, Buffer]) -> Any:
            command = c.Report(
                request=request,
                queue=self.name,
                branch=first.branch,
                session=first.session,
                items=tuple(items),
                objects=objects,
            )
            return self.pool.commit(command, inline)

        event: e.Reported = self.pool.payloads.publish(publications, commit)
        receipt = _receipt(event)
        for change, item in zip(changes, items, strict=True):
            if change.group is not None and receipt.counts(change.work.task):
                change.work.group = change.group
                change.work.parts += len(item.parts)
        return receipt

    def _grown(self, changes: Sequence[Change]) -> tuple[list[Any], list[ReportItem]]:
        """The publications (normally one) of everything new in `changes`, and the items that refer to their rows."""
        from strawq.samples import oldest_version, token_count
        from strawq.storage.growth import grow_group
        from strawq.storage.publications import encode_publications

        rows = [
            grow_group(change.work.group, change.group, rewrite=change.rewrite) if change.group is not None else []
            for change in changes
        ]
        stage = self.pool.payloads.stage_pack
        publications = encode_publications([part for part in rows if part], stage) if any(rows) else []
        parts = (Slice(written.digest, *rows) for written in publications for rows in written.slices)
        items = []
        for change, new in zip(changes, rows, strict=True):
            lease = change.work.lease
            if not new:
                items.append(
                    ReportItem(lease.task, lease.attempt, change.outcome, (), 0, -1, change.reason, change.retryable)
                )
                continue
            tokens = max(0, token_count(change.group) - token_count(change.work.group))
            version = oldest_version(change.group)
            items.append(
                ReportItem(
                    lease.task,
                    lease.attempt,
                    change.outcome,
                    (next(parts),),
                    tokens,
                    version,
                    change.reason,
                    change.retryable,
                    change.work.parts,
                )
            )
        return publications, items

    def save(self, work: Work, group: Group, *, request_id: str | None = None) -> Reported:
        """Make progress durable under the lease, which goes on."""
        return self.report([Change(work, "save", group)], request_id=request_id)

    def yield_(self, work: Work, group: Group | None = None, *, request_id: str | None = None) -> Reported:
        """Give the lease back, with what has been generated; anyone may go on from there."""
        return self.report([Change(work, "yield", group)], request_id=request_id)

    def complete(self, work: Work, group: Group | None = None, *, request_id: str | None = None) -> Reported:
        """Hand the complete group in. At most one result of a group stands, whoever else has tried."""
        return self.report([Change(work, "complete", group)], request_id=request_id)

    def drop(self, work: Work, reason: str, *, request_id: str | None = None) -> Reported:
        """End the group without training on it (a filter refused it, say); counted by reason."""
        return self.report([Change(work, "drop", None, reason)], request_id=request_id)

    def fail(self, work: Work, reason: str, *, retryable: bool = True, request_id: str | None = None) -> Reported:
        """This attempt failed. After `max_attempts`, or if not `retryable`, the task is a dead letter."""
        return self.report([Change(work, "fail", None, reason, retryable)], request_id=request_id)

    # Batches.

    def take_batch(
        self, count: int, *, consumer: str = "trainer", fewer: bool = False, request_id: str | None = None
    ) -> Taken:
        """A batch that an earlier holder of this consumer name left unfinished, else `count` ready groups."""
        command = c.TakeBatch(
            request=self._request(request_id),
            queue=self.name,
            branch=self.pool.branch(),
            session=self.pool.keeper.require(),
            count=count,
            consumer=consumer,
            fewer=fewer,
        )
        answer = self._leasing(command, self._batch)
        return Taken(answer.status, None, answer.detail) if isinstance(answer, e.Refusal) else Taken("taken", answer)

    def _batch(self, machine: Machine, event: e.BatchTaken) -> Batch | e.Refusal:
        state = machine.state
        held = state.branch.queues[self.name].batches.get(event.number)
        if held is None or (held.session, held.attempt) != (event.session, event.attempt):
            return e.Refusal("empty", f"this request took batch {event.batch}, which has ended or is another's by now")
        tasks = state.branch.queues[self.name].tasks
        groups = tuple(_held(state, task) for task in map(tasks.get, event.tasks) if task is not None)
        return Batch(
            self.name,
            state.active.row,
            event.session,
            event.batch,
            event.number,
            event.attempt,
            event.consumer,
            groups,
        )

    def read_batch(self, batch: Batch) -> Iterator[Group]:
        """The groups of a batch, in its order; read as `read_group`."""
        return (self.read_group(batch, held) for held in batch.groups)

    def read_group(self, batch: Batch, held: Held) -> Group:
        """One group of a batch. `Fenced` if it is gone because the batch has been delivered again or has ended, for a
        consumer that stood still; `Gone` or `Damaged` if it is gone from a batch that is as it was."""
        try:
            return self.pool.payloads.load(held)
        except Gone as error:
            now = self.pool.log.refresh(lambda machine: _delivery(machine.state, self.name, batch))
            if now != (batch.session, batch.delivery):
                raise Fenced(
                    f"batch {batch.id} has been delivered again, or has ended; drop this one ({error})"
                ) from error
            raise

    def finish_batch(
        self, batch: Batch, *, dropped: Sequence[tuple[str, str]] = (), request_id: str | None = None
    ) -> None:
        """The trainer is done with the batch: its groups have ended as trained, those in `dropped` (task, reason) as
        dropped."""
        self.pool.commit(
            c.FinishBatch(
                request=self._request(request_id or f"finish-{batch.branch}-{batch.id}-{batch.delivery}"),
                queue=self.name,
                branch=batch.branch,
                session=batch.session,
                batch=batch.id,
                attempt=batch.delivery,
                dropped=tuple(dropped),
            )
        )

    def return_batch(self, batch: Batch, *, request_id: str | None = None) -> None:
        """Give the batch back: its groups are ready again."""
        self.pool.commit(
            c.ReturnBatch(
                request=self._request(request_id),
                queue=self.name,
                branch=batch.branch,
                session=batch.session,
                batch=batch.id,
                attempt=batch.delivery,
            )
        )

    # Operations.

    def counts(self) -> TaskCounts:
        counts: TaskCounts = self._look(lambda state: count_tasks(state.branch.queues[self.name]))
        return counts

    def dead_letters(self) -> list[Task]:
        """Tasks that have used up their attempts, with the reason of the last one, in order of submission."""
        tasks: list[Task] = self._look(
            lambda state: [task for task in state.branch.queues[self.name].tasks.values() if task.failed]
        )
        return sorted(tasks, key=lambda task: task.order)

    def retry_failed(self, tasks: Sequence[str], *, request_id: str | None = None) -> tuple[str, ...]:
        """Send dead letters back to work; returns those that were."""
        answer = self.pool.commit(
            c.RetryFailed(
                request=self._request(request_id), queue=self.name, branch=self.pool.branch(), tasks=tuple(tasks)
            )
        )
        return () if isinstance(answer, e.Refusal) else answer.tasks

    def drop_tasks(self, tasks: Sequence[str], reason: str, *, request_id: str | None = None) -> tuple[str, ...]:
        """End tasks that nobody holds (pending, ready, dead letters, in a batch whose consumer is gone); returns those
        that were. A batch that loses a task is broken up: its other groups are ready again."""
        answer = self.pool.commit(
            c.DropTasks(
                request=self._request(request_id),
                queue=self.name,
                branch=self.pool.branch(),
                tasks=tuple(tasks),
                reason=reason,
            )
        )
        return () if isinstance(answer, e.Refusal) else answer.tasks

    def _leasing(self, command: Any, view: Any) -> Any:
        """Commit a command that names our session and the branch that we believe active. Both may have moved on while
        we looked away: then it is asked once more with the present ones, for nothing of the old ones has happened."""
        try:
            return self.pool.commit(command, view=view)
        except StrawqError as error:
            branch, alive = self.pool.standing()
            if branch == command.branch and alive:
                raise error
        command = msgspec.structs.replace(command, branch=branch, session=self.pool.keeper.require())
        return self.pool.commit(command, view=view)

    def _look(self, view: Any) -> Any:
        return self.pool.log.refresh(lambda machine: view(machine.state))

    def _request(self, given: str | None) -> str:
        return self.pool.request(given)


def _delivery(state: State, queue: str, batch: Batch) -> tuple[str, int] | None:
    """Who has the batch, and which delivery that is; None if it is not open on its branch."""
    if state.active.row != batch.branch:
        return None
    row = state.branch.queues[queue].batches.get(batch.number)
    return (row.session, row.attempt) if row is not None else None


def _held(state: State, task: Task) -> Held:
    return Held(task, {part.object: state.objects[part.object] for part in task.parts})


def _receipt(event: e.Reported) -> Reported:
    by = {
        why: tuple(task for task, _, known in event.refused if known == why)
        for why in ("repeated", "stale", "conflict")
    }
    accepted = tuple(item.task for item in event.items if item.task not in by["conflict"])
    return Reported(accepted, by["repeated"], by["stale"], by["conflict"], event.dead)
