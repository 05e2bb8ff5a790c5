"""What a verification says of files that cannot be read: once for each, with one way on, and after one wait."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from strawq import Pool
from strawq.garbage import collect_garbage
from strawq.looks import BEHIND_SECONDS
from strawq.merging import merge_objects
from strawq.model import StoredObject
from strawq.remedies import TASKS_NAMED
from strawq.storage import layout
from strawq.storage.snapshots import snapshot_numbers
from strawq.testing.scenes import prompts
from strawq.testing.worlds import World
from strawq.trimming import trim_log
from strawq.verification import verify

MANY = 60


def rows_of(pool: Pool) -> list[StoredObject]:
    rows: list[StoredObject] = pool.log.refresh(lambda machine: list(machine.state.objects.values()))
    return sorted(rows, key=lambda row: row.seq)


def submitted(world: World, count: int = MANY) -> tuple[Pool, list[str]]:
    """A pool with an object for each of `count` groups, and the groups' tasks, which a worker had once."""
    pool = world.process()
    queue = pool.queue()
    for number in range(count):
        queue.submit(prompts([f"g{number}"]))
    tasks = [lease.task for lease in queue.acquire(count)]
    pool.expire_session(pool.keeper.current, "it is tired")
    return pool, tasks


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> tuple[World, Pool, list[str], str]:
    """The same, with all objects in one merged file: its path."""
    monkeypatch.setattr("strawq.payloads.INLINE_OBJECT_BYTES", 0)
    monkeypatch.setattr("strawq.merging.MERGE_FILES", 4)
    world = World()
    pool, tasks = submitted(world)
    collect_garbage(pool, wait_seconds=0)
    assert merge_objects(pool).into == 1
    (path,) = {layout.record_file(row.ref.epoch, row.ref.name) for row in rows_of(pool)}
    return world, pool, tasks, path


def cut(world: World, path: str) -> None:
    world.memory.remove(path)
    world.memory.stage(path, [b""])


def sick(pool: Pool, monkeypatch: pytest.MonkeyPatch, hit: Callable[[str], bool], number: int) -> None:
    """The mount refuses whatever is asked of these files."""

    def refusing(call: Callable[..., object]) -> Callable[..., object]:
        def asked(path: str, *given: object) -> object:
            if hit(path):
                raise OSError(number, os.strerror(number), path)
            return call(path, *given)

        return asked

    for name in ("read", "read_into", "size"):
        monkeypatch.setattr(pool.files, name, refusing(getattr(pool.files, name)))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("harm", ["cut", "lost", "refused", "eio"])
def test_a_merged_file_that_cannot_be_read_is_one_finding_with_one_command_and_one_wait(
    merged: tuple[World, Pool, list[str], str], harm: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, pool, tasks, path = merged
    if harm == "cut":
        cut(world, path)
    elif harm == "lost":
        world.memory.remove(path)
    else:
        sick(pool, monkeypatch, lambda asked: asked == path, errno.EACCES if harm == "refused" else errno.EIO)
    began = world.clock.now
    (finding,) = verify(pool, full=full).findings
    assert world.clock.now - began < 2 * BEHIND_SECONDS
    assert finding.what == path and f"({MANY} of the {MANY} live objects in it cannot be read)" in finding.problem
    assert "`strawq verify" not in finding.problem, "that is what is running"
    assert f"`strawq drop POOL -q rollout --reason damaged {' '.join(tasks)}`" in finding.remedy
    assert finding.remedy.count("strawq drop") == 1
    assert sorted(pool.queue().drop_tasks(tasks, "damaged")) == sorted(tasks)
    assert verify(pool, full=full).findings == ()


@pytest.mark.parametrize("harm", ["flipped", "lost", "emptied"])
def test_many_log_entries_that_cannot_be_read_are_waited_for_together(harm: str) -> None:
    world = World()
    pool, tasks = submitted(world)
    pool.snapshot()
    paths = [layout.entry(row.seq) for row in rows_of(pool)]
    for path in paths:
        data = world.memory.read(path)
        world.memory.remove(path)
        if harm != "lost":
            world.memory.stage(path, [data[:-1] + bytes([data[-1] ^ 1]) if harm == "flipped" else b""])
    reader = world.process()
    began = world.clock.now
    found = verify(reader, full=True).findings
    assert world.clock.now - began < 2 * BEHIND_SECONDS
    assert [finding.what for finding in found] == paths, "one finding for each file"
    assert all(task in finding.remedy for task, finding in zip(tasks, found, strict=True))


@pytest.mark.parametrize("behind", [0.0, 0.5, BEHIND_SECONDS - 0.01])
def test_a_mount_that_is_behind_is_waited_for(
    merged: tuple[World, Pool, list[str], str], behind: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, pool, _, path = merged
    sees_at = world.clock.now + behind
    sick(pool, monkeypatch, lambda asked: asked == path and world.clock.now < sees_at, errno.ENOENT)
    assert verify(pool, full=True).findings == ()
    assert world.clock.now <= sees_at + BEHIND_SECONDS


def test_an_entry_that_the_mount_shows_late_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    pool, _ = submitted(world, 6)
    sees_at, read = world.clock.now + 1.0, pool.files.read
    monkeypatch.setattr(
        pool.files, "read", lambda path: bytes(100) if "log/" in path and world.clock.now < sees_at else read(path)
    )
    pool.log.refresh()
    assert verify(pool, full=True).findings == ()


def test_more_groups_than_fit_into_a_command_are_counted_outside_of_it(
    merged: tuple[World, Pool, list[str], str],
) -> None:
    world, pool, *_ = merged
    queue = pool.queue()
    queue.submit(prompts([f"more {number}" for number in range(TASKS_NAMED + 7)]))
    assert len(queue.acquire(MANY + TASKS_NAMED + 7)) == MANY + TASKS_NAMED + 7
    (young,) = [row for row in rows_of(pool) if not row.ref.file]
    cut(world, layout.record_file(young.ref.epoch, young.ref.digest))
    (finding,) = verify(pool, full=True).findings
    command, _, rest = finding.remedy.partition("`strawq drop POOL -q rollout --reason damaged ")[2].partition("`")
    assert len(command.split()) == TASKS_NAMED and rest.startswith(" (asked again after that, it names 7 more)")
    assert all(part.isdigit() for task in command.split() for part in task.split("-"))


def test_a_long_look_shows_how_far_it_is(merged: tuple[World, Pool, list[str], str]) -> None:
    world, pool, _, path = merged
    cut(world, path)
    shown: list[tuple[str, int, int]] = []
    verify(pool, full=True, progress=lambda *what: shown.append(what))
    assert {("objects", MANY, MANY), ("objects again", MANY, MANY)} <= set(shown)


def trimmed(world: World) -> Pool:
    """A pool whose first entries are gone, with some snapshots and an entry behind the newest of them."""
    pool, _ = submitted(world, 20)
    for version in range(4):
        pool.publish_version(version)
        pool.snapshot()
    assert trim_log(pool, keep_entries=0, step=4).floor > 1
    pool.publish_version(9)
    return pool


def tear(world: World, path: str) -> None:
    data = world.memory.read(path)
    world.memory.remove(path)
    world.memory.stage(path, [data[:-1]])


@pytest.mark.parametrize("at_head", [False, True])
def test_one_repair_is_enough_where_the_newest_snapshot_is_damaged(at_head: bool) -> None:
    world = World()
    pool = trimmed(world)
    if at_head:
        pool.snapshot()
    newest, older, *_ = snapshot_numbers(pool.files)
    tear(world, layout.snapshot(newest))
    (finding,) = verify(world.process()).findings
    assert finding.what == layout.snapshot(newest) and "`strawq verify POOL --repair`" in finding.remedy
    repaired = verify(world.process(), repair=True)
    assert repaired.findings == () and len(repaired.repaired) == 2
    assert verify(world.process(), repair=True).repaired == ()
    assert (newest in snapshot_numbers(pool.files)) == at_head, "one of that entry is written anew"
    for left in snapshot_numbers(pool.files):
        if left > older:
            tear(world, layout.snapshot(left))
    assert world.process().queue().counts().total == 20, "the older one serves still"


def test_a_damaged_snapshot_of_entries_that_are_lost_is_evidence_and_stays() -> None:
    world = World()
    pool = trimmed(world)
    newest = pool.snapshot()
    tear(world, layout.snapshot(newest))
    world.memory.remove(layout.entry(newest))
    verify(world.process(), repair=True)
    assert newest in snapshot_numbers(pool.files)


@pytest.mark.parametrize("harm", ["lost", "torn"])
@pytest.mark.parametrize("repair", [False, True])
def test_without_a_whole_snapshot_of_a_trimmed_log_it_is_said_which_to_restore(harm: str, repair: bool) -> None:
    world = World()
    pool = trimmed(world)
    numbers, head = snapshot_numbers(pool.files), pool.log.refresh(lambda machine: machine.seq)
    saved = {path: world.memory.read(path) for path in map(layout.snapshot, numbers)}
    for path in saved:
        world.memory.remove(path) if harm == "lost" else tear(world, path)
    first, *others = verify(world.process(), repair=repair).findings
    assert first.what == "snapshots/" and "strawq verify" not in first.remedy
    begins = pool.log.refresh(lambda machine: machine.state.meta.floor)
    assert f"restore the snapshot of any of the entries {begins - 1} to {head} from a copy" in first.remedy
    assert [finding.what for finding in others] == ([] if harm == "lost" else sorted(saved))
    oldest = layout.snapshot(min(number for number in numbers if number >= begins - 1))
    if harm == "torn":
        world.memory.remove(oldest)
    world.memory.stage(oldest, [saved[oldest]])
    assert verify(world.process(), repair=True).findings == ()


def test_without_snapshots_and_log_the_whole_pool_is_to_be_restored() -> None:
    world = World()
    pool = trimmed(world)
    for name in world.memory.names(layout.SNAPSHOTS):
        world.memory.remove(f"{layout.SNAPSHOTS}/{name}")
    for segment in world.memory.names(layout.LOG):
        for name in world.memory.names(f"{layout.LOG}/{segment}"):
            world.memory.remove(f"{layout.LOG}/{segment}/{name}")
    assert pool.log.peek(lambda machine: machine.trims) == 1
    assert [finding.remedy for finding in verify(world.process()).findings] == ["restore the pool from a copy"]
