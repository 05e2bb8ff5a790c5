"""Export: groups as one Parquet file, a row for each sample, for whoever analyses them elsewhere.

The rule: what is exported is what is stored, in plain columns; free-form values are JSON. Tensors (r3, SC and others)
stay in the pool or go with an archive; their names are listed, so that nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from strawq.core.machine import Machine
from strawq.core.state import task_key, task_order
from strawq.errors import BadInput
from strawq.handles import Held
from strawq.model import Slice, Submission, Task
from strawq.remote import create_remote

if TYPE_CHECKING:
    from strawq.pool import Pool
    from strawq.samples import Group, Sample

ROWS_PER_WRITE = 256


class Exported(msgspec.Struct, frozen=True):
    """What was written. A group without samples is one row whose sample columns are null."""

    groups: int
    samples: int
    rows: int


def live_groups(pool: Pool, queue: str, *, ready: bool) -> list[Held]:
    """Live groups in order of submission: those ready for a batch, or all of them."""

    def look(machine: Machine) -> list[Held]:
        state = machine.state
        rows = state.branch.queues[queue]
        fresh = () if ready else (task for given in rows.submissions.values() for task in _fresh(given))
        tasks = sorted((*rows.tasks.values(), *fresh), key=lambda task: task.order)
        return [
            Held(task, {part.object: state.objects[part.object] for part in task.parts})
            for task in tasks
            if not ready or (task.stage == "ready" and task.pending)
        ]

    held: list[Held] = pool.log.refresh(look)
    return held


def _fresh(given: Submission) -> Iterator[Task]:
    """The prompts of a submission that nobody has leased yet, as the tasks that they will become."""
    for row in range(given.next, given.end):
        order = task_order(given.number, row)
        yield Task(task_key(given.number, row), order, "fresh", (Slice(given.object, row, row + 1),))


def export_queue(pool: Pool, queue: str, url: str, *, ready: bool = True) -> Exported:
    """Write the live groups of a queue to a Parquet file at `url`. They are pinned for as long as that takes."""
    _require_parquet(url)
    pool.queue(queue)
    groups = live_groups(pool, queue, ready=ready)
    pool.pin("export", groups)
    try:
        return write_parquet((pool.payloads.load(held) for held in groups), url)
    finally:
        pool.unpin("export")


def _require_parquet(url: str) -> None:
    if not url.endswith(".parquet"):
        raise BadInput(f"{url} does not end in .parquet, the only format that there is")


def write_parquet(groups: Iterable[Group], url: str) -> Exported:
    """Write groups to a Parquet file at `url`; it appears whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    _require_parquet(url)
    schema = _schema()
    total = samples = rows = 0
    with create_remote(url) as file, pq.ParquetWriter(file, schema) as writer:
        waiting: list[dict[str, Any]] = []
        for group in groups:
            total += 1
            samples += len(group.samples)
            waiting += _rows(group)
            if len(waiting) >= ROWS_PER_WRITE:
                writer.write_table(pa.Table.from_pylist(waiting, schema))
                rows += len(waiting)
                waiting = []
        if waiting:
            writer.write_table(pa.Table.from_pylist(waiting, schema))
            rows += len(waiting)
    return Exported(total, samples, rows)


def _schema() -> Any:
    import pyarrow as pa

    ints, text = pa.list_(pa.int32()), pa.string()
    span = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", text), ("last", text)])
    return pa.schema(
        [
            ("task", text),
            ("group_id", text),
            ("prompt_text", text),
            ("prompt_tokens", ints),
            ("messages", text),
            ("label", text),
            ("prompt_metadata", text),
            ("sample", pa.int64()),
            ("tokens", ints),
            ("text", text),
            ("logprobs", pa.list_(pa.float32())),
            ("loss_mask", pa.list_(pa.uint8())),
            ("versions", pa.list_(span)),
            ("status", text),
            ("finish_reason", text),
            ("reward", pa.float64()),
            ("rewards", text),
            ("metadata", text),
            ("tensors", pa.list_(text)),
        ],
        metadata={"strawq.export": "1"},
    )


def _rows(group: Group) -> Iterator[dict[str, Any]]:
    prompt = group.prompt
    base = {
        "task": group.task_id,
        "group_id": prompt.group_id or group.task_id,
        "prompt_text": prompt.text,
        "prompt_tokens": prompt.tokens,
        "messages": _json(prompt.messages),
        "label": prompt.label,
        "prompt_metadata": _json(prompt.metadata or None),
    }
    if not group.samples:
        yield base
    for sample in group.samples:
        own = {} if sample.prompt_tokens is None else {"prompt_tokens": sample.prompt_tokens}
        yield base | own | _sample(sample)


def _sample(sample: Sample) -> dict[str, Any]:
    many = isinstance(sample.reward, dict)
    names = [name for name in ("r3", "sc") if getattr(sample, name) is not None]
    return {
        "sample": sample.index,
        "tokens": sample.tokens,
        "text": sample.text,
        "logprobs": sample.logprobs,
        "loss_mask": sample.loss_mask,
        "versions": [msgspec.structs.asdict(span) for span in sample.versions],
        "status": sample.status,
        "finish_reason": sample.finish_reason,
        "reward": None if many else sample.reward,
        "rewards": _json(sample.reward) if many else None,
        "metadata": _json(sample.metadata or None),
        "tensors": [*names, *sorted(sample.token_tensors), *sorted(sample.tensors)],
    }


def group_values(group: Group) -> dict[str, Any]:
    """A group as JSON values, without its tensors, whose names are listed."""
    prompt = group.prompt
    values: dict[str, Any] = {
        "task": group.task_id,
        "group_id": prompt.group_id or group.task_id,
        "prompt": {
            "text": prompt.text,
            "tokens": prompt.tokens,
            "messages": prompt.messages,
            "label": prompt.label,
            "metadata": prompt.metadata,
        },
        "samples": [
            _sample(sample)
            | {"reward": sample.reward, "metadata": sample.metadata, "prompt_tokens": sample.prompt_tokens}
            for sample in group.samples
        ],
    }
    for item in values["samples"]:
        del item["rewards"]
    plain: dict[str, Any] = msgspec.to_builtins(values, enc_hook=lambda array: array.tolist())
    return plain


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
