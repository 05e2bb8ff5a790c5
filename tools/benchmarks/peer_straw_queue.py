"""straw-queue's side: run by its own interpreter (`--peer-python`), which needs no strawq.

The rule: each work is what straw-queue's documentation does for it, with batches where it has them, verified reads,
and its own durability, which is an fsync before every acknowledgement.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from straw import Coordinator, Limits, Publication, Record, SharedFilesystemStore, TaskSpec  # type: ignore[import-not-found]
from straw.backend import FilesystemBackend  # type: ignore[import-not-found]
from straw.tensor import publish_tensors  # type: ignore[import-not-found]

from tools.benchmarks.serving import serve, timed
from tools.benchmarks.workload import BATCH, SLICE, captures, given_bytes, payloads

_MANY = 1 << 50
_LIMITS = Limits(
    pending_tasks=_MANY,
    inflight_tasks=_MANY,
    accepted_records=_MANY,
    accepted_bytes=_MANY,
    accepted_tokens=_MANY,
    ready_bytes=_MANY,
    max_result_bytes=_MANY,
    max_result_tokens=_MANY,
)


def _backend(directory: Path) -> Any:
    """Its JuiceFS profile wants the mount's settings declared; they are read from the mount, where it shows them."""
    for parent in directory.parents:
        if (parent / ".config").is_file() and (parent / ".stats").exists():
            config = json.loads((parent / ".config").read_bytes())
            declaration = {
                "direct_mount": True,
                "writeback": bool(config["Chunk"]["Writeback"]),
                "open_cache": config["Meta"]["OpenCache"],
                "readdir_cache": bool(config.get("ReaddirCache", False)),
                "client_version": config["Version"],
                "durability_description": "benchmark volume",
            }
            return FilesystemBackend(directory, profile="juicefs", declaration=declaration)
    return FilesystemBackend(directory)


class Peer:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._store = self._open_store()
        self._queue = self._open("work", recover=False)
        self._history: Any = None
        self._numbers = itertools.count()
        self._payloads = payloads()
        self._captures: list[dict[str, Any]] = []
        self._published: Any = None

    def _open_store(self) -> Any:
        return SharedFilesystemStore(
            self._directory,
            "bench",
            backend=_backend(self._directory),
            online_gc=True,
            codecs=("bytes.v1", "json.v1", "tensor.v1"),
            max_record_bytes=1 << 30,
            max_buffer_bytes=4 << 30,
        )

    def _open(self, queue: str, recover: bool) -> Any:
        return Coordinator(
            self._store, queue_id=queue, namespace=True, exclusive_owner="bench", recover=recover, limits=_LIMITS
        )

    def single(self, tasks: int) -> float:
        """Tasks per second, one at a time."""
        return tasks / timed(lambda: [self._one(next(self._numbers)) for _ in range(tasks)])[0]

    def _one(self, number: int) -> None:
        store, queue = self._store, self._queue
        source = store.publish([Record("in", next(self._payloads))], submission_id=f"i{number}")
        queue.submit_tasks(f"s{number}", [TaskSpec(f"t{number}", input_ref=source)])
        assignment = queue.acquire("w").assignments[0]
        list(store.read(assignment.task.input_ref))
        out = store.publish([self._result(assignment.lease)], submission_id=f"o{number}")
        queue.complete_task(assignment.lease, submission_id=f"c{number}", result_ref=out, result_digest=out.digest)

    def _result(self, lease: Any) -> Any:
        metadata = {"task_id": lease.task_id, "attempt_id": lease.attempt_id}
        return Record("out-" + lease.task_id, next(self._payloads), metadata=metadata)

    def batched(self, rounds: int) -> float:
        """Tasks per second, 64 at a time. It completes one at a time: it has no other call for it."""
        return rounds * BATCH / timed(lambda: [self._batch(self._queue, BATCH) for _ in range(rounds)])[0]

    def _batch(self, queue: Any, size: int) -> None:
        store, number = self._store, next(self._numbers)
        inputs = store.publish_many(
            [Publication(records=[Record(f"in{i}", next(self._payloads))]) for i in range(size)],
            submission_id=f"bi{number}",
        )
        tasks = [TaskSpec(f"b{number}-{i}", input_ref=ref) for i, ref in enumerate(inputs)]
        queue.submit_tasks(f"bs{number}", tasks)
        assignments = queue.acquire("w", size).assignments
        for assignment in assignments:
            list(store.read(assignment.task.input_ref))
        leases = [assignment.lease for assignment in assignments]
        outs = store.publish_many(
            [Publication(records=[self._result(lease)]) for lease in leases], submission_id=f"bo{number}"
        )
        for lease, out in zip(leases, outs, strict=True):
            queue.complete_task(lease, submission_id=f"bc{lease.task_id}", result_ref=out, result_digest=out.digest)

    def write(self, seed: int) -> float:
        """MB/s of one publication of R3 + SC."""
        if not self._captures:
            self._captures = captures()
        sets = self._captures
        sets[0]["r3"][0, 0, 0] = seed % 128
        tensors = {f"{name}.{at}": array for at, arrays in enumerate(sets) for name, array in arrays.items()}
        seconds, self._published = timed(lambda: publish_tensors(self._store, tensors, submission_id=f"w{seed}"))
        return given_bytes(sets) / 1e6 / seconds

    def slice(self) -> float:
        """Milliseconds for 1,000 rows of the R3 of one sample, the median over the samples."""
        tensors = [ref for ref in self._published if ref.kind.startswith("r3.")]
        return statistics.median(timed(lambda ref=ref: ref[slice(*SLICE)])[0] for ref in tensors) * 1e3

    def read(self) -> float:
        """MB/s of reading what `write` has published last."""
        seconds, tensors = timed(lambda: [ref.load() for ref in self._published])
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6 / seconds

    def grow_history(self, tasks: int) -> float:
        """Bring a second queue to `tasks` finished tasks, accepted and consumed; seconds."""
        start = time.perf_counter()
        queue = self._open("history", recover=False)
        consumer = queue.open_consumer("trainer", exclusive_owner="bench")
        token = consumer["token"] if isinstance(consumer, dict) else consumer
        state = self._store.publish([Record("state", b"{}", codec="json.v1")], submission_id="consumer-state")
        cursor = done = 0
        while done < tasks:
            size = min(BATCH, tasks - done)
            self._batch(queue, size)
            done += size
            cursor = queue.read_commits(cursor, size).cursor
            queue.save_consumer_state(
                "trainer",
                token=token,
                request_id=f"consumed{done}",
                state_ref=state,
                fetch_cursor=cursor,
                processed_cursor=cursor,
            )
        queue.collect_garbage()
        queue.close()
        return time.perf_counter() - start

    def reopen(self) -> float:
        """Seconds until the queue with history is open again."""
        seconds, queue = timed(lambda: self._open("history", recover=True))
        queue.close()
        return seconds


def main() -> None:
    peer = Peer(Path(sys.argv[1]))
    names = ("single", "batched", "write", "slice", "read", "grow_history", "reopen")
    serve({name: getattr(peer, name) for name in names})


if __name__ == "__main__":
    main()
