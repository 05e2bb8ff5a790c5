"""What one seed decides before anything runs: limits small enough that every path is walked, faults, and how long."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from strawq.storage.faulty import Fault

_WHERE: dict[str, tuple[str, ...]] = {
    "ENTRIES_PER_SEGMENT": ("strawq.storage.layout", "strawq.trimming"),
    "SNAPSHOT_ENTRIES": ("strawq.storage.log",),
    "INLINE_OBJECT_BYTES": ("strawq.payloads",),
    "REQUESTS_KEPT": ("strawq.core.apply",),
    "RECEIPTS_KEPT": ("strawq.core.state",),
    "STAGING_LOOK_SECONDS": ("strawq.garbage",),
    "MERGE_FILES": ("strawq.merging",),
    "MERGED_OBJECTS": ("strawq.merging",),
    "SWEEP_AGAIN_EPOCHS": ("strawq.garbage",),
}
"""Limits that a simulation shrinks, and the modules that hold them."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One world. Rates are per call, times in true seconds."""

    seed: int
    duration_s: float
    lease_s: float
    limits: dict[str, float]
    rates: dict[Fault, float]
    workers: int
    power_cuts: int
    torn: float
    """Chance that a power cut tears the newest entry, if nobody was told of it and its name is left by chance."""
    links: bool
    max_attempts: int
    max_expirations: int
    max_ready: int
    call_s: float
    """Mean time of a file call."""
    chaos_s: float
    """Mean time between two misfortunes."""


def draw(seed: int) -> Settings:
    """The world of a seed."""
    chance = random.Random(f"world-{seed}")
    level = chance.choice([0.0, 0.3, 1.0])
    power_cuts, torn = chance.choice([0, 0, 1, 2]), chance.choice([0.0, 0.8])
    return Settings(
        seed=seed,
        duration_s=chance.choice([3.0, 4.0, 6.0]),
        lease_s=chance.choice([1.2, 2.0, 3.0]),
        limits={
            "ENTRIES_PER_SEGMENT": chance.choice([1, 2, 3, 8]),
            "SNAPSHOT_ENTRIES": chance.choice([4, 10, 30]),
            # A lone answer rides inside the entry, a prompt too; or both are files.
            "INLINE_OBJECT_BYTES": chance.choice([0, 2_500, 64 << 10]),
            "REQUESTS_KEPT": chance.choice([12, 40, 8192]),
            "RECEIPTS_KEPT": chance.choice([4, 4096]),
            "STAGING_LOOK_SECONDS": 0.2,
            "MERGE_FILES": chance.choice([2, 4]),
            "MERGED_OBJECTS": chance.choice([2, 3, 512]),
            "SWEEP_AGAIN_EPOCHS": chance.choice([1, 2]),
        },
        rates={
            "lost_eexist": 0.01 * level,
            "lost_eio": 0.006 * level,
            "lost_etimedout": 0.006 * level,
            "lost_estale": 0.004 * level,
            "enospc": 0.003 * level,
            "eio": 0.004 * level,
            "estale": 0.004 * level,
            "enoent_once": 0.05 * level,
            "stale": 0.3 * level,
            "zeros": 0.004 * level,
        },
        workers=chance.choice([2, 3]),
        power_cuts=max(power_cuts, 1) if torn else power_cuts,
        torn=torn,
        links=chance.random() < 0.7,
        max_attempts=chance.choice([1, 2, 5]),
        max_expirations=chance.choice([2, 20]),
        max_ready=chance.choice([0, 0, 6]),
        call_s=chance.choice([0.001, 0.003, 0.01]),
        chaos_s=chance.choice([0.4, 1.0, 3.0]),
    )


@contextmanager
def small(limits: dict[str, float]) -> Iterator[None]:
    """Set the limits in every module that has them, and put them back."""
    places = [(importlib.import_module(module), name) for name in limits for module in _WHERE[name]]
    before = [(module, name, getattr(module, name)) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, limits[name])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
