"""A copy of a pool may come without its empty directories: object stores and some archives have none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from strawq.errors import StorageFailed
from strawq.garbage import collect_garbage
from strawq.pool import Pool
from strawq.storage import layout
from strawq.storage.memory import MemoryFiles
from strawq.storage.staging import make_directories
from strawq.testing.scenes import completed, prompts
from strawq.testing.worlds import World
from strawq.trimming import trim_log
from strawq.verification import verify


def drop_empty(files: MemoryFiles, path: str = "") -> None:
    for name in files.names(path):
        below = f"{path}/{name}".lstrip("/")
        try:
            files.size(below)
        except IsADirectoryError:
            drop_empty(files, below)
            files.remove_directory(below)


def copied() -> World:
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(["a", "b"]))
    pool.close()
    drop_empty(world.memory)
    assert world.memory.names("") == ["log", "strawq.json"]
    return world


def work(pool: Pool) -> None:
    queue = pool.queue()
    completed(queue, queue.open(queue.acquire(1).leases[0]))
    assert queue.take_batch(1).batch is not None


def trim(pool: Pool) -> None:
    for version in range(20):
        pool.publish_version(version)
    assert trim_log(pool, keep_entries=2, snapshots_kept=1, step=1).floor == 0
    pool.snapshot()
    drop_floors(pool)
    pool.publish_version(20)
    assert trim_log(pool, keep_entries=2, snapshots_kept=1, step=1).floor > 2


def drop_floors(pool: Pool) -> None:
    pool.files.remove_directory(layout.FLOORS)


WAYS: list[Callable[[Pool], object]] = [
    lambda pool: pool.publish_version(1),
    lambda pool: pool.checkpoint("k"),
    lambda pool: pool.keeper.require(),
    lambda pool: pool.snapshot(),
    lambda pool: collect_garbage(pool, wait_seconds=0),
    work,
    trim,
]


@pytest.mark.parametrize("call", WAYS, ids=["commit", "checkpoint", "join", "snapshot", "collect", "work", "trim"])
def test_whoever_writes_makes_them_again(call: Callable[[Pool], object]) -> None:
    world = copied()
    pool = world.process()
    call(pool)
    pool.keeper.require()
    assert set(world.memory.names("")) >= {*layout.DIRECTORIES, layout.HEADER}
    pool.close()
    assert verify(world.process(), full=True).findings == ()


@pytest.mark.parametrize("inline", [True, False])
def test_also_where_an_object_gets_a_file_first(inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = copied()
    if not inline:
        monkeypatch.setattr("strawq.payloads.INLINE_OBJECT_BYTES", 0)
    world.process().queue().submit(prompts(["c"]))
    assert world.process().queue().counts().total == 3


def test_whoever_only_looks_writes_nothing() -> None:
    world = copied()
    pool = world.process()
    assert pool.inspect().damage == () and verify(pool, full=True).findings == ()
    assert world.memory.names("") == ["log", "strawq.json"]


def test_a_heart_goes_on_when_they_go_under_it() -> None:
    world = World()
    pool = world.process()
    pool.keeper.require()
    pool.keeper.beat()
    world.memory.remove(layout.session_file(pool.keeper.current))
    drop_empty(world.memory)
    pool.keeper.beat()
    assert world.memory.names(layout.SESSIONS) == [f"{pool.keeper.current}.json"]


def test_what_is_made_again_is_durable(tmp_path: Path) -> None:
    """And only below a pool that is there: the same on a disk, where the pool's own directory is never made again."""
    pool = Pool.init(tmp_path / "pool", background=False)
    for directory, _, _ in os.walk(pool.path, topdown=False):
        if not os.listdir(directory):
            os.rmdir(directory)
    pool.publish_version(1)
    assert sorted(os.listdir(pool.path)) == sorted([*layout.DIRECTORIES, layout.HEADER])
    os.rename(pool.path, tmp_path / "moved")
    os.rmdir(tmp_path / "moved" / layout.STAGING)
    with pytest.raises(StorageFailed, match="moved, replaced or removed"):
        pool.publish_version(2)
    with pytest.raises(OSError, match="moved, replaced or removed"):
        make_directories(pool.files)
    assert os.listdir(tmp_path) == ["moved"]
    assert layout.STAGING not in os.listdir(tmp_path / "moved")
