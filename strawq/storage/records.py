"""Records: prompts and saved segments as Arrow IPC files that any Arrow reader opens.

Two kinds of file, told apart by `strawq.kind` in the schema's metadata. In `prompts` a row is the prompt of one
group. In `segments` a row is what one save added to one sample: the response tokens from `start` on with everything
per token, and the sample's latest status, reward and so on. The rule: a row holds only what is new, and nothing in it
is pickled; free-form values are JSON that reads back equal, or are refused. `docs/payloads.md` lists the columns.

This module imports pyarrow; import it lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from blake3 import blake3

from strawq.errors import Damaged, FormatUnsupported
from strawq.json_values import json_text
from strawq.limits import INLINE_OBJECT_BYTES
from strawq.model import VersionSpan
from strawq.rows import Rows, dtype_name, shape_of
from strawq.samples import Float32, Int32, Prompt, SegmentInfo, UInt8
from strawq.storage import columns
from strawq.storage.packs import PackPlan, plan_pack

RECORDS_VERSION = "1"
"""Of both schemas. A file of another version is refused."""

_INTS = pa.list_(pa.int32())
_MASKS = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("value", pa.uint8())]))
_VERSIONS = pa.list_(
    pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.string()), ("last", pa.string())])
)
_REQUESTS = pa.list_(
    pa.struct([("start", pa.int32()), ("end", pa.int32()), ("sampling", pa.string()), ("logprob_mode", pa.string())])
)
_TENSORS = pa.list_(
    pa.struct(
        [
            ("name", pa.string()),
            ("pack", pa.string()),
            ("key", pa.string()),
            ("shape", pa.list_(pa.int64())),
            ("dtype", pa.string()),
            ("start_row", pa.int64()),
        ]
    )
)


def _schema(kind: str, fields: dict[str, Any]) -> Any:
    return pa.schema(list(fields.items()), metadata={"strawq.kind": kind, "strawq.version": RECORDS_VERSION})


PROMPTS = _schema(
    "prompts",
    {
        "group_id": pa.string(),
        "tokens": _INTS,
        "text": pa.string(),
        "messages": pa.string(),
        "label": pa.string(),
        "metadata": pa.string(),
        "samples": pa.int32(),
        "payload": pa.binary(),
    },
)
SEGMENTS = _schema(
    "segments",
    {
        "group_id": pa.string(),
        "sample": pa.int64(),
        "follows": pa.int32(),
        "start": pa.int32(),
        "prompt_tokens": _INTS,
        "tokens": _INTS,
        "logprobs": pa.list_(pa.float32()),
        "loss_mask": pa.list_(pa.uint8()),
        "masks": _MASKS,
        "versions": _VERSIONS,
        "requests": _REQUESTS,
        "status": pa.string(),
        "finish_reason": pa.string(),
        "reward": pa.float64(),
        "rewards": pa.string(),
        "text_keep": pa.int32(),
        "text": pa.string(),
        "metadata": pa.string(),
        "topp_counts": _INTS,
        "payload": pa.binary(),
        "tensors": _TENSORS,
    },
)
# Given, or pyarrow asks the environment for a legacy format on every file.
_WRITE_OPTIONS = pa.ipc.IpcWriteOptions()
_SCHEMAS = {"prompts": PROMPTS, "segments": SEGMENTS}


class TensorRef(msgspec.Struct, frozen=True):
    """Rows `[start_row, start_row + shape[0])` of one sample's tensor `name`, stored under `key` in the pack; `dtype`
    as given."""

    name: str
    pack: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    start_row: int


class NewRows(msgspec.Struct, frozen=True, eq=False):
    """Rows that are to be stored: those of tensor `name` from `start_row` on."""

    name: str
    rows: Rows
    start_row: int


class SegmentRow(msgspec.Struct, frozen=True, eq=False):
    """One row of `segments`. The sample had `follows` response tokens before; it is cut to `start` of them, then
    `tokens` are added.

    Positions count from the start of the response. `masks` are new loss-mask values of earlier tokens, (start, end,
    value). `prompt_tokens` counts only in a row with `start` 0. `text` is appended to the first `text_keep`
    characters (None: no text). `metadata` and `payload` are None where unchanged. `tensors` holds `NewRows` on the
    way in and `TensorRef` on the way out."""

    group_id: str
    sample: int
    follows: int
    start: int
    prompt_tokens: Int32 | None
    tokens: Int32
    logprobs: Float32 | None
    loss_mask: UInt8
    masks: Sequence[tuple[int, int, int]]
    versions: Sequence[VersionSpan]
    requests: Sequence[SegmentInfo]
    status: str
    finish_reason: str
    reward: float | dict[str, Any] | None
    text_keep: int
    text: str | None
    metadata: dict[str, Any] | None
    topp_counts: Int32 | None
    payload: bytes | None
    tensors: Sequence[NewRows | TensorRef]


class Publication(msgspec.Struct, frozen=True, eq=False):
    """What is to be written for many groups: an Arrow file, at most one pack, and the rows `(start, stop)` of each
    group."""

    records: memoryview
    digest: str
    rows: int
    slices: tuple[tuple[int, int], ...]
    pack: PackPlan | None = None


def _optional_json(value: Any, what: str) -> str | None:
    return None if value is None else json_text(value, what)


def encode_prompts(prompts: Sequence[Prompt]) -> Publication:
    """One row per prompt, in order. Raises `BadInput`."""
    table = [
        columns.plain([prompt.group_id for prompt in prompts], pa.string()),
        columns.lists([prompt.tokens for prompt in prompts], _INTS),
        columns.plain([prompt.text for prompt in prompts], pa.string()),
        columns.plain([_optional_json(prompt.messages, "messages") for prompt in prompts], pa.string()),
        columns.plain([prompt.label for prompt in prompts], pa.string()),
        columns.plain([json_text(p.metadata, "metadata") if p.metadata else "{}" for p in prompts], pa.string()),
        columns.plain([prompt.samples for prompt in prompts], pa.int32()),
        columns.plain([prompt.payload for prompt in prompts], pa.binary()),
    ]
    return _publication(PROMPTS, table, tuple((row, row + 1) for row in range(len(prompts))), None)


def encode_segments(
    groups: Sequence[Sequence[SegmentRow]], stage: Callable[[PackPlan], None] | None = None
) -> Publication:
    """The new rows of many groups, and a pack with their new tensor rows if there are any. Raises `BadInput`, last of
    all `HeaderTooLong`.

    `stage` is called with the pack once everything else is encoded, and before the pack's digest is asked for: what
    writes it there hashes it on the way."""
    rows = [row for group in groups for row in group]
    table = [
        columns.plain([row.group_id for row in rows], pa.string()),
        columns.plain([row.sample for row in rows], pa.int64()),
        columns.plain([row.follows for row in rows], pa.int32()),
        columns.plain([row.start for row in rows], pa.int32()),
        columns.lists([row.prompt_tokens for row in rows], _INTS),
        columns.lists([row.tokens for row in rows], _INTS),
        columns.lists([row.logprobs for row in rows], SEGMENTS.field("logprobs").type),
        columns.lists([row.loss_mask for row in rows], SEGMENTS.field("loss_mask").type),
        columns.structs([row.masks for row in rows], _MASKS),
        columns.structs([[(s.start, s.end, s.version, s.last) for s in row.versions] for row in rows], _VERSIONS),
        columns.structs([_requests(row) for row in rows], _REQUESTS),
        columns.plain([row.status for row in rows], pa.string()),
        columns.plain([row.finish_reason for row in rows], pa.string()),
        columns.plain([None if isinstance(row.reward, dict) else row.reward for row in rows], pa.float64()),
        columns.plain(
            [json_text(row.reward, "reward") if isinstance(row.reward, dict) else None for row in rows], pa.string()
        ),
        columns.plain([row.text_keep for row in rows], pa.int32()),
        columns.plain([row.text for row in rows], pa.string()),
        columns.plain([_optional_json(row.metadata, f"metadata of sample {row.sample}") for row in rows], pa.string()),
        columns.lists([row.topp_counts for row in rows], _INTS),
        columns.plain([row.payload for row in rows], pa.binary()),
    ]
    pack, refs = _pack(rows, stage)
    table.append(columns.structs(refs, _TENSORS))
    slices, at = [], 0
    for group in groups:
        slices.append((at, at + len(group)))
        at += len(group)
    return _publication(SEGMENTS, table, tuple(slices), pack)


def _requests(row: SegmentRow) -> list[tuple[int, int, str, str]]:
    return [(i.start, i.end, json_text(i.sampling, "sampling options"), i.logprob_mode) for i in row.requests]


def _pack(
    rows: Sequence[SegmentRow], stage: Callable[[PackPlan], None] | None
) -> tuple[PackPlan | None, list[list[tuple[Any, ...]]]]:
    pack = plan_tensors(rows)
    if pack is not None and stage is not None:
        stage(pack)
    digest = pack.digest if pack else ""
    refs = [
        [
            (new.name, digest, f"{at}/{new.name}", list(shape_of(new.rows)), dtype_name(new.rows), new.start_row)
            for new in row.tensors
            if isinstance(new, NewRows)
        ]
        for at, row in enumerate(rows)
    ]
    return pack, refs


def plan_tensors(rows: Sequence[SegmentRow]) -> PackPlan | None:
    """The pack of all new tensor rows, or None if there are none. `HeaderTooLong` if they do not fit one."""
    named = [
        (f"{at}/{new.name}", new.rows) for at, row in enumerate(rows) for new in row.tensors if isinstance(new, NewRows)
    ]
    return plan_pack(named) if named else None


def _publication(
    schema: Any, table: list[Any], slices: tuple[tuple[int, int], ...], pack: PackPlan | None
) -> Publication:
    batch = pa.RecordBatch.from_arrays(table, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=_WRITE_OPTIONS) as writer:
        writer.write_batch(batch)
    # A short one is copied out: Arrow's own buffers cost more per use than the bytes are worth.
    whole = sink.getvalue()
    data = memoryview(whole.to_pybytes() if whole.size <= INLINE_OBJECT_BYTES else whole).cast("B")
    return Publication(data, blake3(data).hexdigest(), batch.num_rows, slices, pack)


class Records:
    """One opened Arrow file of either kind: `name` for messages, `kind`, `rows`, and cells that read single rows."""

    __slots__ = ("_cells", "batch", "kind", "name", "rows")

    def __init__(self, name: str, kind: str, batch: Any) -> None:
        self.name, self.kind, self.batch = name, kind, batch
        self.rows: int = batch.num_rows
        self._cells: list[columns.Cell] | None = None

    def cells(self, kind: str, start: int, stop: int) -> list[columns.Cell]:
        """A reader per column, for rows `[start, stop)`; `Damaged` if the file is of the other kind or has fewer
        rows."""
        if self.kind != kind or not 0 <= start <= stop <= self.rows:
            raise Damaged(f"object {self.name} holds {self.rows} {self.kind}, not {kind} {start} to {stop}")
        if self._cells is None:
            self._cells = [columns.cells(column) for column in self.batch.columns]
        return self._cells


def open_records(data: bytes | memoryview, name: str, *, digest: str = "") -> Records:
    """Open the bytes of an Arrow file without copying them. `name` (the object's path) is for messages.

    `digest` is checked if it is given; leave it out only for bytes that were checked already. `Damaged` if the bytes
    are not that file, `FormatUnsupported` if its version is not ours."""
    if digest and blake3(data).hexdigest() != digest:
        raise Damaged(f"object {name}: {len(data)} bytes are not those that were published (BLAKE3 differs)")
    try:
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(data)))
        metadata = reader.schema.metadata or {}
        kind = metadata.get(b"strawq.kind", b"").decode()
        batches = reader.num_record_batches
        batch = reader.get_batch(0) if batches == 1 else None
        if batch is not None:
            batch.validate()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damaged(f"object {name} is not an Arrow file: {error}") from error
    version = metadata.get(b"strawq.version", b"").decode(errors="replace")
    if kind in _SCHEMAS and version != RECORDS_VERSION:
        raise FormatUnsupported(
            f"object {name}: records of version {version or '?'}, this strawq reads {RECORDS_VERSION}"
        )
    if batch is None or kind not in _SCHEMAS or not batch.schema.equals(_SCHEMAS[kind]):
        raise Damaged(f"object {name} is an Arrow file, but not one of strawq's records")
    return Records(name, kind, batch)


def decode_prompts(records: Records, start: int, stop: int) -> list[Prompt]:
    """The prompts in rows `[start, stop)`; token arrays are read-only views of the file's bytes."""
    group_id, tokens, text, messages, label, metadata, samples, payload = records.cells("prompts", start, stop)
    return [
        Prompt(
            group_id(row),
            tokens(row),
            text(row),
            _from_json(messages(row)),
            label(row),
            _from_json(metadata(row)),
            samples(row),
            payload(row),
        )
        for row in range(start, stop)
    ]


def decode_segments(records: Records, start: int, stop: int) -> list[SegmentRow]:
    """Rows `[start, stop)` of segments; arrays are read-only views of the file's bytes."""
    cells = records.cells("segments", start, stop)
    return [_segment(*(cell(row) for cell in cells)) for row in range(start, stop)]


def _segment(*cells: Any) -> SegmentRow:
    # In the order of SEGMENTS.
    (group_id, sample, follows, start, prompt_tokens, tokens, logprobs, loss_mask, masks, versions, requests) = cells[
        :11
    ]
    (status, finish_reason, reward, rewards, text_keep, text, metadata, topp_counts, payload, tensors) = cells[11:]
    return SegmentRow(
        group_id,
        sample,
        follows,
        start,
        prompt_tokens,
        tokens,
        logprobs,
        loss_mask,
        masks,
        [VersionSpan(*span) for span in versions],
        [SegmentInfo(first, end, _from_json(sampling), mode) for first, end, sampling, mode in requests],
        status,
        finish_reason,
        reward if rewards is None else _from_json(rewards),
        text_keep,
        text,
        _from_json(metadata),
        topp_counts,
        payload,
        [
            TensorRef(name, pack, key, tuple(np.asarray(shape).tolist()), dtype, start_row)
            for name, pack, key, shape, dtype, start_row in tensors
        ],
    )


def _from_json(text: str | None) -> Any:
    try:
        return None if text is None else msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise Damaged(f"a record holds JSON that nobody encoded: {error}") from error
