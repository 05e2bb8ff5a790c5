"""Drives a worker by a `RolloutPlan`: it leases what the plan says, until the plan has what it needs.

The rule: every lease is told to the plan, and so is every end; when the target is reached, the input has ended or a
group has failed for good, the worker is told to stop, and gives back what it has in hand.
"""

from __future__ import annotations

from collections import Counter

from strawq.handles import Lease, Leases
from strawq_workers.admission.refill import RolloutPlan, Source, Stage, Step
from strawq_workers.worker.generation import finished
from strawq_workers.worker.group import GroupRun
from strawq_workers.worker.place import Place, attempt_of

STOPPED = "rollout"


class PlanIntake:
    """The worker's intake for one rollout. `last` is the plan's last word.

    The plan knows attempts, not tasks: a group that was given back may be leased again before the run of its attempt
    before has ended here."""

    def __init__(self, plan: RolloutPlan, place: Place) -> None:
        self.plan = plan
        self.last = Step("wait")
        self._place = place
        self._source: Source = "open"
        self._drops: Counter[str] = Counter()

    def want(self, room: int) -> int:
        self.last = self.plan.step(room, source=self._source)
        # What there is now is asked for again each time; only an end stays.
        self._source = "ended" if self._source == "ended" else "open"
        if self.last.action in ("done", "short", "failed"):
            self._place.stop(STOPPED)
            return 0
        if self.last.action != "lease":
            return 0
        # Surplus comes after what is missing: complete groups may come first, and then no surplus is needed.
        uncovered = self.plan.missing - len(self.plan.in_flight)
        return min(self.last.generate, uncovered) if uncovered > 0 else self.last.generate

    def none(self, answer: Leases) -> None:
        if answer.status in ("sealed", "ended"):
            self._source = "ended"
            self.want(0)

    def leased(self, lease: Lease) -> None:
        self.plan.fetched(attempt_of(lease), lease.stage)

    def ended(self, run: GroupRun) -> None:
        task, attempt, plan = run.lease.task, run.attempt, self.plan
        if run.end == "accepted":
            if plan.missing:
                plan.kept(attempt)
            else:
                plan.returned(attempt, "ready")
        elif run.end == "dropped":
            plan.dropped(attempt, self._drop_reason())
        else:
            plan.returned(attempt, stage_of(run))
            if task in self._place.dead:
                plan.fail(f"group {task}: {self._place.dead[task]}")
        self.want(0)

    def _drop_reason(self) -> str:
        """One that the worker has counted and the plan has not yet; together they are the same."""
        known = self._place.drop_reasons
        reason = next((why for why, count in known.items() if count > self._drops[why]), "")
        self._drops[reason] += 1
        return reason


def stage_of(run: GroupRun) -> Stage:
    """As what an unfinished group goes back."""
    return "partial" if any(len(s.tokens) or finished(s) for s in run.samples.values()) else "fresh"
