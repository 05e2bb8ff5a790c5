"""What many small files cost, and what merging them costs: the figures behind `MERGE_FILES` and `MERGED_FILE_BYTES`.

    python -m tools.studies.merging [--root DIR] [--groups N] [--sizes BYTES,BYTES]

Prompts come one by one, inside log entries, and live longer than these: a trim gives them files. Once each gets a file
of its own, as if nothing were ever merged; then merged files of each size in `--sizes`. What is done to the pool
afterwards is timed in this process, once the directory has been written: listings come from the caches that a host has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from strawq import Pool, Prompt
from strawq.export import live_groups
from strawq.garbage import collect_garbage
from strawq.limits import MERGED_FILE_BYTES
from strawq.merging import merge_objects
from strawq.trimming import trim_log
from strawq.verification import verify

READS = 200


def seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def fill(path: Path, groups: int) -> Pool:
    """A pool whose prompts, a submission each, are all in files: the entries that held them are trimmed."""
    pool = Pool.init(path, background=False)
    chance = np.random.default_rng(0)
    for number in range(groups):
        tokens = chance.integers(0, 150_000, 200).astype(np.int32)
        pool.queue().submit([Prompt(f"group-{number}", tokens, metadata={"row": number})])
    return pool


def trimmed(pool: Pool) -> int:
    for version in range(2):
        pool.snapshot()
        pool.publish_version(version)
    return trim_log(pool, keep_entries=0, snapshots_kept=2).moved


def on_disk(path: Path) -> dict[str, int]:
    found = [file for file in (path / "objects").rglob("*") if file.suffix == ".arrow"]
    directories = [item for item in (path / "objects").rglob("*") if item.is_dir()]
    stats = [file.stat() for file in found]
    return {
        "files": len(found),
        "bytes": sum(stat.st_size for stat in stats),
        "allocated_bytes": sum(stat.st_blocks * 512 for stat in stats),
        "largest_directory": max((len(os.listdir(item)) for item in directories), default=0),
    }


def used(pool: Pool, path: Path) -> dict[str, Any]:
    """What the usual verbs take on it."""
    figures: dict[str, Any] = on_disk(path)
    figures["verify_s"] = seconds(lambda: verify(pool))
    figures["verify_full_s"] = seconds(lambda: verify(pool, full=True))
    for marker in (path / "objects").rglob("swept"):
        marker.unlink()
    figures["collect_look_s"] = seconds(lambda: collect_garbage(pool, wait_seconds=0))
    figures["copy_s"] = seconds(lambda: shutil.copytree(path / "objects", path.with_name("copy")))
    with Pool.open(path, background=False) as reader:
        held = live_groups(reader, "rollout", ready=False)
        some = held[:: max(1, len(held) // READS)]
        figures["read_ms"] = 1000 * seconds(lambda: [reader.payloads.prompt(one) for one in some]) / len(some)
    return figures


def ended(pool: Pool) -> float:
    """Every group ends; what the collection takes that removes their files."""
    queue = pool.queue()
    while leases := queue.acquire(512).leases:
        queue.drop_tasks([lease.task for lease in leases], "done")
    return seconds(lambda: collect_garbage(pool, wait_seconds=0))


def study(root: Path, groups: int, sizes: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in [0, *sizes]:
        where = Path(tempfile.mkdtemp(dir=root))
        try:
            with (
                mock.patch("strawq.merging.MERGED_FILE_BYTES", size or MERGED_FILE_BYTES),
                mock.patch("strawq.merging.MERGED_OBJECTS", 512 if size else 1),
                mock.patch("strawq.trimming.ENTRIES_PER_SEGMENT", 1),
            ):
                with fill(where / "pool", groups) as pool:
                    moved = [0]
                    spent = seconds(lambda: moved.append(trimmed(pool)))  # noqa: B023
                    collect_garbage(pool, wait_seconds=0)
                    figures = {"trim_s": spent, "moved": moved[-1], **used(pool, where / "pool")}
                if not size:
                    found["merge"] = _merged(where / "pool")
                    with Pool.open(where / "pool", background=False) as pool:
                        figures["remove_s"] = seconds(lambda: collect_garbage(pool, wait_seconds=0))
                else:
                    with Pool.open(where / "pool", background=False) as pool:
                        figures["remove_s"] = ended(pool)
            found[str(size or "one each")] = figures
        finally:
            shutil.rmtree(where)
    return found


def _merged(path: Path) -> dict[str, Any]:
    """The small files merged by the product's own rule."""
    with mock.patch("strawq.merging.MERGED_OBJECTS", 512), Pool.open(path, background=False) as pool:
        begun = time.perf_counter()
        done = merge_objects(pool)
        spent = time.perf_counter() - begun
    return {"files": done.files, "into": done.into, "live_bytes": done.bytes, "s": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--groups", type=int, default=4000)
    parser.add_argument("--sizes", default=f"{1 << 20},{MERGED_FILE_BYTES}")
    given = parser.parse_args()
    found = study(given.root, given.groups, [int(size) for size in given.sizes.split(",")])
    print(json.dumps({"root": str(given.root), "groups": given.groups, "load": os.getloadavg(), **found}, indent=1))


if __name__ == "__main__":
    main()
