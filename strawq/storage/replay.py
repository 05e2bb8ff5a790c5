"""Reading the log: the newest snapshot, then every entry after it, in order, each once, each whole.

The end of the log is the first number that nobody has, unless a trim that we do not know of has taken it away: then
we are below the floor, and start again from a newer snapshot. Entries get their names in order, so where one is
missing and others follow, somebody has taken it away: its number is not free. Looked for once, when the log is loaded.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import blake3
import msgspec

from strawq.errors import Damaged, StorageFailed
from strawq.limits import RELOAD_TRIES, VOIDED_IN_A_ROW
from strawq.storage import layout
from strawq.storage.clock import Clock
from strawq.storage.entry import Entry, decode_entry, is_torn
from strawq.storage.failure import file_calls, storage_failed
from strawq.storage.files import Files
from strawq.storage.floors import decode_floor
from strawq.storage.snapshots import usable_snapshots

M = TypeVar("M", bound="Machine")
T = TypeVar("T")
UNBOUND = "0" * 64
"""What the first entry names in a log that an early strawq began: it says nothing about whose log it is."""
_DAMAGE_WAITS_SECONDS = (0.02, 0.1, 0.4, 1.0)


def genesis(pool: str) -> str:
    """What the first entry names as the digest before it: the pool's id, so that a log is read only under its own
    `strawq.json`."""
    return blake3.blake3(b"strawq pool " + pool.encode()).hexdigest()


class Machine(Protocol):
    """What the log needs of the pure core."""

    @property
    def seq(self) -> int: ...
    @property
    def trims(self) -> int: ...
    @property
    def forgotten_seq(self) -> int: ...
    def decide(self, command: Any) -> Any: ...
    def is_new(self, answer: Any, command: Any) -> bool: ...
    def answered(self, command: Any) -> Any: ...
    def encode(self, event: Any) -> bytes: ...
    def decode(self, seq: int, events: Sequence[msgspec.Raw]) -> list[Any]: ...
    def apply(self, event: Any, seq: int, where: Mapping[str, int]) -> None: ...
    def mark(self) -> int: ...
    def undo(self, mark: int = 0) -> None: ...
    def keep(self, seq: int) -> None: ...
    def dump(self) -> bytes: ...
    def load(self, data: Any, seq: int) -> None: ...
    def reset(self) -> None: ...


class Replay(Generic[M]):
    """The log as one process has folded it. Not safe for threads; `CommitLog` serialises its use."""

    def __init__(self, files: Files, machine: M, pool: str, clock: Clock) -> None:
        self.files = files
        self.machine = machine
        self.pool = pool
        self.tip = genesis(pool)
        """Digest of the newest entry that is folded."""
        self.snapshot_seq = 0
        """Entry of the newest snapshot that this process has read or written."""
        self.damage: dict[str, str] = {}
        """Damaged snapshots that were passed over, by path."""
        self.gap: tuple[int, int] | None = None
        """The number of an entry that is missing, and the newest behind it, if the last look at the log has found
        that."""
        self._clock = clock
        self._loaded = False
        self._no_gap = False
        self._at_end = False
        self._snapshot_bytes = 0
        self._bytes_since = 0

    def read_entry(self, seq: int) -> Entry | None:
        """Entry `seq`, or None if that number is free. Bytes may be late on some mounts, so damage is looked at again
        before it is believed."""
        path = layout.entry(seq)
        try:
            return self._patiently(path, lambda data: decode_entry(seq, path, data))
        except FileNotFoundError:
            return None

    def read_floor(self, number: int) -> int:
        """Entries below this number may be gone since trim `number`. `FileNotFoundError` if there was no such trim."""
        return self._patiently(layout.floor(number), lambda data: decode_floor(number, data))

    def _patiently(self, path: str, decode: Callable[[bytes], T]) -> T:
        for wait in (*_DAMAGE_WAITS_SECONDS, None):
            try:
                return decode(self.files.read(path))
            except FileNotFoundError:
                raise
            except Damaged:
                if wait is None:
                    raise
            except OSError as error:
                if wait is None or error.errno not in (errno.ESTALE, errno.EIO, errno.ETIMEDOUT):
                    raise storage_failed("read", path, error) from error
            self._clock.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _catch_up(self) -> None:
        # Until floors are looked at, what is folded may be a ghost: nothing is decided on it if this does not return.
        self._at_end = False
        self._reach_end()
        if not self._no_gap:
            self._look_for_gap()
        self._at_end = True

    def _reach_end(self) -> None:
        for _ in range(RELOAD_TRIES):
            if not self._loaded:
                with file_calls("read", "the newest snapshot"):
                    self._load()
            damage = self._fold_following()
            if not self._below_floor(self.machine.seq):
                if damage is not None:
                    raise damage
                return
            self._loaded = False
            self._clock.sleep(0.01 + 0.1 * self._clock.jitter())
        passed_over = "".join(f"; {damage}" for damage in list(self.damage.values())[:1])
        raise StorageFailed(
            f"the log was trimmed past every whole snapshot that a listing shows; `strawq verify POOL` says what to "
            f"restore{passed_over}"
        )

    def _look_for_gap(self) -> None:
        """`Damaged` if a listing shows an entry above the end. Others go on meanwhile: an entry that it shows was
        published behind all those before it, so whoever looks after it finds them, or a floor above them."""
        self.gap = None
        newest = self._newest_listed()
        for wait in (0.0, *_DAMAGE_WAITS_SECONDS):
            if newest > self.machine.seq:
                self._clock.sleep(wait)
                self._reach_end()
        if newest > self.machine.seq:
            missing = self.machine.seq + 1
            self.gap = missing, newest
            raise Damaged(
                f"log entry {layout.entry(missing)} is missing, and entry {newest} stands behind it: restore the file "
                "from a copy; `strawq verify POOL` says what can be done without one"
            )
        self._no_gap = True

    def _newest_listed(self) -> int:
        """The highest number above the end that the newest segments show; 0 if there is none."""
        with file_calls("list", layout.LOG):
            segments = sorted((int(name) for name in self.files.names(layout.LOG) if name.isdigit()), reverse=True)
            for number in segments:
                if number < layout.segment(self.machine.seq + 1):
                    break
                directory = layout.segment_directory(number)
                newest = max(map(layout.entry_seq, self.files.names(directory)), default=0)
                if newest:
                    return newest
        return 0

    def _fold_following(self) -> Damaged | None:
        """Fold every entry that follows. Damage is only believed above the floor: below it we may stand on a ghost,
        which no true entry follows."""
        try:
            while (entry := self._next_entry()) is not None:
                self._fold(entry)
        except Damaged as error:
            return error
        return None

    def _next_entry(self) -> Entry | None:
        """The entry after the newest that is folded; those that a repair has declared void are passed over."""
        seq = self.machine.seq + 1
        try:
            return self.read_entry(seq)
        except Damaged:
            following = self.read_past(seq)
            if following is None or following.line.voids != seq:
                raise
            for number in range(seq, following.line.seq):
                path = layout.entry(number)
                self.damage[path] = f"log entry {path} was never whole and is void"
            return following

    def read_past(self, seq: int) -> Entry | None:
        """The first whole entry behind `seq`, which is damaged; None if there is none, or too far away: a repair may be
        torn as well, but hardly often."""
        for number in range(seq + 1, seq + 1 + VOIDED_IN_A_ROW):
            try:
                return self.read_entry(number)
            except Damaged:
                continue
        return None

    def _behind_torn(self, seq: int) -> int:
        """The first number from `seq` on at which no entry stands that was never whole."""
        for number in range(seq, seq + VOIDED_IN_A_ROW):
            try:
                self.read_entry(number)
                return number
            except Damaged:
                with file_calls("read", layout.entry(number)):
                    if not is_torn(self.files.read(layout.entry(number))):
                        return number
        return seq + VOIDED_IN_A_ROW

    def _load(self) -> None:
        snapshot = next(usable_snapshots(self.files, self.pool, self.damage), None)
        if snapshot is None:
            self.machine.reset()
            self.tip = genesis(self.pool)
            self.snapshot_seq = self._snapshot_bytes = 0
        else:
            self.machine.load(snapshot.body, snapshot.line.seq)
            self.tip = snapshot.line.tip
            self.snapshot_seq, self._snapshot_bytes = snapshot.line.seq, snapshot.line.size
        self._bytes_since = 0
        self._loaded, self._no_gap = True, False

    def _fold(self, entry: Entry) -> None:
        line = entry.line
        if line.prev != self.tip and self.machine.seq == 0 and line.prev != UNBOUND:
            raise Damaged(
                f"log entry {layout.entry(line.seq)} begins the history of another pool than {layout.HEADER} names "
                f"({self.pool[:12]}); restore the {layout.HEADER} that belongs to this directory"
            )
        if line.prev != self.tip and self.machine.seq:
            raise Damaged(
                f"log entry {layout.entry(line.seq)} follows another history (it names {line.prev[:12]}, entry "
                f"{line.seq - 1} is "
                f"{self.tip[:12]}); run `strawq verify POOL`"
            )
        events = self.machine.decode(line.seq, line.events)
        where = entry.where()
        for event in events:
            self.machine.apply(event, line.seq, where)
        self._advance(line.seq, entry.digest, entry.size)

    def _advance(self, seq: int, digest: str, size: int) -> None:
        self.machine.keep(seq)
        self.tip = digest
        self._bytes_since += size

    def _below_floor(self, seq: int) -> bool:
        """Whether a trim that the state does not know of has taken entry `seq` away."""
        number = self.machine.trims + 1
        while True:
            try:
                floor = self.read_floor(number)
            except FileNotFoundError:
                return False
            if floor > seq:
                return True
            number += 1
