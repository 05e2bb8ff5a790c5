"""Is everything that the pool promises still there? Reads, compares, names; changes nothing unless `repair` is asked
for.

Checked: that the log is one chain, that snapshots are what a fold gives, that the state is sound, that every object
the state reaches is there with its size (with `full`: every byte against its digest), and what dead processes left
behind. A repair does only what loses nothing: it declares a torn newest entry void, and removes damaged snapshots
that others make up for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from strawq.core.image import dump_state
from strawq.core.invariants import findings as unsound
from strawq.core.machine import Machine
from strawq.core.state import State
from strawq.errors import Damaged, StorageFailed, StrawqError
from strawq.garbage import STAGING_LOOK_SECONDS
from strawq.looks import Looks, read_entry
from strawq.object_checks import Finding, Progress, check_objects
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
    found: list[Finding] = []
    try:
        pool.log.refresh_leniently(lambda machine: machine.seq)
    except StorageFailed:
        seen = _without_snapshots(pool, progress)
        if seen is None:
            raise
        return seen
    # Where an entry is missing nothing that a repair does is without loss.
    repaired = tuple(_repair(pool)) if repair and pool.log.gap is None else ()
    state: State = pool.log.refresh_leniently(lambda machine: machine.state)
    looks = Looks(pool, state.seq)
    oldest = max(state.meta.floor, 1)
    entries = _check_log(pool, looks, oldest, state.seq, found, progress)
    snapshots = _check_snapshots(pool, looks, oldest, found, progress)
    found += _check_floors(pool, state)
    found += [
        Finding("state", sentence, (), "report this with a copy of the log: it is a fault of strawq")
        for sentence in unsound(state)
    ]
    hashed = check_objects(pool, state, looks, full=full, found=found, progress=progress)
    found += _left_behind(pool, state)
    return Verified(tuple(found), state.seq, oldest, entries, snapshots, len(state.objects), hashed, repaired)


def _without_snapshots(pool: Pool, progress: Progress) -> Verified | None:
    """What there is to say where no whole snapshot is left of a log that was trimmed; None if that is not so."""
    numbers = sorted(snapshot_numbers(pool.files))
    oldest, head = _newest_run(pool)
    if oldest == 1 or any(isinstance(_read_snapshot(pool, seq), Snapshot) for seq in numbers):
        return None
    if head:
        problem = f"holds no whole snapshot, and the log begins at entry {oldest}: those before it are gone"
        remedy = f"restore the snapshot of any of the entries {oldest - 1} to {head} from a copy of this pool"
    else:
        problem = "holds no whole snapshot, and the log has no entries"
        remedy = "restore the pool from a copy"
    found = [Finding(f"{layout.SNAPSHOTS}/", problem, ("every process that opens the pool",), remedy)]
    for seq in numbers:
        damage = _read_snapshot(pool, seq)
        if isinstance(damage, str):
            found.append(Finding(layout.snapshot(seq), damage, (), "restore the file from a copy"))
    count = _check_log(pool, Looks(pool, head), oldest, head, found, progress) if head else 0
    return Verified(tuple(found), head, oldest, count, len(numbers), 0, 0)


def _newest_run(pool: Pool) -> tuple[int, int]:
    """The first and last number of the entries that stand in a row up to the newest; 0 and 0 if there is none."""
    numbers: set[int] = set()
    for segment in pool.files.names(layout.LOG):
        names = pool.files.names(f"{layout.LOG}/{segment}") if segment.isdigit() else []
        numbers.update(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())
    first = last = max(numbers, default=0)
    while first - 1 in numbers:
        first -= 1
    return first, last


def _repair(pool: Pool) -> Iterator[str]:
    yield from _repair_floor(pool)
    voided = pool.log.void_tip()
    if voided:
        yield f"log entry {layout.entry(voided)} was torn and is void now; history goes on behind it"
    yield from _repair_snapshots(pool)


def _repair_snapshots(pool: Pool) -> Iterator[str]:
    """Damaged snapshots go once others make up for them. Where the newest one is damaged, the log has just been folded
    without it: a new one is written first, so that whoever opens the pool finds as much behind as before."""
    numbers = snapshot_numbers(pool.files)
    damaged = [seq for seq in numbers if isinstance(_read_snapshot(pool, seq), str)]
    if not damaged:
        return
    head: int = pool.log.refresh(lambda machine: machine.seq)
    if damaged[0] == numbers[0] <= head:
        if damaged[0] == head:
            # The new one gets its name. Until it has, an older one and the log serve: they have just done so.
            pool.files.remove(layout.snapshot(head))
            yield f"snapshot {layout.snapshot(damaged.pop(0))} was damaged and is removed"
        yield f"snapshot {layout.snapshot(pool.log.snapshot())} is written"
    whole = [seq for seq in snapshot_numbers(pool.files) if isinstance(_read_snapshot(pool, seq), Snapshot)]
    from_start = read_entry(pool, 1) is not None
    for seq in damaged:
        if seq <= head and (from_start or any(other > seq for other in whole)):
            pool.files.remove(layout.snapshot(seq))
            yield f"snapshot {layout.snapshot(seq)} was damaged and is removed; others serve"


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
            layout.floor(number),
            problem,
            ("every process that opens the pool",),
            "`strawq verify POOL --repair` resets it",
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


def _check_log(pool: Pool, looks: Looks, oldest: int, head: int, found: list[Finding], progress: Progress) -> int:
    """The chain from the oldest entry that is there to the newest. Returns how many were read."""
    previous, count, seq = genesis(pool.header.pool_id) if oldest == 1 else "", 0, oldest
    while seq <= head + 1:
        entry = looks.entry(seq)
        if isinstance(entry, str):
            following = looks.past(seq)
            if following is not None and following.line.voids == seq:
                seq = following.line.seq
                continue
            rest = f"every state after entry {seq - 1} that no snapshot holds"
            remedy = (
                "`strawq verify POOL --repair` lets history go on behind it"
                if seq == head + 1
                else "restore the file from a copy"
            )
            found.append(Finding(layout.entry(seq), entry, (rest,), remedy))
            previous = ""
        elif entry is None:
            if seq > head and pool.log.gap is not None:
                found.append(_gap(looks, *pool.log.gap))
            elif seq <= head:
                found.append(
                    Finding(
                        layout.entry(seq), "is missing", (f"reading history at {seq}",), "restore the file from a copy"
                    )
                )
            previous = ""
        else:
            if previous and entry.line.prev != previous and (count or entry.line.prev != UNBOUND):
                found.append(_other_history(seq))
            previous = entry.digest
            count += 1
        if seq % 100 == 0:
            progress("log", seq - oldest, head - oldest + 1)
        seq += 1
    return count


def _gap(looks: Looks, missing: int, newest: int) -> Finding:
    """What to do where an entry is gone and others stand behind it."""
    last = missing
    while last + 1 < newest and looks.entry(last + 1) is None:
        last += 1
    more = f", as all up to entry {last}" if last > missing else ""
    return Finding(
        layout.entry(missing),
        f"is missing{more}, and entries up to {newest} stand behind it",
        (f"every state after entry {missing - 1}, and every process that opens the pool",),
        f"restore the file from a copy of the pool, or from the trash of its mount; {_cut_off(missing - 1, newest)}",
    )


def _other_history(seq: int) -> Finding:
    return Finding(
        layout.entry(seq),
        f"follows another history than the one that entry {seq - 1} ends: one of the two has been replaced, or written "
        "anew where it was missing",
        (f"every state after entry {seq - 1} that no snapshot holds",),
        f"restore both files from one copy of the pool; {_cut_off(seq - 1, 0)}",
    )


def _cut_off(last: int, newest: int) -> str:
    behind = f"entries {last + 1} to {newest}" if newest else f"entry {last + 1} and those behind it"
    return (
        f"without one, end all processes of the pool and move {behind} out of {layout.LOG}/: it goes on from entry "
        f"{last}, what {behind} say is lost, and `strawq verify POOL --full` says which objects went with them"
    )


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


def _check_snapshots(pool: Pool, looks: Looks, oldest: int, found: list[Finding], progress: Progress) -> int:
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
            found.append(Finding(layout.snapshot(seq), snapshot, (others,), "`strawq verify POOL --repair` removes it"))
            continue
        if base is not None and not _folds_to(looks, base, snapshot):
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


def _folds_to(looks: Looks, base: Machine, snapshot: Snapshot) -> bool:
    """Whether folding `base` up to the snapshot gives its bytes. True where entries in between are gone or
    unreadable: that is another finding."""
    while base.seq < snapshot.line.seq:
        entry = looks.entry(base.seq + 1)
        if isinstance(entry, str):
            entry = looks.past(base.seq + 1)
            if entry is not None and entry.line.voids != base.seq + 1:
                return True
        if not isinstance(entry, Entry):
            return True
        for event in base.decode(entry.line.seq, entry.line.events):
            base.apply(event, entry.line.seq, entry.where())
        base.keep(entry.line.seq)
    return dump_state(base.state) == bytes(snapshot.body)


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
                f"any live worker expires it, or `strawq sessions expire POOL {session.id}`",
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
            "`strawq gc POOL` removes them",
        )


def _staged_by_others(pool: Pool, live: set[str]) -> set[str]:
    return {name for name in pool.files.names(layout.STAGING) if name.rpartition("-")[0] not in live}
