"""Dynamic-sampling filters: which complete groups are worth training on.

The rule: a filter is a plain function `(args, samples, **kw) -> DynamicFilterOutput`, named by its dotted path, so
filters written for slime work here unchanged and the ones here work in slime. It judges a complete, scored group,
changes nothing, and gives each drop a reason, which becomes the metric `rollout/dynamic_filter/drop_<reason>`.

A sample is whatever has a `reward` (attribute, or key of a mapping). With a `get_reward_value(args)` method that is
used, as in slime; otherwise `args.reward_key`, when set, picks the value out of a reward that is a mapping. A
trajectory that was split into several samples (a list in place of a sample) counts once: its parts share one reward.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from strawq.errors import BadInput


class DynamicFilterOutput(msgspec.Struct, frozen=True):
    """Verdict on a group. `keep_when_insufficient` is accepted and carried for slime's sake; workers replace a dropped
    group instead of keeping it."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


DynamicFilter = Callable[..., DynamicFilterOutput]


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ. Equal rewards give every sample the advantage zero, so nothing is learned.

    Reasons: `zero_std_<reward>`, `reward_not_finite`. Raises BadInput for a missing or non-numeric reward.
    """
    rewards = [reward_of(args, sample) for sample in _trajectories(samples)]
    if not all(math.isfinite(reward) for reward in rewards):
        return DynamicFilterOutput(False, "reward_not_finite")
    # Compared as numbers, not by a computed deviation: rounding gives three rewards of 0.1 one that is not zero.
    if len(set(rewards)) > 1:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"zero_std_{round(rewards[0], 1)}")


def check_no_aborted(_args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """Keep a group without aborted samples. Reason: `has_aborted`."""
    return _refuse_status(samples, "aborted")


def check_no_failed(_args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """Keep a group without failed samples (a hook or an environment gave up on them). Reason: `has_failed`."""
    return _refuse_status(samples, "failed")


def load_filter(path: str) -> DynamicFilter:
    """The filter at a dotted path, such as `strawq_workers.filters.check_reward_nonzero_std`.

    Raises BadInput that names the path when the module or the name is missing, or the object cannot be called.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise BadInput(f"dynamic sampling filter {path!r} is not a dotted path: write module.function")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise BadInput(f"dynamic sampling filter {path!r}: cannot import module {module_name!r}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise BadInput(f"dynamic sampling filter {path!r}: module {module_name!r} has no function {name!r}")
    filter_function: DynamicFilter = found
    return filter_function


def apply_filter(function: DynamicFilter, args: Any, samples: Sequence[Any], **kw: Any) -> DynamicFilterOutput:
    """Call a filter and read its verdict, whichever class it is of: `keep` is required, a bare bool is accepted.

    Raises BadInput, naming the filter, for any other answer. A drop without a reason gets the reason `unspecified`.
    """
    answer: Any = function(args, samples, **kw)
    keep = answer if isinstance(answer, bool) else getattr(answer, "keep", None)
    if not isinstance(keep, bool):
        name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
        raise BadInput(f"dynamic sampling filter {name} answered {answer!r}: return DynamicFilterOutput(keep, reason)")
    reason = getattr(answer, "reason", None)
    return DynamicFilterOutput(
        keep,
        None if keep else str(reason) if reason else "unspecified",
        bool(getattr(answer, "keep_when_insufficient", False)),
    )


def reward_of(args: Any, sample: Any) -> float:
    """The reward of one sample as a number. Raises BadInput when there is none."""
    if hasattr(sample, "get_reward_value"):
        reward = sample.get_reward_value(args)
    else:
        reward = _field(sample, "reward")
        key = getattr(args, "reward_key", None)
        if isinstance(reward, Mapping):
            reward = reward.get(key) if key is not None else None
    if isinstance(reward, (bool, int, float)) or hasattr(reward, "__float__"):
        return float(reward)
    index = _field(sample, "index")
    raise BadInput(f"sample {index} has no numeric reward ({reward!r}): score it before filtering, or set reward_key")


def _trajectories(samples: Sequence[Any]) -> list[Any]:
    if not samples:
        raise BadInput("a group without samples cannot be filtered")
    return [sample[0] if isinstance(sample, (list, tuple)) and sample else sample for sample in samples]


def _refuse_status(samples: Sequence[Any], refused: str) -> DynamicFilterOutput:
    for entry in samples:
        for sample in entry if isinstance(entry, (list, tuple)) else (entry,):
            status = _field(sample, "status")
            if getattr(status, "value", status) == refused:
                return DynamicFilterOutput(False, f"has_{refused}")
    return DynamicFilterOutput(True)


def _field(sample: Any, name: str) -> Any:
    return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
