"""The Files port in memory: the twin that tests and the simulator run on.

The rule it keeps: it remembers what a real file system would have kept. Every directory has two sets of entries, those
that programs see and those that are durable, and every file has its bytes and the bytes that were flushed. `stage`
flushes data but not the name; `publish`, `replace` and `remove` change what is seen; only `sync_directory` makes a
directory's entries durable. `crash` throws away, keeps or tears whatever was not, so an ordering mistake in a caller
becomes a failing test.

One tree may be used by many threads and be shown to many simulated hosts (see `faulty`).
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from strawq.storage.exclusive import Primitive
from strawq.storage.files import Buffer

CrashPolicy = Literal["drop", "keep", "mixed"]


class _File:
    """One inode. `flushed` is what the disk is sure to have: None if nothing was flushed yet."""

    __slots__ = ("data", "flushed")

    def __init__(self, data: bytes, flushed: bytes | None) -> None:
        self.data = data
        self.flushed = flushed


class _Directory:
    __slots__ = ("durable", "entries")

    def __init__(self) -> None:
        self.entries: dict[str, _File | _Directory] = {}
        self.durable: dict[str, _File | _Directory] = {}


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


class MemoryFiles:
    """A file tree in memory with the semantics of the port. `primitive` says whether `publish` keeps the staged
    name."""

    def __init__(self, primitive: Primitive = "link") -> None:
        self.primitive: Primitive = primitive
        self._lock = threading.RLock()
        self._root = _Directory()
        self._removed: list[Callable[[str, bytes], None]] = []

    @property
    def keeps_staged(self) -> bool:
        """Whether the staged name is still there after `publish`."""
        return self.primitive == "link"

    def on_remove(self, notice: Callable[[str, bytes], None]) -> None:
        """Call `notice(path, content)` after each removal: how a second simulated host comes to know what it may still
        see."""
        self._removed.append(notice)

    def _directory(self, path: str) -> _Directory:
        found = self._root
        for name in path.split("/") if path else ():
            if name in ("", ".", ".."):
                raise ValueError(f"{path!r} is not a relative path below the pool")
            step = found.entries.get(name)
            if step is None:
                raise _error(errno.ENOENT, path)
            if not isinstance(step, _Directory):
                raise _error(errno.ENOTDIR, path)
            found = step
        return found

    def _at(self, path: str) -> tuple[_Directory, str]:
        parent, _, name = path.rpartition("/")
        if "\0" in name or path[:1] == "/":
            raise ValueError(f"{path!r} is not a relative path below the pool")
        return self._directory(parent), name

    def _file(self, path: str) -> _File:
        directory, name = self._at(path)
        found = directory.entries.get(name)
        if found is None:
            raise _error(errno.ENOENT, path)
        if not isinstance(found, _File):
            raise _error(errno.EISDIR, path)
        return found

    def stage(self, path: str, buffers: Sequence[Buffer]) -> int:
        data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
        with self._lock:
            self._create(path, _File(data, data))
        return len(data)

    def stage_part(self, path: str, data: bytes) -> None:
        """Leave a file as a `stage` that failed or was killed half-way leaves it: bytes written, nothing flushed."""
        with self._lock:
            self._create(path, _File(data, None))

    def _create(self, path: str, file: _File) -> None:
        directory, name = self._at(path)
        if name in directory.entries or name in ("", ".", ".."):
            raise _error(errno.EEXIST, path)
        directory.entries[name] = file

    def publish(self, staged: str, path: str, primitive: Primitive | None = None) -> None:
        with self._lock:
            file = self._file(staged)
            self._create(path, file)
            if (primitive or self.primitive) == "rename":
                source, name = self._at(staged)
                del source.entries[name]

    def replace(self, path: str, data: Buffer) -> None:
        content = bytes(data)
        with self._lock:
            directory, name = self._at(path)
            if isinstance(directory.entries.get(name), _Directory):
                raise _error(errno.EISDIR, path)
            directory.entries[name] = _File(content, None)

    def read(self, path: str) -> bytes:
        with self._lock:
            return self._file(path).data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        part = self.read(path)[offset : offset + buffer.nbytes]
        buffer.cast("B")[: len(part)] = part
        return len(part)

    def size(self, path: str) -> int:
        return len(self.read(path))

    def names(self, path: str) -> list[str]:
        with self._lock:
            try:
                return sorted(name for name in self._directory(path).entries if not name.startswith("."))
            except FileNotFoundError:
                return []

    def remove(self, path: str) -> bool:
        with self._lock:
            try:
                file = self._file(path)
            except FileNotFoundError:
                return False
            directory, name = self._at(path)
            del directory.entries[name]
        for notice in self._removed:
            notice(path, file.data)
        return True

    def make_directory(self, path: str) -> None:
        with self._lock:
            found = self._root
            for name in path.split("/") if path else ():
                if name in ("", ".", ".."):
                    raise ValueError(f"{path!r} is not a relative path below the pool")
                step = found.entries.setdefault(name, _Directory())
                if not isinstance(step, _Directory):
                    raise _error(errno.ENOTDIR, path)
                # All names of the parent become durable with it: fsync of a directory does not pick.
                found.durable = dict(found.entries)
                found = step

    def remove_directory(self, path: str) -> bool:
        if path == "":
            raise ValueError("the pool's own directory is not removed through the port")
        with self._lock:
            try:
                parent, name = self._at(path)
                directory = self._directory(path)
            except FileNotFoundError:
                return False
            if directory.entries:
                return False
            del parent.entries[name]
            return True

    def sync_directory(self, path: str) -> None:
        with self._lock:
            directory = self._directory(path)
            directory.durable = dict(directory.entries)

    def crash(self, chance: random.Random, policy: CrashPolicy = "mixed") -> None:
        """The machine loses power. Each name that differs from its durable state is dropped, kept, or (mixed) one of
        the two, each by itself; data that were never flushed are lost, kept, or (mixed) torn: cut, zeroed from some
        byte on, or empty."""
        with self._lock:
            settled: dict[int, _File] = {}
            self._settle(self._root, chance, policy, settled)

    def _settle(
        self, directory: _Directory, chance: random.Random, policy: CrashPolicy, settled: dict[int, _File]
    ) -> None:
        after: dict[str, _File | _Directory] = {}
        # Sorted, so that one seed gives one outcome.
        for name in sorted(directory.entries.keys() | directory.durable.keys()):
            seen, durable = directory.entries.get(name), directory.durable.get(name)
            keep_seen = policy == "keep" or (policy == "mixed" and chance.random() < 0.5)
            node = seen if keep_seen else durable
            if isinstance(node, _Directory):
                self._settle(node, chance, policy, settled)
                after[name] = node
            elif node is not None:
                if id(node) not in settled:
                    settled[id(node)] = _settled(node, chance, policy)
                after[name] = settled[id(node)]
        directory.entries = after
        directory.durable = dict(after)

    def copy(self) -> MemoryFiles:
        """An independent tree with the same content, durable and seen, without the observers. File bytes are shared."""
        twin = MemoryFiles(self.primitive)
        with self._lock:
            twin._root = _copy(self._root, {})
        return twin


def _settled(file: _File, chance: random.Random, policy: CrashPolicy) -> _File:
    if file.flushed is not None and file.flushed == file.data:
        return _File(file.data, file.data)
    lost = file.flushed if file.flushed is not None else b""
    if policy == "keep":
        data = file.data
    elif policy == "drop":
        data = lost
    else:
        cut = chance.randrange(len(file.data) + 1)
        zeroed = file.data[:cut] + bytes(len(file.data) - cut)
        data = chance.choice([file.data, lost, file.data[:cut], zeroed])
    return _File(data, data)


def _copy(directory: _Directory, done: dict[int, _File | _Directory]) -> _Directory:
    twin = _Directory()
    done[id(directory)] = twin
    for source, target in ((directory.entries, twin.entries), (directory.durable, twin.durable)):
        for name, node in source.items():
            if id(node) not in done:
                done[id(node)] = _copy(node, done) if isinstance(node, _Directory) else _File(node.data, node.flushed)
            target[name] = done[id(node)]
    return twin
