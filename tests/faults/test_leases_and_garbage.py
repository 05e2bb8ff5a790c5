"""Leases of the dead, the frozen and the slow; garbage collection against writers that sleep and files it does not
know. Each test is one public fault of a system of this kind."""

from __future__ import annotations

import threading

import pytest

from strawq.core import commands as c
from strawq.errors import BadInput, BranchMoved, Contended, Damaged, Fenced, NotAPool
from strawq.garbage import collect_garbage, execute, plan_collection
from strawq.model import QueueConfig
from strawq.pool import Pool
from strawq.storage import layout, log
from strawq.storage.faulty import FaultPlan, FaultyFiles
from strawq.testing.clock import HostClock
from strawq.testing.crashes import content
from strawq.testing.scenes import GROUP_TOKENS, build, grown, image, prompts, require_sound, take_over
from strawq.testing.worlds import World
from strawq.work import Change


def hook(pool: Pool, moment: str, kind: str, prefix: str, act: object) -> None:
    """Run `act` once at the next such file call of the pool's process."""
    files = pool.files
    assert isinstance(files, FaultyFiles) and callable(act)

    def look(when: str, what: str, path: str) -> None:
        if (when, what) == (moment, kind) and path.startswith(prefix):
            files.hook = None
            act()

    files.hook = look


# Leases.


@pytest.mark.parametrize("outcome", ["save", "yield", "complete", "drop", "fail"])
def test_a_worker_that_was_frozen_past_its_lease_changes_nothing_when_it_wakes(outcome: str) -> None:
    world = World()
    frozen, successor = world.process(), world.process()
    frozen.queue().submit(prompts(["a"]))
    work = frozen.queue().open(frozen.queue().acquire(1).leases[0])
    successor.expire_session(frozen.keeper.current)
    theirs = successor.queue().open(successor.queue().acquire(1).leases[0])
    successor.queue().save(theirs, grown(theirs.group, 3, "2"))
    before = image(successor)
    group = grown(work.group, GROUP_TOKENS) if outcome in ("save", "yield", "complete") else None
    with pytest.raises(Fenced):
        frozen.queue().report([Change(work, outcome, group, "why" if group is None else "")])  # type: ignore[arg-type]
    assert image(world.process()) == before
    assert successor.queue().complete(theirs, grown(theirs.group, GROUP_TOKENS)).accepted


def test_work_that_takes_a_day_is_not_handed_out_again() -> None:
    """Nothing is timed but silence: no visibility timeout runs out on a living process."""
    world = World(lease_seconds=10)
    worker, other = world.process(), world.process()
    worker.queue().submit(prompts(["a"]))
    work = worker.queue().open(worker.queue().acquire(1).leases[0])
    other.keeper.require()
    for _ in range(24 * 60):
        world.clock.now += 60
        assert worker.keeper.round() == [] and other.keeper.round() == []
    world.clock.now += 24 * 3600  # everybody slept at once: a stopped machine says nothing about the others
    assert other.keeper.round() == []
    assert other.queue().acquire(1).status == "empty"
    assert worker.queue().complete(work, grown(work.group, GROUP_TOKENS)).accepted


@pytest.mark.parametrize("hours", [-24, -1, 1, 24])
def test_wall_clocks_that_jump_take_nobodys_lease(hours: int) -> None:
    world = World(lease_seconds=10)
    clocks = [HostClock(world.clock, origin_seconds=10.0**number) for number in range(2)]
    worker, other = (world.process(clock=clock) for clock in clocks)
    worker.queue().submit(prompts(["a"]))
    work = worker.queue().open(worker.queue().acquire(1).leases[0])
    other.keeper.require()
    for number in range(40):
        world.clock.now += 1
        clocks[number % 2].wall_jump_ms += hours * 3_600_000 * (1 if number % 3 else -1)
        assert worker.keeper.round() == [] and other.keeper.round() == []
    assert worker.queue().complete(work, grown(work.group, GROUP_TOKENS)).accepted
    for _ in range(9):
        world.clock.now += 1
        assert other.keeper.round() == [], "no early takeover either"


def test_a_task_that_kills_its_workers_becomes_a_dead_letter_whoever_restarts() -> None:
    """Claims are counted in the log, so restarts forget nothing; reported failures have a bound of their own."""
    world = World(config=QueueConfig(max_attempts=2, max_expirations=3))
    world.process().queue().submit(prompts(["killer", "other"]))
    for attempt in range(1, 4):
        victim = world.process()
        lease = victim.queue().acquire(1).leases[0]
        assert (lease.task, lease.attempt) == ("1-0", attempt + (attempt == 3)), (
            "claims are counted, also the failed one"
        )
        if attempt == 2:
            victim.queue().fail(victim.queue().open(lease), "slipped")
            lease = victim.queue().acquire(1).leases[0]
        world.process().expire_session(victim.keeper.current)
    letters = world.process().queue().dead_letters()
    assert [task.id for task in letters] == ["1-0"]
    assert "3 times" in letters[0].reason


def test_a_hundred_writers_commit_once_each() -> None:
    world = World()
    pools = [world.process() for _ in range(100)]
    for pool in pools:
        pool.inspect()
    start = threading.Barrier(100)
    failed: list[BaseException] = []

    def write(number: int) -> None:
        start.wait()
        try:
            pools[number].queue().submit(prompts([f"w{number}"]))
        except Exception as error:  # noqa: BLE001 (handed to the main thread)
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert world.process().queue().counts().total == 100
    assert len({image(pool) for pool in pools}) == 1
    assert sum(pool.log.races_lost for pool in pools) < 100 * 100 / 2


def test_a_writer_that_always_loses_gives_up_with_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "COMMIT_TRIES", 5)
    world = World()
    loser, winner = world.process(), world.process()
    loser.queue()
    files = loser.files
    assert isinstance(files, FaultyFiles)

    def always(when: str, kind: str, path: str) -> None:
        if (when, kind) == ("before", "publish") and path.startswith("log/"):
            winner.queue().submit(prompts(["w"]))

    files.hook = always
    with pytest.raises(Contended, match="5 times"):
        loser.queue().submit(prompts(["l"]))
    files.hook = None
    assert loser.queue().counts().total == 5
    assert world.memory.names(layout.STAGING) == []


# Garbage.


def test_a_put_that_slept_through_a_collection_is_made_again() -> None:
    """The bytes were stored, then collected as unreferenced, then the reference came: it is refused, and they are
    stored again in a young epoch."""
    world = World()
    writer, collector = world.process(), world.process()
    writer.queue()
    taken: list[int] = []

    def collect() -> None:
        taken.append(collect_garbage(collector, wait_seconds=0)[1].by_reason.get("unreachable object", 0))

    hook(writer, "before", "publish", "log/", collect)
    writer.queue().submit(prompts(["a", "b"], payload_bytes=40_000))
    assert taken == [1], "the collector took what nothing referred to"
    reader = world.process()
    for lease in reader.queue().acquire(2):
        assert len(reader.queue().open(lease).group.prompt.payload or b"") == 40_000
    collect_garbage(collector, wait_seconds=0)
    assert sum(path.endswith(".arrow") for path, _ in content(world.memory)) == 1


def test_a_collector_that_sleeps_between_its_look_and_its_unlink_removes_only_garbage() -> None:
    """The same bytes come back meanwhile, under the same digest: they have another path."""
    world = World()
    writer, collector = world.process(), world.process()
    same = prompts(["a"], payload_bytes=80_000)
    number = writer.queue().submit(same).numbers[0]
    work = writer.queue().open(writer.queue().acquire(1).leases[0])
    writer.queue().drop(work, f"{number} is dull")
    collect_garbage(collector, wait_seconds=0, dry_run=True)
    from strawq.garbage import close_epoch

    close_epoch(collector, 0)
    plan = plan_collection(collector)
    assert [removal.why for removal in plan.removals] == ["unreachable object"]
    writer.queue().submit(same)
    assert execute(collector, plan).files == 1
    again = world.process().queue()
    assert len(again.open(again.acquire(1).leases[0]).group.prompt.payload or b"") == 80_000


def test_files_that_strawq_did_not_write_are_left_and_reported() -> None:
    scene = build()
    world = scene.world.twin()
    collect_garbage(world.process(), wait_seconds=0)
    part = next(path.rpartition("/")[0] for path, _ in content(world.memory) if path.endswith(".arrow"))
    foreign = [f"{part}/README.txt", "notes.txt", "sessions/who", "objects/old/x"]
    world.memory.make_directory("objects/old")
    for path in foreign:
        world.memory.stage(path, [b"mine"])
    world.memory.stage(f"{part}/.nfs0001", [b"an open file"])
    pool = world.process()
    take_over(pool)
    for task in list(scene.works):
        pool.queue().drop_tasks([scene.works[task].task], "dull")
    _, collected = collect_garbage(pool, wait_seconds=0)
    _, collected = collect_garbage(pool, wait_seconds=0)
    left = dict(content(world.memory))
    assert all(left.get(path) == b"mine" for path in foreign)
    assert world.memory.read(f"{part}/.nfs0001") == b"an open file"
    assert {"notes.txt", "sessions/who", "objects/old"} <= set(collected.unknown)


def test_a_directory_that_will_not_go_stops_no_collection() -> None:
    """`.nfs` leftovers keep it: ENOTEMPTY is an answer, not an error."""
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(["a"], payload_bytes=80_000))
    path = next(path for path, _ in content(world.memory) if path.endswith(".arrow"))
    world.memory.stage(f"{path.rpartition('/')[0]}/.nfs0001", [b""])
    pool.queue().drop(pool.queue().open(pool.queue().acquire(1).leases[0]), "dull")
    for _ in range(2):
        collect_garbage(pool, wait_seconds=0)
    assert not any(name.endswith(".arrow") for name, _ in content(world.memory))


def test_a_rollback_leaves_nobody_training_on_the_abandoned_future() -> None:
    """Identity is lineage: batch and lease of the old line have the same numbers, and count for nothing."""
    scene = build()
    world = scene.world.twin()
    trainer = world.process()
    take_over(trainer)
    batch = trainer.queue().take_batch(2).batch
    work = trainer.queue().open(trainer.queue().acquire(1).leases[0])
    assert batch is not None
    other = world.process()
    other.checkpoint("now")
    other.rollback("now")
    for act in (lambda: trainer.queue().finish_batch(batch), lambda: trainer.queue().save(work, grown(work.group, 4))):
        with pytest.raises(BranchMoved):
            act()
    again = trainer.queue().take_batch(2).batch
    assert again is not None and again.tasks == batch.tasks and again.branch != batch.branch


def test_a_rollback_names_its_checkpoint_and_says_what_is_not_whole() -> None:
    scene = build()
    pool = scene.world.twin().process()
    with pytest.raises(BadInput, match="there are: first, main"):
        pool.rollback("latest")
    with pytest.raises(BadInput, match="not of one step"):
        pool.rollback("first", {"model": "another"})
    assert pool.branch() == "second"


def test_zeros_that_become_bytes_are_waited_for_and_others_are_named() -> None:
    """Right size, zeros inside, for a while."""
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(["a"], payload_bytes=80_000))
    lease = pool.queue().acquire(1).leases[0]
    reader = world.process(plan=FaultPlan(seed=3, rates={"zeros": 0.5}))
    require_sound(reader.payloads.load(lease.held))
    never = world.process()
    files = never.files
    assert isinstance(files, FaultyFiles)
    files.plan = FaultPlan(rates={"zeros": 1.0})
    with pytest.raises(Damaged, match=lease.held.task.parts[0].object):
        never.payloads.load(lease.held)
    files.plan = FaultPlan()
    require_sound(never.payloads.load(lease.held))


def test_a_directory_without_a_header_is_not_a_pool_however_much_is_in_it() -> None:
    world = World()
    world.memory.remove(layout.HEADER)
    with pytest.raises(NotAPool):
        world.process()


def test_a_reference_into_a_closed_epoch_counts_only_if_the_state_reaches_it() -> None:
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(["a"], payload_bytes=80_000))
    ref = next(iter(pool.log.machine.state.objects.values())).ref
    collect_garbage(pool, wait_seconds=0)
    assert pool.log.commit(c.Submit(queue="rollout", objects=(ref,))).numbers, "reachable: nothing new is needed"
    for lease in pool.queue().acquire(9):
        pool.queue().drop(pool.queue().open(lease), "dull")
    assert pool.log.commit(c.Submit(queue="rollout", objects=(ref,))).status == "epoch_closed"
