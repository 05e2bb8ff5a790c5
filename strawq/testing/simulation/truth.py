"""The one true history, seen from outside: every name that appears or goes is held against what must be true of it.

The rules that this observer keeps, at each instant and without a look into any process:

- entry n follows entry n - 1, names its digest, and is the only one of its number; another file under that number is
  a ghost, allowed only below a floor that stands there already
- an entry refers only to objects that are there, whole and durable, and not to new ones of a closed epoch
- nothing that the state reaches is removed; no entry goes before a durable floor above it, no floor stands above all
  durable snapshots
- folding the entries gives a sound state that equals the books
"""

from __future__ import annotations

import random
from collections.abc import Callable

import blake3

from strawq.core import events as e
from strawq.core.image import dump_state
from strawq.core.invariants import findings
from strawq.core.machine import Machine
from strawq.core.state import State
from strawq.model import ObjectRef
from strawq.storage import layout
from strawq.storage.entry import Entry, decode_entry
from strawq.storage.exclusive import Primitive
from strawq.storage.files import Buffer
from strawq.storage.floors import decode_floor
from strawq.storage.memory import MemoryFiles, _Directory, _File
from strawq.testing.simulation.book import Book
from strawq.testing.simulation.violation import Violation, require

_SOUND_EVERY = 16
"""Entries between two looks at the whole state."""


class Truth:
    """The true history of one pool in memory. Raises `Violation` at the instant in which a rule is broken."""

    def __init__(self, memory: WatchedFiles, book: Book) -> None:
        self.memory = memory
        self.book = book
        self.machine = Machine()
        self.tips: dict[int, str] = {}
        self.entries: dict[int, Entry] = {}
        self.acknowledged_seq = 0
        self._floors: dict[str, int] = {}
        self.ghosts = 0
        self.torn: list[int] = []
        """The newest entries, as far as they are not whole: nobody was told of them. Their successor must declare them
        void."""
        self.void: set[int] = set()
        self.watch_mending: Callable[[], object] = lambda: None
        self.dumps: dict[int, bytes] = {}
        self.watch_expiry: Callable[[e.Expired, str], object] = lambda _event, _instance: None

    @property
    def state(self) -> State:
        return self.machine.state

    @property
    def seq(self) -> int:
        return self.machine.seq

    def floor(self) -> int:
        """The highest floor that stands, durable or not."""
        return max(self._floors.values(), default=0)

    # Names that appear.

    def appeared(self, path: str, data: bytes) -> None:
        if path.startswith("log/"):
            self._entry(path, data)
        elif path.startswith("floors/"):
            floor = self._floors[path] = decode_floor(int(path.rpartition("/")[2]), data)
            snapshots = [layout.snapshot_seq(name) for name in self.memory.names(layout.SNAPSHOTS)]
            durable = [seq for seq in snapshots if self.memory.is_durable(layout.snapshot(seq))]
            require(
                any(seq >= floor - 1 for seq in durable),
                f"{path} says {floor}, and no durable snapshot reaches that far (there are {durable})",
            )
        elif path.startswith("snapshots/"):
            seq = layout.snapshot_seq(path.rpartition("/")[2])
            require(seq <= self.seq, f"{path} is of an entry that does not exist")
            for number in range(seq, max(self.floor(), 1) - 1, -1):
                require(
                    self.memory.is_durable(layout.entry(number)),
                    f"{path} appeared before the name of entry {number} was durable",
                )

    def _entry(self, path: str, data: bytes) -> None:
        seq = int(path.rpartition("/")[2].partition(".")[0])
        entry = decode_entry(seq, path, data)
        if seq <= self.seq:
            require(seq < self.floor(), f"{path} appeared a second time, and no floor stands above it")
            self.ghosts += 1
            return
        if self.torn:
            expected = (self.torn[-1] + 1, self.torn[0])
            require((seq, entry.line.voids) == expected, f"{path} appeared behind torn entries {self.torn}")
            require(not entry.line.events, f"{path} declares others void and says more")
            self.void.update(self.torn)
            self.torn = []
            self.watch_mending()
        else:
            require(seq == self.seq + 1, f"{path} appeared while the newest entry is {self.seq}: a hole")
            require(not entry.line.voids, f"{path} declares an entry void that is whole")
        require(entry.line.prev == self.tips[self.seq], f"{path} does not follow entry {self.seq} of this history")
        where = entry.where()
        for event in self.machine.decode(seq, entry.line.events):
            self._objects(seq, event)
            if isinstance(event, e.Expired):
                self.watch_expiry(event, entry.line.session)
            self.book.happened(event, seq)
            self.machine.apply(event, seq, where)
        self.machine.keep(seq)
        self.tips[seq] = entry.digest
        self.entries[seq] = entry
        if seq % _SOUND_EVERY == 0:
            self.sound()

    def _objects(self, seq: int, event: e.AnyEvent) -> None:
        if isinstance(event, e.Pinned):
            missing = [digest for digest in event.objects if digest not in self.state.objects]
            require(not missing, f"entry {seq} pins objects that nothing reaches: {missing}")
            return
        for ref in getattr(event, "objects", ()):
            known = self.state.objects.get(ref.digest)
            if ref.epoch == 0:
                continue
            if known is None or isinstance(event, e.ObjectsMoved):
                require(
                    ref.epoch > self.state.meta.closed_epoch,
                    f"entry {seq} refers to object {ref.digest[:12]} of epoch {ref.epoch}, which is closed",
                )
                self._stored(seq, layout.record_file(ref.epoch, ref.name), ref.name)
                if ref.file:
                    self._inside(seq, ref)
                if ref.pack:
                    self._stored(seq, layout.pack_file(ref.epoch, ref.pack), "")

    def _inside(self, seq: int, ref: ObjectRef) -> None:
        data = self.memory.read(layout.record_file(ref.epoch, ref.file))[ref.offset : ref.offset + ref.bytes]
        require(blake3.blake3(data).hexdigest() == ref.digest, f"entry {seq} places {ref.digest[:12]} where it is not")

    def _stored(self, seq: int, path: str, digest: str) -> None:
        require(self.memory.is_durable(path), f"entry {seq} refers to {path}, which is not durable")
        if digest:
            require(
                blake3.blake3(self.memory.read(path)).hexdigest() == digest, f"{path} does not hold what its name says"
            )

    # Names that go.

    def gone(self, path: str, data: bytes) -> None:
        if path.startswith("objects/"):
            digest = path.rpartition("/")[2].partition(".")[0]
            for row in self.state.objects.values():
                ref = row.ref
                require(
                    not (ref.epoch and path.startswith(f"objects/{ref.epoch:06d}/") and digest in (ref.name, ref.pack)),
                    f"{path} was removed and is reached by {row.count} references",
                )
        elif path.startswith("log/"):
            self._entry_gone(path, data)
        elif path.startswith("snapshots/"):
            names = [layout.snapshot_seq(name) for name in self.memory.names(layout.SNAPSHOTS)]
            require(
                any(seq >= self.floor() - 1 and self.memory.is_durable(layout.snapshot(seq)) for seq in names),
                f"{path} was removed and no durable snapshot is left above floor {self.floor()}",
            )
        elif path.startswith("floors/"):
            raise Violation(f"{path} was removed: a floor stays")

    def _entry_gone(self, path: str, data: bytes) -> None:
        seq = int(path.rpartition("/")[2].partition(".")[0])
        entry = self.entries.get(seq)
        if entry is None or decode_entry(seq, path, data).digest != entry.digest:
            return  # A ghost.
        floors = [floor for name, floor in self._floors.items() if self.memory.is_durable(name)]
        require(max(floors, default=0) > seq, f"{path} was removed and no durable floor stands above it")
        for row in self.state.objects.values():
            require(
                bool(row.ref.epoch) or row.seq != seq,
                f"{path} was removed with object {row.ref.digest[:12]} inside, which is reached",
            )

    # What processes say.

    def follows(self, seq: int, tip: str, who: str) -> None:
        """A process that answers from entry `seq` has folded this history and no other."""
        require(self.tips.get(seq) == tip, f"{who} answers from an entry {seq} that is not of the true history")

    def acknowledged(self, seq: int, who: str) -> None:
        """Somebody was told something that rests on entry `seq`."""
        if seq > self.acknowledged_seq and seq >= self.floor():
            require(
                self.memory.is_durable(layout.entry(seq)), f"{who} was answered from entry {seq}, which is not durable"
            )
        self.acknowledged_seq = max(self.acknowledged_seq, seq)

    def same(self, state: State, who: str) -> None:
        """At one position every reader has the same state, byte for byte."""
        dump = dump_state(state)
        require(self.dumps.setdefault(state.seq, dump) == dump, f"{who} has another state at entry {state.seq}")
        if state.seq == self.seq:
            require(dump_state(self.state) == dump, f"{who} has another state than the true one at entry {state.seq}")

    def sound(self) -> None:
        """The state is sound in itself and equals the books."""
        found = findings(self.state)
        require(not found, f"the state at entry {self.seq} is unsound: {'; '.join(found)}")
        require(self.state.active.row == self.book.branch, f"{self.state.active.row} is active, not {self.book.branch}")
        require(set(self.state.sessions) == self.book.sessions, "the live sessions are not those of the books")
        for name in self.state.branch.queues:
            queue = self.state.branch.queues[name]
            for task in queue.tasks.values():
                note = self.book.line.notes[task.id]
                have = (task.stage, task.session, task.batch, task.failed, task.attempt)
                want = (note.stage, note.lease[0] if note.lease else "", note.batch, note.failed, note.attempt)
                require(have == want, f"task {task.id} is {have} in the state and {want} in the books")
            live = {key for key, note in self.book.line.notes.items() if not note.ended}
            started = {key for key in live if self.book.line.notes[key].attempt or key in queue.tasks}
            require(
                started == set(queue.tasks), f"tasks {sorted(started ^ set(queue.tasks))} are in one of the two only"
            )
            require(queue.unstarted == len(live) - len(started), "fresh prompts are lost or doubled")

    # Power cuts.

    def power_cut(self, torn: int = 0) -> None:
        """Forget the entries that were lost with the power, and the one that was torn; none was acknowledged."""
        self._floors = {path: floor for path, floor in self._floors.items() if self.memory.holds(path)}
        floor, last = self.floor(), 0
        for seq in range(1, self.seq + 1):
            if seq != torn and (seq < floor or self.memory.holds(layout.entry(seq))):
                last = seq
            else:
                break
        tail = [torn] if torn else self.torn
        while last in self.void:
            # It is among the newest once more: what declared it void is gone, or torn itself.
            self.void.discard(last)
            tail, last = [last, *tail], last - 1
        self.torn = [number for number in tail if self.memory.holds(layout.entry(number))]
        require(
            last >= self.acknowledged_seq,
            f"after a power cut the log ends at {last}, and entry {self.acknowledged_seq} had been acknowledged",
        )
        if last < self.seq:
            self._forget_after(last)

    def _forget_after(self, last: int) -> None:
        self.book.restart()
        self.machine.reset()
        for seq in range(1, last + 1):
            if seq in self.void:
                continue
            entry = self.entries[seq]
            for event in self.machine.decode(seq, entry.line.events):
                self.book.happened(event, seq)
                self.machine.apply(event, seq, entry.where())
            self.machine.keep(seq)
        for seq in [seq for seq in self.tips if seq > last]:
            del self.tips[seq]
            self.entries.pop(seq, None)
        self.dumps = {seq: dump for seq, dump in self.dumps.items() if seq <= last}


class WatchedFiles(MemoryFiles):
    """The tree that all simulated hosts share, with an observer."""

    truth: Truth | None = None
    beat: Callable[[str, Buffer], object] = staticmethod(lambda _path, _data: None)

    def forget(self, notice: Callable[[str, bytes], None]) -> None:
        """A host that is gone hears of no more removals."""
        self._removed.remove(notice)

    def replace(self, path: str, data: Buffer) -> None:
        super().replace(path, data)
        self.beat(path, data)

    def publish(self, staged: str, path: str, primitive: Primitive | None = None) -> None:
        super().publish(staged, path, primitive)
        if self.truth is not None:
            self.truth.appeared(path, self.read(path))

    def remove(self, path: str) -> bool:
        data = self.read(path) if self.truth is not None and self.holds(path) else b""
        removed = super().remove(path)
        if removed and self.truth is not None:
            self.truth.gone(path, data)
        return removed

    def holds(self, path: str) -> bool:
        try:
            self.size(path)
        except OSError:
            return False
        return True

    def tear(self, path: str, chance: random.Random) -> None:
        """The disk has kept a part of an entry, and perhaps zeros for its rest: it had not flushed what it said that it
        had. Zeros begin in its two lines: objects behind whole lines are damaged objects, and no torn entry."""
        file = self._file(path)
        size = len(file.data)
        if chance.random() < 0.5:
            file.data = file.flushed = file.data[: chance.randrange(size)]
            return
        end = file.data.index(b"\n", file.data.index(b"\n") + 1)
        kept = chance.randrange(end)
        file.data = file.flushed = file.data[:kept] + bytes(size - kept)

    def is_durable(self, path: str) -> bool:
        """Whether the file is there after a power cut, with the bytes that it has now."""
        node: _Directory | _File | None = self._root
        seen: _Directory | _File | None = self._root
        for name in path.split("/"):
            if not isinstance(node, _Directory) or not isinstance(seen, _Directory):
                return False
            node, seen = node.durable.get(name), seen.entries.get(name)
        return isinstance(node, _File) and node is seen and node.flushed == node.data

    def everything(self) -> list[str]:
        """Paths of all files."""
        found: list[str] = []
        waiting = [("", self._root)]
        while waiting:
            prefix, directory = waiting.pop()
            for name, node in sorted(directory.entries.items()):
                if isinstance(node, _Directory):
                    waiting.append((f"{prefix}{name}/", node))
                else:
                    found.append(prefix + name)
        return sorted(found)
