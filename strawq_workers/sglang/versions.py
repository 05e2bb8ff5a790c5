"""Which policy made which output token.

The rule: a token is labelled with one version only if the engine said so, or if the version read *before* the request
and the one read *after* it are the same. Versions that differ give a mixed span with both bounds; a version that nobody
reported is the empty string. Nothing is labelled with a version that was read after the fact alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from strawq.errors import Misaligned
from strawq.model import VersionSpan


class ReportedSpan(msgspec.Struct, frozen=True):
    """One entry of SGLang's `weight_versions`: output tokens `[start, end)` were made under `version`."""

    version: str
    start: int
    end: int


class Mark(msgspec.Struct, frozen=True):
    """When a stream had brought `tokens` output tokens, the engine said that it served `version`."""

    tokens: int
    version: str


def spans_reported(reported: Sequence[ReportedSpan], tokens: int, *, what: str) -> tuple[VersionSpan, ...]:
    """The engine's own spans, checked to cover `[0, tokens)` without gap or overlap. Raises `Misaligned`."""
    spans: list[VersionSpan] = []
    at = 0
    for span in reported:
        if span.start != at or span.end < span.start:
            raise Misaligned(f"{what}: weight_versions has [{span.start}, {span.end}) where a span from {at} was due")
        at = span.end
        _append(spans, VersionSpan(span.start, span.end, span.version))
    if at != tokens:
        raise Misaligned(f"{what}: weight_versions covers {at} of {tokens} output tokens")
    return tuple(spans)


def spans_between(before: str, after: str, tokens: int) -> tuple[VersionSpan, ...]:
    """One span over all tokens from the versions read before the request and after it; `""` means not known."""
    spans: list[VersionSpan] = []
    _append(spans, _between(0, tokens, before, after))
    return tuple(spans)


def spans_of_marks(before: str, marks: Sequence[Mark], tokens: int) -> tuple[VersionSpan, ...]:
    """Spans of a stream that ended early: tokens between two marks of one version are that version's, else mixed.

    Tokens after the last mark are unknown: nothing was read after them."""
    spans: list[VersionSpan] = []
    at, version = 0, before
    for mark in marks:
        end = min(mark.tokens, tokens)
        if end > at:
            _append(spans, _between(at, end, version, mark.version))
            at = end
        version = mark.version
    _append(spans, VersionSpan(at, tokens, ""))
    return tuple(spans)


def _between(start: int, end: int, before: str, after: str) -> VersionSpan:
    if not before or not after:
        return VersionSpan(start, end, "")
    return VersionSpan(start, end, before, "" if before == after else after)


def _append(spans: list[VersionSpan], span: VersionSpan) -> None:
    if span.start == span.end:
        return
    if spans and (spans[-1].version, spans[-1].last) == (span.version, span.last):
        span = VersionSpan(spans.pop().start, span.end, span.version, span.last)
    spans.append(span)
