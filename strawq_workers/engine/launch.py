"""Starting and stopping an embedded engine.

The rule: once `ready` is told the URL, the engine answers there; when `serve` returns or raises, its port is closed
and its thread has ended. A fault of the compute thread is raised from `serve`, never left to a server that looks
alive.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from strawq.errors import BadInput
from strawq_workers.engine.engine_thread import EngineStopped, EngineThread
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.scheduler import Scheduler
from strawq_workers.engine.server import EngineServer

# The compute thread seldom lets go of the interpreter by itself; the event loop asks for it this often.
_SWITCH_INTERVAL_S = 0.0005
_SHUTDOWN_S = 1.0


@asynccontextmanager
async def running_engine(options: EngineOptions) -> AsyncIterator[tuple[str, EngineThread]]:
    """An engine while the block runs: yields its URL (`http://host:port`) and its compute thread.

    Raises BadInput where the address can't be bound.
    """
    scheduler = await asyncio.to_thread(Scheduler, options)
    engine = EngineThread(scheduler)
    engine.start()
    app = EngineServer(options, engine).application()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    try:
        await runner.setup()
        site = web.TCPSite(runner, options.host, options.port)
        try:
            await site.start()
        except OSError as error:
            raise BadInput(
                f"the engine cannot listen on {options.host}:{options.port} ({error.strerror or error}): "
                "choose another --host or --port; port 0 takes any free one"
            ) from error
        port = runner.addresses[0][1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        yield f"http://{host}:{port}", engine
    finally:
        await engine.stop()
        await runner.cleanup()


async def serve(options: EngineOptions, ready: Callable[[str], None] | None = None) -> None:
    """Serve until cancelled. `ready` is called once with the URL.

    Raises BadInput where the address can't be bound, and EngineStopped if the compute thread dies.
    """
    async with running_engine(options) as (url, engine):
        if ready is not None:
            ready(url)
        failure = await asyncio.shield(engine.ended)
        if failure is not None:
            raise EngineStopped(f"the compute thread died: {failure!r}") from failure


def announce(url: str) -> None:
    """Tell a caller (stdout, one line) where the engine is, and a person (stderr) what it is."""
    print(url, flush=True)
    print(
        f"strawq engine at {url}: a stand-in for development. It speaks SGLang's protocol over a small untrained "
        "model; use SGLang for real rollouts.",
        file=sys.stderr,
        flush=True,
    )


def run_engine(options: EngineOptions, ready: Callable[[str], None] = announce) -> None:
    """Serve until SIGTERM or SIGINT, then return. `ready` is called once with the URL; it prints it as the first line
    on stdout."""
    previous = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        asyncio.run(_serve_until_signal(options, ready))
    finally:
        sys.setswitchinterval(previous)


async def _serve_until_signal(options: EngineOptions, ready: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    serving = asyncio.ensure_future(serve(options, ready))
    stopped_by_signal = False

    def stop() -> None:
        nonlocal stopped_by_signal
        stopped_by_signal = True
        serving.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await serving
    except asyncio.CancelledError:
        if not stopped_by_signal:
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
