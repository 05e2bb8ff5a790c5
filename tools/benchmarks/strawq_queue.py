"""strawq's side of the comparison, through its public face."""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from strawq.model import VersionSpan
from strawq.pool import Pool
from strawq.queue import Queue
from strawq.samples import Group, Prompt, Sample, TopK
from strawq.work import Change, Work
from tools.benchmarks.serving import serve, timed
from tools.benchmarks.workload import BATCH, SLICE, Array, captures, given_bytes, payloads

HISTORY_BATCH = 1024


def result_of(work: Work, payload: bytes) -> Group:
    return Group(work.task, work.group.prompt, (Sample(0, status="completed", payload=payload),))


def captured_group(task: str, prompt: Prompt, sets: list[dict[str, Array]]) -> Group:
    """A group whose samples carry the captures; the prompt has one token, so that R3 has as many rows as tokens."""
    samples = []
    for index, arrays in enumerate(sets):
        tokens = arrays["sc_ids"][:, 0].copy()
        span = VersionSpan(0, len(tokens), "7")
        head = TopK(arrays["sc_ids"], arrays["sc_logprobs"])
        samples.append(Sample(index, tokens, versions=(span,), status="completed", r3=arrays["r3"], sc=head))
    return Group(task, prompt, tuple(samples))


def run_batch(queue: Queue, size: int, stream: Any) -> int:
    """The life of up to `size` tasks: three commits."""
    queue.submit([Prompt(payload=next(stream)) for _ in range(size)])
    work = [queue.open(lease) for lease in queue.acquire(size)]
    if work:
        queue.report([Change(one, "complete", result_of(one, next(stream))) for one in work])
    return len(work)


def train(queue: Queue, count: int) -> None:
    """Take what is ready as a batch and finish it."""
    batch = queue.take_batch(count).batch
    assert batch is not None, "as many groups are ready as were completed"
    queue.finish_batch(batch)


class Strawq:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pool = Pool.init(directory / "pool", queues=("work", "tensors"))
        self._queue = self._pool.queue("work")
        self._payloads = payloads()
        self._captures: list[dict[str, Array]] = []
        self._published: Any = None
        self._stored: list[bytes] = []

    def single(self, tasks: int) -> float:
        """Tasks per second, one at a time."""
        return tasks / timed(lambda: [run_batch(self._queue, 1, self._payloads) for _ in range(tasks)])[0]

    def batched(self, rounds: int) -> float:
        """Tasks per second, 64 at a time."""
        return rounds * BATCH / timed(lambda: [run_batch(self._queue, BATCH, self._payloads) for _ in range(rounds)])[0]

    def write(self, seed: int) -> float:
        """MB/s, as given, of handing in one group with R3 + SC."""
        if not self._captures:
            self._captures = captures()
        sets = self._captures
        sets[0]["r3"][0, 0, 0] = seed % 128
        queue = self._pool.queue("tensors")
        queue.submit([Prompt(tokens=[1])])  # type: ignore[arg-type]
        work = queue.open(queue.acquire().leases[0])
        group = captured_group(work.task, work.group.prompt, sets)
        seconds, _ = timed(lambda: queue.complete(work, group))
        batch = queue.take_batch(1).batch
        assert batch is not None, "the group has just been accepted"
        self._published = batch.groups[0]
        return given_bytes(sets) / 1e6 / seconds

    def disk(self, turn: int) -> float:
        """MB/s, as given, that writing and syncing the stored bytes of the last `write` takes, and nothing else."""
        (held,) = (stored.ref for stored in self._published.objects.values() if stored.ref.pack)
        if not self._stored:
            self._stored = [os.urandom(1 << 20)] * (held.pack_bytes >> 20) + [os.urandom(held.pack_bytes % (1 << 20))]
        path = self._directory / f"disk-{turn}"
        seconds, _ = timed(lambda: _write_and_sync(path, self._stored))
        path.unlink()
        return given_bytes(self._captures) / 1e6 / seconds

    def slice(self) -> float:
        """Milliseconds for 1,000 rows of the R3 of one sample, the median over the samples of a group that has been
        opened; its pack has not."""
        samples = self._pool.payloads.load(self._published).samples
        tensors = [sample.r3 for sample in samples if sample.r3 is not None]
        return statistics.median(timed(lambda rows=rows: rows[slice(*SLICE)])[0] for rows in tensors) * 1e3

    def read(self) -> float:
        """MB/s of reading what `write` has published last, in the dtypes that were given."""

        def load() -> int:
            arrays = []
            for sample in self._pool.payloads.load(self._published).samples:
                assert sample.r3 is not None and isinstance(sample.sc, TopK)
                arrays += [sample.r3[:], sample.sc.ids[:], sample.sc.logprobs[:]]
            return sum(array.nbytes for array in arrays)

        seconds, size = timed(load)
        return size / 1e6 / seconds

    def grow_history(self, tasks: int, to: int = 0) -> float:
        """Bring a second pool from `to` to `tasks` finished tasks, accepted and trained on; seconds."""
        start = time.perf_counter()
        path = self._directory / "history"
        with Pool.open(path) if path.exists() else Pool.init(path, queues=("work",)) as pool:
            queue = pool.queue("work")
            for done in range(to, tasks, HISTORY_BATCH):
                size = min(HISTORY_BATCH, tasks - done)
                run_batch(queue, size, self._payloads)
                train(queue, size)
        return time.perf_counter() - start

    def reopen(self) -> float:
        """Seconds until the pool with history is open again and its counts are known."""

        def opened() -> Pool:
            pool = Pool.open(self._directory / "history")
            pool.queue("work").counts()
            return pool

        seconds, pool = timed(opened)
        pool.close()
        return seconds

    def commits(self, count: int) -> list[float]:
        """Milliseconds of `count` commits that carry 4 KiB each, one after the other."""
        prompts = [[Prompt(payload=next(self._payloads))] for _ in range(count)]
        times = [timed(lambda one=one: self._queue.submit(one))[0] * 1e3 for one in prompts]
        self._drain()
        return times

    def _drain(self) -> None:
        while leases := self._queue.acquire(BATCH).leases:
            self._queue.report([Change(self._queue.open(lease), "drop", None, "benchmark") for lease in leases])


def _write_and_sync(path: Path, pieces: list[bytes]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for piece in pieces:
            os.write(fd, piece)
        os.fsync(fd)
    finally:
        os.close(fd)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def main() -> None:
    side = Strawq(Path(sys.argv[1]))
    names = ("single", "batched", "write", "disk", "slice", "read", "grow_history", "reopen", "commits")
    serve({name: getattr(side, name) for name in names})


if __name__ == "__main__":
    main()
