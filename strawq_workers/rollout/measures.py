"""Numbers about a rollout, under slime's names where slime has one.

The rule: everything is counted from what happened (the account, the worker's counters, the groups' own versions), and
what is not known is counted as unknown.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from strawq.model import UNVERSIONED, policy_number
from strawq.samples import Group, oldest_version
from strawq_workers.admission.refill import Account
from strawq_workers.admission.staleness import staleness_of
from strawq_workers.worker.metrics import WorkerSummary, metrics_of


def rollout_metrics(account: Account, missing: int, summary: WorkerSummary) -> dict[str, float]:
    """What one synchronous rollout did: groups by their end, those that the batch lacks, and the worker's counters."""
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
    if summary.seconds > 0:
        found["rollout/accepted_groups_per_hour"] = account.kept * 3600 / summary.seconds
    return {**found, **metrics_of(summary.counters)}


class Rate:
    """Accepted groups per hour, from one call to the next; the first counts from now and `accepted`."""

    def __init__(self, accepted: int = 0) -> None:
        self._at = time.monotonic()
        self._count = accepted

    def per_hour(self, accepted: int) -> dict[str, float]:
        """`accepted`: groups that were accepted so far."""
        now = time.monotonic()
        seconds, more = now - self._at, accepted - self._count
        self._at, self._count = now, accepted
        return {"rollout/accepted_groups_per_hour": more * 3600 / seconds} if seconds > 0 else {}


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
