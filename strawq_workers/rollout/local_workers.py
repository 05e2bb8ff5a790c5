"""Worker processes on this host for the queue of a pool, started again when they die.

The rule: a worker that dies is started again at once, with a pause that grows while its successors die too, and after
`DEATHS_MAX` deaths in a row without an accepted group it is given up, with the end of its log. One that says that its
input is bad (exit code 2: options, hooks, group after group that fails) would say so again: it is not started again,
and when no other is left, its reason is the rollout's. Closing asks each to end, which gives its work back, and insists
after a while; the leases of one that had to be killed expire.
"""

from __future__ import annotations

import logging
import os
import time

import msgspec

from strawq.errors import BadInput
from strawq_workers.processes import Child, Children
from strawq_workers.rollout.station import RolloutFailed
from strawq_workers.scratch import Scratch
from strawq_workers.worker.options import WorkerOptions

log = logging.getLogger("strawq.rollout")

DEATHS_MAX = 5
BACKOFF_S = 0.2
BACKOFF_MAX_S = 10.0
END_S = 60.0


class _Slot:
    """One of the workers: its process, and how often it has died in a row."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.child: Child | None = None
        self.starts = 0
        self.deaths = 0
        self.not_before = 0.0
        self.reason = ""
        self.refused = ""
        """Why its input is bad; it is not started again then."""

    @property
    def over(self) -> bool:
        """Whether it does not run and will not be started again."""
        return self.child is None and bool(self.refused or self.deaths >= DEATHS_MAX)


class LocalWorkers:
    """`count` workers of one queue. `look` is called now and then by whoever waits for groups."""

    def __init__(self, pool: str, options: WorkerOptions, count: int) -> None:
        self._pool = pool
        self._options = options
        self._logs = Scratch("strawq-workers-")
        self._children = Children(self._logs.path)
        self._slots = [_Slot(index) for index in range(count)]
        self._died_once = False
        self.restarts = 0
        try:
            for slot in self._slots:
                self._start(slot)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [slot.child.pid for slot in self._slots if slot.child is not None]

    def look(self) -> None:
        """Start again what has died and may start again."""
        for slot in self._slots:
            if slot.child is not None:
                code = slot.child.poll()
                if code is None:
                    continue
                self._died(slot, code)
            if slot.child is None and not slot.over and time.monotonic() >= slot.not_before:
                self._start(slot)

    def progressed(self) -> None:
        """Groups have come in: deaths are counted anew."""
        for slot in self._slots:
            if slot.child is not None:
                slot.deaths = 0

    def given_up(self) -> str:
        """Why no worker is left, or empty if one runs or will be started again. `RolloutFailed` if one of those that
        are gone has ended for bad input."""
        if not all(slot.over for slot in self._slots):
            return ""
        for slot in self._slots:
            if slot.refused:
                raise RolloutFailed(f"worker {slot.index} has ended: {slot.refused}")
        return "; ".join(
            f"worker {slot.index} died {slot.deaths} times in a row, {slot.reason}" for slot in self._slots
        )

    def close(self) -> None:
        """End them in good order."""
        running = [slot.child for slot in self._slots if slot.child is not None]
        for child in running:
            child.end()
        deadline = time.monotonic() + END_S
        for child in running:
            child.reap(deadline)
        for slot in self._slots:
            slot.child = None
        self._logs.close(keep=self._died_once)  # else nobody was told of them

    def _start(self, slot: _Slot) -> None:
        options = msgspec.structs.replace(self._options, workers=len(self._slots), worker_index=slot.index)
        slot.starts += 1
        self.restarts += slot.starts > 1
        name = f"worker-{slot.index}-{slot.starts}"
        slot.child = self._children.start(
            name,
            ["-m", "strawq_workers.worker", os.fspath(self._pool), "-"],
            msgspec.json.encode(options),
            own_session=True,
        )
        log.info("worker %d runs (pid %d, log %s)", slot.index, slot.child.pid, slot.child.log)

    def _died(self, slot: _Slot, code: int) -> None:
        assert slot.child is not None
        self._died_once = True
        slot.deaths += 1
        slot.reason = f"the last time with {_words(code)}: {slot.child.tail()}"
        slot.not_before = time.monotonic() + min(BACKOFF_S * 2 ** (slot.deaths - 1), BACKOFF_MAX_S)
        if code == BadInput.exit_code:
            slot.refused = slot.child.last_error() or slot.reason
            log.warning("worker %d has ended, and is not started again: %s", slot.index, slot.refused)
        else:
            log.warning("worker %d has ended; what it had saved goes on elsewhere; %s", slot.index, slot.reason)
        slot.child.reap(time.monotonic())
        slot.child = None


def _words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
