"""How old a group may be when this worker goes on with it, and when it hands it in.

The rule: under the policy `drop`, a group whose oldest token is more than `max_staleness` versions behind the published
one is thrown away and its prompt starts anew; after `stale_drops_max` times it is delivered late instead. What is
dropped is counted and said, the drop before the last one as a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from strawq.samples import Group, Sample
from strawq_workers.admission.staleness import Verdict
from strawq_workers.stale_groups import AgeLimit, begun_anew
from strawq_workers.worker.generation import generated_tokens
from strawq_workers.worker.metrics import Counters
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.place import Place

log = logging.getLogger("strawq.worker")


def age_limit(options: WorkerOptions) -> AgeLimit:
    return AgeLimit(options.max_staleness, options.staleness_policy, options.stale_drops_max)


def verdict_on(place: Place, group: Group, samples: Iterable[Sample]) -> Verdict:
    """What becomes of these samples of the group now: go on (`take`), `drop`, or go on although they are `late`."""
    return age_limit(place.options).verdict(group, samples, place.served, log)


def start_anew(
    counters: Counters, samples: Mapping[int, Sample], unbegun: Mapping[int, Sample] | None = None
) -> dict[int, Sample]:
    """As `begun_anew`, counted."""
    counters.tokens_discarded += sum(map(generated_tokens, samples.values()))
    counters.stale_drops += 1
    return begun_anew(samples, unbegun)
