"""Staleness: how old a group may be when it is trained on.

The staleness of a group is the served policy version minus the oldest version of its generated tokens. A budget of
`max_staleness` versions is kept by one of three policies, and the user says which:

- `admit`: admit less. No more than (max_staleness + 1) batches of groups are unconsumed (ready or in flight), so the
  typical group is within the budget. Nothing is held back or discarded: a straggler that was overtaken is delivered
  late and counted in `over_limit`.
- `oldest_first`: `admit`, and a batch waits for an older group whenever leaving it out would make it, or one behind it,
  miss the budget. Nothing is discarded and no group exceeds the budget; the trainer may wait for a straggler.
- `drop`: `admit`, and a group beyond the budget is dropped, and its prompt begins anew. Drops are counted per prompt.
  The drop before the last one allowed warns; a prompt that has used up `max_drops_per_prompt` is delivered late
  instead of starving, because dropping the slow prompts for ever is a bias, and is counted in `over_limit`.

In all three the oldest versions are taken first, unversioned groups last, ties in the order they were leased. A group
whose version is unknown, or newer than the served one (after a rollback), has no staleness and is never dropped.

Decisions depend on what the pool holds now and never on counters since the process started, so a recovered worker keeps
the same bound. Only the drops per prompt must be carried over (`drops`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from strawq.errors import BadInput

Policy = Literal["admit", "oldest_first", "drop"]
Verdict = Literal["take", "drop", "late"]

STALE_DROPS_MAX = 3
"""So often a prompt is dropped as stale, where nobody says otherwise."""


class Candidate(msgspec.Struct, frozen=True):
    """A group that is ready, or not yet. `oldest_version`: least policy version of its tokens (for a group without
    tokens, the version served when it was leased), None if unknown. `order`: place in the order of leases."""

    group: str
    prompt: str
    oldest_version: int | None
    order: int


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of the next batch. `take` is in order and empty while the batch must wait; `waiting_for` names the
    unfinished groups it waits for (empty: it waits for any). `over_limit` are those in `take` beyond the budget."""

    take: tuple[Candidate, ...] = ()
    drop: tuple[Candidate, ...] = ()
    waiting_for: tuple[str, ...] = ()
    over_limit: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def staleness_of(oldest_version: int | None, served_version: int | None) -> int | None:
    """Served version minus oldest token version; None when either is unknown or the group is newer than the server."""
    if oldest_version is None or served_version is None or oldest_version > served_version:
        return None
    return served_version - oldest_version


def _age_order(candidate: Candidate) -> tuple[bool, int, int]:
    version = candidate.oldest_version
    return (version is None, version or 0, candidate.order)


def window_groups(max_staleness: int | None, batch_groups: int) -> int | None:
    """Most groups that may be begun and not trained: `max_staleness` + 1 training batches. None: no bound. Under `drop`
    too: what is begun beyond that is too old before its batch comes."""
    return None if max_staleness is None else (max_staleness + 1) * batch_groups


class StalenessBudget:
    """Decisions of one policy. `select` changes nothing; `committed` counts what a committed selection dropped."""

    def __init__(
        self,
        max_staleness: int | None,
        policy: Policy,
        *,
        batch_groups: int,
        max_drops_per_prompt: int = STALE_DROPS_MAX,
        drops: Mapping[str, int] | None = None,
    ) -> None:
        """`max_staleness`: versions, None for no budget (order only). `batch_groups`: groups of one training batch,
        after which the version rises by one. `drops`: counts per prompt of an earlier process. Raises BadInput for bad
        values.
        """
        if max_staleness is not None and max_staleness < 0:
            raise BadInput(f"max_staleness is {max_staleness}; it must be at least 0, or unset for no budget")
        if policy not in ("admit", "oldest_first", "drop"):
            raise BadInput(f"unknown staleness policy {policy!r}: choose admit, oldest_first or drop")
        if batch_groups < 1 or max_drops_per_prompt < 1:
            raise BadInput(
                f"a batch of {batch_groups} groups and {max_drops_per_prompt} drops per prompt: both must be at least 1"
            )
        self.max_staleness = max_staleness
        self.policy: Policy = policy
        self.batch_groups = batch_groups
        self.max_drops_per_prompt = max_drops_per_prompt
        self._drops: dict[str, int] = dict(drops or {})
        self.dropped_groups = sum(self._drops.values())

    @property
    def drops(self) -> dict[str, int]:
        """Drops of each prompt since it was last delivered: state to carry over a restart."""
        return dict(self._drops)

    def admissible(self, unconsumed_groups: int) -> int | None:
        """Groups that may be admitted now, given those ready or in flight in the whole pool; None for no bound."""
        window = window_groups(self.max_staleness, self.batch_groups)
        return None if window is None else max(0, window - unconsumed_groups)

    def judge(self, candidate: Candidate, served_version: int | None) -> Verdict:
        """Verdict on one group by itself: within the budget, to be dropped, or to be delivered late.

        Under `drop`, ask it before a partial group is resumed too: what is beyond the budget now stays beyond it.
        """
        age = staleness_of(candidate.oldest_version, served_version)
        if self.max_staleness is None or age is None or age <= self.max_staleness:
            return "take"
        if self.policy == "drop" and self._drops.get(candidate.prompt, 0) < self.max_drops_per_prompt:
            return "drop"
        return "late"

    def select(
        self,
        ready: Sequence[Candidate],
        unfinished: Sequence[Candidate] = (),
        *,
        served_version: int | None,
    ) -> Selection:
        """Choose the next batch of `batch_groups` from the ready groups, or what to wait for.

        `unfinished` are the other unconsumed groups: running, leased or partial. `served_version` is the version that
        the batch will be trained on.
        """
        ordered = sorted(ready, key=_age_order)
        verdicts = {candidate.group: self.judge(candidate, served_version) for candidate in ordered}
        drop = tuple(candidate for candidate in ordered if verdicts[candidate.group] == "drop")
        take = tuple(candidate for candidate in ordered if verdicts[candidate.group] != "drop")[: self.batch_groups]
        warnings = tuple(self._warnings(drop))
        if len(take) < self.batch_groups:
            return Selection(drop=drop, warnings=warnings)
        if self.policy == "oldest_first":
            waiting_for = self._must_wait_for(take, [*ordered, *unfinished], served_version)
            if waiting_for:
                return Selection(waiting_for=waiting_for)
        late = tuple(candidate.group for candidate in take if verdicts[candidate.group] == "late")
        return Selection(take=take, drop=drop, over_limit=late, warnings=warnings)

    def committed(self, selection: Selection) -> None:
        """Count a selection that was committed: drops add to their prompts, delivered prompts start again at zero."""
        for candidate in selection.drop:
            self._drops[candidate.prompt] = self._drops.get(candidate.prompt, 0) + 1
            self.dropped_groups += 1
        for candidate in selection.take:
            self._drops.pop(candidate.prompt, None)

    def _warnings(self, drop: Iterable[Candidate]) -> Iterable[str]:
        for candidate in drop:
            count = self._drops.get(candidate.prompt, 0) + 1
            if count >= self.max_drops_per_prompt - 1:
                yield (
                    f"prompt {candidate.prompt} is dropped as stale, {count} of at most {self.max_drops_per_prompt} "
                    "times before it is delivered late: its answers take longer than "
                    f"max_staleness={self.max_staleness} allows; raise it, or choose the policy oldest_first"
                )

    def _must_wait_for(
        self, take: Sequence[Candidate], everything: Sequence[Candidate], served_version: int | None
    ) -> tuple[str, ...]:
        """Unfinished groups that this batch may not leave behind.

        Batch t + j is the last for a group whose oldest version is t + j - max_staleness. Leaving is safe while, for
        every j, no more than j batches of groups are left that are due by batch t + j. Waiting is right only if it
        helps: a backlog that no order could save (a smaller budget after a restart) is delivered late rather than
        never.
        """
        if self.max_staleness is None or served_version is None:
            return ()
        best = sorted(everything, key=_age_order)[: self.batch_groups]
        if self._overdue(best, everything, served_version) >= self._overdue(take, everything, served_version):
            return ()
        taken = {candidate.group for candidate in take}
        return tuple(candidate.group for candidate in best if candidate.group not in taken)

    def _overdue(self, take: Sequence[Candidate], everything: Sequence[Candidate], served_version: int) -> int:
        """Groups that must miss the budget at some later batch if `take` is the next one."""
        taken = {candidate.group for candidate in take}
        budget = self.max_staleness or 0
        worst = 0
        left = [
            max(0, candidate.oldest_version + budget - served_version)
            for candidate in everything
            if candidate.group not in taken
            and staleness_of(candidate.oldest_version, served_version) is not None
            and candidate.oldest_version is not None
        ]
        for batches in range(budget + 1):
            due = sum(1 for slack in left if slack <= batches)
            worst = max(worst, due - batches * self.batch_groups)
        return worst
