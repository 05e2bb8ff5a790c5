"""Make the golden pool of the present format: `python -m tools.golden_pool contracts/pools/v1`.

It holds every kind of file that a pool can hold. Once a format version is released its golden pool is never made
again: a strawq that cannot read it has broken its users' pools.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

from strawq import Pool, Prompt, Sample, VersionSpan
from strawq.archives import save_batch
from strawq.limits import ENTRIES_PER_SEGMENT
from strawq.queue import Queue
from strawq.samples import Group, TopK
from strawq.trimming import trim_log

PROMPTS = 6
TOKENS = 5


def answer(index: int, seed: int) -> Sample:
    """A finished sample of `TOKENS` tokens behind a prompt of three, with r3, SC and log-probs, all from `seed`."""
    tokens = np.arange(TOKENS, dtype=np.int32) + seed
    return Sample(
        index=index,
        tokens=tokens,
        logprobs=np.full(TOKENS, -0.5, np.float32),
        versions=(VersionSpan(0, TOKENS, "1"),),
        status="completed",
        finish_reason="stop",
        reward=float(seed),
        text=f"answer {seed}",
        r3=np.full((3 + TOKENS - 1, 2, 2), seed, np.int16),
        sc=TopK(np.tile(tokens[:, None], (1, 2)), np.full((TOKENS, 2), -1.0, np.float32)),
    )


def complete(queue: Queue, count: int, *, tensors: bool = True) -> None:
    for lease in queue.acquire(count):
        work = queue.open(lease)
        row = int(lease.task.partition("-")[2])
        sample = answer(0, row)
        plain = Sample(index=0, tokens=sample.tokens, logprobs=sample.logprobs, versions=sample.versions)
        queue.complete(work, Group(lease.task, work.group.prompt, (sample if tensors else plain,)))


def make(path: Path) -> None:
    """A trimmed log, a snapshot, inline and stored objects, packs, a checkpoint, a branch that was left, an archive."""
    with Pool.init(path, run_id="golden", queues=("rollout", "eval"), background=False) as pool:
        queue = pool.queue("rollout")
        pool.publish_version(1)
        queue.submit([Prompt(f"g{row}", np.array([1, 2, row], np.int32), f"question {row}") for row in range(PROMPTS)])
        complete(queue, 2)
        pool.checkpoint("step-1", {"step": 1}, {"model": "0" * 64})
        complete(queue, 1)
        for number in range(2, ENTRIES_PER_SEGMENT + 20):
            pool.publish_version(number)
        pool.snapshot()
        pool.rollback("step-1")
        queue = pool.queue("rollout")
        trim_log(pool, keep_entries=0, snapshots_kept=1)
        complete(queue, 2, tensors=False)
        batch = queue.take_batch(2).batch
        assert batch is not None
        save_batch(pool, "first", batch, {"why": "golden"})
        queue.finish_batch(batch)
        pool.queue("eval").submit([Prompt("e0", text="an inline prompt")])


def main(path: str) -> None:
    made = Path(path)
    if made.exists():
        raise SystemExit(f"{made} is there already; a golden pool is not made twice")
    make(made)
    for name in ("tmp", "locks", "sessions"):  # what only a live process needs; git keeps no empty directory anyway
        shutil.rmtree(made / name)


if __name__ == "__main__":
    main(sys.argv[1])
