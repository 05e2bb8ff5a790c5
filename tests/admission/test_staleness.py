"""The staleness budget: what breaks when a straggler is overtaken, a worker recovers, a prompt is slow."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strawq.errors import BadInput
from strawq_workers.admission import Candidate, StalenessBudget, staleness_of


def group(name: str, version: int | None, order: int = 0) -> Candidate:
    return Candidate(name, f"prompt-{name}", version, order)


@pytest.mark.parametrize(
    ("oldest", "served", "staleness"), [(3, 5, 2), (5, 5, 0), (None, 5, None), (3, None, None), (6, 5, None)]
)
def test_staleness_is_unknown_rather_than_negative(
    oldest: int | None, served: int | None, staleness: int | None
) -> None:
    assert staleness_of(oldest, served) == staleness


def test_older_versions_go_first_and_unversioned_groups_last() -> None:
    budget = StalenessBudget(None, "admit", batch_groups=4)
    ready = [group("none", None, 0), group("new", 7, 1), group("old-late", 3, 3), group("old", 3, 2)]
    taken = budget.select(ready, served_version=7).take
    assert [candidate.group for candidate in taken] == ["old", "old-late", "new", "none"]


def test_a_short_batch_is_not_taken() -> None:
    selection = StalenessBudget(1, "admit", batch_groups=2).select([group("a", 1)], served_version=1)
    assert (selection.take, selection.waiting_for) == ((), ())


def test_admission_is_bounded_by_what_is_unconsumed_now() -> None:
    budget = StalenessBudget(2, "admit", batch_groups=16)
    assert [budget.admissible(n) for n in (0, 40, 48, 60)] == [48, 8, 0, 0]
    assert StalenessBudget(2, "drop", batch_groups=16).admissible(40) == 8, "what is begun beyond that is dropped later"
    assert StalenessBudget(None, "admit", batch_groups=16).admissible(1000) is None


def test_a_recovered_worker_admits_no_more_than_before() -> None:
    """A bound from counters of the process (admitted so far, against a restored version) opens wide after a restart."""
    before = StalenessBudget(1, "oldest_first", batch_groups=4)
    after = StalenessBudget(1, "oldest_first", batch_groups=4, drops=before.drops)
    assert before.admissible(7) == after.admissible(7) == 1


def test_admit_delivers_an_overtaken_straggler_late_and_says_so() -> None:
    budget = StalenessBudget(1, "admit", batch_groups=2)
    selection = budget.select([group("slow", 0), group("b", 3)], served_version=3)
    assert [candidate.group for candidate in selection.take] == ["slow", "b"]
    assert selection.over_limit == ("slow",)
    assert selection.drop == ()


def test_oldest_first_waits_for_a_straggler_only_when_it_would_miss_the_budget() -> None:
    budget = StalenessBudget(1, "oldest_first", batch_groups=2)
    ready, newer = [group("b", 4, 1), group("c", 4, 2)], [group("b", 5, 1), group("c", 5, 2)]
    straggler = [group("slow", 4, 0)]
    assert len(budget.select(ready, straggler, served_version=4).take) == 2, "it may still come with the next batch"
    waiting = budget.select(newer, straggler, served_version=5)
    assert (waiting.take, waiting.waiting_for) == ((), ("slow",))
    done = budget.select([*newer, *straggler], served_version=5)
    assert [candidate.group for candidate in done.take] == ["slow", "b"]


def test_oldest_first_sees_that_too_many_are_due_at_the_next_batch() -> None:
    budget = StalenessBudget(1, "oldest_first", batch_groups=2)
    ready = [group("x", 5, 3), group("y", 5, 4)]
    due_next = [group(name, 4, order) for order, name in enumerate("abc")]
    selection = budget.select(ready, due_next, served_version=4)
    assert selection.take == (), "three groups due by batch 5 do not fit into batch 5"
    assert selection.waiting_for == ("a", "b")


def test_oldest_first_does_not_wait_for_what_no_order_can_save() -> None:
    """After a restart with a smaller budget the backlog is late anyway; to wait for it would only stop the trainer."""
    budget = StalenessBudget(0, "oldest_first", batch_groups=2)
    ready = [group("a", 1, 0), group("b", 1, 1)]
    selection = budget.select(ready, [group("c", 1, 2), group("d", 1, 3)], served_version=5)
    assert [candidate.group for candidate in selection.take] == ["a", "b"]
    assert selection.over_limit == ("a", "b")


def test_a_drop_is_counted_per_prompt_warns_and_ends_before_the_prompt_starves() -> None:
    budget = StalenessBudget(1, "drop", batch_groups=1, max_drops_per_prompt=3)
    slow, fast = group("slow", 0), group("fast", 5, 1)
    warned = []
    for count in (1, 2, 3):
        selection = budget.select([slow, fast], served_version=5)
        assert selection.drop == (slow,) and selection.take == (fast,)
        warned.append(bool(selection.warnings))
        budget.committed(selection)
        assert budget.drops == {"prompt-slow": count}
    assert warned == [False, True, True]
    selection = budget.select([slow, fast], served_version=5)
    assert (selection.take, selection.drop, selection.over_limit) == ((slow,), (), ("slow",))
    budget.committed(selection)
    assert budget.drops == {}, "a delivered prompt starts again at zero"
    assert budget.dropped_groups == 3


def test_a_warning_names_the_prompt_and_the_remedy() -> None:
    budget = StalenessBudget(1, "drop", batch_groups=1, max_drops_per_prompt=2)
    (warning,) = budget.select([group("slow", 0)], served_version=5).warnings
    assert "prompt-slow" in warning and "1 of at most 2" in warning and "oldest_first" in warning


def test_a_selection_that_was_not_committed_counts_nothing() -> None:
    budget = StalenessBudget(0, "drop", batch_groups=1)
    first = budget.select([group("slow", 0)], served_version=5)
    assert budget.select([group("slow", 0)], served_version=5) == first
    assert budget.drops == {}


def test_drops_survive_a_restart() -> None:
    budget = StalenessBudget(0, "drop", batch_groups=1, max_drops_per_prompt=2, drops={"prompt-slow": 2})
    assert budget.judge(group("slow", 0), 5) == "late"
    assert budget.dropped_groups == 2


@pytest.mark.parametrize("policy", ["admit", "oldest_first", "drop"])
@pytest.mark.parametrize("version", [None, 9])
def test_a_group_of_unknown_age_is_never_dropped(policy: str, version: int | None) -> None:
    budget = StalenessBudget(0, policy, batch_groups=1)  # type: ignore[arg-type]
    assert budget.judge(group("a", version), 5) == "take"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_staleness": -1},
        {"policy": "newest"},
        {"batch_groups": 0},
        {"max_drops_per_prompt": 0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    settings_ = {"max_staleness": 1, "policy": "drop", "batch_groups": 4, **wrong}
    with pytest.raises(BadInput):
        StalenessBudget(**settings_)  # type: ignore[arg-type]


class Training:
    """A trainer, and groups that finish in random order; one in five is a straggler and mostly finishes last."""

    def __init__(self, seed: int, budget: StalenessBudget, slots: int) -> None:
        self.draw = random.Random(seed)
        self.budget, self.slots = budget, slots
        self.version = 0
        self.order = 0
        self.running: list[Candidate] = []
        self.ready: list[Candidate] = []
        self.again: list[str] = []
        self.delivered: list[tuple[str, int | None]] = []
        self.over_limit = 0
        self.drops = 0
        self.finished = 0
        self.prompts: set[str] = set()

    def tick(self) -> None:
        room = self.budget.admissible(len(self.running) + len(self.ready))
        free = self.slots - len(self.running)
        for _ in range(free if room is None else min(free, room)):
            prompt = self.again.pop(0) if self.again else f"p{self.order}"
            self.prompts.add(prompt)
            self.running.append(Candidate(f"g{self.order}", prompt, self.version, self.order))
            self.order += 1
        if self.running:
            quick = [candidate for candidate in self.running if candidate.order % 5 != 0] or self.running
            ended = self.draw.choice(self.running if self.draw.random() < 0.2 else quick)
            self.running.remove(ended)
            self.ready.append(ended)
            self.finished += 1
        selection = self.budget.select(self.ready, self.running, served_version=self.version)
        assert set(selection.waiting_for) <= {candidate.group for candidate in self.running}, "it waits for nobody"
        assert selection.take or self.running or len(self.ready) < self.budget.batch_groups, "everybody waits"
        self.budget.committed(selection)
        gone = {*selection.take, *selection.drop}
        self.ready = [candidate for candidate in self.ready if candidate not in gone]
        self.again += [candidate.prompt for candidate in selection.drop]
        self.drops += len(selection.drop)
        self.over_limit += len(selection.over_limit)
        if selection.take:
            self.delivered += [(c.prompt, staleness_of(c.oldest_version, self.version)) for c in selection.take]
            self.version += 1


@given(seed=st.integers(0, 2**32), budget=st.integers(0, 3), batch=st.integers(1, 6), slots=st.integers(1, 24))
@settings(max_examples=120, deadline=None)
def test_oldest_first_never_exceeds_the_budget_and_never_stops(seed: int, budget: int, batch: int, slots: int) -> None:
    training = Training(seed, StalenessBudget(budget, "oldest_first", batch_groups=batch), slots)
    for _ in range(200):
        training.tick()
    assert training.over_limit == 0
    assert max(age or 0 for _, age in training.delivered) <= budget
    assert len(training.delivered) >= training.finished - (budget + 1) * batch, "the trainer was starved"
    assert training.finished >= 200 - training.version, "only a batch that is due stops generation"
    assert training.drops == 0


@given(seed=st.integers(0, 2**32), budget=st.integers(0, 3), batch=st.integers(1, 6), slots=st.integers(1, 24))
@settings(max_examples=120, deadline=None)
def test_drop_never_exceeds_the_budget_uncounted_and_loses_no_prompt(
    seed: int, budget: int, batch: int, slots: int
) -> None:
    training = Training(seed, StalenessBudget(budget, "drop", batch_groups=batch, max_drops_per_prompt=2), slots)
    for _ in range(200):
        training.tick()
    late = sum(1 for _, age in training.delivered if age is not None and age > budget)
    assert late == training.over_limit
    assert training.drops == training.budget.dropped_groups
    waiting = {c.prompt for c in (*training.running, *training.ready)} | set(training.again)
    assert {prompt for prompt, _ in training.delivered} | waiting == training.prompts, "a prompt was skipped"
    assert len({p for p, _ in training.delivered}) == len(training.delivered), "a prompt was delivered twice"
    assert len(training.delivered) + len(waiting) + training.drops == training.order + len(training.again)
    assert all(count <= 2 for count in training.budget.drops.values())


@given(seed=st.integers(0, 2**32), budget=st.integers(0, 3), batch=st.integers(1, 6), slots=st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_admit_bounds_what_is_unconsumed_and_discards_nothing(seed: int, budget: int, batch: int, slots: int) -> None:
    training = Training(seed, StalenessBudget(budget, "admit", batch_groups=batch), slots)
    for _ in range(200):
        training.tick()
        assert len(training.running) + len(training.ready) <= (budget + 1) * batch
    assert training.drops == 0
    late = sum(1 for _, age in training.delivered if age is not None and age > budget)
    assert late == training.over_limit, "a group beyond the budget was not counted"
