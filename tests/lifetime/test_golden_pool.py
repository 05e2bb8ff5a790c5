"""A pool that an earlier strawq wrote is read in full; one of a newer format is refused with a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from strawq import Pool
from strawq.archives import list_archives, load_archive
from strawq.storage import layout
from strawq.verification import verify
from tests.cli.conftest import Run
from tools.golden_pool import PROMPTS, TOKENS, answer

GOLDEN = Path(__file__).parents[2] / "contracts" / "pools"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    path = tmp_path / "golden"
    shutil.copytree(GOLDEN / "v1", path)
    for name in layout.DIRECTORIES:  # git keeps no empty directory
        (path / name).mkdir(exist_ok=True)
    return path


def test_the_golden_pool_holds_every_kind_of_file(golden: Path) -> None:
    for pattern in (
        "strawq.json", "log/*/*.json", "floors/*", "snapshots/*.snapshot", "objects/*/*/*.arrow",
        "objects/*/*/*.safetensors",
    ):  # fmt: skip
        assert list(golden.glob(pattern)), pattern
    assert not (golden / layout.entry(1)).exists()


def test_every_group_of_the_golden_pool_is_read(golden: Path) -> None:
    with Pool.open(golden) as pool:
        assert verify(pool, full=True).findings == ()
        queue = pool.queue("rollout")
        counts = queue.counts()
        assert [point.name for point in pool.checkpoints()] == ["step-1"]
        assert [branch.name for branch in pool.inspect().branches] == ["branch-2", "main"]
        # Four answers of which two are trained, two prompts left.
        assert counts.trained == 2
        batch = queue.take_batch(2).batch
        assert batch is not None
        groups = list(queue.read_batch(batch))
        fresh = [queue.open(lease).group for lease in queue.acquire(PROMPTS)]
        (archive,) = list_archives(pool)
        kept = list(load_archive(pool, archive.name))
        assert (len(groups), len(fresh), len(kept)) == (2, PROMPTS - 4, 2)
        assert {group.prompt.group_id for group in (*groups, *fresh, *kept)} == {f"g{n}" for n in range(PROMPTS)}
        for group in kept:
            row = int(group.prompt.group_id[1:])
            (sample,), wanted = group.samples, answer(0, row)
            assert sample.tokens.tolist() == wanted.tokens.tolist() and len(sample.tokens) == TOKENS
            assert sample.r3 is not None and np.array_equal(sample.r3[:], wanted.r3)  # type: ignore[arg-type]
        (prompt,) = (pool.queue("eval").open(lease).group.prompt for lease in pool.queue("eval").acquire(1))
        assert prompt.text == "an inline prompt"


def test_the_branch_that_was_left_is_there_to_return_to(golden: Path) -> None:
    with Pool.open(golden) as pool:
        pool.rollback("main")
        assert pool.queue("rollout").counts().trained == 0
        batch = pool.queue("rollout").take_batch(3).batch
        assert batch is not None and len(list(pool.queue("rollout").read_batch(batch))) == 3


def test_a_pool_of_a_newer_format_is_refused_with_a_sentence(golden: Path, run: Run) -> None:
    header = json.loads((golden / "strawq.json").read_bytes())
    (golden / "strawq.json").write_text(json.dumps({**header, "format_version": 2}))
    before = sorted(golden.rglob("*"))
    ran = run("inspect", golden, "--json", code=2)
    assert ran.data["error"]["kind"] == "format_unsupported"
    assert ran.err.count("\n") == 1 and "version 2" in ran.err
    assert sorted(golden.rglob("*")) == before
