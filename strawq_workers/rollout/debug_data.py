"""`--save-debug-rollout-data` and `--load-debug-rollout-data`: a rollout's batch as a self-contained archive.

The rule: what is loaded is what was trained on, sample by sample, with everything that the codec keeps. An archive is
a directory (or fsspec URL) of its own for each rollout, so the path names `{rollout_id}`; one that is there is not
overwritten.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from strawq.archives import MANIFEST, open_archive, save_archive, write_archive
from strawq.errors import BadInput
from strawq.pool import Pool
from strawq.remote import exists
from strawq.work import Change
from strawq_workers.rollout.settings import codec

NAME = "rollout"


def archive_path(template: str, rollout_id: int) -> str:
    """Where the archive of that rollout is. `BadInput` if all rollouts would have the same."""
    if "{rollout_id}" not in template:
        raise BadInput(f"{template!r} must contain {{rollout_id}}: each rollout has an archive of its own")
    return template.replace("{rollout_id}", str(rollout_id))


def require_absent(path: str) -> None:
    """`BadInput` if an archive is there."""
    if exists(path, MANIFEST):
        raise BadInput(f"{path} holds an archive already: remove it, or choose another --save-debug-rollout-data")


def save_groups(path: str, groups: list[list[Any]]) -> None:
    """Write the groups to a new archive, in their order. `BadInput` names what cannot be stored."""
    kept = [_group(at, samples) for at, samples in enumerate(groups)]
    with (
        tempfile.TemporaryDirectory(prefix="strawq-archive-") as scratch,
        Pool.init(Path(scratch) / "pool", role="archive") as pool,
    ):
        queue = pool.queue()
        queue.submit([group.prompt for group in kept])
        works = [queue.open(lease) for lease in queue.acquire(len(kept))]
        queue.report(
            [
                Change(work, "complete", msgspec.structs.replace(group, task_id=work.task))
                for work, group in zip(works, kept, strict=True)
            ]
        )
        save_archive(pool, NAME, queue.name, [work.task for work in works])
        write_archive(pool, NAME, path)


def load_groups(path: str, subsample: float | None = None) -> list[list[Any]]:
    """The groups of an archive, in their order; of `subsample` (above 0, at most 1) only the first part. Raises
    `BadInput` if none is there, and `Damaged` or `Gone` for bytes that are not what they were."""
    with open_archive(path) as found:
        groups = [codec().samples_of(group, None) for group in found]
    return groups if subsample is None else groups[: max(1, math.floor(len(groups) * subsample))]


def _group(at: int, samples: list[Any]) -> Any:
    first: Any = samples
    while isinstance(first, list):
        first = first[0]
    prompt = codec().prompt_of(first, getattr(first, "group_index", None))
    return codec().group_of(str(at), prompt, samples)
