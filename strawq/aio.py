"""The asyncio twin of `Queue`: the same calls as coroutines. No call touches a file on the event loop's thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from strawq.handles import Batch, Lease, Leases, Reported, Submitted, Taken
from strawq.inspection import TaskCounts
from strawq.model import Stage
from strawq.queue import Queue
from strawq.work import Change, Work

if TYPE_CHECKING:
    from strawq.samples import Group, Prompt

T = TypeVar("T")
IO_CONCURRENCY = 4


class AsyncQueue:
    """Runs each call of `queue` in one of `io_concurrency` threads. Cancelling a call does not undo it: the thread
    finishes the commit, and the same `request_id` gets its answer."""

    def __init__(self, queue: Queue, io_concurrency: int = IO_CONCURRENCY) -> None:
        self.queue = queue
        self._threads = ThreadPoolExecutor(io_concurrency, thread_name_prefix="strawq-io")

    async def run(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Any blocking call in one of the queue's threads."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, functools.partial(call, *args, **options)
        )

    async def submit(self, prompts: Iterable[Prompt], **options: Any) -> Submitted:
        return await self.run(self.queue.submit, prompts, **options)

    async def seal(self, sealed: bool = True, *, request_id: str | None = None) -> None:
        await self.run(self.queue.seal, sealed, request_id=request_id)

    async def acquire(
        self, count: int = 1, *, stages: Sequence[Stage] = ("partial", "fresh"), request_id: str | None = None
    ) -> Leases:
        return await self.run(self.queue.acquire, count, stages=stages, request_id=request_id)

    async def open(self, lease: Lease) -> Work:
        return await self.run(self.queue.open, lease)

    async def report(self, changes: Sequence[Change], *, request_id: str | None = None) -> Reported:
        return await self.run(self.queue.report, changes, request_id=request_id)

    async def save(self, work: Work, group: Group, *, request_id: str | None = None) -> Reported:
        return await self.run(self.queue.save, work, group, request_id=request_id)

    async def yield_(self, work: Work, group: Group | None = None, *, request_id: str | None = None) -> Reported:
        return await self.run(self.queue.yield_, work, group, request_id=request_id)

    async def complete(self, work: Work, group: Group | None = None, *, request_id: str | None = None) -> Reported:
        return await self.run(self.queue.complete, work, group, request_id=request_id)

    async def drop(self, work: Work, reason: str, *, request_id: str | None = None) -> Reported:
        return await self.run(self.queue.drop, work, reason, request_id=request_id)

    async def fail(self, work: Work, reason: str, *, retryable: bool = True, request_id: str | None = None) -> Reported:
        return await self.run(self.queue.fail, work, reason, retryable=retryable, request_id=request_id)

    async def take_batch(self, count: int, **options: Any) -> Taken:
        return await self.run(self.queue.take_batch, count, **options)

    async def read_batch(self, batch: Batch) -> list[Group]:
        return await self.run(lambda: list(self.queue.read_batch(batch)))

    async def finish_batch(self, batch: Batch, **options: Any) -> None:
        await self.run(self.queue.finish_batch, batch, **options)

    async def return_batch(self, batch: Batch, **options: Any) -> None:
        await self.run(self.queue.return_batch, batch, **options)

    async def counts(self) -> TaskCounts:
        return await self.run(self.queue.counts)

    def close(self) -> None:
        """Wait for the calls under way and end the threads."""
        self._threads.shutdown(wait=True)
