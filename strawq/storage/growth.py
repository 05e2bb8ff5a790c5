"""How a sample grows on disk: `grow` says what a save adds, `fold` puts the saves together again. Each is the other's
inverse.

The rule: a save writes what is new since the last one, never the prefix again, so bytes written follow new tokens. A
row says how many tokens it follows; a fold in which a row is missing, doubled or out of order is refused, never
guessed. Rows of r3 and SC that were saved are kept as they were live: a later capture that covers them again adds
only its new rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from strawq.alignment import check_group, check_sample
from strawq.errors import BadInput, Damaged, Misaligned
from strawq.model import VersionSpan
from strawq.rows import Rows, append_rows, head, part
from strawq.samples import (
    Group,
    Int32,
    Prompt,
    Sample,
    SegmentInfo,
    TopK,
    TopP,
    clip_segments,
    clip_spans,
    prompt_length,
)
from strawq.storage.records import (
    NewRows,
    Records,
    SegmentRow,
    TensorRef,
    decode_prompts,
    decode_segments,
)
from strawq.storage.tensors import PackReader

_NONE = Sample(index=-1)

OpenRows = Callable[[TensorRef], Rows]
"""Gives the rows of a reference, lazily."""


class Part(NamedTuple):
    """Rows `[start, stop)` of an opened object, and the path of the pack beside it ("" if it has none)."""

    records: Records
    start: int
    stop: int
    pack: str = ""


def load_group(task_id: str, parts: Sequence[Part], packs: PackReader) -> Group:
    """The group whose prompt is the one row of `parts[0]` and whose saved segments are in the others, oldest first.

    Tensors stay unread (`StoredRows`): a pack is opened when rows of it are asked for. `Damaged` if the parts do not
    join."""
    (prompt,) = decode_prompts(parts[0].records, parts[0].start, parts[0].stop)
    paths: dict[str, str] = {}
    rows: list[SegmentRow] = []
    for saved in parts[1:]:
        for row in decode_segments(saved.records, saved.start, saved.stop):
            rows.append(row)
            for ref in row.tensors:
                if not saved.pack:
                    raise Damaged(
                        f"object {saved.records.name} refers to pack {cast(TensorRef, ref).pack}, and has none"
                    )
                paths[cast(TensorRef, ref).pack] = saved.pack

    def open_rows(ref: TensorRef) -> Rows:
        return packs.rows(paths[ref.pack], ref, f"task {task_id}, {ref.name}")

    return fold(task_id, prompt, rows, open_rows)


def grow_group(old: Group | None, new: Group, *, rewrite: bool = False) -> list[SegmentRow]:
    """One row for each sample of `new` that differs from `old` (what the queue has saved, as it was loaded; None:
    nothing).

    Refuses what is misaligned (`Misaligned`) or impossible (`BadInput`) before anything is written. `BadInput` too if
    saved tokens are gone or changed, unless `rewrite`, and if a saved sample is missing: for that, save the whole
    group anew (`old` None, and no earlier parts)."""
    saved = {sample.index: sample for sample in old.samples} if old else {}
    missing = saved.keys() - {sample.index for sample in new.samples}
    if missing:
        raise BadInput(f"group {new.task_id or new.prompt.group_id}: saved samples {sorted(missing)} are missing")
    if len({sample.index for sample in new.samples}) != len(new.samples):
        check_group(new)
    rows = (grow(saved.get(sample.index), sample, new.prompt, rewrite=rewrite) for sample in new.samples)
    return [row for row in rows if row is not None]


def grow(old: Sample | None, new: Sample, prompt: Prompt, *, rewrite: bool = False) -> SegmentRow | None:
    """What must be written so that a fold gives `new` instead of `old` (None: nothing saved yet); None if nothing
    changed."""
    before = old or _NONE
    follows, total = len(before.tokens), len(new.tokens)
    check_sample(new, prompt_length(prompt, new), since=0 if rewrite else min(follows, total))
    start = _common(before, new)
    if start < follows and not rewrite:
        raise BadInput(
            f"sample {new.index}: {follows} tokens are saved and only the first {start} of them are there now; "
            "cut on purpose with rewrite=True"
        )
    masks = _mask_changes(before.loss_mask[:start], new.loss_mask[:start])
    keep = _text_keep(before.text, new.text)
    row = SegmentRow(
        group_id=prompt.group_id,
        sample=new.index,
        follows=follows,
        start=start,
        prompt_tokens=new.prompt_tokens if start == 0 else None,
        tokens=new.tokens[start:],
        logprobs=None if new.logprobs is None else new.logprobs[start:],
        loss_mask=new.loss_mask[start:],
        masks=masks,
        versions=clip_spans(new.versions, start, total),
        requests=clip_segments(new.segments, start, total),
        status=new.status,
        finish_reason=new.finish_reason,
        reward=new.reward if new.reward is None or isinstance(new.reward, dict) else float(new.reward),
        text_keep=keep,
        text=None if new.text is None else new.text[keep:],
        metadata=None if old and old.metadata == new.metadata else new.metadata,
        topp_counts=np.diff(new.sc.offsets[start:]) if isinstance(new.sc, TopP) else None,
        payload=None if new.payload is None or (old and old.payload == new.payload) else new.payload,
        tensors=_new_rows(before, new, start, follows, prompt_length(prompt, new)),
    )
    return None if old and _unchanged(old, new, row) else row


def _unchanged(old: Sample, new: Sample, row: SegmentRow) -> bool:
    nothing = not (len(row.tokens) or row.masks or row.tensors or row.metadata is not None or row.payload is not None)
    same = (old.status, old.finish_reason, old.text) == (new.status, new.finish_reason, new.text)
    prompts = row.start > 0 or _equal(old.prompt_tokens, new.prompt_tokens)
    return nothing and same and prompts and row.start == row.follows and _same_reward(old.reward, new.reward)


def _same_reward(first: Any, second: Any) -> bool:
    both_nan = isinstance(first, float) and isinstance(second, float) and np.isnan(first) and np.isnan(second)
    return bool(both_nan or first == second)


def _equal(first: Any, second: Any) -> bool:
    return (first is None) == (second is None) and (first is None or first is second or np.array_equal(first, second))


def _common(old: Sample, new: Sample) -> int:
    """Leading response tokens on which both agree in token, log-prob and version."""
    size = min(len(old.tokens), len(new.tokens))
    if size == 0 or not _equal(old.prompt_tokens, new.prompt_tokens):
        return 0
    differ = old.tokens[:size] != new.tokens[:size]
    if (old.logprobs is None) != (new.logprobs is None):
        return 0
    if old.logprobs is not None and new.logprobs is not None:
        differ = differ | (old.logprobs[:size] != new.logprobs[:size])
    if differ.any():
        size = int(differ.argmax())
    while size and clip_spans(old.versions, 0, size) != clip_spans(new.versions, 0, size):
        size = max((span.start for span in old.versions if span.start < size), default=0)
    return size


def _mask_changes(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """The runs of one value in `new` in which something changed, as (start, end, value): one for a mask set to
    zeros."""
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return []
    starts = np.concatenate([[0], np.flatnonzero(new[1:] != new[:-1]) + 1])
    ends = np.append(starts[1:], len(new))
    runs = np.unique(np.searchsorted(starts, changed, side="right") - 1)
    return [(int(starts[run]), int(ends[run]), int(new[starts[run]])) for run in runs]


def _text_keep(old: str | None, new: str | None) -> int:
    if not old or not new:
        return 0
    if new.startswith(old):
        return len(old)
    # Detokenisers revise the last characters of a text that was cut inside one: look for the longest common start.
    low, high = 0, min(len(old), len(new))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if old[:middle] == new[:middle] else (low, middle - 1)
    return low


def _new_rows(old: Sample, new: Sample, start: int, follows: int, prompt: int | None) -> list[NewRows]:
    kept = _rows_kept(_tensors(old), start, follows, prompt, old.sc.offsets if isinstance(old.sc, TopP) else None)
    found: list[NewRows] = []
    for name, rows in _tensors(new).items():
        have = len(kept[name]) if name in kept else 0
        if have and len(rows) < have:
            raise Misaligned(f"sample {new.index}: {name} has {len(rows)} rows, {have} are saved")
        if have:
            append_rows(kept[name], part(rows, have, len(rows)))  # refuses another dtype or inner shape
        if len(rows) > have or (name not in kept and len(rows) == 0):
            found.append(NewRows(name, part(rows, have, len(rows)) if have else rows, have))
    lost = kept.keys() - _tensors(new).keys()
    if lost:
        raise Misaligned(f"sample {new.index}: {', '.join(sorted(lost))} saved for {start} tokens, and missing now")
    for name, rows in new.tensors.items():
        if old.tensors.get(name) is not rows:
            found.append(NewRows(f"whole.{name}", rows, 0))
    if old.tensors.keys() - new.tensors.keys():
        raise BadInput(
            f"sample {new.index}: tensors {sorted(old.tensors)} are saved; replace them, do not leave them out"
        )
    return found


def _tensors(sample: Sample) -> dict[str, Rows]:
    """The sample's per-token tensors by the names they have in records."""
    named: dict[str, Rows] = {f"token.{name}": rows for name, rows in sample.token_tensors.items()}
    if sample.r3 is not None:
        named["r3"] = sample.r3
    if sample.sc is not None:
        kind = "topk" if isinstance(sample.sc, TopK) else "topp"
        named[f"{kind}.ids"], named[f"{kind}.logprobs"] = sample.sc.ids, sample.sc.logprobs
    return named


def _rows_kept(
    tensors: dict[str, Rows], start: int, follows: int, prompt: int | None, offsets: Int32 | None
) -> dict[str, Rows]:
    """What is left of per-token tensors when a sample of `follows` tokens is cut to `start`."""
    if start == follows:
        return tensors
    if start == 0:
        return {}
    kept: dict[str, Rows] = {}
    for name, rows in tensors.items():
        count = start
        if name == "r3":
            count = (prompt or 0) + start - 1
        elif name.startswith("topp.") and offsets is not None:
            count = int(offsets[start])
        kept[name] = head(rows, count)
    return kept


def fold(task_id: str, prompt: Prompt, rows: Iterable[SegmentRow], open_rows: OpenRows) -> Group:
    """The group that the saved rows, oldest first, make. `Damaged` if they do not join or their parts do not line
    up."""
    samples: dict[int, _Folded] = {}
    for row in rows:
        folded = samples.get(row.sample)
        if folded is None:
            folded = samples[row.sample] = _Folded(task_id, prompt, row.sample)
        folded.add(row, open_rows)
    return Group(task_id, prompt, tuple(folded.sample() for folded in samples.values()))


class _Folded:
    """One sample while its rows are put together. Arrays are collected and joined once."""

    def __init__(self, task_id: str, prompt: Prompt, index: int) -> None:
        self.what = f"task {task_id}: sample {index}"
        self.prompt, self.index, self.count = prompt, index, 0
        self.last: SegmentRow | None = None
        self.arrays: dict[str, list[npt.NDArray[Any]]] = {"tokens": [], "logprobs": [], "loss_mask": [], "counts": []}
        self.versions: list[VersionSpan] = []
        self.requests: list[SegmentInfo] = []
        self.tensors: dict[str, Rows] = {}
        self.whole: dict[str, Rows] = {}
        self.prompt_tokens: Int32 | None = None
        self.text: str | None = None
        self.metadata: dict[str, Any] = {}
        self.payload: bytes | None = None

    def add(self, row: SegmentRow, open_rows: OpenRows) -> None:
        if row.follows != self.count or not 0 <= row.start <= row.follows:
            raise Damaged(
                f"{self.what}: a saved segment follows {row.follows} tokens, {self.count} are there: a part is missing"
            )
        if row.start < row.follows:
            self._cut(row.start)
        if row.start == 0:
            self.prompt_tokens = row.prompt_tokens
        for start, end, value in row.masks:
            mask = self._writable_mask()
            mask[start:end] = value
        given = {"tokens": row.tokens, "logprobs": row.logprobs, "loss_mask": row.loss_mask, "counts": row.topp_counts}
        for name, array in given.items():
            if array is not None and len(array):
                self.arrays[name].append(array)
        self.count = row.start + len(row.tokens)
        self.versions += row.versions
        self.requests += row.requests
        self.text = None if row.text is None else (self.text or "")[: row.text_keep] + row.text
        self.metadata = self.metadata if row.metadata is None else row.metadata
        self.payload = self.payload if row.payload is None else row.payload
        for ref in row.tensors:
            self._add_tensor(cast(TensorRef, ref), open_rows)
        self.last = row

    def _add_tensor(self, ref: TensorRef, open_rows: OpenRows) -> None:
        rows = open_rows(ref)
        if ref.name.startswith("whole."):
            self.whole[ref.name.removeprefix("whole.")] = rows
            return
        have = self.tensors.get(ref.name)
        count = 0 if have is None else len(have)
        if ref.start_row > count:
            raise Damaged(f"{self.what}: {ref.name} goes on at row {ref.start_row}, and {count} rows are there")
        kept = head(have, ref.start_row) if have is not None and ref.start_row else None
        try:
            self.tensors[ref.name] = rows if kept is None else append_rows(kept, rows)
        except Misaligned as error:
            raise Damaged(f"{self.what}: {ref.name}: {error}") from error

    def _joined(self, name: str, dtype: Any) -> npt.NDArray[Any]:
        arrays = self.arrays[name]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.empty(0, dtype)

    def _writable_mask(self) -> npt.NDArray[np.uint8]:
        mask = np.array(self._joined("loss_mask", np.uint8))
        self.arrays["loss_mask"] = [mask]
        return mask

    def _cut(self, start: int) -> None:
        counts = self._joined("counts", np.int32)
        offsets = _offsets(counts) if len(counts) else None
        tokens = self.prompt_tokens if self.prompt_tokens is not None else self.prompt.tokens
        length = None if tokens is None else len(tokens)
        self.tensors = dict(_rows_kept(self.tensors, start, self.count, length, offsets))
        for name in self.arrays:
            array = self._joined(name, np.int32)[:start]
            self.arrays[name] = [array] if len(array) else []
        self.versions = list(clip_spans(self.versions, 0, start))
        self.requests = list(clip_segments(self.requests, 0, start))

    def sample(self) -> Sample:
        row = self.last
        assert row is not None
        try:
            sample = Sample(
                self.index,
                self._joined("tokens", np.int32),
                None if row.logprobs is None else self._joined("logprobs", np.float32),
                self._joined("loss_mask", np.uint8),
                tuple(self.versions),
                cast(Any, row.status),
                row.finish_reason,
                row.reward,
                self.text,
                self.metadata,
                tuple(self.requests),
                self.prompt_tokens,
                self.tensors.get("r3"),
                self._sc(row),
                {name[6:]: rows for name, rows in self.tensors.items() if name.startswith("token.")},
                self.whole,
                self.payload,
            )
            check_sample(sample, prompt_length(self.prompt, sample), since=self.count)
        except BadInput as error:
            raise Damaged(f"{self.what}: saved parts do not line up: {error}") from error
        return sample

    def _sc(self, row: SegmentRow) -> TopK | TopP | None:
        named = self.tensors
        if "topk.ids" in named:
            return TopK(named["topk.ids"], named["topk.logprobs"])
        if "topp.ids" in named:
            return TopP(named["topp.ids"], named["topp.logprobs"], _offsets(self._joined("counts", np.int32)))
        return None


def _offsets(counts: Sequence[int] | Int32) -> Int32:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets
