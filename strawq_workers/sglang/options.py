"""Limits of the engine client, in one place. Every wait has one."""

from __future__ import annotations

import msgspec

from strawq.errors import BadInput


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`concurrency` requests are in flight per engine at most; further ones wait in the client.

    `stream`: None streams where the engine sends increments (a broken connection then frees the engine at once, and
    keeps the tokens); cumulative streams cost O(n²) bytes, so such engines are asked for whole answers. `retry_s`
    bounds how long one request is retried over passing failures. An engine is dead after `dead_after` failed probes in
    a row; its requests go elsewhere. One that is set aside because its answers make no sense is tried again after
    `trial_s`, then after twice as long, and so on."""

    concurrency: int = 512
    stream: bool | None = None
    salvage: bool = True
    api_key: str | None = None
    connect_timeout_s: float = 10.0
    control_timeout_s: float = 10.0
    pause_timeout_s: float = 120.0
    update_timeout_s: float = 1800.0
    request_timeout_s: float = 14400.0
    start_timeout_s: float = 60.0
    retry_s: float = 120.0
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    abort_deadline_s: float = 180.0
    abort_poll_s: float = 0.3
    idle_grace_s: float = 2.0
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 5.0
    dead_after: int = 3
    trial_s: float = 30.0
    answer_bytes_max: int = 2 << 30
    prefer_router: bool = True

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                raise BadInput(f"EngineOptions.{name} is {value}: it must be positive")
