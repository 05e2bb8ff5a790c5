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

_WAITS_SECONDS = (0.01, 0.05, 0.2, 0.5)
"""A mount may show a fresh file late, or zeros for a while."""
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
        error: StrawqError
        waits = iter(_WAITS_SECONDS)
        while True:
            name = self._name(stored)
            try:
                data = self._read_bytes(stored)
                if blake3.blake3(data).hexdigest() == stored.ref.digest:
                    return data
                error = Damaged(
                    f"{name} is damaged: its {len(data)} bytes do not match its name; `strawq verify` says what "
                    "depends on it"
                )
            except FileNotFoundError:
                moved = self._locate(stored.ref.digest)
                if moved is not None and moved.ref.epoch > stored.ref.epoch:
                    stored = moved
                    continue
                error = Gone(f"{name} is not there: garbage collection has taken it, or it was removed by hand")
            except OSError as failure:
                error = storage_failed("read", name, failure)
            wait = next(waits, None)
            if wait is None:
                raise error
            self._clock.sleep(wait)

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

    @staticmethod
    def _name(stored: StoredObject) -> str:
        ref = stored.ref
        if ref.file:
            return f"object {ref.digest[:12]} in {layout.record_file(ref.epoch, ref.file)}"
        if ref.epoch:
            return f"object {layout.record_file(ref.epoch, ref.digest)}"
        return f"object {ref.digest[:12]} in log entry {layout.entry(stored.seq)}"

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
