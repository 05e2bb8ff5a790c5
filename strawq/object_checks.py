"""Is every object that the state reaches there, and are its bytes what its name says? What is wrong is told by file.

All objects are looked at once, without waiting. Those with which something is wrong are looked at again together, when
a mount that is behind has had its time, and where the log says that they are by then: a collection that runs beside
this may have taken one that has ended, a merge may have moved one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from blake3 import blake3

from strawq.core.state import State
from strawq.errors import Damaged, Gone, StorageFailed
from strawq.garbage import explain
from strawq.looks import Looks
from strawq.model import ObjectRef, StoredObject
from strawq.remedies import tasks_by_object, way_on
from strawq.storage import layout
from strawq.storage.entry import Entry
from strawq.storage.failure import storage_failed

if TYPE_CHECKING:
    from strawq.pool import Pool

Progress = Callable[[str, int, int], None]
"""Called with what is checked, how much is done and how much there is."""

MOVES_FOLLOWED = 3
"""Looks at what something is wrong with: one more for each time that some of it has moved in between."""
_SHOWN_EVERY = 50


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as it should be: which, what is wrong, what depends on it, what to do."""

    what: str
    problem: str
    depends: tuple[str, ...]
    remedy: str


class Trouble(NamedTuple):
    """What is wrong with a file, as one object in it shows. `digest` is empty if that object itself can be read."""

    path: str
    problem: str
    digest: str


def check_objects(
    pool: Pool, state: State, looks: Looks, *, full: bool, found: list[Finding], progress: Progress
) -> int:
    """Add a finding for each file with trouble, or to the one that is there. With `full` every byte is read: how many
    that were is returned."""
    look = _Look(pool, looks, full)
    rows = list(state.objects.values())
    wrong = look.at(rows, "objects", progress)
    for _ in range(MOVES_FOLLOWED):
        if not wrong:
            break
        looks.wait()
        before = [row for row, _ in wrong]
        now = _located(pool, before)
        wrong = look.at([row for row in now if row is not None], "objects again", progress)
        if all(row is None or row.ref == old.ref for row, old in zip(now, before, strict=True)):
            break
    if wrong:
        _tell(state, rows, [trouble for _, troubles in wrong for trouble in troubles], found)
    return sum(row.ref.bytes + row.ref.pack_bytes for row in rows) if full else 0


def _located(pool: Pool, rows: Sequence[StoredObject]) -> list[StoredObject | None]:
    found: list[StoredObject | None] = pool.log.refresh_leniently(
        lambda machine: [machine.state.objects.get(row.ref.digest) for row in rows]
    )
    return found


def _tell(state: State, rows: Sequence[StoredObject], troubles: Sequence[Trouble], found: list[Finding]) -> None:
    reasons, tasks = explain(state), tasks_by_object(state)
    live: dict[str, set[str]] = {}
    for row in rows:
        live.setdefault(_path(row), set()).add(row.ref.digest)
    by_path: dict[str, list[Trouble]] = {}
    for trouble in troubles:
        by_path.setdefault(trouble.path, []).append(trouble)
    for path, here in sorted(by_path.items()):
        harmed = list(dict.fromkeys(trouble.digest for trouble in here if trouble.digest))
        problem = here[0].problem
        if len(harmed) > 1:
            problem += f" ({len(harmed)} of the {len(live.get(path, harmed))} live objects in it cannot be read)"
        needed = sorted({why for digest in harmed or live[path] for why in reasons.get(digest, ())})
        remedy = way_on(state, harmed, tasks)
        at = next((at for at, finding in enumerate(found) if finding.what == path), None)
        if at is None:
            found.append(Finding(path, problem, tuple(needed), remedy))
        else:  # the file is a log entry, and damaged as one
            found[at] = Finding(path, found[at].problem, (*found[at].depends, *needed), remedy)


def _path(row: StoredObject) -> str:
    return layout.record_file(row.ref.epoch, row.ref.name) if row.ref.epoch else layout.entry(row.seq)


class _Look:
    """Looks at objects where they are said to be, and waits for none."""

    def __init__(self, pool: Pool, looks: Looks, full: bool) -> None:
        from strawq.storage.tensors import PackReader

        self._pool, self._looks, self._full = pool, looks, full
        self._packs = PackReader(pool.files, clock=pool.clock, again=())
        self._entry: tuple[int, Entry | str | None] = (0, None)
        self._ends: dict[str, int] = {}
        self._sizes: dict[str, int | str] = {}

    def at(
        self, rows: Sequence[StoredObject], what: str, progress: Progress
    ) -> list[tuple[StoredObject, list[Trouble]]]:
        """Those with which something is wrong."""
        self._sizes.clear()
        self._entry = 0, None
        for row in rows:
            if row.ref.file:
                path = _path(row)
                self._ends[path] = max(self._ends.get(path, 0), row.ref.offset + row.ref.bytes)
        wrong = []
        for at, row in enumerate(rows):
            if at % _SHOWN_EVERY == 0:
                progress(what, at, len(rows))
            if troubles := list(self._troubles(row)):
                wrong.append((row, troubles))
        progress(what, len(rows), len(rows))
        return wrong

    def _troubles(self, row: StoredObject) -> Iterator[Trouble]:
        ref = row.ref
        if ref.epoch == 0:
            problem = self._inline(row)
            if problem:
                yield Trouble(layout.entry(row.seq), problem, ref.digest)
        elif ref.file:
            yield from self._merged(ref)
        else:
            path = layout.record_file(ref.epoch, ref.digest)
            problem = self._size_problem(path, ref.bytes) or (self._full and self._bytes_problem(path, ref)) or ""
            if problem:
                yield Trouble(path, problem, ref.digest)
            if ref.pack:
                path = layout.pack_file(ref.epoch, ref.pack)
                problem = (
                    self._size_problem(path, ref.pack_bytes) or (self._full and self._pack_problem(path, ref)) or ""
                )
                if problem:
                    yield Trouble(path, problem, ref.digest)

    def _inline(self, row: StoredObject) -> str:
        if self._entry[0] != row.seq or not isinstance(self._entry[1], Entry):
            self._entry = row.seq, self._looks.entry(row.seq)
        entry = self._entry[1]
        if not isinstance(entry, Entry):
            return entry or "is missing"
        return _digest_problem(entry.payload[row.offset : row.offset + row.ref.bytes], row.ref)

    def _merged(self, ref: ObjectRef) -> Iterator[Trouble]:
        path, end = layout.record_file(ref.epoch, ref.file), ref.offset + ref.bytes
        size = self._size(path)
        if isinstance(size, str):
            yield Trouble(path, size, ref.digest)
        elif size < end:
            yield Trouble(path, f"has {size} bytes, too few for an object in it that ends at {end}", ref.digest)
        else:
            # Bytes of objects that have ended are nobody's: each live one is compared by itself.
            problem = self._bytes_problem(path, ref) if self._full else ""
            if problem:
                yield Trouble(path, problem, ref.digest)
            elif size == end == self._ends[path]:
                yield Trouble(path, f"has {size} bytes: what follows its last object is missing", "")

    def _size_problem(self, path: str, wanted: int) -> str:
        size = self._size(path)
        return size if isinstance(size, str) else f"has {size} bytes, not {wanted}" if size != wanted else ""

    def _size(self, path: str) -> int | str:
        """The file's size, or what is wrong with it."""
        if path not in self._sizes:
            try:
                self._sizes[path] = self._pool.files.size(path)
            except FileNotFoundError:
                self._sizes[path] = "is missing"
            except OSError as error:
                self._sizes[path] = str(storage_failed("read", path, error))
        return self._sizes[path]

    def _bytes_problem(self, path: str, ref: ObjectRef) -> str:
        try:
            if not ref.file:
                return _digest_problem(self._pool.files.read(path), ref)
            buffer = memoryview(bytearray(ref.bytes))
            return _digest_problem(buffer[: self._pool.files.read_into(path, ref.offset, buffer)], ref)
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return str(storage_failed("read", path, error))

    def _pack_problem(self, path: str, ref: ObjectRef) -> str:
        try:
            self._packs.verify(path, ref.pack)
        except (Damaged, Gone, StorageFailed) as error:
            return str(error)
        return ""


def _digest_problem(data: bytes | memoryview, ref: ObjectRef) -> str:
    if blake3(data).hexdigest() == ref.digest:
        return ""
    return f"is damaged: the {len(data)} bytes of object {ref.digest[:12]} do not match its name"
