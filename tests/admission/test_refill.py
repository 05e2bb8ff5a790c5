"""One rollout's plan: what breaks when a group leaks, is lost, is counted twice, or never comes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strawq.errors import BadInput
from strawq_workers.admission import Account, RolloutPlan, Step


def test_exact_top_up_starts_what_is_missing_and_no_more() -> None:
    plan = RolloutPlan(4, max_surplus=0)
    assert plan.step(9) == Step("lease", generate=4)
    for group in "abcd":
        plan.fetched(group)
    assert plan.step(5).action == "wait"
    plan.dropped("a", "zero_std")
    assert plan.step(6) == Step("lease", generate=1)


def test_free_slots_are_filled_while_groups_are_missing() -> None:
    plan = RolloutPlan(4)
    for group in "abcd":
        plan.fetched(group)
    plan.dropped("a", "zero_std")
    assert plan.step(3) == Step("lease", generate=3)
    assert plan.step(0).action == "wait"


def test_a_bounded_surplus_is_never_exceeded() -> None:
    plan = RolloutPlan(4, max_surplus=2)
    assert plan.step(64).generate == 6
    for group in "abcdef":
        plan.fetched(group)
    assert plan.step(64).generate == 0
    for group in "abc":
        plan.kept(group)
    assert plan.step(64).generate == 0, "three in flight cover the one that is missing and a surplus of two"


def test_complete_groups_are_taken_first_and_start_nothing_beside_them() -> None:
    plan = RolloutPlan(4)
    assert plan.step(8, ready_available=9) == Step("lease", ready=4)
    for group in "abcd":
        plan.fetched(group, "ready")
    assert plan.step(8, ready_available=5).action == "wait"
    plan.dropped("a", "zero_std")
    assert plan.step(8, ready_available=0) == Step("lease", generate=8)
    assert plan.step(8, ready_available=1) == Step("lease", ready=1)


def test_complete_groups_need_no_slots() -> None:
    assert RolloutPlan(4).step(0, ready_available=2) == Step("lease", ready=2)


def test_the_end_of_the_input_is_said_and_not_waited_for() -> None:
    plan = RolloutPlan(4)
    plan.fetched("a")
    assert plan.step(8, source="ended").action == "wait", "a group in flight may still be kept"
    plan.kept("a")
    step = plan.step(8, source="ended")
    assert step.action == "short"
    assert "1 of 4" in step.reason


def test_waiting_names_what_it_waits_for() -> None:
    assert RolloutPlan(4).step(8, source="empty") == Step("wait", reason="the queue is empty")
    assert "no slot is free" in RolloutPlan(4).step(0).reason


def test_a_failure_stops_admission_and_is_reported_after_everything_came_back() -> None:
    plan = RolloutPlan(4)
    plan.fetched("a")
    plan.fetched("b")
    plan.returned("a", "fresh")
    plan.fail("reward model answered 500")
    plan.fail("a later error")
    assert plan.step(8, ready_available=8) == Step("failed", reason="reward model answered 500")
    with pytest.raises(BadInput, match="still in flight"):
        plan.close()
    plan.returned("b", "partial")
    assert plan.close() == Account(fetched=2, kept=0, dropped=0, returned_ready=0, returned_partial=1, returned_fresh=1)


def test_a_failure_after_the_target_was_reached_is_still_a_failure() -> None:
    plan = RolloutPlan(1)
    plan.fetched("a")
    plan.kept("a")
    plan.fail("the pool is full")
    assert plan.step(8).action == "failed"


def test_a_rollout_with_groups_in_flight_does_not_close() -> None:
    plan = RolloutPlan(2)
    for group in "abc":
        plan.fetched(group)
    plan.kept("a")
    plan.kept("b")
    assert plan.step(8).action == "done"
    with pytest.raises(BadInput, match=r"1 groups are still in flight \(c\)"):
        plan.close()
    plan.returned("c", "partial")
    assert plan.close().returned == 1


def test_a_group_ends_once() -> None:
    plan = RolloutPlan(4)
    plan.fetched("a")
    with pytest.raises(BadInput, match="in flight in this rollout already"):
        plan.fetched("a")
    plan.kept("a")
    for end in (lambda: plan.kept("a"), lambda: plan.dropped("a", "x"), lambda: plan.returned("a", "ready")):
        with pytest.raises(BadInput, match="is not in flight"):
            end()
    assert plan.kept_count == 1


def test_surplus_cannot_be_kept_beyond_the_target() -> None:
    plan = RolloutPlan(1)
    plan.fetched("a")
    plan.fetched("b")
    plan.kept("a")
    with pytest.raises(BadInput, match="return it as ready"):
        plan.kept("b")
    assert plan.in_flight == ("b",), "the refused call ended nothing"


def test_a_group_that_was_aborted_may_be_leased_again_in_the_same_rollout() -> None:
    plan = RolloutPlan(1)
    plan.fetched("a")
    plan.returned("a", "partial")
    plan.fetched("a", "partial")
    plan.kept("a")
    account = plan.close()
    assert (account.fetched, account.kept, account.returned) == (2, 1, 1)


def test_nothing_is_fetched_after_the_close() -> None:
    plan = RolloutPlan(1)
    plan.close()
    with pytest.raises(BadInput, match="release its lease"):
        plan.fetched("a")


@pytest.mark.parametrize(("target", "surplus"), [(0, None), (1, -1)])
def test_a_plan_that_cannot_end_is_refused(target: int, surplus: int | None) -> None:
    with pytest.raises(BadInput):
        RolloutPlan(target, max_surplus=surplus)


def test_metrics_carry_the_names_of_slime() -> None:
    plan = RolloutPlan(8)
    for number in range(4):
        plan.fetched(str(number))
    plan.kept("0")
    plan.dropped("1", "zero_std_0.0")
    plan.dropped("2", "zero_std_0.0")
    plan.dropped("3", "zero_std_1.0")
    assert plan.metrics() == {
        "rollout/dynamic_filter/drop_zero_std_0.0": 2,
        "rollout/dynamic_filter/drop_zero_std_1.0": 1,
        "rollout/dynamic_filter/dropped_groups": 3,
        "rollout/dynamic_filter/dropped_ratio": 0.75,
    }
    assert RolloutPlan(8).metrics()["rollout/dynamic_filter/dropped_ratio"] == 0


class World:
    """A queue and engines in which groups finish in random order, are aborted, dropped, or bring the rollout down."""

    def __init__(self, seed: int, slots: int, surplus: int | None, failing: float) -> None:
        self.draw = random.Random(seed)
        self.slots, self.surplus, self.failing = slots, surplus, failing
        self.ready: list[int] = []
        self.partial: list[int] = []
        self.fresh = 0
        self.running: list[int] = []
        self.ended: dict[int, str] = {}
        self.fetched = 0

    def rollout(self, target: int) -> tuple[RolloutPlan, Account, bool]:
        plan = RolloutPlan(target, max_surplus=self.surplus)
        self.fetched = 0
        while True:
            step = plan.step(self.slots - len(self.running), ready_available=len(self.ready))
            if step.action in ("done", "failed"):
                break
            assert step.action != "wait" or self.running, "the plan waits for nothing"
            for _ in range(step.ready):
                group = self.ready.pop(0)
                self._fetch(plan, group, "ready")
                self._judge(plan, group)
            for _ in range(step.generate):
                self._generate(plan)
            if step.action == "wait":
                self._one_ends(plan)
        for group in list(self.running):
            self._put_back(plan, group)
        return plan, plan.close(), step.action == "failed"

    def _fetch(self, plan: RolloutPlan, group: int, stage: str) -> None:
        self.fetched += 1
        plan.fetched(str(group), stage)  # type: ignore[arg-type]

    def _generate(self, plan: RolloutPlan) -> None:
        assert len(self.running) < self.slots, "more was started than there are slots"
        if self.partial:
            group, stage = self.partial.pop(0), "partial"
        else:
            group, stage, self.fresh = self.fresh, "fresh", self.fresh + 1
        self._fetch(plan, group, stage)
        self.running.append(group)

    def _one_ends(self, plan: RolloutPlan) -> None:
        group = self.draw.choice(self.running)
        if self.draw.random() < 0.1:
            self._put_back(plan, group)
        elif self.draw.random() < self.failing:
            plan.fail(f"group {group} failed")
        else:
            self.running.remove(group)
            self._judge(plan, group)

    def _judge(self, plan: RolloutPlan, group: int) -> None:
        if plan.missing == 0:
            plan.returned(str(group), "ready")
            self.ready.append(group)
            return
        verdict = "dropped" if self.draw.random() < 0.3 else "kept"
        assert group not in self.ended, "a group was judged twice"
        self.ended[group] = verdict
        if verdict == "kept":
            plan.kept(str(group))
        else:
            plan.dropped(str(group), "zero_std")

    def _put_back(self, plan: RolloutPlan, group: int) -> None:
        self.running.remove(group)
        stage = self.draw.choice(("ready", "partial"))
        plan.returned(str(group), stage)  # type: ignore[arg-type]
        (self.ready if stage == "ready" else self.partial).append(group)


@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 12),
    target=st.integers(1, 10),
    surplus=st.one_of(st.none(), st.integers(0, 5)),
    failing=st.sampled_from([0.0, 0.05]),
)
@settings(max_examples=150, deadline=None)
def test_every_group_is_accounted_for_whatever_the_order_of_ends(
    seed: int, slots: int, target: int, surplus: int | None, failing: float
) -> None:
    world = World(seed, slots, surplus, failing)
    for _ in range(6):
        plan, account, failed = world.rollout(target)
        assert account.fetched == world.fetched
        assert account.fetched == account.kept + account.dropped + account.returned
        assert account.kept == target or failed
        assert not world.running and not plan.in_flight, "a rollout left work running"
        queued = set(world.ready) | set(world.partial)
        assert set(range(world.fresh)) == queued | set(world.ended), "a group was lost"
        assert not queued & set(world.ended)
        if surplus is not None:
            assert account.returned_ready + account.returned_partial <= account.fetched
            assert len(queued) <= target + surplus + slots


@given(seed=st.integers(0, 2**32), slots=st.integers(1, 12), target=st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_surplus_does_not_pile_up_over_a_long_run(seed: int, slots: int, target: int) -> None:
    world = World(seed, slots, surplus=None, failing=0.0)
    for _ in range(30):
        world.rollout(target)
        assert len(world.ready) + len(world.partial) < target + slots
