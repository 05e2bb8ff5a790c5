import asyncio
import socket

import hooks_for_tests as hooks
import msgspec
import pytest

from strawq import Prompt
from strawq.errors import BadInput, EngineUnavailable
from strawq.samples import Sample, token_count
from strawq_workers.worker import work

HOOKS = "hooks_for_tests"


async def test_every_group_is_accepted_once_and_whole(stage_of):
    async with stage_of(enable_return_routed_experts=True) as stage:
        stage.submit(6)
        summary = await stage.run(routed_experts=True, top_logprobs=2, save_tokens=8)
        assert summary.reason == "sealed" and summary.counters.groups_accepted == 6
        assert summary.counters.tokens_generated == 6 * 2 * 24 and summary.policy_versions == ("1",)
        groups = stage.groups(stage="ready")
        assert len(groups) == 6
        for group in groups:
            for sample in group.samples:
                assert len(sample.tokens) == 24 and sample.status == "truncated" and len(sample.segments) == 3
                assert len(sample.r3[:]) == len(sample.prompt_tokens) + 23 and sample.sc.ids.shape == (24, 2)
                assert [(s.start, s.end, s.version) for s in sample.versions] == [(0, 24, "1")]


async def test_prompts_say_how_many_samples_they_want(stage_of):
    async with stage_of() as stage:
        stage.queue.submit([Prompt(text="a", samples=1), Prompt(text="b"), Prompt(text="c", samples=5)])
        stage.queue.seal()
        await stage.run(samples=2)
        assert sorted(len(group.samples) for group in stage.groups(stage="ready")) == [1, 2, 5]


async def test_a_sample_that_was_saved_before_it_had_begun_gets_the_prompts_tokens(stage_of):
    async with stage_of() as stage:
        stage.queue.submit([Prompt(text="abc", samples=2)])
        stage.queue.seal()
        (lease,) = stage.queue.acquire(1)
        given = stage.queue.open(lease)
        stage.queue.yield_(given, msgspec.structs.replace(given.group, samples=(Sample(0),)))
        await stage.run()
        (group,) = stage.groups(stage="ready")
        assert [sample.prompt_tokens.tolist() for sample in group.samples] == [[100, 101, 102]] * 2


async def test_sample_level_admission_reaches_the_end_with_one_group_of_room(stage_of):
    async with stage_of() as stage:
        stage.submit(4)
        summary = await stage.run(max_concurrent_samples=2, concurrency=4)
        assert summary.counters.groups_accepted == 4


async def test_a_share_of_zero_slots_is_refused_before_a_lease(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        with pytest.raises(BadInput, match="every worker needs room"):
            await stage.run(concurrency=3, workers=2)
        assert stage.queue.counts().fresh_pending == 1


# -- hooks ----------------------------------------------------------------------------------------------------------


async def test_rewards_of_every_form_are_stored(stage_of):
    async with stage_of() as stage:
        stage.submit(3)
        await stage.run(reward=f"{HOOKS}.length", groups_max=1)
        await stage.run(reward=f"{HOOKS}:in_a_thread", groups_max=1)
        await stage.run(reward=f"{HOOKS}:whole_group", group_reward=True)
        rewards = [[sample.reward for sample in group.samples] for group in stage.groups(stage="ready")]
        assert rewards[0] == [24.0, 24.0] and rewards[2] == [0.0, 1.0]
        assert rewards[1][0] == {"score": 1.0, "length": 24}
        assert not any("MainThread" in name for name in hooks.threads)


async def test_what_a_reward_notes_in_metadata_is_kept_and_the_prompts_own_is_not_copied(stage_of):
    async with stage_of() as stage:
        stage.submit(1, metadata={"source": "book"})
        await stage.run(reward=f"{HOOKS}:annotates")
        (group,) = stage.groups(stage="ready")
        for sample in group.samples:
            assert sample.metadata == {"judge": sample.text[:3]} and sample.text


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ({"reward": f"{HOOKS}:raises"}, "ValueError: no score for g0"),
        ({"reward": f"{HOOKS}:cancelled"}, "cancelled from within"),
        ({"reward": f"{HOOKS}:exits"}, "SystemExit"),
        ({"reward": f"{HOOKS}:wrong"}, "answered 'good'"),
        ({"reward": f"{HOOKS}:huge"}, "cannot be trained on"),
        ({"reward": f"{HOOKS}:not_a_number"}, "answered nan"),
        ({"reward": f"{HOOKS}:cycle"}, "reward of sample 0 is not JSON"),
        ({"reward": f"{HOOKS}:half_a_character"}, "reward of sample 0 is not JSON"),
        ({"reward": f"{HOOKS}:notes_itself"}, "metadata of sample 0 is not JSON"),
        ({"reward": f"{HOOKS}:shows_nothing"}, "cannot be shown"),
        ({"reward": f"{HOOKS}:raises_half_a_character"}, "\\ud800"),
        ({"reward": f"{HOOKS}:stops_iteration"}, "StopIteration"),
        ({"reward": f"{HOOKS}:interrupts"}, "KeyboardInterrupt"),
        ({"reward": f"{HOOKS}:interrupts_the_loop"}, "KeyboardInterrupt"),
        ({"reward": f"{HOOKS}:leaves_a_generator"}, "GeneratorExit"),
        ({"reward": f"{HOOKS}:too_few", "group_reward": True}, "1 values for a group of 2"),
        ({"dynamic_filter": f"{HOOKS}:filter_raises"}, "KeyError"),
    ],
)
async def test_a_hook_that_raises_fails_the_attempt_with_its_reason_and_the_worker_lives(stage_of, hook, words):
    async with stage_of() as stage:
        stage.submit(1, seal=False)
        stage.pool.configure("rollout", stage_config(max_attempts=2))
        worker = stage.start(**hook)
        (dead,) = await stage.until("dead letter", stage.queue.dead_letters, worker)
        assert words in dead.reason and dead.failures == 2
        # Its tokens were saved before it failed, and the second attempt did not generate them again.
        assert dead.stage == "partial" and dead.tokens == 48
        assert stage.worker.place.counters.tokens_generated == 48 and stage.worker.place.counters.tokens_resumed == 48
        assert not worker.done()
        stage.worker.place.stop("stopped")
        assert (await worker).counters.groups_failed == 2


async def test_an_attempt_after_a_failed_one_goes_on_from_its_tokens(stage_of):
    async with stage_of() as stage:
        stage.submit(2)
        summary = await stage.run(reward=f"{HOOKS}:raises_once")
        assert summary.counters.groups_accepted == 2 and summary.counters.groups_failed >= 2
        assert summary.counters.tokens_generated == 2 * 48 and summary.counters.tokens_discarded == 0


async def test_groups_that_the_filter_refuses_are_dropped_with_their_reason(stage_of):
    async with stage_of() as stage:
        stage.submit(4)
        summary = await stage.run(reward=f"{HOOKS}:length", dynamic_filter=f"{HOOKS}:drop_even")
        assert summary.drop_reasons == {"even": 2} and summary.counters.groups_accepted == 2
        assert stage.pool.inspect().queues["rollout"].drop_reasons == {"even": 2}


@pytest.mark.parametrize("path", ["no_such_module:f", "hooks_for_tests:no_such", "nodots", "hooks_for_tests:HOOKS"])
async def test_a_hook_that_cannot_be_loaded_is_refused_before_a_lease(stage_of, path):
    async with stage_of() as stage:
        stage.submit(1)
        with pytest.raises(BadInput, match="reward hook"):
            await stage.run(reward=path)
        assert stage.queue.counts().fresh_pending == 1


async def test_a_slow_plain_hook_does_not_stop_the_event_loop(stage_of):
    async with stage_of() as stage:
        stage.submit(3)
        summary = await stage.run(reward=f"{HOOKS}:slow")
        assert summary.counters.groups_accepted == 3 and summary.counters.loop_lag_ms_mean < 150


async def test_a_stop_while_a_hook_is_at_work_gives_the_finished_samples_back(stage_of):
    hooks.release.clear()
    hooks.calls["waits"] = 0
    async with stage_of() as stage:
        stage.submit(1)
        stop = asyncio.Event()
        worker = stage.start(stop, reward=f"{HOOKS}:waits")
        await stage.until("the hook is called", lambda: hooks.calls["waits"] == 2, worker)
        stop.set()
        await stage.until("the group is back", lambda: stage.held(stage="partial", session=""))
        hooks.release.set()
        assert (await worker).counters.groups_yielded == 1
        summary = await stage.run(reward=f"{HOOKS}:length")
        assert summary.counters.tokens_generated == 0 and summary.counters.groups_accepted == 1


# -- prompts --------------------------------------------------------------------------------------------------------


async def test_a_prompt_without_tokens_or_text_is_a_dead_letter_at_once_with_the_remedy(stage_of):
    async with stage_of() as stage:
        stage.queue.submit([Prompt(messages=[{"role": "user", "content": "x"}]), Prompt(text="y")])
        stage.queue.seal()
        summary = await stage.run()
        (dead,) = stage.queue.dead_letters()
        assert "tokenize hook" in dead.reason and dead.failures == 1 and summary.counters.groups_accepted == 1


async def test_the_tokenize_hook_makes_ids_of_messages(stage_of):
    async with stage_of() as stage:
        stage.queue.submit([Prompt(messages=[{"role": "user", "content": "x"}])])
        stage.queue.seal()
        await stage.run(tokenize=f"{HOOKS}:three_tokens")
        (group,) = stage.groups(stage="ready")
        assert [sample.prompt_tokens.tolist() for sample in group.samples] == [[5, 6, 7]] * 2


async def test_a_token_id_that_would_kill_the_engine_is_a_dead_letter(stage_of):
    async with stage_of() as stage:
        stage.queue.submit([Prompt(tokens=[1, 100000]), Prompt(tokens=[4, 5])])
        stage.queue.seal()
        summary = await stage.run()
        assert "outside the vocabulary" in stage.queue.dead_letters()[0].reason
        assert summary.counters.groups_accepted == 1


# -- engines --------------------------------------------------------------------------------------------------------


async def test_an_engine_without_route_capture_is_refused_with_the_flag_to_set(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        with pytest.raises(BadInput, match="--enable-return-routed-experts"):
            await stage.run(routed_experts=True)
        assert stage.queue.counts().fresh_pending == 1


async def test_options_that_every_request_is_refused_for_stop_the_worker_before_the_queue_is_burned(stage_of):
    async with stage_of() as stage:
        stage.submit(40)
        with pytest.raises(BadInput, match="3 groups in a row were refused"):
            await stage.run(sampling_extra={"no_such_option": 1}, refusals_max=3, max_groups=1)
        assert len(stage.queue.dead_letters()) == 3 and stage.queue.counts().fresh_pending == 37


async def test_no_engine_at_the_start_is_an_error_after_the_limit_and_no_lease(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(EngineUnavailable):
                await stage.run(engines=(nowhere,), engine_timeout_s=0.5)
        assert stage.queue.counts().fresh_pending == 1


async def test_an_engine_that_dies_keeps_prefixes_and_attempts_and_the_worker_says_so(tmp_path, stage_of):
    from strawq_workers.processes import Children

    async with stage_of() as stage:
        stage.submit(2)
        (tmp_path / "logs").mkdir()
        with Children(tmp_path / "logs") as children:
            engine = children.start(
                "engine", ["-m", "strawq_workers.engine", "--tokens-per-second", "10", "--weight-version", "1"]
            )
            url = await asyncio.to_thread(engine.first_line, 30)
            worker = stage.start(engines=(url,), save_tokens=4, max_new_tokens=400, engine_timeout_s=1.0)
            await stage.until("progress is saved", lambda: len(stage.held(stage="partial")) == 2, worker)
            await asyncio.to_thread(engine.kill)
            with pytest.raises(EngineUnavailable, match="no engine"):
                await asyncio.wait_for(worker, 30)
        back = stage.held(stage="partial", session="")
        assert len(back) == 2 and all(held.task.failures == 0 and held.task.tokens for held in back)
        saved = sum(held.task.tokens for held in back)
        summary = await stage.run()
        assert summary.counters.groups_accepted == 2 and summary.counters.tokens_resumed == saved
        assert summary.counters.tokens_generated == 2 * 48 - saved


# -- prefixes -------------------------------------------------------------------------------------------------------


async def test_a_stop_saves_prefixes_and_another_worker_resumes_them_token_by_token(stage_of):
    async with stage_of(enable_return_routed_experts=True) as stage:
        stage.submit(3)
        stop = asyncio.Event()
        stage.stand_at(5)
        worker = stage.start(stop, routed_experts=True)
        await stage.until("requests are in mid-generation", lambda: stage.standing() == 6, worker)
        stop.set()
        first = await worker
        assert first.reason == "signal" and first.counters.groups_yielded == 3 and first.counters.aborts == 6
        before = {group.task_id: group for group in stage.groups(stage="partial", session="")}
        assert sum(token_count(group) for group in before.values()) == first.counters.tokens_generated > 0
        await stage.go_on()
        summary = await stage.run(routed_experts=True)
        assert summary.counters.tokens_resumed == first.counters.tokens_generated
        assert summary.counters.tokens_generated == 3 * 48 - first.counters.tokens_generated
        for group in stage.groups(stage="ready"):
            old = {sample.index: sample for sample in before[group.task_id].samples}
            for sample in group.samples:
                kept = old[sample.index]
                assert sample.tokens[: len(kept.tokens)].tolist() == kept.tokens.tolist()
                assert sample.logprobs[: len(kept.tokens)].tolist() == kept.logprobs.tolist()
                assert (sample.r3[: len(kept.r3)] == kept.r3[:]).all() and len(sample.tokens) == 24


async def test_a_long_request_is_cut_saved_and_continued_every_so_many_seconds(stage_of):
    async with stage_of(tokens_per_second=40) as stage:
        stage.submit(1)
        worker = stage.start(save_seconds=0.3, max_new_tokens=60)
        (held,) = await stage.until("a save under the lease", lambda: stage.held(stage="partial"), worker)
        assert held.task.session and held.task.tokens
        summary = await worker
        assert summary.counters.aborts >= 2 and summary.counters.saves >= 1
        assert summary.counters.tokens_generated == 120 and summary.counters.groups_accepted == 1


async def test_without_partial_rollout_no_prefix_is_kept_and_no_sample_is_of_two_requests(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        # A prefix that a worker with partial rollout has left.
        stop = asyncio.Event()
        stage.stand_at(3)
        worker = stage.start(stop)
        await stage.until("requests are in mid-generation", lambda: stage.standing() == 2, worker)
        stop.set()
        await worker
        (held,) = stage.held(stage="partial", session="")
        again = asyncio.Event()
        worker = stage.start(again, partial_rollout=False)
        await stage.until("requests are in mid-generation", lambda: stage.standing() == 2, worker)
        again.set()
        second = await worker
        assert second.counters.tokens_discarded >= held.task.tokens and second.counters.tokens_resumed == 0
        await stage.go_on()
        await stage.run(partial_rollout=False)
        (group,) = stage.groups(stage="ready")
        for sample in group.samples:
            assert len(sample.segments) == 1 and len(sample.tokens) == 24


async def test_a_prefix_of_other_sampling_options_fails_the_attempt_and_stays(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        stop = asyncio.Event()
        stage.stand_at(3)
        worker = stage.start(stop, temperature=0.5)
        await stage.until("requests are in mid-generation", lambda: stage.standing() == 2, worker)
        stop.set()
        await worker
        (held,) = stage.held(stage="partial")
        await stage.go_on()
        with pytest.raises(BadInput, match="other options"):
            await stage.run(refusals_max=2)
        (after,) = stage.held(stage="partial")
        assert after.task.tokens == held.task.tokens and after.task.failures == 2 and not after.task.failed
        summary = await stage.run(changed_sampling="mark")
        assert summary.counters.groups_accepted == 1
        (group,) = stage.groups(stage="ready")
        assert any(sample.metadata.get("mixed_sampling") for sample in group.samples)


async def test_reports_of_many_groups_share_commits(stage_of):
    async with stage_of() as stage:
        stage.submit(24)
        summary = await stage.run(concurrency=64, max_new_tokens=4)
        assert summary.counters.groups_accepted == 24 and summary.counters.commits < 24


async def test_a_pool_directory_that_is_none_is_named(tmp_path, stage_of):
    async with stage_of() as stage:
        with pytest.raises(BadInput, match="is not a"):
            await work(tmp_path / "nothing", stage.options())


def stage_config(**fields):
    from strawq import QueueConfig

    return QueueConfig(**fields)
