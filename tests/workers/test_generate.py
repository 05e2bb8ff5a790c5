"""Generate functions: agent loops over several turns, what they may add, and what ends them."""

import asyncio

import generate_functions as functions
import numpy as np
import pytest
from test_around import load_weights

from strawq import QueueConfig
from strawq.errors import BadInput, EngineUnavailable

G = "generate_functions"


@pytest.fixture(autouse=True)
async def fresh():
    functions.reset()


def agent(name: str, **changes):
    return {"generate": f"{G}:{name}", "max_new_tokens": 60, **changes}


def check_agent_sample(sample, prompt: int, *, routes: bool) -> None:
    """Three turns of six and two tool answers of three."""
    assert len(sample.tokens) == 24 and sample.status == "completed"
    tool = [*range(6, 9), *range(15, 18)]
    assert [at for at, flag in enumerate(sample.loss_mask) if not flag] == tool
    assert sample.tokens[6:9].tolist() == functions.TOOL == sample.tokens[15:18].tolist()
    assert all(sample.logprobs[at] == 0.0 for at in tool) and (sample.logprobs[:6] < 0).any()
    spans = [(span.start, span.end, span.version) for span in sample.versions]
    assert [(start, end) for start, end, _ in spans] == [(0, 6), (6, 9), (9, 15), (15, 18), (18, 24)]
    assert [version for _, _, version in spans][1::2] == ["", ""]
    assert [(info.start, info.end) for info in sample.segments] == [(0, 6), (9, 15), (18, 24)]
    if routes:
        assert len(sample.r3[:]) == prompt + 23
        # Tool tokens were read by the model, so their rows are real ones: no row is a copy of a padding row.
        assert (sample.r3[:] >= 0).all() and sample.sc.ids.shape == (24, 2)
        assert np.allclose(np.exp(sample.sc.logprobs[:][6:9]).sum(axis=1), 1.0)


@pytest.mark.parametrize("routes", [False, True])
async def test_an_agent_loop_with_tools_makes_one_aligned_sample(stage_of, routes):
    async with stage_of(enable_return_routed_experts=True) as stage:
        stage.submit(3)
        captures = {"routed_experts": True, "top_logprobs": 2} if routes else {}
        summary = await stage.run(**agent("two_tools", **captures))
        assert summary.counters.groups_accepted == 3 and summary.counters.tokens_generated == 3 * 2 * 18
        for group in stage.groups(stage="ready"):
            for sample in group.samples:
                check_agent_sample(sample, len(sample.prompt_tokens), routes=routes)
                assert sample.metadata == {"tools": 2} and sample.text.count("<tool>") == 2


async def test_routes_of_turns_are_those_of_the_whole_sequence_read_at_once(stage_of):
    """R3 rows stitched over turns equal what one pass over prompt + response gives, at the same weights."""
    from strawq_workers.sglang.fleet import Fleet
    from strawq_workers.sglang.wire import GenerateRequest, Sampling

    async with stage_of(enable_return_routed_experts=True) as stage:
        stage.submit(1)
        await stage.run(**agent("two_tools", routed_experts=True))
        (group,) = stage.groups(stage="ready")
        async with await Fleet.open([stage.url], stage.options().engine_options()) as fleet:
            for sample in group.samples:
                ids = np.concatenate([sample.prompt_tokens, sample.tokens])
                whole = await fleet.generate(
                    GenerateRequest(input_ids=ids, sampling=Sampling(max_new_tokens=1), routed_experts=True)
                )
                assert (whole.routed_experts[: len(ids) - 1] == sample.r3[:]).all()


async def test_an_agent_loop_is_resumed_by_another_worker_in_the_middle_of_a_turn(stage_of):
    async with stage_of(enable_return_routed_experts=True) as stage:
        stage.submit(1)
        stage.stand_in_the_second_request()
        stop = asyncio.Event()
        worker = stage.start(stop, **agent("two_tools", routed_experts=True))
        await stage.until("a tool has answered, and the next turn runs", lambda: stage.standing() == 2, worker)
        stop.set()
        first = await worker
        assert first.counters.groups_yielded == 1
        (before,) = stage.groups(stage="partial", session="")
        await stage.go_on()
        summary = await stage.run(**agent("two_tools", routed_experts=True))
        assert summary.counters.tokens_generated == 2 * 18 - first.counters.tokens_generated
        (group,) = stage.groups(stage="ready")
        for sample, old in zip(group.samples, before.samples, strict=True):
            check_agent_sample_loosely(sample)
            assert sample.tokens[: len(old.tokens)].tolist() == old.tokens.tolist() and sample.metadata == {"tools": 2}


def check_agent_sample_loosely(sample) -> None:
    assert (
        len(sample.tokens) == 24
        and sample.status == "completed"
        and len(sample.r3[:]) == len(sample.prompt_tokens) + 23
    )
    assert [at for at, flag in enumerate(sample.loss_mask) if not flag] == [*range(6, 9), *range(15, 18)]


async def test_a_turn_that_ended_is_durable_before_its_tool_runs(stage_of):
    """A SIGKILL in a tool loses no token: the lease is taken away, and what the next worker loads holds the turn."""
    async with stage_of() as stage:
        stage.submit(1)
        worker = stage.start(**agent("waits_in_a_tool"))
        await asyncio.wait_for(functions.gate.entered.wait(), 20)
        await stage.until("both turns are saved as ended", lambda: ended_turns(stage) == [[0, 6, "length"]] * 2, worker)
        functions.gate.release.set()
        assert (await worker).counters.groups_accepted == 1
        (group,) = stage.groups(stage="ready")
        assert [set(sample.metadata) for sample in group.samples] == [{"first"}, {"first"}]


def ended_turns(stage) -> list:
    return [sample.metadata.get("strawq_turn") for group in stage.groups(stage="partial") for sample in group.samples]


async def test_a_function_is_told_to_stop_by_its_next_turn_and_its_metadata_survive(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        stop = asyncio.Event()
        worker = stage.start(stop, **agent("waits_in_a_tool"))
        await asyncio.wait_for(functions.gate.entered.wait(), 20)
        await stage.until("both turns are saved", lambda: stage.held(tokens=12), worker)
        stop.set()
        (run,) = stage.worker.runs.values()
        await asyncio.wait_for(run.stop.wait(), 20)
        assert not worker.done()
        functions.gate.release.set()
        assert (await worker).counters.groups_yielded == 1
        assert functions.calls["stopped"] == 2, "a function that asks again after an abort is ended"
        (group,) = stage.groups(stage="partial", session="")
        assert all(sample.metadata["first"] == sample.tokens.tolist() for sample in group.samples)
        summary = await stage.run(**agent("waits_in_a_tool"))
        assert summary.counters.tokens_resumed == 12 and summary.counters.tokens_generated == 12


async def test_a_function_that_does_not_stop_is_cancelled_after_the_limit(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        stop = asyncio.Event()
        worker = stage.start(stop, **agent("waits_in_a_tool", abort_timeout_s=0.3))
        await asyncio.wait_for(functions.gate.entered.wait(), 20)
        await stage.until("both turns are saved", lambda: stage.held(tokens=12), worker)
        stop.set()
        assert (await asyncio.wait_for(worker, 20)).counters.groups_yielded == 1


async def test_a_function_that_is_cancelled_by_requests_keeps_the_tokens_of_the_turn_under_way(stage_of):
    async with stage_of() as stage:
        functions.gate.release.set()
        stage.submit(1)
        stage.stand_at(3)
        stop = asyncio.Event()
        worker = stage.start(stop, **agent("cancellable"))
        await stage.until("the first turn is under way", lambda: stage.standing() == 2, worker)
        stop.set()
        first = await worker
        (group,) = stage.groups(stage="partial", session="")
        kept = sum(len(sample.tokens) for sample in group.samples)
        assert kept == first.counters.tokens_generated > 0 and first.counters.tokens_discarded == 0
        await stage.go_on()
        summary = await stage.run(**agent("cancellable"))
        assert summary.counters.tokens_generated == 24 - kept
        (group,) = stage.groups(stage="ready")
        assert all(sample.metadata["first"] == sample.tokens[:6].tolist() for sample in group.samples)


# -- pauses ---------------------------------------------------------------------------------------------------------


def acknowledged(stage) -> bool:
    paused = stage.pool.inspect().paused
    return paused is not None and stage.worker.place.queue.session in paused.acknowledged


async def test_a_pause_holds_a_function_inside_its_turn_and_it_notices_nothing(stage_of):
    async with stage_of(enable_return_routed_experts=True) as stage:
        stage.submit(1)
        stage.stand_in_the_second_request()
        worker = stage.start(**agent("two_tools", routed_experts=True))
        await stage.until("the second turn runs", lambda: stage.standing() == 2, worker)
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the pause is acknowledged", lambda: acknowledged(stage), worker)
        assert stage.in_flight() == 0 and stage.engine._scheduler.loads().running == 0
        await stage.go_on()
        await asyncio.to_thread(stage.pool.resume)
        await worker
        assert functions.calls["two_tools"] == 2, "called once for each sample"
        (group,) = stage.groups(stage="ready")
        for sample in group.samples:
            check_agent_sample_loosely(sample)


async def test_a_pause_is_acknowledged_while_a_tool_runs(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        worker = stage.start(**agent("waits_in_a_tool"))
        await asyncio.wait_for(functions.gate.entered.wait(), 20)
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the pause is acknowledged", lambda: acknowledged(stage), worker)
        functions.gate.release.set()
        await asyncio.to_thread(stage.pool.resume)
        assert (await worker).counters.groups_accepted == 1


async def test_a_pause_cancels_functions_that_ask_for_it_and_calls_them_again(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        worker = stage.start(**agent("cancellable"))
        await asyncio.wait_for(functions.gate.entered.wait(), 20)
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the pause is acknowledged", lambda: acknowledged(stage), worker)
        assert functions.calls["waits_in_a_tool"] == 2
        functions.gate.release.set()
        await asyncio.to_thread(stage.pool.resume)
        summary = await worker
        assert summary.counters.tokens_generated == 24 and functions.calls["waits_in_a_tool"] == 4


async def test_a_pause_waits_for_a_function_that_speaks_to_engines_by_itself(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        worker = stage.start(**agent("outside"))
        await asyncio.wait_for(functions.gate.entered.wait(), 20)
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the worker sees the pause", lambda: stage.worker.watcher.paused, worker)
        assert not acknowledged(stage)
        functions.gate.release.set()
        await stage.until("the pause is acknowledged", lambda: acknowledged(stage), worker)
        await asyncio.to_thread(stage.pool.resume)
        await worker


async def test_without_partial_rollout_a_stop_or_a_pause_makes_the_sample_start_anew(stage_of):
    whole = agent("two_tools", partial_rollout=False)
    async with stage_of() as stage:
        stage.submit(1)
        stage.stand_in_the_second_request()
        stop = asyncio.Event()
        worker = stage.start(stop, **whole)
        await stage.until("the second turn runs", lambda: stage.standing() == 2, worker)
        stop.set()
        first = await worker
        (group,) = stage.groups(session="")
        assert group.samples == () and first.counters.tokens_discarded == first.counters.tokens_generated > 0
        worker = stage.start(**whole)
        await stage.until("the second turn runs again", lambda: stage.standing() == 2, worker)
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the pause is acknowledged", lambda: acknowledged(stage), worker)
        await stage.go_on()
        await load_weights(stage, "2")
        await asyncio.to_thread(stage.pool.resume, 2)
        second = await worker
        assert second.counters.tokens_resumed == 0 and second.counters.tokens_discarded > 0
        (group,) = stage.groups(stage="ready")
        for sample in group.samples:
            assert len(sample.tokens) == 24 and len({span.version for span in sample.versions if span.version}) == 1


# -- what a function may add ----------------------------------------------------------------------------------------


async def test_a_function_of_slimes_shape_that_changes_fields_itself_is_taken_at_its_word(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        await stage.run(**agent("by_itself"))
        (group,) = stage.groups(stage="ready")
        for sample in group.samples:
            assert sample.tokens.tolist() == [10, 11, 12, 13] and sample.loss_mask.tolist() == [1, 1, 0, 1]
            assert sample.logprobs.tolist() == [-0.5, -0.5, 0.0, -0.25] and sample.reward == 0.5
            assert [(s.start, s.end, s.version) for s in sample.versions] == [(0, 4, "3")] and sample.text == "mine"


async def test_tokens_appended_with_the_engines_meta_info_carry_its_version_and_end(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        await stage.run(**agent("appends_with_meta"))
        (group,) = stage.groups(stage="ready")
        for sample in group.samples:
            assert sample.tokens.tolist() == [5, 6, 7] and sample.loss_mask.tolist() == [1, 1, 0]
            assert [(s.start, s.end, s.version) for s in sample.versions] == [(0, 2, "4"), (2, 3, "")]
            assert (sample.status, sample.finish_reason, sample.text) == ("completed", "stop", "abc")


async def test_a_copy_of_the_sample_and_a_list_of_one_are_taken(stage_of):
    async with stage_of() as stage:
        stage.submit(2)
        await stage.run(**agent("copies", groups_max=1))
        summary = await stage.run(**agent("with_evaluation", evaluation=True))
        assert summary.counters.groups_accepted == 1 and functions.seen == [True, True]
        assert all(len(sample.tokens) == 60 for group in stage.groups(stage="ready") for sample in group.samples)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short_mask", "6 response tokens, its loss mask 4 entries"),
        ("short_logprobs", "3 tokens came with 1 log-probs"),
        ("swallows", "3 tokens came with 1 log-probs"),
        ("changes_tokens", "tokens are only added"),
        ("fans_out", "returned 2 samples for sample"),
        ("answers_none", "return the sample that it was given"),
        ("stays_pending", "status 'pending'"),
        ("raises", "ZeroDivisionError: no turn today"),
        ("exits", "SystemExit"),
        ("leaks_a_cancellation", "cancelled from within"),
        # It is begun anew with growing pauses before it is given up: eight seconds.
        pytest.param("always_aborted", "nobody has told it to stop", marks=pytest.mark.campaign),
    ],
)
async def test_a_function_that_goes_wrong_fails_the_attempt_with_its_reason_and_the_worker_lives(stage_of, name, words):
    async with stage_of() as stage:
        stage.pool.configure("rollout", QueueConfig(max_attempts=2))
        stage.submit(1, seal=False)
        worker = stage.start(**agent(name))
        (dead,) = await stage.until("a dead letter", stage.queue.dead_letters, worker)
        assert words in dead.reason and dead.failures == 2 and not worker.done()
        stage.worker.place.stop("stopped")
        await worker


async def test_an_engine_that_does_not_answer_burns_no_attempt_even_if_the_function_swallows_it(stage_of):
    async with stage_of() as stage:
        worker = stage.start(**agent("swallows_engine_trouble"))
        await stage.until("the worker is up", lambda: stage.worker, worker)
        fleet, refused = stage.worker.place.fleet, []
        generate = fleet.generate

        async def first_is_refused(request, stop=None):
            if not refused:
                refused.append(request)
                raise EngineUnavailable("nobody is there")
            return await generate(request, stop)

        fleet.generate = first_is_refused
        await asyncio.to_thread(stage.submit, 1)
        summary = await worker
        assert summary.counters.groups_yielded == 1 and summary.counters.groups_accepted == 1
        (held,) = stage.held(stage="ready")
        assert held.task.failures == 0 and summary.counters.tokens_generated == 2 * 60


async def test_a_response_that_ends_in_unread_tokens_has_no_routes_for_them_and_fails_with_the_counts(stage_of):
    async with stage_of(enable_return_routed_experts=True) as stage:
        stage.pool.configure("rollout", QueueConfig(max_attempts=1))
        stage.submit(1)
        await stage.run(**agent("ends_in_tool", routed_experts=True))
        (dead,) = stage.queue.dead_letters()
        (group,) = stage.groups(failed=True)
        rows = len(group.samples[0].prompt_tokens) + 5
        assert f"R3 has {rows} rows where {rows + 3} are due" in dead.reason


async def test_without_routes_a_response_may_end_in_tool_tokens(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        await stage.run(**agent("ends_in_tool"))
        (group,) = stage.groups(stage="ready")
        assert all(sample.loss_mask.tolist() == [1] * 6 + [0] * 3 for sample in group.samples)


async def test_tool_output_that_fills_the_budget_truncates_without_a_request(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        summary = await stage.run(**agent("two_tools", max_new_tokens=9))
        (group,) = stage.groups(stage="ready")
        assert all(len(sample.tokens) == 12 for sample in group.samples), "a turn of none, and one more tool answer"
        assert summary.counters.requests == 2


@pytest.mark.parametrize(("options", "words"), [
    ({"generate": f"{G}:plain"}, "coroutine function"),
    ({"generate": f"{G}:nothing"}, "no 'nothing'"),
])  # fmt: skip
async def test_a_function_that_could_not_be_obeyed_is_refused_before_a_lease(stage_of, options, words):
    async with stage_of() as stage:
        stage.submit(1)
        with pytest.raises(BadInput, match=words):
            await stage.run(**options)
        assert stage.queue.counts().fresh_pending == 1


# -- sample hooks ---------------------------------------------------------------------------------------------------


async def test_sample_hooks_run_in_order_before_the_reward_and_what_they_may_change_is_kept(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        hooks = (f"{G}:marks", f"{G}.scores")
        await stage.run(sample_hooks=hooks, reward="hooks_for_tests:raises", evaluation=True)
        (group,) = stage.groups(stage="ready")
        for sample in group.samples:
            assert sample.reward == {"score": 2.0} and sample.metadata == {"seen_by": "marks"}
            assert sample.loss_mask.tolist() == [0] * 4 + [1] * 20 and len(sample.text) == 3
        assert functions.seen == [(None, True)] * 2, "a reward hook is not asked for what a sample hook has scored"


async def test_a_sample_that_a_hook_removes_is_masked_and_marked(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        await stage.run(sample_hooks=(f"{G}:removes_odd",))
        (group,) = stage.groups(stage="ready")
        assert [sample.loss_mask.sum() for sample in group.samples] == [24, 0]
        assert [sample.metadata for sample in group.samples] == [{}, {"remove_sample": True}]


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("hook_wrong_type", "return the sample, or None"),
        ("hook_short_mask", "loss mask has 1 entries, the response 24 tokens"),
        ("hook_adds_tokens", "only a generate function makes tokens"),
        ("hook_raises", "LookupError: no such sample"),
    ],
)
async def test_a_sample_hook_that_goes_wrong_fails_the_attempt_with_its_reason(stage_of, hook, words):
    async with stage_of() as stage:
        stage.pool.configure("rollout", QueueConfig(max_attempts=1))
        stage.submit(1)
        summary = await stage.run(sample_hooks=(f"{G}:{hook}",))
        (dead,) = stage.queue.dead_letters()
        assert words in dead.reason and hook in dead.reason and summary.counters.groups_failed == 1
        assert dead.tokens == 48, "what was generated is kept"
