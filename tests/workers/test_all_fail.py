"""A hook that fails group after group stops the worker before the data set is spent; one that fails some does not."""

import asyncio

import pytest

from strawq.errors import BadInput

HOOKS = "hooks_for_tests"
PROMPTS = 60


@pytest.mark.parametrize(
    ("option", "hook", "reason"),
    [
        ("reward", "always_raises", "reward hook raised ValueError: never"),
        ("dynamic_filter", "always_raises", "dynamic_filter hook raised ValueError: never"),
        ("generate", "never_generates", "generate hook raised ValueError: never"),
    ],
)
async def test_a_hook_that_always_raises_stops_the_worker_with_its_reason(stage_of, option, hook, reason):
    async with stage_of() as stage:
        stage.submit(PROMPTS)
        with pytest.raises(BadInput, match="4 groups in a row failed for good") as error:
            await stage.run(**{option: f"{HOOKS}:{hook}"}, refusals_max=2, max_groups=4)
        assert reason in str(error.value) and f"strawq failed retry {stage.pool.path} --all" in str(error.value)
        counts = stage.queue.counts()
        assert 4 <= counts.failed <= 4 + 3 and counts.fresh_leased == counts.partial_leased == 0
        assert counts.fresh_pending + counts.partial_pending == PROMPTS - counts.failed
        stage.queue.retry_failed([task.id for task in stage.queue.dead_letters()])
        assert (await stage.run()).counters.groups_accepted == PROMPTS, "nothing is lost of it"


async def test_several_workers_spend_no_more_than_each_of_them_may(stage_of):
    async with stage_of() as stage:
        stage.submit(PROMPTS)
        options = {"reward": f"{HOOKS}:always_raises", "refusals_max": 4, "max_groups": 2}
        ended = await asyncio.gather(*(stage.run(**options) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(error, BadInput) and "failed for good" in str(error) for error in ended), ended
        assert stage.queue.counts().failed <= 3 * (4 + 1)


async def test_groups_that_fail_among_others_stop_nobody(stage_of):
    async with stage_of() as stage:
        stage.submit(PROMPTS)
        summary = await stage.run(reward=f"{HOOKS}:raises_for_odd", refusals_max=1, max_groups=8)
        assert summary.reason == "sealed" and summary.counters.groups_accepted == PROMPTS // 2
        assert stage.queue.counts().failed == PROMPTS // 2


async def test_first_attempts_that_all_fail_are_no_reason_to_stop(stage_of):
    async with stage_of() as stage:
        stage.submit(PROMPTS)
        summary = await stage.run(reward=f"{HOOKS}:third_time", group_reward=True, refusals_max=1, max_groups=8)
        assert summary.counters.groups_accepted == PROMPTS and summary.counters.groups_failed == 2 * PROMPTS
