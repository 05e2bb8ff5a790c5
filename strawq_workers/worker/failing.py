"""How an attempt ends that cannot go on.

The rule: what is good of it is kept first. An engine that does not answer burns no attempt; another attempt at what
was refused for good would be refused again, and is not made; storage that is unwell stops the worker, but a group that
cannot be read while the pool can fails alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from strawq.errors import (
    BadInput,
    Damaged,
    EngineUnavailable,
    Gone,
    Misaligned,
    OperatorNeeded,
    OutcomeUnknown,
    StorageFailed,
    StrawqError,
)
from strawq.samples import Group, Prompt
from strawq.work import Work
from strawq_workers.worker.place import EngineGarbled, EngineRefused, Place, PrefixRefused
from strawq_workers.worker.reporting import words

if TYPE_CHECKING:
    from strawq_workers.worker.group import GroupRun

log = logging.getLogger("strawq.worker")


async def give_up(run: GroupRun, error: StrawqError) -> None:
    """The attempt has failed with `error`: keep what is good of it, then say so."""
    place = run.place
    if isinstance(error, (OperatorNeeded, OutcomeUnknown)) and not await _of_this_group_alone(place, error):
        place.stop("storage", error)
        return
    if run.work is None:
        run.work = Work(run.lease, Group(run.task, Prompt()))
    try:
        if isinstance(error, EngineUnavailable):
            log.warning("task %s goes back with its prefix: %s", run.task, words(error))
            await run.give_back()
            place.unavailable(error)
        else:
            await _save_before_failing(run)
            await _fail(run, error)
    except StrawqError as second:
        log.error("task %s: its report is refused as well: %s", run.task, words(second))
        place.stop("storage", second)


async def _of_this_group_alone(place: Place, error: StrawqError) -> bool:
    """Whether its bytes are damaged or gone, or cannot be read while the pool can. A report that storage has refused
    for too long is no such thing."""
    if not isinstance(error, StorageFailed) or place.patience.given_up:
        return isinstance(error, (Damaged, Gone))
    try:
        await place.patience.call(place.queue.look)
    except StrawqError:
        return False
    return True


async def _save_before_failing(run: GroupRun) -> None:
    """A report of failure carries no data: the prefix goes first."""
    try:
        await run.save()
    except BadInput as error:
        run.place.counters.tokens_discarded += max(0, run.unsaved())
        log.warning("task %s: its tokens are not fit to be saved: %s", run.task, words(error))


async def _fail(run: GroupRun, error: StrawqError) -> None:
    # Another attempt at the same request would be refused again; everything else may pass.
    final = isinstance(error, BadInput) and not isinstance(error, (Misaligned, PrefixRefused))
    async with run.lock:
        if run.lost:
            return
        standing = await run.report("fail", None, words(error), retryable=not final)
        if standing == "stale":
            return
        run.end = "failed"
    # Counted first: a stop names what brings dead letters back.
    run.place.failed(run.task, words(error), standing == "dead")
    if isinstance(error, (EngineRefused, EngineGarbled, PrefixRefused)):
        run.place.refused(error)
