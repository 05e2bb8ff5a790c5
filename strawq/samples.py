"""Prompts, samples and groups in memory, and the rule that holds for each sample: everything per token covers the
same tokens.

With P prompt tokens and n response tokens: `logprobs`, `loss_mask`, `versions` and the rows of `sc` cover the n
response tokens; `r3` has P + n - 1 rows, one for each token that the model read (the last one was never fed back).
`alignment` refuses anything else with the counts, `extend` adds tokens and `cut` removes them, each of them
everything at once. Structs are immutable: both return a new sample that shares memory (and unread rows) with the old
one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from strawq.errors import BadInput, Misaligned
from strawq.model import UNVERSIONED, VersionSpan, policy_number
from strawq.rows import Rows, append_rows, head, whole_numbers

Status = Literal["pending", "completed", "truncated", "aborted", "failed"]
STATUSES: tuple[str, ...] = get_args(Status)

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

NO_POLICY = ""
"""`VersionSpan.version` of tokens that no policy made: tool output, environment text."""

_NO_TOKENS: Int32 = np.empty(0, np.int32)
_ALL_TRAINED: UInt8 = np.empty(0, np.uint8)


class Prompt(msgspec.Struct, frozen=True, eq=False):
    """What a group answers. At least one of `tokens` (int32 [P]), `text`, `messages` or `payload` says it; `samples`
    is G, the answers wanted (0: the worker's default). `label`, `messages` and `metadata` are JSON values; `payload`
    is the user's own bytes."""

    group_id: str = ""
    tokens: Int32 | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    label: str | None = None
    metadata: dict[str, Any] = {}
    samples: int = 0
    payload: bytes | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None:
            _force(self, "tokens", _vector(self.tokens, np.int32, "prompt tokens", least=0))


class SegmentInfo(msgspec.Struct, frozen=True):
    """Response tokens `[start, end)` came from one engine request, sampled with these options. `logprob_mode` says
    what the log-probs are: `original` (full distribution) or `processed` (after temperature, top-p, top-k), or ""
    when unknown."""

    start: int
    end: int
    sampling: dict[str, Any] = {}
    logprob_mode: str = ""


class TopK(msgspec.Struct, frozen=True, eq=False):
    """SC head: per response token the ids and log-probs of its k best, each [n, k] (int32 and float32 from SGLang)."""

    ids: Rows
    logprobs: Rows


class TopP(msgspec.Struct, frozen=True, eq=False):
    """Ragged SC head: token t has the ids and log-probs in rows `[offsets[t], offsets[t + 1])`; `offsets` is int32 [n
    + 1]."""

    ids: Rows
    logprobs: Rows
    offsets: Int32

    def __post_init__(self) -> None:
        _force(self, "offsets", _vector(self.offsets, np.int32, "top-p offsets"))


class Sample(msgspec.Struct, frozen=True, eq=False):
    """One answer. Lists and torch tensors are accepted for the per-token fields and become NumPy arrays; n is
    `len(tokens)`.

    `tokens` int32 [n]; `logprobs` float32 [n] of the sampled tokens, or None if not recorded; `loss_mask` uint8 [n],
    ones if not given; `prompt_tokens` int32 [P] where this sample's prompt is not the group's; `r3` expert ids [P + n
    - 1, layers, top_k]; `token_tensors` further arrays of n rows; `tensors` arrays that belong to the sample as a
    whole and are replaced as a whole."""

    index: int
    tokens: Int32 = _NO_TOKENS
    logprobs: Float32 | None = None
    loss_mask: UInt8 = _ALL_TRAINED
    versions: tuple[VersionSpan, ...] = ()
    status: Status = "pending"
    finish_reason: str = ""
    reward: float | dict[str, Any] | None = None
    text: str | None = None
    metadata: dict[str, Any] = {}
    segments: tuple[SegmentInfo, ...] = ()
    prompt_tokens: Int32 | None = None
    r3: Rows | None = None
    sc: TopK | TopP | None = None
    token_tensors: dict[str, Rows] = {}
    tensors: dict[str, Rows] = {}
    payload: bytes | None = None

    def __post_init__(self) -> None:
        what = f"sample {self.index}"
        _force(self, "tokens", _vector(self.tokens, np.int32, f"{what}: tokens", least=0))
        if self.logprobs is not None:
            _force(self, "logprobs", _vector(self.logprobs, np.float32, f"{what}: logprobs"))
        if self.loss_mask is _ALL_TRAINED:
            _force(self, "loss_mask", np.ones(len(self.tokens), np.uint8))
        else:
            _force(self, "loss_mask", _vector(self.loss_mask, np.uint8, f"{what}: loss mask"))
        if self.prompt_tokens is not None:
            _force(self, "prompt_tokens", _vector(self.prompt_tokens, np.int32, f"{what}: prompt tokens", least=0))
        _force(self, "versions", join_spans(self.versions))
        _force(self, "segments", tuple(self.segments))


class Group(msgspec.Struct, frozen=True, eq=False):
    """One prompt and what has been generated for it so far. `task_id` is the queue's name for it ("" before it has
    one)."""

    task_id: str
    prompt: Prompt
    samples: tuple[Sample, ...] = ()


_force = msgspec.structs.force_setattr


def _vector(given: Any, dtype: Any, what: str, least: int | None = None) -> Any:
    """One axis of `dtype`: whole numbers as they are (`whole_numbers`), others rounded."""
    if np.issubdtype(dtype, np.integer):
        result = whole_numbers(given, dtype, what, least=least)
    elif isinstance(given, np.ndarray) and given.dtype == dtype:
        result = given
    else:
        try:
            array = np.asarray(given)
            if array.size and array.dtype.kind not in "iubf":
                raise BadInput(f"{what}: {array.dtype} where {np.dtype(dtype).name} is needed")
            result = array.astype(dtype)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise BadInput(f"{what}: {error}") from error
    if result.ndim != 1:
        raise BadInput(f"{what}: shape {list(result.shape)} where one axis is needed")
    return result


def join_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The same spans with neighbours of one version joined and empty ones left out."""
    joined: list[VersionSpan] = []
    for span in spans:
        before = joined[-1] if joined else None
        if before and before.end == span.start and (before.version, before.last) == (span.version, span.last):
            joined[-1] = VersionSpan(before.start, span.end, span.version, span.last)
        elif span.start != span.end:
            joined.append(span)
    return tuple(joined)


def clip_spans(spans: Sequence[VersionSpan], start: int, stop: int) -> tuple[VersionSpan, ...]:
    """What the spans say about response tokens `[start, stop)`, in the same numbering."""
    return tuple(
        VersionSpan(max(span.start, start), min(span.end, stop), span.version, span.last)
        for span in spans
        if span.start < stop and span.end > start
    )


def clip_segments(segments: Sequence[SegmentInfo], start: int, stop: int) -> tuple[SegmentInfo, ...]:
    return tuple(
        SegmentInfo(max(info.start, start), min(info.end, stop), info.sampling, info.logprob_mode)
        for info in segments
        if info.start < stop and info.end > start
    )


def prompt_length(prompt: Prompt, sample: Sample) -> int | None:
    """P of this sample, or None while the prompt has not been tokenised."""
    tokens = sample.prompt_tokens if sample.prompt_tokens is not None else prompt.tokens
    return None if tokens is None else len(tokens)


def token_count(group: Group) -> int:
    """Response tokens in the group."""
    return sum(len(sample.tokens) for sample in group.samples)


def oldest_version(group: Group) -> int:
    """The oldest numbered policy that made a token of the group, or `UNVERSIONED`. A mixed span counts with its older
    end."""
    numbers = [
        number
        for sample in group.samples
        for span in sample.versions
        for version in ((span.version, span.last) if span.last else (span.version,))
        if (number := policy_number(version)) != UNVERSIONED
    ]
    return min(numbers, default=UNVERSIONED)


def same_sampling(sample: Sample) -> bool:
    """Whether all segments were sampled with the same options and log-prob mode; a trainer that needs one
    distribution asks this."""
    first = sample.segments[0] if sample.segments else None
    return all(
        info.sampling == first.sampling and info.logprob_mode == first.logprob_mode for info in sample.segments if first
    )


def extend(sample: Sample, more: Sample) -> Sample:
    """`sample` followed by `more`, which numbers its tokens, spans and segments from its own start and holds only the
    new rows.

    Status, finish reason, reward, metadata, payload and whole tensors are those of `more` (metadata, payload and
    tensors only if it has any). `Misaligned` if one of the two has log-probs, r3 or SC that the other lacks, or in
    another dtype or shape."""
    before, added, what = len(sample.tokens), len(more.tokens), f"sample {sample.index}"
    if before and added:
        for name in ("logprobs", "r3", "sc"):
            if (getattr(sample, name) is None) != (getattr(more, name) is None):
                raise Misaligned(f"{what}: {name} cover only one of its {before} saved and {added} new tokens")
        if sample.token_tensors.keys() != more.token_tensors.keys():
            raise Misaligned(
                f"{what}: token tensors {sorted(sample.token_tensors)} before, {sorted(more.token_tensors)} now"
            )
    shifted = [VersionSpan(s.start + before, s.end + before, s.version, s.last) for s in more.versions]
    infos = [SegmentInfo(i.start + before, i.end + before, i.sampling, i.logprob_mode) for i in more.segments]
    routes = sample.r3 if more.r3 is None else append_rows(sample.r3, more.r3)
    tensors = dict(sample.token_tensors)
    for name, rows in more.token_tensors.items():
        tensors[name] = append_rows(tensors.get(name), rows)
    return msgspec.structs.replace(
        more,
        index=sample.index,
        tokens=np.concatenate([sample.tokens, more.tokens]),
        logprobs=_join(sample.logprobs, more.logprobs),
        loss_mask=np.concatenate([sample.loss_mask, more.loss_mask]),
        versions=join_spans((*sample.versions, *shifted)),
        segments=(*sample.segments, *infos),
        text=more.text if sample.text is None else sample.text + (more.text or ""),
        metadata=more.metadata or sample.metadata,
        prompt_tokens=sample.prompt_tokens if more.prompt_tokens is None else more.prompt_tokens,
        r3=routes,
        sc=extend_sc(sample.sc, more.sc),
        token_tensors=tensors,
        tensors=more.tensors or sample.tensors,
        payload=sample.payload if more.payload is None else more.payload,
    )


def _join(first: Float32 | None, second: Float32 | None) -> Float32 | None:
    if first is None or second is None:
        return second if first is None else first
    return np.concatenate([first, second])


def extend_sc(sc: TopK | TopP | None, more: TopK | TopP | None) -> TopK | TopP | None:
    """SC rows `sc` followed by `more`; `Misaligned` if one is top-k and the other top-p."""
    if sc is None or more is None:
        return more if sc is None else sc
    if isinstance(sc, TopK) and isinstance(more, TopK):
        return TopK(append_rows(sc.ids, more.ids), append_rows(sc.logprobs, more.logprobs))
    if isinstance(sc, TopP) and isinstance(more, TopP):
        offsets = np.concatenate([sc.offsets, more.offsets[1:] + sc.offsets[-1]])
        return TopP(append_rows(sc.ids, more.ids), append_rows(sc.logprobs, more.logprobs), offsets)
    raise Misaligned("SC rows are top-k before and top-p now, or the reverse: keep one kind over a sample")


def without_response(sample: Sample) -> Sample:
    """The sample with nothing generated. What it came with stays: its prompt, payload and whole tensors, and rows that
    cover a prompt alone, which may be saved and are not to be left out then."""
    tokens = len(sample.tokens)
    return Sample(
        sample.index,
        prompt_tokens=sample.prompt_tokens,
        r3=None if tokens else sample.r3,
        sc=None if tokens else sample.sc,
        token_tensors={} if tokens else sample.token_tensors,
        tensors=sample.tensors,
        payload=sample.payload,
    )


def cut(sample: Sample, count: int) -> Sample:
    """The sample as it was after its first `count` response tokens: every per-token part cut to them, unread if lazy.

    What the removed tokens decided goes too: reward, finish reason and text (its characters cannot be divided by
    tokens). The status becomes `aborted`, or `pending` if no token is left. Metadata, payload and whole tensors stay.
    `BadInput` if it has fewer tokens."""
    size = len(sample.tokens)
    if not 0 <= count <= size:
        raise BadInput(f"sample {sample.index}: cannot cut to {count} tokens, it has {size}")
    if count == size:
        return sample
    sc = sample.sc
    if isinstance(sc, TopK):
        sc = TopK(head(sc.ids, count), head(sc.logprobs, count))
    elif isinstance(sc, TopP):
        rows = int(sc.offsets[count])
        sc = TopP(head(sc.ids, rows), head(sc.logprobs, rows), sc.offsets[: count + 1])
    return msgspec.structs.replace(
        sample,
        tokens=sample.tokens[:count],
        logprobs=None if sample.logprobs is None else sample.logprobs[:count],
        loss_mask=sample.loss_mask[:count],
        versions=clip_spans(sample.versions, 0, count),
        segments=clip_segments(sample.segments, 0, count),
        status="aborted" if count else "pending",
        finish_reason="",
        reward=None,
        text=None,
        r3=None if sample.r3 is None else head(sample.r3, max(len(sample.r3) - (size - count), 0)),
        sc=sc,
        token_tensors={name: head(rows, count) for name, rows in sample.token_tensors.items()},
    )
