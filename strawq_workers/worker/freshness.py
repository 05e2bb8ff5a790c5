"""How old a group may be when this worker goes on with it, and when it hands it in.

The rule: under the policy `drop`, a group whose oldest token is more than `max_staleness` versions behind the published
one is thrown away and its prompt starts anew; the count of that stands in the group itself, so that it outlives
workers, and after `stale_drops_max` times the group is delivered late instead. What is dropped is counted and said,
the drop before the last one as a warning. Tokens whose version is no number have no age.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import msgspec

from strawq.model import UNVERSIONED, policy_number
from strawq.samples import Group, Sample, oldest_version
from strawq_workers.admission.staleness import Candidate, StalenessBudget, Verdict
from strawq_workers.worker.generation import generated_tokens
from strawq_workers.worker.place import Place

log = logging.getLogger("strawq.worker")

STALE_DROPS = "stale_drops"
"""Key of `Sample.metadata` of a group's first sample: how often its tokens were dropped as stale."""


def verdict_on(place: Place, group: Group, samples: Iterable[Sample]) -> Verdict:
    """What becomes of these samples of the group now: go on (`take`), `drop`, or go on although they are `late`."""
    options = place.options
    if options.max_staleness < 0:
        return "take"
    samples = tuple(samples)
    oldest, served = oldest_version(msgspec.structs.replace(group, samples=samples)), policy_number(place.served)
    name = group.prompt.group_id or group.task_id
    budget = StalenessBudget(
        options.max_staleness,
        options.staleness_policy,
        batch_groups=1,
        max_drops_per_prompt=options.stale_drops_max,
        drops={name: drops_of(samples)},
    )
    candidate = Candidate(name, name, None if oldest == UNVERSIONED else oldest, 0)
    selection = budget.select([candidate], served_version=None if served == UNVERSIONED else served)
    for warning in selection.warnings:
        log.warning("%s", warning)
    return "drop" if selection.drop else "late" if selection.over_limit else "take"


def drops_of(samples: Iterable[Sample]) -> int:
    """How often the group was dropped as stale so far."""
    return max((int(sample.metadata.get(STALE_DROPS, 0)) for sample in samples), default=0)


def start_anew(place: Place, samples: Mapping[int, Sample]) -> dict[int, Sample]:
    """The samples without a token, and one drop more on their account."""
    count = drops_of(samples.values()) + 1
    place.counters.tokens_discarded += sum(map(generated_tokens, samples.values()))
    place.counters.stale_drops += 1
    first = min(samples)
    return {
        index: Sample(
            index, prompt_tokens=sample.prompt_tokens, metadata={STALE_DROPS: count} if index == first else {}
        )
        for index, sample in samples.items()
    }
