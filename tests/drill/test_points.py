"""A process is killed at each named point while it holds leases on groups with large tensors: others take over at once,
every saved token is there, all work ends, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from strawq.drill.content import faults, grown, make_prompt, prompt_index
from strawq.drill.life import Life
from strawq.drill.points import CLEANERS, POINTS
from strawq.drill.troupe import start_life
from strawq.garbage import collect_garbage
from strawq.limits import INLINE_OBJECT_BYTES
from strawq.pool import Pool
from strawq.storage import layout
from strawq.verification import verify

GROUPS = 6
WORKERS_POINTS = [name for name in POINTS if name not in CLEANERS]


def _work_off(pool: Pool, life: int) -> set[str]:
    """Everything that is left, checked; returns the tasks that had saved tokens of others."""
    queue = pool.queue()
    resumed = set()
    while leases := queue.acquire(GROUPS):
        for lease in leases:
            work = queue.open(lease)
            assert faults(work.group, lease.task, lease.attempt) == []
            if work.group.samples:
                resumed.add(lease.task)
            queue.complete(work, grown(work.group, lease.task, lease.attempt, life))
    return resumed


@pytest.mark.parametrize("point", WORKERS_POINTS, ids=lambda name: name.replace(" ", "-").replace("'", ""))
def test_a_worker_that_is_killed_at_a_point_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    for module in ("garbage", "verification"):
        monkeypatch.setattr(f"strawq.{module}.STAGING_LOOK_SECONDS", 0.01)
    root = tmp_path / "pool"
    (tmp_path / "ledgers").mkdir()
    with Pool.init(root) as pool:
        # Every fourth prompt has wide tensors: only those are submitted.
        pool.queue().submit([make_prompt(4 * index) for index in range(GROUPS)])
    passage = 3 if POINTS[point].often > 4 else 2
    life = Life(
        1, "worker", str(root), 0, random.Random(point).getrandbits(32), 0.4, str(tmp_path / "ledgers"), point, passage
    )
    pid = start_life(life)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, life.path("log").read_text()
    assert life.path("mark").read_text() == f"SIGKILL\t{point}\n"
    with Pool.open(root) as pool:
        pool.keeper.require()
        pool.keeper.watch()
        assert [session.id for session in pool.inspect().sessions] == [pool.keeper.current]
        saved = {
            task.id
            for task in pool.log.refresh(lambda machine: list(machine.state.branch.queues["rollout"].tasks.values()))
            if task.stage == "partial"
        }
        assert saved <= _work_off(pool, 2)
        counts = pool.queue().counts()
        assert (counts.ready + counts.dropped, counts.failed) == (GROUPS, 0)
        batch = pool.queue().take_batch(GROUPS, fewer=True).batch
        assert batch is not None
        for held, group in zip(batch.groups, pool.queue().read_batch(batch), strict=True):
            assert faults(group, held.task.id, held.task.attempt) == []
            assert prompt_index(group.prompt) % 4 == 0
        assert any(row.ref.pack_bytes > INLINE_OBJECT_BYTES for row in _objects(pool)), "the tensors are not inline"
        assert [found for found in verify(pool, full=True).findings if found.what != f"{layout.STAGING}/"] == []
        pool.queue().finish_batch(batch)
        for _ in range(2):
            collect_garbage(pool, wait_seconds=0)
        assert verify(pool).findings == ()
        assert pool.files.names(layout.STAGING) == []


def _objects(pool: Pool):  # type: ignore[no-untyped-def]
    return pool.log.refresh(lambda machine: list(machine.state.objects.values()))
