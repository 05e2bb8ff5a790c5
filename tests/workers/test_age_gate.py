"""A complete group that gets too old while it waits for the trainer: under `drop` its prompt starts anew."""

import numpy as np
import pytest

from strawq import Pool, Prompt, QueueConfig, Sample, VersionSpan
from strawq.errors import BadInput, Damaged, TryAgain
from strawq.samples import Group
from strawq_workers import age_gate
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


def complete(queue, version, drops=0):
    (lease,) = queue.acquire(1)
    work = queue.open(lease)
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


def test_while_admission_is_paused_the_batch_waits_and_says_for_what(pool):
    fill(pool, ["1", "3"])
    pool.publish_version(3)
    pool.pause("maintenance")
    with pytest.raises(TryAgain, match=r"complete groups \(1\) are older than max_staleness = 1 .*maintenance"):
        strict(pool).next_batch(1, timeout=0)
    assert pool.queue().counts().ready == 2
    pool.resume()
    assert names(strict(pool).next_batch(1, timeout=0)) == ["g1"]


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


def test_one_that_cannot_be_read_is_named_and_nothing_stays_leased(pool, monkeypatch):
    fill(pool, ["1", "1", "3"])
    pool.publish_version(3)
    load, bad = pool.payloads.load, []

    def damaged(held, *more):
        bad.append(held.task.id)
        if len(bad) == 2:
            raise Damaged("object abc is not what its name says")
        return load(held, *more)

    monkeypatch.setattr(pool.payloads, "load", damaged)
    with pytest.raises(Damaged, match="abc"):
        strict(pool).next_batch(1, timeout=0)
    counts = pool.queue().counts()
    assert counts.ready == 3 and counts.partial_pending == 0
    pool.queue().drop_tasks([bad[1]], "its object is damaged")
    assert names(strict(pool).next_batch(1, timeout=0)) == ["g2"]


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
