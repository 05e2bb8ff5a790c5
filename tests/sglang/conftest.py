"""Stub engines, fast options, and the contract suite's engines: embedded always, real ones when their URLs are
given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from strawq_workers.sglang import EngineOptions
from tests.sglang.stub import Stub


def quick(**changes: object) -> EngineOptions:
    """Options whose waits are short, and whose deadlines are long enough for a busy machine."""
    settings: dict[str, object] = {
        "concurrency": 8,
        "backoff_s": 0.01,
        "backoff_max_s": 0.05,
        "retry_s": 20.0,
        "abort_poll_s": 0.01,
        "idle_grace_s": 0.1,
        "probe_interval_s": 0.05,
        "probe_timeout_s": 5.0,
        "start_timeout_s": 10.0,
    }
    return EngineOptions(**(settings | changes))  # type: ignore[arg-type]


@pytest.fixture
async def make_stub() -> AsyncIterator[Callable[[], Awaitable[Stub]]]:
    stubs: list[Stub] = []

    async def make() -> Stub:
        stub = Stub()
        await stub.start()
        stubs.append(stub)
        return stub

    yield make
    for stub in stubs:
        stub.hold.set()
        await stub.stop()


@pytest.fixture
async def stub(make_stub: Callable[[], Awaitable[Stub]]) -> Stub:
    return await make_stub()


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits for a state that another task brings about."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it did not come about"
        await asyncio.sleep(0.005)
