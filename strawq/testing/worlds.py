"""Pools in memory, with as many processes as a test wants, each with its own view of the files."""

from __future__ import annotations

from typing import Any

from strawq.limits import FORMAT_VERSION
from strawq.model import PoolHeader, QueueConfig, Session
from strawq.pool import DEFAULT_QUEUE, Pool
from strawq.session import SessionKeeper
from strawq.storage.clock import Clock
from strawq.storage.exclusive import Primitive
from strawq.storage.faulty import FaultPlan, FaultyFiles
from strawq.storage.files import Files
from strawq.storage.header import create_pool
from strawq.storage.memory import MemoryFiles
from strawq.testing.clock import SimulatedClock


class World:
    """One directory in memory. `process()` opens the pool as another process; nothing runs in the background."""

    def __init__(
        self,
        seed: int = 0,
        *,
        config: QueueConfig | None = None,
        lease_seconds: float = 10.0,
        primitive: Primitive = "link",
    ) -> None:
        self.clock = SimulatedClock(seed)
        self.memory = MemoryFiles(primitive)
        self.lease_seconds = lease_seconds
        header = PoolHeader(
            FORMAT_VERSION, self.clock.new_id(), "simulated", "local", created="2026-01-01T00:00:00+00:00"
        )
        create_pool(self.memory, header)
        pool = self.process(files=self.memory)
        pool.configure(DEFAULT_QUEUE, config or QueueConfig())
        pool.close()

    def twin(self, memory: MemoryFiles | None = None) -> World:
        """Another world that begins as this one is now, or with the files of `memory`; neither sees the other."""
        twin = World.__new__(World)
        twin.clock = self.clock.twin()
        twin.memory = (memory or self.memory).copy()
        twin.lease_seconds = self.lease_seconds
        return twin

    def files(self, plan: FaultPlan | None = None) -> FaultyFiles:
        """Another host's view of the directory."""
        return FaultyFiles(self.memory, plan, clock=self.clock.monotonic)

    def process(
        self,
        files: Files | None = None,
        plan: FaultPlan | None = None,
        role: str = "simulated",
        clock: Clock | None = None,
    ) -> Pool:
        return Pool(
            files if files is not None else self.files(plan),
            role=role,
            lease_seconds=self.lease_seconds,
            clock=clock or self.clock,
            background=False,
            keeper=_keeper,
        )


def _keeper(log: Any, clock: Any, instance: str, role: str, lease_seconds: float, background: bool) -> SessionKeeper:
    """A keeper whose sessions are of no real process: only their heartbeats tell whether they live."""

    def identify(session: str, role: str, lease_seconds: float) -> Session:
        return Session(session, host=f"host-{instance[:4]}", pid=0, role=role, lease_seconds=lease_seconds)

    return SessionKeeper(log, clock, instance, role, lease_seconds, background, identify, lambda _: False)
