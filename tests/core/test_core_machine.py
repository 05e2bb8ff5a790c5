"""The pure core against a plain model: whatever is asked in whatever order, the state stays sound and nothing counts
twice."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from strawq.core import commands as c
from strawq.core import events as e
from strawq.core.apply import apply
from strawq.core.decide import decide
from strawq.core.image import dump_state, load_state
from strawq.core.invariants import findings
from strawq.core.state import State
from strawq.errors import BadInput, BranchMoved, Fenced, RequestConflict
from strawq.inspection import count_tasks
from strawq.model import ObjectRef, QueueConfig, Session, Slice, Stage

QUEUE = "q"


def digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


class CoreMachine(RuleBasedStateMachine):
    """Rules send commands; the model remembers what was acknowledged."""

    leases: Bundle[tuple[str, str, str, int]] = Bundle("leases")
    batches: Bundle[tuple[str, str, str, int]] = Bundle("batches")
    sessions: Bundle[str] = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.state = State()
        self.seq = 0
        self.made = 0
        self.accepted: dict[str, dict[str, int]] = {"main": {}}
        self.at_checkpoint: dict[str, tuple[bytes, dict[str, int], list[str]]] = {}
        self.answers: dict[str, tuple[c.AnyCommand, e.AnyEvent]] = {}
        self.versions: dict[str, list[str]] = {"main": []}

    def ask(self, command: c.AnyCommand) -> e.AnyEvent | e.Refusal:
        """Decide, apply, and check that undoing would have brought the old state back byte for byte."""
        before = dump_state(self.state)
        answer = decide(self.state, command)
        if isinstance(answer, e.Refusal):
            assert dump_state(self.state) == before
            return answer
        if command.request in self.answers:
            return answer
        mark = self.state.journal.mark()
        apply(self.state, answer, self.seq + 1, {ref.digest: 0 for ref in getattr(answer, "objects", ())})
        after = dump_state(self.state)
        self.state.journal.undo(mark)
        assert dump_state(self.state) == before, "undo brings the old state back"
        apply(self.state, answer, self.seq + 1, {ref.digest: 0 for ref in getattr(answer, "objects", ())})
        assert dump_state(self.state) == after, "applying again gives the same state"
        self.seq += 1
        self.state.seq = self.seq
        self.state.journal.clear()
        if command.request:
            self.answers[command.request] = (command, answer)
        return answer

    def new_object(self, rows: int, epoch: int = 0) -> ObjectRef:
        self.made += 1
        return ObjectRef(digest(self.made), epoch, 100, rows)

    @property
    def branch(self) -> str:
        return self.state.active.row

    @initialize(max_attempts=st.integers(1, 3), max_ready=st.sampled_from([0, 0, 3]))
    def start(self, max_attempts: int, max_ready: int) -> None:
        config = QueueConfig(max_attempts=max_attempts, max_expirations=2, max_ready=max_ready)
        self.ask(c.Configure(request="configure", queue=QUEUE, config=config))

    @rule(target=sessions)
    def join(self) -> str:
        self.made += 1
        session = f"s{self.made}"
        self.ask(c.Join(request=f"join-{session}", session=Session(session, "host", 1)))
        return session

    @rule(session=sessions, dead=st.booleans())
    def leave(self, session: str, dead: bool) -> None:
        self.ask(c.Expire(session=session) if dead else c.Leave(session=session))

    @rule(
        rows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        stored=st.booleans(),
        producer=st.sampled_from(["", "p"]),
    )
    def submit(self, rows: list[int], stored: bool, producer: str) -> None:
        epoch = self.state.meta.epoch if stored else 0
        objects = tuple(self.new_object(count, epoch) for count in rows)
        command = c.Submit(
            request=f"submit-{self.made}", queue=QUEUE, objects=objects, producer=producer, cursor=str(self.made)
        )
        event = self.ask(command)
        assert isinstance(event, e.Submitted) and event.rows == sum(rows)
        assert decide(self.state, command) is event or decide(self.state, command) == event
        with pytest.raises(RequestConflict):
            decide(self.state, c.Submit(request=command.request, queue=QUEUE, objects=objects[:-1], producer="other"))

    @rule(
        target=leases,
        session=sessions,
        count=st.integers(1, 5),
        stages=st.sampled_from([("partial", "fresh"), ("ready", "partial", "fresh"), ("ready",), ("fresh",)]),
    )
    def acquire(self, session: str, count: int, stages: tuple[Stage, ...]) -> object:
        queue = self.state.branch.queues[QUEUE]
        ready, partial = queue.count("ready", "pending"), queue.count("partial", "pending")
        command = c.Acquire(queue=QUEUE, branch=self.branch, session=session, count=count, stages=stages)
        try:
            answer = self.ask(command)
        except Fenced:
            assert session not in self.state.sessions
            return multiple()
        begun = (ready if "ready" in stages else 0) + (partial if "partial" in stages else 0)
        if isinstance(answer, e.Refusal):
            assert answer.status == "paused" or not begun, "max_ready holds back what has not been begun, nothing else"
            return multiple()
        assert isinstance(answer, e.Acquired)
        assert len(answer.leases) >= min(begun, count)
        bound, now = queue.row.config.max_ready, queue.leased() + queue.count("ready", "pending")
        fresh = any(queue.tasks[task].stage == "fresh" for task, _ in answer.leases)
        assert not (bound and fresh) or now + queue.count("partial", "pending") <= bound
        return multiple(*((self.branch, session, task, attempt) for task, attempt in answer.leases))

    @rule(
        lease=leases,
        outcome=st.sampled_from(["save", "yield", "complete", "complete", "drop", "fail"]),
        version=st.integers(-1, 4),
    )
    def report(self, lease: tuple[str, str, str, int], outcome: c.Outcome, version: int) -> None:
        branch, session, task, attempt = lease
        ref = self.new_object(1)
        parts = (Slice(ref.digest, 0, 1),) if outcome in ("save", "yield", "complete") else ()
        item = c.ReportItem(task, attempt, outcome, parts, 3, version, "reason" if outcome in ("drop", "fail") else "")
        queue = self.state.branch.queues[QUEUE]
        row = queue.tasks.get(task)
        current = (
            branch == self.branch and session in self.state.sessions
            and row is not None and (row.session, row.attempt) == (session, attempt)
        )  # fmt: skip
        try:
            answer = self.ask(c.Report(queue=QUEUE, branch=branch, session=session, items=(item,), objects=(ref,)))
        except BranchMoved:
            assert branch != self.branch
            return
        except Fenced:
            assert not current, "a current lease counts"
            return
        assert isinstance(answer, e.Reported)
        if not current:
            assert not answer.items, "a lease that is not current never counts"
        elif outcome == "complete":
            accepted = self.accepted[self.branch]
            assert row is not None
            assert (task in accepted) == (row.stage == "ready"), "accepted once, or handed in anew by who leased it"
            accepted[task] = attempt
        elif outcome in ("save", "yield"):
            # Something new that is not handed in takes a complete group back.
            self.accepted[self.branch].pop(task, None)
            assert queue.tasks[task].stage == "partial"

    @rule(target=batches, session=sessions, count=st.integers(1, 3), fewer=st.booleans())
    def take(self, session: str, count: int, fewer: bool) -> object:
        try:
            command = c.TakeBatch(queue=QUEUE, branch=self.branch, session=session, count=count, fewer=fewer)
            answer = self.ask(command)
        except Fenced:
            return multiple()
        if isinstance(answer, e.Refusal):
            return multiple()
        assert isinstance(answer, e.BatchTaken)
        assert all(task in self.accepted[self.branch] for task in answer.tasks), "only accepted groups are trained on"
        return (self.branch, session, answer.batch, answer.attempt)

    @rule(batch=batches, give_back=st.booleans())
    def finish(self, batch: tuple[str, str, str, int], give_back: bool) -> None:
        branch, session, name, attempt = batch
        kind = c.ReturnBatch if give_back else c.FinishBatch
        try:
            self.ask(kind(queue=QUEUE, branch=branch, session=session, batch=name, attempt=attempt))
        except Fenced:
            return

    @rule(batch=batches, which=st.integers(0, 2))
    def drop_from_batch(self, batch: tuple[str, str, str, int], which: int) -> None:
        """Only out of a batch that nobody has in hand; its other groups are ready again."""
        open_batches = {row.id: row for row in self.state.branch.queues[QUEUE].batches.values()}
        row = open_batches.get(batch[2]) if batch[0] == self.branch else None
        if row is None:
            return
        task = row.tasks[which % len(row.tasks)]
        answer = self.ask(c.DropTasks(queue=QUEUE, tasks=(task,), reason="damaged"))
        queue = self.state.branch.queues[QUEUE]
        assert isinstance(answer, e.Refusal) == bool(row.session)
        if not row.session:
            assert task not in queue.tasks
            assert all(
                queue.tasks[key].pending and queue.tasks[key].stage == "ready" for key in row.tasks if key != task
            )
            assert row.id not in {left.id for left in queue.batches.values()}

    @rule(which=st.integers(0, 3), retry=st.booleans())
    def letters(self, which: int, retry: bool) -> None:
        queue = self.state.branch.queues[QUEUE]
        failed = [task.id for task in queue.tasks.values() if task.failed][: which + 1]
        if retry:
            self.ask(c.RetryFailed(queue=QUEUE, tasks=tuple(failed)))
        else:
            self.ask(c.DropTasks(queue=QUEUE, tasks=tuple(failed), reason=f"because {which}"))

    @rule(version=st.sampled_from(["1", "2", "3", "4", "03", "default", "x"]), resume=st.booleans())
    def publish(self, version: str, resume: bool) -> None:
        """Among the numbers that were published on the way to here, each is above all before it."""
        line = self.versions[self.branch]
        known = "" if not line else line[-1]
        back = version.isdigit() and any(int(version) <= int(old) for old in line if old.isdigit())
        command = c.Resume(version=version) if resume else c.PublishVersion(version=version)
        if back and version != known:
            with pytest.raises(BadInput, match="is not above"):
                self.ask(command)
            return
        self.ask(command)
        if version != known:
            line.append(version)
        assert self.state.branch.meta.policy_version == version

    @rule(name=st.sampled_from(["c1", "c2"]))
    def checkpoint(self, name: str) -> None:
        if name in self.state.checkpoints:
            with pytest.raises(BadInput):
                self.ask(c.TakeCheckpoint(name=name))
            self.ask(c.DropCheckpoint(name=name))
            return
        self.ask(c.TakeCheckpoint(name=name))
        self.at_checkpoint[name] = (self.summary(), dict(self.accepted[self.branch]), self.versions[self.branch][:])

    @rule(name=st.sampled_from(["c1", "c2", "main", "branch-2"]))
    def roll_back(self, name: str) -> None:
        left, tasks_left = self.branch, dict(self.accepted[self.branch])
        branch_row = self.state.branches.get(name)
        try:
            self.ask(c.Rollback(target=name))
        except BadInput:
            return
        self.answers.clear()
        if name in self.at_checkpoint and branch_row is None:
            summary, accepted, versions = self.at_checkpoint[name]
            assert self.summary() == summary, "exactly what the checkpoint held"
            self.accepted[self.branch], self.versions[self.branch] = dict(accepted), versions[:]
        else:
            self.accepted[self.branch] = dict(self.accepted[name])
            self.versions[self.branch] = self.versions[name][:]
        assert self.accepted[left] == tasks_left

    @rule(name=st.sampled_from(["main", "branch-2", "branch-3"]))
    def drop_branch(self, name: str) -> None:
        try:
            self.ask(c.DropBranch(name=name))
        except BadInput:
            assert name == self.branch or name not in self.state.branches

    def summary(self) -> bytes:
        """Live work by task, with leases and holders left out: what a rollback must restore."""
        queue = self.state.branch.queues[QUEUE]
        tasks = sorted((t.id, t.stage, t.parts, t.batch, t.failed, t.version, t.tokens) for t in queue.tasks.values())
        rest = sorted((s.number, s.next, s.end) for s in queue.submissions.values())
        producers = sorted((p.id, p.cursor) for p in queue.producers.values())
        return repr((tasks, rest, producers, queue.row.trained, queue.row.dropped)).encode()

    @rule()
    def close_epoch(self) -> None:
        self.ask(c.OpenEpoch(epoch=self.state.meta.epoch + 1))
        self.ask(c.CloseEpoch(epoch=self.state.meta.epoch - 1))
        old = self.new_object(1, self.state.meta.closed_epoch)
        answer = decide(self.state, c.Submit(queue=QUEUE, objects=(old,)))
        assert isinstance(answer, e.Refusal) and answer.status == "epoch_closed"

    @invariant()
    def sound(self) -> None:
        assert findings(self.state) == []
        if QUEUE in self.state.branch.queues:
            queue = self.state.branch.queues[QUEUE]
            counts = count_tasks(queue)
            assert counts.total == queue.row.submitted
            assert sum(getattr(counts, name) for name in counts.__struct_fields__) == 2 * counts.total

    @invariant()
    def snapshots_are_the_state(self) -> None:
        dumped = dump_state(self.state)
        self.state = load_state(dumped, self.seq)
        assert dump_state(self.state) == dumped


CoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCoreMachine = CoreMachine.TestCase
