"""What rollout functions answer: slime's own classes where slime is installed, else ours with the same fields.

The rule: `samples` are groups of samples of the data source's kind, one list for each accepted group, oldest first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SLIME_TYPES = "slime.rollout.base_types"


@dataclass
class RolloutFnTrainOutput:
    """A training batch. `metrics` are numbers by slime's names."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None
    on_accepted: Callable[[], None] | None = None
    sample_refs: Any = None


@dataclass
class RolloutFnEvalOutput:
    """Evaluation by data set: `rewards`, `truncated` and `samples`, in the order of the data."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def train_output(samples: list[list[Any]], metrics: dict[str, Any]) -> Any:
    """`RolloutFnTrainOutput`, slime's if it is there."""
    return _class_of(RolloutFnTrainOutput)(samples=samples, metrics=metrics)


def eval_output(data: dict[str, dict[str, Any]], metrics: dict[str, Any]) -> Any:
    """`RolloutFnEvalOutput`, slime's if it is there."""
    return _class_of(RolloutFnEvalOutput)(data=data, metrics=metrics)


def _class_of(ours: type[Any]) -> Any:
    try:
        return getattr(importlib.import_module(SLIME_TYPES), ours.__name__, ours)
    except ImportError:
        return ours
