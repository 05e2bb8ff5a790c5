"""slime's list of weight versions and strawq's spans of tokens.

The rule: a token gets one version only where that is known. slime lists one version for each request that added
tokens, without saying which tokens; so tokens that several listed versions may have made get a mixed span, which counts
with its older end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from strawq.model import UNVERSIONED, VersionSpan, policy_number
from strawq.samples import Int32, Sample


def continues(response: Int32, before: Sample) -> bool:
    """Whether these response tokens begin with those of `before`."""
    count = len(before.tokens)
    return count <= len(response) and np.array_equal(response[:count], before.tokens)


def spans_for(
    listed: Sequence[str], count: int, before: Sample | None, listed_before: Sequence[str]
) -> tuple[VersionSpan, ...]:
    """Spans of `count` response tokens. Tokens of `before`, whose list was `listed_before`, keep their spans."""
    known = before.versions if before is not None else ()
    start = len(before.tokens) if before is not None else 0
    fresh = listed
    if before is not None and list(listed[: len(listed_before)]) == list(listed_before):
        fresh = listed[len(listed_before) :]
    if start == count:
        return known
    version, last = _bounds(fresh)
    return (*known, VersionSpan(start, count, version, last))


def _bounds(versions: Sequence[str]) -> tuple[str, str]:
    """The oldest and newest of these versions, the newest empty if they are one."""
    distinct = list(dict.fromkeys(versions))
    if not distinct:
        return "", ""
    if all(policy_number(version) != UNVERSIONED for version in distinct):
        distinct.sort(key=policy_number)
    return distinct[0], distinct[-1] if len(distinct) > 1 else ""


def versions_listed(sample: Sample, since: int = 0) -> list[str]:
    """As slime lists them: the versions of each request's tokens, from response token `since` on. A request that spans
    a weight update lists each of them, so that the oldest is not lost."""
    listed: list[str] = []
    for start, end in _requests(sample, since):
        versions = []
        for span in sample.versions:
            if span.start < end and span.end > start:
                versions += [span.version, span.last]
        listed += [version for version in dict.fromkeys(versions) if version]
    return listed


def _requests(sample: Sample, since: int) -> list[tuple[int, int]]:
    """Ranges of tokens that came from one request each, as far as that is known."""
    count = len(sample.tokens)
    cuts = {since, count}
    for info in sample.segments:
        cuts |= {max(info.start, since), max(info.end, since)}
    ordered = sorted(cuts)
    return [(start, end) for start, end in itertools.pairwise(ordered) if start < end]
