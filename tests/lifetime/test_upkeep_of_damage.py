"""One object that cannot be read keeps its own entry or file, is named with its groups, and stops nothing else."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from strawq import Pool, Prompt
from strawq.errors import StorageFailed
from strawq.garbage import collect_garbage
from strawq.merging import SICK_FILES, merge_objects
from strawq.model import StoredObject
from strawq.storage import layout
from strawq.storage.snapshots import snapshot_numbers
from strawq.testing.scenes import finish_work, prompts, require_healthy
from strawq.testing.worlds import World
from strawq.trimming import trim_log
from strawq.upkeep import Upkeep
from strawq.verification import verify
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 4)


def rows_of(pool: Pool) -> list[StoredObject]:
    rows: list[StoredObject] = pool.log.refresh(lambda machine: list(machine.state.objects.values()))
    return sorted(rows, key=lambda row: row.seq)


def inline(world: World, count: int = 20) -> Pool:
    """A pool with an object in each of its first entries, and snapshots behind them."""
    pool = world.process()
    for number in range(count):
        pool.queue().submit(prompts([f"g{number}"]))
    for version in range(4):
        pool.snapshot()
        pool.publish_version(version)
    return pool


def flip(world: World, row: StoredObject) -> None:
    path = layout.record_file(row.ref.epoch, row.ref.name) if row.ref.epoch else layout.entry(row.seq)
    data = bytearray(world.memory.read(path))
    data[row.ref.offset + row.ref.bytes // 2 if row.ref.epoch else -row.ref.bytes // 2] ^= 1
    world.memory.remove(path)
    world.memory.stage(path, [bytes(data)])


def lose(world: World, row: StoredObject) -> None:
    world.memory.remove(layout.entry(row.seq))


def sick(pool: Pool, monkeypatch: pytest.MonkeyPatch, hit: Callable[[str], bool]) -> None:
    """The mount answers EIO where these files are read."""
    read = pool.files.read

    def call(path: str) -> bytes:
        if hit(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return read(path)

    monkeypatch.setattr(pool.files, "read", call)


# Trimming.


@pytest.mark.parametrize("harm", ["flipped", "lost", "eio"])
def test_the_log_is_trimmed_up_to_an_object_that_cannot_be_read_and_says_so(
    harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    pool = inline(world)
    bad = rows_of(pool)[10]
    if harm == "eio":
        sick(pool, monkeypatch, lambda path: path == layout.entry(bad.seq))
    else:
        (flip if harm == "flipped" else lose)(world, bad)
    plan = trim_log(pool, keep_entries=0, snapshots_kept=2, dry_run=True)
    done = trim_log(pool, keep_entries=0, snapshots_kept=2)
    assert plan == done
    assert done.floor == bad.seq - bad.seq % 4 and done.entries == done.floor - 1 and done.moved == 10
    (sentence,) = done.unfinished
    assert f"from entry {done.floor} on" in sentence and layout.entry(bad.seq) in sentence
    assert "fresh prompts" in sentence and "restore the file from a copy" in sentence
    assert next(row.seq for row in rows_of(pool) if row.ref.epoch == 0) == bad.seq
    began = world.clock.now
    assert trim_log(pool, keep_entries=0, snapshots_kept=2).floor == done.floor
    assert world.clock.now - began < 4, "the others are not read again, and it is waited for once"
    named = [finding.what for finding in verify(pool).findings]
    assert named and all(layout.entry(bad.seq) in what for what in named)


def test_the_log_is_trimmed_further_once_the_groups_that_need_the_object_are_dropped() -> None:
    world = World()
    pool = inline(world)
    bad = rows_of(pool)[10]
    flip(world, bad)
    queue = pool.queue()
    (task,) = [lease.task for lease in queue.acquire(20) if bad.ref.digest in lease.held.objects]
    pool.expire_session(pool.keeper.current, "it stumbled over the object")
    done = trim_log(pool, keep_entries=0, snapshots_kept=2)
    assert f"`strawq drop POOL -q rollout --reason damaged {task}`" in done.unfinished[0]
    assert queue.drop_tasks([task], "damaged") == (task,)
    later = trim_log(pool, keep_entries=0, snapshots_kept=2)
    assert later.unfinished == () and later.floor > bad.seq
    assert pool.files.names(layout.segment_directory(0))[0] == f"{later.floor:012d}.json"
    finish_work(pool)
    require_healthy(pool)


def test_what_has_ended_and_is_damaged_is_in_nobodys_way() -> None:
    world = World()
    pool = inline(world)
    leases = pool.queue().acquire(20)
    works = [pool.queue().open(lease) for lease in leases]
    flip(world, rows_of(pool)[10])
    for work in works:
        pool.queue().drop(work, "dull")
    done = trim_log(pool, keep_entries=0, snapshots_kept=2)
    assert done.unfinished == () and done.moved == 0 and done.floor > 20
    require_healthy(pool)


def test_a_damaged_snapshot_does_not_stop_a_trim_and_the_pool_is_opened_behind_it() -> None:
    world = World()
    pool = inline(world)
    path = layout.snapshot(snapshot_numbers(pool.files)[0])
    data = world.memory.read(path)
    world.memory.remove(path)
    world.memory.stage(path, [data[:-1]])
    assert trim_log(pool, keep_entries=0).unfinished == ()
    later = world.process()
    assert later.queue().counts().total == 20
    verify(later, repair=True)
    require_healthy(later)


# Merging.


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strawq.payloads.INLINE_OBJECT_BYTES", 0)
    monkeypatch.setattr("strawq.merging.MERGE_FILES", 4)


def scattered(world: World, count: int) -> Pool:
    pool = world.process()
    for number in range(count):
        pool.queue().submit(prompts([f"g{number}"]))
    collect_garbage(pool, wait_seconds=0)
    return pool


@pytest.mark.usefixtures("small_files")
def test_a_file_that_the_mount_does_not_read_stays_and_the_others_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = scattered(World(), 6)
    bad = rows_of(pool)[2]
    path = layout.record_file(bad.ref.epoch, bad.ref.name)
    sick(pool, monkeypatch, lambda read: read == path)
    assert merge_objects(pool).objects == 5
    assert [row.ref for row in rows_of(pool) if not row.ref.file] == [bad.ref]


@pytest.mark.usefixtures("small_files")
def test_a_mount_that_reads_nothing_is_not_asked_for_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    pool = scattered(world, 2 * SICK_FILES)
    asked: set[str] = set()
    sick(pool, monkeypatch, lambda path: path.startswith("objects/") and asked.add(path) is None)
    with pytest.raises(StorageFailed):
        merge_objects(pool)
    assert len(asked) == SICK_FILES


# All of it.


def damaged_pool(path: Path) -> tuple[Pool, StoredObject]:
    """A pool on disk with a flipped byte in a live object of an old entry, and garbage to collect."""
    opened = Pool.open(path, background=False)
    queue = opened.queue()
    for number in range(10):
        queue.submit([Prompt(text=f"prompt {number}")])
    rows = rows_of(opened)
    queue.submit([Prompt(text="x" * 100_000)])
    (large,) = [lease for lease in queue.acquire(11) if lease.held.objects.keys() - {row.ref.digest for row in rows}]
    queue.drop(queue.open(large), "dull")
    for version in range(4):
        opened.snapshot()
        opened.publish_version(version)
    opened.expire_session(opened.keeper.current, "done")
    entry = path / layout.entry(rows[5].seq)
    data = bytearray(entry.read_bytes())
    data[-rows[5].ref.bytes // 2] ^= 1
    entry.chmod(0o644)
    entry.write_bytes(data)
    return opened, rows[5]


def test_the_verb_collects_merges_and_reports_all_of_it_beside_a_damaged_object(run: Run, pool: Path) -> None:
    opened, bad = damaged_pool(pool)
    opened.close()
    ran = run("gc", pool, "--keep-entries", "0", "--json", code=6)
    assert ran.data["by_reason"]["unreachable object"] == 1 and ran.data["merged"]["files"] == 0
    assert ran.data["log"]["floor"] == bad.seq - bad.seq % 4 > 0
    assert ran.data["unfinished"] == ran.data["log"]["unfinished"] != []
    assert ran.err.count("\n") == 1 and "--reason damaged" in ran.err
    task = ran.err.partition("--reason damaged ")[2].partition("`")[0]
    run("drop", pool, task, "--reason", "damaged")
    assert run("gc", pool, "--keep-entries", "0", "--json").data["log"]["floor"] > bad.seq
    assert run("verify", pool, "--full").code == 0


def test_upkeep_says_it_once_and_goes_on(pool: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened, bad = damaged_pool(pool)
    with opened, caplog.at_level(logging.WARNING, "strawq.upkeep"):
        keeping = Upkeep(opened, keep_entries=0)
        assert [keeping.turn() for _ in range(3)] == ["failed"] * 3
        assert keeping.files == 1 and keeping.entries == bad.seq - bad.seq % 4 - 1
        (said,) = [record.getMessage() for record in caplog.records]
        assert "the log was not trimmed in full" in said and bad.ref.digest[:12] in said
