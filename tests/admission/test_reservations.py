"""Capacity by attempt identity: what breaks when a report comes twice, late, or never."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from strawq.errors import BadInput, Fenced, RequestConflict
from strawq_workers.admission import Admission, Limits

GROUP = 4
GROUP_LEVEL = Limits(groups=2, group_size=GROUP)
SAMPLE_LEVEL = Limits(groups=2, group_size=GROUP, samples=8)


def test_group_level_capacity_comes_back_when_the_group_ends() -> None:
    admission = Admission(GROUP_LEVEL)
    assert admission.reserve("a/1", range(GROUP)).granted
    assert admission.reserve("b/1", range(GROUP)).granted
    assert admission.reserve("c/1", range(GROUP)).reason == "no_free_group"
    for index in range(3):
        admission.sample_finished("a/1", index)
    assert admission.free_groups() == 0, "three finished samples free nothing at group level"
    assert admission.release("a/1")
    assert admission.free_groups() == 1


def test_a_straggler_holds_one_slot_and_not_the_group() -> None:
    admission = Admission(SAMPLE_LEVEL)
    for attempt in ("a/1", "b/1"):
        assert admission.reserve(attempt, range(GROUP)).granted
        for index in range(GROUP):
            admission.started(attempt, index)
        for index in range(GROUP - 1):
            assert admission.sample_finished(attempt, index)
    assert (admission.free_samples(), admission.free_groups()) == (6, 1)
    assert admission.reserve("c/1", range(GROUP)).granted
    assert admission.reserve("d/1", range(GROUP)).reason == "no_free_samples"


def test_a_duplicate_report_frees_nothing_twice() -> None:
    admission = Admission(SAMPLE_LEVEL)
    admission.reserve("a/1", range(GROUP))
    assert admission.sample_finished("a/1", 0) is True
    assert admission.sample_finished("a/1", 0) is False
    assert admission.free_samples() == 5
    assert admission.release("a/1") is True
    assert admission.release("a/1") is False
    assert admission.free_samples() == 8


def test_a_report_of_an_older_attempt_does_not_touch_the_newer_one() -> None:
    admission = Admission(SAMPLE_LEVEL)
    admission.reserve("a/1", range(GROUP))
    admission.release("a/1")
    admission.reserve("a/2", range(GROUP))
    assert not admission.sample_finished("a/1", 0)
    assert not admission.uncertain("a/1", 1)
    assert not admission.release("a/1")
    assert admission.held_samples == GROUP


def test_a_late_start_report_does_not_bring_a_finished_sample_back() -> None:
    admission = Admission(SAMPLE_LEVEL)
    admission.reserve("a/1", range(GROUP))
    admission.sample_finished("a/1", 0)
    assert not admission.started("a/1", 0)
    assert not admission.uncertain("a/1", 0)
    assert admission.held_samples == GROUP - 1


@pytest.mark.parametrize("limits", [GROUP_LEVEL, SAMPLE_LEVEL])
def test_an_uncertain_submission_keeps_its_capacity_past_the_end_of_its_attempt(limits: Limits) -> None:
    admission = Admission(limits)
    admission.reserve("a/1", range(GROUP))
    admission.started("a/1", 0, "engine-1")
    admission.uncertain("a/1", 0)
    before = admission.free_samples()
    admission.release("a/1")
    assert admission.free_samples() == (before if limits.samples is None else before + 3)
    assert admission.lingering() == [("a/1", 0, "engine-1")]
    assert admission.in_flight_groups == 0
    assert admission.sample_finished("a/1", 0)
    assert admission.free_samples() == 8
    assert admission.lingering() == []


def test_a_started_sample_that_nobody_saw_finish_is_uncertain_after_release() -> None:
    admission = Admission(SAMPLE_LEVEL)
    admission.reserve("a/1", range(GROUP))
    admission.started("a/1", 2, "engine-3")
    admission.release("a/1")
    assert admission.lingering() == [("a/1", 2, "engine-3")]
    assert admission.free_samples() == 7


def test_the_end_of_an_engine_frees_its_uncertain_samples_and_no_others() -> None:
    admission = Admission(SAMPLE_LEVEL)
    admission.reserve("a/1", range(GROUP))
    admission.reserve("b/1", range(GROUP))
    admission.started("a/1", 0, "engine-1")
    admission.uncertain("a/1", 0)
    admission.uncertain("a/1", 1, "engine-2")
    admission.started("b/1", 0, "engine-1")
    admission.release("a/1")
    assert admission.engine_gone("engine-1") == 1
    assert admission.engine_gone("engine-1") == 0
    assert admission.lingering() == [("a/1", 1, "engine-2")]
    assert admission.held_samples == 1 + GROUP, "the started sample of b/1 belongs to the request that drives it"


def test_a_repeated_reservation_is_granted_and_takes_nothing_more() -> None:
    admission = Admission(SAMPLE_LEVEL)
    assert admission.reserve("a/1", range(GROUP)).granted
    assert admission.reserve("a/1", range(GROUP)).granted
    assert admission.held_samples == GROUP
    with pytest.raises(RequestConflict, match="a/1"):
        admission.reserve("a/1", (0, 1))


def test_an_ended_attempt_cannot_reserve_again_while_its_samples_linger() -> None:
    admission = Admission(SAMPLE_LEVEL)
    admission.reserve("a/1", range(GROUP))
    admission.uncertain("a/1", 0)
    admission.release("a/1")
    with pytest.raises(Fenced, match="a/1"):
        admission.reserve("a/1", range(GROUP))


def test_a_resumed_group_takes_slots_for_its_unfinished_samples_only() -> None:
    admission = Admission(SAMPLE_LEVEL)
    assert admission.reserve("a/2", (1, 3)).granted
    assert admission.free_samples() == 6
    assert not admission.sample_finished("a/2", 0), "sample 0 was complete before this attempt"


def test_a_reservation_that_could_never_fit_is_an_error_and_not_an_endless_denial() -> None:
    with pytest.raises(BadInput, match="1 to 8"):
        Admission(SAMPLE_LEVEL).reserve("a/1", range(9))
    with pytest.raises(BadInput, match="1 to 4"):
        Admission(GROUP_LEVEL).reserve("a/1", ())


@pytest.mark.parametrize(
    "limits",
    [
        Limits(groups=0, group_size=4),
        Limits(groups=1, group_size=0),
        Limits(groups=1, group_size=4, samples=3),
        Limits(groups=1, group_size=4, window_groups=0),
    ],
)
def test_limits_under_which_nothing_could_start_are_refused(limits: Limits) -> None:
    with pytest.raises(BadInput):
        Admission(limits)
    running = Admission(GROUP_LEVEL)
    with pytest.raises(BadInput):
        running.resize(limits)
    assert running.limits == GROUP_LEVEL, "a refused share leaves the old one in force"


def test_ready_and_in_flight_groups_close_the_gate_and_nothing_is_lost() -> None:
    admission = Admission(Limits(groups=8, group_size=GROUP, window_groups=3))
    admission.observe(ready_groups=1)
    assert admission.free_groups() == 2
    admission.reserve("a/1", range(GROUP))
    admission.observe(ready_groups=1, in_flight_elsewhere=1)
    assert admission.reserve("b/1", range(GROUP)).reason == "backpressure"
    admission.release("a/1")
    admission.observe(ready_groups=2, in_flight_elsewhere=1)
    assert admission.free_groups() == 0, "a finished group moves from in flight to ready and frees no window"
    admission.observe(ready_groups=0, in_flight_elsewhere=1)
    assert admission.free_groups() == 2, "the trainer took a batch"


def test_a_pause_admits_nothing_and_ends_nothing() -> None:
    admission = Admission(SAMPLE_LEVEL)
    admission.reserve("a/1", range(GROUP))
    admission.pause()
    assert admission.paused
    assert (admission.free_groups(), admission.free_samples()) == (0, 0)
    assert admission.reserve("b/1", range(GROUP)).reason == "paused"
    assert admission.reserve("a/1", range(GROUP)).granted, "what is held stays held"
    assert admission.sample_finished("a/1", 0), "results of running samples still count"
    admission.resume()
    assert admission.free_samples() == 5


def test_a_smaller_share_takes_nothing_away_and_starts_nothing() -> None:
    admission = Admission(Limits(groups=3, group_size=GROUP))
    for name in "abc":
        admission.reserve(f"{name}/1", range(GROUP))
    admission.resize(Limits(groups=1, group_size=GROUP))
    assert admission.in_flight_groups == 3
    assert admission.free_groups() == 0
    admission.release("a/1")
    admission.release("b/1")
    assert admission.free_groups() == 0
    admission.release("c/1")
    assert admission.free_groups() == 1


class AdmissionMachine(RuleBasedStateMachine):
    """Any order of calls against a model that counts everything anew each time."""

    attempts: Bundle[str] = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, dict[int, str]] = {}
        self.live: set[str] = set()
        self.engines: dict[tuple[str, int], str] = {}
        self.number = 0
        self.ready = self.elsewhere = 0
        self.paused = False

    @initialize(samples=st.sampled_from([None, 4, 6, 9]), window=st.sampled_from([None, 2, 5]))
    def open(self, samples: int | None, window: int | None) -> None:
        self.limits = Limits(groups=3, group_size=GROUP, samples=samples, window_groups=window)
        self.admission = Admission(self.limits)

    def held(self) -> int:
        return sum(state != "finished" for samples in self.states.values() for state in samples.values())

    def holding(self) -> int:
        return sum(
            name in self.live or any(state != "finished" for state in samples.values())
            for name, samples in self.states.items()
        )

    def expected_denial(self, wanted: int) -> str | None:
        limits = self.limits
        if self.paused:
            return "paused"
        if limits.window_groups is not None and len(self.live) + self.ready + self.elsewhere >= limits.window_groups:
            return "backpressure"
        if limits.samples is None:
            return "no_free_group" if self.holding() >= limits.groups else None
        return "no_free_samples" if self.held() + wanted > limits.samples else None

    @rule(target=attempts, indices=st.sets(st.integers(0, GROUP - 1), min_size=1))
    def reserve(self, indices: set[int]) -> str:
        self.number += 1
        attempt = f"task/{self.number}"
        reason = self.expected_denial(len(indices))
        decision = self.admission.reserve(attempt, indices)
        assert (decision.granted, decision.reason) == (reason is None, reason)
        if decision.granted:
            self.states[attempt] = dict.fromkeys(indices, "reserved")
            self.live.add(attempt)
        return attempt

    @rule(attempt=attempts)
    def reserve_again(self, attempt: str) -> None:
        if attempt in self.live:
            assert self.admission.reserve(attempt, set(self.states[attempt])).granted

    @rule(attempt=attempts, index=st.integers(0, GROUP), engine=st.sampled_from(["", "e1", "e2"]))
    def started(self, attempt: str, index: int, engine: str) -> None:
        changes = attempt in self.live and self.states[attempt].get(index) in ("reserved", "uncertain")
        assert self.admission.started(attempt, index, engine) == changes
        if changes:
            self.states[attempt][index] = "started"
            self.engines[attempt, index] = engine or self.engines.get((attempt, index), "")

    @rule(attempt=attempts, index=st.integers(0, GROUP), engine=st.sampled_from(["", "e1", "e2"]))
    def uncertain(self, attempt: str, index: int, engine: str) -> None:
        changes = attempt in self.live and self.states[attempt].get(index) in ("reserved", "started")
        assert self.admission.uncertain(attempt, index, engine) == changes
        if changes:
            self.states[attempt][index] = "uncertain"
            self.engines[attempt, index] = engine or self.engines.get((attempt, index), "")

    @rule(attempt=attempts, index=st.integers(0, GROUP))
    def finished(self, attempt: str, index: int) -> None:
        changes = self.states.get(attempt, {}).get(index) in ("reserved", "started", "uncertain")
        assert self.admission.sample_finished(attempt, index) == changes
        if changes:
            self.states[attempt][index] = "finished"

    @rule(attempt=attempts)
    def release(self, attempt: str) -> None:
        assert self.admission.release(attempt) == (attempt in self.live)
        if attempt in self.live:
            self.live.discard(attempt)
            after = {"reserved": "finished", "started": "uncertain"}
            self.states[attempt] = {i: after.get(state, state) for i, state in self.states[attempt].items()}

    @rule(attempt=consumes(attempts))
    def forget(self, attempt: str) -> None:
        """The driver loses interest: the capacity of what is uncertain must not depend on it."""

    @rule(engine=st.sampled_from(["e1", "e2"]))
    def engine_gone(self, engine: str) -> None:
        gone = [
            (name, index)
            for name, samples in self.states.items()
            for index, state in samples.items()
            if state == "uncertain" and self.engines.get((name, index)) == engine
        ]
        assert self.admission.engine_gone(engine) == len(gone)
        for name, index in gone:
            self.states[name][index] = "finished"

    @rule(ready=st.integers(0, 4), elsewhere=st.integers(0, 2), paused=st.booleans())
    def gate(self, ready: int, elsewhere: int, paused: bool) -> None:
        self.ready, self.elsewhere, self.paused = ready, elsewhere, paused
        self.admission.observe(ready, elsewhere)
        if paused:
            self.admission.pause()
        else:
            self.admission.resume()

    @rule(groups=st.integers(1, 4))
    def resize(self, groups: int) -> None:
        samples = None if self.limits.samples is None else groups * GROUP
        self.limits = Limits(groups=groups, group_size=GROUP, samples=samples, window_groups=self.limits.window_groups)
        self.admission.resize(self.limits)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "admission"):
            return
        assert self.admission.held_samples == self.held()
        assert self.admission.in_flight_groups == len(self.live)
        lingering = {
            (name, index)
            for name, samples in self.states.items()
            for index, state in samples.items()
            if name not in self.live and state != "finished"
        }
        assert {(name, index) for name, index, _ in self.admission.lingering()} == lingering

    @invariant()
    def free_is_what_a_reservation_would_get(self) -> None:
        if not hasattr(self, "admission"):
            return
        free = self.admission.free_groups()
        assert (free > 0) == (self.expected_denial(GROUP) is None)
        assert 0 <= free * GROUP <= max(self.admission.free_samples(), 0)
        assert (self.admission.free_samples() > 0) == (self.expected_denial(1) is None)


AdmissionMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestAnyOrderOfReports = AdmissionMachine.TestCase


def test_a_full_window_has_room_for_what_was_begun_and_a_trainer_may_wait_for() -> None:
    gate = Admission(Limits(groups=4, group_size=2, window_groups=5))
    gate.observe(3, 0, 2)
    assert (gate.free_groups(), gate.begun_only()) == (2, 2), "two are in the window already, and no fresh one fits"
    assert gate.reserve("a#2", range(2), begun=True).granted
    assert (gate.free_groups(), gate.begun_only()) == (1, 1)
    assert gate.reserve("b#2", range(2), begun=True).granted
    assert gate.free_groups() == gate.begun_only() == 0
    assert gate.reserve("c#1", range(2)).reason == "backpressure"
    gate.observe(3, 0, 0)
    assert gate.free_groups() == 0
    gate.release("a#2")
    gate.observe(2, 0, 0)
    assert (gate.free_groups(), gate.begun_only()) == (2, 0)


def test_what_was_begun_is_let_in_even_where_the_window_is_exceeded_already() -> None:
    """A dead letter that is retried comes back when others have filled its room."""
    gate = Admission(Limits(groups=4, group_size=2, window_groups=9))
    gate.observe(9, 0, 1)
    assert (gate.free_groups(), gate.begun_only(), gate.free_samples()) == (1, 1, 2)
    assert gate.reserve("old#2", range(2), begun=True).granted
    assert gate.free_groups() == 0 and gate.reserve("new#1", range(2)).reason == "backpressure"


def test_slots_bound_what_was_begun_too() -> None:
    gate = Admission(Limits(groups=2, group_size=2, window_groups=9))
    gate.observe(0, 0, 5)
    assert (gate.free_groups(), gate.begun_only()) == (2, 2)
    assert Admission(Limits(groups=2, group_size=2)).begun_only() == 0, "without a window the queue's order is enough"
