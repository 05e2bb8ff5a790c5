"""Shares of the engines: what breaks when a worker gets none, or two workers count differently."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strawq.errors import BadInput
from strawq_workers.admission import divide_samples, divide_slots, share_of, shares, total_slots


@given(st.integers(1, 64), st.integers(1, 512), st.integers(1, 64), st.integers(1, 32))
def test_every_worker_gets_a_group_and_no_slot_is_left_over(
    engines: int, concurrency: int, group: int, workers: int
) -> None:
    slots = total_slots(concurrency, engines)
    if slots < workers * group:
        with pytest.raises(BadInput, match="every worker needs room for one group"):
            divide_slots(slots, group, workers)
        return
    division = divide_slots(slots, group, workers)
    assert len(division) == workers
    assert sum(division) == slots // group
    assert min(division) >= 1
    assert max(division) - min(division) <= 1
    assert division == sorted(division, reverse=True), "the first workers take the remainder"


@given(st.integers(1, 2000), st.integers(1, 64), st.integers(1, 32))
def test_sample_slots_leave_room_for_a_whole_group_on_every_worker(samples: int, group: int, workers: int) -> None:
    if samples < workers * group:
        with pytest.raises(BadInput, match="max_concurrent_samples"):
            divide_samples(samples, group, workers)
        return
    division = divide_samples(samples, group, workers)
    assert sum(division) == samples
    assert min(division) >= group


def test_the_published_numbers() -> None:
    assert divide_slots(total_slots(16, 8), 8, 1) == [16]
    assert divide_slots(100, 8, 5) == [3, 3, 2, 2, 2]


def test_a_refused_division_says_how_many_workers_would_fit() -> None:
    with pytest.raises(BadInput, match=r"C·E = 16 .* W·G = 3·8 = 24.*at most 2 workers"):
        divide_slots(16, 8, 3)


@pytest.mark.parametrize(("slots", "group", "workers"), [(8, 0, 1), (8, 1, 0), (8, -1, 1)])
def test_nonsense_is_refused(slots: int, group: int, workers: int) -> None:
    with pytest.raises(BadInput):
        divide_slots(slots, group, workers)


@pytest.mark.parametrize(("concurrency", "engines"), [(0, 4), (4, 0)])
def test_no_engine_or_no_concurrency_is_refused(concurrency: int, engines: int) -> None:
    with pytest.raises(BadInput, match="at least 1"):
        total_slots(concurrency, engines)


@given(st.permutations(["node-a", "node-b", "node-c", "node-d"]))
def test_workers_that_list_each_other_in_any_order_agree(order: list[str]) -> None:
    assert shares([3, 3, 2, 2], order) == {"node-a": 3, "node-b": 3, "node-c": 2, "node-d": 2}


def test_two_workers_of_one_name_are_refused() -> None:
    with pytest.raises(BadInput, match="distinct"):
        shares([1, 1], ["a", "a"])
    with pytest.raises(BadInput, match="distinct"):
        shares([1, 1], ["a"])


@given(st.integers(1, 400), st.integers(1, 16), st.integers(1, 40))
def test_live_workers_divide_all_slots_and_only_those_that_came_too_late_get_none(
    slots: int, group: int, count: int
) -> None:
    workers = [f"w{number}" for number in range(count)]
    most = slots // group
    given_out = []
    for position, worker in enumerate(workers):
        if position >= most:
            with pytest.raises(BadInput, match="every worker needs room for one group"):
                share_of(slots, group, workers, worker)
        else:
            given_out.append(share_of(slots, group, workers, worker))
    assert sum(given_out) == (most if most else 0) and all(share >= 1 for share in given_out)
    assert not given_out or max(given_out) - min(given_out) <= 1


def test_a_worker_that_is_not_among_the_live_ones_has_no_share() -> None:
    with pytest.raises(BadInput, match="is not one of"):
        share_of(16, 2, ["a", "b"], "c")
    with pytest.raises(BadInput, match="distinct"):
        share_of(16, 2, ["a", "a"], "a")
