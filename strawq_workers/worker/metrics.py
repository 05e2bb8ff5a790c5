"""What a worker counts, and the summary that it ends with.

The rule: a token is counted where it came from: `tokens_generated` by this worker's requests, `tokens_resumed` loaded
from the queue and not generated again, `tokens_discarded` generated here and lost (a stale lease, a failed attempt that
could not save them).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection
from typing import Any

import msgspec

from strawq_workers.sglang.fleet import Fleet

LAG_INTERVAL_S = 0.25
LAGS_KEPT = 2400
SORT_EVERY = 40


class Counters(msgspec.Struct):
    """Running totals of one worker. Groups and tokens are counts; `stale_drops` groups were thrown away as too old,
    `stale_late` handed in although they were. `engine_seconds` is the time that engines were up, `engine_idle_seconds`
    that of it in which they had no request of this worker's. `loop_lag_ms_*` is how late the event loop ran a timer,
    `p99` of the last ten minutes."""

    groups_leased: int = 0
    groups_accepted: int = 0
    groups_dropped: int = 0
    groups_failed: int = 0
    groups_stale: int = 0
    groups_yielded: int = 0
    samples_finished: int = 0
    tokens_generated: int = 0
    tokens_resumed: int = 0
    tokens_discarded: int = 0
    tokens_masked: int = 0
    requests: int = 0
    aborts: int = 0
    retries: int = 0
    saves: int = 0
    commits: int = 0
    pauses: int = 0
    sessions_lost: int = 0
    branches_left: int = 0
    stale_drops: int = 0
    stale_late: int = 0
    engine_seconds: float = 0.0
    engine_idle_seconds: float = 0.0
    loop_lag_ms_max: float = 0.0
    loop_lag_ms_mean: float = 0.0
    loop_lag_ms_p99: float = 0.0


class WorkerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker ended. `reason`: `sealed` (no work is left), `signal`, `stopped`, `groups_max`. `policy_versions`:
    versions that made the tokens generated here, in the order they were seen."""

    reason: str
    seconds: float
    counters: Counters
    policy_versions: tuple[str, ...] = ()
    drop_reasons: dict[str, int] = {}
    failures: tuple[str, ...] = ()


def metrics_of(counters: Counters) -> dict[str, Any]:
    """The counters as a flat mapping of metric names to numbers."""
    return {f"worker/{name}": value for name, value in msgspec.structs.asdict(counters).items()}


def log_line(counters: Counters, in_hand: int) -> str:
    """One line for a person: groups, tokens, and what is not well."""
    c = counters
    parts = [
        f"{in_hand} groups in hand",
        f"{c.groups_accepted} accepted",
        f"{c.tokens_generated} tokens generated",
        f"{c.tokens_resumed} resumed",
    ]
    for name in (
        "groups_dropped",
        "groups_failed",
        "groups_stale",
        "groups_yielded",
        "stale_drops",
        "stale_late",
        "retries",
        "tokens_discarded",
    ):
        if getattr(c, name):
            parts.append(f"{getattr(c, name)} {name.replace('_', ' ')}")
    parts.append(f"loop lag {c.loop_lag_ms_mean:.0f} ms (most {c.loop_lag_ms_max:.0f})")
    return ", ".join(parts)


async def watch_loop(counters: Counters, fleet: Fleet | None = None, interval_s: float = LAG_INTERVAL_S) -> None:
    """Measures how late timers run and how long engines have nothing of ours to do, until cancelled."""
    clock = asyncio.get_running_loop().time
    lags: deque[float] = deque(maxlen=LAGS_KEPT)
    measured, before = 0, clock()
    while True:
        due = clock() + interval_s
        await asyncio.sleep(interval_s)
        now = clock()
        lag_ms = max(0.0, (now - due) * 1000)
        lags.append(lag_ms)
        counters.loop_lag_ms_max = max(counters.loop_lag_ms_max, lag_ms)
        counters.loop_lag_ms_mean += (lag_ms - counters.loop_lag_ms_mean) / (measured + 1)
        if measured % SORT_EVERY == 0 or lag_ms > counters.loop_lag_ms_p99:
            counters.loop_lag_ms_p99 = percentile(lags, 0.99)
        measured += 1
        up = [engine for engine in fleet.engines if engine.state == "up"] if fleet is not None else []
        counters.engine_seconds += (now - before) * len(up)
        counters.engine_idle_seconds += (now - before) * sum(engine.claimed == 0 for engine in up)
        before = now


def percentile(values: Collection[float], share: float) -> float:
    """The least of the values that `share` of them do not exceed; 0.0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
