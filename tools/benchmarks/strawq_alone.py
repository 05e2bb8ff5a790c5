"""Figures of strawq that have no counterpart: what growth, storage and memory cost, and what eight processes do to
each other."""

from __future__ import annotations

import collections
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from strawq.pool import Pool
from strawq.samples import Prompt
from strawq.storage import layout
from strawq.storage.clock import SystemClock
from strawq.storage.contention import CommitLock
from strawq.storage.posix import PosixFiles
from tools.benchmarks.serving import serve
from tools.benchmarks.strawq_queue import captured_group, run_batch, train
from tools.benchmarks.workload import BATCH, captures, given_bytes, payloads

SAVES = 8


class Counted:
    """A Files port that counts its calls by name."""

    def __init__(self, files: PosixFiles) -> None:
        self._files = files
        self.calls: collections.Counter[str] = collections.Counter()

    @property
    def keeps_staged(self) -> bool:
        return self._files.keeps_staged

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(self._files, name)

        def counted(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return call(*args, **options)

        return counted


class Alone:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._payloads = payloads()

    def run(self, path: str, seconds: float) -> dict[str, float]:
        """Batches of 64 on the pool at `path` for so long: tasks done, and the seconds they took."""
        with Pool.open(path) as pool:
            queue = pool.queue("work")
            run_batch(queue, 1, self._payloads)
            start = time.perf_counter()
            done = 0
            while time.perf_counter() - start < seconds:
                done += run_batch(queue, BATCH, self._payloads)
            return {"tasks": done, "seconds": time.perf_counter() - start}

    def make(self, path: str) -> None:
        Pool.init(path, queues=("work",)).close()

    def file_calls(self, path: str, tasks: int) -> dict[str, float]:
        """Calls of the Files port per task's life, by name, on a pool that is opened anew."""
        root = Path(path)
        files = Counted(PosixFiles(root, "link", layout.STAGING))
        lock = CommitLock(str(root / layout.COMMIT_LOCK), SystemClock())
        with Pool(files, path=path, lock=lock, background=False) as pool:
            queue = pool.queue("work")
            run_batch(queue, 1, self._payloads)
            files.calls.clear()
            for _ in range(tasks):
                run_batch(queue, 1, self._payloads)
            counted = {name: count / tasks for name, count in sorted(files.calls.items())}
            train(queue, tasks + 1)
        return counted

    def growth(self, samples: int, tokens: int) -> dict[str, float]:
        """A group that is saved eight times as it grows: bytes on disk per byte given, of all of it and of the
        resumed saves."""
        root = self._directory / f"growth-{tokens}"
        sets = captures(1, samples, tokens)
        with Pool.init(root, queues=("work",)) as pool:
            queue = pool.queue("work")
            queue.submit([Prompt(tokens=np.array([1], np.int32))])
            work = queue.open(queue.acquire().leases[0])
            sizes = [_stored_bytes(root)]
            for number in range(1, SAVES + 1):
                count = tokens * number // SAVES
                part = [{name: array[:count] for name, array in arrays.items()} for arrays in sets]
                group = captured_group(work.task, work.group.prompt, part)
                queue.save(work, group)
                sizes.append(_stored_bytes(root))
            queue.complete(work)
        step = (given_bytes(sets) + 4 * samples * tokens) / SAVES
        return {
            "resumed": (sizes[-1] - sizes[1]) / (step * (SAVES - 1)),
            "stored": (sizes[-1] - sizes[0]) / (step * SAVES),
        }

    def memory(self, samples: int, tokens: int) -> dict[str, float]:
        """MB: the peak of this process while it publishes, what it needed before, and the bytes published."""
        with Pool.init(self._directory / f"memory-{tokens}", queues=("work",)) as pool:
            queue = pool.queue("work")
            before = 0.0
            for shape in ((1, 64), (samples, tokens)):
                sets = captures(2, *shape)
                queue.submit([Prompt(tokens=np.array([1], np.int32))])
                work = queue.open(queue.acquire().leases[0])
                group = captured_group(work.task, work.group.prompt, sets)
                _forget_peak()
                queue.complete(work, group)
                if not before:
                    before = _status_mb("VmRSS")
                    continue
                return {"peak_mb": _status_mb("VmHWM"), "before_mb": before, "given_mb": given_bytes(sets) / 1e6}
        raise AssertionError("the loop returns")


def _stored_bytes(root: Path) -> int:
    return sum(os.stat(os.path.join(at, name)).st_size for at, _, names in os.walk(root) for name in names)


def _status_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"/proc/self/status has no {field}")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    alone = Alone(Path(sys.argv[1]))
    serve({name: getattr(alone, name) for name in ("run", "make", "file_calls", "growth", "memory")})


if __name__ == "__main__":
    main()
