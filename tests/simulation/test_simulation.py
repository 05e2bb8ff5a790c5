"""A slice of the simulation's seeds, and that a seed is a history: the same one, byte for byte, wherever it runs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from strawq.testing.simulation import simulate

SLICES, SEEDS_PER_SLICE = 8, 6


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Lost sessions are the daily bread here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("part", range(SLICES))
def test_no_guarantee_breaks_in_seeds(part: int) -> None:
    first = part * SEEDS_PER_SLICE
    histories = [simulate(seed) for seed in range(first, first + SEEDS_PER_SLICE)]
    assert sum(history.accepted for history in histories) > SEEDS_PER_SLICE
    assert sum(history.entries for history in histories) > 30 * SEEDS_PER_SLICE


def test_the_same_seed_gives_the_same_history_in_another_process() -> None:
    """Hash seeds differ between processes: no order may come from a set."""
    seeds = (3, 11)
    here = [simulate(seed).digest for seed in seeds]
    program = f"from strawq.testing.simulation import simulate\nfor s in {seeds}: print(simulate(s).digest)"
    for hash_seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        there = subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
        )
        assert there.stdout.split() == here


def test_two_seeds_give_two_histories() -> None:
    assert simulate(3).digest != simulate(4).digest


def test_a_slice_walks_every_path() -> None:
    """The seeds of the slice do everything that there is to do, or a clean run would say little."""
    histories = [simulate(seed) for seed in range(1000, 1024)]
    happened = {name for history in histories for name, count in history.events.items() if count}
    assert {
        "Submitted",
        "Acquired",
        "Reported",
        "BatchTaken",
        "BatchFinished",
        "BatchReturned",
        "Checkpointed",
        "RolledBack",
        "CheckpointDropped",
        "BranchDropped",
        "Paused",
        "Resumed",
        "VersionPublished",
        "Expired",
        "Left",
        "EpochOpened",
        "EpochClosed",
        "Trimmed",
        "ObjectsMoved",
        "FailedRetried",
        "Pinned",
        "Unpinned",
        "Archived",
        "ArchiveDropped",
        "Sealed",
    } <= happened
    assert sum(history.power_cuts for history in histories) > 0
    assert sum(history.torn for history in histories) > 0
