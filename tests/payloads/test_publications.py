"""A report whose tensors outgrow one pack's header is stored in several; one group that does is refused whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from strawq import Change, Pool, Prompt
from strawq.errors import BadInput
from strawq.model import VersionSpan
from strawq.queue import Queue
from strawq.samples import Group, Sample
from strawq.storage import packs
from strawq.verification import verify
from strawq.work import Work

GROUPS, TENSORS, TOKENS = 8, 5, 3
ONE_GROUP_BYTES = 2500
"""More than the header of one group's tensors, less than that of three."""


def grown(work: Work, tensors: int = TENSORS) -> Group:
    row = int(work.task.partition("-")[2])
    beside = {f"t{at}": np.full((TOKENS, 2), 100 * row + at, np.float32) for at in range(tensors)}
    sample = Sample(
        0, np.arange(TOKENS), versions=(VersionSpan(0, TOKENS, "1"),), status="completed", token_tensors=beside
    )
    return Group(work.task, work.group.prompt, (sample,))


def leased(pool: Pool) -> tuple[Queue, list[Work]]:
    queue = pool.queue()
    queue.submit([Prompt(f"g{row}", np.array([1, row], np.int32)) for row in range(GROUPS)])
    return queue, [queue.open(lease) for lease in queue.acquire(GROUPS)]


def test_a_header_that_would_be_too_long_is_divided_among_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "PACK_HEADER_BYTES", ONE_GROUP_BYTES)
    with Pool.init(tmp_path / "pool", background=False) as pool:
        queue, works = leased(pool)
        before = pool.log.refresh(lambda machine: machine.seq)
        changes = [Change(work, "complete", grown(work)) for work in works[:-1]]
        changes.insert(3, Change(works[-1], "fail", None, "nothing new rides between the others"))
        assert len(queue.report(changes).accepted) == GROUPS
        assert pool.log.refresh(lambda machine: machine.seq) == before + 1, "still one commit"
        files = sorted((tmp_path / "pool").glob("objects/*/*/*.safetensors"))
        assert 2 <= len(files) < GROUPS
        assert sum(
            name.partition("/")[2] != "" and not name.startswith("pad/") for f in files for name in load_file(f)
        ) == ((GROUPS - 1) * TENSORS)
        for file in files:
            assert int.from_bytes(file.read_bytes()[:8], "little") <= ONE_GROUP_BYTES
        assert list((tmp_path / "pool" / "tmp").iterdir()) == []
        batch = queue.take_batch(GROUPS - 1).batch
        assert batch is not None
        for held, group in zip(batch.groups, queue.read_batch(batch), strict=True):
            row = int(held.task.id.partition("-")[2])
            for at in range(TENSORS):
                assert np.all(group.samples[0].token_tensors[f"t{at}"][:] == 100 * row + at)  # type: ignore[index]
        assert verify(pool, full=True).findings == ()


def test_one_group_that_is_too_much_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "PACK_HEADER_BYTES", ONE_GROUP_BYTES)
    with Pool.init(tmp_path / "pool", background=False) as pool:
        queue, works = leased(pool)
        changes = [Change(work, "complete", grown(work)) for work in works]
        changes[5] = Change(works[5], "complete", grown(works[5], 20 * TENSORS))
        with pytest.raises(BadInput, match="with one group"):
            queue.report(changes)
        for directory in ("objects", "tmp"):
            assert not [path for path in (tmp_path / "pool" / directory).rglob("*") if path.is_file()]
        queue.complete(works[0], grown(works[0]))
        assert queue.counts().ready == 1


def test_what_fits_one_pack_is_one_pack(tmp_path: Path) -> None:
    with Pool.init(tmp_path / "pool", background=False) as pool:
        queue, works = leased(pool)
        queue.report([Change(work, "complete", grown(work)) for work in works])
        assert len(list((tmp_path / "pool").glob("objects/*/*/*.safetensors"))) == 1
