"""Readers of the same streams, each as a work of one process: the worker's own path, a bare aiohttp loop, and one that
only drains the sockets.

The rule: all of them read the same streams of the same engine, as many at once, and a token counts when its reader has
it: decoded and checked for the worker, decoded for the bare loop, arrived for the drain.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from strawq.aio import AsyncQueue
from strawq.pool import Pool
from strawq.samples import Prompt, Sample
from strawq_workers.sglang import EngineOptions, Fleet, GenerateRequest
from strawq_workers.worker.generation import Plan, take_segment
from strawq_workers.worker.options import WorkerOptions
from tools.benchmarks.serving import serve
from tools.benchmarks.strawq_queue import captured_group
from tools.benchmarks.workload import captures, given_bytes

IDS = np.arange(8, dtype=np.int32)
TICK_S = 0.005


class Reader:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pools = 0

    def pin(self, cpus: list[int]) -> None:
        """Run on these processors only."""
        os.sched_setaffinity(0, cpus)

    def worker(self, url: str, streams: int, tokens: int) -> dict[str, float]:
        return asyncio.run(self._worker(url, streams, tokens))

    async def _worker(self, url: str, streams: int, tokens: int) -> dict[str, float]:
        async with await Fleet.open([url], EngineOptions(concurrency=streams)) as fleet:
            return await _timed(lambda: _generate(fleet, url, streams, tokens))

    def bare(self, url: str, streams: int, tokens: int, decode: bool = True) -> dict[str, float]:
        return asyncio.run(self._bare(url, streams, tokens, decode))

    async def _bare(self, url: str, streams: int, tokens: int, decode: bool) -> dict[str, float]:
        limit = aiohttp.TCPConnector(limit=streams)
        async with aiohttp.ClientSession(connector=limit, read_bufsize=1 << 20) as session:
            return await _timed(lambda: _gathered([_read(session, url, tokens, decode) for _ in range(streams)]))

    def lag(self, url: str, streams: int, tokens: int, samples: int, length: int) -> dict[str, float]:
        """Milliseconds that a timer of `TICK_S` is late while streams are read and groups of `samples` samples with
        `length` rows of R3 and SC each are published, one after the other, until the streams end; with no samples,
        while streams are read."""
        self._pools += 1
        sets = captures(3, samples, length) if samples else []
        with Pool.init(self._directory / f"lag-{self._pools}", queues=("work",)) as pool:
            return asyncio.run(self._lag(pool, url, (streams, tokens), sets))

    async def _lag(self, pool: Pool, url: str, size: tuple[int, int], sets: list[Any]) -> dict[str, float]:
        queue = AsyncQueue(pool.queue("work"))
        loop = asyncio.get_running_loop()
        late: list[float] = []
        published = 0

        async def watch(fleet: Fleet) -> None:
            begun = False
            while True:
                due = loop.time() + TICK_S
                await asyncio.sleep(TICK_S)
                begun = begun or fleet.engines[0].in_flight == size[0]
                if begun:  # a worker's requests do not begin all at once
                    late.append(1000 * (loop.time() - due))

        async with await Fleet.open([url], EngineOptions(concurrency=size[0])) as fleet:
            reading = asyncio.ensure_future(_generate(fleet, url, *size))
            watching = asyncio.ensure_future(watch(fleet))
            while sets and not (reading.done() and published):
                await queue.submit([Prompt(tokens=IDS[:1])])
                work = await queue.open((await queue.acquire()).leases[0])
                await queue.complete(work, captured_group(work.task, work.group.prompt, sets))
                published += 1
            tokens = await reading
            watching.cancel()
        queue.close()
        ordered = np.sort(late)
        return {
            "p50_ms": float(ordered[len(ordered) // 2]),
            "p99_ms": float(ordered[int(0.99 * (len(ordered) - 1))]),
            "max_ms": float(ordered[-1]),
            "published_mb": published * given_bytes(sets) / 1e6,
            "publications": published,
            "tokens": tokens,
        }


async def _generate(fleet: Fleet, url: str, streams: int, tokens: int) -> int:
    """What a worker does with each request: ask, read, check, join. Tokens in all."""
    options = WorkerOptions(engines=(url,), max_new_tokens=tokens, ignore_eos=True, samples=1)
    plan = Plan.of(options, 0)
    request = GenerateRequest(input_ids=IDS, sampling=options.sampling(tokens))
    stop = asyncio.Event()

    async def one(index: int) -> int:
        sample = take_segment(Sample(index), await fleet.generate(request, stop), len(IDS), plan)
        return len(sample.tokens)

    return await _gathered([one(index) for index in range(streams)])


async def _read(session: aiohttp.ClientSession, url: str, tokens: int, decode: bool) -> int:
    body = {
        "rid": secrets.token_hex(16), "input_ids": IDS.tolist(), "stream": True, "return_logprob": True,
        "sampling_params": {"max_new_tokens": tokens},
    }  # fmt: skip
    ids: list[int] = []
    logprobs: list[float] = []
    frames = 0
    async with session.post(url + "/generate", json=body) as answer:
        if not decode:
            async for data in answer.content.iter_any():
                frames += data.count(b"data: {")
            return frames
        async for line in answer.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                ids += chunk["output_ids"]
                logprobs += [triple[0] for triple in chunk["meta_info"]["output_token_logprobs"]]
    return len(ids)


async def _gathered(coroutines: list[Any]) -> int:
    return sum(await asyncio.gather(*coroutines))


async def _timed(call: Callable[[], Awaitable[int]]) -> dict[str, float]:
    start, cpu = time.perf_counter(), time.process_time()
    tokens = await call()
    return {"tokens": tokens, "seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}


def main() -> None:
    reader = Reader(Path(sys.argv[1]))
    serve({name: getattr(reader, name) for name in ("pin", "worker", "bare", "lag")})


if __name__ == "__main__":
    main()
