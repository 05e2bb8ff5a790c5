"""What has happened in a queue since the last batch, as metrics: accepted and dropped groups, tokens, aborts, idle
time.

The rule: counts of groups are the log's, so they are right whoever asks; counts of tokens and requests are those that
workers have left beside their heartbeats (`worker.counts`), a few seconds old. Everything is a difference of totals
between two looks of this process. A worker of which there was nothing before began with nothing if it began since the
first look, and else with what it has counted by now: how long it has counted is in its file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from strawq.pool import Pool
from strawq_workers.worker.counts import WorkerCounts, read_counts
from strawq_workers.worker.metrics import Counters

SUMS = {
    "rollout/generated_tokens": "tokens_generated",
    "rollout/resumed_tokens": "tokens_resumed",
    "rollout/regenerated_tokens": "tokens_discarded",
    "rollout/aborts": "aborts",
    "rollout/retries": "retries",
    "rollout/staleness/dropped_groups": "stale_drops",
}
"""Metric -> counter of a worker."""
_HOUR_S = 3600.0


def summed(metrics: Mapping[str, float], added: Mapping[str, float]) -> dict[str, float]:
    """The metrics, with what was counted elsewhere under the same names."""
    return {**metrics, **{name: metrics.get(name, 0) + value for name, value in added.items()}}


class _Look(msgspec.Struct, frozen=True):
    accepted: int
    reasons: dict[str, int]


class Rates:
    """Metrics of one queue, each time since the time before; the first time since this was made."""

    def __init__(self, pool: Pool, queue: str = "rollout", clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._queue = queue
        self._clock = clock
        self._before = self._look()
        self._counts = read_counts(pool, queue)
        self._began = self._at = clock()

    def since_last(self) -> dict[str, float]:
        """Names as slime's where it has one. `rollout/dynamic_filter/drop_<reason>`, `dropped_groups` and
        `dropped_ratio` (of the groups that were judged); `rollout/accepted_groups` and `accepted_groups_per_hour`;
        tokens that were generated, resumed from prefixes, and thrown away to be generated again; aborts and retries;
        groups that were dropped as stale, or delivered late; `rollout/workers` that have left counts;
        `rollout/engine_idle_share` (of the time of engines that are up: without a request of the worker's) and
        `rollout/event_loop_lag_ms_p99` (of the worst worker), if there are any. Raises what the log raises."""
        now, counts, at = self._look(), read_counts(self._pool, self._queue), self._clock()
        found = self._groups(now, at - self._at) | self._work(counts, at - self._began)
        self._before, self._at = now, at
        self._counts |= counts
        return found

    def _groups(self, now: _Look, seconds: float) -> dict[str, float]:
        # After a rollback the counts are lower than before: nothing has happened since then that could be told.
        accepted = max(0, now.accepted - self._before.accepted)
        drops = {why: count - self._before.reasons.get(why, 0) for why, count in sorted(now.reasons.items())}
        found: dict[str, float] = {
            f"rollout/dynamic_filter/drop_{why}": count for why, count in drops.items() if count > 0
        }
        dropped = sum(count for count in drops.values() if count > 0)
        found["rollout/dynamic_filter/dropped_groups"] = dropped
        found["rollout/dynamic_filter/dropped_ratio"] = dropped / max(1, dropped + accepted)
        found["rollout/accepted_groups"] = accepted
        if seconds > 0:
            found["rollout/accepted_groups_per_hour"] = accepted * _HOUR_S / seconds
        return found

    def _work(self, counts: Mapping[str, WorkerCounts], seconds: float) -> dict[str, float]:
        """`seconds`: since the first look."""
        pairs = [(one.counters, self._counters_before(one, seconds)) for one in counts.values()]

        def added(name: str) -> float:
            total: float = sum(getattr(now, name) - getattr(before, name) for now, before in pairs)
            return total

        found: dict[str, float] = {metric: added(name) for metric, name in SUMS.items()}
        found["rollout/workers"] = len(pairs)
        engine_seconds = added("engine_seconds")
        if engine_seconds > 0:
            found["rollout/engine_idle_share"] = min(1.0, added("engine_idle_seconds") / engine_seconds)
        if pairs:
            found["rollout/event_loop_lag_ms_p99"] = max(now.loop_lag_ms_p99 for now, _ in pairs)
        return found

    def _counters_before(self, now: WorkerCounts, seconds: float) -> Counters:
        known = self._counts.get(now.instance)
        if known is not None:
            return known.counters
        return Counters() if now.seconds <= seconds else now.counters

    def _look(self) -> _Look:
        def view(machine: Any) -> _Look:
            row = machine.state.branch.queues[self._queue].row
            return _Look(row.accepted, dict(row.reasons))

        look: _Look = self._pool.log.refresh(view)
        return look
