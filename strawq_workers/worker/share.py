"""A worker's share of the engines: how many groups it may hold, and how many the pool may hold unconsumed.

The rule: every worker computes the same division from what all of them see. With `workers` 0 these are the live
sessions of the worker's role, in the order they joined: the first ⌊C·E/G⌋ of them divide the slots, and one that came
when there was no slot left for it leaves with an error, so that nobody waits with a share of zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from strawq_workers.admission.reservations import Limits
from strawq_workers.admission.slots import divide_slots, share_of, total_slots
from strawq_workers.admission.staleness import window_groups
from strawq_workers.worker.options import WorkerOptions


def limits_of(options: WorkerOptions, engines: int, peers: Sequence[str] = (), own: str = "") -> Limits:
    """This worker's limits. `peers`: live sessions of its role in the order they joined; `own`: its session. `BadInput`
    if there is no room for it."""
    groups = options.max_groups
    if not groups:
        slots = total_slots(options.concurrency, engines)
        if options.workers:
            groups = divide_slots(slots, options.samples, options.workers)[options.worker_index]
        else:
            order = [*peers, *([] if own in peers else [own])]
            groups = share_of(slots, options.samples, order, own)
    return Limits(
        groups=groups,
        group_size=options.samples,
        samples=options.max_concurrent_samples or None,
        window_groups=window_of(options, options.batch_groups),
    )


def window_of(options: WorkerOptions, batch_groups: int) -> int | None:
    """`window_groups` of these options and batches of so many groups."""
    return None if options.max_staleness < 0 or not batch_groups else window_groups(options.max_staleness, batch_groups)
