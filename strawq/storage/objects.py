"""Objects: content-addressed files of records, with their tensor packs. Content is what its name says, or it is an
error that names it.

An object is published under a path that holds its epoch, so that a path is never used twice. Bytes are durable before
anyone refers to them. Objects move, into younger epochs only: a reader that finds one gone asks where it is by now.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import blake3

from strawq.errors import Damaged, Gone, StrawqError
from strawq.model import ObjectRef, StoredObject
from strawq.storage import layout
from strawq.storage.clock import Clock
from strawq.storage.entry import Entry
from strawq.storage.failure import storage_failed
from strawq.storage.files import Buffer
from strawq.storage.staging import Staging

_WAITS_SECONDS = (0.01, 0.05, 0.2, 0.8)
"""A mount may show a fresh file late, or zeros for a while. Together longer than `STALE_SECONDS`."""
STALE_SECONDS = 1.0
"""So long a client may look through a directory that another one has removed and made anew (JuiceFS's entry cache;
longer caches are refused by the probe). What is still absent after that is not there."""
ABSENT_KNOWN = 1024
CACHE_BYTES = 16 << 20
"""Small, so that it is full soon: what is kept longer is mostly of groups that were trained."""
DIRECTORIES_KNOWN = 64
"""Of the present epochs; older ones are not written to again."""
PUBLISH_TRIES = 5


class Pack(Protocol):
    """A tensor file to be stored; see `packs.PackPlan`."""

    staged: str

    @property
    def digest(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def buffers(self) -> Sequence[Buffer]: ...


class ObjectStore:
    """Objects of one pool. Safe from many threads."""

    def __init__(
        self,
        staging: Staging,
        clock: Clock,
        read_entry: Callable[[int], Entry | None],
        locate: Callable[[str], StoredObject | None],
    ) -> None:
        self._files = staging.files
        self._staging = staging
        self._clock = clock
        self._read_entry = read_entry
        self._locate = locate
        self._lock = threading.Lock()
        self._directories: set[str] = set()
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._cached = 0
        self._absent_since: dict[str, float] = {}

    def stage_pack(self, pack: Pack) -> None:
        """Write the tensor file under a staging name, durably. `publish` gives it its real one; its digest is known
        then, for its bytes were hashed on their way. `StorageFailed`."""
        try:
            pack.staged = self._staging.write(pack.buffers)
        except OSError as error:
            raise storage_failed("write", "a tensor file", error) from error

    def publish(self, records: Buffer, digest: str, rows: int, epoch: int, pack: Pack | None = None) -> ObjectRef:
        """Store an Arrow file of `rows` records named `digest` and, if given, the tensor file beside it, durably, in
        `epoch`."""
        files: list[tuple[str, str, Sequence[Buffer]]] = []
        name, size, staged = "", 0, ""
        if pack is not None:
            name, size, staged, pack.staged = pack.digest, pack.bytes, pack.staged, ""
            files.append((layout.pack_file(epoch, name), layout.object_directory(epoch, name), pack.buffers))
        files.append((layout.record_file(epoch, digest), layout.object_directory(epoch, digest), [records]))
        self._store(files, staged)
        return ObjectRef(digest, epoch, memoryview(records).nbytes, rows, name, size)

    def publish_merged(self, buffers: Sequence[Buffer], digest: str, epoch: int) -> None:
        """Store a file that holds many objects, durably, in `epoch`."""
        self._store([(layout.record_file(epoch, digest), layout.object_directory(epoch, digest), buffers)], "")

    def _store(self, files: list[tuple[str, str, Sequence[Buffer]]], staged: str) -> None:
        """Write files of (path, directory, content), of which the first may be `staged` already, and make them
        durable."""
        for turn in range(PUBLISH_TRIES):
            try:
                for path, directory, buffers in files:
                    self._place(path, directory, buffers, staged)
                    staged = ""
                # Names are made durable when all are there: a file system with a journal does that in one go.
                for directory in dict.fromkeys(directory for _, directory, _ in files):
                    self._files.sync_directory(directory)
                return
            except FileNotFoundError as error:
                # The staging file or an empty directory was collected under our feet: nothing refers to either.
                staged = ""
                self._directories.difference_update(directory for _, directory, _ in files)
                if turn == PUBLISH_TRIES - 1:
                    raise storage_failed("write", files[-1][0], error) from error
            except OSError as error:
                raise storage_failed("write", files[-1][0], error) from error
        raise AssertionError("the last turn returns or raises")

    def _place(self, path: str, directory: str, buffers: Sequence[Buffer], staged: str) -> None:
        """Give the staged file, or one that is staged now, the name `path`."""
        try:
            if directory not in self._directories:
                self._files.make_directory(directory)
                if len(self._directories) >= DIRECTORIES_KNOWN:
                    self._directories.clear()
                self._directories.add(directory)
            staged = staged or self._staging.write(buffers)
            # If the name is taken: the name is the content, so the same bytes are there. Either way nothing is left.
            self._staging.publish(staged, path)
            staged = ""
        finally:
            if staged:
                self._staging.discard(staged)

    def read(self, stored: StoredObject) -> bytes:
        """The Arrow file's bytes, checked against its name. `Gone` or `Damaged` name the object."""
        digest = stored.ref.digest
        with self._lock:
            data = self._cache.get(digest)
            if data is not None:
                self._cache.move_to_end(digest)
                return data
        data = self.read_checked(stored)
        self.remember(digest, data)
        return data

    def read_checked(self, stored: StoredObject) -> bytes:
        """Like `read`, past the cache."""
        while True:
            path = _path(stored)
            known = self._absent_since.get(path)
            patient = known is not None and self._clock.monotonic() - known <= STALE_SECONDS
            try:
                data = self._look(stored, patient)
                self._absent_since.pop(path, None)
                return data
            except FileNotFoundError:
                # Moves are committed before the old place is cleared, so two looks at the log are enough: one when the
                # name is missing, and one when it still is after all patience.
                moved = self._locate(stored.ref.digest)
                if moved is None:
                    raise Gone(
                        f"{_name(stored)} is not there: it has ended, and garbage collection has taken it"
                    ) from None
                if moved.ref.epoch > stored.ref.epoch:
                    stored = moved
                elif known is not None:
                    raise Gone(
                        f"{_name(stored)} is not there: it was removed by hand, or the mount has lost it"
                    ) from None
                else:
                    if len(self._absent_since) >= ABSENT_KNOWN:
                        self._absent_since.clear()
                    self._absent_since[path] = self._clock.monotonic()

    def _look(self, stored: StoredObject, patient: bool) -> bytes:
        """The bytes at this place, checked. `FileNotFoundError`: at once, or after all waits if `patient`."""
        error: StrawqError | FileNotFoundError
        for wait in (*_WAITS_SECONDS, None):
            try:
                data = self._read_bytes(stored)
                if blake3.blake3(data).hexdigest() == stored.ref.digest:
                    return data
                error = Damaged(
                    f"{_name(stored)} is damaged: its {len(data)} bytes do not match its name; `strawq verify POOL "
                    "--full` says what depends on it"
                )
            except FileNotFoundError as failure:
                if not patient:
                    raise
                error = failure
            except OSError as failure:
                error = storage_failed("read", _name(stored), failure)
            if wait is not None:
                self._clock.sleep(wait)
        raise error

    def _read_bytes(self, stored: StoredObject) -> bytes:
        ref = stored.ref
        if ref.file:
            buffer = memoryview(bytearray(ref.bytes))
            count = self._files.read_into(layout.record_file(ref.epoch, ref.file), ref.offset, buffer)
            return bytes(buffer[:count])
        if ref.epoch:
            return self._files.read(layout.record_file(ref.epoch, ref.digest))
        entry = self._read_entry(stored.seq)
        if entry is None:
            raise FileNotFoundError(layout.entry(stored.seq))
        return bytes(entry.payload[stored.offset : stored.offset + stored.ref.bytes])

    def remember(self, digest: str, data: bytes) -> None:
        """Keep bytes whose digest is known to be `digest`, for the next `read`: what was just written here is often
        what is worked on next."""
        if len(data) > CACHE_BYTES // 2:
            return
        with self._lock:
            if digest not in self._cache:
                self._cache[digest] = data
                self._cached += len(data)
            while self._cached > CACHE_BYTES:
                self._cached -= len(self._cache.popitem(last=False)[1])


def _path(stored: StoredObject) -> str:
    ref = stored.ref
    return layout.record_file(ref.epoch, ref.file or ref.digest) if ref.epoch else layout.entry(stored.seq)


def _name(stored: StoredObject) -> str:
    ref, path = stored.ref, _path(stored)
    if ref.epoch and not ref.file:
        return f"object {path}"
    return f"object {ref.digest[:12]} in {path if ref.epoch else f'log entry {path}'}"
