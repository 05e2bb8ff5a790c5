"""A ready group whose bytes are damaged: it is named, it can be dropped, and the trainer goes on with the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strawq import Pool, Prompt, Sample, VersionSpan
from strawq.limits import INLINE_OBJECT_BYTES
from strawq.samples import Group
from strawq.storage import layout
from tests.cli.conftest import Run

GROUPS, BATCH = 6, 4


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, str]:
    """Six ready groups with a file each, one flipped bit in that of the second; the pool and that group's task."""
    with Pool.init(tmp_path / "pool") as pool:
        queue = pool.queue()
        queue.submit([Prompt(group_id=f"g{number}", text="?") for number in range(GROUPS)])
        for lease in queue.acquire(GROUPS):
            work = queue.open(lease)
            sample = Sample(
                0, np.arange(INLINE_OBJECT_BYTES), np.full(INLINE_OBJECT_BYTES, -0.5), status="completed", reward=1.0,
                versions=(VersionSpan(0, INLINE_OBJECT_BYTES, "1"),),
            )  # fmt: skip
            queue.complete(work, Group(work.task, work.group.prompt, (sample,)))
        taken = queue.take_batch(BATCH).batch
        assert taken is not None
        held = taken.groups[1]
        ref = held.objects[held.task.parts[-1].object].ref
        queue.return_batch(taken)
    path = tmp_path / "pool" / layout.record_file(ref.epoch, ref.name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)
    return tmp_path / "pool", held.task.id


def test_a_batch_with_a_damaged_group_is_freed_by_one_command(damaged: tuple[Path, str], run: Run) -> None:
    pool, task = damaged
    for _ in range(2):
        failed = run("collect", pool, "-n", BATCH, "--json", code=6)
        assert f"group {task}: " in failed.err and "strawq drop" in failed.err
    verified = run("verify", pool, "--full", code=1)
    assert f"`strawq drop POOL -q rollout --reason damaged {task}`" in " ".join(verified.out.split())
    run("drop", pool, "-q", "rollout", "--reason", "damaged", task)
    run("verify", pool, "--full")
    groups = [record["task"] for record in run("collect", pool, "-n", BATCH, "--json").data["records"]]
    assert len(groups) == BATCH and task not in groups


def test_drop_says_who_has_what_it_leaves_and_verify_says_what_else_keeps_it(
    damaged: tuple[Path, str], run: Run
) -> None:
    pool, task = damaged
    run("checkpoint", pool, "kept")
    with Pool.open(pool) as trainer:
        assert trainer.queue().take_batch(BATCH).batch is not None
        session = trainer.keeper.current
        left = run("drop", pool, "--reason", "damaged", task, "9-9", code=1).out
        assert f"{task} is in batch b2 of session {session}" in left and f"strawq sessions expire {pool}" in left
        assert "9-9 is not started, has ended or is unknown" in left
    run("drop", pool, "--reason", "damaged", task)
    found = run("verify", pool, "--full", "--json", code=1).data["findings"]
    assert [finding["depends"] for finding in found] == [["checkpoint kept"]]
    assert "`strawq checkpoint POOL kept --delete`" in found[0]["remedy"] and "strawq drop" not in found[0]["remedy"]
    run("checkpoint", pool, "kept", "--delete")
    run("verify", pool, "--full")
