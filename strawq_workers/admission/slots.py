"""Slots: how much of the engines each worker may fill.

The rule: C·E sample slots (C = concurrency per engine, E = engines) hold K = ⌊C·E / G⌋ whole groups of G samples, and W
workers divide K by quotient and remainder, so no two shares differ by more than one and no share is zero. A division
that would leave a worker without room for one group (C·E < W·G) is refused: a worker with zero slots waits for ever and
takes the whole step with it.

When workers come or go, every worker computes the new division from the same list of live workers. A smaller share
takes nothing away from running groups (see `Admission.resize`): the surplus drains as they end. When the new division
is refused, the worker that came too much leaves with the error and the others keep the shares they have.
"""

from __future__ import annotations

from collections.abc import Sequence

from strawq.errors import BadInput


def total_slots(concurrency_per_engine: int, engines: int) -> int:
    """C·E, in samples. A prefill/decode pair counts as one engine. Raises BadInput unless both are positive."""
    if concurrency_per_engine < 1 or engines < 1:
        raise BadInput(
            f"no slots: {engines} engines with a concurrency of {concurrency_per_engine}; both must be at least 1"
        )
    return concurrency_per_engine * engines


def _even(total: int, workers: int) -> list[int]:
    quotient, remainder = divmod(total, workers)
    return [quotient + 1] * remainder + [quotient] * (workers - remainder)


_REMEDY = {
    "C·E": "raise C (the concurrency per engine) until C·E >= W·G, add engines",
    "max_concurrent_samples": "raise max_concurrent_samples",
}


def _check(total_samples: int, group_size: int, workers: int, name: str) -> None:
    if group_size < 1 or workers < 1:
        raise BadInput(f"cannot divide {name}: {workers} workers and groups of {group_size}; both must be at least 1")
    if total_samples < workers * group_size:
        most = total_samples // group_size
        raise BadInput(
            f"{name} = {total_samples} samples is less than W·G = {workers}·{group_size} = {workers * group_size}: "
            f"every worker needs room for one group; {_REMEDY[name]}, or make groups smaller"
            + (f"; or run at most {most} workers" if most and most < workers else "")
        )


def divide_slots(total_slots: int, group_size: int, workers: int) -> list[int]:
    """Group slots of each worker: ⌊total_slots / group_size⌋ groups by quotient and remainder, the first get one more.

    `total_slots` is C·E in samples. Raises BadInput when total_slots < workers·group_size.
    """
    _check(total_slots, group_size, workers, "C·E")
    return _even(total_slots // group_size, workers)


def divide_samples(max_concurrent_samples: int, group_size: int, workers: int) -> list[int]:
    """Sample slots of each worker for sample-level admission, by quotient and remainder.

    Raises BadInput when some worker could not hold one whole group.
    """
    _check(max_concurrent_samples, group_size, workers, "max_concurrent_samples")
    return _even(max_concurrent_samples, workers)


def share_of(total_samples: int, group_size: int, workers: Sequence[str], own: str) -> int:
    """Group slots of the worker `own` among the live `workers`, in the order they came.

    As many of them as there are slots for divide the slots; those are the first. Raises BadInput for one that came
    later, and unless `own` is one of the workers.
    """
    if own not in workers or len(set(workers)) != len(workers):
        raise BadInput(f"worker {own!r} is not one of the distinct workers {list(workers)}")
    position = workers.index(own)
    division = divide_slots(
        total_samples, group_size, max(position + 1, min(len(workers), total_samples // group_size))
    )
    return division[position]


def shares(division: Sequence[int], workers: Sequence[str]) -> dict[str, int]:
    """The division by worker id, in sorted order of the ids, so that every worker computes the same table alone.

    Raises BadInput when the ids repeat or their number is not that of the division.
    """
    if len(set(workers)) != len(workers) or len(workers) != len(division):
        raise BadInput(f"{len(division)} shares need as many distinct workers, not {sorted(workers)}")
    return dict(zip(sorted(workers), division, strict=True))
