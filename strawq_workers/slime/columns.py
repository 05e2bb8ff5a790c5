"""Which fields of slime's samples have a column of strawq, and what the column holds of them.

The rule: a column holds what every reader of the pool understands; where the field said more, the payload has it too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from strawq_workers.filters import DynamicFilterOutput
from strawq_workers.slime import captures
from strawq_workers.slime import sample as ours

REMOVED = "remove_sample"
"""Key of `strawq.Sample.metadata` under which all of strawq knows a sample that was taken out of training."""

COLUMNS = frozenset(
    {
        "tokens", "response", "response_length", "reward", "loss_mask", "weight_versions", "rollout_log_probs",
        "status", "metadata", "remove_sample", "index", *captures.FIELDS,
    }
)  # fmt: skip
"""Fields of a sample with a place of their own; encoding and decoding treat each by itself."""
OWN = frozenset({"teacher_log_probs", "spec_info", "prefix_cache_info", "non_generation_time", "session_id"})
"""Fields that say what happened to one sample: they are never taken for the group's."""


def mask_column(given: Any, count: int, removed: bool) -> Any:
    """uint8 [count], or None if the mask holds something else than 0 and 1."""
    if given is None or removed:
        return np.full(count, int(not removed), np.uint8)
    mask = np.asarray(given)
    return mask.astype(np.uint8) if not mask.size or np.isin(mask, (0, 1)).all() else None


def log_prob_column(given: Any) -> Any:
    """float32, or None if they are not numbers."""
    try:
        with np.errstate(over="ignore"):
            return np.asarray(given, np.float64).astype(np.float32)
    except (TypeError, ValueError):
        return None


@lru_cache(maxsize=16)
def classes_of(kind: Any) -> dict[str, Any]:
    """Classes of `kind`'s module for what a tree names; ours where it has none."""
    status = getattr(kind, "Status", None)
    if status is None:
        default = getattr(kind(), "status", None)
        status = type(default) if hasattr(default, "value") else ours.Status
    return {
        "Sample": kind,
        "Status": status,
        "SpecInfo": getattr(kind, "SpecInfo", ours.SpecInfo),
        "PrefixCacheInfo": getattr(kind, "PrefixCacheInfo", ours.PrefixCacheInfo),
        "DynamicFilterOutput": DynamicFilterOutput,
    }
