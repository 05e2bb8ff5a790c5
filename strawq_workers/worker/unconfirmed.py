"""Requests that were to end, and of which nobody knows whether their engine runs them on.

The rule: their capacity stays reserved until the engine is idle, or gone. An engine that works for others is never seen
idle: there the capacity comes back after `limit_s`, with a word about it, because a worker whose slots wait for ever is
worth less than an engine that runs one request too many.
"""

from __future__ import annotations

import asyncio
import logging

from strawq.errors import StrawqError
from strawq_workers.admission.reservations import Admission
from strawq_workers.sglang.fleet import Fleet

log = logging.getLogger("strawq.worker")


class Unconfirmed:
    """The unconfirmed requests of one worker, by engine. Belongs to its event loop."""

    def __init__(self, admission: Admission, fleet: Fleet, limit_s: float) -> None:
        self._admission = admission
        self._fleet = fleet
        self._limit_s = limit_s
        self._since: dict[str, float] = {}

    def __len__(self) -> int:
        """Engines that have such requests."""
        return len(self._since)

    def note(self, attempt: str, index: int, engine_url: str) -> None:
        """The abort of a request there has not been confirmed."""
        if self._admission.uncertain(attempt, index, engine_url):
            self._since[engine_url] = asyncio.get_running_loop().time()
            log.warning("%s may still run a request of %s: its slot stays taken until it is idle", engine_url, attempt)

    async def settle(self) -> int:
        """Asks the engines, and frees what they certainly do not run. Returns how many samples were freed."""
        freed = 0
        for url, since in list(self._since.items()):
            if await self._is_over(url, since):
                freed += self._admission.engine_gone(url)
                self._since.pop(url, None)
        return freed

    async def _is_over(self, url: str, since: float) -> bool:
        engines = [engine for engine in self._fleet.engines if engine.url == url] or list(self._fleet.engines)
        try:
            loads = [await engine.loads() for engine in engines if engine.state != "down"]
            if all(load.idle for load in loads):
                return True
        except StrawqError as error:
            log.info("%s does not say whether it is idle: %s", url, error)
        waited = asyncio.get_running_loop().time() - since
        if waited >= self._limit_s:
            log.warning("%s was not seen idle for %.0f s after an abort; its slots are used again", url, waited)
            return True
        return False
