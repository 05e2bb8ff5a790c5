"""The staleness budget of a rollout in this process: how much may be begun, and for what a batch waits.

The rule: as on a pool. Under `admit` and `oldest_first` no more than `max_staleness` + 1 batches are unconsumed, the
one in training included; under `oldest_first` a batch also waits for an older group that would miss the budget
otherwise; under `drop` a complete group that is too old when a batch is asked for starts anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from strawq.model import UNVERSIONED, policy_number
from strawq.samples import Group, oldest_version
from strawq_workers.admission.staleness import Candidate, StalenessBudget
from strawq_workers.stale_groups import staleness_metrics
from strawq_workers.worker.freshness import age_limit, start_anew
from strawq_workers.worker.group import GroupRun
from strawq_workers.worker.memory import Entry, MemorySource
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.place import Place
from strawq_workers.worker.share import window_of

log = logging.getLogger("strawq.rollout")


def begin_batch(source: MemorySource, options: WorkerOptions, count: int) -> None:
    """A batch of `count` groups is asked for. With a budget of 0 the one before must be trained, or nothing could be
    begun."""
    source.window = window_of(options, max(count, options.batch_groups)) or 0
    if options.max_staleness == 0:
        source.untrained = 0


def waits_for_older(source: MemorySource, options: WorkerOptions, runs: Iterable[GroupRun], count: int) -> bool:
    """Whether the next batch of `count` groups must wait for one that is not complete."""
    if options.max_staleness < 0 or options.staleness_policy != "oldest_first":
        return False
    running = {
        run.lease.task: Group(run.lease.task, run.group.prompt, tuple(run.samples.values()))
        for run in runs
        if run.work is not None
    }
    done, rest = source.entries()
    budget = StalenessBudget(options.max_staleness, "oldest_first", batch_groups=count)
    served = policy_number(source.policy_version)
    selection = budget.select(
        [_candidate(entry, entry.group) for entry in done],
        [_candidate(entry, running.get(entry.key, entry.group)) for entry in rest],
        served_version=None if served == UNVERSIONED else served,
    )
    return bool(selection.waiting_for)


def begin_stale_anew(source: MemorySource, place: Place) -> None:
    """Take what is beyond the budget out of what is complete. `source.policy_version` is what will be trained on."""
    limit = age_limit(place.options)
    if limit.policy != "drop":
        return
    for entry in source.entries()[0]:
        samples = {sample.index: sample for sample in entry.group.samples}
        if limit.verdict(entry.group, samples.values(), source.policy_version, log) == "drop":
            log.info(
                "group %s is dropped as stale at policy version %s, and starts anew", entry.key, source.policy_version
            )
            unbegun = {index: given for index, given in entry.given.items() if not len(given.tokens)}
            source.begin_anew(entry, list(start_anew(place.counters, samples, unbegun).values()))
            place.changed.set()


def batch_ages(entries: Iterable[Entry], served: str, options: WorkerOptions) -> dict[str, float]:
    """Ages of the groups of a batch, as metrics."""
    return staleness_metrics((oldest_version(entry.group) for entry in entries), served, options.max_staleness)


def _candidate(entry: Entry, group: Group) -> Candidate:
    version = oldest_version(group)
    return Candidate(entry.key, entry.key, None if version == UNVERSIONED else version, entry.order)
