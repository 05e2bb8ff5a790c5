"""One engine that aborts late, drops connections, pauses, lies, or dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from strawq.errors import BadInput, EngineUnavailable, Misaligned, TryAgain
from strawq.model import VersionSpan
from strawq_workers.sglang import EngineClient, GenerateRequest, Sampling
from tests.sglang.conftest import quick, until
from tests.sglang.stub import Stub, cut_body, cut_stream, drop, sse, status

REQUEST = GenerateRequest(input_ids=np.array([5, 6, 7], dtype=np.int32), sampling=Sampling(max_new_tokens=4))


@pytest.fixture
async def engine(stub: Stub) -> AsyncIterator[EngineClient]:
    client = EngineClient(stub.url, quick())
    await client.probe()
    assert client.state == "up"
    yield client
    await client.close()


async def test_a_whole_answer_and_its_fields(engine: EngineClient, stub: Stub) -> None:
    made = await engine.attempt(REQUEST)
    assert made.output_ids.dtype == np.int32 and made.output_ids.tolist() == [1, 2, 3, 4]
    assert made.logprobs is not None and made.logprobs.dtype == np.float32
    assert made.versions == (VersionSpan(0, 4, "1"),) and made.finish == "length" and made.engine_url == stub.url


async def test_request_ids_are_fresh_never_empty_and_no_prefix_of_each_other(engine: EngineClient, stub: Stub) -> None:
    await asyncio.gather(*(engine.attempt(REQUEST) for _ in range(20)))
    rids = [body["rid"] for body in stub.seen]
    assert len(set(rids)) == 20 and {len(rid) for rid in rids} == {32}


async def test_an_exhausted_budget_is_no_request(engine: EngineClient, stub: Stub) -> None:
    made = await engine.attempt(msgspec.structs.replace(REQUEST, sampling=Sampling(max_new_tokens=0)))
    assert made.finish == "length" and made.tokens == 0 and not stub.seen


async def test_ids_outside_the_vocabulary_never_reach_the_engine(engine: EngineClient, stub: Stub) -> None:
    with pytest.raises(BadInput, match="320"):
        await engine.attempt(msgspec.structs.replace(REQUEST, input_ids=np.array([320], dtype=np.int32)))
    assert not stub.seen


@pytest.mark.parametrize("script", [drop, cut_body, status(503), status(500)])
async def test_a_passing_failure_is_a_passing_error(engine: EngineClient, stub: Stub, script: Any) -> None:
    stub.script.append(script)
    with pytest.raises(EngineUnavailable):
        await engine.attempt(REQUEST)
    # Whatever the engine may still make of it, nobody waits for it any more.
    await until(lambda: bool(stub.aborted))
    assert stub.aborted[0] == {"rid": stub.seen[0]["rid"]}


@pytest.mark.parametrize("code", [400, 401, 404, 422])
async def test_a_permanent_refusal_is_bad_input(engine: EngineClient, stub: Stub, code: int) -> None:
    stub.script.append(status(code, "the reason"))
    with pytest.raises(BadInput, match="the reason"):
        await engine.attempt(REQUEST)


async def test_stop_brings_the_tokens_made_so_far(engine: EngineClient, stub: Stub) -> None:
    stub.hold.clear()
    stop = asyncio.Event()
    attempt = asyncio.ensure_future(engine.attempt(REQUEST, stop))
    await stub.arrived.wait()
    stop.set()
    made = await attempt
    assert made.finish == "abort" and made.output_ids.tolist() == [1, 2]
    assert {abort["rid"] for abort in stub.aborted} == {stub.seen[0]["rid"]}


async def test_a_late_answer_after_an_abort_never_counts(stub: Stub) -> None:
    engine = EngineClient(stub.url, quick(abort_deadline_s=0.2))
    await engine.probe()
    stub.hold.clear()
    stub.obeys_aborts = False
    stop = asyncio.Event()
    attempt = asyncio.ensure_future(engine.attempt(REQUEST, stop))
    await stub.arrived.wait()
    stop.set()
    with pytest.raises(EngineUnavailable, match="late answer is discarded"):
        await attempt
    stub.hold.set()
    assert engine.in_flight == 0
    await engine.close()


async def test_a_request_held_at_the_door_of_a_paused_engine_ends_when_stopped(
    engine: EngineClient, stub: Stub
) -> None:
    """SGLang ignores aborts of requests that it holds while paused, and would run them later."""
    gone = asyncio.Event()

    async def held(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        stub.running -= 1  # not in the scheduler, so not in its load
        try:
            await asyncio.Event().wait()
        finally:
            stub.running += 1
            gone.set()
        raise AssertionError

    stub.script.append(held)
    stop = asyncio.Event()
    attempt = asyncio.ensure_future(engine.attempt(REQUEST, stop))
    await stub.arrived.wait()
    stop.set()
    made = await attempt
    assert made.finish == "abort" and made.tokens == 0
    await asyncio.wait_for(gone.wait(), 5)  # the connection was closed


async def test_abort_all_returns_when_the_engine_is_idle(engine: EngineClient, stub: Stub) -> None:
    stub.hold.clear()
    attempts = [asyncio.ensure_future(engine.attempt(REQUEST)) for _ in range(3)]
    await until(lambda: stub.running == 3)
    await engine.abort_all()
    assert stub.running == 0
    assert [made.finish for made in await asyncio.gather(*attempts)] == ["abort"] * 3


async def test_abort_all_of_an_engine_that_goes_on_fails_with_its_load(engine: EngineClient, stub: Stub) -> None:
    stub.hold.clear()
    stub.obeys_aborts = False
    attempt = asyncio.ensure_future(engine.attempt(REQUEST))
    await stub.arrived.wait()
    with pytest.raises(EngineUnavailable, match="1 requests run"):
        await engine.abort_all(deadline_s=0.1)
    with pytest.raises(EngineUnavailable):
        await attempt


async def test_a_cancelled_caller_cancels_on_the_engine(engine: EngineClient, stub: Stub) -> None:
    stub.hold.clear()
    attempt = asyncio.ensure_future(engine.attempt(REQUEST))
    await stub.arrived.wait()
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    await until(lambda: bool(stub.aborted))
    assert stub.aborted[0] == {"rid": stub.seen[0]["rid"]} and engine.in_flight == 0


async def test_a_dead_engine_ends_its_requests_with_an_error_and_no_cancellation(stub: Stub) -> None:
    """The peer vanished without closing its connection: only probes can tell."""
    engine = EngineClient(stub.url, quick(dead_after=2, probe_timeout_s=0.1, connect_timeout_s=0.1))
    await engine.probe()
    stub.hold.clear()
    attempt = asyncio.ensure_future(engine.attempt(REQUEST))
    await stub.arrived.wait()
    engine.ready_path = "/nowhere-that-answers"
    engine.transport.url = "http://127.0.0.1:9"  # nothing listens there
    for _ in range(2):
        await engine.probe()
    with pytest.raises(EngineUnavailable, match="is dead"):
        await attempt
    assert engine.state == "down"
    await engine.close()


@pytest.mark.parametrize("tells", [True, False])
async def test_a_paused_engine_is_held_and_not_dead(engine: EngineClient, stub: Stub, tells: bool) -> None:
    stub.ready_tells = tells
    await engine.pause("in_place")
    for _ in range(5):
        await engine.probe()
    assert engine.state == "held" and engine.failed_probes == 0
    assert "/health" not in stub.calls  # it would block for 20 s
    await engine.resume()
    await engine.probe()
    assert engine.state == "up"


async def test_a_pause_that_somebody_else_ended_is_over(engine: EngineClient, stub: Stub) -> None:
    await engine.pause("abort")
    await engine.probe()
    assert engine.state == "held"
    stub.ready_status = 200
    await engine.probe()
    assert engine.state == "up"


async def test_a_broken_stream_keeps_its_tokens_unless_salvage_is_off(stub: Stub) -> None:
    stub.incremental = True
    for salvage in (True, False):
        engine = EngineClient(stub.url, quick(salvage=salvage))
        await engine.probe()
        stub.script.append(cut_stream)
        if salvage:
            made = await engine.attempt(REQUEST)
            assert made.cut and made.finish == "abort" and made.output_ids.tolist() == [1, 2]
            assert made.versions == (VersionSpan(0, 2, "1"),)
        else:
            with pytest.raises(EngineUnavailable):
                await engine.attempt(REQUEST)
        await engine.close()


async def test_a_stream_that_ends_without_a_reason_is_not_complete(engine: EngineClient, stub: Stub) -> None:
    async def short(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await sse(request, [stub.answer(body, 2, None)])

    stub.script.append(short)
    made = await engine.attempt(REQUEST)
    assert made.cut and made.finish == "abort" and made.tokens == 2
    routed = msgspec.structs.replace(REQUEST, logprobs=False)
    stub.script.append(short)
    assert (await engine.attempt(routed)).cut


async def test_versions_are_read_before_and_after_where_the_engine_gives_no_spans(
    engine: EngineClient, stub: Stub
) -> None:
    stub.reports_spans = False
    assert (await engine.attempt(REQUEST)).versions == (VersionSpan(0, 4, "1"),)

    async def update(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        stub.version = "2"
        return web.json_response(stub.answer(body, 4, {"type": "length"}))

    stub.script.append(update)
    assert (await engine.attempt(REQUEST)).versions == (VersionSpan(0, 4, "1", "2"),)
    assert (await engine.attempt(REQUEST)).versions == (VersionSpan(0, 4, "2"),)


async def test_an_answer_to_another_request_is_refused(engine: EngineClient, stub: Stub) -> None:
    async def mixed_up(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(stub.answer(body | {"rid": "0" * 32}, 4, {"type": "length"}))

    stub.script.append(mixed_up)
    with pytest.raises(Misaligned, match="another request"):
        await engine.attempt(REQUEST)


async def test_an_engine_that_says_it_captures_no_routes_is_refused_at_once(stub: Stub) -> None:
    from strawq_workers.sglang import ModelShape

    stub.captures_routes = False
    engine = EngineClient(stub.url, quick(), ModelShape(vocab_size=320, layers=2, topk=2))
    await engine.probe()
    with pytest.raises(BadInput, match="--enable-return-routed-experts"):
        await engine.attempt(msgspec.structs.replace(REQUEST, routed_experts=True))
    assert not stub.seen
    engine.server = msgspec.structs.replace(engine.server, enable_return_routed_experts=None)
    with pytest.raises(BadInput, match="--enable-return-routed-experts"):
        await engine.attempt(msgspec.structs.replace(REQUEST, routed_experts=True))
    assert len(stub.seen) == 1
    await engine.close()


async def test_an_answer_above_the_limit_is_refused(stub: Stub) -> None:
    engine = EngineClient(stub.url, quick(answer_bytes_max=2000))
    await engine.probe()
    with pytest.raises(Misaligned, match="answer_bytes_max"):
        await engine.attempt(msgspec.structs.replace(REQUEST, sampling=Sampling(max_new_tokens=400)))
    await engine.close()


async def test_a_busy_engine_does_not_flush(engine: EngineClient, stub: Stub) -> None:
    async def control(*_args: Any, **_more: Any) -> tuple[int, bytes]:
        return 400, b"Flush cache failed."

    engine.transport.control_status = control  # type: ignore[method-assign]
    with pytest.raises(TryAgain, match="busy"):
        await engine.flush_cache(deadline_s=0.05)


async def test_another_model_under_the_same_url_is_refused(engine: EngineClient) -> None:
    engine.model = msgspec.structs.replace(engine.model, model_path="another")
    with pytest.raises(BadInput, match="now serves 'stub'"):
        await engine.connect()


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://x", "http://", ""])
async def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="http://host:port"):
        EngineClient(url)
