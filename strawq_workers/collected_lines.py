"""Collected batches as JSON lines, one for each group, in a file or on stdout.

The rule: a batch is finished when its lines are where they should be, never before. A file knows by itself which
batches stand in it, so there one that comes again is not written twice; from stdout nothing can be taken back.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from strawq.errors import BadInput, Fenced
from strawq.handles import Batch
from strawq.pool import Pool
from strawq.samples import Group
from strawq.standard_output import write_stdout
from strawq_workers.collector import Collector


class CollectSummary(msgspec.Struct, frozen=True):
    """`batches` were finished, `groups` and `tokens` (response tokens) are in them; `sealed`: there will be no more."""

    batches: int
    groups: int
    tokens: int
    sealed: bool
    metrics: dict[str, float]


def group_record(group: Group, batch: Batch) -> dict[str, Any]:
    """A group as JSON values. Log-probs are those of the policy that made the token, as stored; a group whose prompt
    came without an id goes by its task's."""
    prompt = group.prompt
    return {
        "batch": f"{batch.branch}/{batch.id}",
        "task": group.task_id,
        "group_id": prompt.group_id or group.task_id,
        "prompt": {
            "text": prompt.text,
            "tokens": None if prompt.tokens is None else prompt.tokens.tolist(),
            "messages": prompt.messages,
            "label": prompt.label,
            "metadata": prompt.metadata,
        },
        "samples": [
            {
                "index": sample.index,
                "tokens": sample.tokens.tolist(),
                "logprobs": None if sample.logprobs is None else sample.logprobs.tolist(),
                "loss_mask": sample.loss_mask.tolist(),
                "versions": msgspec.to_builtins(sample.versions),
                "reward": sample.reward,
                "status": sample.status,
                "finish_reason": sample.finish_reason,
                "text": sample.text,
                "metadata": sample.metadata,
            }
            for sample in group.samples
        ],
    }


def collect_to_jsonl(
    pool: Pool,
    out: str | os.PathLike[str],
    *,
    count: int,
    batches: int = 0,
    queue: str = "rollout",
    consumer: str = "trainer",
    timeout: float | None = None,
    fewer: bool = False,
    wait: Callable[[float], Any] = time.sleep,
) -> CollectSummary:
    """Write `batches` batches (0: until the queue is sealed and used up) to `out`, one line for each group, `-` for
    stdout. A batch is finished when its lines are durable; on stdout, when they are written and flushed. One that
    cannot be written to stdout is given back, and `BrokenPipeError` or `StorageFailed` say why.

    A file that is there is continued: a batch that an earlier run wrote, and did not live to finish, is not written
    twice. So one that cannot be written to a file stays open, and comes again."""
    collector = Collector(pool, queue, consumer)
    groups = tokens = done = 0
    metrics: dict[str, float] = {}
    with _Lines(out) as lines:
        while not batches or done < batches:
            batch = collector.next_batch(count, timeout=timeout, fewer=fewer, wait=wait)
            if batch is None:
                return CollectSummary(done, groups, tokens, True, metrics)
            try:
                records = [group_record(group, batch.batch) for group in batch]
                lines.write(f"{batch.batch.branch}/{batch.id}", records)
            except BaseException:
                if not lines.remembers:
                    collector.give_back(batch)
                raise
            try:
                collector.finish(batch)
            except Fenced as error:
                raise Fenced(
                    f"batch {batch.id} is written to {out}, and was taken by somebody else: {error}"
                ) from error
            done += 1
            groups += len(batch)
            tokens += sum(len(sample["tokens"]) for record in records for sample in record["samples"])
            metrics = batch.metrics()
    return CollectSummary(done, groups, tokens, False, metrics)


class _Lines:
    """The output file: knows which batches stand in it, and cuts off one that stands there by half."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self._path = None if os.fspath(out) == "-" else Path(out)
        self._file: BinaryIO | None = None
        self._starts: dict[str, int] = {}

    @property
    def remembers(self) -> bool:
        """Whether a batch that comes again is known by what stands there already."""
        return self._path is not None

    def __enter__(self) -> _Lines:
        if self._path is not None:
            self._file = open(self._path, "r+b" if self._path.exists() else "w+b")
            try:
                self._read()
            except BaseException:
                self._file.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self) -> None:
        assert self._file is not None
        at = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                self._starts.setdefault(json.loads(line)["batch"], at)
            except (ValueError, KeyError, TypeError) as error:
                raise BadInput(f"{self._path} has a line at byte {at} that is no collected group: {error}") from error
            at += len(line)
        self._file.seek(at)

    def write(self, batch: str, records: list[dict[str, Any]]) -> None:
        data = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        if self._file is None:
            write_stdout(data)
            return
        start = self._starts.get(batch)
        if start is not None:
            # An earlier run wrote it, whole or in part, and did not live to finish it: then it is the last one there.
            if start != max(self._starts.values()):
                raise BadInput(f"{self._path} holds batch {batch} in front of others; write to a new file")
            self._file.seek(start)
            self._file.truncate()
        self._starts[batch] = self._file.tell()
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())
