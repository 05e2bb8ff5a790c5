"""One worker inside a Ray actor. Needs nothing of Ray itself: Ray calls its methods on one event loop.

The rule: how the worker ends is an answer and not an exception, except for faults; a new division of the slots reaches
the worker's next look at its share, also one that comes before the worker has started.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import msgspec

from strawq.errors import StrawqError
from strawq_workers.on_ray.nodes import Ended, Failed
from strawq_workers.worker.loop import Worker
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.process import work


class WorkerActor:
    """`run` once; `divide` and `stop` meanwhile. With `log_level` its log goes to stderr, which Ray brings to the
    launcher."""

    def __init__(self, pool: str, options: bytes, log_level: int | None = None) -> None:
        self._pool = pool
        self._options = msgspec.json.decode(options, type=WorkerOptions)
        self._stop: asyncio.Event | None = None
        self._stopped = False
        self._worker: Worker | None = None
        if log_level is not None:
            form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
            logging.basicConfig(level=log_level, stream=sys.stderr, format=form, force=True)

    async def run(self) -> bytes:
        """Work until the queue is used up, or `stop`. The outcome as JSON: `Ended` or `Failed`."""
        self._stop = asyncio.Event()
        if self._stopped:
            self._stop.set()
        try:
            summary = await work(self._pool, self._options, stop=self._stop, started=self._started)
        except StrawqError as error:
            return msgspec.json.encode(Failed(error.kind, error.exit_code, str(error)))
        return msgspec.json.encode(Ended(msgspec.to_builtins(summary)))

    def _started(self, worker: Worker) -> None:
        self._worker = worker
        self._apply()

    async def divide(self, workers: int, index: int) -> None:
        """This worker is now the `index`-th of so many."""
        self._options = msgspec.structs.replace(self._options, workers=workers, worker_index=index)
        self._apply()

    def _apply(self) -> None:
        if self._worker is not None:
            place = self._worker.place
            shares = {"workers": self._options.workers, "worker_index": self._options.worker_index}
            place.options = msgspec.structs.replace(place.options, **shares)
            place.changed.set()

    async def stop(self) -> None:
        """End in good order: requests aborted, prefixes saved, leases given back."""
        self._stopped = True
        if self._stop is not None:
            self._stop.set()
