"""Real engines on 127.0.0.1, one or several per test, all closed at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest

from strawq_workers.engine.engine_thread import EngineThread
from strawq_workers.engine.launch import running_engine
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.scheduler import Scheduler


class Client:
    """HTTP to one engine, with what the tests ask of it again and again."""

    def __init__(self, session: aiohttp.ClientSession, url: str, engine: EngineThread) -> None:
        self.session = session
        self.url = url
        self._engine = engine

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and body: decoded where it is JSON, else text. A `str` body is sent as it is."""
        data = body.encode() if isinstance(body, str) else None if body is None else msgspec.json.encode(body)
        async with self.session.request(method, self.url + path, data=data, headers=headers) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, msgspec.json.decode(raw) if is_json else raw.decode()

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        return await self.call("POST", path, body)

    async def get(self, path: str) -> tuple[int, Any]:
        return await self.call("GET", path)

    async def generate(self, **body: Any) -> Any:
        status, answer = await self.post("/generate", body)
        assert status == 200, answer
        return answer

    async def load(self) -> dict[str, Any]:
        _, answer = await self.get("/v1/loads")
        entry: dict[str, Any] = answer["loads"][0]
        return entry

    async def hurry(self) -> None:
        """From now on requests go as fast as the machine can, those under way included."""

        def unbounded(scheduler: Scheduler) -> None:
            scheduler.options = msgspec.structs.replace(scheduler.options, tokens_per_second=None)
            for request in scheduler._running:
                request.due = 0.0

        await self._engine.call(unbounded)

    async def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 30.0) -> dict[str, Any]:
        """Poll `/v1/loads` until `condition` holds of its entry."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not condition(entry := await self.load()):
            assert loop.time() < deadline, entry
            await asyncio.sleep(0.005)
        return entry

    async def until_decoding(self, count: int, prompt_tokens: int) -> None:
        """Wait until `count` requests run and each has made tokens of its own."""
        await self.until(
            lambda entry: entry["num_running_reqs"] == count and entry["num_used_tokens"] > count * (prompt_tokens + 2)
        )


StartEngine = Callable[..., Awaitable[Client]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def start(**options: Any) -> Client:
            url, engine = await stack.enter_async_context(running_engine(EngineOptions(**options)))
            return Client(session, url, engine)

        yield start
        # Connections first: an engine that closes waits for the calls that are open.
        await session.close()
