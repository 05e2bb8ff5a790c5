"""HTTP to one engine: bounded connections, typed errors, bodies read into one buffer.

The rule: whatever the network does, the caller sees `EngineUnavailable` (passing), or what `refusal` makes of the
engine's own answer. A body is read once into one buffer of its announced size; an answer longer than the limit is
refused before it fills memory. Control calls have connections of their own, so that an abort never queues behind the
requests that it shall end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from strawq.errors import BadInput, EngineUnavailable, Misaligned
from strawq_workers.sglang.options import EngineOptions
from strawq_workers.sglang.refusal import refusal

CONTROL_CONNECTIONS = 8
READ_BUFFER_BYTES = 1 << 20


class Transport:
    """Connections to one base URL. Close it with `await close()`."""

    def __init__(self, url: str, options: EngineOptions) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise BadInput(f"engine URL {url!r} is not of the form http://host:port")
        self.url = url.rstrip("/")
        self.options = options
        headers = {"Accept-Encoding": "identity"}
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        self._requests = self._session(options.concurrency, headers)
        self._controls = self._session(CONTROL_CONNECTIONS, headers)

    def _session(self, connections: int, headers: dict[str, str]) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=30),
            headers=headers,
            read_bufsize=READ_BUFFER_BYTES,
        )

    async def close(self) -> None:
        await self._requests.close()
        await self._controls.close()

    async def control(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> bytes:
        """A small call. Returns the body of a 2xx answer; raises `BadInput` or `EngineUnavailable`."""
        status, answer = await self.control_status(method, path, body, timeout_s=timeout_s)
        if status >= 400:
            raise refusal(status, answer, what=f"{method} {self.url}{path}")
        return answer

    async def control_status(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        """A small call whose status the caller judges. Raises `EngineUnavailable` only."""
        seconds = timeout_s or self.options.control_timeout_s
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, self.options.connect_timeout_s))
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        what = f"{method} {self.url}{path}"
        try:
            async with self._controls.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as answer:
                return answer.status, bytes(await self.read_whole(answer, what=what))
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as failed:
            raise EngineUnavailable(f"{what}: {_words(failed, seconds)}") from failed

    @asynccontextmanager
    async def generation(self, body: bytes, *, what: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """`POST /generate` with the engine's answer open. Network failures inside the block become
        `EngineUnavailable`."""
        timeout = aiohttp.ClientTimeout(
            total=self.options.request_timeout_s, sock_connect=self.options.connect_timeout_s, sock_read=None
        )
        headers = {"Content-Type": "application/json"}
        try:
            async with self._requests.post(
                self.url + "/generate", data=body, headers=headers, timeout=timeout
            ) as answer:
                if answer.status >= 400:
                    raise refusal(answer.status, bytes(await self.read_whole(answer, what=what)), what=what)
                yield answer
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as failed:
            raise EngineUnavailable(f"{what}: {_words(failed, self.options.request_timeout_s)}") from failed

    async def read_whole(self, answer: aiohttp.ClientResponse, *, what: str) -> bytearray:
        """The body in one buffer. Joining blocks would hold it twice, and R3 answers are tens of megabytes."""
        limit, announced = self.options.answer_bytes_max, answer.content_length
        if announced is not None and announced > limit:
            raise Misaligned(f"{what}: the answer has {announced} bytes, more than answer_bytes_max {limit}")
        buffer = bytearray(announced or 0)
        at = 0
        async for block in answer.content.iter_any():
            end = at + len(block)
            if end > limit:
                raise Misaligned(f"{what}: the answer is longer than answer_bytes_max {limit}")
            buffer[at:end] = block
            at = end
        if announced is not None and at != announced:
            raise EngineUnavailable(f"{what}: the answer broke off after {at} of {announced} bytes")
        return buffer


def _words(failed: BaseException, seconds: float) -> str:
    if isinstance(failed, asyncio.TimeoutError):
        return f"no answer within {seconds:g} s"
    return f"{type(failed).__name__}: {failed}"
