"""Where a worker's groups come from and go to: a queue of a pool, or a slime data source in this process.

The rule: the worker sees one face, `WorkSource`, and the same holds behind it everywhere. A group is one holder's at a
time, a report of an older attempt does not count, and a group that was fetched is complete, dropped, or goes back; no
call blocks the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from strawq.aio import AsyncQueue
from strawq.handles import Lease, Leases, Reported
from strawq.inspection import count_tasks
from strawq.model import Pause, Stage
from strawq.pool import Pool
from strawq.work import Change, Work

T = TypeVar("T")


class Around(msgspec.Struct, frozen=True):
    """What is so around the work, as of one look: the active branch, the live sessions, the pause and the policy.
    `ready` groups are complete and not trained yet, those in a batch included; `leased` ones are in some worker's
    hands, `begun` ones are partial and in nobody's. `peers`: live sessions by role, in the order they joined."""

    branch: str
    sessions: frozenset[str]
    pause: Pause | None
    policy_version: str
    ready: int = 0
    leased: int = 0
    begun: int = 0
    peers: dict[str, tuple[str, ...]] = {}


class WorkSource(Protocol):
    """What a worker uses of a queue. Calls as those of `strawq.queue.Queue`, with its answers and errors."""

    @property
    def pool(self) -> Pool | None:
        """The pool behind it, None where there is none."""

    @property
    def session(self) -> str:
        """The session that holds the leases just now; empty if there is none."""

    def new_request(self) -> str: ...

    async def run(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Any blocking call in a thread of the source's."""

    async def acquire(self, count: int = 1, *, begun_only: bool = False, request_id: str | None = None) -> Leases:
        """`begun_only`: groups that have a prefix, no fresh ones."""

    async def open(self, lease: Lease) -> Work: ...

    async def report(self, changes: Sequence[Change], *, request_id: str | None = None) -> Reported: ...

    async def look(self) -> Around: ...

    async def acknowledge_pause(self) -> None: ...

    async def close(self) -> None:
        """Wait for the calls under way. What is leased stays leased: the worker gives it back before."""


class PoolSource:
    """A queue of an open pool. The pool stays open when this is closed."""

    def __init__(self, pool: Pool, queue: str, io_concurrency: int) -> None:
        """Raises `BadInput` if the pool has no such queue. Reads files: call it in a thread."""
        self._pool = pool
        self._queue = AsyncQueue(pool.queue(queue), io_concurrency)

    @property
    def pool(self) -> Pool:
        return self._pool

    @property
    def session(self) -> str:
        return self._pool.keeper.current

    def new_request(self) -> str:
        return self._pool.new_request()

    async def run(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        return await self._queue.run(call, *args, **options)

    async def acquire(self, count: int = 1, *, begun_only: bool = False, request_id: str | None = None) -> Leases:
        stages: tuple[Stage, ...] = ("partial",) if begun_only else ("partial", "fresh")
        return await self._queue.acquire(count, stages=stages, request_id=request_id)

    async def open(self, lease: Lease) -> Work:
        return await self._queue.open(lease)

    async def report(self, changes: Sequence[Change], *, request_id: str | None = None) -> Reported:
        return await self._queue.report(changes, request_id=request_id)

    async def look(self) -> Around:
        return await self._queue.run(look, self._pool, self._queue.queue.name)

    async def acknowledge_pause(self) -> None:
        await self._queue.run(self._pool.acknowledge_pause)

    async def close(self) -> None:
        # Neither in its own threads, which it waits for, nor in the loop's, where hooks may stand still.
        closing = ThreadPoolExecutor(1)
        await asyncio.get_running_loop().run_in_executor(closing, self._queue.close)
        closing.shutdown(wait=False)


def look(pool: Pool, queue: str) -> Around:
    """One look at the newest log entry. Reads files: call it in a thread."""

    def view(machine: Any) -> Around:
        state = machine.state
        meta = state.branch.meta
        peers: dict[str, tuple[str, ...]] = {}
        for session in sorted(state.sessions.values(), key=lambda session: session.joined_seq):
            peers[session.role] = (*peers.get(session.role, ()), session.id)
        sessions = frozenset(session.id for session in state.sessions.values())
        tasks = state.branch.queues.get(queue)
        counts = count_tasks(tasks) if tasks is not None else None
        ready = counts.ready + counts.in_batch if counts is not None else 0
        leased = counts.fresh_leased + counts.partial_leased if counts is not None else 0
        begun = counts.partial_pending if counts is not None else 0
        return Around(state.active.row, sessions, meta.pause, meta.policy_version, ready, leased, begun, peers)

    around: Around = pool.log.refresh(view)
    return around
