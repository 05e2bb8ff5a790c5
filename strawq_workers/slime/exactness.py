"""Which values a JSON column gives back as they were, type for type.

The rule: a value that a column would change in any way, be it 1 to 1.0 or a tuple to a list, is not exact.
"""

from __future__ import annotations

import math
from typing import Any


def json_exact(value: Any, depth: int = 64) -> bool:
    """Whether JSON gives the value back equal and of the same types."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii()) or not any("\ud800" <= character <= "\udfff" for character in value)
    if kind in (bool, type(None)):
        return True
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 63)
    if kind is float:
        return math.isfinite(value)
    if depth == 0:
        return False
    if kind is list:
        return all(json_exact(item, depth - 1) for item in value)
    if kind is dict:
        return all(type(key) is str and json_exact(key) and json_exact(item, depth - 1) for key, item in value.items())
    return False


def same(first: Any, second: Any) -> bool:
    """Equal, and of the same types throughout; NaN is the same as NaN. For what `json_exact` and columns can hold."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        return (first == second and math.copysign(1, first) == math.copysign(1, second)) or first != first != second
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        # In the same order too: templates and reports are made from dictionaries.
        return list(first) == list(second) and all(same(item, second[key]) for key, item in first.items())
    return bool(first == second)


def shrink_reward(reward: Any) -> Any:
    """The reward as a column can hold it: a float, a JSON dictionary, or None."""
    if isinstance(reward, dict):
        return reward if json_exact(reward) else None
    if isinstance(reward, (bool, int, float)):
        try:
            return float(reward)
        except OverflowError:
            return None
    if hasattr(reward, "item") and getattr(reward, "shape", None) == ():
        value = reward.item()
        return shrink_reward(value) if isinstance(value, (bool, int, float)) else None
    return None
