"""A worker that collects garbage while it works: its own end ends that too, and no failure of it reaches the work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strawq import Pool, Prompt, upkeep
from strawq.errors import StorageFailed
from tools.golden_pool import complete


def waste(pool: Pool) -> None:
    """Two groups with tensors that were trained."""
    queue = pool.queue()
    queue.submit([Prompt(f"w{n}", np.array([1, 2, n], np.int32)) for n in range(2)])
    complete(queue, 2)
    batch = queue.take_batch(2).batch
    assert batch is not None
    queue.finish_batch(batch)


def packs(root: Path) -> list[Path]:
    return list(root.glob("objects/*/*/*.safetensors"))


def keeping() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "strawq-upkeep"]


async def test_garbage_goes_while_the_worker_works_and_its_end_ends_that(stage_of: Callable[..., Any]) -> None:
    async with stage_of() as stage:
        await asyncio.to_thread(waste, stage.pool)
        assert packs(stage.root)
        task = stage.start(online_gc=True, gc_seconds=0.1)
        await stage.until("garbage is collected", lambda: not packs(stage.root), task)
        assert len(keeping()) == 1
        stage.submit(3)
        summary = await asyncio.wait_for(task, 30)
        assert summary.reason == "sealed" and summary.counters.groups_accepted == 3
        assert keeping() == []


async def test_a_worker_that_was_not_asked_to_leaves_garbage_alone(stage_of: Callable[..., Any]) -> None:
    async with stage_of() as stage:
        await asyncio.to_thread(waste, stage.pool)
        stage.submit(2)
        await stage.run(gc_seconds=0.05)
        assert packs(stage.root) and keeping() == []


async def test_work_goes_on_when_collection_always_fails(
    stage_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = threading.Semaphore(0)

    def sick(*_: Any, **__: Any) -> Any:
        tries.release()
        raise StorageFailed("cannot list objects: Input/output error")

    monkeypatch.setattr(upkeep, "collect_garbage", sick)
    async with stage_of() as stage:
        task = stage.start(online_gc=True, gc_seconds=0.05)
        await stage.until("it is tried", lambda: tries.acquire(timeout=0.01), task)
        stage.submit(3)
        summary = await asyncio.wait_for(task, 30)
        assert summary.counters.groups_accepted == 3 and keeping() == []
