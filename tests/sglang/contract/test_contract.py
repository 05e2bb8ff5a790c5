"""What strawq relies on in an engine, asked of each engine: embedded ones always, a real SGLang when one is given."""

from __future__ import annotations

import asyncio
import itertools
import os
import time

import msgspec
import numpy as np
import pytest

from strawq.errors import BadInput, EngineUnavailable, TryAgain
from strawq_workers.sglang import EngineClient, Fleet, GenerateRequest, PauseMode, Sampling, Segment
from tests.sglang.conftest import quick, until

IDS = np.arange(10, 18, dtype=np.int32)
LONG = Sampling(max_new_tokens=450, ignore_eos=True)
SHORT = Sampling(max_new_tokens=12, ignore_eos=True)
GREEDY = Sampling(max_new_tokens=12, ignore_eos=True, temperature=0.0)
VERSIONS = itertools.count(int(time.time()))
IDLE = ("abort", "in_place", "retract")


def has_routes(engine: EngineClient) -> bool:
    return engine.server.enable_return_routed_experts is True


def ask(engine: EngineClient, sampling: Sampling, **fields: object) -> GenerateRequest:
    fields.setdefault("routed_experts", has_routes(engine))
    return GenerateRequest(input_ids=fields.pop("ids", IDS), sampling=sampling, **fields)  # type: ignore[arg-type]


def aligned(engine: EngineClient, request: GenerateRequest, made: Segment) -> Segment:
    n = made.tokens
    assert made.output_ids.dtype == np.int32 and made.output_ids.shape == (n,)
    if request.logprobs:
        assert made.logprobs is not None and made.logprobs.dtype == np.float32 and made.logprobs.shape == (n,)
    assert [span.start for span in made.versions] + [n] == [0] + [span.end for span in made.versions]
    if request.routed_experts and n:
        rows = request.input_ids.size + n - 1 - request.routed_start
        assert made.routed_experts is not None
        assert made.routed_experts.shape == (rows, engine.shape.layers, engine.shape.topk)
    return made


async def running(engine: EngineClient, count: int = 1) -> None:
    for _ in range(500):
        if (await engine.loads()).running >= count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"fewer than {count} requests run")


async def idle(engine: EngineClient, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not (await engine.loads()).idle:
        assert time.monotonic() < end, "the engine is not idle"
        await asyncio.sleep(0.05)


async def test_it_says_what_it_is(engine: EngineClient) -> None:
    assert engine.shape.vocab_size >= 300 and engine.shape.context_tokens == 512
    assert await engine.weight_version()
    assert (await engine.loads()).idle
    if has_routes(engine):
        assert engine.shape.layers and engine.shape.topk and engine.shape.experts


async def test_all_fields_of_an_answer_line_up(engine: EngineClient) -> None:
    request = ask(engine, SHORT, top_logprobs=4)
    made = aligned(engine, request, await engine.attempt(request))
    assert made.tokens == 12 and made.finish == "length" and made.prompt_tokens == 8
    assert made.versions[0].version == await engine.weight_version()
    assert made.top_ids is not None and made.top_logprobs is not None
    assert made.top_ids.shape == made.top_logprobs.shape == (12, 4)
    assert (np.diff(made.top_logprobs, axis=1) <= 1e-6).all()


async def test_streams_and_whole_answers_say_the_same(engine_url: str, engine: EngineClient) -> None:
    answers = []
    for stream in (False, True):
        client = EngineClient(engine_url, quick(stream=stream))
        await client.connect()
        request = ask(client, GREEDY, top_logprobs=2)
        answers.append(aligned(client, request, await client.attempt(request)))
        await client.close()
    whole, streamed = answers
    assert np.array_equal(whole.output_ids, streamed.output_ids)
    assert whole.logprobs is not None and streamed.logprobs is not None
    np.testing.assert_allclose(whole.logprobs, streamed.logprobs, atol=0.05)
    assert np.array_equal(whole.top_ids, streamed.top_ids)  # type: ignore[arg-type]


async def test_a_stop_token_ends_the_answer_and_stays_in_it(engine: EngineClient) -> None:
    greedy = await engine.attempt(ask(engine, GREEDY))
    stop = int(greedy.output_ids[3])
    first = greedy.output_ids.tolist().index(stop)
    sampling = Sampling(max_new_tokens=12, temperature=0.0, stop_token_ids=(stop,))
    request = ask(engine, sampling)
    made = aligned(engine, request, await engine.attempt(request))
    assert made.finish == "stop" and made.output_ids.tolist() == greedy.output_ids[: first + 1].tolist()


async def test_routes_from_a_later_start_are_the_tail_of_the_full_ones(engine: EngineClient) -> None:
    if not has_routes(engine):
        with pytest.raises(BadInput, match="--enable-return-routed-experts"):
            await engine.attempt(ask(engine, SHORT, routed_experts=True))
        # An engine that keeps quiet about the flag answers without routes: the first answer fails.
        engine.server = msgspec.structs.replace(engine.server, enable_return_routed_experts=None)
        engine._shape = msgspec.structs.replace(engine.shape, layers=2, topk=2)
        with pytest.raises(BadInput, match="--enable-return-routed-experts"):
            await engine.attempt(ask(engine, SHORT, routed_experts=True))
        return
    full = await engine.attempt(ask(engine, GREEDY))
    tail = await engine.attempt(ask(engine, GREEDY, routed_start=5))
    aligned(engine, ask(engine, GREEDY, routed_start=5), tail)
    assert full.routed_experts is not None and tail.routed_experts is not None
    assert np.array_equal(full.output_ids, tail.output_ids)
    assert tail.routed_experts.shape[0] == full.routed_experts.shape[0] - 5
    assert (tail.routed_experts == full.routed_experts[5:]).mean() > 0.9  # batching may turn a near tie


async def test_a_stopped_request_keeps_its_tokens_and_can_be_continued(engine: EngineClient) -> None:
    stop = asyncio.Event()
    request = ask(engine, LONG)
    attempt = asyncio.ensure_future(engine.attempt(request, stop))
    await running(engine)
    await asyncio.sleep(0.3)
    stop.set()
    made = aligned(engine, request, await attempt)
    assert made.finish == "abort" and 0 < made.tokens < 450
    await idle(engine)
    prefix = np.concatenate([IDS, made.output_ids])
    rest = ask(engine, Sampling(max_new_tokens=9, ignore_eos=True), ids=prefix, routed_start=prefix.size - 1)
    more = aligned(engine, rest, await engine.attempt(rest))
    assert more.tokens == 9
    if made.routed_experts is not None and more.routed_experts is not None:
        stitched = np.concatenate([made.routed_experts, more.routed_experts])
        assert stitched.shape[0] == IDS.size + made.tokens + more.tokens - 1


async def test_stopping_one_request_leaves_the_others_alone(engine: EngineClient) -> None:
    stop = asyncio.Event()
    other = asyncio.ensure_future(engine.attempt(ask(engine, Sampling(max_new_tokens=120, ignore_eos=True))))
    stopped = asyncio.ensure_future(engine.attempt(ask(engine, LONG), stop))
    await running(engine, 2)
    stop.set()
    assert (await stopped).finish == "abort"
    assert (await other).finish == "length" and (await other).tokens == 120


async def test_abort_all_ends_with_an_idle_engine(engine: EngineClient) -> None:
    request = ask(engine, LONG)
    attempts = [asyncio.ensure_future(engine.attempt(request)) for _ in range(4)]
    await running(engine, 4)
    await engine.abort_all()
    assert (await engine.loads()).idle
    for made in await asyncio.gather(*attempts):
        assert aligned(engine, request, made).finish == "abort"


async def test_a_cancelled_caller_leaves_an_idle_engine(engine: EngineClient) -> None:
    attempt = asyncio.ensure_future(engine.attempt(ask(engine, LONG)))
    await running(engine)
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    await idle(engine, 8.0)


async def test_a_pause_that_aborts_brings_the_tokens(engine: EngineClient) -> None:
    request = ask(engine, LONG)
    attempt = asyncio.ensure_future(engine.attempt(request))
    await running(engine)
    await engine.pause("abort")
    made = aligned(engine, request, await attempt)
    assert made.finish == "abort" and made.tokens < 450


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_weight_update_in_mid_request_is_seen_in_its_versions(engine: EngineClient, mode: PauseMode) -> None:
    before = await engine.weight_version()
    after = str(next(VERSIONS))
    request = ask(engine, Sampling(max_new_tokens=400, ignore_eos=True))
    attempt = asyncio.ensure_future(engine.attempt(request))
    await running(engine)
    await asyncio.sleep(0.3)
    await engine.pause(mode)
    await engine.update_weights_from_disk(engine.model.model_path, after, flush_cache=mode == "retract")
    assert await engine.weight_version() == after
    await engine.resume()
    made = aligned(engine, request, await attempt)
    assert made.finish == "length" and made.tokens == 400
    assert [span.version for span in made.versions] == [before, after]
    assert 0 < made.versions[0].end < 400


@pytest.mark.parametrize("mode", IDLE)
async def test_a_paused_engine_is_held_and_lets_nothing_through(engine: EngineClient, mode: PauseMode) -> None:
    await engine.pause(mode)
    started = time.monotonic()
    await engine.probe()
    assert engine.state == "held" and time.monotonic() - started < 5
    stop = asyncio.Event()
    attempt = asyncio.ensure_future(engine.attempt(ask(engine, SHORT), stop))
    done, _ = await asyncio.wait({attempt}, timeout=0.5)
    assert not done
    stop.set()
    made = await attempt
    assert made.finish == "abort" and made.tokens == 0
    await engine.resume()
    await engine.probe()
    assert engine.state == "up"
    await idle(engine)


async def test_a_request_stopped_after_a_retract_is_aligned(engine: EngineClient) -> None:
    stop = asyncio.Event()
    request = ask(engine, LONG)
    attempt = asyncio.ensure_future(engine.attempt(request, stop))
    await running(engine)
    await asyncio.sleep(0.3)
    await engine.pause("retract")
    stop.set()
    made = aligned(engine, request, await attempt)
    assert made.finish == "abort" and made.tokens < 450


async def test_the_cache_is_flushed_when_idle_and_not_when_busy(engine: EngineClient) -> None:
    await engine.flush_cache()
    attempt = asyncio.ensure_future(engine.attempt(ask(engine, LONG)))
    await running(engine)
    with pytest.raises(TryAgain, match="busy"):
        await engine.flush_cache(deadline_s=0.1)
    await engine.abort_all()
    await attempt
    await engine.flush_cache()


@pytest.mark.parametrize("stream", [False, True])
async def test_permanent_refusals_are_bad_input(engine_url: str, engine: EngineClient, stream: bool) -> None:
    open_shape = msgspec.structs.replace(engine.shape, context_tokens=0)
    client = EngineClient(engine_url, quick(stream=stream), open_shape)
    await client.connect()
    too_long = np.full(600, 5, dtype=np.int32)
    for request in (
        ask(client, SHORT, ids=too_long),
        ask(client, Sampling(max_new_tokens=8, temperature=-1.0)),
        ask(client, Sampling(max_new_tokens=8, extra={"no_such_parameter": 1})),
    ):
        with pytest.raises(BadInput):
            await client.attempt(request)
    await client.close()
    assert (await engine.attempt(ask(engine, SHORT))).tokens == 12  # it lives


async def test_ids_outside_the_vocabulary_leave_the_engine_alive(engine: EngineClient) -> None:
    for token in (-1, engine.shape.vocab_size, 100_000):
        with pytest.raises(BadInput, match="vocabulary"):
            await engine.attempt(ask(engine, SHORT, ids=np.array([5, token], dtype=np.int64)))
    assert (await engine.attempt(ask(engine, SHORT))).tokens == 12


async def test_weights_that_do_not_exist_are_refused(engine: EngineClient) -> None:
    version = await engine.weight_version()
    with pytest.raises(BadInput):
        await engine.update_weights_from_disk("/no/such/model", "9")
    assert await engine.weight_version() == version


async def test_a_fleet_of_it_serves_many_requests(engine_url: str, engine: EngineClient) -> None:
    async with await Fleet.open([engine_url], quick(concurrency=4)) as fleet:
        request = ask(engine, SHORT)
        segments = await asyncio.gather(*(fleet.generate(request) for _ in range(12)))
        for made in segments:
            assert aligned(engine, request, made).finish == "length"
        await until(lambda: fleet.engines[0].claimed == 0)


@pytest.mark.skipif(not os.environ.get("STRAWQ_SGLANG_ROUTER_URL"), reason="STRAWQ_SGLANG_ROUTER_URL is not set")
async def test_a_real_router_is_gone_round_for_routes() -> None:
    async with await Fleet.open([os.environ["STRAWQ_SGLANG_ROUTER_URL"]], quick()) as fleet:
        engine = fleet.engines[0]
        made = await fleet.generate(GenerateRequest(input_ids=IDS, sampling=SHORT))
        assert made.engine_url == os.environ["STRAWQ_SGLANG_ROUTER_URL"].rstrip("/")
        if has_routes(engine):
            request = ask(engine, SHORT)
            direct = aligned(engine, request, await fleet.generate(request))
            assert direct.engine_url == engine.url
        stop = asyncio.Event()
        long = asyncio.ensure_future(fleet.generate(GenerateRequest(input_ids=IDS, sampling=LONG), stop))
        await running(engine)
        stop.set()
        assert (await long).finish == "abort"


async def test_an_engine_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(EngineUnavailable):
        await Fleet.open(["http://127.0.0.1:9"], quick(start_timeout_s=0.1))
