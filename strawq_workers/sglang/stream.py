"""Streams of `/generate`: bytes become frames, frames become one answer.

The rule: whether a field is cumulative or incremental is decided field by field, from `completion_tokens` (always
cumulative), never from a setting. SGLang mixes both forms in one chunk: with `--incremental-streaming-output` ids and
log-probs are deltas while counts stay totals. However the chunks were cut, all per-token fields end with the same
length, or the answer is refused.

Pure: no clock, no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from strawq.errors import Misaligned
from strawq_workers.sglang.versions import Mark
from strawq_workers.sglang.wire import Chunk, Meta

T = TypeVar("T")

DONE = b"[DONE]"
SMALL_BYTES = 1 << 16
"""A frame that has begun is copied to what follows it up to this size; beyond, it is only added to."""


class FrameParser:
    """Server-sent events, as far as SGLang uses them: `data:` lines, frames ended by an empty line, then `[DONE]`.

    Bytes may be cut anywhere. A frame without its empty line is never delivered: it may be half a number."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._lines: list[bytes] = []
        self._searched = 0
        self.done = False

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completed, in order. Sets `done` at `[DONE]`; what follows it is ignored."""
        if self.done:
            return []
        if self._lines or len(self._pending) > SMALL_BYTES:
            return self._feed_lines(data)
        if self._pending:
            data = bytes(self._pending) + data
            self._pending.clear()
            self._searched = 0
        # Frames of one whole line, as SGLang sends them, need no look at their lines.
        *events, rest = data.split(b"\n\n")
        frames: list[bytes] = []
        for event in events:
            if not event.startswith(b"data: ") or b"\n" in event or b"\r" in event:
                frames += self._feed_lines(event + b"\n\n")
            elif event == b"data: [DONE]":
                self.done = True
            else:
                frames.append(event[6:])
            if self.done:
                return frames
        return frames + self._feed_lines(rest) if rest else frames

    def _feed_lines(self, data: bytes) -> list[bytes]:
        """As `feed`, line by line."""
        self._pending += data
        frames: list[bytes] = []
        start = 0
        while not self.done:
            end = self._pending.find(b"\n", max(start, self._searched))
            if end < 0:
                break
            # Only the payload is copied: a frame with R3 rows is tens of megabytes.
            last = end - 1 if end > start and self._pending[end - 1] == 13 else end
            if last == start:
                self._close_frame(frames)
            elif self._pending.startswith(b"data:", start):
                begin = start + 5 + (self._pending[start + 5 : start + 6] == b" ")
                with memoryview(self._pending) as view:
                    self._lines.append(bytes(view[begin:last]))
            start = end + 1
        del self._pending[:start]
        self._searched = len(self._pending)
        return frames

    def _close_frame(self, frames: list[bytes]) -> None:
        if not self._lines:
            return
        payload = self._lines[0] if len(self._lines) == 1 else b"\n".join(self._lines)
        self._lines.clear()
        if payload == DONE:
            self.done = True
        else:
            frames.append(payload)


class TokenField(Generic[T]):
    """The values of one per-token field so far, and the form its chunks have shown: cumulative, incremental, or not yet
    known."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[T] = []
        self.cumulative: bool | None = None

    def fit(self, values: Sequence[T], total: int, *, what: str) -> list[T]:
        """The new values in one chunk's `values`, when `total` tokens have been made. Nothing is taken yet: see `take`.

        A field may lag behind within a stream. Raises `Misaligned` with the counts."""
        held, length = len(self.values), len(values)
        if held == 0 or length == 0:
            fits, new = length <= total, list(values)
        elif self._form(length, total, values) == "cumulative":
            fits, new = held <= length <= total, list(values[held:])
        else:
            fits, new = held + length <= total, list(values)
            if held == total and length <= held and list(values) == self.values[held - length :]:
                fits, new = True, []  # an abort in the queue sends the last chunk again
        if not fits:
            raise Misaligned(
                f"{what}: {self.name} has {length} values after {held}, but completion_tokens is {total}: "
                "neither a whole nor a part"
            )
        return new

    def take(self, new: list[T], length: int, total: int) -> None:
        """Keeps what `fit` found new in a chunk of `length` values, and remembers the form that the chunk has shown."""
        held = len(self.values)
        if held and length and self.cumulative is None and held != total:
            self.cumulative = held + len(new) == length
        self.values.extend(new)

    def _form(self, length: int, total: int, values: Sequence[T]) -> str:
        held = len(self.values)
        if self.cumulative is None:
            # `length == total` and `held + length == total` exclude each other, for something is held.
            if length == total or held + length == total:
                cumulative = length == total
            else:
                cumulative = length >= held and list(values[:held]) == self.values
        else:
            cumulative = self.cumulative or (held == total == length)
        return "cumulative" if cumulative else "incremental"


class Accumulator:
    """Folds the chunks of one sequence. `ended` once a chunk carried a finish reason.

    `withdrawn`: the sequence was aborted while it waited after a retract, and the frame that says so does not fit what
    was streamed before (SGLang answers with no tokens, or with the last chunk twice). The tokens before it are good."""

    def __init__(self, *, what: str) -> None:
        self.what = what
        self.ids: TokenField[int] = TokenField("output_ids")
        self.logprobs: TokenField[tuple[float | None, int, str | None]] = TokenField("output_token_logprobs")
        self.tops: TokenField[Any] = TokenField("output_top_logprobs")
        self.marks: list[Mark] = []
        self.last = Meta()
        self.total = 0
        self.ended = False
        self.withdrawn = False

    def add(self, chunk: Chunk) -> None:
        """Takes one chunk. Raises `Misaligned` for a missing or null field, a count that shrinks, or tokens after the
        end."""
        meta = chunk.meta_info
        if meta is not None and self._plain(chunk, meta):
            return
        if meta is None:
            raise Misaligned(f"{self.what}: meta_info is missing from the engine's answer")
        if chunk.output_ids is None:
            raise Misaligned(f"{self.what}: output_ids is missing from the engine's answer")
        if meta.completion_tokens is None:
            raise Misaligned(f"{self.what}: meta_info.completion_tokens is missing from the engine's answer")
        if chunk.index not in (None, 0):
            raise Misaligned(
                f"{self.what}: the answer belongs to sequence {chunk.index} of a batch that was not asked for"
            )
        aborted = meta.finish_reason is not None and meta.finish_reason.type == "abort"
        sent: tuple[tuple[TokenField[Any], Sequence[Any] | None], ...] = (
            (self.ids, chunk.output_ids),
            (self.logprobs, meta.output_token_logprobs),
            (self.tops, meta.output_top_logprobs),
        )
        try:
            self._check_count(meta.completion_tokens)
            news = [
                (field, field.fit(values, meta.completion_tokens, what=self.what), len(values))
                for field, values in sent
                if values is not None
            ]
        except Misaligned:
            if aborted and self.total:
                self.ended = self.withdrawn = True
                return
            raise
        self.total = meta.completion_tokens
        for field, new, length in news:
            field.take(new, length, self.total)
        self._mark(meta)
        self.last = meta
        self.ended = self.ended or meta.finish_reason is not None

    def _plain(self, chunk: Chunk, meta: Meta) -> bool:
        """Takes a chunk of the form that nearly all have in the middle of a stream: known to be increments, and every
        field brings exactly what `completion_tokens` has grown by. False: not one of these, nothing taken."""
        ids, logprobs, total = chunk.output_ids, meta.output_token_logprobs, meta.completion_tokens
        if not ids or total is None or meta.finish_reason is not None or chunk.index or self.ended:
            return False
        held, mine, theirs = self.total, self.ids, self.logprobs
        if total != held + len(ids) or mine.cumulative is not False or len(mine.values) != held:
            return False
        if meta.output_top_logprobs is not None or self.tops.values:
            return False
        if logprobs is None:
            if theirs.values:
                return False
        elif len(logprobs) != len(ids) or theirs.cumulative is not False or len(theirs.values) != held:
            return False
        else:
            theirs.values += logprobs
        mine.values += ids
        self.total = total
        self._mark(meta)
        self.last = meta
        return True

    def _mark(self, meta: Meta) -> None:
        version, marks = meta.weight_version, self.marks
        if version is None:
            return
        mark = Mark(len(self.ids.values), version)
        if len(marks) > 1 and marks[-1].version == version == marks[-2].version:
            marks[-1] = mark  # between three marks of one version the middle one says nothing
        else:
            marks.append(mark)

    def _check_count(self, tokens: int) -> None:
        if tokens < self.total:
            raise Misaligned(f"{self.what}: completion_tokens fell from {self.total} to {tokens}")
        if self.ended and tokens != self.total:
            raise Misaligned(f"{self.what}: tokens came after the finish reason")

    def complete(self) -> int:
        """The number of tokens, once every per-token field that came has exactly as many. Raises `Misaligned` with the
        counts."""
        counts = {f.name: len(f.values) for f in (self.ids, self.logprobs, self.tops) if f.values or f is self.ids}
        if self.last.output_token_logprobs_length is not None:
            counts["output_token_logprobs_length"] = self.last.output_token_logprobs_length
        if any(count != self.total for count in counts.values()):
            listed = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise Misaligned(f"{self.what}: completion_tokens is {self.total}, but {listed}")
        return self.total
