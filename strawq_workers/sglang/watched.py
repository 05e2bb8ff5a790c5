"""One engine as it is watched: what it says it is, its weight version and load, and whether it takes requests.

The rule: what an engine is, it says itself; where it stands, a probe finds out, and no request goes to one that is in
doubt. A paused engine is not dead: `/health` blocks for 20 s while paused, so liveness is asked of `/ready`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

import msgspec

from strawq.errors import BadInput, EngineUnavailable, StrawqError
from strawq_workers.sglang.info import Loads, ModelInfo, ServerInfo, config_beside, decode_info, shape_from
from strawq_workers.sglang.options import EngineOptions
from strawq_workers.sglang.transport import Transport
from strawq_workers.sglang.trials import Record
from strawq_workers.sglang.wire import ModelShape

log = logging.getLogger("strawq.engines")

PauseMode = Literal["abort", "in_place", "retract"]
State = Literal["new", "up", "held", "down", "aside"]
"""`held`: it answers but takes no new request (paused, warming up, or stopping): SGLang's `/ready` is 503 then.
`aside`: it lives, and its answers make no sense."""


class WatchedEngine:
    """The part of an `EngineClient` that sends no request."""

    def __init__(self, url: str, options: EngineOptions | None = None, shape: ModelShape | None = None) -> None:
        self.options = options or EngineOptions()
        self.transport = Transport(url, self.options)
        self.url = self.transport.url
        self.state: State = "new"
        self.model = ModelInfo()
        self.server = ServerInfo()
        self.paused: PauseMode | None = None
        self.load: Loads | None = None
        self.claimed = 0
        self.failed_probes = 0
        self.last_error = "not asked yet"
        self.unusable: StrawqError | None = None
        self.ready_path = "/ready"
        self.doubted = asyncio.Event()
        self.record = Record(self.options.trial_s)
        self._given_shape = shape
        self._shape: ModelShape | None = shape
        self._ready_tells = False

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def shape(self) -> ModelShape:
        if self._shape is None:
            raise EngineUnavailable(f"{self.url} has not been connected yet: {self.last_error}")
        return self._shape

    @property
    def connected(self) -> bool:
        """Whether the engine has said what it is, at least once."""
        return self._shape is not None

    async def connect(self) -> None:
        """Reads what the engine is. Raises `EngineUnavailable` while it does not answer, `BadInput` if its vocabulary
        stays unknown, or if another model answers under this URL than before."""
        model = await self.model_info()
        if self.model.model_path and model.model_path != self.model.model_path:
            raise BadInput(f"{self.url} now serves {model.model_path!r}, it served {self.model.model_path!r} before")
        raw_server = await self._optional("/server_info")
        self.server = decode_info(msgspec.json.encode(raw_server), ServerInfo, what=f"GET {self.url}/server_info")
        if self._given_shape is None:
            raw_model = await self._optional("/model_info")
            served = (await self._optional("/v1/models")).get("data")
            card = served[0] if isinstance(served, list) and served and isinstance(served[0], dict) else {}
            beside = await asyncio.to_thread(config_beside, model.model_path)
            self._shape = shape_from([card, raw_model, raw_server, beside], url=self.url)
        self.model = model

    async def _optional(self, path: str) -> dict[str, Any]:
        status, body = await self.transport.control_status("GET", path)
        if status >= 400:
            return {}
        return decode_info(body, dict[str, Any], what=f"GET {self.url}{path}")

    async def model_info(self) -> ModelInfo:
        """Model and weight version as they are now."""
        status, body = await self.transport.control_status("GET", "/model_info")
        if status == 404:  # sglang-router and older engines know the older name only
            body = await self.transport.control("GET", "/get_model_info")
        elif status >= 400:
            raise EngineUnavailable(f"GET {self.url}/model_info: status {status}")
        return decode_info(body, ModelInfo, what=f"GET {self.url}/model_info")

    async def weight_version(self) -> str:
        """The engine's own string; "" if it reports none."""
        return (await self.model_info()).version

    async def loads(self) -> Loads:
        body = await self.transport.control("GET", "/v1/loads?include=core,queues")
        return decode_info(body, Loads, what=f"GET {self.url}/v1/loads")

    @property
    def pressure(self) -> int:
        """Requests that it has or is about to get from here, and those of others as of the last look at its load."""
        others = 0 if self.load is None else max(0, self.load.running + self.load.waiting - self.claimed)
        return self.claimed + others

    # -- health -------------------------------------------------------------------------------------------------

    async def probe(self) -> None:
        """Asks once whether the engine lives, and moves `state`. Raises nothing that is the engine's fault; see
        `last_error`."""
        path = self.ready_path
        try:
            status, _ = await self.transport.control_status("GET", path, timeout_s=self.options.probe_timeout_s)
            if self.state in ("new", "down"):
                await self.connect()
                self.record.due = 0.0  # it may be another process by now
            elif status == 404:  # an engine without this path shows that it lives by any answer
                await self.model_info()
        except StrawqError as failed:
            self.failed_probes += 1
            self.last_error = str(failed)
            self.unusable = failed if isinstance(failed, BadInput) else None
            # One missed probe of an engine at work is no reason to stop sending; a failed request is (see `doubt`).
            if self.state == "new" or self.failed_probes >= self.options.dead_after:
                self._move("down")
            return
        self.failed_probes = 0
        self.unusable = None
        self._ready_tells = self._ready_tells or status == 503
        # An engine whose `/ready` has never told of a pause is taken at this client's own word.
        held = status == 503 or (self.paused is not None and not self._ready_tells)
        if held:
            self.last_error = f"GET {self.url}{path}: status {status}, it is paused, starting or stopping"
        self._move("held" if held else "aside" if self.record.aside else "up")

    def _move(self, state: State) -> None:
        if state != self.state:
            # An engine that goes away, and that comes back, is news for whoever watches the worker.
            away = ("down", "aside")
            level = logging.WARNING if state in away or self.state in away else logging.INFO
            why = f": {self.last_error}" if state in away else f", weight version {self.model.version!r}"
            log.log(level, "engine %s is %s (was %s)%s", self.url, state, self.state, why)
        self.state = state

    def doubt(self, error: StrawqError, state: State = "down") -> None:
        """A request failed here: no further one is sent until a probe (`aside`: a trial) has found the engine well."""
        self.last_error = str(error)
        self._move(state)
        self.doubted.set()
