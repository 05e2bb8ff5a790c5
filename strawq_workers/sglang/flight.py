"""One request on the wire, and what ends it early.

The rule: a flight that was given up never delivers; whatever its engine still sends is of no more interest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from strawq.errors import EngineUnavailable
from strawq_workers.sglang.stream import Accumulator


class StopSignal(Protocol):
    """What ends a request early: an `asyncio.Event`, or several of them taken together."""

    def is_set(self) -> bool: ...

    async def wait(self) -> object: ...


class AbortUnconfirmed(EngineUnavailable):
    """A request was to end, and nobody knows whether its engine still runs it. A late answer is discarded."""

    def __init__(self, message: str, engine_url: str) -> None:
        super().__init__(message)
        self.engine_url = engine_url


class Flight:
    """One attempt on the wire, sent to a paused engine if `at_door`. `received` grows with every byte read, `failure`
    says why it was given up."""

    def __init__(self, rid: str, what: str, *, at_door: bool) -> None:
        self.rid = rid
        self.at_door = at_door
        self.answer = Accumulator(what=what)
        self.received = 0
        self.failure: EngineUnavailable | None = None
        self.sending: asyncio.Task[None]

    def give_up(self, failure: EngineUnavailable | None) -> None:
        """Closes the connection; with `failure` None the request ends as an abort."""
        self.failure = failure
        self.sending.cancel()


class AnyOf:
    """A stop signal that is set when one of several is."""

    def __init__(self, *signals: StopSignal) -> None:
        self._signals = signals

    def is_set(self) -> bool:
        return any(signal.is_set() for signal in self._signals)

    async def wait(self) -> None:
        tasks = [asyncio.ensure_future(signal.wait()) for signal in self._signals]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()


async def wait_any(tasks: Sequence[asyncio.Task[None]], seconds: float, *, every: bool = False) -> None:
    if not tasks:
        if not every:
            await asyncio.sleep(seconds)
        return
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.ALL_COMPLETED if every else asyncio.FIRST_COMPLETED)


async def sleep_or(stop: StopSignal, seconds: float) -> None:
    """Not `wait_for`: before Python 3.12 it loses a cancellation that meets the end of the wait."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({stopping}, timeout=seconds)
    finally:
        stopping.cancel()
