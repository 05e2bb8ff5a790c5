"""Reports of many groups in few commits.

The rule: while one commit is under way, the reports that come in wait and go together in the next one, so the number of
commits follows time and not groups. Each report gets its own answer: one that is refused for its content does not take
others with it, and one whose outcome is unknown is asked again under the same request id.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Literal

from strawq.errors import BadInput, Fenced, StrawqError, TryAgain
from strawq.handles import Reported
from strawq.work import Change
from strawq_workers.worker.metrics import Counters
from strawq_workers.worker.patience import Patience
from strawq_workers.worker.source import WorkSource

log = logging.getLogger("strawq.worker")

Standing = Literal["counts", "dead", "stale"]
"""A report counts, counts and has made its task a dead letter, or does not count: somebody else has the work."""

CHANGES_MAX = 128
PASSING_TRIES = 12
BACKOFF_S = 0.1
BACKOFF_MAX_S = 5.0


class Reporter:
    """Sends changes of one queue. Belongs to one event loop."""

    def __init__(self, queue: WorkSource, counters: Counters, patience: Patience) -> None:
        self._queue = queue
        self._counters = counters
        self._patience = patience
        self._waiting: list[tuple[Change, asyncio.Future[Standing]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def report(self, change: Change) -> Standing:
        """Returns when the change is durable, or known not to count. Raises `BadInput` or `Misaligned` if its content
        is refused, and what storage raises once it has been tried often enough."""
        future: asyncio.Future[Standing] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, future))
        if self._sender is None:
            self._sender = asyncio.ensure_future(self._send_waiting())
        return await future

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender

    async def _send_waiting(self) -> None:
        try:
            while self._waiting:
                await self._send(self._next())
        finally:
            self._sender = None

    def _next(self) -> list[tuple[Change, asyncio.Future[Standing]]]:
        """The oldest waiting change and those that can share its commit: one session, one branch, each task once."""
        first = self._waiting[0][0].work.lease
        taken: list[tuple[Change, asyncio.Future[Standing]]] = []
        left: list[tuple[Change, asyncio.Future[Standing]]] = []
        tasks: set[str] = set()
        for entry in self._waiting:
            lease = entry[0].work.lease
            alike = (lease.branch, lease.session) == (first.branch, first.session)
            if alike and lease.task not in tasks and len(taken) < CHANGES_MAX:
                tasks.add(lease.task)
                taken.append(entry)
            else:
                left.append(entry)
        self._waiting = left
        return taken

    async def _send(self, entries: list[tuple[Change, asyncio.Future[Standing]]]) -> None:
        try:
            receipt = await self._commit([change for change, _ in entries])
        except Fenced:
            for _, future in entries:
                _answer(future, "stale")
            return
        except BadInput as error:
            if len(entries) == 1:
                _answer(entries[0][1], error)
                return
            for entry in entries:
                await self._send([entry])
            return
        except BaseException as error:
            for _, future in entries:
                _answer(future, error)
            if not isinstance(error, Exception):
                raise
            return
        self._counters.commits += 1
        for change, future in entries:
            task = change.work.task
            _answer(future, "dead" if task in receipt.dead else "counts" if receipt.counts(task) else "stale")

    async def _commit(self, changes: list[Change]) -> Reported:
        request, delay, tries = self._queue.new_request(), BACKOFF_S, 0
        while True:
            try:
                return await self._patience.call(lambda: self._queue.report(changes, request_id=request))
            except TryAgain as error:
                tries += 1
                if tries >= PASSING_TRIES:
                    raise
                self._counters.retries += 1
                log.warning("report of %d groups, try %d: %s", len(changes), tries, error)
            await asyncio.sleep(delay * (0.5 + random.random() / 2))
            delay = min(2 * delay, BACKOFF_MAX_S)


def _answer(future: asyncio.Future[Standing], answer: Standing | BaseException) -> None:
    if future.done():
        return  # whoever asked was cancelled, by a resume say; the commit stands all the same
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def words(error: StrawqError) -> str:
    """The error in one line, for the queue and the log."""
    return " ".join(str(error).split())
