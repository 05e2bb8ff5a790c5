"""Telling the engines which version their weights have now.

The rule: an engine that does not answer at this moment is asked again with growing pauses, visibly, for as long as
engines may stay silent (`engine_timeout_s`). One that is known to be down, or stays silent, is gone on without only if
another one knows the version; it gets the next one when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from strawq.errors import BadInput, EngineUnavailable
from strawq_workers.rollout.settings import options_of
from strawq_workers.rollout.station import station_of
from strawq_workers.sglang.client import EngineClient
from strawq_workers.sglang.refusal import PASSING_STATUS
from strawq_workers.sglang.trying import until_answered
from strawq_workers.telling import Telling

log = logging.getLogger("strawq.rollout")

PATH = "/update_weight_version"


def set_engine_version(args: Any, data_source: Any, version: str, warn: Callable[[str], None]) -> None:
    """Tell every engine the version of its weights. One that does not know how keeps its own word, which is what
    tokens are labelled with. `EngineUnavailable` if none has answered in time, `BadInput` if one refuses."""
    station, options = station_of(data_source), options_of(args)

    async def tell(stop: asyncio.Event) -> None:
        fleet = await station.fleet(options, stop)
        up = [engine for engine in fleet.engines if engine.state in ("up", "held")]
        end = asyncio.get_running_loop().time() + options.engine_timeout_s
        silent: list[EngineUnavailable] = []
        for engine in up or fleet.engines:
            try:
                await _tell(engine, version, end, stop, warn)
            except EngineUnavailable as error:
                silent.append(error)
        if silent and len(silent) == len(up or fleet.engines):
            raise silent[0]
        for failed in silent:
            log.warning("going on without an engine: %s", failed)

    station.loop.call(tell)


async def _tell(
    engine: EngineClient, version: str, end: float, stop: asyncio.Event, warn: Callable[[str], None]
) -> None:
    clock, telling = asyncio.get_running_loop().time, Telling()
    began = clock()

    async def ask() -> int:
        body = {"new_version": version, "abort_all_requests": False}
        try:
            status, _ = await engine.transport.control_status("POST", PATH, body)
        except EngineUnavailable as failed:
            engine.doubt(failed)
            raise
        if status in PASSING_STATUS:
            raise EngineUnavailable(f"POST {engine.url}{PATH}: status {status}")
        return status

    def tell(failed: EngineUnavailable) -> None:
        if telling.due("silent"):
            log.warning("version %s is told again, for up to %.0f s more: %s", version, end - clock(), failed)

    try:
        status = await until_answered(ask, engine.options, stop, end, tell)
    except EngineUnavailable as failed:
        raise EngineUnavailable(f"version {version} was not told within {clock() - began:.0f} s: {failed}") from failed
    if status in (404, 405):
        warn(f"{engine.url} has no {PATH}: its tokens keep its own version")
    elif status >= 400:
        raise BadInput(f"{engine.url} does not take version {version}: status {status}; is it an engine?")
