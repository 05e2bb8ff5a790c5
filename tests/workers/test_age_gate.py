"""A complete group that gets too old while it waits for the trainer: under `drop` its prompt starts anew."""

import numpy as np
import pytest
from msgspec.structs import replace

from strawq import Pool, Prompt, QueueConfig, Sample, VersionSpan
from strawq.core import reports
from strawq.errors import BadInput, Damaged, OutcomeUnknown, TryAgain
from strawq.queue import Queue
from strawq.samples import Group, without_response
from strawq.work import Change
from strawq_workers import age_gate, asking
from strawq_workers.age_gate import AgeGate
from strawq_workers.collected_lines import collect_to_jsonl
from strawq_workers.collector import Collector
from strawq_workers.stale_groups import STALE_DROPS

TOKENS = 3


@pytest.fixture
def pool(tmp_path):
    with Pool.init(tmp_path / "pool") as opened:
        yield opened


def fill(pool, versions, drops=0):
    """One ready group of two samples for each version; its prompt was dropped `drops` times before."""
    queue = pool.queue()
    queue.submit([Prompt(group_id=f"g{at}", tokens=[1, 2]) for at in range(len(versions))])
    for version in versions:
        complete(queue, version, drops)


def complete(queue, version, drops=0, lease=None):
    work = queue.open(lease or queue.acquire(1).leases[0])
    samples = tuple(
        Sample(
            i, np.arange(TOKENS), np.full(TOKENS, -0.5), versions=(VersionSpan(0, TOKENS, version),),
            status="completed", reward=i, metadata={STALE_DROPS: drops} if drops and not i else {},
        )
        for i in range(2)
    )  # fmt: skip
    queue.complete(work, Group(work.task, work.group.prompt, samples))


def strict(pool, **changes):
    return Collector(pool, **{"max_staleness": 1, "staleness_policy": "drop", **changes})


def names(batch):
    return [group.prompt.group_id for group in batch]


def test_what_is_too_old_for_the_batch_starts_anew_without_a_burned_attempt(pool):
    fill(pool, ["1", "2", "3", "1"])
    pool.publish_version(3)
    batch = strict(pool).next_batch(2, timeout=0)
    assert names(batch) == ["g1", "g2"]
    found = batch.metrics()
    assert found["rollout/staleness/max"] == 1 and found["rollout/staleness/late_groups"] == 0
    assert found["rollout/staleness/dropped_groups"] == 2
    assert pool.queue().counts().partial_pending == 2
    for lease in pool.queue().acquire(2):
        assert lease.held.task.failures == 0
        group = pool.queue().open(lease).group
        assert group.prompt.group_id in ("g0", "g3") and not any(len(sample.tokens) for sample in group.samples)
        assert group.samples[0].metadata == {STALE_DROPS: 1}


def test_tokens_that_engines_made_are_counted_as_thrown_away(pool):
    from strawq.samples import SegmentInfo

    queue = pool.queue()
    queue.submit([Prompt(group_id="g0", tokens=[1])])
    (lease,) = queue.acquire(1)
    work = queue.open(lease)
    made = (SegmentInfo(0, 2, {}, "original"),)  # the third one came from a tool
    sample = Sample(
        0, np.arange(3), np.full(3, -0.5), versions=(VersionSpan(0, 3, "1"),), segments=made, status="completed"
    )
    queue.complete(work, Group(work.task, work.group.prompt, (sample,)))
    pool.publish_version(3)
    collector = strict(pool)
    with pytest.raises(TryAgain):
        collector.next_batch(1, timeout=0)
    complete(queue, "3")
    assert collector.next_batch(1, timeout=0).metrics()["rollout/regenerated_tokens"] == 2


def test_a_prompt_that_has_used_up_its_drops_is_delivered_late_and_counted(pool):
    fill(pool, ["1"], drops=2)
    pool.publish_version(3)
    batch = strict(pool, stale_drops_max=2).next_batch(1, timeout=0)
    assert names(batch) == ["g0"]
    assert batch.metrics()["rollout/staleness/late_groups"] == 1
    assert batch.metrics()["rollout/staleness/dropped_groups"] == 0


def test_late_ones_are_read_once_and_do_not_hide_those_behind_them(pool, monkeypatch):
    monkeypatch.setattr(age_gate, "GROUPS_AT_ONCE", 2)
    fill(pool, ["1"] * 3, drops=9)
    pool.publish_version(3)
    collector, read = strict(pool), []
    load = pool.payloads.load
    monkeypatch.setattr(pool.payloads, "load", lambda held, *a: read.append(held.task.id) or load(held, *a))
    for _ in range(2):
        with pytest.raises(TryAgain):
            collector.next_batch(6, timeout=0)
    assert len(read) == 3
    fill(pool, ["1"] * 3)
    with pytest.raises(TryAgain):
        collector.next_batch(6, timeout=0)
    assert len(read) == 6 + 3, "three to be completed, three to be begun anew"
    assert (pool.queue().counts().ready, pool.queue().counts().partial_pending) == (3, 3)


def test_a_full_queue_does_not_keep_what_would_relieve_it(pool):
    pool.configure("rollout", QueueConfig(max_ready=2, max_leased=1))
    fill(pool, ["1", "1"])
    pool.queue().submit([Prompt(group_id="next", tokens=[1])])
    pool.publish_version(3)
    assert pool.queue().acquire(1).status == "backpressured"
    with pytest.raises(TryAgain):
        strict(pool).next_batch(1, timeout=0)
    assert len(pool.queue().acquire(3)) == 1, "max_leased holds again"


def test_a_pause_holds_back_no_batch(pool):
    fill(pool, ["1", "3"])
    pool.publish_version(3)
    pool.pause("weights")
    assert names(strict(pool).next_batch(1, timeout=0)) == ["g1"]
    assert pool.queue().counts().partial_pending == 1 and pool.queue().acquire(1).status == "paused"


def test_what_is_left_when_the_input_has_ended_is_delivered_late(pool):
    """Workers leave a sealed queue that has no work: nobody might be there to begin anew."""
    fill(pool, ["1", "3"])
    pool.queue().seal()
    pool.publish_version(3)
    batch = strict(pool).next_batch(5, timeout=0)
    assert names(batch) == ["g0", "g1"] and batch.metrics()["rollout/staleness/late_groups"] == 1


def test_a_batch_that_comes_again_is_the_same_however_old_it_got(pool):
    fill(pool, ["1", "1"])
    pool.publish_version(1)
    with Pool.open(pool.path) as first:
        assert names(strict(first).next_batch(2, timeout=0)) == ["g0", "g1"]
    pool.publish_version(9)
    again = strict(pool).next_batch(2, timeout=0)
    assert (
        names(again) == ["g0", "g1"] and again.delivery == 2 and again.metrics()["rollout/staleness/late_groups"] == 2
    )


def unreadable(pool, monkeypatch):
    load = pool.payloads.load

    def damaged(held, *more):
        if held.task.id == "1-0":
            raise Damaged("object abc is not what its name says")
        return load(held, *more)

    monkeypatch.setattr(pool.payloads, "load", damaged)


def with_whole_tensors(pool, monkeypatch):
    """What slime's codec makes of a large array that a sample has as an attribute."""
    change(pool, lambda sample: replace(sample, tensors={"image": np.arange(6)}, payload=b"of its own"))


def change(pool, changed):
    """Hand the oldest group in anew, changed."""
    queue = pool.queue()
    (lease,) = queue.acquire(1, stages=("ready",))
    work = queue.open(lease)
    anew = replace(work.group, samples=tuple(changed(sample) for sample in work.group.samples))
    queue.report([Change(work, "complete", anew, rewrite=True)])


def at_its_last_part(pool, monkeypatch):
    monkeypatch.setattr(reports, "PARTS_PER_TASK", 2)


@pytest.mark.parametrize("why", [unreadable, at_its_last_part])
def test_one_that_cannot_begin_anew_is_delivered_late_and_holds_nobody_up(pool, monkeypatch, caplog, why):
    fill(pool, ["1", "3"])
    pool.publish_version(3)
    why(pool, monkeypatch)
    with caplog.at_level("WARNING", "strawq.collector"):
        batch = strict(pool).next_batch(2, timeout=0)
    assert batch.tasks == ("1-0", "1-1") and batch.metrics()["rollout/staleness/late_groups"] == 1
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("group 1-0 is older than max_staleness allows, and cannot begin anew: ")


def test_what_a_sample_came_with_is_there_when_it_begins_anew(pool, monkeypatch):
    fill(pool, ["1", "3"])
    with_whole_tensors(pool, monkeypatch)
    pool.publish_version(3)
    assert names(strict(pool).next_batch(1, timeout=0)) == ["g1"]
    (lease,) = pool.queue().acquire(1)
    sample = pool.queue().open(lease).group.samples[0]
    assert (len(sample.tokens), sample.payload) == (0, b"of its own")
    assert np.asarray(sample.tensors["image"][:]).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_group_of_which_one_answer_never_began_begins_anew(pool, monkeypatch):
    fill(pool, ["1", "3"])
    routes = np.zeros((1, 1, 1), np.uint8)
    change(pool, lambda each: each if each.index else replace(without_response(each), status="failed", r3=routes))
    pool.publish_version(3)
    assert names(strict(pool).next_batch(1, timeout=0)) == ["g1"]
    (lease,) = pool.queue().acquire(1)
    assert not any(len(sample.tokens) for sample in pool.queue().open(lease).group.samples)


# -- races and lost replies -------------------------------------------------------------------------------------------


def test_a_batch_that_another_takes_between_the_look_and_the_lease_leaves_nothing_leased(pool, monkeypatch):
    fill(pool, ["1", "1", "3", "3"])
    pool.publish_version(3)
    collector, lease = strict(pool), AgeGate._lease_ready

    def late(gate, count):
        taken = pool.queue().take_batch(2, consumer="other")
        assert len(taken.batch.tasks) == 2
        return lease(gate, count)

    monkeypatch.setattr(AgeGate, "_lease_ready", late)
    assert names(collector.next_batch(2, timeout=0)) == ["g2", "g3"]
    assert not pool.queue().leased()


@pytest.mark.parametrize("call", ["acquire", "report"])
def test_leases_whose_fate_nobody_knew_are_given_back_by_the_next_call(pool, monkeypatch, call):
    fill(pool, ["1", "3"])
    pool.publish_version(3)
    collector, usual, said = strict(pool), getattr(Queue, call), []

    def unknown(queue, *given, **named):
        if len(said) == 5:  # as often as it is asked for again
            return usual(queue, *given, **named)
        said.append(said[0] if said else usual(queue, *given, **named))
        raise OutcomeUnknown("the reply was lost")

    monkeypatch.setattr(asking, "AGAIN_SECONDS", (0.0,) * 4)
    monkeypatch.setattr(Queue, call, unknown)
    with pytest.raises(OutcomeUnknown):
        collector.next_batch(1, timeout=0)
    assert len(said) == 5
    assert names(collector.next_batch(1, timeout=0)) == ["g1"]
    assert not pool.queue().leased() and pool.queue().counts().partial_pending == 1


def with_a_last_one(pool):
    """The lease of the last prompt of a sealed queue, at version 3."""
    queue = pool.queue()
    queue.submit([Prompt(group_id="last", tokens=[1])])
    queue.seal()
    pool.publish_version(3)
    return queue.acquire(1).leases[0]


def test_the_last_worker_may_leave_between_the_look_and_the_lease(pool, monkeypatch):
    """It hears that the queue is used up: nobody would begin the group anew."""
    fill(pool, ["1", "3", "3"])
    queue = pool.queue()
    last = with_a_last_one(pool)
    lease = AgeGate._lease_ready

    def after_the_last_one(gate, count):
        complete(queue, "3", lease=last)
        assert queue.acquire(1).status == "sealed"
        return lease(gate, count)

    monkeypatch.setattr(AgeGate, "_lease_ready", after_the_last_one)
    batch = strict(pool).next_batch(4, timeout=0)
    assert names(batch) == ["g0", "g1", "g2", "last"] and batch.metrics()["rollout/staleness/late_groups"] == 1


def test_while_it_is_leased_to_begin_anew_no_worker_takes_the_queue_for_used_up(pool, monkeypatch):
    fill(pool, ["1", "3"])
    queue, heard = pool.queue(), []
    last = with_a_last_one(pool)
    judged = AgeGate._judged

    def and_meanwhile(gate, change):
        complete(queue, "3", lease=last)
        heard.append(queue.acquire(1).status)
        return judged(gate, change)

    monkeypatch.setattr(AgeGate, "_judged", and_meanwhile)
    assert names(strict(pool).next_batch(2, timeout=0)) == ["g1", "last"]
    assert heard == ["empty"] and len(queue.acquire(1)) == 1


def test_a_version_that_is_published_between_the_look_and_the_take_is_no_way_in(pool, monkeypatch):
    fill(pool, ["1", "1", "9"])
    pool.publish_version(2)
    collector = strict(pool)
    take = Collector._take

    def later(self, *given):
        if pool.policy_version() == "2":
            pool.publish_version(9)
        return take(self, *given)

    monkeypatch.setattr(Collector, "_take", later)
    assert names(collector.next_batch(1, timeout=0)) == ["g2"]
    assert pool.queue().counts().partial_pending == 2 and pool.queue().counts().ready == 0


def test_a_rollback_in_the_middle_is_told_by_nobody_as_a_drop(pool, monkeypatch):
    fill(pool, ["1", "3"])
    pool.publish_version(3)
    pool.checkpoint("before")
    collector, judged = strict(pool), AgeGate._judged

    def rolled_back(gate, change):
        monkeypatch.setattr(AgeGate, "_judged", judged)
        pool.rollback("before")
        return judged(gate, change)

    monkeypatch.setattr(AgeGate, "_judged", rolled_back)
    batch = collector.next_batch(1, timeout=0)
    assert names(batch) == ["g1"] and batch.metrics()["rollout/staleness/dropped_groups"] == 1


def test_portions_are_bounded_by_groups_and_by_tokens(pool, monkeypatch):
    fill(pool, ["1"] * 5)
    pool.publish_version(3)
    portions, portion = [], age_gate._portion

    def told(changes):
        first, rest = portion(changes)
        portions.append(len(first))
        return first, rest

    monkeypatch.setattr(age_gate, "_portion", told)
    monkeypatch.setattr(age_gate, "TOKENS_AT_ONCE", 7)  # a group has six
    with pytest.raises(TryAgain):
        strict(pool).next_batch(1, timeout=0)
    assert portions == [2, 2, 1] and pool.queue().counts().partial_pending == 5


@pytest.mark.parametrize("policy", ["admit", "oldest_first"])
def test_under_the_other_policies_what_is_late_is_delivered_and_counted(pool, policy):
    fill(pool, ["1", "3"])
    pool.publish_version(3)
    found = strict(pool, staleness_policy=policy).next_batch(2, timeout=0).metrics()
    assert found["rollout/staleness/max"] == 2 and found["rollout/staleness/late_groups"] == 1


def test_versions_that_are_words_have_no_age(pool):
    fill(pool, ["first", "3"])
    pool.publish_version(9)
    assert names(strict(pool, max_staleness=9).next_batch(2, timeout=0)) == ["g1", "g0"]
    fill(pool, ["1"])
    pool.publish_version("release")
    assert names(strict(pool).next_batch(1, timeout=0)) == ["g0"]


def test_a_negative_budget_is_refused(pool):
    with pytest.raises(BadInput, match="max_staleness is -2"):
        strict(pool, max_staleness=-2)
    with pytest.raises(BadInput, match="unknown staleness policy 'newest'"):
        strict(pool, staleness_policy="newest")
    with pytest.raises(BadInput, match="stale_drops_max is 0"):
        strict(pool, stale_drops_max=0)


def test_lines_are_written_of_what_is_young_enough(pool, tmp_path):
    fill(pool, ["1", "3"])
    pool.publish_version(3)
    summary = collect_to_jsonl(
        pool, tmp_path / "out", count=1, batches=1, timeout=0, max_staleness=1, staleness_policy="drop"
    )
    assert summary.groups == 1 and '"g1"' in (tmp_path / "out").read_text()
    assert summary.metrics["rollout/staleness/dropped_groups"] == 1
