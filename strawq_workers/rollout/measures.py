"""Numbers about a rollout, under slime's names where slime has one.

The rule: everything is counted from what happened (the account, the worker's counters, the groups' own versions), and
what is not known is counted as unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from strawq_workers.admission.refill import Account
from strawq_workers.rates import SUMS
from strawq_workers.worker.metrics import Counters, WorkerSummary, metrics_of


def rollout_metrics(account: Account, missing: int, summary: WorkerSummary, rates: WorkRates) -> dict[str, float]:
    """What one synchronous rollout did: groups by their end, those that the batch lacks, and the worker's counters.
    `rates` was made when it began."""
    found: dict[str, float] = {
        "rollout/groups/missing": missing,
        "rollout/groups/fetched": account.fetched,
        "rollout/groups/kept": account.kept,
        "rollout/groups/dropped": account.dropped,
        "rollout/groups/returned_ready": account.returned_ready,
        "rollout/groups/returned_partial": account.returned_partial,
        "rollout/groups/returned_fresh": account.returned_fresh,
        "rollout/seconds": summary.seconds,
    }
    return {**found, **rates.since_last(summary.counters), **metrics_of(summary.counters)}


class _Added:
    """What was added to running totals since the look before. They begin at zero with each worker; what one has added
    between the last look and its end belongs to the next one."""

    def __init__(self, read: Callable[[Any], Mapping[str, float]]) -> None:
        self._read = read
        self._live: Any = None
        self._before: Mapping[str, float] = {}

    def since_last(self, live: Any) -> dict[str, float]:
        """`live`: the totals of the worker of now, an object that it goes on counting in."""
        found: dict[str, float] = {}
        for totals in (live,) if self._live is None or self._live is live else (self._live, live):
            now = dict(self._read(totals))
            for name, value in now.items():
                found[name] = found.get(name, 0) + value - self._before.get(name, 0)
            self._before = now if totals is live else {}
        self._live = live
        return found


class WorkRates:
    """What the workers of this process, one after the other, have done since the look before, under the names that
    batches of a pool have (see `Rates`)."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._work = _Added(msgspec.structs.asdict)
        self._drops = _Added(dict)

    def since_last(self, counters: Counters) -> dict[str, float]:
        """`counters`: the running totals of the worker of now."""
        added, at = self._work.since_last(counters), time.monotonic()
        found = {metric: added[name] for metric, name in SUMS.items()}
        found["rollout/accepted_groups"] = added["groups_accepted"]
        found["rollout/event_loop_lag_ms_p99"] = counters.loop_lag_ms_p99
        if at > self._at:
            found["rollout/accepted_groups_per_hour"] = added["groups_accepted"] * 3600 / (at - self._at)
        if added["engine_seconds"] > 0:
            found["rollout/engine_idle_share"] = min(1.0, added["engine_idle_seconds"] / added["engine_seconds"])
        self._at = at
        return found

    def drops_since_last(self, reasons: dict[str, int]) -> dict[str, int]:
        """What the filter has dropped, by reason. `reasons`: the worker's running totals."""
        return {why: int(count) for why, count in self._drops.since_last(reasons).items() if count > 0}


def drop_metrics(drops: Mapping[str, int], kept: int) -> dict[str, float]:
    """What the filter dropped, by reason, beside `kept` groups."""
    dropped = sum(drops.values())
    found: dict[str, float] = {f"rollout/dynamic_filter/drop_{why}": count for why, count in sorted(drops.items())}
    found["rollout/dynamic_filter/dropped_groups"] = dropped
    found["rollout/dynamic_filter/dropped_ratio"] = dropped / max(1, dropped + kept)
    return found
