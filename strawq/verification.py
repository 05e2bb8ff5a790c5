"""Is everything that the pool promises still there? Reads, compares, names; changes nothing unless `repair` is asked
for.

Checked: that the log is one chain, that snapshots are what a fold gives, that the state is sound, that every object
the state reaches is there with its size (with `full`: every byte against its digest), and what dead processes left
behind. A repair does only what loses nothing: it declares a torn newest entry void, and removes damaged snapshots
that others make up for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from strawq.core.image import dump_state
from strawq.core.invariants import findings as unsound
from strawq.core.machine import Machine
from strawq.core.state import State
from strawq.errors import Damaged, Gone, StorageFailed, StrawqError
from strawq.garbage import STAGING_LOOK_SECONDS, explain, tasks_by_object, way_on
from strawq.model import StoredObject
from strawq.storage import layout
from strawq.storage.entry import Entry
from strawq.storage.failure import storage_failed
from strawq.storage.floors import encode_floor, read_floor
from strawq.storage.process import known_dead
from strawq.storage.replay import UNBOUND, genesis
from strawq.storage.sessions import read_beat
from strawq.storage.snapshots import Snapshot, decode_snapshot, snapshot_numbers

if TYPE_CHECKING:
    from strawq.pool import Pool

Progress = Callable[[str, int, int], None]
"""Called with what is checked, how much is done and how much there is."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as it should be: which, what is wrong, what depends on it, what to do."""

    what: str
    problem: str
    depends: tuple[str, ...]
    remedy: str


class Verified(msgspec.Struct, frozen=True):
    """Clean if there are no findings. `oldest_entry` is where history begins; entries before it were trimmed."""

    findings: tuple[Finding, ...]
    head_seq: int
    oldest_entry: int
    entries: int
    snapshots: int
    objects: int
    bytes_hashed: int
    repaired: tuple[str, ...] = ()


def _silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


def verify(pool: Pool, *, full: bool = False, repair: bool = False, progress: Progress = _silent) -> Verified:
    """Check the pool. `full` reads every payload byte. `repair` does what loses nothing and reports it in
    `repaired`."""
    repaired = tuple(_repair(pool)) if repair else ()
    found: list[Finding] = []
    state: State = pool.log.refresh_leniently(lambda machine: machine.state)
    entries, oldest = _check_log(pool, state.seq, found, progress)
    snapshots = _check_snapshots(pool, oldest, found, progress)
    found += _check_floors(pool, state)
    found += [
        Finding("state", sentence, (), "report this with a copy of the log: it is a fault of strawq")
        for sentence in unsound(state)
    ]
    hashed = _check_objects(pool, state, full, found, progress)
    found += _left_behind(pool, state)
    return Verified(tuple(found), state.seq, oldest, entries, snapshots, len(state.objects), hashed, repaired)


def _repair(pool: Pool) -> Iterator[str]:
    yield from _repair_floor(pool)
    voided = pool.log.void_tip()
    if voided:
        yield f"log entry {layout.entry(voided)} was torn and is void now; history goes on behind it"
    whole = [seq for seq in snapshot_numbers(pool.files) if isinstance(_read_snapshot(pool, seq), Snapshot)]
    from_start = _read_entry(pool, 1) is not None
    for seq in snapshot_numbers(pool.files):
        if seq not in whole and (from_start or any(other > seq for other in whole)):
            pool.files.remove(layout.snapshot(seq))
            yield f"snapshot {layout.snapshot(seq)} was damaged and is removed; others serve"
    if not whole or whole[0] < max(snapshot_numbers(pool.files), default=0):
        yield f"snapshot {layout.snapshot(pool.log.snapshot())} is written"


def _floor_damage(pool: Pool, number: int) -> str:
    try:
        read_floor(pool.files, number)
    except FileNotFoundError:
        return ""
    except StrawqError as error:
        return str(error)
    return ""


def _check_floors(pool: Pool, state: State) -> Iterator[Finding]:
    """The floor that committers look at next; those of trims that the state has seen are not read any more."""
    number = state.meta.trims + 1
    problem = _floor_damage(pool, number)
    if problem:
        yield Finding(
            layout.floor(number), problem, ("every process that opens the pool",), "`strawq verify --repair` resets it"
        )


def _repair_floor(pool: Pool) -> Iterator[str]:
    """A damaged floor whose trim is not in the log: nothing was removed on its word, because the trimmer logs it
    first. The floor that held before takes its place."""
    state: State = pool.log.refresh_leniently(lambda machine: machine.state)
    number = state.meta.trims + 1
    if _floor_damage(pool, number):
        pool.files.replace(layout.floor(number), encode_floor(number, state.meta.floor))
        pool.files.sync_directory(layout.FLOORS)
        yield f"floor {layout.floor(number)} was damaged and says again what held before it"


def _check_log(pool: Pool, head: int, found: list[Finding], progress: Progress) -> tuple[int, int]:
    """The chain from the oldest entry that is there to the newest. Returns how many were read, and the oldest."""
    floor: int = pool.log.peek(lambda machine: machine.state.meta.floor)
    oldest = max(floor, 1)
    previous, count, seq = genesis(pool.header.pool_id) if oldest == 1 else "", 0, oldest
    while seq <= head + 1:
        entry = _read_entry(pool, seq)
        if isinstance(entry, str):
            following = pool.log.read_past(seq)
            if following is not None and following.line.voids == seq:
                seq = following.line.seq
                continue
            rest = f"every state after entry {seq - 1} that no snapshot holds"
            remedy = (
                "`strawq verify --repair` lets history go on behind it"
                if seq == head + 1
                else "restore the file from a copy"
            )
            found.append(Finding(layout.entry(seq), entry, (rest,), remedy))
            previous = ""
        elif entry is None:
            if seq <= head:
                found.append(
                    Finding(
                        layout.entry(seq), "is missing", (f"reading history at {seq}",), "restore the file from a copy"
                    )
                )
            previous = ""
        else:
            if previous and entry.line.prev != previous and (count or entry.line.prev != UNBOUND):
                found.append(Finding(layout.entry(seq), "follows another history", (), "restore the file from a copy"))
            previous = entry.digest
            count += 1
        if count % 500 == 0:
            progress("log", seq - oldest, head - oldest + 1)
        seq += 1
    return count, oldest


def _read_entry(pool: Pool, seq: int) -> Entry | str | None:
    """The entry, what is wrong with it, or None if it is not there."""
    try:
        return pool.log.read_entry(seq)
    except StrawqError as error:
        return str(error)


def _read_snapshot(pool: Pool, seq: int) -> Snapshot | str | None:
    path = layout.snapshot(seq)
    try:
        return decode_snapshot(pool.header.pool_id, seq, pool.files.read(path))
    except FileNotFoundError:
        return None
    except Damaged as error:
        return str(error)
    except OSError as error:
        return str(storage_failed("read", path, error))


def _check_snapshots(pool: Pool, oldest: int, found: list[Finding], progress: Progress) -> int:
    """Each snapshot is what folding from the one before it (or from the first entry) gives."""
    base: Machine | None = Machine() if oldest == 1 else None
    numbers = sorted(snapshot_numbers(pool.files))
    for at, seq in enumerate(numbers):
        progress("snapshots", at, len(numbers))
        snapshot = _read_snapshot(pool, seq)
        if snapshot is None:
            continue
        if isinstance(snapshot, str):
            others = "the pool is opened from an older snapshot" if at else "the pool is opened from the log's start"
            found.append(Finding(layout.snapshot(seq), snapshot, (others,), "`strawq verify --repair` removes it"))
            continue
        if base is not None and not _folds_to(pool, base, snapshot):
            found.append(
                Finding(
                    layout.snapshot(seq),
                    "is not what the log folds to",
                    ("every process that opens the pool",),
                    "remove it and open the pool from an older one; report this: it is a fault of strawq",
                )
            )
        base = Machine()
        base.load(snapshot.body, seq)
    return len(numbers)


def _folds_to(pool: Pool, base: Machine, snapshot: Snapshot) -> bool:
    """Whether folding `base` up to the snapshot gives its bytes. True where entries in between are gone or
    unreadable: that is another finding."""
    while base.seq < snapshot.line.seq:
        entry = _read_entry(pool, base.seq + 1)
        if isinstance(entry, str):
            entry = pool.log.read_past(base.seq + 1)
            if entry is not None and entry.line.voids != base.seq + 1:
                return True
        if not isinstance(entry, Entry):
            return True
        for event in base.decode(entry.line.seq, entry.line.events):
            base.apply(event, entry.line.seq, entry.where())
        base.keep(entry.line.seq)
    return dump_state(base.state) == bytes(snapshot.body)


def _check_objects(pool: Pool, state: State, full: bool, found: list[Finding], progress: Progress) -> int:
    reasons = explain(state)
    needed: dict[str, dict[str, list[str]]] = {}
    hashed = 0
    rows = list(state.objects.values())
    merged: dict[str, list[StoredObject]] = {}
    for at, row in enumerate(rows):
        if at % 50 == 0:
            progress("objects", at, len(rows))
        for path, problem in _object_problems(pool, row, full):
            needed = needed or tasks_by_object(state)
            remedy = way_on(state, row.ref.digest, needed.get(row.ref.digest, {}))
            found.append(Finding(path, problem, reasons.get(row.ref.digest, ()), remedy))
        if full:
            hashed += row.ref.bytes + row.ref.pack_bytes
        if row.ref.file:
            merged.setdefault(layout.record_file(row.ref.epoch, row.ref.file), []).append(row)
    for path, there in merged.items():
        found += _merged_problems(pool, path, there, reasons)
    return hashed


def _merged_problems(
    pool: Pool, path: str, rows: list[StoredObject], reasons: dict[str, tuple[str, ...]]
) -> Iterator[Finding]:
    """What is wrong with a merged file as a whole. What depends on it is what depends on the live objects in it. Bytes
    of objects that have ended are nobody's: with `full` each live object is compared by itself."""
    try:
        end = max(row.ref.offset + row.ref.bytes for row in rows)
        size = pool.files.size(path)
        if size > end:
            return
        problem = f"has {size} bytes, too few for an object in it that ends at {end}"
    except FileNotFoundError:
        problem = "is missing"
    except OSError as error:
        problem = str(storage_failed("read", path, error))
    now = _located(pool, rows)
    if all(there is None or there.ref != row.ref for row, there in zip(rows, now, strict=True)):
        return
    depends = sorted({reason for row in rows for reason in reasons.get(row.ref.digest, ())})
    remedy = "objects in it that are whole are served; restore the file from a copy"
    yield Finding(path, problem, tuple(depends), remedy)


def _located(pool: Pool, rows: list[StoredObject]) -> list[StoredObject | None]:
    """Where these objects are by now: a collection that runs beside this may have taken one that has ended, a merge
    may have moved one."""
    found: list[StoredObject | None] = pool.log.refresh_leniently(
        lambda machine: [machine.state.objects.get(row.ref.digest) for row in rows]
    )
    return found


def _object_problems(pool: Pool, row: StoredObject, full: bool) -> Iterator[tuple[str, str]]:
    """What is wrong with an object. One that has moved since the state was read is looked at where it is now."""
    problems = list(_problems_at(pool, row, full))
    if problems:
        (now,) = _located(pool, [row])
        if now is None:
            return
        if now.ref != row.ref:
            problems = list(_problems_at(pool, now, full))
    yield from problems


def _problems_at(pool: Pool, row: StoredObject, full: bool) -> Iterator[tuple[str, str]]:
    ref = row.ref
    if ref.epoch == 0:
        try:
            pool.objects.read_checked(row)
        except (Damaged, Gone, StorageFailed) as error:
            yield f"object {ref.digest[:12]} in {layout.entry(row.seq)}", str(error)
        return
    if ref.file:
        try:
            if full:
                pool.objects.read_checked(row)
        except (Damaged, Gone, StorageFailed) as error:
            yield f"object {ref.digest[:12]} in {layout.record_file(ref.epoch, ref.file)}", str(error)
        return
    parts = [(layout.record_file(ref.epoch, ref.digest), ref.bytes)]
    if ref.pack:
        parts.append((layout.pack_file(ref.epoch, ref.pack), ref.pack_bytes))
    for path, size in parts:
        try:
            there = pool.files.size(path)
        except FileNotFoundError:
            yield path, "is missing"
            continue
        except OSError as error:
            yield path, str(storage_failed("read", path, error))
            continue
        if there != size:
            yield path, f"has {there} bytes, not {size}"
        elif full:
            try:
                if path.endswith(".arrow"):
                    pool.objects.read_checked(row)
                else:
                    pool.payloads.verify_pack(path, ref.pack)
            except (Damaged, Gone, StorageFailed) as error:
                yield path, str(error)


def _left_behind(pool: Pool, state: State) -> Iterator[Finding]:
    """Staging of processes that are gone, and leases of sessions that are known to be dead."""
    live = {pool.instance}
    for session in state.sessions.values():
        beat = read_beat(pool.files, session.id)
        if beat is not None:
            live.add(beat.instance)
        if session.id != pool.keeper.current and known_dead(session):
            queues = [state.branch.queues[name] for name in state.branch.queues]
            leases = sum(len(queue.held.get(session.id, ())) for queue in queues)
            batches = sum(len(queue.held_batches.get(session.id, ())) for queue in queues)
            yield Finding(
                f"session {session.id}",
                f"its process {session.pid} on {session.host} is dead",
                (f"{leases} leases, {batches} open batches",),
                f"any live worker expires it, or `strawq sessions expire {session.id}`",
            )
    leaked = _staged_by_others(pool, live)
    if leaked:
        # Looked at twice, as by garbage collection: the heartbeat of a living process is a draft there for a moment,
        # under a name that does not tell whose, and a network mount lists it a second longer.
        pool.clock.sleep(STAGING_LOOK_SECONDS)
        leaked &= _staged_by_others(pool, live)
    if leaked:
        yield Finding(
            f"{layout.STAGING}/",
            f"{len(leaked)} staging files of processes that are gone",
            (),
            "`strawq gc` removes them",
        )


def _staged_by_others(pool: Pool, live: set[str]) -> set[str]:
    return {name for name in pool.files.names(layout.STAGING) if name.rpartition("-")[0] not in live}
