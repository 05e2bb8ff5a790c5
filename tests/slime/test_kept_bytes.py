"""What samples cost in the pool: nothing once they are rejected, and next to nothing again in a checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
from shapes import Newer, answered

from strawq import Pool
from strawq.samples import Group
from strawq.work import Change, Work
from strawq_workers.slime.codec import group_of, prompt_of, samples_of

ROUTES = (np.arange(306 * 64 * 8) % 61).astype(np.int32).reshape(306, 64, 8)


def partial(at: int) -> list[Any]:
    sample = answered(Newer, at, 304, status=Newer.Status.ABORTED)
    sample.group_index, sample.rollout_routed_experts = at, ROUTES + at
    return [sample]


def saved(pool: Pool, count: int) -> list[Work]:
    """The work of groups whose prefixes, with routes, are saved under their leases."""
    queue = pool.queue()
    groups = [partial(at) for at in range(count)]
    queue.submit([prompt_of(Newer(prompt="p", index=at), at, samples=1) for at in range(count)])
    works = [queue.open(lease) for lease in queue.acquire(count).leases]
    queue.report([Change(work, "save", encoded(work, group)) for work, group in zip(works, groups, strict=True)])
    return works


def encoded(work: Work, samples: list[Any]) -> Group:
    return group_of(work.task, work.group.prompt, samples, work.group)


def stored(pool: Path) -> int:
    return sum(path.stat().st_size for path in pool.rglob("*") if path.is_file() and "sessions" not in path.parts)


def collect(pool: Pool) -> None:
    """What became garbage in the open epoch goes with the second one."""
    pool.gc()
    pool.gc()


def test_tensors_of_a_rejected_group_are_collected(tmp_path: Path) -> None:
    root = tmp_path / "pool"
    with Pool.init(root) as pool:
        kept, rejected = saved(pool, 2)
        pool.queue().report([Change(kept, "yield"), Change(rejected, "drop", None, "all_0")])
        assert len(list(root.rglob("*.safetensors"))) == 1  # one publication, half of which is needed
        (work,) = [pool.queue().open(lease) for lease in pool.queue().acquire(1).leases]
        np.testing.assert_array_equal(samples_of(work.group, Newer)[0].rollout_routed_experts, ROUTES)
        pool.queue().drop(work, "all_0")
        collect(pool)
        assert not list(root.rglob("*.safetensors"))


def test_a_checkpoint_of_prefixes_adds_less_than_a_tenth_and_keeps_them(tmp_path: Path) -> None:
    root = tmp_path / "pool"
    with Pool.init(root) as pool:
        works = saved(pool, 4)
        pool.queue().report([Change(work, "yield") for work in works])
        before = stored(root)
        pool.checkpoint("step-1")
        assert stored(root) - before < before / 10
        for lease in pool.queue().acquire(4).leases:
            pool.queue().drop(pool.queue().open(lease), "all_0")
        collect(pool)
        pool.rollback("step-1")
        leases = pool.queue().acquire(4).leases
        assert [lease.stage for lease in leases] == ["partial"] * 4
        groups = [samples_of(pool.queue().open(lease).group, Newer) for lease in leases]
        assert sorted(group[0].group_index for group in groups) == [0, 1, 2, 3]
        for (sample,) in groups:
            np.testing.assert_array_equal(sample.rollout_routed_experts, ROUTES + sample.group_index)
