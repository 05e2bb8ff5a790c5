"""What is handed in at once becomes one publication; only a tensor header that no reader would accept divides it.

Groups are never divided, and stay in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strawq.storage.packs import HeaderTooLong, PackPlan
from strawq.storage.records import Publication, SegmentRow, encode_segments, plan_tensors


def encode_publications(
    groups: Sequence[Sequence[SegmentRow]], stage: Callable[[PackPlan], None] | None = None
) -> list[Publication]:
    """As `encode_segments`, in one publication if the header of its pack is not too long, else in several: the groups
    stay in order. `HeaderTooLong` if one group alone does not fit; then nothing has been staged.

    Several are staged when they are published: one that fails then leaves nothing of the others."""
    try:
        return [encode_segments(groups, stage)]
    except HeaderTooLong:
        return [encode_segments(part) for part in _fitting(groups)]


def _fitting(groups: Sequence[Sequence[SegmentRow]]) -> list[Sequence[Sequence[SegmentRow]]]:
    """The groups cut in halves until the tensors of each part fit one pack."""
    try:
        plan_tensors([row for group in groups for row in group])
    except HeaderTooLong:
        if len(groups) == 1:
            raise
        half = len(groups) // 2
        return _fitting(groups[:half]) + _fitting(groups[half:])
    return [groups]
