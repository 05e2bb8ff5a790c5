"""Numbers about a rollout, under slime's names where slime has one.

The rule: everything is counted from what happened (the account, the worker's counters, the groups' own versions), and
what is not known is counted as unknown.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from strawq.model import UNVERSIONED, policy_number
from strawq.samples import Group, oldest_version
from strawq_workers.admission.refill import Account
from strawq_workers.admission.staleness import staleness_of
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


class WorkRates:
    """What one worker has done since the look before, under the names that batches of a pool have (see `Rates`)."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._before = Counters()

    def since_last(self, counters: Counters) -> dict[str, float]:
        """`counters`: the worker's running totals."""
        now, before, at = msgspec.structs.replace(counters), self._before, time.monotonic()
        found: dict[str, float] = {metric: getattr(now, name) - getattr(before, name) for metric, name in SUMS.items()}
        accepted = now.groups_accepted - before.groups_accepted
        found["rollout/accepted_groups"] = accepted
        found["rollout/event_loop_lag_ms_p99"] = now.loop_lag_ms_p99
        if at > self._at:
            found["rollout/accepted_groups_per_hour"] = accepted * 3600 / (at - self._at)
        engines = now.engine_seconds - before.engine_seconds
        if engines > 0:
            found["rollout/engine_idle_share"] = min(
                1.0, (now.engine_idle_seconds - before.engine_idle_seconds) / engines
            )
        self._at, self._before = at, now
        return found


def drop_metrics(drops: Mapping[str, int], kept: int) -> dict[str, float]:
    """What the filter dropped, by reason, beside `kept` groups."""
    dropped = sum(drops.values())
    found: dict[str, float] = {f"rollout/dynamic_filter/drop_{why}": count for why, count in sorted(drops.items())}
    found["rollout/dynamic_filter/dropped_groups"] = dropped
    found["rollout/dynamic_filter/dropped_ratio"] = dropped / max(1, dropped + kept)
    return found


def group_metrics(groups: Sequence[Group], served: str) -> dict[str, float]:
    """Staleness of a batch's groups: served version minus the oldest version of a group's tokens."""
    number = policy_number(served)
    ages = [_age(oldest_version(group), number) for group in groups]
    known = [age for age in ages if age is not None]
    found: dict[str, float] = {"rollout/staleness/unknown_count": len(ages) - len(known)}
    if known:
        found["rollout/staleness/mean"] = sum(known) / len(known)
        found["rollout/staleness/max"] = max(known)
    return found


def _age(oldest: int, served: int) -> int | None:
    return staleness_of(None if oldest == UNVERSIONED else oldest, None if served == UNVERSIONED else served)
