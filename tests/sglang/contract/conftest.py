"""The engines that must keep the contract: two embedded ones always, real ones when `STRAWQ_SGLANG_URL` names them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from strawq_workers.sglang import EngineClient
from tests.conftest import real_sglang_urls
from tests.sglang.conftest import quick

EMBEDDED = {
    # One engine of each kind: with routes and increments, and with neither.
    "embedded-moe": ["--enable-return-routed-experts", "--incremental-streaming-output"],
    "embedded-dense": [],
}
COMMON = ["--host", "127.0.0.1", "--port", "0", "--tokens-per-second", "200", "--context-length", "512"]


@pytest.fixture(scope="session")
def embedded_urls() -> Iterator[dict[str, str]]:
    processes: dict[str, subprocess.Popen[str]] = {}
    urls: dict[str, str] = {}
    try:
        for name, arguments in EMBEDDED.items():
            command = [sys.executable, "-m", "strawq_workers.engine", *COMMON, *arguments]
            processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for name, process in processes.items():
            assert process.stdout is not None
            urls[name] = process.stdout.readline().split()[-1]
            assert urls[name].startswith("http://"), f"{name} printed no URL first"
        yield urls
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture(params=[*EMBEDDED, *real_sglang_urls()])
def engine_url(request: pytest.FixtureRequest, embedded_urls: dict[str, str]) -> str:
    name: str = request.param
    return embedded_urls.get(name, name)


@pytest.fixture
async def engine(engine_url: str) -> AsyncIterator[EngineClient]:
    """A connected client; the engine is left running, idle and unpaused."""
    client = EngineClient(engine_url, quick(abort_deadline_s=30.0, idle_grace_s=1.0, abort_poll_s=0.1))
    await client.connect()
    await _quiet(client)
    yield client
    await _quiet(client)
    await client.close()


async def _quiet(client: EngineClient) -> None:
    """Unpaused, and idle twice: what a pause held at the door may enter after the first time."""
    await client.resume()
    await client.abort_all()
    await asyncio.sleep(0.3)
    await client.abort_all()
