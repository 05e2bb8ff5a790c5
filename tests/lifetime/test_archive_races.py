"""An archive that is deleted and collected while it is carried away arrives whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strawq import Pool, Prompt, archives
from strawq.archives import delete_archive, held_by, open_archive, save_batch, write_archive
from strawq.errors import BadInput, Gone, StorageFailed
from tools.golden_pool import answer, complete

GROUPS = 4


def kept(pool: Pool) -> None:
    """An archive `a` that alone keeps its groups."""
    queue = pool.queue()
    queue.submit([Prompt(f"g{n}", np.array([1, 2, n], np.int32), payload=bytes(70_000)) for n in range(GROUPS)])
    complete(queue, GROUPS)
    batch = queue.take_batch(GROUPS).batch
    assert batch is not None
    save_batch(pool, "a", batch)
    queue.finish_batch(batch)
    pool.gc()


class Racer:
    """Stands in for `write_remote`: before the second file is written, another process deletes the archive and
    collects."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls = 0
        self.freed = -1
        self.write = archives.write_remote

    def __call__(self, *given: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            with Pool.open(self.root, background=False) as other:
                delete_archive(other, "a")
                self.freed = other.gc().by_reason.get("unreachable object", 0)
        self.write(*given)


def test_a_copy_is_whole_though_its_archive_is_deleted_and_collected_meanwhile(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pool.open(pool) as opened:
        kept(opened)
        racer = Racer(pool)
        monkeypatch.setattr(archives, "write_remote", racer)
        write_archive(opened, "a", str(tmp_path / "away"))
        assert racer.freed == 0, "what is copied is pinned"
        with pytest.raises(BadInput, match="no archive"):
            held_by(opened, "a")
        with open_archive(str(tmp_path / "away")) as groups:
            rows = [group.samples[0].r3[:] for group in groups]  # type: ignore[index]
        assert len(rows) == GROUPS
        assert all(np.array_equal(row, np.asarray(answer(0, n).r3)) for n, row in enumerate(rows))
        assert not opened.log.peek(lambda machine: list(machine.state.pins)), "the pin went with the copy"
        assert opened.gc().by_reason["unreachable object"] > 0


def test_a_pool_that_cannot_be_written_can_be_carried_away(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pool.open(pool) as opened:
        kept(opened)

        def full(*_: Any) -> None:
            raise StorageFailed("cannot write log: No space left on device")

        monkeypatch.setattr(opened, "pin", full)
        write_archive(opened, "a", str(tmp_path / "away"))
        with open_archive(str(tmp_path / "away")) as groups:
            assert len(list(groups)) == GROUPS
        # Without the pin the race is lost, with one clear error, and what was written is no archive.
        monkeypatch.setattr(archives, "write_remote", Racer(pool))
        with pytest.raises(Gone, match="garbage collection"):
            write_archive(opened, "a", str(tmp_path / "lost"))
        with pytest.raises(BadInput, match="no archive"), open_archive(str(tmp_path / "lost")):
            pass
