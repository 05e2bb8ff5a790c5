"""Checks that catch mutants: seeds of the simulation, tests of other areas, and a few that are written for one mutant.

Each is a function without arguments that raises when a guarantee is broken."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import pytest

from strawq.core import commands as c
from strawq.core.commands import ReportItem
from strawq.errors import BranchMoved, Damaged, Fenced, OutcomeUnknown
from strawq.garbage import collect_garbage
from strawq.model import QueueConfig, VersionSpan
from strawq.payloads import Payloads
from strawq.pool import Pool
from strawq.queue import Queue
from strawq.samples import Group, Prompt, Sample
from strawq.storage import layout
from strawq.storage.faulty import Crash, FaultPlan, FaultyFiles
from strawq.testing.clock import HostClock
from strawq.testing.scenes import completed, prompts
from strawq.testing.simulation import simulate
from strawq.testing.worlds import World
from strawq.work import Change, Work, unchanged
from tests.lifetime.test_merging import shrink

Check = Callable[[], object]


def seeds(numbers: range) -> Check:
    def run() -> None:
        logging.disable(logging.CRITICAL)
        try:
            for number in numbers:
                simulate(number)
        finally:
            logging.disable(logging.NOTSET)

    run.__name__ = f"the simulation, seeds {numbers.start} to {numbers.stop - 1}"
    return run


def patched(test: Callable[..., object], *arguments: object) -> Check:
    """A test of another area that takes `monkeypatch` last."""

    def run() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            test(*arguments, monkeypatch)

    run.__name__ = name_of(test)
    return run


def given(test: Callable[..., object], *arguments: object) -> Check:
    """A test of another area with its parameters; callables are called for a fresh one."""

    def run() -> None:
        test(*(argument() if callable(argument) else argument for argument in arguments))

    run.__name__ = name_of(test)
    return run


def small_files(test: Callable[[World], object]) -> Check:
    """A test of merging, in a world where every publication is a file and few are many."""

    def run() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            shrink(monkeypatch)
            test(World())

    run.__name__ = name_of(test)
    return run


def name_of(test: Callable[..., object]) -> str:
    return f"{test.__module__.replace('.', '/')}.py::{test.__name__}"


def _files(pool: Pool) -> FaultyFiles:
    assert isinstance(pool.files, FaultyFiles)
    return pool.files


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(group_id=f"g{i}", text=f"prompt {i}") for i in range(count)]


def _answer(work: Work) -> Group:
    sample = Sample(0, tokens=[1, 2], logprobs=[-1.0, -2.0], versions=(VersionSpan(0, 2, "1"),), status="completed")
    return Group(work.task, work.group.prompt, (sample,))


def _lease(queue: Queue) -> Work:
    return queue.open(queue.acquire(1).leases[0])


def a_lost_reply_is_no_lost_race() -> None:
    world = World()
    pool = world.process()
    queue, files = pool.queue(), _files(pool)

    def lose(moment: str, kind: str, path: str) -> None:
        if moment == "after" and kind == "publish" and path.startswith("log/"):
            files.hook = None
            raise OSError(errno.ETIMEDOUT, "lost")

    files.hook = lose
    queue.submit(_prompts(1))
    assert pool.log.races_lost == 0
    assert world.process().queue().counts().total == 1


def an_old_attempt_of_the_same_process_is_fenced() -> None:
    queue = World().process().queue()
    queue.submit(_prompts(1))
    old = _lease(queue)
    queue.yield_(old)
    new = _lease(queue)
    with pytest.raises(Fenced):
        queue.complete(old, _answer(old))
    assert queue.complete(new, _answer(new)).accepted == (new.task,)


def a_report_under_anothers_lease_is_fenced() -> None:
    world = World()
    holder, other = world.process(), world.process()
    holder.queue().submit(_prompts(1))
    work = _lease(holder.queue())
    item = ReportItem(work.task, work.lease.attempt, "drop", reason="not mine")
    other.queue()
    report = c.Report(request="x", queue="rollout", branch="main", session=other.keeper.require(), items=(item,))
    with pytest.raises(Fenced):
        other.commit(report)


def a_worker_of_a_branch_that_was_left_is_fenced() -> None:
    world = World()
    pool = world.process()
    queue = pool.queue()
    queue.submit(_prompts(1))
    pool.checkpoint("start")
    old = _lease(queue)
    pool.rollback("start")
    new = _lease(pool.queue())
    assert (old.task, old.lease.attempt, old.lease.session) == (new.task, new.lease.attempt, new.lease.session)
    with pytest.raises(BranchMoved):
        pool.queue().complete(old, _answer(old))


def a_late_completion_is_told_that_it_had_counted() -> None:
    queue = World().process().queue()
    queue.submit(_prompts(1))
    work = _lease(queue)
    group = _answer(work)
    queue.complete(work, group)
    batch = queue.take_batch(1).batch
    assert batch is not None
    queue.finish_batch(batch)
    assert queue.complete(work, group).repeated == (work.task,)


def a_command_asked_again_happens_once() -> None:
    queue = World().process().queue()
    assert queue.submit(_prompts(2), request_id="load") == queue.submit(_prompts(2), request_id="load")
    assert queue.counts().total == 2


def a_flipped_bit_of_an_object_is_damage() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strawq.payloads.INLINE_OBJECT_BYTES", 0)
        world = World()
        world.process().queue().submit(_prompts(1))
        (part,) = [p for p in world.memory.names("objects/000001") if p != "swept"]
        (name,) = world.memory.names(f"objects/000001/{part}")
        path = f"objects/000001/{part}/{name}"
        data = world.memory.read(path)
        world.memory.remove(path)
        world.memory.stage(path, [data.replace(b"prompt 0", b"prompt 1")])
        with pytest.raises(Damaged):
            _lease(world.process().queue())


def cursor_and_prompts_move_together_whenever_the_producer_dies() -> None:
    for call in range(1, 60):
        world = World()
        files = world.files(FaultPlan(crash_at=(call, "after")))
        try:
            queue = world.process(files=files).queue()
            for at in range(2):
                queue.submit(_prompts(3), producer="data", cursor=str(3 * at + 3), expect=str(3 * at) if at else "")
        except Crash:
            pass
        after = world.process().queue()
        assert after.counts().total == int(after.cursor("data") or 0), f"it died after call {call}"


def collection_and_a_power_cut_leave_every_reference_readable() -> None:
    for seed in range(16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("strawq.payloads.INLINE_OBJECT_BYTES", 0)
            world = World(seed)
            pool, trainer, collector = world.process(), world.process(), world.process()
            pool.queue().submit(_prompts(1))
            work = _lease(pool.queue())
            pool.queue().complete(work, _answer(work))
            collect_garbage(collector, wait_seconds=0)
            batch = trainer.queue().take_batch(1).batch
            assert batch is not None
            files = _files(trainer)

            def die(moment: str, kind: str, path: str, files: FaultyFiles = files) -> None:
                if moment == "before" and kind == "sync_directory":
                    files.dead = True
                    raise Crash("before its fsync")

            files.hook = die
            with pytest.raises(Crash):
                trainer.queue().finish_batch(batch)
            collect_garbage(collector, wait_seconds=0)
            _files(collector).plan = FaultPlan(seed=seed)
            _files(collector)._chance.seed(seed)
            _files(collector).power_cut("mixed")
            survivor = world.process()
            payloads: Payloads = survivor.payloads
            for held in _all_held(survivor):
                payloads.load(held)


def _all_held(pool: Pool):  # type: ignore[no-untyped-def]
    from strawq.handles import Held

    def see(machine):  # type: ignore[no-untyped-def]
        state = machine.state
        tasks = list(state.branch.queues["rollout"].tasks.values())
        return [Held(task, {part.object: state.objects[part.object] for part in task.parts}) for task in tasks]

    return pool.log.refresh(see)


def a_foreign_header_is_refused() -> None:
    world, other = World(1), World(2)
    world.process().queue().submit(_prompts(1))
    world.memory.remove(layout.HEADER)
    world.memory.stage(layout.HEADER, [other.memory.read(layout.HEADER)])
    with pytest.raises(Damaged):
        world.process().queue().submit(_prompts(1))


def a_group_is_dropped_out_of_a_batch_of_nobody() -> None:
    world = World()
    consumer, operator = world.process(), world.process()
    queue = consumer.queue()
    queue.submit(prompts(["a", "b"]))
    for lease in queue.acquire(2):
        completed(queue, queue.open(lease))
    batch = queue.take_batch(2).batch
    assert batch is not None
    first, second = batch.tasks
    assert operator.queue().drop_tasks([first], "damaged") == ()
    consumer.close()
    assert operator.queue().drop_tasks([first], "damaged") == (first,)
    counts = operator.queue().counts()
    assert (counts.ready, counts.in_batch, counts.dropped) == (1, 0, 1)
    again = operator.queue().take_batch(1).batch
    assert again is not None and again.tasks == (second,) and again.id != batch.id


def a_group_that_is_taken_back_is_work_again_and_in_no_batch() -> None:
    """Also asked again after a lost reply, and once: a zombie takes nothing back."""
    queue = World().process().queue()
    queue.submit(prompts(["a"]))
    (first,) = queue.acquire(1)
    completed(queue, queue.open(first))
    (lease,) = queue.acquire(1, stages=("ready",))
    work, *unaware = (queue.open(lease) for _ in range(4))
    anew = Group(work.task, work.group.prompt, (Sample(0),))
    for each, request in ((work, "anew"), (unaware[0], "anew")):
        change = Change(each, "yield", anew, rewrite=True)
        assert queue.report([change], request_id=request).accepted == (work.task,)
    assert queue.report([Change(unaware[1], "yield", anew, rewrite=True)]).repeated == (work.task,)
    assert queue.take_batch(1).batch is None
    (again,) = queue.acquire(1)
    group = queue.open(again).group
    assert again.attempt == 3 and not any(len(sample.tokens) for sample in group.samples)
    completed(queue, queue.open(again))
    with pytest.raises(Fenced):
        queue.report([Change(unaware[2], "yield", anew, rewrite=True)])
    assert queue.counts().ready == 1


def a_pause_admits_nothing() -> None:
    pool = World().process()
    pool.queue().submit(prompts(["a"]))
    pool.pause("weights")
    assert pool.queue().acquire(1).status == "paused"
    pool.resume()
    assert len(pool.queue().acquire(1)) == 1


def a_full_queue_leases_complete_groups() -> None:
    pool = World().process()
    pool.configure("rollout", QueueConfig(max_ready=1, max_leased=1))
    queue = pool.queue()
    queue.submit(prompts(["a", "b"]))
    (lease,) = queue.acquire(2)
    assert queue.acquire(1, stages=("ready",)).status == "empty"
    completed(queue, queue.open(lease))
    assert queue.acquire(1).status == "backpressured"
    ready = queue.acquire(2, stages=("ready", "partial", "fresh"))
    assert [one.task for one in ready] == [lease.task]
    queue.report([unchanged(one) for one in ready])
    pool.pause("weights")
    assert [again.task for again in queue.acquire(2, stages=("ready",))] == [lease.task], "that begins nothing"


def a_full_queue_leases_what_was_begun() -> None:
    """`oldest_first` waits for the oldest group, also for one that came back after others had filled the queue."""
    pool = World().process()
    queue = pool.queue()
    queue.submit(prompts(["a", "b", "c"]))
    first, second = queue.acquire(2)
    work = queue.open(first)
    begun = Sample(0, tokens=[5], logprobs=[-1.0], versions=(VersionSpan(0, 1, "1"),), status="aborted")
    queue.yield_(work, Group(work.task, work.group.prompt, (begun,)))
    completed(queue, queue.open(second))
    pool.configure("rollout", QueueConfig(max_ready=1))
    assert queue.acquire(1, stages=("fresh",)).status == "backpressured"
    assert [one.task for one in queue.acquire(3)] == [first.task]
    assert queue.acquire(1).status == "backpressured"


def an_observer_that_slept_takes_nobody_for_dead() -> None:
    world = World(lease_seconds=4.0)
    living, observer = world.process(), world.process()
    living.queue()
    living.keeper.require()
    observer.keeper.require()
    observer.keeper.round()
    world.clock.sleep(1000)
    assert observer.keeper.round() == []


def an_observer_whose_wall_clock_steps_takes_nobody_for_dead() -> None:
    world = World(lease_seconds=4.0)
    clock = HostClock(world.clock)
    living, observer = world.process(), world.process(clock=clock)
    living.queue()
    living.keeper.require()
    observer.keeper.require()
    observer.keeper.round()
    clock.wall_jump_ms += 3_600_000
    world.clock.sleep(0.5)
    assert observer.keeper.round() == []


def a_snapshot_stands_on_entries_that_a_power_cut_leaves() -> None:
    world = World()
    writer, other = world.process(), world.process()
    queue, files = writer.queue(), _files(writer)
    other.queue()

    def fail(moment: str, kind: str, path: str) -> None:
        if kind == "sync_directory" and path.startswith("log/"):
            raise OSError(errno.EIO, "failed")

    def arm(moment: str, kind: str, path: str) -> None:
        if moment == "after" and kind == "publish" and path.startswith("log/"):
            files.hook = fail

    files.hook = arm
    with pytest.raises(OutcomeUnknown):
        queue.submit(_prompts(1))
    seq = other.snapshot()
    _files(other).power_cut("drop")
    assert layout.snapshot(seq).rpartition("/")[2] in world.memory.names(layout.SNAPSHOTS)
    directory, _, name = layout.entry(seq).rpartition("/")
    assert name in world.memory.names(directory)
