"""Collection on a mount that is really full: what it says, what it leaves, and that it works when there is room."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strawq import Pool, Prompt
from strawq.errors import StorageFailed
from strawq.upkeep import Upkeep
from strawq.verification import verify
from tests.cli.conftest import Run
from tools.golden_pool import complete

MOUNT_BYTES = 4 << 20
GROUPS = 6


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_BYTES}", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def fill(directory: Path) -> Path:
    """Take all the room that is left, to the last block."""
    filler = directory / "filler"
    with open(filler, "ab", buffering=0) as file:
        for size in (65536, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return filler


def waste(pool: Pool, first: int = 0) -> None:
    """Groups that were trained: garbage, as soon as their epoch is closed."""
    queue = pool.queue()
    prompts = [
        Prompt(f"g{n}", np.array([1, 2, n], np.int32), payload=bytes(70_000)) for n in range(first, first + GROUPS)
    ]
    queue.submit(prompts)
    complete(queue, GROUPS)
    batch = queue.take_batch(GROUPS).batch
    assert batch is not None
    queue.finish_batch(batch)


def files(pool: Path) -> dict[str, bytes]:
    return {str(path.relative_to(pool)): path.read_bytes() for path in pool.rglob("*") if path.is_file()}


def objects(pool: Path) -> int:
    return sum(path.is_file() for path in pool.glob("objects/*/*/*"))


def test_nothing_can_be_closed_on_a_full_mount_and_nothing_is_half_done(run: Run, small: Path) -> None:
    root = small / "pool"
    with Pool.init(root, background=False) as pool:
        waste(pool)
    assert objects(root) > 0
    filler = fill(small)
    before = files(root)
    refused = run("gc", root, "--json", code=6)
    assert refused.data["files"] == 0 and "No space left on device" in " ".join(refused.data["unfinished"])
    assert "No space left on device" in refused.err, "and whoever reads no JSON is told too"
    assert files(root) == before
    filler.unlink()
    done = run("gc", root, "--json").data
    assert done["by_reason"]["unreachable object"] > 0 and done["unfinished"] == []
    assert objects(root) == 0
    with Pool.open(root, background=False) as pool:
        assert verify(pool, full=True).findings == ()
        waste(pool, first=100)


def test_what_closed_epochs_hold_makes_the_room_to_close_the_next_one(run: Run, small: Path) -> None:
    root = small / "pool"
    with Pool.init(root, background=False) as pool:
        queue = pool.queue()
        queue.submit([Prompt(f"g{n}", np.array([1, 2, n], np.int32), payload=bytes(70_000)) for n in range(GROUPS)])
        complete(queue, GROUPS)
        pool.gc()  # closes the epoch while all of it is live
        batch = queue.take_batch(GROUPS).batch
        assert batch is not None
        queue.finish_batch(batch)
        waste(pool, first=100)
    fill(small)
    done = run("gc", root, "--json").data
    assert done["unfinished"] == [] and objects(root) == 0
    with Pool.open(root, background=False) as pool:
        assert verify(pool, full=True).findings == ()


def test_upkeep_goes_on_through_a_full_mount(small: Path) -> None:
    root = small / "pool"
    with Pool.init(root, background=False) as pool:
        waste(pool)
        filler = fill(small)
        keeping = Upkeep(pool)
        assert [keeping.turn(), keeping.turn()] == ["failed", "failed"]
        with pytest.raises(StorageFailed, match="No space left on device"):
            pool.publish_version(7)
        filler.unlink()
        assert keeping.turn() == "kept"
        assert objects(root) == 0 and list((root / "tmp").iterdir()) == []
        pool.publish_version(7)
