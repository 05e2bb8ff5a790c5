"""How old a group may be: what a worker admits, drops, and delivers late."""

import asyncio
import logging

import numpy as np
import pytest

from strawq import Prompt
from strawq.samples import Group, Sample, VersionSpan
from strawq_workers.agents import generate
from strawq_workers.stale_groups import STALE_DROPS, begun_anew, drops_of

WAIT_S = 20


def partial(stage, version: str, *, count: int = 8, metadata=None, status="aborted", **own) -> None:
    """A pending group whose tokens are of `version`."""
    stage.queue.submit([Prompt(group_id="old", tokens=[5, 6, 7])])
    (lease,) = stage.queue.acquire(1)
    work = stage.queue.open(lease)
    record = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
    from strawq.samples import SegmentInfo

    samples = tuple(
        Sample(
            index, tokens=[9] * count, logprobs=[-1.0] * count, versions=(VersionSpan(0, count, version),),
            status=status, segments=(SegmentInfo(0, count, record, "original"),),
            metadata=dict(metadata or {}) if index == 0 else {}, **own,
        )
        for index in range(2)
    )  # fmt: skip
    stage.queue.yield_(work, Group(lease.task, work.group.prompt, samples))


def drop(**changes):
    return {"max_staleness": 1, "staleness_policy": "drop", **changes}


async def test_a_prefix_beyond_the_budget_is_thrown_away_and_its_prompt_starts_anew(stage_of):
    async with stage_of(weight_version="5") as stage:
        partial(stage, "3")
        stage.queue.seal()
        stage.pool.publish_version(5)
        summary = await stage.run(**drop())
        assert summary.counters.stale_drops == 1 and summary.counters.tokens_discarded == 16
        assert summary.counters.tokens_generated == 48 and summary.counters.groups_accepted == 1
        (group,) = stage.groups(stage="ready")
        for sample in group.samples:
            assert [span.version for span in sample.versions] == ["5"] and len(sample.tokens) == 24
        assert group.samples[0].metadata == {STALE_DROPS: 1}, "the account of the prompt goes with the group"


@pytest.mark.parametrize("partial_rollout", [True, False])
async def test_what_a_sample_came_with_outlives_its_new_beginning(stage_of, partial_rollout):
    """Large arrays among the fields of slime's samples stand beside the payload, and cannot be left out once saved."""
    async with stage_of(weight_version="5") as stage:
        partial(stage, "3", tensors={"image": np.arange(6)}, payload=b"of its own")
        stage.queue.seal()
        stage.pool.publish_version(5)
        summary = await stage.run(**drop(partial_rollout=partial_rollout))
        assert summary.counters.groups_failed == 0 and summary.counters.groups_accepted == 1
        (group,) = stage.groups(stage="ready")
        for sample in group.samples:
            assert len(sample.tokens) == 24 and sample.payload == b"of its own"
            assert np.asarray(sample.tensors["image"][:]).tolist() == [0, 1, 2, 3, 4, 5]


async def test_a_prefix_within_the_budget_is_continued(stage_of):
    async with stage_of(weight_version="5") as stage:
        partial(stage, "4")
        stage.queue.seal()
        stage.pool.publish_version(5)
        summary = await stage.run(**drop())
        assert summary.counters.stale_drops == 0 and summary.counters.tokens_generated == 32


async def test_versions_that_are_no_numbers_have_no_age(stage_of):
    async with stage_of(weight_version="default") as stage:
        partial(stage, "step-3")
        stage.queue.seal()
        stage.pool.publish_version(5)
        summary = await stage.run(**drop())
        assert summary.counters.stale_drops == summary.counters.stale_late == 0


async def test_a_budget_behind_a_version_that_is_a_word_is_said_to_bound_nothing(stage_of, caplog):
    async with stage_of(weight_version="5") as stage:
        partial(stage, "3")
        stage.queue.seal()
        stage.pool.publish_version("release-candidate")
        with caplog.at_level(logging.WARNING, "strawq.worker"):
            summary = await stage.run(**drop())
        assert summary.counters.stale_drops == 0
        told = [record.getMessage() for record in caplog.records if "release-candidate" in record.getMessage()]
        assert len(told) == 1 and "--max-staleness bounds nothing" in told[0]


async def test_a_prompt_that_was_dropped_as_often_as_allowed_is_delivered_late_and_warned_about_before(
    stage_of, caplog
):
    async with stage_of(weight_version="5") as stage:
        partial(stage, "3", metadata={STALE_DROPS: 1})
        stage.pool.publish_version(5)
        stage.queue.seal()
        with caplog.at_level(logging.WARNING, "strawq.worker"):
            summary = await stage.run(**drop(stale_drops_max=2, groups_max=1))
        assert summary.counters.stale_drops == 1
        warned = [
            record.getMessage()
            for record in caplog.records
            if "dropped as stale, 2 of at most 2" in record.getMessage()
        ]
        assert len(warned) == 1 and "prompt old" in warned[0] and "raise it" in warned[0]


async def test_a_prompt_that_has_used_up_its_drops_is_delivered_late_and_counted(stage_of):
    async with stage_of(weight_version="5") as stage:
        partial(stage, "3", metadata={STALE_DROPS: 2})
        stage.pool.publish_version(5)
        stage.queue.seal()
        summary = await stage.run(**drop(stale_drops_max=2))
        assert (summary.counters.stale_drops, summary.counters.stale_late) == (0, 1)
        assert summary.counters.tokens_generated == 32 and summary.counters.groups_accepted == 1


async def test_a_group_that_gets_too_old_while_it_is_scored_goes_back_without_tokens(stage_of):
    import hooks_for_tests as hooks

    hooks.release.clear()
    hooks.calls["waits"] = 0
    async with stage_of(weight_version="1") as stage:
        stage.submit(1)
        stage.pool.publish_version(1)
        worker = stage.start(**drop(reward="hooks_for_tests:waits", groups_max=1))
        await stage.until("the hook is called", lambda: hooks.calls["waits"] == 2, worker)
        await asyncio.to_thread(stage.pool.publish_version, 3)
        await stage.until("the worker knows", lambda: stage.worker.place.served == "3", worker)
        hooks.release.set()
        summary = await worker
        assert summary.counters.groups_yielded == 1 and summary.counters.groups_accepted == 0
        (held,) = stage.held(session="")
        assert held.task.stage != "ready" and held.task.failures == 0
        group = stage.pool.payloads.load(held)
        assert not any(len(sample.tokens) for sample in group.samples)
        assert group.samples[0].metadata == {STALE_DROPS: 1}


def replaces(args, sample, **_):
    sample.metadata = {"mine": 1, STALE_DROPS: 7}


def scores_and_replaces(args, sample):
    replaces(args, sample)
    return 1.0


async def generates_and_replaces(args, sample, sampling_params):
    replaces(args, sample)
    await generate(args, sample, sampling_params)
    sample.metadata.clear()
    return sample


@pytest.mark.parametrize(
    ("option", "hook"),
    [("reward", "scores_and_replaces"), ("sample_hooks", "replaces"), ("generate", "generates_and_replaces")],
)
async def test_the_account_of_a_prompt_outlives_what_the_users_code_does_to_metadata(stage_of, option, hook):
    async with stage_of(weight_version="5") as stage:
        partial(stage, "3", metadata={STALE_DROPS: 1, "of": "the prefix"})
        stage.queue.seal()
        path = f"test_freshness:{hook}"
        summary = await stage.run(**drop(max_staleness=5, **{option: (path,) if option == "sample_hooks" else path}))
        assert summary.counters.groups_accepted == 1
        (group,) = stage.groups(stage="ready")
        own = {} if option == "generate" else {"mine": 1}
        assert [sample.metadata for sample in group.samples] == [{STALE_DROPS: 1, **own}, own]


async def test_the_account_of_a_prompt_outlives_a_prefix_that_is_not_continued(stage_of):
    async with stage_of(weight_version="5") as stage:
        partial(stage, "3", metadata={STALE_DROPS: 1, "of": "the prefix"})
        stage.queue.seal()
        summary = await stage.run(**drop(max_staleness=5, partial_rollout=False))
        assert summary.counters.groups_accepted == 1 and summary.counters.tokens_generated == 48
        (group,) = stage.groups(stage="ready")
        assert [sample.metadata for sample in group.samples] == [{STALE_DROPS: 1}, {}]


@pytest.mark.parametrize("function", ["", "test_freshness:turns"])
async def test_the_account_of_a_prompt_outlives_a_pause_without_partial_rollout(stage_of, function):
    async with stage_of(weight_version="5") as stage:
        partial(stage, "3", metadata={STALE_DROPS: 1}, status="completed")
        stage.queue.seal()
        stage.pool.publish_version(5)
        stage.stand_at(2)
        worker = stage.start(**drop(partial_rollout=False, generate=function))
        await stage.until("it is made anew", lambda: stage.standing() == 2, worker)
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the pause is acknowledged", lambda: stage.pool.inspect().paused.acknowledged, worker)
        await stage.go_on()
        await asyncio.to_thread(stage.pool.resume)
        summary = await worker
        assert (summary.counters.stale_drops, summary.counters.groups_accepted) == (1, 1)
        (group,) = stage.groups(stage="ready")
        assert [sample.metadata for sample in group.samples] == [{STALE_DROPS: 2}, {}]


async def turns(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return sample


async def test_the_account_of_a_prompt_is_saved_with_a_sample_of_which_nothing_else_is(stage_of):
    async with stage_of(weight_version="5") as stage:
        stage.queue.submit([Prompt(group_id="old", tokens=[5, 6, 7])])
        (lease,) = stage.queue.acquire(1)
        work = stage.queue.open(lease)
        done = Sample(1, tokens=[9], logprobs=[-1.0], versions=(VersionSpan(0, 1, "3"),), status="completed")
        stage.queue.yield_(work, Group(lease.task, work.group.prompt, (done,)))
        stage.queue.seal()
        stage.pool.publish_version(5)
        stage.stand_at(2)
        stop = asyncio.Event()
        worker = stage.start(stop, **drop(partial_rollout=False))
        await stage.until("it is made anew", lambda: stage.standing() == 2, worker)
        stop.set()
        await worker
        (group,) = stage.groups(session="")
        assert {s.index: (len(s.tokens), s.metadata) for s in group.samples} == {0: (0, {STALE_DROPS: 1}), 1: (0, {})}


def test_a_new_beginning_keeps_what_an_unbegun_sample_came_with_and_counts_only_whole_numbers():
    unbegun = {0: Sample(0, metadata={"seed": 3})}
    samples = {0: Sample(0, metadata={"seed": 3}), 1: Sample(1, tokens=[9], metadata={"of": "it", STALE_DROPS: None})}
    anew = begun_anew(samples, unbegun)
    assert anew[0].metadata == {"seed": 3, STALE_DROPS: 1} and drops_of(anew.values()) == 1


@pytest.mark.parametrize("policy", ["admit", "oldest_first"])
async def test_no_more_than_the_budgets_batches_are_unconsumed_whoever_holds_them(stage_of, policy):
    async with stage_of() as stage:
        stage.submit(12, seal=False)
        worker = stage.start(max_staleness=1, staleness_policy=policy, batch_groups=2)
        await stage.until("two batches are ready", lambda: stage.queue.counts().ready == 4, worker)
        for _ in range(3):  # several looks later it is still so
            await asyncio.wait_for(one_look(stage), WAIT_S)
            counts = stage.queue.counts()
            assert counts.ready == 4 and counts.fresh_leased == 0
        taken = await asyncio.to_thread(stage.queue.take_batch, 2)
        await asyncio.wait_for(one_look(stage), WAIT_S)
        assert stage.queue.counts().ready == 2, "a batch that is being trained on still counts"
        await asyncio.to_thread(stage.queue.finish_batch, taken.batch)
        await stage.until("the next batch is made", lambda: stage.queue.counts().ready == 4, worker)
        assert stage.queue.counts().fresh_pending == 6


async def one_look(stage) -> None:
    looked = asyncio.Event()
    take = stage.worker.watcher._take

    def noticed(around):
        take(around)
        looked.set()

    stage.worker.watcher._take = noticed
    await looked.wait()
    stage.worker.watcher._take = take


async def test_two_workers_keep_one_budget(stage_of):
    async with stage_of() as stage:
        stage.submit(12, seal=False)
        stage.stand_at(5)
        first = stage.start(max_staleness=0, staleness_policy="admit", batch_groups=3, workers=2)
        await stage.until("a batch is in mid-generation", lambda: stage.standing() == 6, first)
        second = stage.start(max_staleness=0, staleness_policy="admit", batch_groups=3, workers=2, worker_index=1)
        await stage.go_on()
        await stage.until("a batch is ready", lambda: stage.queue.counts().ready == 3, second)
        await asyncio.wait_for(one_look(stage), WAIT_S)
        assert stage.queue.counts().ready == 3 and stage.queue.counts().fresh_pending == 9
