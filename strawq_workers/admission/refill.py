"""Refill: how many groups one rollout leases next, and what it owes at its end.

The rule: a rollout that returns or raises leaves nothing in flight, and every group it fetched was kept, dropped by the
filter, or returned to the queue: fetched = kept + dropped + returned. `RolloutPlan.close` refuses to end otherwise.

Leasing exactly what was dropped keeps that account too, but at the tail one group runs while the other engines idle.
Here the free slots are filled while the target is not reached, because surplus is not waste: a surplus group that has
finished goes back as ready, one that has not goes back as partial with its prefix, and the next rollout is served
those first (ready, partial, fresh; oldest first). So whatever was started first is used first, however slow it was: a
group can be late for a batch, never thrown away for it.

The price is age: surplus is one policy version older when it is used. `max_surplus` bounds it; 0 is the exact top-up.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from strawq.errors import BadInput

Action = Literal["lease", "wait", "done", "short", "failed"]
Stage = Literal["ready", "partial", "fresh"]
Source = Literal["open", "empty", "ended"]


class Step(msgspec.Struct, frozen=True):
    """What the rollout does next.

    lease   lease `ready` groups that are complete (they need no slots) and `generate` groups to generate
    wait    wait until a group ends or the queue has input; `reason` says for what
    done    the target is reached: stop what is in flight, return it to the queue, close
    short   the input has ended before the target was reached: close with what there is; `reason` says so
    failed  a group failed for good: cancel and await the rest, return it, close, raise `reason`
    """

    action: Action
    ready: int = 0
    generate: int = 0
    reason: str = ""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What became of every group that a rollout fetched, in groups."""

    fetched: int
    kept: int
    dropped: int
    returned_ready: int
    returned_partial: int
    returned_fresh: int

    @property
    def returned(self) -> int:
        return self.returned_ready + self.returned_partial + self.returned_fresh


class RolloutPlan:
    """The plan and the account of one rollout. The driver reports each lease and each end, and asks `step` what is
    next."""

    def __init__(self, target: int, *, max_surplus: int | None = None) -> None:
        """`target`: groups to keep. `max_surplus`: groups in flight beyond what is missing; None fills every free slot.

        Raises BadInput for a target below 1 or a negative surplus.
        """
        if target < 1 or (max_surplus is not None and max_surplus < 0):
            raise BadInput(f"a rollout needs a target of 1 and a surplus of 0 or more, not {target} and {max_surplus}")
        self.target = target
        self.max_surplus = max_surplus
        self._in_flight: dict[str, Stage] = {}
        self._fetched = 0
        self._kept = 0
        self._drops: dict[str, int] = {}
        self._returned: dict[Stage, int] = {"ready": 0, "partial": 0, "fresh": 0}
        self._failure = ""
        self._closed = False

    # What there is.

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Groups that were fetched and have not ended, in the order they were fetched."""
        return tuple(self._in_flight)

    @property
    def kept_count(self) -> int:
        return self._kept

    @property
    def dropped_count(self) -> int:
        return sum(self._drops.values())

    @property
    def missing(self) -> int:
        """Groups that the target still needs."""
        return self.target - self._kept

    def metrics(self) -> dict[str, float]:
        """Filter metrics under the names that slime reports: drops by reason, all drops, and their share of the
        judged."""
        dropped = self.dropped_count
        named: dict[str, float] = {f"rollout/dynamic_filter/drop_{why}": n for why, n in sorted(self._drops.items())}
        named["rollout/dynamic_filter/dropped_groups"] = dropped
        named["rollout/dynamic_filter/dropped_ratio"] = dropped / max(1, dropped + self._kept)
        return named

    # What is next.

    def step(self, free_groups: int, *, ready_available: int = 0, source: Source = "open") -> Step:
        """Decide from the free group slots, the complete groups that wait in the queue, and the state of its input.

        `source`: "open" (fresh or partial groups may be leased), "empty" (none now), "ended" (none ever again).
        """
        if self._failure:
            return Step("failed", reason=self._failure)
        if self.missing == 0:
            return Step("done")
        in_hand = sum(1 for stage in self._in_flight.values() if stage == "ready")
        ready = max(0, min(ready_available, self.missing - in_hand))
        generate = self._to_generate(free_groups, in_hand + ready) if source == "open" else 0
        if ready or generate:
            return Step("lease", ready=ready, generate=generate)
        if self._in_flight:
            return Step("wait", reason=f"{len(self._in_flight)} groups in flight")
        if source == "ended":
            return Step("short", reason=f"the input has ended with {self._kept} of {self.target} groups")
        if source == "empty":
            return Step("wait", reason="the queue is empty")
        return Step("wait", reason="no slot is free and nothing is in flight")

    def _to_generate(self, free_groups: int, complete: int) -> int:
        # Complete groups in hand are judged at once: while they can fill the batch, nothing is started beside them.
        if complete >= self.missing:
            return 0
        if self.max_surplus is None:
            return max(0, free_groups)
        generating = sum(1 for stage in self._in_flight.values() if stage != "ready")
        return max(0, min(free_groups, self.missing - complete + self.max_surplus - generating))

    # What happens.

    def fetched(self, group: str, stage: Stage = "fresh") -> None:
        """A group was leased. Raises BadInput when it is in flight already or the rollout is closed."""
        if self._closed:
            raise BadInput(f"group {group} was fetched after its rollout was closed: release its lease")
        if group in self._in_flight:
            raise BadInput(f"group {group} is in flight in this rollout already: one lease runs once")
        self._in_flight[group] = stage
        self._fetched += 1

    def kept(self, group: str) -> None:
        """The filter kept a complete group. Raises BadInput past the target: surplus is returned as ready, not kept."""
        if self.missing == 0:
            raise BadInput(f"group {group} would be kept beyond the target of {self.target}: return it as ready")
        self._end(group)
        self._kept += 1

    def dropped(self, group: str, reason: str) -> None:
        """The filter dropped a complete group, for `reason`."""
        self._end(group)
        self._drops[reason] = self._drops.get(reason, 0) + 1

    def returned(self, group: str, stage: Stage) -> None:
        """The group went back to the queue: complete (ready), with a prefix (partial), or as it came (fresh)."""
        self._end(group)
        self._returned[stage] += 1

    def fail(self, reason: str) -> None:
        """The rollout cannot go on. The first reason stays; everything in flight still has to be returned."""
        self._failure = self._failure or reason or "the rollout failed and gave no reason"

    def close(self) -> Account:
        """End the rollout and give its account. Raises BadInput that names the groups still in flight, if any."""
        if self._in_flight:
            names = ", ".join(list(self._in_flight)[:8])
            raise BadInput(f"{len(self._in_flight)} groups are still in flight ({names}): return them before closing")
        self._closed = True
        return Account(
            fetched=self._fetched,
            kept=self._kept,
            dropped=self.dropped_count,
            returned_ready=self._returned["ready"],
            returned_partial=self._returned["partial"],
            returned_fresh=self._returned["fresh"],
        )

    def _end(self, group: str) -> None:
        if self._in_flight.pop(group, None) is None:
            raise BadInput(f"group {group} is not in flight in this rollout: it has ended before, or was never fetched")
