"""Garbage collection: the dry run is the plan, each retained byte has a reason, and a full disk does not stop it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strawq import Pool, Prompt
from strawq.errors import StorageFailed
from strawq.garbage import collect_garbage
from strawq.retention import NO_REASON, by_reason, retained
from tests.cli.conftest import Run
from tools.golden_pool import complete


def fill(pool: Pool, count: int = 2, first: int = 0) -> None:
    """Complete groups; `first` makes their content another one (equal content is stored once)."""
    queue = pool.queue()
    queue.submit([Prompt(f"g{n}", np.array([1, 2, n], np.int32)) for n in range(first, first + count)])
    complete(queue, count)


def train(pool: Pool, count: int) -> None:
    batch = pool.queue().take_batch(count).batch
    assert batch is not None
    pool.queue().finish_batch(batch)


def objects(pool: Path) -> set[Path]:
    return {path for path in pool.glob("objects/*/*/*") if path.is_file()}


def test_the_dry_run_is_the_plan_and_deletes_nothing(run: Run, pool: Path) -> None:
    with Pool.open(pool) as opened:
        fill(opened)
        train(opened, 2)
    before = objects(pool)
    assert before
    plan = run("gc", pool, "--dry-run", "--json").data
    assert objects(pool) == before
    done = run("gc", pool, "--json").data
    planned = {pool / removal["path"] for removal in plan["removals"] if "objects/" in removal["path"]}
    assert planned == before - objects(pool) == before
    assert plan["by_reason"]["unreachable object"] == done["by_reason"]["unreachable object"]
    assert run("gc", pool, "--json").data["by_reason"].get("unreachable object", 0) == 0


def test_collection_is_incremental(pool: Path) -> None:
    with Pool.open(pool) as opened:
        fill(opened)
        opened.gc()
        kept = objects(pool)
        fill(opened, count=3, first=10)
        train(opened, 2)
        done = opened.gc()
        assert done.by_reason["unreachable object"] > 0
        assert done.kept_files == len(objects(pool)) > 0
        assert not kept & objects(pool), "the groups that came first were trained"


def test_each_retained_byte_has_a_reason(run: Run, pool: Path) -> None:
    with Pool.open(pool) as opened:
        fill(opened)
        opened.checkpoint("step-1")
        batch = opened.queue().take_batch(1).batch
        assert batch is not None
        opened.pin("reading", batch.groups)
        stray = pool / "objects" / "000001" / "0" / f"{'0' * 64}.arrow"
        stray.parent.mkdir(parents=True, exist_ok=True)
        stray.write_bytes(b"x" * 10)
        kept = retained(opened)
        reasons = {reason for item in kept for reason in item.reasons}
        words = " ".join(reasons)
        for word in ("checkpoint step-1", "batch", "pin reading", "epoch 1 is open"):
            assert word in words
        assert NO_REASON not in reasons
        assert sum(item.bytes for item in kept if item.path.startswith("objects/")) == sum(
            path.stat().st_size for path in objects(pool)
        )
        assert {item.reason for item in by_reason(kept)} == reasons
        text = run("gc", pool, "--explain", "--dry-run").out
        assert "checkpoint step-1" in text


def test_a_pin_protects_until_it_is_let_go(pool: Path) -> None:
    with Pool.open(pool) as opened:
        fill(opened)
        batch = opened.queue().take_batch(2).batch
        assert batch is not None
        opened.pin("reading", batch.groups)
        opened.queue().finish_batch(batch)
        assert opened.gc().by_reason.get("unreachable object", 0) == 0
        assert [len(group.samples) for group in opened.queue().read_batch(batch)] == [1, 1]
        opened.unpin("reading")
        assert opened.gc().by_reason["unreachable object"] > 0


def test_files_that_strawq_did_not_write_are_left_and_reported(run: Run, pool: Path) -> None:
    (pool / "notes.txt").write_text("mine")
    data = run("gc", pool, "--json").data
    assert data["unknown"] == ["notes.txt"]
    assert (pool / "notes.txt").read_text() == "mine"


def test_a_full_disk_still_frees_what_closed_epochs_hold(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool.open(pool, background=False) as opened:
        fill(opened)
        opened.gc()  # closes the epoch in which these were born
        train(opened, 2)
        fill(opened)  # and something is born in the next one
        commit = opened.commit

        def full(command: Any, *args: Any, **options: Any) -> Any:
            if type(command).__name__ in ("OpenEpoch", "CloseEpoch"):
                raise StorageFailed("cannot write log: no space left")
            return commit(command, *args, **options)

        def refuse(path: str, data: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", path)

        monkeypatch.setattr(opened, "commit", full)
        monkeypatch.setattr(opened.files, "replace", refuse)
        done = collect_garbage(opened, wait_seconds=0)[1]
        assert done.by_reason["unreachable object"] > 0
        assert any("closed before" in sentence for sentence in done.unfinished)
