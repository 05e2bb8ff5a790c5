"""What a caller is told about a commit that met trouble: "nothing happened" only if nothing has, and what is
acknowledged outlives the machine."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from strawq.core import commands as c
from strawq.errors import OutcomeUnknown, StorageFailed, StrawqError
from strawq.garbage import collect_garbage
from strawq.pool import Pool
from strawq.samples import Prompt
from strawq.storage import layout
from strawq.storage.faulty import FaultyFiles
from strawq.testing.worlds import World
from strawq.trimming import trim_log


def prompts(count: int) -> list[Prompt]:
    return [Prompt(text=f"p{i}") for i in range(count)]


def fail(pool: Pool, kind: str, prefix: str, code: int, before: Callable[[], None] | None = None) -> None:
    """From now on calls of this kind below `prefix` fail with `code`, and do nothing."""
    files = pool.files
    assert isinstance(files, FaultyFiles)

    def hook(moment: str, called: str, path: str) -> None:
        if moment == "before" and called == kind and path.startswith(prefix):
            if before is not None:
                before()
            raise OSError(code, "failed")

    files.hook = hook


def heal(pool: Pool) -> None:
    assert isinstance(pool.files, FaultyFiles)
    pool.files.hook = None


def total(world: World) -> int:
    return world.process().queue().counts().total


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_floor_that_cannot_be_read_after_the_publish_leaves_the_outcome_unknown(code: int) -> None:
    world = World()
    pool = world.process()
    queue = pool.queue()
    files = pool.files
    assert isinstance(files, FaultyFiles)

    def hook(moment: str, kind: str, path: str) -> None:
        if moment == "after" and kind == "publish" and path.startswith("log/"):
            fail(pool, "read", "floors/", code)

    files.hook = hook
    with pytest.raises(OutcomeUnknown):
        queue.submit(prompts(2), request_id="load")
    heal(pool)
    assert total(world) == 2, "it had happened"
    assert queue.submit(prompts(2), request_id="load").prompts == 2
    assert total(world) == 2


def test_a_name_that_is_taken_and_cannot_be_read_leaves_the_outcome_unknown() -> None:
    world = World()
    pool = world.process()
    queue = pool.queue()
    files = pool.files
    assert isinstance(files, FaultyFiles)
    real = files.publish

    def answered_twice(staged: str, path: str) -> None:
        real(staged, path)
        if path.startswith("log/"):
            fail(pool, "read", "log/", errno.EIO)
            raise FileExistsError(errno.EEXIST, "the first reply was lost", path)

    files.publish = answered_twice  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        queue.submit(prompts(2), request_id="load")
    files.publish = real  # type: ignore[method-assign]
    heal(pool)
    assert queue.submit(prompts(2), request_id="load").prompts == 2
    assert total(world) == 2


def test_a_floor_whose_bytes_are_late_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 1)
    world = World()
    pool, late = world.process(), world.process()
    late.queue()
    for _ in range(2):
        pool.queue().submit(prompts(1))
        pool.snapshot()
    trim_log(pool, keep_entries=0, snapshots_kept=2)
    files = late.files
    assert isinstance(files, FaultyFiles)
    real, zeros = files.read, [2]

    def read(path: str) -> bytes:
        data = real(path)
        if path.startswith("floors/") and zeros[0]:
            zeros[0] -= 1
            return bytes(len(data))
        return data

    files.read = read  # type: ignore[method-assign]
    assert late.queue().counts().total == 2
    assert zeros == [0]


def test_nothing_is_published_behind_an_entry_that_a_power_cut_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three writers die between publish and fsync, one entry further each; the fourth acknowledges."""
    monkeypatch.setattr("strawq.storage.layout.ENTRIES_PER_SEGMENT", 2)
    for policy_seed in range(8):
        world = World(policy_seed)
        for _ in range(3):
            pool = world.process()
            pool.queue()
            head = pool.log.machine.seq + 1
            fail(pool, "sync_directory", layout.segment_directory(layout.segment(head)), errno.EIO)
            with pytest.raises(StrawqError):
                pool.queue().submit(prompts(1))
        survivor = world.process()
        survivor.queue().submit(prompts(1))
        before = total(world)
        files = survivor.files
        assert isinstance(files, FaultyFiles)
        files.power_cut("drop" if policy_seed == 0 else "mixed")
        after = world.process().queue()
        assert after.counts().total == before
        assert after.submit(prompts(1)).prompts == 1, "history goes on"


def test_a_ghost_that_cannot_be_removed_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 1)
    world = World()
    sleeper, other = world.process(), world.process()
    queue = sleeper.queue()
    files = sleeper.files
    assert isinstance(files, FaultyFiles)

    def meanwhile(moment: str, kind: str, path: str) -> None:
        if moment == "before" and kind == "publish" and path.startswith("log/"):
            for _ in range(3):
                other.queue().submit(prompts(1))
                other.snapshot()
            trim_log(other, keep_entries=0, snapshots_kept=2)
            fail(sleeper, "remove", "log/", errno.ESTALE)

    files.hook = meanwhile
    assert queue.submit(prompts(5)).prompts == 5
    heal(sleeper)
    assert total(world) == 8


def test_a_reader_that_failed_half_way_does_not_decide_on_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale name showed it a ghost; then the mount failed before it could look at the floors."""
    world = World()
    pool, other = world.process(), world.process()
    pool.queue()
    other.queue().submit(prompts(1))
    fail(pool, "read", "floors/", errno.EACCES)
    with pytest.raises(StorageFailed):
        pool.log.refresh()
    heal(pool)
    looked: list[str] = []
    files = pool.files
    assert isinstance(files, FaultyFiles)
    files.hook = lambda moment, kind, path: looked.append(path) if moment == "before" else None
    pool.log._advisory = _Calm()
    pool.commit(c.PublishVersion(request="v", version="1"))
    publish = next(i for i, path in enumerate(looked) if path.startswith("tmp/"))
    assert any(path.startswith("floors/") for path in looked[:publish]), "it looked at the floors before it decided"


class _Calm:
    contended = False

    def lost_race(self) -> None:
        return None

    def held(self, meanwhile: object = None) -> object:
        import contextlib

        return contextlib.nullcontext()


@pytest.mark.parametrize("kind", ["names", "read", "remove", "remove_directory", "size", "sync_directory", "publish"])
@pytest.mark.parametrize("prefix", ["objects", "snapshots", "log", "sessions", "tmp", "floors"])
def test_no_bare_oserror_reaches_a_caller(kind: str, prefix: str) -> None:
    world = World()
    pool, other = world.process(), world.process()
    for _ in range(2):
        other.queue().submit(prompts(30))
        other.snapshot()
    other.queue().acquire(1)
    fail(pool, kind, prefix, errno.ESTALE)
    for call in (
        lambda: pool.queue(),
        lambda: pool.queue().submit(prompts(40)),
        lambda: pool.queue().acquire(1),
        lambda: pool.queue().take_batch(1),
        lambda: pool.inspect(),
        lambda: pool.snapshot(),
        lambda: collect_garbage(pool, wait_seconds=0),
        lambda: trim_log(pool, keep_entries=0),
        lambda: pool.close(),
    ):
        try:
            call()
        except StrawqError:
            continue
