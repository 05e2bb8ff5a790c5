"""Another pool's `strawq.json` in this pool's directory: refused by name, and nothing is written under it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from strawq.errors import Damaged, OperatorNeeded
from strawq.pool import Pool
from strawq.storage import layout
from strawq.storage.replay import UNBOUND
from strawq.testing.scenes import image, prompts
from strawq.verification import verify

GOLDEN = Path(__file__).parents[2] / "contracts" / "pools" / "v1"


def _two_pools(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("mine", "other"):
        with Pool.init(tmp_path / name) as pool:
            pool.queue().submit(prompts([name]))
    return tmp_path / "mine", tmp_path / "other"


def _tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_foreign_header_is_refused_and_nothing_is_written_under_it(tmp_path: Path, snapshot: bool) -> None:
    mine, other = _two_pools(tmp_path)
    with Pool.open(mine) as pool:
        if snapshot:
            pool.snapshot()
        before = image(pool)
    own = (mine / layout.HEADER).read_bytes()
    shutil.copy(other / layout.HEADER, mine / layout.HEADER)
    tree = _tree(mine)
    with Pool.open(mine) as pool:
        for call in (pool.queue, pool.queues, lambda: pool.publish_version(1), lambda: pool.checkpoint("c")):
            with pytest.raises(Damaged, match=r"another pool than strawq\.json names.*restore"):
                call()
        assert "another pool" in str(pool.inspect().damage)
        with pytest.raises(Damaged):
            pool.log.void_tip()
    assert _tree(mine) == tree
    (mine / layout.HEADER).write_bytes(own)
    with Pool.open(mine) as pool:
        assert image(pool) == before
        assert verify(pool, full=True).findings == ()


def test_a_foreign_header_over_a_trimmed_log_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strawq.storage.replay.RELOAD_TRIES", 2)
    _, other = _two_pools(tmp_path)
    trimmed = tmp_path / "trimmed"
    shutil.copytree(GOLDEN, trimmed)
    for name in layout.DIRECTORIES:
        (trimmed / name).mkdir(exist_ok=True)
    shutil.copy(other / layout.HEADER, trimmed / layout.HEADER)
    with Pool.open(trimmed) as pool, pytest.raises(OperatorNeeded, match=r"snapshot .* of pool "):
        pool.queues()


def test_a_log_that_began_before_logs_named_their_pool_is_read_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as early:
        early.setattr("strawq.storage.replay.genesis", lambda _pool: UNBOUND)
        with Pool.init(tmp_path / "early") as pool:
            pool.queue().submit(prompts(["a"]))
            before = image(pool)
    with Pool.open(tmp_path / "early") as pool:
        assert image(pool) == before
        pool.publish_version(1)
        assert verify(pool, full=True).findings == ()
    with Pool.open(tmp_path / "early") as pool:
        assert pool.policy_version() == "1"


def test_an_entry_of_another_pool_does_not_continue_this_one(tmp_path: Path) -> None:
    mine, other = _two_pools(tmp_path)
    entries = sorted((other / "log").rglob("*.json"))
    target = mine / layout.entry(len(entries) + 1)
    with Pool.open(mine) as pool:
        head = pool.log.refresh(lambda machine: machine.seq)
    assert head == len(entries)
    with Pool.open(other) as pool:
        pool.publish_version(1)
    shutil.copy(other / layout.entry(head + 1), target)
    with Pool.open(mine) as pool, pytest.raises(Damaged, match="another history"):
        pool.queues()
