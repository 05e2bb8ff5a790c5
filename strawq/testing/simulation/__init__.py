"""A seeded simulation of a whole pool on one thread: workers, producers, trainers, an operator and collectors on faulty
files and wrong clocks, running the real core, log, session and queue code, watched by an observer that knows all."""

from __future__ import annotations

from strawq.testing.simulation.settings import Settings, draw
from strawq.testing.simulation.violation import Violation
from strawq.testing.simulation.world import History, World, simulate

__all__ = ["History", "Settings", "Violation", "World", "draw", "simulate"]
