"""Engines whose answers make no sense, among others that are sound."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from strawq.errors import Misaligned
from strawq_workers.sglang import Fleet, GenerateRequest, Sampling
from strawq_workers.sglang.client import PauseMode
from strawq_workers.sglang.trials import GARBLED_MAX
from tests.sglang.conftest import quick, until
from tests.sglang.stub import Script, Stub

REQUEST = GenerateRequest(input_ids=np.array([5, 6, 7], dtype=np.int32), sampling=Sampling(max_new_tokens=40))
MakeStub = Callable[[], Awaitable[Stub]]


async def garbage(stub: Stub, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"output_ids": [1], "meta_info": {}})


class Always(deque[Script]):
    def popleft(self) -> Script:
        return self[0]


async def opened(*stubs: Stub, **options: Any) -> Fleet:
    fleet = await Fleet.open([stub.url for stub in stubs], quick(**options))
    await until(lambda: all(engine.state == "up" for engine in fleet.engines))
    return fleet


def states(fleet: Fleet) -> list[str]:
    return [engine.state for engine in fleet.engines]


async def set_aside_and_stopped(fleet: Fleet, bad: Stub) -> None:
    """The first of two engines garbles until it is set aside, and goes away then."""
    while states(fleet) != ["aside", "up"]:
        await fleet.generate(REQUEST)
    await bad.stop()
    await until(lambda: states(fleet) == ["down", "up"])


async def test_an_engine_that_garbles_is_set_aside_whatever_others_answer(make_stub: MakeStub) -> None:
    bad, b, c = await make_stub(), await make_stub(), await make_stub()
    bad.script = Always([garbage])
    async with await opened(bad, b, c) as fleet:
        for _ in range(30):  # one after the other: between two of its answers others are sound
            assert (await fleet.generate(REQUEST)).finish == "length"
        assert len(bad.seen) == GARBLED_MAX and states(fleet) == ["aside", "up", "up"]
        assert fleet.slots == 2 * 8 and "completion_tokens" in fleet.engines[0].last_error
        # It is told of everything that engines are told.
        await fleet.pause("in_place")
        assert "/pause_generation" in bad.calls
        await fleet.resume()
        await until(lambda: states(fleet) == ["aside", "up", "up"])


async def test_requests_under_way_at_an_engine_that_garbles_are_answered_by_another(make_stub: MakeStub) -> None:
    bad, b = await make_stub(), await make_stub()
    bad.script = Always([garbage])
    async with await opened(bad, b, concurrency=40) as fleet:
        segments = await asyncio.gather(*(fleet.generate(REQUEST) for _ in range(40)))
        assert all(segment.engine_url == b.url for segment in segments) and states(fleet) == ["aside", "up"]


async def test_its_own_sound_answers_clear_it(make_stub: MakeStub) -> None:
    bad, b = await make_stub(), await make_stub()
    async with await opened(bad, b) as fleet:
        for _ in range(4):
            bad.script.extend([garbage] * (GARBLED_MAX - 1))
            sent = len(bad.seen)
            while bad.script or len(bad.seen) == sent + GARBLED_MAX - 1:
                await fleet.generate(REQUEST)
        assert states(fleet) == ["up", "up"]


async def test_what_all_engines_garble_is_the_callers_to_judge(make_stub: MakeStub) -> None:
    a, b = await make_stub(), await make_stub()
    a.script, b.script = Always([garbage]), Always([garbage])
    async with await opened(a, b) as fleet:
        for _ in range(2 * GARBLED_MAX):
            with pytest.raises(Misaligned, match="completion_tokens"):
                await fleet.generate(REQUEST)
        assert sorted(states(fleet)) == ["aside", "up"]


async def test_a_trial_of_what_it_failed_at_takes_it_back_on_parole(make_stub: MakeStub) -> None:
    bad, b = await make_stub(), await make_stub()
    bad.script = Always([garbage])
    async with await opened(bad, b, trial_s=0.02) as fleet:
        while states(fleet) != ["aside", "up"]:
            await fleet.generate(REQUEST)
        sent = len(bad.seen)
        await until(lambda: len(bad.seen) >= sent + 2)  # trials fail
        assert all(body["sampling_params"]["max_new_tokens"] == 8 for body in bad.seen[sent:])
        assert bad.seen[sent]["input_ids"] == [5, 6, 7] and states(fleet)[0] == "aside"
        bad.script = deque()
        await until(lambda: states(fleet) == ["up", "up"])
        bad.script = Always([garbage])
        sent = len(bad.seen)
        while len(bad.seen) == sent:
            await fleet.generate(REQUEST)
        assert fleet.engines[0].record.aside, "one more is enough now"


async def test_an_engine_that_comes_back_is_tried_at_once(make_stub: MakeStub) -> None:
    bad, b = await make_stub(), await make_stub()
    bad.script = Always([garbage])
    async with await opened(bad, b, trial_s=1000.0) as fleet:
        await set_aside_and_stopped(fleet, bad)
        bad.script = deque()
        await bad.start()
        await until(lambda: states(fleet) == ["up", "up"])


async def test_an_engine_that_was_aside_and_returns_into_a_pause_is_paused_and_gets_no_trial(
    make_stub: MakeStub,
) -> None:
    bad, b = await make_stub(), await make_stub()
    bad.script = Always([garbage])
    async with await opened(bad, b, trial_s=1000.0) as fleet:
        await set_aside_and_stopped(fleet, bad)
        await fleet.pause("abort")
        bad.script = deque()
        bad.calls.clear()
        await bad.start()
        await until(lambda: bad.calls.count("/ready") >= 3)
        assert "/pause_generation" in bad.calls and "/generate" not in bad.calls and states(fleet)[0] == "held"
        await fleet.resume()
        await until(lambda: states(fleet) == ["up", "up"])
        assert "/generate" in bad.calls, "the trial came after the pause"


async def test_an_engine_that_returns_into_a_pause_gets_no_request_while_it_is_being_paused(
    make_stub: MakeStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = await make_stub()
    async with await opened(stub) as fleet:
        [engine] = fleet.engines
        await stub.stop()
        await until(lambda: states(fleet) == ["down"])
        fleet.paused = "in_place"
        pausing, go_on, pause = asyncio.Event(), asyncio.Event(), engine.pause

        async def slowly(mode: PauseMode = "abort") -> None:
            pausing.set()
            await go_on.wait()
            await pause(mode)

        monkeypatch.setattr(engine, "pause", slowly)
        await stub.start()
        await asyncio.wait_for(pausing.wait(), 10)
        assert fleet._choose(REQUEST, set()) is None
        go_on.set()
        await until(lambda: engine.paused is not None)
        assert fleet._choose(REQUEST, set()) is None


async def test_an_engine_that_is_aside_is_tried_at_once_when_no_other_is_up(make_stub: MakeStub) -> None:
    bad, b = await make_stub(), await make_stub()
    bad.script = Always([garbage])
    async with await opened(bad, b, trial_s=1000.0) as fleet:
        while states(fleet) != ["aside", "up"]:
            await fleet.generate(REQUEST)
        sent, pause_s = len(bad.seen), fleet.engines[0].record.pause_s
        await b.stop()
        await until(lambda: len(bad.seen) >= sent + 2)  # it garbles still
        assert fleet.engines[0].record.pause_s == pause_s, "what it is tried for want of another is not held against it"
        bad.script = deque()  # it has healed
        assert (await fleet.generate(REQUEST)).engine_url == bad.url
