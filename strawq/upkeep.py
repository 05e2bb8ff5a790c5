"""Online upkeep: a thread in a process that works anyway collects garbage, writes snapshots and trims the log.

The rule: it never stands in the way of work. Whatever goes wrong is said once for each kind and tried again at the next
turn; nothing that it raises leaves it.

Many processes may keep the same pool, and nobody elects one. Epochs and trims are numbered in the log, so each process
sees there whether another had a turn since its own last look: then it lets this one pass. Two that start at the same
moment do some work twice, which is all that happens. A process that dies in the middle of a turn leaves an epoch that
was opened and not closed: whoever comes next goes on from there. Turns that die before they trim look like turns: so
nobody lets one pass for them when the log has grown by `OVERDUE_ENTRIES`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from strawq.core.machine import Machine
from strawq.errors import BadInput, StrawqError
from strawq.garbage import collect_garbage
from strawq.limits import ENTRIES_PER_SEGMENT, SNAPSHOT_ENTRIES, TRIM_ENTRIES
from strawq.merging import merge_objects
from strawq.storage.snapshots import snapshot_numbers
from strawq.trimming import trim_log

if TYPE_CHECKING:
    from strawq.pool import Pool

logger = logging.getLogger("strawq.upkeep")

GC_SECONDS = 60.0
CLOSE_SECONDS = 10.0
"""A turn waits up to seven seconds for others; whoever ends waits for it so long."""
OVERDUE_ENTRIES = 2 * ENTRIES_PER_SEGMENT
"""Written since the log was trimmed, or since this process had a turn: then it has one, whoever else had."""

Outcome = Literal["kept", "another's turn", "nothing new", "failed"]


class _Seen(msgspec.Struct, frozen=True):
    """One look at the log: its newest position, and the numbers that a turn moves (epoch, closed epoch, trims)."""

    seq: int
    mark: tuple[int, int, int]

    @property
    def trims(self) -> int:
        return self.mark[2]


class Upkeep:
    """Keeps one pool from this process, about every `seconds`. `turn()` is one turn; a thread calls it from `start()`
    to `close()`, or as a context manager. `BadInput` for an interval that is none."""

    def __init__(self, pool: Pool, seconds: float = GC_SECONDS, *, keep_entries: int = TRIM_ENTRIES) -> None:
        if not (seconds > 0 and math.isfinite(seconds)):
            raise BadInput(f"garbage is collected every {seconds} s; the interval must be positive")
        self.turns = 0
        """Turns that did the work, whether or not there was any."""
        self.files = self.bytes = self.entries = 0
        """Objects' files and bytes, and log entries, that these turns removed."""
        self._pool = pool
        self._seconds = seconds
        self._keep_entries = keep_entries
        self._seen: _Seen | None = None
        self._kept_at = 0
        self._clean = False
        self._problems: dict[str, Exception | str] = {}
        self._told: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Upkeep:
        self._thread = threading.Thread(target=self._keep, name="strawq-upkeep", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread; a turn that has begun is waited for. Call it before the pool is closed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.warning("upkeep is still at work on a slow mount; it ends with this process")

    def __enter__(self) -> Upkeep:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self) -> None:
        self._attempt("the log could not be read", self._look_first)
        self._tell()
        # Jitter spreads the turns of processes that were started together.
        while not self._stop.wait(self._seconds * (0.75 + 0.5 * self._pool.clock.jitter())):
            self.turn()

    def _look_first(self) -> None:
        self._seen = self._look()
        self._kept_at = self._seen.seq

    def turn(self) -> Outcome:
        """Do the work, if it is this process's turn and there may be any. Raises nothing."""
        outcome = self._turn()
        if outcome == "kept" and self._told:
            logger.warning("upkeep works again")
            self._told.clear()
        self._tell()
        return outcome

    def _turn(self) -> Outcome:
        before, now = self._seen, self._look_or_none()
        if now is None:
            return "failed"
        self._seen = now
        if before is None or before.trims != now.trims:
            self._kept_at = now.seq
        if before is not None and before.mark != now.mark and now.seq - self._kept_at < OVERDUE_ENTRIES:
            self._clean = False
            return "another's turn"
        if before is not None and before.seq == now.seq and self._clean:
            return "nothing new"
        self._attempt("garbage was not collected", self._collect)
        self._attempt("no snapshot was written", self._snapshot_if_due)
        self._attempt("the log was not trimmed", self._trim)
        self._attempt("small files were not merged", self._merge)
        after = self._look_or_none()
        if after is not None:
            # What this turn logged is its own. The position stays the old one: something may have come in between.
            self._seen = _Seen(now.seq, after.mark)
            self._kept_at = after.seq
        self.turns += 1
        self._clean = not self._problems
        return "kept" if self._clean else "failed"

    def _look(self) -> _Seen:
        def look(machine: Machine) -> _Seen:
            meta = machine.state.meta
            return _Seen(machine.seq, (meta.epoch, meta.closed_epoch, machine.trims))

        seen: _Seen = self._pool.log.refresh(look)
        return seen

    def _look_or_none(self) -> _Seen | None:
        seen: list[_Seen] = []
        self._attempt("the log could not be read", lambda: seen.append(self._look()))
        return seen[0] if seen else None

    def _collect(self) -> None:
        done = collect_garbage(self._pool)[1]
        self.files += done.files
        self.bytes += done.bytes
        if done.files:
            logger.info("collected %d files (%d bytes)", done.files, done.bytes)
        if done.unfinished:
            self._problems["garbage was not collected in full"] = "; ".join(done.unfinished)

    def _snapshot_if_due(self) -> None:
        """Commits write one when the entries outweigh it, so a large state may wait long: here it is bounded."""
        newest = next(iter(snapshot_numbers(self._pool.files)), 0)
        head: int = self._pool.log.peek(lambda machine: machine.seq)
        if head - newest >= SNAPSHOT_ENTRIES:
            self._pool.snapshot()

    def _trim(self) -> None:
        done = trim_log(self._pool, keep_entries=self._keep_entries)
        self.entries += done.entries
        if done.entries:
            logger.info("trimmed %d log entries and %d snapshots", done.entries, done.snapshots)
        if done.unfinished:
            self._problems["the log was not trimmed in full"] = "; ".join(done.unfinished)

    def _merge(self) -> None:
        done = merge_objects(self._pool)
        if done.files:
            logger.info("merged %d small files into %d", done.files, done.into)

    def _attempt(self, what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001 (it is said, and the process has other work than this)
            kind = error.kind if isinstance(error, StrawqError) else type(error).__name__
            self._problems[f"{what} ({kind})"] = error

    def _tell(self) -> None:
        """Say what went wrong, each kind once until a turn has gone well."""
        for what, why in self._problems.items():
            if what not in self._told:
                trace = None if isinstance(why, (str, OSError, StrawqError)) else why
                logger.warning("%s: %s; trying again later", what, why, exc_info=trace)
        self._told |= set(self._problems)
        self._problems.clear()
