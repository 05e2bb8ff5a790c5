"""Jobs that are killed anywhere, resumed from any of their checkpoints, and go on. Whatever happens: a model never
sees a group twice, and no prompt is lost. A failure names its seed."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from stand_in import Engine, Killed, Manager, flat, job_args, save_model, stock_rollout, write_prompts

from strawq import Pool
from strawq_workers.filters import DynamicFilterOutput
from strawq_workers.slime import StrawDataSource, group_of, samples_of
from strawq_workers.slime.job_lock import JobLock

STEPS = 25
PATIENCE = 20

__all__ = ["stock_rollout"]  # named by dotted path


def keep_most(args: Any, samples: Any, **_: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(samples[0].group_index % 5 != 3, "fifth")


def pool_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A rollout function that works on the pool, as ours do: groups are completed one by one, some are saved on the
    way."""
    queue = data_source.pool.queue()
    while queue.counts().ready < args.rollout_batch_size:
        data_source.fill(args.dice.randrange(1, 5))
        for lease in queue.acquire(args.dice.randrange(1, 4)):
            work = queue.open(lease)
            samples = samples_of(work.group)
            if args.dice.random() < 0.3 and not samples[0].response_length:
                for sample in samples:
                    args.engine.answer(args, sample, 2, "aborted")
                queue.save(work, group_of(work.task, work.group.prompt, samples, work.group))
            args.engine.left -= 1
            if args.engine.left <= 0:
                raise Killed
            for sample in samples:
                args.engine.answer(args, sample, 4 - sample.response_length, "completed")
                sample.reward = 1.0
            queue.complete(work, group_of(work.task, work.group.prompt, samples, work.group))
    return data_source.collect(rollout_id, args.rollout_batch_size, timeout=0)


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
        self.tells = self.dice.random() < 0.75
        # Of a manager that does not tell, surplus cannot be told from what was delivered: then there is none.
        self.filtered = self.tells and self.dice.random() < 0.5
        self.on_pool = self.dice.random() < 0.4
        self.overlaps = (self.tells or self.on_pool) and self.dice.random() < 0.4
        self.ahead: list[int] = []
        """What the rollout after `next` has delivered already, where generation overlaps training."""
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
            dynamic_sampling_filter_path="test_random_jobs.keep_most" if self.filtered and not self.on_pool else None,
            rollout_function_path=f"test_random_jobs.{'pool' if self.on_pool else 'stock'}_rollout",
            dice=self.dice,
        )

    def start(self) -> None:
        if self.manager is not None:
            self.manager.data_source.die()
        steps = sorted(self.saved)
        after = steps[-1] if self.dice.random() < 0.8 else self.dice.choice(steps)
        self.manager = Manager(self.args(), self.tells)
        self.manager.load(after)
        self.saved = {step: seen for step, seen in self.saved.items() if step <= after}
        self.seen, self.next, self.ahead = list(self.saved[after]), after + 1, []

    def generate(self, rollout_id: int) -> list[int]:
        assert self.manager is not None
        self.manager.args.engine = MortalEngine(self.dice, self.dice.random() < 0.25)
        return sorted({sample.group_index for sample in flat(self.manager.generate(rollout_id))})

    def rollout(self) -> None:
        assert self.manager is not None
        delivered = self.ahead or self.generate(self.next)
        self.ahead = self.generate(self.next + 1) if self.overlaps else []
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
        if self.filtered and not self.on_pool:
            lost -= {index for index in lost if index % 5 == 3}
        assert not lost, "prompts were lost"
        return set(live)


@pytest.mark.parametrize("seed", range(12))
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
        if world.ahead:
            world.seen, world.next = world.seen + world.ahead, world.next + 1
        # What is left over is trained soon: it is handed out before anything new.
        for rollout_id in range(world.next, world.next + len(left) + 1):
            world.manager.args.engine = MortalEngine(world.dice, False)
            samples = flat(world.manager.generate(rollout_id))
            world.seen += sorted({sample.group_index for sample in samples})
        world.manager.save(rollout_id)
        left &= world.check()
        assert not left, "groups were never handed out again"
    finally:
        if world.manager is not None:
            world.manager.data_source.die()
