"""A rollback under live worker processes, and the way back: what is on each branch, what reaches a batch, how soon the
workers notice. The audit folds the log again, entry by entry, apart from the pool that it watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strawq import Pool, Prompt
from strawq.core.events import Acquired, AnyEvent, RolledBack
from strawq.core.machine import Machine
from strawq.errors import Fenced
from strawq.handles import Batch, Held
from strawq.samples import Group
from strawq.verification import verify
from strawq_workers.processes import Child, Children
from strawq_workers.worker import WorkerOptions

PROMPTS, LATER = 12, 4
TOKENS, SAVED = 40, 8
WAIT_S = 60.0
NOTICED_MS_MAX = 5000
"""A second on a machine that is not busy; docs/lifetime.md has what was measured."""

Tasks = dict[str, tuple[str, tuple[Any, ...]]]


class History:
    """The log of a pool, folded up to an entry."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def entries(self, after: int = 0) -> Iterator[tuple[int, int, list[AnyEvent], Machine]]:
        """Number, time (ms) and events of each entry behind `after`, and the state that it makes."""
        machine, seq = Machine(), 0
        while (entry := self.pool.log.read_entry(seq + 1)) is not None:
            seq += 1
            events = machine.decode(seq, entry.line.events)
            for event in events:
                machine.apply(event, seq, entry.where())
            machine.keep(seq)
            if seq > after:
                yield seq, entry.line.time_ms, events, machine

    def at(self, position: int) -> Machine:
        return next(machine for seq, _, _, machine in self.entries() if seq == position)

    def rollback(self, branch: str) -> tuple[int, int]:
        """Number and time of the entry that made the branch."""
        return next(
            (seq, time_ms)
            for seq, time_ms, events, _ in self.entries()
            for event in events
            if isinstance(event, RolledBack) and event.branch == branch
        )

    def born(self, after: int, before: int) -> set[str]:
        """Objects that the state came to reach in entries between the two."""
        seen = set(self.at(after).state.objects)
        found: set[str] = set()
        for seq, _, _, machine in self.entries(after):
            if seq >= before:
                break
            found |= set(machine.state.objects) - seen
        return found

    def acquired_ms(self, after: int) -> dict[str, int]:
        """When each session took its first lease behind an entry."""
        times: dict[str, int] = {}
        for _, time_ms, events, _ in self.entries(after):
            for event in events:
                if isinstance(event, Acquired):
                    times.setdefault(event.session, time_ms)
        return times


def live(machine: Machine) -> Tasks:
    """Each live task: its stage and what it refers to, whoever holds it."""
    queue = machine.state.branch.queues["rollout"]
    tasks: Tasks = {task.id: (task.stage, task.parts) for task in queue.tasks.values()}
    for given in queue.submissions.values():
        tasks |= {f"{given.number}-{row}": ("fresh", ()) for row in range(given.next, given.end)}
    return tasks


def holders(machine: Machine) -> set[str]:
    return {task.session for task in machine.state.branch.queues["rollout"].tasks.values() if task.session}


class Drill:
    def __init__(self, pool: Pool, children: Children, url: str) -> None:
        self.pool, self.children, self.url = pool, children, url
        self.history = History(pool)
        self.workers = [self._by_module(), self._by_verb()]

    def _by_module(self) -> Child:
        options = WorkerOptions(
            engines=(self.url,), samples=2, max_new_tokens=TOKENS, ignore_eos=True, concurrency=8, max_groups=2,
            save_tokens=SAVED, abort_timeout_s=10.0, top_logprobs=2,
        )  # fmt: skip
        words = ["-m", "strawq_workers.worker", self.pool.path, "-"]
        return self.children.start("by-module", words, stdin=msgspec.json.encode(options))

    def _by_verb(self) -> Child:
        words = ["-m", "strawq", "work", self.pool.path, "-e", self.url, "--json"]
        for name, value in {
            "group-size": 2, "max-new-tokens": TOKENS, "concurrency": 8, "max-groups": 2, "save-tokens": SAVED,
            "abort-timeout-s": 10, "top-logprobs": 2,
        }.items():  # fmt: skip
            words += [f"--{name}", str(value)]
        return self.children.start("by-verb", [*words, "--ignore-eos", "--online-gc", "--gc-seconds", "0.5"])

    def until(self, what: str, probe: Callable[[], Any]) -> Any:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            found = probe()
            if found:
                return found
            self.children.require_alive()
            time.sleep(0.01)
        return pytest.fail(f"not within {WAIT_S} s: {what}")

    def sessions(self) -> dict[int, str]:
        """The workers' sessions by process."""
        pids = {worker.pid for worker in self.workers}
        return {view.pid: view.id for view in self.pool.inspect().sessions if view.pid in pids}

    def both_hold_leases(self) -> bool:
        mine = set(self.sessions().values())
        held: set[str] = self.pool.log.refresh(holders)
        return len(mine) == 2 and mine <= held

    def frozen_with_leases(self) -> bool:
        """Stop both where they are, if each holds a lease there; it might hand its groups in at any moment."""
        for worker in self.workers:
            worker.freeze()
        if held := self.both_hold_leases():
            return held
        for worker in self.workers:
            worker.thaw()
        return False

    def batch(self, count: int) -> Batch:
        taken: Batch = self.until("a batch", lambda: self.pool.queue().take_batch(count).batch)
        return taken

    def read(self, batch: Batch) -> dict[str, Group]:
        return {group.task_id: group for group in self.pool.queue().read_batch(batch)}

    def roll_back(self, target: str, branch: str) -> int:
        """While both workers hold leases. Returns the entry's number."""
        self.until("both workers hold leases", self.frozen_with_leases)
        try:
            self.pool.rollback(target, branch=branch)
        finally:
            for worker in self.workers:
                worker.thaw()
        seq, at_ms = self.history.rollback(branch)
        assert holders(self.history.at(seq - 1)) >= set(self.sessions().values())
        assert holders(self.history.at(seq)) == set(), "every lease ends in that entry"
        times = self.until("both go on with the new branch", lambda: self._noticed(seq))
        for session, noticed_ms in times.items():
            print(f"{branch}: session {session} took new work after {noticed_ms - at_ms} ms")
            assert noticed_ms - at_ms < NOTICED_MS_MAX
        return seq

    def _noticed(self, seq: int) -> dict[str, int] | None:
        mine = set(self.sessions().values())
        times = {session: at for session, at in self.history.acquired_ms(seq).items() if session in mine}
        return times if len(times) == 2 else None


def objects(batch: Batch) -> set[str]:
    return {part.object for held in batch.groups for part in held.task.parts}


def drain(drill: Drill, left: int) -> tuple[dict[str, Group], set[str]]:
    """Train until the queue is used up: the groups, and the objects that they were read from."""
    drill.pool.queue().seal()
    groups: dict[str, Group] = {}
    read: set[str] = set()
    while len(groups) < left:
        batch = drill.batch(3)
        groups |= drill.read(batch)
        read |= objects(batch)
        drill.pool.queue().finish_batch(batch)
    return groups, read


def prefixes(pool: Pool, machine: Machine) -> dict[str, Group]:
    """What the tasks of that state had saved, read through the pool as it is now."""
    stored = pool.log.refresh(lambda now: {row.ref.digest: row for row in now.state.objects.values()})
    tasks = machine.state.branch.queues["rollout"].tasks.values()
    return {
        task.id: pool.payloads.load(Held(task, {part.object: stored[part.object] for part in task.parts}))
        for task in tasks
        if task.stage != "fresh"
    }


@pytest.mark.slow
def test_a_rollback_under_live_workers_and_the_way_back(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with Children(tmp_path / "logs") as children, Pool.init(tmp_path / "pool") as pool:
        engine = children.start("engine", ["-m", "strawq_workers.engine", "--tokens-per-second", "40"])
        pool.queue().submit([Prompt(group_id=f"g{n}", text=f"prompt {n}") for n in range(PROMPTS)])
        pool.publish_version(1)
        drill = Drill(pool, children, engine.first_line(30))
        history = drill.history

        drill.until("some groups are ready", lambda: pool.queue().counts().ready >= 2)
        drill.until("and some are saved in part", lambda: pool.queue().counts().partial_leased >= 2)
        step = pool.checkpoint("step-1")

        # The future that will be left: more prompts, another policy, a batch that is trained and one that is in hand.
        pool.queue().submit([Prompt(group_id=f"later{n}", text=f"later prompt {n}") for n in range(LATER)])
        pool.publish_version(2)
        batch = drill.batch(2)
        trained = drill.read(batch)
        pool.queue().finish_batch(batch)
        in_hand = drill.batch(1)

        first = drill.roll_back("step-1", "again")
        assert live(history.at(first)) == live(history.at(step)), "exactly the checkpoint's groups"
        assert pool.policy_version() == "1"
        with pytest.raises(Fenced):
            pool.queue().finish_batch(in_hand)
        abandoned = history.born(step, first)
        assert abandoned
        batch = drill.batch(3)
        assert not objects(batch) & abandoned
        again = drill.read(batch)
        assert set(again) <= set(live(history.at(step)))
        pool.queue().finish_batch(batch)
        assert verify(pool, full=True).findings == (), "the branch that was left is whole"

        # The rollback is rolled back: all of the first future is there again, nothing of the second.
        second = drill.roll_back("main", "third")
        before = history.at(first - 1)
        assert live(history.at(second)) == live(before)
        assert pool.policy_version() == "2" and pool.queue().counts().trained == len(trained)
        saved = prefixes(pool, before)
        groups, read = drain(drill, PROMPTS + LATER - len(trained))
        assert not read & history.born(first, second)
        names = [group.prompt.group_id for group in (*trained.values(), *groups.values())]
        assert sorted(names) == sorted([f"g{n}" for n in range(PROMPTS)] + [f"later{n}" for n in range(LATER)])
        assert not set(trained) & set(groups)
        for task, group in saved.items():
            for kept, sample in zip(group.samples, groups[task].samples, strict=True):
                assert sample.tokens[: len(kept.tokens)].tolist() == kept.tokens.tolist()
        assert all(len(sample.tokens) == TOKENS for group in groups.values() for sample in group.samples)

        for worker in drill.workers:
            summary = worker.answer(WAIT_S)
            # It was told by the first report that was refused, or by its own look: either way, twice.
            assert summary["reason"] == "sealed" and summary["counters"]["groups_stale"] >= 2
            assert summary["counters"]["groups_failed"] == 0
        assert history.at(pool.inspect().head_seq).state.meta.closed_epoch > 0, "garbage was collected all the while"
        assert verify(pool, full=True).findings == ()
        assert {branch.name for branch in pool.inspect().branches} == {"main", "again", "third"}
