"""Torn entries at the end of the log: repairs that are torn themselves, and entries that only look torn."""

from __future__ import annotations

import pytest

from strawq.errors import Damaged
from strawq.history import read_history
from strawq.pool import Pool
from strawq.storage import layout
from strawq.storage.entry import decode_entry
from strawq.storage.sealed import seal, unseal
from strawq.testing.scenes import prompts
from strawq.testing.worlds import World
from strawq.verification import verify


def _rewrite(world: World, seq: int, data: bytes) -> None:
    world.memory.remove(layout.entry(seq))
    world.memory.stage(layout.entry(seq), [data])


def _tear(world: World, seq: int) -> None:
    data = world.memory.read(layout.entry(seq))
    _rewrite(world, seq, data[: len(data) // 3])


def _head(pool: Pool) -> int:
    seq: int = pool.log.refresh(lambda machine: machine.seq)
    return seq


def test_a_repair_that_is_torn_is_repaired_again() -> None:
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(["a"]))
    kept = _head(pool)
    pool.queue().submit(prompts(["b"]))
    for times in (1, 2, 3):
        _tear(world, kept + times)
        repairer = world.process()
        with pytest.raises(Damaged, match=layout.entry(kept + 1)):
            repairer.queue()
        assert repairer.log.void_tip() == kept + 1
        assert _head(repairer) == kept + 1 + times
        assert repairer.log.void_tip() == 0
    survivor = world.process()
    assert survivor.queue().counts().total == 1
    survivor.queue().submit(prompts(["c"]))
    survivor.snapshot()
    newcomer = world.process()
    assert newcomer.queue().counts().total == 2
    found = verify(newcomer, full=True)
    assert found.findings == ()
    voids = [line.text for line in read_history(newcomer) if line.event == "void"]
    assert voids == [f"entry {kept + 1} was never whole"]
    # A reader that folds all of it anew, without the snapshot, comes to the same state.
    for name in world.memory.names(layout.SNAPSHOTS):
        world.memory.remove(f"{layout.SNAPSHOTS}/{name}")
    assert world.process().queue().counts().total == 2


def test_of_two_repairs_behind_torn_ones_one_wins() -> None:
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(["a"]))
    kept = _head(pool)
    pool.queue().submit(prompts(["b"]))
    _tear(world, kept + 1)
    world.process().log.void_tip()
    _tear(world, kept + 2)
    first, second = world.process(), world.process()
    files, done = first.files, [False]

    def others_first(moment: str, kind: str, path: str) -> None:
        if moment == "before" and kind == "publish" and path.startswith("log/") and not done[0]:
            done[0] = True
            second.log.void_tip()
            second.queue().submit(prompts(["c"]))

    files.hook = others_first  # type: ignore[attr-defined]
    first.log.void_tip()
    assert done[0] and first.queue().counts().total == second.queue().counts().total == 2


def test_an_entry_that_a_newer_strawq_wrote_is_not_void_for_an_older_one() -> None:
    """It is whole: somebody was told that it happened."""
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(["a"]))
    seq = _head(pool)
    data = world.memory.read(layout.entry(seq))
    line, _, payload = unseal(data)
    newer = bytes(line)[:-1] + b',"added_later":1}'
    _rewrite(world, seq, seal(newer)[0] + bytes(payload))
    for _ in range(2):
        reader = world.process()
        with pytest.raises(Damaged, match="not an entry of this format"):
            reader.log.void_tip()
    assert layout.entry(seq + 1).rpartition("/")[2] not in world.memory.names(layout.segment_directory(0))
    _rewrite(world, seq, data)
    assert world.process().queue().counts().total == 1
    assert decode_entry(seq, layout.entry(seq), data).line.seq == seq


def test_a_whole_entry_behind_torn_ones_forbids_the_repair() -> None:
    world = World()
    pool = world.process()
    for name in ("a", "b", "c"):
        pool.queue().submit(prompts([name]))
    seq = _head(pool)
    _tear(world, seq - 2)
    _tear(world, seq - 1)
    with pytest.raises(Damaged, match="others follow"):
        world.process().log.void_tip()
