"""Jobs that are killed anywhere, resumed from any of their checkpoints, and go on. Whatever happens: a model never
sees a group twice, and no prompt is lost. A failure names its seed."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from stand_in import Engine, Manager, flat, job_args, save_model, write_prompts

from strawq import Pool
from strawq_workers.filters import DynamicFilterOutput
from strawq_workers.slime import StrawDataSource
from strawq_workers.slime.job_lock import JobLock

STEPS = 25
PATIENCE = 20


class Killed(Exception):
    """The process died here."""


def keep_most(args: Any, samples: Any, **_: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(samples[0].group_index % 5 != 3, "fifth")


class MortalSource(StrawDataSource):
    """A source whose process can die: locks go and heartbeats end, and nothing else happens."""

    def __init__(self, args: Any) -> None:
        self.locks: list[JobLock] = []
        super().__init__(args)

    def _lock(self, undo: Any, path: Path, what: str) -> None:
        self.locks.append(JobLock(path, what))
        undo.callback(self.locks[-1].close)

    def die(self) -> None:
        self._closed = True
        self._resources.pop_all()
        self.pool.keeper._stop.set()
        self._threads.shutdown()
        self._reader.shutdown()
        for lock in self.locks:
            lock.close()


class MortalEngine(Engine):
    def __init__(self, dice: random.Random, deadly: bool) -> None:
        slow = dice.randrange(2, 6)
        super().__init__(waits=lambda sample: sample.group_index % slow == 1 and dice.random() < 0.6)
        self.left = dice.randrange(1, 12) if deadly else 1 << 30

    async def is_aborted(self, aborted: asyncio.Event) -> bool:
        for _ in range(PATIENCE):
            if aborted.is_set():
                return True
            await asyncio.sleep(0)
        return False

    async def generate(self, args: Any, sample: Any, aborted: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed
        await super().generate(args, sample, aborted)


class World:
    """A trainer with its models, saved and in memory, and the job that feeds it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.dice = root, random.Random(seed)
        self.partial = self.dice.random() < 0.7
        self.filtered = self.dice.random() < 0.5
        self.tells = self.dice.random() < 0.75
        self.saved: dict[int, tuple[int, ...]] = {-1: ()}
        self.seen: list[int] = []
        self.next = 0
        self.manager: Manager | None = None
        write_prompts(root / "prompts.jsonl", 11)
        Pool.init(root / "save" / "rollout_data").close()

    def args(self) -> Any:
        return job_args(
            self.root,
            data_source_path="test_random_jobs.MortalSource",
            partial_rollout=self.partial,
            over_sampling_batch_size=self.dice.randrange(2, 5) if self.tells else 2,
            dynamic_sampling_filter_path="test_random_jobs.keep_most" if self.filtered else None,
        )

    def start(self) -> None:
        if self.manager is not None:
            self.manager.data_source.die()
        steps = sorted(self.saved)
        after = steps[-1] if self.dice.random() < 0.8 else self.dice.choice(steps)
        self.manager = Manager(self.args(), self.tells)
        self.manager.load(after)
        self.saved = {step: seen for step, seen in self.saved.items() if step <= after}
        self.seen, self.next = list(self.saved[after]), after + 1

    def rollout(self) -> None:
        assert self.manager is not None
        self.manager.args.engine = MortalEngine(self.dice, self.dice.random() < 0.25)
        delivered = sorted({sample.group_index for sample in flat(self.manager.generate(self.next))})
        if self.dice.random() < 0.1:
            raise Killed
        self.seen += delivered
        if self.dice.random() < 0.4:
            save_model(self.manager.args, self.next)
            if self.dice.random() < 0.1:
                raise Killed
            self.manager.save(self.next)
            self.saved[self.next] = tuple(self.seen)
            self.check()
        self.next += 1

    def check(self) -> set[int]:
        """Every prompt that was begun is where it should be; returns those that were begun and not trained."""
        assert self.manager is not None
        pool = self.manager.data_source.pool

        def view(machine: Any) -> Any:
            queue = machine.state.branch.queues["rollout"]
            return list(queue.tasks.values()), queue.row, dict(machine.state.objects._rows)

        tasks, row, objects = pool.log.refresh(view)
        from strawq.handles import Held

        live = [int(pool.payloads.prompt(Held(task, objects)).group_id) for task in tasks]
        assert sorted(set(self.seen)) == sorted(self.seen), "a group was trained twice"
        assert not set(live) & set(self.seen), "a group that was trained is still there"
        assert len(self.seen) == row.trained, (self.seen, row.trained)
        begun = {*live, *self.seen}
        lost = set(range(max(begun, default=-1) + 1)) - begun
        if self.filtered:
            lost -= {index for index in lost if index % 5 == 3}
        assert not lost, "prompts were lost"
        return set(live)


@pytest.mark.parametrize("seed", range(24))
def test_a_job_that_is_killed_anywhere(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    world.start()
    kills = 0
    try:
        for _ in range(STEPS):
            try:
                world.rollout()
            except Killed:
                kills += 1
                world.start()
        assert world.manager is not None
        left = world.check() if world.saved.get(world.next - 1) == tuple(world.seen) else set()
        # What is left over is trained soon: it is handed out before anything new.
        for rollout_id in range(world.next, world.next + len(left) + 1):
            world.manager.args.engine = Engine()
            world.seen += sorted({sample.group_index for sample in flat(world.manager.generate(rollout_id))})
        world.manager.save(rollout_id)
        left &= world.check()
        assert not left, "groups were never handed out again"
    finally:
        if world.manager is not None:
            world.manager.data_source.die()
