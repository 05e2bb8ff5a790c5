"""Log trimming: old entries go, behind snapshots, and nothing that the state still needs goes with them.

The order is the protocol: inline objects of the entries to be trimmed get files; a snapshot at or above the floor is
durable; the floor is written where every committer looks for it; the trim is logged; only then does the first entry
go. It can die between any two of these and be run again. A floor is adopted, never overwritten.

An inline object that is live and cannot be read keeps its entry: whatever becomes readable again is in there, and
bytes that are not what their name says get no second place. The floor stays below it until nothing reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from strawq.core import commands as c
from strawq.core.machine import Machine
from strawq.errors import Damaged, Gone, StorageFailed, StrawqError
from strawq.garbage import explain
from strawq.limits import ENTRIES_PER_SEGMENT, SNAPSHOTS_KEPT, TRIM_ENTRIES
from strawq.merging import Read, bins, move_together
from strawq.model import StoredObject
from strawq.remedies import tasks_by_object, way_on
from strawq.storage import layout
from strawq.storage.failure import file_calls, storage_failed
from strawq.storage.floors import encode_floor
from strawq.storage.snapshots import snapshot_numbers

if TYPE_CHECKING:
    from strawq.pool import Pool

_MOVE_TRIES = 20


class Trimmed(msgspec.Struct, frozen=True):
    """Entries below `floor` are gone: `entries` and `snapshots` were removed now, `moved` objects got files.
    `unfinished` says why the floor is lower than was asked for, what depends on it, and the remedy."""

    floor: int
    entries: int
    snapshots: int
    moved: int
    unfinished: tuple[str, ...] = ()


@file_calls("trim", "the log")
def trim_log(
    pool: Pool,
    *,
    keep_entries: int = TRIM_ENTRIES,
    snapshots_kept: int = SNAPSHOTS_KEPT,
    step: int = 0,
    dry_run: bool = False,
) -> Trimmed:
    """Remove entries that are older than the newest `keep_entries` and lie behind every kept snapshot.

    The floor stays at or below the oldest of `snapshots_kept` snapshots, so that one damaged snapshot does not cost
    the pool. It moves by whole `step`s; 0: of a segment each, so that directories go with their entries. A dry run
    reads what would move."""
    files = pool.files
    head: int = pool.log.refresh(lambda machine: machine.seq)
    kept = snapshot_numbers(files)[:snapshots_kept]
    behind = min(kept) + 1 if len(kept) >= 2 or (kept and snapshots_kept < 2) else 0
    floor = min(behind, head - keep_entries)
    step = step or ENTRIES_PER_SEGMENT
    floor -= floor % step
    done: int = pool.log.peek(lambda machine: machine.state.meta.floor)
    moved = 0
    unfinished: tuple[str, ...] = ()
    if floor > done:
        moved, floor, unfinished = _move_inline(pool, floor, step, dry_run)
    if dry_run:
        floor = max(floor, done)
        return Trimmed(floor, len(_entries_below(pool, floor)), len(_superseded(pool, kept)), moved, unfinished)
    if floor > done:
        pool.log.snapshot()
        floor = _announce(pool, floor)
    floor = max(floor, done)
    entries = remove_entries(pool, floor)
    superseded = _superseded(pool, kept)
    for seq in superseded:
        files.remove(layout.snapshot(seq))
    return Trimmed(floor, entries, len(superseded), moved, unfinished)


def _superseded(pool: Pool, kept: Sequence[int]) -> list[int]:
    return [seq for seq in snapshot_numbers(pool.files) if kept and seq < min(kept)]


def _move_inline(pool: Pool, floor: int, step: int, dry_run: bool) -> tuple[int, int, tuple[str, ...]]:
    """Give files to the objects that ride inside entries below `floor` and that the state still reaches, many to a
    file. Returns how many moved, the floor below which none is left, and what stands in the way of a higher one."""
    moved = 0
    unfinished: tuple[str, ...] = ()
    for _ in range(_MOVE_TRIES):
        rows = pool.log.refresh(partial(_inline_below, floor))
        if not rows:
            return moved, floor, unfinished
        stuck: list[tuple[StoredObject, StrawqError]] = []
        for together in bins(_read_live(pool, rows, stuck)):
            moved += len(together) if dry_run else len(move_together(pool, together))
        for row, error in stuck:
            floor = row.seq - row.seq % step
            unfinished = (_in_the_way(pool, row, floor, error),)
        if dry_run:
            return moved, floor, unfinished
    raise storage_failed(
        "trim", "the log", OSError(f"objects inside entries below {floor} would not move in {_MOVE_TRIES} tries")
    )


def _read_live(
    pool: Pool, rows: Iterable[StoredObject], stuck: list[tuple[StoredObject, StrawqError]]
) -> Iterator[Read]:
    """The bytes of those that have not ended meanwhile, up to the first that is live and cannot be read: that one goes
    to `stuck`. Reading has waited for it, and what lies behind it stays with it."""
    for row in rows:
        try:
            data = pool.objects.read_checked(row)
        except (Damaged, Gone, StorageFailed) as error:
            now = pool.locate(row.ref.digest)
            if now is not None and now.ref == row.ref:
                stuck.append((row, error))
                return
            continue
        yield row, data


def _in_the_way(pool: Pool, row: StoredObject, floor: int, error: StrawqError) -> str:
    def look(machine: Machine) -> tuple[str, str]:
        reasons = explain(machine.state).get(row.ref.digest, ())
        return ", ".join(reasons), way_on(machine.state, [row.ref.digest], tasks_by_object(machine.state))

    depends, remedy = pool.log.refresh(look)
    return f"the log is kept from entry {floor} on: {error}; needed by {depends or 'nothing by now'}; {remedy}"


def _inline_below(floor: int, machine: Machine) -> list[StoredObject]:
    rows = [row for row in machine.state.objects.values() if row.ref.epoch == 0 and row.seq < floor]
    # What came at one time often ends at one time.
    return sorted(rows, key=lambda row: (row.seq, row.offset))


def _announce(pool: Pool, floor: int) -> int:
    """Write `floors/<g>`, or adopt the one that stands there, and log it. Returns the floor that holds."""
    while True:
        number: int = pool.log.refresh(lambda machine: machine.trims) + 1
        path = layout.floor(number)
        try:
            # If the name is taken, another trimmer's floor stands there: it is adopted.
            pool.staging.place([encode_floor(number, floor)], path)
            pool.files.sync_directory(layout.FLOORS)
        except OSError as error:
            raise storage_failed("write", path, error) from error
        holds = pool.log.read_floor(number)
        pool.commit(c.Trim(request=pool.new_request(), number=number, floor=holds))
        if holds >= floor:
            return holds


def _entries_below(pool: Pool, floor: int) -> list[str]:
    """Paths of log entries below the floor that a listing shows: those of this trim, leftovers of earlier ones, and
    ghosts."""
    paths = []
    for name in pool.files.names(layout.LOG):
        if not name.isdigit() or int(name) > layout.segment(floor):
            continue
        directory = layout.segment_directory(int(name))
        for entry in pool.files.names(directory):
            stem = entry.removesuffix(".json")
            if stem.isdigit() and int(stem) < floor:
                paths.append(f"{directory}/{entry}")
    return paths


def remove_entries(pool: Pool, floor: int) -> int:
    """Remove all entries below a floor that is logged, oldest first, and the directories that become empty."""
    paths = _entries_below(pool, floor)
    removed = sum(pool.files.remove(path) for path in paths)
    for directory in sorted({path.rpartition("/")[0] for path in paths}):
        pool.files.remove_directory(directory)
    return removed
