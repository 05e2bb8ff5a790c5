"""Several engines, a router, and the ways in which they fail one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from strawq.errors import BadInput, EngineUnavailable
from strawq_workers.sglang import Fleet, GenerateRequest, ModelShape, Sampling
from strawq_workers.sglang.client import PauseMode
from tests.sglang.conftest import quick, until
from tests.sglang.stub import Stub, drop, status

REQUEST = GenerateRequest(input_ids=np.array([5, 6, 7], dtype=np.int32), sampling=Sampling(max_new_tokens=4))
ROUTED = ModelShape(vocab_size=320, layers=2, topk=2)
MakeStub = Callable[[], Awaitable[Stub]]


async def test_requests_spread_over_engines_and_never_exceed_the_bound(make_stub: MakeStub) -> None:
    a, b = await make_stub(), await make_stub()
    a.hold.clear()
    b.hold.clear()
    async with await Fleet.open([a.url, b.url], quick(concurrency=3)) as fleet:
        await until(lambda: all(engine.state == "up" for engine in fleet.engines))
        assert fleet.slots == 6
        made = [asyncio.ensure_future(fleet.generate(REQUEST)) for _ in range(10)]
        await until(lambda: a.running == b.running == 3)
        a.hold.set()
        b.hold.set()
        assert {segment.finish for segment in await asyncio.gather(*made)} == {"length"}
        assert a.max_running == b.max_running == 3 and len(a.seen) + len(b.seen) == 10


async def test_a_passing_failure_goes_to_another_engine_and_a_permanent_one_is_not_repeated(
    make_stub: MakeStub,
) -> None:
    a, b = await make_stub(), await make_stub()
    async with await Fleet.open([a.url, b.url], quick()) as fleet:
        for stub in (a, b):
            stub.script.extend([drop, status(503)])
        assert (await fleet.generate(REQUEST)).finish == "length"
        rids = [body["rid"] for body in a.seen + b.seen]
        assert len(set(rids)) == len(rids) > 1  # every try has an id of its own
        for stub in (a, b):
            stub.script.clear()
            stub.script.append(status(400, "wrong"))
        tried = len(a.seen) + len(b.seen)
        with pytest.raises(BadInput, match="wrong"):
            await fleet.generate(REQUEST)
        assert len(a.seen) + len(b.seen) == tried + 1


async def test_retries_have_an_end(stub: Stub) -> None:
    async with await Fleet.open([stub.url], quick(retry_s=0.3)) as fleet:
        stub.script.extend([status(503)] * 1000)
        with pytest.raises(EngineUnavailable, match=r"within 0\.3 s"):
            await fleet.generate(REQUEST)
        assert 1 < len(stub.seen) < 200


async def test_an_engine_that_dies_is_left_out_and_taken_back(make_stub: MakeStub) -> None:
    a, b = await make_stub(), await make_stub()
    async with await Fleet.open([a.url, b.url], quick(dead_after=2)) as fleet:
        by_url = {engine.url: engine for engine in fleet.engines}
        await until(lambda: all(engine.state == "up" for engine in fleet.engines))
        await a.stop()
        made = await asyncio.gather(*(fleet.generate(REQUEST) for _ in range(6)))
        assert {segment.engine_url for segment in made} == {b.url}
        await until(lambda: by_url[a.url].state == "down" and by_url[a.url].failed_probes >= 2)
        await fleet.pause("abort")  # the dead one is not waited for
        a.ready_status = 200
        await a.start()
        await until(lambda: by_url[a.url].state == "held")  # and is paused on its return, before it gets work
        await until(lambda: "/pause_generation" in a.calls)
        await fleet.resume()
        await until(lambda: by_url[a.url].state == "up")
        made = await asyncio.gather(*(fleet.generate(REQUEST) for _ in range(6)))
        assert {segment.engine_url for segment in made} == {a.url, b.url}


async def test_a_paused_engine_costs_no_retries_and_no_requests(stub: Stub) -> None:
    async with await Fleet.open([stub.url], quick(retry_s=0.2)) as fleet:
        await fleet.pause("in_place")
        await until(lambda: fleet.engines[0].state == "held")
        waiting = asyncio.ensure_future(fleet.generate(REQUEST))
        done, _ = await asyncio.wait({waiting}, timeout=0.5)  # longer than retry_s
        assert not done and not stub.seen
        await fleet.resume()
        assert (await waiting).finish == "length" and len(stub.seen) == 1


async def test_a_waiting_request_can_be_stopped(stub: Stub) -> None:
    stub.hold.clear()
    async with await Fleet.open([stub.url], quick(concurrency=1)) as fleet:
        first = asyncio.ensure_future(fleet.generate(REQUEST))
        await stub.arrived.wait()
        stop = asyncio.Event()
        second = asyncio.ensure_future(fleet.generate(REQUEST, stop))
        third = asyncio.ensure_future(fleet.generate(REQUEST))
        await asyncio.sleep(0)
        stop.set()
        made = await second
        assert made.finish == "abort" and made.tokens == 0 and len(stub.seen) == 1
        stub.hold.set()
        assert (await first).finish == (await third).finish == "length"


async def test_abort_all_ends_running_and_waiting_requests(make_stub: MakeStub) -> None:
    a, b = await make_stub(), await make_stub()
    a.hold.clear()
    b.hold.clear()
    async with await Fleet.open([a.url, b.url], quick(concurrency=2)) as fleet:
        made = [asyncio.ensure_future(fleet.generate(REQUEST)) for _ in range(7)]
        await until(lambda: a.running == b.running == 2)
        await fleet.abort_all()
        assert a.running == b.running == 0
        segments = await asyncio.gather(*made)
        assert {segment.finish for segment in segments} == {"abort"}
        assert sorted(segment.tokens for segment in segments) == [0, 0, 0, 2, 2, 2, 2]
        a.hold.set()
        b.hold.set()
        assert (await fleet.generate(REQUEST)).finish == "length"  # it ended what was there, and no more


async def test_a_cancelled_waiter_gives_its_slot_back(stub: Stub) -> None:
    stub.hold.clear()
    async with await Fleet.open([stub.url], quick(concurrency=1)) as fleet:
        first = asyncio.ensure_future(fleet.generate(REQUEST))
        await stub.arrived.wait()
        waiting = [asyncio.ensure_future(fleet.generate(REQUEST)) for _ in range(3)]
        await asyncio.sleep(0.02)
        waiting[0].cancel()
        first.cancel()
        stub.hold.set()
        done = await asyncio.gather(first, *waiting, return_exceptions=True)
        assert [isinstance(x, asyncio.CancelledError) for x in done] == [True, True, False, False]
        assert fleet.engines[0].claimed == 0


async def test_no_engine_at_all_is_an_error_with_the_reason() -> None:
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9"):
        await Fleet.open(["http://127.0.0.1:9"], quick(start_timeout_s=0.2))
    with pytest.raises(BadInput, match="no engine URL"):
        await Fleet.open([])


# -- routers ----------------------------------------------------------------------------------------------------


async def test_a_router_is_used_for_plain_requests_and_gone_round_for_routes(make_stub: MakeStub) -> None:
    router, engine = await make_stub(), await make_stub()
    router.workers = [engine.url]
    raw = {"routed_experts": np_base64((3 + 4 - 1) * 4)}

    async def routed(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(stub.answer(body, 4, {"type": "length"}, **raw))

    async with await Fleet.open([router.url], quick(), ROUTED) as fleet:
        assert len(router.seen) == 1  # the trial at the start
        assert (await fleet.generate(REQUEST)).engine_url == router.url
        engine.script.append(routed)
        made = await fleet.generate(msgspec.structs.replace(REQUEST, routed_experts=True))
        assert made.engine_url == engine.url and made.routed_experts is not None
        seeded = msgspec.structs.replace(REQUEST, sampling=Sampling(max_new_tokens=4, seed=1))
        assert (await fleet.generate(seeded)).engine_url == engine.url  # the router would drop the seed


async def test_aborts_of_requests_sent_through_a_router_go_to_the_engines(make_stub: MakeStub) -> None:
    router, a, b = await make_stub(), await make_stub(), await make_stub()
    router.workers = [a.url, b.url]
    async with await Fleet.open([router.url], quick()) as fleet:
        router.hold.clear()
        router.arrived.clear()
        stop = asyncio.Event()
        made = asyncio.ensure_future(fleet.generate(REQUEST, stop))
        await router.arrived.wait()
        stop.set()
        await until(lambda: bool(a.aborted) and bool(b.aborted))
        rid = router.seen[-1]["rid"]
        assert a.aborted[0] == b.aborted[0] == {"rid": rid} and not router.aborted
        router.hold.set()
        assert (await made).tokens in (0, 4)


async def test_an_engine_that_a_router_registers_later_is_found(make_stub: MakeStub) -> None:
    router, a, b = await make_stub(), await make_stub(), await make_stub()
    router.workers = [a.url]
    async with await Fleet.open([router.url], quick()) as fleet:
        assert [engine.url for engine in fleet.engines] == [a.url]
        router.workers.append(b.url)
        await until(lambda: [engine.state for engine in fleet.engines] == ["up", "up"])


def np_base64(values: int) -> str:
    import base64

    return base64.b64encode(np.zeros(values, dtype="<i4").tobytes()).decode()


async def test_a_resume_while_a_returning_engine_is_being_paused_leaves_it_running(make_stub: MakeStub) -> None:
    a, b = await make_stub(), await make_stub()
    async with await Fleet.open([a.url, b.url], quick(dead_after=2)) as fleet:
        (engine,) = [engine for engine in fleet.engines if engine.url == a.url]
        await until(lambda: engine.state == "up")
        await a.stop()
        await until(lambda: engine.state == "down")
        await fleet.pause("abort")
        pause, asked, go_on = engine.pause, asyncio.Event(), asyncio.Event()

        async def slow(mode: PauseMode = "abort") -> None:
            asked.set()
            await go_on.wait()
            await pause(mode)

        engine.pause = slow  # type: ignore[method-assign]
        a.ready_status = 200
        await a.start()
        await asked.wait()
        await fleet.resume()
        go_on.set()
        await until(lambda: engine.state == "up" and engine.paused is None)
        assert a.calls[-1] != "/pause_generation"
