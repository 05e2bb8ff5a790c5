"""Merging: many files that hold little live data become few, so that directories follow the bytes that are live.

    1  objects that are small and lie in closed epochs are read, checked, and written together, durably, into the open
       epoch
    2  one commit says where they are now; an object that has ended or moved meanwhile is left out of it
    3  the old files are unreachable from then on: the next collection removes them

It pays when `MERGE_FILES` such files have gathered. It holds no lock, can die anywhere, and can be run again: until 2
what was written is garbage of an epoch that will close. Of two mergers one moves an object; a reader that comes to the
old place after 3 asks where the object is now. A merged file counts as one that holds little when no more than half of
its room is taken by what is live: so files that stay are half full, and what is copied again has outlived as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from strawq.core import commands as c
from strawq.core import events as e
from strawq.core.machine import Machine
from strawq.errors import Damaged, Gone, StorageFailed
from strawq.limits import MERGE_FILES, MERGE_OBJECT_BYTES, MERGED_FILE_BYTES, MERGED_OBJECTS
from strawq.model import ObjectRef, StoredObject
from strawq.storage import layout
from strawq.storage.failure import file_calls, storage_failed
from strawq.storage.merged import layout_of, merge

if TYPE_CHECKING:
    from strawq.pool import Pool

_MOVE_TRIES = 20
SICK_FILES = 16
"""So many files that cannot be read make a mount that cannot."""

Read = tuple[StoredObject, bytes]
"""An object and its bytes, checked."""


class Sparse(msgspec.Struct, frozen=True):
    """A file that holds little live data, and the live objects in it."""

    path: str
    objects: tuple[StoredObject, ...]
    bytes: int


class Merging(msgspec.Struct, frozen=True):
    """What a merge did, or would do: the live objects of `files` files, of `bytes` together, are in `into` files now.
    The old files go with the next collection."""

    files: int = 0
    into: int = 0
    objects: int = 0
    bytes: int = 0


@file_calls("merge", "small objects")
def merge_objects(pool: Pool, *, enough: int | None = None, dry_run: bool = False) -> Merging:
    """Merge what closed epochs hold in small files, if they are `enough` (`MERGE_FILES`). A dry run counts as if the
    present epoch were closed already, and estimates `into`. An object that cannot be read stays where it is: `verify`
    names it."""
    sparse = plan_merge(pool, enough=enough, as_if_closed=dry_run)
    objects = [row for file in sparse for row in file.objects]
    if dry_run:
        size = sum(file.bytes for file in sparse)
        into = max(-(-size // MERGED_FILE_BYTES), -(-len(objects) // MERGED_OBJECTS))
        return Merging(len(sparse), into, len(objects), size)
    left: set[str] = set()
    into = 0
    moved: list[ObjectRef] = []
    for together in bins(_readable(pool, objects)):
        paths = {records_path(row.ref) for row, _ in together}
        if len(paths) > 1:  # else it would only be copied
            refs = move_together(pool, together)
            if refs:
                moved += refs
                left |= paths
                into += 1
    return Merging(len(left), into, len(moved), sum(ref.bytes for ref in moved))


def plan_merge(pool: Pool, *, enough: int | None = None, as_if_closed: bool = False) -> list[Sparse]:
    """The files to merge, of old epochs first; none if they are too few to pay."""

    def look(machine: Machine) -> list[StoredObject]:
        meta = machine.state.meta
        closed = meta.epoch if as_if_closed else meta.closed_epoch
        return [row for row in machine.state.objects.values() if 0 < row.ref.epoch <= closed]

    found = _sparse(pool.log.refresh(look))
    return found if len(found) >= (MERGE_FILES if enough is None else enough) else []


def _sparse(rows: Iterable[StoredObject]) -> list[Sparse]:
    files: dict[str, list[StoredObject]] = {}
    # What was written at one time often ends at one time: neighbours stay neighbours.
    for row in sorted(rows, key=lambda row: (row.ref.epoch, row.ref.offset)):
        if not row.ref.pack and row.ref.bytes <= MERGE_OBJECT_BYTES:
            files.setdefault(records_path(row.ref), []).append(row)
    found = [Sparse(path, tuple(there), sum(row.ref.bytes for row in there)) for path, there in files.items()]
    return [
        file
        for file in found
        if not file.objects[0].ref.file
        or (file.bytes <= MERGED_FILE_BYTES // 2 and len(file.objects) <= MERGED_OBJECTS // 2)
    ]


def records_path(ref: ObjectRef) -> str:
    """The file in which the records of an object are, if it has one."""
    return layout.record_file(ref.epoch, ref.name)


def _readable(pool: Pool, rows: Iterable[StoredObject]) -> Iterator[Read]:
    """The bytes of those that are there and whole. A file that the mount does not read is not asked for its other
    objects; `StorageFailed` where that is `SICK_FILES` of them, for each is waited for."""
    sick: set[str] = set()
    for row in rows:
        path = records_path(row.ref)
        if path in sick:
            continue
        try:
            data = pool.objects.read_checked(row)
        except (Gone, Damaged):
            continue
        except StorageFailed:
            sick.add(path)
            if len(sick) == SICK_FILES:
                raise
            continue
        yield row, data


def bins(objects: Iterable[Read]) -> Iterator[list[Read]]:
    """What goes together into one file. An object that fits to none is alone."""
    waiting: dict[bytes, list[Read]] = {}
    sizes: dict[bytes, int] = {}
    for row, data in objects:
        shape = layout_of(data)
        if shape is None:
            yield [(row, data)]
            continue
        if sizes.get(shape, 0) + len(data) > MERGED_FILE_BYTES or len(waiting.get(shape, ())) == MERGED_OBJECTS:
            yield waiting.pop(shape)
            sizes[shape] = 0
        waiting.setdefault(shape, []).append((row, data))
        sizes[shape] = sizes.get(shape, 0) + len(data)
    yield from waiting.values()


def move_together(pool: Pool, objects: Sequence[Read]) -> tuple[ObjectRef, ...]:
    """Write these objects into one file of the open epoch and commit that they are there. Returns those that moved; one
    that has ended, or that somebody else has moved, stays as it is. `StorageFailed`: none has moved."""
    for _ in range(_MOVE_TRIES):
        refs = _store(pool, objects, pool.epoch())
        answer = pool.commit(c.MoveObjects(request=pool.new_request(), objects=refs))
        if not isinstance(answer, e.Refusal):
            moved: tuple[ObjectRef, ...] = answer.objects
            return moved
        if answer.status != "epoch_closed":
            return ()
    raise storage_failed("move", "objects", OSError("garbage collection closed their epoch too often"))


def _store(pool: Pool, objects: Sequence[Read], epoch: int) -> tuple[ObjectRef, ...]:
    if len(objects) == 1:
        ((row, data),) = objects
        return (pool.objects.publish(data, row.ref.digest, row.ref.rows, epoch),)
    merged = merge([data for _, data in objects])
    pool.objects.publish_merged(merged.buffers, merged.digest, epoch)
    return tuple(
        ObjectRef(row.ref.digest, epoch, row.ref.bytes, row.ref.rows, file=merged.digest, offset=offset)
        for (row, _), offset in zip(objects, merged.offsets, strict=True)
    )
