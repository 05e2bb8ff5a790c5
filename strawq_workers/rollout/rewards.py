"""The number in a reward, where one is needed: for a mean, in training and in evaluations.

The rule: as in slime, a reward stays in its sample as the hook gave it, and the key is applied where the number is
used. A key that a reward does not have is refused with the flag that named it and the keys that there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from strawq.errors import BadInput


def reward_values(args: Any, samples: Iterable[Any], *, evaluation: bool = False) -> list[Any]:
    """The reward of each sample, or the entry of it that `--reward-key` names (`--eval-reward-key`, where that is set,
    in an evaluation). None stays None. `BadInput` if there is no such entry, or it is no number."""
    key, flag = getattr(args, "reward_key", None), "--reward-key"
    if evaluation and getattr(args, "eval_reward_key", None):
        key, flag = args.eval_reward_key, "--eval-reward-key"
    if not key:
        return [sample.reward for sample in samples]
    return [None if sample.reward is None else _entry(sample, key, f"{flag} {key}") for sample in samples]


def mean_reward(values: Iterable[Any]) -> float | None:
    """Of the rewards that are numbers; None if there are none."""
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    return sum(numbers) / len(numbers) if numbers else None


def _entry(sample: Any, key: str, named: str) -> float:
    reward = sample.reward
    if not isinstance(reward, Mapping):
        raise BadInput(
            f"{named}: the reward of sample {sample.index} is {reward!r:.100}, no object: leave the flag out"
        )
    if key not in reward:
        there = ", ".join(map(str, reward)) or "none"
        raise BadInput(f"{named}: the reward of sample {sample.index} has no such entry (there are: {there})")
    if not isinstance(reward[key], (int, float)):
        raise BadInput(f"{named}: that entry of sample {sample.index}'s reward is {reward[key]!r:.100}, no number")
    return float(reward[key])
