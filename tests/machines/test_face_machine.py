"""The whole public face against plain dictionaries: several hosts with clocks of their own, real payloads, crashes,
power cuts, interleaved commits, branches, garbage collection and trims, in any order."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strawq.core.invariants import findings
from strawq.errors import BadInput, Fenced
from strawq.garbage import collect_garbage
from strawq.handles import Batch
from strawq.merging import merge_objects
from strawq.model import QueueConfig
from strawq.pool import Pool
from strawq.storage.faulty import Crash, FaultPlan, FaultyFiles
from strawq.testing.clock import HostClock
from strawq.testing.model import PlainModel, TaskRow
from strawq.testing.scenes import GROUP_TOKENS, finish_work, grown, image, prompts, require_healthy, require_sound
from strawq.testing.worlds import World
from strawq.trimming import trim_log
from strawq.work import Change, Work

HOSTS = 3
LEASE_SECONDS = 8.0
hosts = st.integers(0, HOSTS - 1)
picks = st.integers(0, 1000)


reached: Counter[str] = Counter()
"""What has happened in all examples together: a machine that never gets anywhere proves nothing."""


@dataclass
class Host:
    """One process and what it believes to hold. A `frozen` one beats no more; it may still wake and act."""

    pool: Pool
    clock: HostClock
    frozen: bool = False
    works: list[Work] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)


class FaceMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 4)
        self.patch.setattr("strawq.merging.MERGE_FILES", 2)
        self.made = 0
        self.last_beat: dict[str, float] = {}

    def teardown(self) -> None:
        try:
            if hasattr(self, "model"):
                self.all_hosts_agree()
                self.finish_in_a_copy()
        finally:
            self.patch.undo()

    @initialize(seed=st.integers(0, 999), attempts=st.integers(1, 3), expirations=st.integers(1, 4))
    def start(self, seed: int, attempts: int, expirations: int) -> None:
        config = QueueConfig(max_attempts=attempts, max_expirations=expirations)
        self.world = World(seed, config=config, lease_seconds=LEASE_SECONDS)
        self.model = PlainModel(attempts, expirations)
        self.hosts = [self.boot(number) for number in range(HOSTS)]
        self.submit(0, 3, "a", False)
        self.submit(1, 2, "r", False)

    def holders(self, kind: str) -> list[Host]:
        return [host for host in getattr(self, "hosts", ()) if getattr(host, kind)]

    def boot(self, number: int) -> Host:
        clock = HostClock(self.world.clock, origin_seconds=1e6 * number, wall_jump_ms=(number - 1) * 3_600_000)
        return Host(self.world.process(clock=clock), clock)

    def number(self) -> int:
        self.made += 1
        return self.made

    # Input.

    @rule(who=hosts, count=st.integers(1, 4), kind=st.sampled_from(["a", "a", "r", "big"]), request=st.booleans())
    def submit(self, who: int, count: int, kind: str, request: bool) -> None:
        number = self.number()
        names = [f"{kind}{number}.{i}" for i in range(count)]
        rows = prompts(names, payload_bytes=6000 if kind == "big" else 0)
        cursor, known = str(number), self.model.rows.cursors.get("data", "")
        options: dict[str, Any] = {"producer": "data", "cursor": cursor, "request_id": f"submit-{number}"}
        queue = self.hosts[who].pool.queue()
        if number % 3 == 0:
            with pytest.raises(Fenced):
                queue.submit(rows, **{**options, "expect": f"not {known}"})
        receipt = queue.submit(rows, expect=known, **options)
        if request:
            assert queue.submit(rows, expect=known, **options) == receipt, "asked again, answered again"
        self.note_submitted(receipt.numbers[0], names, cursor)

    def note_submitted(self, submission: int, names: list[str], cursor: str) -> None:
        for row, name in enumerate(names):
            self.model.rows.tasks[f"{submission}-{row}"] = TaskRow(name)
        self.model.rows.cursors["data"] = cursor

    # Leases.

    @precondition(lambda self: any(self.model.leasable()) or self.model.rows.paused)
    @rule(who=hosts, count=st.integers(1, 5))
    def acquire(self, who: int, count: int) -> None:
        host = self.hosts[who]
        answer = host.pool.queue().acquire(count)
        self.last_beat.setdefault(host.pool.keeper.current, self.world.clock.now)
        partial, fresh = self.model.leasable()
        if self.model.rows.paused:
            assert answer.status == "paused"
            return
        assert len(answer) == min(count, len(partial) + len(fresh))
        assert sum(lease.task in partial for lease in answer) == min(count, len(partial)), "partial before fresh"
        for lease in answer:
            self.model.lease(lease.task, lease.session, lease.attempt)
            work = host.pool.queue().open(lease)
            row = self.model.rows.tasks[lease.task]
            assert work.group.prompt.group_id == row.name
            require_sound(work.group, row.saved)
            have = len(work.group.samples[0].tokens) if work.group.samples else 0
            assert have == row.saved, "exactly what was acknowledged"
            host.works.append(work)

    @precondition(lambda self: self.holders("works"))
    @rule(who=hosts, pick=picks, outcome=st.sampled_from(["save", "yield", "complete", "complete", "drop", "fail"]),
          more=st.integers(0, 2), good=st.booleans())  # fmt: skip
    def report(self, who: int, pick: int, outcome: Any, more: int, good: bool) -> None:
        holders = self.holders("works")
        host = holders[who % len(holders)]
        work = host.works[pick % len(host.works)]
        lease = work.lease
        have = len(work.group.samples[0].tokens) if work.group.samples else 0
        want = GROUP_TOKENS if outcome == "complete" else min(have + more, GROUP_TOKENS - 1)
        growing = outcome in ("save", "yield", "complete") and want > have
        group = grown(work.group, want) if growing else None
        reason = "reason" if outcome in ("drop", "fail") else ""
        change = Change(work, outcome, group, reason, good)
        if not self.model.holds(lease.branch, lease.session, lease.task, lease.attempt):
            before = image(host.pool)
            with pytest.raises(Fenced):
                host.pool.queue().report([change])
            reached["fenced report"] += 1
            assert image(host.pool) == before, "what a former holder says changes nothing"
            host.works.remove(work)
            return
        assert host.pool.queue().report([change]).accepted == (lease.task,)
        self.model.report(lease.task, outcome, want if growing else have, good)
        reached[outcome] += 1
        if outcome != "save":
            host.works.remove(work)

    @precondition(lambda self: self.holders("works"))
    @rule(who=hosts)
    def complete_all(self, who: int) -> None:
        """One report of everything that a host holds: what is current counts, what is not is named."""
        holders = self.holders("works")
        host = holders[who % len(holders)]
        last = host.works[-1].lease
        works = [work for work in host.works if (work.lease.branch, work.lease.session) == (last.branch, last.session)]
        works = list({work.task: work for work in works}.values())
        host.works = [work for work in host.works if work not in works]
        leases = [work.lease for work in works]
        current = {at.task for at in leases if self.model.holds(at.branch, at.session, at.task, at.attempt)}
        changes = [Change(work, "complete", grown(work.group, GROUP_TOKENS)) for work in works]
        queue = host.pool.queue()
        if not current:
            with pytest.raises(Fenced):
                queue.report(changes)
            return
        receipt = queue.report(changes)
        assert set(receipt.accepted) == current
        assert set(receipt.stale) == {work.task for work in works} - current
        for task in current:
            self.model.report(task, "complete", GROUP_TOKENS)
        reached["mixed report" if receipt.stale else "whole report"] += 1

    # Batches.

    @precondition(lambda self: self.model.ready() or self.model.rows.batches)
    @rule(who=hosts, count=st.integers(1, 3), consumer=st.sampled_from(["trainer", "eval"]), fewer=st.booleans())
    def take(self, who: int, count: int, consumer: str, fewer: bool) -> None:
        host = self.hosts[who]
        taken = host.pool.queue().take_batch(count, consumer=consumer, fewer=fewer)
        self.last_beat.setdefault(host.pool.keeper.current, self.world.clock.now)
        waiting, ready = self.model.waiting_batch(consumer), self.model.ready()
        if taken.batch is None:
            assert not waiting and (len(ready) < count if not fewer else not ready)
            return
        batch = taken.batch
        assert batch.id == waiting or not waiting, "an unfinished batch comes before a new one"
        self.model.take(batch.id, batch.tasks, consumer, batch.session, batch.delivery)
        for group in host.pool.queue().read_batch(batch):
            require_sound(group, GROUP_TOKENS)
        host.batches.append(batch)
        reached["batch" if batch.delivery == 1 else "batch again"] += 1

    @precondition(lambda self: self.holders("batches"))
    @rule(who=hosts, pick=picks, trained=st.booleans())
    def end_batch(self, who: int, pick: int, trained: bool) -> None:
        holders = self.holders("batches")
        host = holders[who % len(holders)]
        batch = host.batches.pop(pick % len(host.batches))
        queue = host.pool.queue()
        end = queue.finish_batch if trained else queue.return_batch
        if self.model.holds_batch(batch.branch, batch.session, batch.id, batch.delivery):
            end(batch)
            self.model.end_batch(batch.id, trained)
            reached["trained" if trained else "returned"] += 1
        else:
            reached["fenced batch"] += 1
            with pytest.raises(Fenced):
                end(batch)

    @precondition(lambda self: self.model.rows.batches)
    @rule(who=hosts, pick=picks)
    def drop_from_batch(self, who: int, pick: int) -> None:
        """What cannot be read is dropped where its consumer is gone, and never out of a consumer's hands."""
        tasks = sorted(key for key, row in self.model.rows.tasks.items() if row.batch)
        task = tasks[pick % len(tasks)]
        done = self.hosts[who].pool.queue().drop_tasks([task], "damaged")
        assert done == ((task,) if self.model.may_drop(task) else ())
        if done:
            self.model.drop(task)
            reached["dropped from a batch"] += 1

    @precondition(lambda self: any(row.failed for row in self.model.rows.tasks.values()))
    @rule(who=hosts, retry=st.booleans())
    def letters(self, who: int, retry: bool) -> None:
        queue = self.hosts[who].pool.queue()
        failed = {key for key, row in self.model.rows.tasks.items() if row.failed and not row.end}
        assert {task.id for task in queue.dead_letters()} == failed
        done = queue.retry_failed(sorted(failed)) if retry else queue.drop_tasks(sorted(failed), "hopeless")
        assert set(done) == failed
        for key in failed:
            row = self.model.rows.tasks[key]
            row.failed, row.failures, row.expirations = False, 0, 0
            row.end = "" if retry else "dropped"
            reached["dead letter"] += 1

    # The policy, and lifetime.

    @rule(who=hosts, pause=st.booleans(), version=st.sampled_from(["1", "2", "3", "5", "8", "default"]))
    def pause(self, who: int, pause: bool, version: str) -> None:
        pool = self.hosts[who].pool
        if pause:
            pool.pause("weights")
        elif self.model.may_publish(version):
            pool.resume(version)
            self.model.rows.versions.append(version)
        else:
            with pytest.raises(BadInput, match="is not above"):
                pool.resume(version)
            reached["version refused"] += 1
            pool.resume()
        self.model.rows.paused = pause

    @rule(who=hosts, pick=picks, act=st.sampled_from(["checkpoint", "checkpoint", "roll back", "drop branch"]))
    def lineage(self, who: int, pick: int, act: str) -> None:
        pool = self.hosts[who].pool
        if act == "checkpoint":
            self.checkpoint(pool, f"c{pick % 2}")
        elif act == "roll back":
            self.roll_back(pool, pick)
        else:
            self.drop_branch(pool, pick)

    def checkpoint(self, pool: Pool, name: str) -> None:
        if name in self.model.checkpoints:
            with pytest.raises(BadInput):
                pool.checkpoint(name)
            pool.drop_checkpoint(name)
            del self.model.checkpoints[name]
        else:
            pool.checkpoint(name, {"at": name})
            self.model.checkpoint(name)

    def roll_back(self, pool: Pool, pick: int) -> None:
        targets = sorted([*self.model.checkpoints, *(self.model.branches.keys() - {self.model.active})])
        if targets:
            target = targets[pick % len(targets)]
            branch = pool.rollback(target, branch=f"b{self.number()}" if pick % 2 else "")
            self.model.roll_back(target, branch)
            reached["rollback"] += 1

    def drop_branch(self, pool: Pool, pick: int) -> None:
        names = sorted(self.model.branches)
        name = names[pick % len(names)]
        if name == self.model.active:
            with pytest.raises(BadInput):
                pool.drop_branch(name)
        else:
            pool.drop_branch(name)
            del self.model.branches[name]

    @rule(who=hosts, act=st.sampled_from(["collect", "trim", "merge"]), keep=st.integers(0, 6))
    def upkeep(self, who: int, act: str, keep: int) -> None:
        if act == "collect":
            self.collect(who)
        elif act == "merge":
            self.merge(who)
        else:
            self.trim(who, keep)

    def collect(self, who: int) -> None:
        _, collected = collect_garbage(self.hosts[who].pool, wait_seconds=0.2)
        assert collected.unknown == ()
        reached["garbage"] += collected.by_reason.get("unreachable object", 0)

    def trim(self, who: int, keep: int) -> None:
        pool = self.hosts[who].pool
        pool.snapshot()
        done = trim_log(pool, keep_entries=keep, snapshots_kept=1 if keep % 2 else 2)
        reached["trimmed entries"] += done.entries
        reached["moved objects"] += done.moved

    def merge(self, who: int) -> None:
        reached["merged files"] += merge_objects(self.hosts[who].pool).files

    # Time and death.

    @rule(seconds=st.integers(1, 12))
    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.clock.now += 1
            for host in self.hosts:
                if not host.frozen:
                    self.round(host)

    def round(self, host: Host) -> None:
        before = host.pool.keeper.current
        if before:
            self.last_beat[before] = self.world.clock.now
        for session in host.pool.keeper.round():
            silent = self.world.clock.now - self.last_beat[session]
            assert silent >= LEASE_SECONDS, f"session {session} was taken for dead after {silent} s"
            self.model.end_session(session, expired=True)
            reached["expired"] += 1

    @rule(who=hosts, act=st.sampled_from(["freeze", "freeze", "turn", "reopen", "kill", "cut power"]),
          hours=st.sampled_from([-24, -1, 1]), policy=st.sampled_from(["drop", "keep", "mixed"]))  # fmt: skip
    def something_happens(self, who: int, act: str, hours: int, policy: Any) -> None:
        host = self.hosts[who]
        if act == "freeze":
            host.frozen = not host.frozen
        elif act == "turn":
            host.clock.wall_jump_ms += hours * 3_600_000
        elif act == "cut power":
            # Every machine at once. Whatever was acknowledged is there.
            self.world.memory.crash(random.Random(self.number()), policy)
            self.hosts = [self.boot(number) for number in range(HOSTS)]
        else:
            session = host.pool.keeper.current
            if act == "reopen":
                host.pool.close()
            if act == "reopen" and session:
                self.model.end_session(session, expired=False)
            self.hosts[who] = self.boot(who)

    @rule(who=hosts, other=hosts, call=st.integers(1, 9), moment=st.sampled_from(["before", "within", "after"]),
          lost=st.booleans())  # fmt: skip
    def die_while_submitting(self, who: int, other: int, call: int, moment: Any, lost: bool) -> None:
        """The survivor asks again under the same request id: the prompts are there once."""
        pool, number = self.hosts[who].pool, self.number()
        names = [f"a{number}.0", f"r{number}.1"]
        files = pool.files
        assert isinstance(files, FaultyFiles)
        options: dict[str, Any] = {"producer": "data", "cursor": str(number), "request_id": f"submit-{number}"}
        files.plan = FaultPlan(seed=number, crash_at=(len(files.calls) + call, moment))
        try:
            pool.queue().submit(prompts(names), **options)
        except Crash:
            reached["crash"] += 1
            if lost:
                self.world.memory.crash(random.Random(number), "mixed")
            self.hosts = [self.boot(at) if at == who or lost else host for at, host in enumerate(self.hosts)]
        files.plan = FaultPlan()
        receipt = self.hosts[other].pool.queue().submit(prompts(names), **options)
        self.note_submitted(receipt.numbers[0], names, str(number))

    @rule(who=hosts, other=hosts, mine=st.sampled_from(["acquire", "take", "submit"]),
          theirs=st.sampled_from(["acquire", "take", "submit", "collect", "trim", "merge"]))  # fmt: skip
    def interleave(self, who: int, other: int, mine: str, theirs: str) -> None:
        """Between what one host has decided and its publish, another host acts."""
        if who == other:
            return
        files = self.hosts[who].pool.files
        assert isinstance(files, FaultyFiles)
        acts = {
            "acquire": lambda at: self.acquire(at, 2),
            "take": lambda at: self.take(at, 1, "trainer", True),
            "submit": lambda at: self.submit(at, 1, "a", False),
            "collect": self.collect,
            "trim": lambda at: self.trim(at, 0),
            "merge": self.merge,
        }

        def hook(when: str, kind: str, path: str) -> None:
            if (when, kind) == ("before", "publish") and path.startswith("log/"):
                files.hook = None
                reached[f"{mine} interleaved with {theirs}"] += 1
                acts[theirs](other)

        files.hook = hook
        # The producer's cursor is checked in `submit`: a race for it is not its business.
        if mine == "submit" and theirs == "submit":
            mine = "acquire"
        try:
            acts[mine](who)
        finally:
            files.hook = None

    # What holds at any time.

    @invariant()
    def the_pool_is_what_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        pool = self.hosts[0].pool
        state = pool.log.refresh(lambda machine: machine.state)
        assert findings(state) == []
        seen = pool.inspect()
        assert seen.queues["rollout"].tasks == self.model.counts()
        assert seen.branch == self.model.active
        assert {branch.name for branch in seen.branches} == self.model.branches.keys()
        assert {point.name for point in seen.checkpoints} == self.model.checkpoints.keys()
        assert seen.queues["rollout"].producers.get("data", "") == self.model.rows.cursors.get("data", "")
        for key, task in self.model.rows.tasks.items():
            row = state.branch.queues["rollout"].tasks.get(key)
            if row is not None:
                assert (row.session, row.batch, row.failed) == (task.session, task.batch, task.failed), key

    def all_hosts_agree(self) -> None:
        images = {image(host.pool) for host in self.hosts} | {image(self.world.process())}
        assert len(images) == 1, "the same entries give the same state, bit for bit"

    def finish_in_a_copy(self) -> None:
        """From here, whoever takes over finishes all the work, and every group is whole."""
        twin = self.world.twin()
        pool = twin.process()
        for session in list(pool.log.refresh(lambda machine: list(machine.state.sessions))):
            pool.expire_session(session)
        saved = {key: row.saved for key, row in self.model.rows.tasks.items()}
        finish_work(pool, saved)
        counts, model = pool.queue().counts(), self.model.counts()
        assert counts.trained + counts.dropped == counts.total == model.total
        assert counts.dropped == model.dropped
        require_healthy(pool)


class TestFace(FaceMachine.TestCase):  # type: ignore[name-defined,misc]
    """Which examples are drawn depends on what other tests have imported: so many go everywhere in any company."""

    settings = settings(max_examples=3 * settings().max_examples // 2)


def test_the_machine_has_been_everywhere() -> None:
    """Runs after the machine, in one process with it."""
    acts = {
        f"{mine} interleaved with {theirs}" for mine in ("acquire", "submit") for theirs in ("take", "collect", "trim")
    }
    wanted = acts | {
        "fenced report", "fenced batch", "save", "complete", "fail", "yield",
        "drop", "batch", "batch again", "dropped from a batch", "trained", "returned", "dead letter", "rollback",
        "garbage", "trimmed entries", "moved objects", "merged files", "expired", "crash",
    }  # fmt: skip
    if reached:
        missed = {name for name in wanted if not reached[name]}
        assert len(missed) <= 3, f"these never happened: {missed}"


@pytest.mark.campaign
class TestFaceForHours(FaceMachine.TestCase):  # type: ignore[name-defined,misc]
    """The same machine with the profile `campaign`."""
