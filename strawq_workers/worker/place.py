"""What the groups of one worker share: engines, queue, hooks, capacity, and whether requests must hold still.

The rule: groups know nothing of each other. What concerns all of them (a pause, an engine that is gone, options that
every engine refuses) passes through here.
"""

from __future__ import annotations

import asyncio
import logging

from strawq.doubling import doubled
from strawq.errors import BadInput, Misaligned, StrawqError
from strawq.handles import Lease
from strawq_workers.admission.reservations import Admission
from strawq_workers.sglang.fleet import Fleet
from strawq_workers.sglang.segment import Segment
from strawq_workers.telling import Telling
from strawq_workers.worker.generation import Plan
from strawq_workers.worker.hooks import Hooks
from strawq_workers.worker.metrics import Counters
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.patience import Patience
from strawq_workers.worker.prompts import Texts
from strawq_workers.worker.reporting import Reporter
from strawq_workers.worker.source import WorkSource
from strawq_workers.worker.unconfirmed import Unconfirmed

log = logging.getLogger("strawq.worker")

FAILURES_KEPT = 20
FAILURES_SAID = 3


class PrefixRefused(BadInput):
    """The saved prefix is not of this worker's options; a worker with others may go on with it."""


class EngineRefused(BadInput):
    """An engine does not take the request as it is, now or later."""


class EngineGarbled(Misaligned):
    """An engine's answer does not make sense. Another attempt may go well; if none does, the engine is broken."""


class Hold:
    """A pause that ends requests: `stopped` is set while none may run, `released` while they may."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self.released = asyncio.Event()
        self.released.set()

    def close(self) -> None:
        self.released.clear()
        self.stopped.set()

    def open(self) -> None:
        # A new event: requests of before still see the old one set, however quickly the pause was over.
        self.stopped = asyncio.Event()
        self.released.set()


class Place:
    """One worker's surroundings. Belongs to one event loop."""

    def __init__(
        self, options: WorkerOptions, queue: WorkSource, fleet: Fleet, hooks: Hooks, admission: Admission
    ) -> None:
        self.options = options
        self.queue = queue
        self.fleet = fleet
        self.hooks = hooks
        self.admission = admission
        self.plan = Plan.of(options, fleet.shape.context_tokens)
        self.stopping = asyncio.Event()
        self.texts = Texts(fleet, hooks, self.stopping, skip_special=options.skip_special_tokens)
        self.counters = Counters()
        self.patience = Patience(options.storage_timeout_s, self.counters)
        self.reporter = Reporter(queue, self.counters, self.patience)
        self.unconfirmed = Unconfirmed(admission, fleet, options.engine_timeout_s)
        self.served = ""
        """The policy version that is published, as of the last look."""
        self.hold = Hold()
        self.changed = asyncio.Event()
        """Something ended or came that admission should look at."""
        self.reason = ""
        self.fatal: BaseException | None = None
        self.engine_trouble: StrawqError | None = None
        self.refusals = 0
        """Attempts in a row that were refused; `lost` groups that failed for good, `unkept` that the filter dropped."""
        self.lost = 0
        self.unkept = self._unkept_told = 0
        self.versions: dict[str, None] = {}
        self.drop_reasons: dict[str, int] = {}
        self.failures: list[str] = []
        self._telling = Telling()
        self.dead: dict[str, str] = {}
        """Groups that failed for good here, by their reasons; the newest `FAILURES_KEPT`."""

    def stop(self, reason: str, fatal: BaseException | None = None) -> None:
        """Admit nothing more and let every group give back what it has. The first reason stays."""
        if not self.stopping.is_set():
            self.reason = reason
        self.fatal = self.fatal or fatal
        self.stopping.set()
        self.changed.set()
        self.patience.end()

    def saw(self, segment: Segment) -> None:
        self.counters.tokens_generated += segment.tokens
        for span in segment.versions:
            for version in filter(None, (span.version, span.last)):
                self.versions.setdefault(version)

    def accepted(self, anew: bool = True) -> None:
        self.counters.groups_accepted += anew
        self.refusals = self.lost = self.unkept = self._unkept_told = 0

    def dropped(self, reason: str) -> None:
        self.counters.groups_dropped += 1
        self.drop_reasons[reason] = self.drop_reasons.get(reason, 0) + 1
        self.refusals = self.lost = 0
        self.unkept += 1
        if doubled(self.unkept, self._unkept_told, self._in_a_row):
            self._unkept_told = self.unkept
            log.warning(
                "%d groups in a row were dropped by the filter and none kept: %s",
                self.unkept,
                reason or "it gives no reason",
            )

    def failed(self, task: str, reason: str, dead: bool) -> None:
        self.counters.groups_failed += 1
        if dead:
            self.dead = {**dict(list(self.dead.items())[1 - FAILURES_KEPT :]), task: reason}
        if len(self.failures) < FAILURES_KEPT:
            self.failures.append(f"{task}: {reason}")
        # In memory nobody keeps dead letters: the data source has the group again when the work ends.
        end = "it is a dead letter now" if self.queue.pool else "it goes back to the data source"
        count, due = self.counters.groups_failed, self._telling.due("failures")
        few = count <= FAILURES_SAID  # of those each is told, then how many there are by now
        what = f"task {task} failed" if few else f"{count} attempts have failed by now, the last one: task {task}"
        log.log(logging.WARNING if few or due else logging.INFO, "%s%s: %s", what, f", {end}" if dead else "", reason)
        self.lost += dead

    def stop_if_all_fail(self) -> None:
        """Where group after group fails for good, the fault is not theirs, and the data set is not spent on it."""
        if self.lost >= self._in_a_row:
            task, reason = list(self.dead.items())[-1]
            self.stop(
                "failing",
                BadInput(
                    f"{self.lost} groups in a row failed for good and none was handed in, the last one: {task}: "
                    f"{reason}; {self._remedy()}"
                ),
            )

    def refused(self, error: BadInput) -> None:
        """An engine or a prefix refused this worker's options, or an engine answered what makes no sense. When groups
        in a row end so, the fault is not theirs, and the queue's attempts are not spent on it."""
        self.refusals += 1
        if self.refusals >= self.options.refusals_max:
            message = f"{self.refusals} groups in a row were refused, the last one: {error}; {self._remedy()}"
            self.stop("refused", BadInput(message))

    def _remedy(self) -> str:
        """How to go on; dead letters come back by hand."""
        pool = self.queue.pool
        return "mend that" + (f", then `strawq failed retry {pool.path} --all`" if self.dead and pool else "")

    @property
    def _in_a_row(self) -> int:
        """Ends of one kind in a row that say more of the hooks than of the groups: groups that were begun together
        end together, so as many as this worker may hold at once."""
        return max(self.options.refusals_max, self.admission.limits.groups)

    def unavailable(self, error: StrawqError) -> None:
        """Requests have failed for as long as they may. The worker goes on if some engine still lives."""
        self.engine_trouble = error
        if not any(engine.state in ("up", "held") for engine in self.fleet.engines):
            self.stop("engines", error)


async def first_of(*events: asyncio.Event, timeout: float | None = None) -> None:
    """Returns when one of the events is set, or after `timeout` seconds."""
    if any(event.is_set() for event in events):
        return
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def attempt_of(lease: Lease) -> str:
    """The identity of a lease in this worker's books."""
    return f"{lease.branch}/{lease.task}#{lease.attempt}"
