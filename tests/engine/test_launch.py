"""Starting and stopping: the process and what it prints, a port that is taken, a compute thread that dies."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from strawq.errors import BadInput
from strawq_workers.engine.engine_thread import EngineStopped
from strawq_workers.engine.launch import running_engine, serve
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.scheduler import Scheduler

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_prints_its_url_first_and_stops_on_a_signal(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "strawq_workers.engine", "--port", "0", "--weight-version", "5"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(f"{url}/get_weight_version") as response:
                assert response.read() == b'{"weight_version":"5"}'
            process.send_signal(number)
            rest, complaints = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0, complaints
    assert rest == ""
    assert "stand-in for development" in complaints and "Traceback" not in complaints


async def test_a_taken_port_is_named() -> None:
    async with running_engine(EngineOptions()) as (url, _):
        port = int(url.rsplit(":", 1)[1])
        with pytest.raises(BadInput, match=f"127.0.0.1:{port}"):
            await serve(EngineOptions(port=port))


async def test_serve_closes_its_port_when_cancelled() -> None:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(serve(EngineOptions(), told.set_result))
    port = int((await told).rsplit(":", 1)[1])
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_fault_of_the_compute_thread_ends_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Scheduler, now: float) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(Scheduler, "step", broken)
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(serve(EngineOptions(), told.set_result))
    port = int((await told).rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(EngineStopped, match="a fault"):
        await asyncio.wait_for(serving, 30)
    writer.close()
    await reader.read()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"experts_per_token": 9}, "experts_per_token"),
        ({"max_running_requests": 0}, "max_running_requests"),
        ({"tokens_per_second": 0.0}, "tokens_per_second"),
        ({"context_length": 1}, "context_length"),
        ({"hidden_size": 30}, "hidden_size"),
        ({"port": 70000}, "port"),
    ],
)
def test_unfit_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        EngineOptions(**options)
