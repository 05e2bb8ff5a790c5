"""Dynamic-sampling filters: what breaks when rewards are missing, odd, or split over parts of one trajectory."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strawq.errors import BadInput
from strawq_workers.filters import (
    DynamicFilterOutput,
    apply_filter,
    check_no_aborted,
    check_no_failed,
    check_reward_nonzero_std,
    load_filter,
)

NO_ARGS = SimpleNamespace(reward_key=None)


class Status(enum.Enum):
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Scored:
    """A sample with just what filters look at."""

    reward: Any
    index: int = 0
    status: Status = Status.COMPLETED
    extra: dict[str, Any] = field(default_factory=dict)


class SlimeSample(Scored):
    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=16))
def test_a_group_is_kept_exactly_when_its_rewards_differ(rewards: list[float]) -> None:
    verdict = check_reward_nonzero_std(NO_ARGS, [Scored(reward) for reward in rewards])
    assert verdict.keep == any(reward != rewards[0] for reward in rewards)
    assert verdict.keep or verdict.reason == f"zero_std_{round(rewards[0], 1)}"


@pytest.mark.parametrize("size", range(1, 33))
def test_equal_rewards_are_dropped_whatever_rounding_does_to_their_mean(size: int) -> None:
    assert not check_reward_nonzero_std(NO_ARGS, [Scored(0.1)] * size).keep


def test_rewards_come_from_the_key_of_slime_samples_and_of_mappings() -> None:
    args = SimpleNamespace(reward_key="math")
    assert check_reward_nonzero_std(args, [SlimeSample({"math": 1, "style": 0}), SlimeSample({"math": 0})]).keep
    assert check_reward_nonzero_std(args, [Scored({"math": 1}), Scored({"math": 0})]).keep
    assert not check_reward_nonzero_std(args, [Scored({"math": 1, "style": 0}), Scored({"math": 1, "style": 1})]).keep
    assert check_reward_nonzero_std(NO_ARGS, [{"reward": 0.0}, {"reward": 1.0}]).keep


def test_a_trajectory_in_parts_counts_once() -> None:
    split = [[Scored(1.0), Scored(1.0)], [Scored(1.0)]]
    assert not check_reward_nonzero_std(NO_ARGS, split).keep
    assert check_reward_nonzero_std(NO_ARGS, [[Scored(1.0), Scored(1.0)], [Scored(0.0)]]).keep


@pytest.mark.parametrize("reward", [None, "good", {"math": 1.0}])
def test_a_missing_reward_is_an_error_and_not_a_drop(reward: Any) -> None:
    with pytest.raises(BadInput, match="sample 7 has no numeric reward"):
        check_reward_nonzero_std(NO_ARGS, [Scored(1.0), Scored(reward, index=7)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_drops_the_group_by_name(bad: float) -> None:
    verdict = check_reward_nonzero_std(NO_ARGS, [Scored(1.0), Scored(bad)])
    assert (verdict.keep, verdict.reason) == (False, "reward_not_finite")


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(BadInput, match="without samples"):
        check_reward_nonzero_std(NO_ARGS, [])


def test_aborted_and_failed_members_are_found_inside_parts_and_plain_strings() -> None:
    good = Scored(1.0)
    assert check_no_aborted(NO_ARGS, [good, good]).keep
    assert check_no_aborted(NO_ARGS, [good, [good, Scored(1.0, status=Status.ABORTED)]]).reason == "has_aborted"
    assert check_no_failed(NO_ARGS, [good, {"status": "failed"}]).reason == "has_failed"
    assert check_no_failed(NO_ARGS, [Scored(1.0, status=Status.ABORTED)]).keep


def test_stock_filters_load_by_dotted_path() -> None:
    loaded = load_filter("strawq_workers.filters.check_reward_nonzero_std")
    assert loaded is check_reward_nonzero_std


@pytest.mark.parametrize(
    "path",
    ["", "check", "strawq_workers.filters.no_such", "no_such_module.check", "strawq_workers.filters.__doc__", ".x"],
)
def test_a_path_that_names_no_function_is_refused_with_the_path(path: str) -> None:
    with pytest.raises(BadInput, match="dynamic sampling filter"):
        load_filter(path)


def test_answers_of_foreign_filters_are_read_by_their_fields() -> None:
    foreign = SimpleNamespace(keep=False, reason="too_easy", keep_when_insufficient=True)
    assert apply_filter(lambda *_: foreign, NO_ARGS, [Scored(1)]) == DynamicFilterOutput(False, "too_easy", True)
    assert apply_filter(lambda *_: True, NO_ARGS, [Scored(1)]) == DynamicFilterOutput(True)
    assert apply_filter(lambda *_: False, NO_ARGS, [Scored(1)]).reason == "unspecified"


@pytest.mark.parametrize("answer", [None, 1, "keep", SimpleNamespace(keep="yes")])
def test_an_answer_that_is_no_verdict_is_refused_with_the_filters_name(answer: Any) -> None:
    def broken(args: Any, samples: Any) -> Any:
        return answer

    with pytest.raises(BadInput, match="broken answered"):
        apply_filter(broken, NO_ARGS, [Scored(1)])
