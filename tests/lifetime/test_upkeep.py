"""Upkeep beside work: one turn at a time among many processes, and no failure that leaves it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strawq import Pool, Prompt, upkeep
from strawq.core import commands as c
from strawq.errors import BadInput, StorageFailed
from strawq.limits import ENTRIES_PER_SEGMENT, SNAPSHOT_ENTRIES, SNAPSHOTS_KEPT
from strawq.storage.snapshots import snapshot_numbers
from strawq.upkeep import Upkeep
from strawq.verification import verify
from tools.golden_pool import complete


def waste(pool: Pool, first: int = 0) -> None:
    """Two groups with tensors that were trained: garbage, as soon as their epoch is closed."""
    queue = pool.queue()
    queue.submit([Prompt(f"g{n}", np.array([1, 2, n], np.int32)) for n in range(first, first + 2)])
    complete(queue, 2)
    batch = queue.take_batch(2).batch
    assert batch is not None
    queue.finish_batch(batch)


def waste_and_leave(pool: Path, first: int = 0) -> None:
    """As `waste`, by a process whose session no collector waits for."""
    with Pool.open(pool) as opened:
        waste(opened, first)


def packs(pool: Path) -> list[Path]:
    return list(pool.glob("objects/*/*/*.safetensors"))


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


def test_a_turn_collects_and_trims(pool: Path) -> None:
    with Pool.open(pool, background=False) as opened:
        waste(opened)
        keeping = Upkeep(opened, keep_entries=0)
        assert keeping.turn() == "kept"
        assert not packs(pool) and keeping.files > 0
        for number in range(ENTRIES_PER_SEGMENT + SNAPSHOTS_KEPT + 1):
            opened.publish_version(number)
            if number >= ENTRIES_PER_SEGMENT:
                opened.snapshot()
        assert keeping.turn() == "kept"
        assert keeping.entries >= ENTRIES_PER_SEGMENT - 1  # numbers begin at one
        assert len(snapshot_numbers(opened.files)) <= SNAPSHOTS_KEPT + 1
        assert verify(opened, full=True).findings == ()


def test_a_large_state_gets_a_snapshot_before_its_entries_outweigh_it(pool: Path) -> None:
    with Pool.open(pool, background=False) as opened:
        opened.queue().submit([Prompt(f"g{n}", text="x") for n in range(64)])
        complete(opened.queue(), 64, tensors=False)
        opened.snapshot()
        opened.log._snapshot_bytes = 1 << 40
        for number in range(SNAPSHOT_ENTRIES):
            opened.publish_version(number)
        before = snapshot_numbers(opened.files)
        Upkeep(opened).turn()
        assert len(snapshot_numbers(opened.files)) == len(before) + 1


def test_a_process_lets_its_turn_pass_when_another_has_just_had_one(pool: Path) -> None:
    with Pool.open(pool, background=False) as one, Pool.open(pool, background=False) as two:
        mine, other = Upkeep(one), Upkeep(two)
        mine._look_first()
        other._look_first()
        waste_and_leave(pool)
        assert mine.turn() == "kept"
        assert (other.turn(), other.turns) == ("another's turn", 0)
        waste_and_leave(pool, first=10)
        assert other.turn() == "kept"
        assert (mine.turn(), mine.turns) == ("another's turn", 1)
        assert not packs(pool)


def test_where_nothing_has_happened_a_turn_is_one_look(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool.open(pool, background=False) as opened:
        waste(opened)
        keeping = Upkeep(opened)
        while keeping.turn() != "nothing new":
            assert keeping.turns < 4
        monkeypatch.setattr(opened.files, "names", lambda path: pytest.fail(f"listed {path}"))
        assert keeping.turn() == "nothing new"
        monkeypatch.undo()
        waste(opened, first=10)
        assert keeping.turn() == "kept"
        assert not packs(pool)


def test_a_turn_that_died_between_opening_and_closing_is_gone_on_with(pool: Path) -> None:
    with Pool.open(pool, background=False) as dead, Pool.open(pool, background=False) as opened:
        keeping = Upkeep(opened)
        keeping._look_first()
        waste_and_leave(pool)
        dead.commit(c.OpenEpoch(request="open-epoch-2", epoch=2))
        assert keeping.turn() == "another's turn"
        assert keeping.turn() == "kept"
        assert not packs(pool)


def test_turns_that_die_before_they_trim_do_not_keep_the_log_from_being_trimmed(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each opens an epoch or closes one, and looks like a turn of somebody else."""
    monkeypatch.setattr(upkeep, "OVERDUE_ENTRIES", 20)
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 4)
    with Pool.open(pool, background=False) as dying, Pool.open(pool, background=False) as opened:
        keeping = Upkeep(opened, keep_entries=0)
        keeping._look_first()
        outcomes, trimmed = [], []
        for epoch in range(2, 7):
            dying.commit(c.OpenEpoch(request=f"open-epoch-{epoch}", epoch=epoch))
            for version in range(10):
                dying.publish_version(10 * epoch + version)
            dying.snapshot()
            dying.commit(c.CloseEpoch(request=f"close-epoch-{epoch - 1}", epoch=epoch - 1))
            outcomes.append(keeping.turn())
            trimmed.append(keeping.entries)
        assert outcomes == ["another's turn", "kept"] * 2 + ["another's turn"]
        assert 0 < trimmed[1] < trimmed[3]


def test_a_failure_is_said_once_and_stops_nothing_else(
    pool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trims: list[int] = []

    def sick(*_: Any, **__: Any) -> Any:
        raise StorageFailed("cannot list objects: Input/output error")

    def trim(opened: Pool, **options: Any) -> Any:
        trims.append(1)
        return trim_log(opened, **options)

    trim_log = upkeep.trim_log
    with Pool.open(pool, background=False) as opened, caplog.at_level(logging.WARNING, "strawq.upkeep"):
        waste(opened)
        keeping = Upkeep(opened)
        with monkeypatch.context() as broken:
            broken.setattr(upkeep, "collect_garbage", sick)
            broken.setattr(upkeep, "trim_log", trim)
            assert [keeping.turn() for _ in range(3)] == ["failed"] * 3
            broken.setattr(upkeep, "collect_garbage", lambda *_: 1 // 0)
            assert [keeping.turn() for _ in range(2)] == ["failed"] * 2
        assert len(trims) == 5 and len(packs(pool)) > 0
        assert (said(caplog, "garbage was not collected (storage_failed)"), said(caplog, "(ZeroDivisionError)")) == (
            1,
            1,
        )
        assert keeping.turn() == "kept"
        assert said(caplog, "upkeep works again") == 1 and not packs(pool)
        monkeypatch.setattr(upkeep, "collect_garbage", sick)
        opened.publish_version(1)
        keeping.turn()
        assert said(caplog, "storage_failed") == 2, "what had been well again is news"


def test_a_full_disk_does_not_end_it(
    pool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Pool.open(pool, background=False) as opened, caplog.at_level(logging.WARNING, "strawq.upkeep"):
        waste(opened)
        keeping = Upkeep(opened)
        commit = opened.commit

        def full(command: Any, *args: Any, **options: Any) -> Any:
            if isinstance(command, c.OpenEpoch):
                raise StorageFailed("cannot write log: No space left on device")
            return commit(command, *args, **options)

        with monkeypatch.context() as broken:
            broken.setattr(opened, "commit", full)
            assert [keeping.turn() for _ in range(3)] == ["failed"] * 3
        assert said(caplog, "No space left on device") == 1
        assert packs(pool)
        assert keeping.turn() == "kept"
        assert not packs(pool)


def test_its_thread_survives_errors_and_ends_when_it_is_told(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = threading.Semaphore(0)

    def sick(*_: Any, **__: Any) -> Any:
        turns.release()
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(upkeep, "collect_garbage", sick)
    with Pool.open(pool, background=False) as opened:
        with Upkeep(opened, 0.001) as keeping:
            for _ in range(3):
                assert turns.acquire(timeout=20)
        assert keeping._thread is not None and not keeping._thread.is_alive()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_that_is_none_is_refused(pool: Path, seconds: float) -> None:
    with Pool.open(pool, background=False) as opened, pytest.raises(BadInput, match="interval"):
        Upkeep(opened, seconds)
