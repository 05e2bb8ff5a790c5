"""Garbage collection: a plan that `dry_run` prints and a run executes. It holds no lock, can die anywhere, and can be
run again.

    1  epoch e + 1 opens, if anything was published in e
    2  every live session has seen it, or has waited long enough (its publications are then simply stored again)
    3  epoch e closes: from that log position on no new reference to an object of e or older is accepted, unless it is
    reachable already
    4  what closed epochs hold and the state does not reach is removed

What is unreachable after 3 stays so, and a path is never used twice: a collector that sleeps for hours between its
look and its unlink removes only garbage. Roots are the active branch, other branches, checkpoints, batches and
leases: all of them are counted in the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from strawq.core import commands as c
from strawq.core.machine import Machine
from strawq.core.state import State
from strawq.errors import StorageFailed
from strawq.storage import layout
from strawq.storage.failure import file_calls, storage_failed
from strawq.storage.sealed import Unsealed, seal, unseal
from strawq.storage.sessions import read_beat

if TYPE_CHECKING:
    from strawq.pool import Pool

SEEN_WAIT_SECONDS = 5.0
STAGING_LOOK_SECONDS = 2.0
_POLL_SECONDS = 0.05
SWEEP_AGAIN_EPOCHS = 16


class Removal(msgspec.Struct, frozen=True):
    path: str
    bytes: int
    why: str


class Plan(msgspec.Struct, frozen=True):
    """What a run would remove, and what it leaves alone. `swept` are epochs to mark as holding only reachable files."""

    removals: tuple[Removal, ...]
    unknown: tuple[str, ...]
    kept_files: int
    kept_bytes: int
    closed_epoch: int
    open_epoch: int
    swept: tuple[tuple[int, int], ...] = ()
    empty_directories: tuple[str, ...] = ()


class Collected(msgspec.Struct, frozen=True):
    """What a run removed. `unknown` are names that strawq did not write: they are left and reported. `unfinished` says
    what a full disk did not allow."""

    files: int
    bytes: int
    by_reason: dict[str, int]
    unknown: tuple[str, ...]
    kept_files: int
    kept_bytes: int
    closed_epoch: int
    unfinished: tuple[str, ...] = ()


class _Reachable(msgspec.Struct, frozen=True):
    """The state at one position, as garbage collection sees it. Files by epoch; sizes in bytes."""

    files: dict[int, dict[str, int]]
    sessions: tuple[str, ...]
    epoch: int
    closed_epoch: int
    floor: int


@file_calls("collect", "garbage")
def collect_garbage(
    pool: Pool, *, dry_run: bool = False, wait_seconds: float = SEEN_WAIT_SECONDS
) -> tuple[Plan, Collected]:
    """Plan, and unless `dry_run` carry it out. A dry run plans as if the present epoch were closed already.

    Closing an epoch takes two commits. Where the disk has no room for them, what earlier epochs hold goes all the
    same, and then closing is tried once more."""
    if dry_run:
        plan = plan_collection(pool, as_if_closed=True)
        return plan, _nothing(plan)
    refused = _close_if_possible(pool, wait_seconds)
    plan = plan_collection(pool)
    done = execute(pool, plan)
    if refused and done.bytes:
        refused = _close_if_possible(pool, wait_seconds)
        if not refused:
            plan = plan_collection(pool)
            done = _sum(done, execute(pool, plan))
    return plan, msgspec.structs.replace(done, unfinished=done.unfinished + refused)


def _close_if_possible(pool: Pool, wait_seconds: float) -> tuple[str, ...]:
    """Close the epoch; why it could not be, if the storage refused."""
    try:
        close_epoch(pool, wait_seconds)
    except StorageFailed as error:
        return (f"only epochs that were closed before are collected: {error}",)
    return ()


def _sum(first: Collected, second: Collected) -> Collected:
    """Two runs in one report; what is kept is what the second one saw."""
    reasons = dict(first.by_reason)
    for why, count in second.by_reason.items():
        reasons[why] = reasons.get(why, 0) + count
    return msgspec.structs.replace(
        second, files=first.files + second.files, bytes=first.bytes + second.bytes, by_reason=reasons
    )


def close_epoch(pool: Pool, wait_seconds: float = SEEN_WAIT_SECONDS) -> int:
    """Open a new epoch and close the present one, if anything was born in it. Returns the newest closed epoch."""
    seen: _Reachable = pool.log.refresh(_reachable)
    if seen.closed_epoch < seen.epoch - 1:
        epoch = seen.epoch  # A run died between opening and closing: go on from there.
    elif pool.files.names(f"{layout.OBJECTS}/{seen.epoch:06d}"):
        epoch = seen.epoch + 1
        pool.commit(c.OpenEpoch(request=f"open-epoch-{epoch}", epoch=epoch))
    else:
        return seen.closed_epoch
    _wait_until_seen(pool, epoch, wait_seconds)
    pool.commit(c.CloseEpoch(request=f"close-epoch-{epoch - 1}", epoch=epoch - 1))
    return epoch - 1


def _wait_until_seen(pool: Pool, epoch: int, wait_seconds: float) -> None:
    """Waiting spares writers a second publication; safety does not rest on it."""
    end = pool.clock.monotonic() + wait_seconds
    while pool.clock.monotonic() < end:
        sessions: _Reachable = pool.log.refresh(_reachable)
        beats = [read_beat(pool.files, session) for session in sessions.sessions if session != pool.keeper.current]
        if all(beat is not None and beat.epoch >= epoch for beat in beats):
            return
        pool.clock.sleep(_POLL_SECONDS)


def _reachable(machine: Machine) -> _Reachable:
    state: State = machine.state
    files: dict[int, dict[str, int]] = {}
    for row in state.objects.values():
        ref = row.ref
        if ref.epoch:
            known = files.setdefault(ref.epoch, {})
            path = layout.record_file(ref.epoch, ref.name)
            known[path] = known.get(path, 0) + ref.bytes
            if ref.pack:
                known[layout.pack_file(ref.epoch, ref.pack)] = ref.pack_bytes
    meta = state.meta
    return _Reachable(files, tuple(state.sessions), meta.epoch, meta.closed_epoch, meta.floor)


def plan_collection(pool: Pool, *, as_if_closed: bool = False) -> Plan:
    """Everything that can go now. Reads the log's newest position first, then the directories: what is found later is
    younger. The position is durable: a power cut must not bring back an entry's absence, and with it a reference to
    what was removed."""
    seen: _Reachable = pool.log.refresh(_reachable, durable=True)
    if as_if_closed and pool.files.names(f"{layout.OBJECTS}/{seen.epoch:06d}"):
        seen = msgspec.structs.replace(seen, closed_epoch=seen.epoch)
    removals: list[Removal] = []
    unknown: list[str] = []
    swept: list[tuple[int, int]] = []
    empty: list[str] = []
    for name in pool.files.names(layout.OBJECTS):
        if not (name.isascii() and name.isdigit()):
            unknown.append(f"{layout.OBJECTS}/{name}")
        elif int(name) <= seen.closed_epoch:
            reachable = seen.files.get(int(name), {})
            _plan_epoch(pool, int(name), seen.closed_epoch, reachable, removals, unknown, swept, empty)
    _plan_leftovers(pool, seen, removals, unknown)
    unknown += [name for name in pool.files.names("") if name not in _KNOWN_TOP]
    kept = [size for files in seen.files.values() for size in files.values()]
    return Plan(
        tuple(removals), tuple(unknown), len(kept), sum(kept), seen.closed_epoch, seen.epoch, tuple(swept), tuple(empty)
    )


_KNOWN_TOP = frozenset({layout.HEADER, *layout.DIRECTORIES})


def _plan_epoch(
    pool: Pool,
    epoch: int,
    closed: int,
    reachable: dict[str, int],
    removals: list[Removal],
    unknown: list[str],
    swept: list[tuple[int, int]],
    empty: list[str],
) -> None:
    """One that was swept when it held as many files as are reachable now holds no others, but what a writer who slept
    through its end may have left there since: so it is looked at again when some more epochs have closed."""
    directory = f"{layout.OBJECTS}/{epoch:06d}"
    swept_files, swept_at = _swept(pool, epoch)
    if reachable and swept_files == len(reachable) and closed - swept_at < SWEEP_AGAIN_EPOCHS:
        return
    for part in pool.files.names(directory):
        if part == _SWEPT:
            if not reachable:
                removals.append(Removal(f"{directory}/{part}", 0, "epoch is empty"))
            continue
        names = pool.files.names(f"{directory}/{part}")
        for name in names:
            path = f"{directory}/{part}/{name}"
            if path in reachable:
                continue
            if name.startswith(".nfs"):
                continue  # An open file of some NFS client: it goes when that client closes it.
            if name.rpartition(".")[2] in ("arrow", "safetensors"):
                removals.append(Removal(path, _size(pool, path), "unreachable object"))
            else:
                unknown.append(path)
        if not any(f"{directory}/{part}/{name}" in reachable for name in names):
            empty.append(f"{directory}/{part}")
    if reachable:
        swept.append((epoch, len(reachable)))
    else:
        empty.append(directory)


_SWEPT = "swept"


def _swept(pool: Pool, epoch: int) -> tuple[int, int]:
    """How many files the epoch held when it was swept, and which epoch was the newest closed one then; (-1, 0) if the
    marker does not say so beyond doubt."""
    try:
        words = bytes(unseal(pool.files.read(f"{layout.OBJECTS}/{epoch:06d}/{_SWEPT}"))[0]).split()
    except (OSError, Unsealed):
        return -1, 0
    if len(words) != 3 or words[0] != b"%d" % epoch or not (words[1] + words[2]).isdigit():
        return -1, 0
    return int(words[1]), int(words[2])


def _swept_content(epoch: int, files: int, closed: int) -> bytes:
    return seal(b"%d %d %d" % (epoch, files, closed))[0]


def _plan_leftovers(pool: Pool, seen: _Reachable, removals: list[Removal], unknown: list[str]) -> None:
    """Staging files of processes without a live session that do not grow, and what sessions that have ended left.
    Both are looked at twice: a process writes its first heartbeat just before it joins, and taking a staging file that
    is wanted after all costs a rewrite."""
    beats = [read_beat(pool.files, session) for session in seen.sessions]
    live = {beat.instance for beat in beats if beat is not None} | {pool.instance}
    staged = _staging_sizes(pool, live)
    ended = _of_ended_sessions(pool, seen, unknown)
    if not staged and not ended:
        return
    pool.clock.sleep(STAGING_LOOK_SECONDS)
    again = _staging_sizes(pool, live)
    same = sorted(path for path, size in staged.items() if again.get(path) == size)
    removals += [Removal(path, staged[path], "staging of a process that is gone") for path in same]
    joined: _Reachable = pool.log.refresh(_reachable)
    for session, path, why in ended:
        if session not in joined.sessions:
            removals.append(Removal(path, _size(pool, path), why))


def _staging_sizes(pool: Pool, live: set[str]) -> dict[str, int]:
    names = [name for name in pool.files.names(layout.STAGING) if name.rpartition("-")[0] not in live]
    return {f"{layout.STAGING}/{name}": _size(pool, f"{layout.STAGING}/{name}") for name in names}


_OF_SESSIONS = {
    "json": "heartbeat of a session that has ended",
    "work.json": "counts of a worker whose session has ended",
}
"""What a session leaves, by what follows its id in the name; an id has no dot."""


def _of_ended_sessions(pool: Pool, seen: _Reachable, unknown: list[str]) -> list[tuple[str, str, str]]:
    """The session, the path and what it is, of each file of a session that has ended."""
    ended = []
    for name in pool.files.names(layout.SESSIONS):
        session, _, kind = name.partition(".")
        path = f"{layout.SESSIONS}/{name}"
        if kind not in _OF_SESSIONS:
            unknown.append(path)
        elif session not in seen.sessions and session != pool.keeper.current:
            ended.append((session, path, _OF_SESSIONS[kind]))
    return ended


def _size(pool: Pool, path: str) -> int:
    try:
        return pool.files.size(path)
    except OSError:
        return 0


def execute(pool: Pool, plan: Plan) -> Collected:
    """Carry out a plan. What somebody else has removed meanwhile is not counted."""
    files = size = 0
    by_reason: dict[str, int] = {}
    for removal in plan.removals:
        if pool.files.remove(removal.path):
            files += 1
            size += removal.bytes
            by_reason[removal.why] = by_reason.get(removal.why, 0) + 1
    for directory in plan.empty_directories:
        pool.files.remove_directory(directory)
    unfinished = _mark_swept(pool, plan)
    return Collected(
        files, size, by_reason, plan.unknown, plan.kept_files, plan.kept_bytes, plan.closed_epoch, unfinished
    )


def _mark_swept(pool: Pool, plan: Plan) -> tuple[str, ...]:
    """Markers only spare the next run a look: a disk that has no room for them does not fail this one."""
    for epoch, count in plan.swept:
        path = f"{layout.OBJECTS}/{epoch:06d}/{_SWEPT}"
        try:
            pool.files.replace(path, _swept_content(epoch, count, plan.closed_epoch))
        except OSError as error:
            return (f"epoch {epoch} is not marked as swept: {storage_failed('write', path, error)}",)
    return ()


def _nothing(plan: Plan) -> Collected:
    return Collected(0, 0, {}, plan.unknown, plan.kept_files, plan.kept_bytes, plan.closed_epoch)


def explain(state: State) -> dict[str, tuple[str, ...]]:
    """Why each object that has a file is retained: by what it is reached."""
    reasons: dict[str, set[str]] = {}
    for name in state.branch.queues:
        queue = state.branch.queues[name]
        for submission in queue.submissions.values():
            reasons.setdefault(submission.object, set()).add(f"queue {name}: fresh prompts")
        for task in queue.tasks.values():
            held = f"batch {task.batch}" if task.batch else f"lease of {task.session}" if task.session else task.stage
            for part in task.parts:
                reasons.setdefault(part.object, set()).add(f"queue {name}: {'dead letter' if task.failed else held}")
    for point in state.checkpoints.values():
        for digest in point.objects:
            reasons.setdefault(digest, set()).add(f"checkpoint {point.name}")
    for branch in state.branches.values():
        for digest in branch.objects:
            reasons.setdefault(digest, set()).add(f"branch {branch.id}")
    for pin in state.pins.values():
        for digest in pin.objects:
            reasons.setdefault(digest, set()).add(f"pin {pin.name} of session {pin.session}")
    for archive in state.archives.values():
        for digest in archive.objects:
            reasons.setdefault(digest, set()).add(f"archive {archive.name}")
    return {digest: tuple(sorted(why)) for digest, why in sorted(reasons.items())}
