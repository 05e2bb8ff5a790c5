"""An object that is not there: waited for as long as a mount may be behind, and no longer; once, not again and
again."""

from __future__ import annotations

import errno
import os
from collections import Counter

import pytest

from strawq import Pool, Prompt
from strawq.errors import Gone
from strawq.model import StoredObject
from strawq.storage import layout
from strawq.storage.objects import STALE_SECONDS
from strawq.testing.worlds import World
from strawq.trimming import trim_log


def rows_of(pool: Pool) -> list[StoredObject]:
    rows: list[StoredObject] = pool.log.refresh(lambda machine: list(machine.state.objects.values()))
    return sorted(rows, key=lambda row: row.seq)


def watched(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the log is looked at for the place of an object, from now on."""
    looks: Counter[str] = Counter()
    locate = pool.objects._locate

    def look(digest: str) -> StoredObject | None:
        looks[digest] += 1
        return locate(digest)

    monkeypatch.setattr(pool.objects, "_locate", look)
    return looks


def submitted(world: World, count: int) -> Pool:
    """A pool with objects in entries of their own, which a later one may be trimmed behind."""
    pool = world.process()
    for number in range(count):
        pool.queue().submit([Prompt(text=f"p{number}")])
    return pool


def test_what_was_removed_by_hand_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    pool = submitted(world, 1)
    (row,) = rows_of(pool)
    world.memory.remove(layout.entry(row.seq))
    looks = watched(pool, monkeypatch)
    began = world.clock.now
    with pytest.raises(Gone, match="removed by hand"):
        pool.objects.read_checked(row)
    waited = world.clock.now - began
    assert STALE_SECONDS < waited < 2 * STALE_SECONDS and looks[row.ref.digest] == 2
    with pytest.raises(Gone, match="removed by hand"):
        pool.objects.read_checked(row)
    assert world.clock.now - began == waited, "the place is known to be empty"


def test_what_has_ended_is_gone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    pool = submitted(world, 1)
    (row,) = rows_of(pool)
    (lease,) = pool.queue().acquire(1)
    pool.queue().drop(pool.queue().open(lease), "hopeless")
    world.memory.remove(layout.entry(row.seq))
    looks = watched(pool, monkeypatch)
    began = world.clock.now
    with pytest.raises(Gone, match="it has ended"):
        pool.objects.read_checked(row)
    assert world.clock.now == began and looks[row.ref.digest] == 1


@pytest.mark.parametrize("behind", [0.0, 0.3, STALE_SECONDS])
def test_a_mount_that_is_behind_is_waited_for(behind: float, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    pool = submitted(world, 1)
    (row,) = rows_of(pool)
    began, read = world.clock.now, pool.files.read

    def late(path: str) -> bytes:
        if path == layout.entry(row.seq) and world.clock.now < began + behind:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return read(path)

    monkeypatch.setattr(pool.files, "read", late)
    assert pool.objects.read_checked(row)
    world.memory.remove(layout.entry(row.seq))
    found_at = world.clock.now
    with pytest.raises(Gone):
        pool.objects.read_checked(row)
    assert world.clock.now - found_at > STALE_SECONDS, "what was found is looked for with all patience again"


def test_a_trim_names_what_it_cannot_carry_out_of_the_log_and_does_not_try_twenty_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    pool = submitted(world, 6)
    for number in range(12):
        pool.publish_version(number)
        pool.snapshot()
    rows = rows_of(pool)
    path = layout.entry(rows[2].seq)
    entry = world.memory.read(path)
    world.memory.remove(path)
    looks = watched(pool, monkeypatch)
    began = world.clock.now
    done = trim_log(pool, keep_entries=1, step=1)
    assert done.floor == rows[2].seq and rows[2].ref.digest[:12] in done.unfinished[0]
    assert world.clock.now - began < 2 * STALE_SECONDS and looks.total() == 2
    world.memory.stage(path, [entry])
    assert trim_log(pool, keep_entries=1, step=1).moved == 6 - done.moved
    for row in rows_of(pool):
        assert row.ref.epoch and pool.objects.read_checked(row)
