"""Where workers leave their counters, so that a trainer's metrics know what all of them did.

The rule: one small file for each worker process, beside its heartbeat, written when it has a session, replaced every
few seconds and once more at the end. Nothing depends on it: counts are totals, so a file that is missed costs nothing,
and garbage collection takes those of sessions that have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from strawq.pool import Pool
from strawq_workers.worker.metrics import Counters
from strawq_workers.worker.place import Place

log = logging.getLogger("strawq.worker")

SECONDS = 5.0
SOON_SECONDS = 0.1
"""A worker that has no session yet looks again so soon: whoever counts from then on finds its file."""
_DIRECTORY = "sessions"
_SUFFIX = ".work.json"


class WorkerCounts(msgspec.Struct, frozen=True):
    """Totals of one worker process since its start. `instance` names the process, whatever sessions it had; `queue` is
    what it works on, `in_hand` its groups just now, `seconds` how long it has counted, by its own clock."""

    instance: str
    queue: str
    in_hand: int
    counters: Counters
    seconds: float = 0.0


_decoder = msgspec.json.Decoder(WorkerCounts)


async def keep_counts(place: Place, in_hand: Callable[[], int], seconds: float = SECONDS) -> None:
    """Writes the counters until cancelled. A file that cannot be written is no reason to stop work."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        left = await leave_counts(place, in_hand(), clock() - began)
        await asyncio.sleep(seconds if left else min(seconds, SOON_SECONDS))


async def leave_counts(place: Place, in_hand: int, seconds: float) -> bool:
    """Write the counters, of so many seconds; False if there is no session that they could lie beside."""
    pool = place.queue.pool
    if pool is None or not place.queue.session:
        return False
    counters = msgspec.structs.replace(place.counters)
    counts = WorkerCounts(pool.instance, place.options.queue, in_hand, counters, round(seconds, 3))
    path = _path(place.queue.session)
    try:
        await place.queue.run(pool.files.replace, path, msgspec.json.encode(counts))
    except OSError as error:
        log.info("%s cannot be written: %s", path, error)
    return True


def read_counts(pool: Pool, queue: str) -> dict[str, WorkerCounts]:
    """What the queue's workers have left whose files are there, by process."""
    found: dict[str, WorkerCounts] = {}
    for name in pool.files.names(_DIRECTORY):
        if not name.endswith(_SUFFIX):
            continue
        try:
            counts = _decoder.decode(pool.files.read(f"{_DIRECTORY}/{name}"))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.debug("%s: %s", name, error)  # removed, or half-way through a rename: the next look sees it
            continue
        known = found.get(counts.instance)
        # A process that lost its session has two files, and counts only go up.
        if counts.queue == queue and (known is None or known.counters.requests <= counts.counters.requests):
            found[counts.instance] = counts
    return found


def _path(session: str) -> str:
    return f"{_DIRECTORY}/{session}{_SUFFIX}"
