"""What breaks when two processes commit at once, when a reply is lost, and when a writer sleeps through trims."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
from collections.abc import Callable

import pytest

from strawq.core.image import dump_state
from strawq.errors import Damaged, OutcomeUnknown
from strawq.model import VersionSpan
from strawq.pool import Pool
from strawq.queue import Queue
from strawq.samples import Group, Prompt, Sample
from strawq.storage import layout, log
from strawq.storage.faulty import Crash, FaultPlan, FaultyFiles
from strawq.testing.worlds import World
from strawq.trimming import trim_log


def prompts(count: int, text: str = "p") -> list[Prompt]:
    return [Prompt(group_id=f"{text}{i}", text=text) for i in range(count)]


def answer(work_group: Group) -> Group:
    sample = Sample(0, tokens=[1, 2], logprobs=[-1.0, -2.0], versions=(VersionSpan(0, 2, "1"),), status="completed")
    return Group(work_group.task_id, work_group.prompt, (sample,))


def finish_one(queue: Queue) -> str:
    work = queue.open(queue.acquire(1).leases[0])
    queue.complete(work, answer(work.group))
    return work.task


def dump(pool: Pool) -> bytes:
    dumped: bytes = pool.log.refresh(lambda machine: dump_state(machine.state))
    return dumped


def before_publish(pool: Pool, act: Callable[[], None]) -> None:
    """Run `act` once, after the next entry of `pool` is decided and staged and before it is published."""
    _at(pool, "before", act)


def after_publish(pool: Pool, act: Callable[[], None]) -> None:
    """Run `act` once, after the next entry of `pool` has its name and before the process goes on."""
    _at(pool, "after", act)


def _at(pool: Pool, moment: str, act: Callable[[], None]) -> None:
    files = pool.files
    assert isinstance(files, FaultyFiles)

    def hook(when: str, kind: str, path: str) -> None:
        if when == moment and kind == "publish" and path.startswith("log/"):
            files.hook = None
            act()

    files.hook = hook


def trim_hard(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trim everything behind the newest snapshots, in segments of one entry."""
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 1)
    pool.log.snapshot()
    pool.publish_version(str(pool.log.machine.seq))
    pool.log.snapshot()
    trim_log(pool, keep_entries=0, snapshots_kept=2)


def test_the_loser_of_a_race_decides_again_on_what_the_winner_did() -> None:
    world = World()
    first, second = world.process(), world.process()
    first.queue().submit(prompts(1))
    second.queue()
    second.keeper.require()
    taken = []
    before_publish(first, lambda: taken.append(second.queue().acquire(1)))
    mine = first.queue().acquire(1)
    assert len(taken[0]) == 1, "the second process won"
    assert mine.status == "empty", "and the first did not lease the same task"
    assert dump(first) == dump(second)


@pytest.mark.parametrize("fault", ["lost_eexist", "lost_eio", "lost_etimedout", "lost_estale"])
def test_a_commit_whose_reply_is_lost_happens_once(fault: str) -> None:
    world = World()
    pool = world.process()
    files = pool.files
    assert isinstance(files, FaultyFiles)
    pool.queue().submit(prompts(1))
    start = len(files.calls)
    pool.queue().submit(prompts(1))
    step = [kind for kind, _ in files.calls[start:]].index("publish") + 1
    files.plan = FaultPlan(at={len(files.calls) + step: fault})  # type: ignore[dict-item]
    pool.queue().submit(prompts(3))
    assert [fired[1] for fired in files.fired] == [fault]
    assert files.fired[0][2].startswith("log/")
    assert world.process().queue().counts().total == 5


def test_a_reply_that_stays_lost_is_an_unknown_outcome_and_the_same_request_gets_the_answer() -> None:
    world = World()
    pool = world.process()
    queue = pool.queue()
    files = pool.files
    assert isinstance(files, FaultyFiles)
    real = files.publish

    def lose(staged: str, path: str) -> None:
        if path.startswith("log/"):
            with contextlib.suppress(FileExistsError):
                real(staged, path)
            files.read = blind  # type: ignore[method-assign]
            raise OSError(errno.EIO, "lost")
        real(staged, path)

    def blind(path: str) -> bytes:
        raise OSError(errno.EIO, "lost")

    real_read = files.read
    files.publish = lose  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        queue.submit(prompts(2), request_id="load-1")
    files.publish = real  # type: ignore[method-assign]
    files.read = real_read  # type: ignore[method-assign]
    assert queue.submit(prompts(2), request_id="load-1").prompts == 2
    assert queue.counts().total == 2, "asking again did not submit again"


def test_a_writer_that_slept_through_trims_removes_its_ghost_and_commits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    sleeper, other = world.process(), world.process()
    queue = sleeper.queue()
    ghost_seq = sleeper.log.machine.seq + 1

    def meanwhile() -> None:
        for i in range(4):
            other.queue().submit(prompts(1, f"m{i}"))
        trim_hard(other, monkeypatch)
        trim_hard(other, monkeypatch)

    before_publish(sleeper, meanwhile)
    queue.submit(prompts(5, "slept"))
    with pytest.raises(FileNotFoundError):
        world.memory.read(layout.entry(ghost_seq))
    assert world.process().queue().counts().total == 9
    assert dump(sleeper) == dump(other) == dump(world.process())


def test_a_writer_that_slept_after_its_commit_finds_it_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    sleeper, other = world.process(), world.process()
    queue = sleeper.queue()

    def meanwhile() -> None:
        other.queue().submit(prompts(1))
        trim_hard(other, monkeypatch)

    after_publish(sleeper, meanwhile)
    assert queue.submit(prompts(5, "slept")).prompts == 5
    assert world.process().queue().counts().total == 6


def test_no_entry_goes_for_a_floor_that_a_power_cut_could_take_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trimmer dies between the name of its floor and the sync of it; the sleeper finds its commit below that."""
    world = World()
    sleeper, trimmer = world.process(), world.process()
    queue = sleeper.queue()
    mine = sleeper.log.machine.seq + 1

    def meanwhile() -> None:
        world.process().queue().submit(prompts(1))
        files = trimmer.files
        assert isinstance(files, FaultyFiles)

        def die(moment: str, kind: str, path: str) -> None:
            if (moment, kind, path) == ("before", "sync_directory", layout.FLOORS):
                raise Crash("no floor is durable")

        files.hook = die
        with pytest.raises(Crash):
            trim_hard(trimmer, monkeypatch)

    after_publish(sleeper, meanwhile)
    assert queue.submit(prompts(5, "slept")).prompts == 5
    world.memory.crash(random.Random(1), "drop")
    assert _there(world, layout.entry(mine)) or _there(world, layout.floor(1)), "gone, and the floor with it"
    assert world.process().queue().counts().total == 6


def _there(world: World, path: str) -> bool:
    try:
        world.memory.read(path)
    except FileNotFoundError:
        return False
    return True


def test_a_writer_that_slept_longer_than_the_pool_remembers_says_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("strawq.core.apply.REQUESTS_KEPT", 3)
    world = World()
    sleeper, other = world.process(), world.process()
    queue = sleeper.queue()

    def meanwhile() -> None:
        for _ in range(5):
            other.queue().submit(prompts(1))
        trim_hard(other, monkeypatch)

    after_publish(sleeper, meanwhile)
    with pytest.raises(OutcomeUnknown):
        queue.submit(prompts(5, "slept"))
    assert world.process().queue().counts().total == 10


def test_a_reader_with_an_old_state_does_not_take_a_trimmed_log_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    reader, other = world.process(), world.process()
    reader.queue()
    for _ in range(3):
        other.queue().submit(prompts(1))
    trim_hard(other, monkeypatch)
    assert reader.queue().counts().total == 3


def test_a_torn_entry_at_the_tip_is_named_and_never_half_read() -> None:
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(2))
    seq = pool.log.machine.seq
    data = world.memory.read(layout.entry(seq))
    for size in range(len(data)):
        torn = world.memory.copy()
        torn.remove(layout.entry(seq))
        torn.stage(layout.entry(seq), [data[:size]])
        reader = world.process(files=torn)
        seen = reader.inspect()
        assert seen.queues["rollout"].tasks.total == 0, "what is whole is shown"
        assert layout.entry(seq) in seen.damage[0], "and the damage is named"
        with pytest.raises(Damaged, match=layout.entry(seq)):
            reader.queue()
        if size % 40 == 0:
            assert reader.log.void_tip() == seq
            assert world.process(files=torn).queue().submit(prompts(1)).prompts == 1, "history goes on behind it"
            assert reader.log.void_tip() == 0


def test_of_two_repairs_and_a_commit_behind_a_torn_tip_one_wins() -> None:
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(2))
    seq = pool.log.machine.seq
    data = world.memory.read(layout.entry(seq))
    world.memory.remove(layout.entry(seq))
    world.memory.stage(layout.entry(seq), [data[:50]])
    first, second = world.process(), world.process()
    before_publish(first, lambda: (second.log.void_tip(), second.queue().submit(prompts(3)), None)[2])
    first.log.void_tip()
    assert dump(first) == dump(second) == dump(world.process())
    assert first.queue().counts().total == 3


def test_a_damaged_entry_with_others_behind_it_is_not_voided() -> None:
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(2))
    seq = pool.log.machine.seq
    pool.queue().submit(prompts(2))
    world.memory.remove(layout.entry(seq))
    world.memory.stage(layout.entry(seq), [b"{}"])
    with pytest.raises(Damaged, match="others follow"):
        world.process().log.void_tip()


def test_one_flipped_bit_anywhere_in_an_entry_is_never_accepted() -> None:
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(1))
    seq = pool.log.machine.seq
    data = world.memory.read(layout.entry(seq))
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        other = world.memory.copy()
        other.remove(layout.entry(seq))
        other.stage(layout.entry(seq), [bytes(flipped)])
        reader = world.process(files=other)
        with pytest.raises(Damaged, match=layout.entry(seq)):
            reader.queue().open(reader.queue().acquire(1).leases[0])


def test_damaged_snapshots_are_passed_over_and_named() -> None:
    world = World()
    pool = world.process()
    for _ in range(3):
        pool.queue().submit(prompts(1))
        pool.log.snapshot()
    newest = layout.snapshot(pool.log.machine.seq)
    data = world.memory.read(newest)
    for size in range(0, len(data), 7):
        other = world.memory.copy()
        other.remove(newest)
        other.stage(newest, [data[:size]])
        reader = world.process(files=other)
        assert reader.queue().counts().total == 3
        assert newest in reader.log.damage


def test_a_state_from_a_snapshot_equals_the_state_from_all_entries() -> None:
    world = World()
    pool = world.process()
    queue = pool.queue()
    queue.submit(prompts(6))
    finish_one(queue)
    pool.log.snapshot()
    finish_one(queue)
    from_snapshot = dump(world.process())
    for name in world.memory.names(layout.SNAPSHOTS):
        world.memory.remove(f"{layout.SNAPSHOTS}/{name}")
    assert dump(world.process()) == from_snapshot == dump(pool)


def test_what_is_acknowledged_survives_a_power_cut_at_any_call() -> None:
    for number in range(1, 60):
        world = World()
        files = world.files(FaultPlan(seed=number, crash_at=(number, "after")))
        acknowledged = 0
        try:
            pool = world.process(files=files)
            for _ in range(4):
                pool.queue().submit(prompts(1))
                acknowledged += 1
        except Crash:
            pass
        files.power_cut()
        total = world.process().queue().counts().total
        assert acknowledged <= total <= acknowledged + 1, f"crash after call {number}"


def test_commits_of_many_threads_go_into_few_entries() -> None:
    world = World()
    pool = world.process()
    queue = pool.queue()
    start = threading.Barrier(16)

    def submit() -> None:
        start.wait()
        for _ in range(5):
            queue.submit(prompts(1))

    threads = [threading.Thread(target=submit) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue.counts().total == 80
    assert pool.log.machine.seq <= 81
    assert dump(world.process()) == dump(pool)


def test_opening_reads_what_is_live_not_what_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "SNAPSHOT_ENTRIES", 20)
    world = World()
    pool = world.process()
    for _ in range(300):
        pool.queue().submit(prompts(1))
        finish = pool.queue()
        work = finish.open(finish.acquire(1).leases[0])
        finish.drop(work, "not needed")
    files = world.files()
    world.process(files=files).inspect()
    assert files.counts["read"] < 150


def test_a_request_asked_again_on_the_branch_that_goes_on_gets_its_answer() -> None:
    """The caller names no branch: that it moved meanwhile does not make it another request."""
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(3))
    taken = pool.queue().acquire(1, request_id="lease")
    finish_one(pool.queue())
    pool.queue().yield_(pool.queue().open(taken.leases[0]))
    batch = pool.queue().take_batch(1, request_id="batch").batch
    assert batch is not None
    assert pool.queue().take_batch(1, request_id="batch").batch == batch
    pool.checkpoint("here")
    pool.rollback("here")
    assert len(pool.queue().acquire(1, request_id="lease")) == 0, "what it got is not its any more"
    again = pool.queue().take_batch(1, request_id="batch")
    assert again.batch is None, "a batch that is not ours is not handed out as if it were"
    redelivered = pool.queue().take_batch(1).batch
    assert redelivered is not None
    assert redelivered.delivery == 2


def test_a_reader_that_stands_on_a_ghost_does_not_take_the_true_history_for_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ghost lies right below the floor, and the entry at the floor names another one before it."""
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 1)
    world = World()
    sleeper, reader, other = world.process(), world.process(), world.process()
    queue = sleeper.queue()
    reader.queue()
    files = sleeper.files
    assert isinstance(files, FaultyFiles)

    def asleep(moment: str, kind: str, path: str) -> None:
        if moment == "before" and kind == "publish" and path.startswith("log/"):
            files.hook = killed
            other.queue().submit(prompts(1))
            other.snapshot()
            other.queue().submit(prompts(1))
            trim_log(other, keep_entries=0, snapshots_kept=1)

    def killed(moment: str, kind: str, path: str) -> None:
        if moment == "after" and kind == "publish" and path.startswith("log/"):
            files.dead = True
            raise Crash("it leaves its ghost")

    files.hook = asleep
    ghost = sleeper.log.machine.seq + 1
    with pytest.raises(Crash):
        queue.submit(prompts(5))
    world.memory.read(layout.entry(ghost))
    assert reader.queue().counts().total == 2
    assert dump(reader) == dump(other)
