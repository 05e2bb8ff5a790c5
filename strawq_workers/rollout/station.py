"""What the rollouts of one data source share between calls: an event loop, the engines, and whatever runs on.

The rule: there is one station for each data source in a process. It is closed by `close_rollouts`, or when the
interpreter ends, and closing gives back everything that is in hand.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import threading
from typing import Any, Protocol

from strawq.errors import BadInput, TryAgain
from strawq_workers.admission.refill import Account
from strawq_workers.rollout.background import LoopThread
from strawq_workers.rollout.measures import WorkRates
from strawq_workers.rollout.returns import Returns
from strawq_workers.sglang.fleet import Fleet
from strawq_workers.sglang.options import EngineOptions
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.process import open_fleet
from strawq_workers.worker.views import shown

log = logging.getLogger("strawq.rollout")

CANCEL_S = 5.0


class Running(Protocol):
    """What goes on between two calls of a rollout function."""

    def close(self) -> None:
        """End it, with everything in hand given back."""


class RolloutFailed(BadInput):
    """A group of this rollout failed for good, or what runs behind it has ended. Everything in hand has been given
    back; the message has the first reason."""

    kind = "rollout_failed"


class Interrupted(TryAgain):
    """The rollout was told to stop before it had its batch."""


class Station:
    """See the module's docstring. Made by `station_of`."""

    def __init__(self, data_source: Any) -> None:
        self.data_source = data_source
        self.returns = Returns(data_source)
        self.loop = LoopThread()
        self.running: Running | None = None
        self.account: Account | None = None
        """Of the newest synchronous rollout."""
        self.rates = WorkRates()
        """Of the workers that go on between calls in this process."""
        self._fleet: Fleet | None = None
        self._opening = asyncio.Lock()
        self._opened: tuple[tuple[str, ...], EngineOptions] | None = None

    async def fleet(self, options: WorkerOptions, stop: asyncio.Event) -> Fleet:
        """The engines, opened once and kept. Called on the station's loop."""
        wanted = (options.engines, options.engine_options())
        async with self._opening:
            if self._fleet is not None and self._opened != wanted:
                await self._close_fleet()
            if self._fleet is None:
                fleet = await open_fleet(options, stop)
                if fleet is None:
                    raise Interrupted("the rollout was told to stop before an engine answered")
                self._fleet, self._opened = fleet, wanted
            return self._fleet

    async def _close_fleet(self) -> None:
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            await fleet.close()

    def stop_running(self) -> None:
        """End what goes on between calls, with everything given back."""
        running, self.running = self.running, None
        if running is not None:
            running.close()

    def close(self) -> None:
        """Give back what runs, close the engines' connections, end the thread. If the data source does not take back
        what it should, the station stays as it is, and may be closed again."""
        self.stop_running()
        self.returns.settle()
        self.loop.call(lambda _: self._close_fleet())
        self.loop.call(_end_what_is_left)
        self.loop.close()


async def _end_what_is_left(_stop: asyncio.Event) -> None:
    """A caller that was interrupted twice has not waited for its work; a loop is not closed under it."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=CANCEL_S)


_stations: dict[int, Station] = {}
_lock = threading.Lock()


def station_of(data_source: Any) -> Station:
    """The station of this data source, made on first use."""
    with _lock:
        _close_at_exit()
        station = _stations.get(id(data_source))
        if station is None:
            station = _stations[id(data_source)] = Station(data_source)
        return station


def give_back(data_source: Any) -> None:
    """End what goes on between calls on this data source, with everything given back to it. The next call begins it
    anew."""
    with _lock:
        station = _stations.get(id(data_source))
    if station is not None:
        station.stop_running()
        station.returns.settle()


def close_rollouts(data_source: Any = None) -> None:
    """Close what the rollout functions keep between calls, for one data source or for all: background work is
    stopped and given back, local workers are ended, connections closed. The next call opens it again. Call it before
    the data source is saved for good or closed."""
    with _lock:
        keys = [key for key in _stations if data_source is None or key == id(data_source)]
    with contextlib.ExitStack() as stack:  # whatever one of them raises, the others are closed first
        for key in keys:
            stack.callback(_close, key)


def _close(key: int) -> None:
    with _lock:
        station = _stations.get(key)
    if station is not None:
        station.close()
        with _lock:
            _stations.pop(key, None)


@functools.cache
def _close_at_exit() -> None:
    """Threads pools refuse work once the interpreter's ending has reached `atexit`, and giving back needs them; the
    hook of `threading` comes before."""
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close_quietly)


def _close_quietly() -> None:
    try:
        close_rollouts()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a data source is the user's code; nobody is left to tell)
        log.warning("the end of a rollout: %s", shown(error, str, 1000))
