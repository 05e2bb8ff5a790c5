"""Groups that are older than their budget allows: the verdict on one, its samples begun anew, the ages of a batch.

The rule: how often a prompt's tokens were dropped as stale stands in the group itself, so the count outlives workers
and trainers, hooks and new beginnings, and all of them count alike. Tokens whose version is no number have no age.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import get_args

import msgspec

from strawq.errors import BadInput
from strawq.model import UNVERSIONED, policy_number
from strawq.samples import Group, Sample, oldest_version, without_response
from strawq_workers.admission.staleness import (
    STALE_DROPS_MAX,
    Candidate,
    Policy,
    StalenessBudget,
    Verdict,
    staleness_of,
)

STALE_DROPS = "stale_drops"
"""Key of `Sample.metadata` of a group's first sample: how often its tokens were dropped as stale."""


class AgeLimit(msgspec.Struct, frozen=True):
    """What a group's age is held against: `max_staleness` in versions (-1: none), and how often one prompt may be
    dropped for it under the policy `drop`."""

    max_staleness: int = -1
    policy: Policy = "admit"
    drops_max: int = STALE_DROPS_MAX

    def __post_init__(self) -> None:
        if self.max_staleness < -1:
            raise BadInput(f"max_staleness is {self.max_staleness}; it must be at least 0, or -1 for no budget")
        if self.policy not in get_args(Policy):
            raise BadInput(f"unknown staleness policy {self.policy!r}: choose admit, oldest_first or drop")
        if self.drops_max < 1:
            raise BadInput(f"stale_drops_max is {self.drops_max}; it must be at least 1")

    def verdict(self, group: Group, samples: Iterable[Sample], served: str, log: logging.Logger) -> Verdict:
        """What becomes of these samples of the group while `served` is published: go on (`take`), `drop`, or go on
        although they are `late`. Warns through `log` before a prompt has used up its drops."""
        if self.max_staleness < 0:
            return "take"
        samples = tuple(samples)
        oldest, newest = oldest_version(msgspec.structs.replace(group, samples=samples)), policy_number(served)
        name = group.prompt.group_id or group.task_id
        budget = StalenessBudget(
            self.max_staleness,
            self.policy,
            batch_groups=1,
            max_drops_per_prompt=self.drops_max,
            drops={name: drops_of(samples)},
        )
        candidate = Candidate(name, name, None if oldest == UNVERSIONED else oldest, 0)
        selection = budget.select([candidate], served_version=None if newest == UNVERSIONED else newest)
        for warning in selection.warnings:
            log.warning("%s", warning)
        return "drop" if selection.drop else "late" if selection.over_limit else "take"


def drops_of(samples: Iterable[Sample]) -> int:
    """How often the group was dropped as stale so far."""
    counts = (sample.metadata.get(STALE_DROPS) for sample in samples)
    return max((count for count in counts if type(count) is int), default=0)  # a user may have given the key a meaning


def with_drops(samples: Mapping[int, Sample]) -> set[int]:
    """Those that have the count, which is to be saved whatever else there is of them."""
    return {index for index, sample in samples.items() if STALE_DROPS in sample.metadata}


def begun_again(sample: Sample, unbegun: Sample | None = None) -> Sample:
    """The sample without a token: as it was when it was unbegun (None: nobody knows), and with its count of drops. What
    else stands in its metadata said something of the tokens."""
    anew = without_response(sample) if unbegun is None else unbegun
    if STALE_DROPS not in sample.metadata:
        return anew
    metadata = {**anew.metadata, STALE_DROPS: sample.metadata[STALE_DROPS]}
    return msgspec.structs.replace(anew, metadata=metadata)


def begun_anew(samples: Mapping[int, Sample], unbegun: Mapping[int, Sample] | None = None) -> dict[int, Sample]:
    """All samples without a token, and one drop more on their account; `unbegun` as in `begun_again`."""
    count, first, known = drops_of(samples.values()) + 1, min(samples), unbegun or {}
    anew = {index: begun_again(sample, known.get(index)) for index, sample in samples.items()}
    anew[first] = msgspec.structs.replace(anew[first], metadata={**anew[first].metadata, STALE_DROPS: count})
    return anew


def staleness_metrics(oldest: Iterable[int], served: str, max_staleness: int) -> dict[str, float]:
    """Ages of a batch's groups under slime's names: the served version minus the oldest version of a group's tokens,
    over the groups for which both are numbers; the others are counted. With a budget (-1: none) also how many groups
    are beyond it."""
    newest = policy_number(served)
    ages = [
        staleness_of(None if version == UNVERSIONED else version, None if newest == UNVERSIONED else newest)
        for version in oldest
    ]
    known = [age for age in ages if age is not None]
    found: dict[str, float] = {"rollout/staleness/unknown_count": len(ages) - len(known)}
    if known:
        found["rollout/staleness/mean"] = sum(known) / len(known)
        found["rollout/staleness/max"] = max(known)
    if max_staleness >= 0:
        found["rollout/staleness/late_groups"] = sum(age > max_staleness for age in known)
    return found
