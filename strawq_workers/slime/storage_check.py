"""The pool of a job, opened or made as its flags say.

The rule: what the flags say is held against what is there before anything is leased. A pool of another run, a mount
that is not as declared, or a directory that nobody named is refused with the flag to change; a new pool is made only on
a mount that the probe finds fit, as `strawq init` does it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from strawq.errors import BadInput
from strawq.making import check_mount, make_pool
from strawq.pool import Pool
from strawq_workers.slime.flags import option_of

logger = logging.getLogger("strawq.slime")

QUEUE = "rollout"
ROLE = "slime data source"


def rollout_directory(args: Any) -> Path:
    """Where the pool is: `--rollout-data-dir`, else `<save>/rollout_data`. `BadInput` if neither is given."""
    given, save = getattr(args, "rollout_data_dir", None), getattr(args, "save", None)
    if not given and not save:
        raise BadInput("Straw rollout transport requires --rollout-data-dir or --save on shared storage")
    path = Path(given) if given else Path(str(save)) / "rollout_data"
    return path.expanduser().resolve()


def lease_seconds(args: Any) -> float:
    """`--rollout-queue-lease-seconds`, 300 as in slime."""
    return _positive(args, "rollout_queue_lease_seconds", 300.0)


def io_concurrency(args: Any) -> int:
    """`--rollout-io-concurrency`, 4 as in slime."""
    return int(_positive(args, "rollout_io_concurrency", 4))


def _positive(args: Any, name: str, default: float) -> float:
    value = getattr(args, name, None)
    found = default if value is None else float(value)
    if not found > 0:
        raise BadInput(f"{option_of(name)} must be positive")
    return found


def open_job_pool(args: Any) -> Pool:
    """Open the job's pool, making it if it is not there. `BadInput` if it is of another run, profile or mount than the
    flags say, `UnfitMount` if its mount cannot hold a pool."""
    root = rollout_directory(args)
    profile = getattr(args, "rollout_storage_profile", None) or "local"
    declaration = str(getattr(args, "rollout_storage_declaration", None) or "")
    run = getattr(args, "rollout_queue_run_id", None) or "rollout"
    seconds = lease_seconds(args)
    if not (root / "strawq.json").exists():
        pool, report = make_pool(
            root, run_id=run, queues=(QUEUE,), profile=profile, declaration=declaration, role=ROLE,
            lease_seconds=seconds,
        )  # fmt: skip
        for warning in report.warnings:
            logger.warning("%s: %s", root, warning)
        logger.info("made the pool %s for run %s", root, run)
        return pool
    check_mount(root, profile, declaration)
    pool = Pool.open(root, role=ROLE, lease_seconds=seconds)
    try:
        _require_same(pool, run, profile)
        if QUEUE not in pool.queues():
            pool.configure(QUEUE)
    except BaseException:
        pool.close()
        raise
    return pool


def _require_same(pool: Pool, run: str, profile: str) -> None:
    header = pool.header
    if header.run_id != run:
        raise BadInput(
            f"{pool.path} is the pool of run {header.run_id!r}, and --rollout-queue-run-id says {run!r}: give that "
            "run id, or another --rollout-data-dir"
        )
    if header.storage_profile != profile:
        raise BadInput(
            f"{pool.path} was made with storage profile {header.storage_profile}, and --rollout-storage-profile says "
            f"{profile}: give the one that it was made with"
        )
