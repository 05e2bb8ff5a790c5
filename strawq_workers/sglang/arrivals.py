"""Bytes of answers: a stream's are taken a few times a second instead of at each packet; large ones are decoded apart.

The rule: 512 streams bring tens of thousands of packets a second, and waking a task for each of them costs as much as
decoding it; nobody here needs a token at once. The end of a stream wakes its reader at once, and what had arrived
before a connection broke is delivered before the break is raised.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable

import aiohttp

from strawq_workers.sglang.wire import Chunk, decode_chunk, decode_chunks

READ_EVERY_S = 0.2
DECODE_IN_THREAD_BYTES = 1 << 20
"""What is larger is decoded in a thread: the event loop has heartbeats to serve."""


async def arriving(content: aiohttp.StreamReader, every_s: float, until: float) -> AsyncIterator[bytes]:
    """What has arrived, every `every_s` seconds or so, until the end. Raises what aiohttp does when the connection
    breaks, `asyncio.TimeoutError` when the loop's clock has passed `until`."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] | None = None

    def wake() -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    content.on_eof(wake)
    # Streams that begin together are not all read in one turn of the loop.
    delay = every_s * random.random()
    while True:
        if content.exception() is not None:
            # Not `read_nowait`: it raises before it gives what is there.
            left = content._read_nowait(-1)
            if left:
                yield left
        data = content.read_nowait()
        if data:
            yield data
        if content.at_eof():
            return
        if loop.time() >= until:
            raise asyncio.TimeoutError
        waiter = loop.create_future()
        timer = loop.call_later(delay, wake)
        delay = every_s
        try:
            await waiter
        finally:
            timer.cancel()


async def decoded_frames(payloads: list[bytes], *, what: str) -> Iterable[Chunk]:
    """`decode_chunks` where it fits."""
    # Routes ride in the last frame, and cumulative ones only grow. Small ones are a few milliseconds' work at most.
    if payloads and len(payloads[-1]) > DECODE_IN_THREAD_BYTES:
        return await asyncio.to_thread(decode_chunks, payloads, what=what)
    return decode_chunks(payloads, what=what)


async def decoded(payload: bytes | bytearray, *, what: str) -> Chunk:
    """`decode_chunk` where it fits."""
    if len(payload) > DECODE_IN_THREAD_BYTES:
        return await asyncio.to_thread(decode_chunk, payload, what=what)
    return decode_chunk(payload, what=what)
