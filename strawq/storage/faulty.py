"""The Files port of one simulated host or process, with everything that goes wrong on real ones.

The rule it keeps: it lies only in ways that a real mount has lied (the port's rules 5 and 6 say which), and each lie
comes from the plan: by the number of the call, or by a rate drawn from one seeded generator. The same plan and the
same calls give the same faults.

Two `FaultyFiles` on one `MemoryFiles` are two hosts: what one removes, the other may go on seeing for `stale_s`
seconds of its clock, if it had looked at it before. A crash kills this view alone (`Crash`, a BaseException, and every
later call raises it too, so that no `finally` of a dead process touches a file); `power_cut` also takes what was not
synced from the tree.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, TypeVar

import msgspec

from strawq.storage import layout
from strawq.storage.files import Buffer
from strawq.storage.memory import CrashPolicy, MemoryFiles

_T = TypeVar("_T")

Moment = Literal["before", "within", "after"]

Fault = Literal[
    "lost_eexist",  # the call worked; its reply says EEXIST, as an NFS server answers a repeated request
    "lost_eio",
    "lost_etimedout",
    "lost_estale",
    "enospc",  # nothing of the call's effect is there, but a part of a staged file may be
    "edquot",
    "eio",  # a read that fails, or an fsync that fails: nothing became durable
    "estale",  # nothing was done
    "enoent_once",  # the first look at a name after its publish does not find it
    "stale",  # a name that another host removed is still seen, with its old content; a listing is an old one
    "zeros",  # right size, zeros inside: the bytes have not arrived yet
]

_LOOKS = frozenset({"read", "read_into", "size"})
_CHANGES = frozenset({"stage", "publish", "replace", "remove", "make_directory", "remove_directory", "sync_directory"})
_GROWS = frozenset({"stage", "publish", "replace", "make_directory"})

APPLIES: dict[Fault, frozenset[str]] = {
    "lost_eexist": frozenset({"stage", "publish"}),
    "lost_eio": _CHANGES,
    "lost_etimedout": _CHANGES,
    "lost_estale": _CHANGES,
    "enospc": _GROWS,
    "edquot": _GROWS,
    "eio": frozenset({"stage", "sync_directory"}) | _LOOKS,
    "estale": _LOOKS | {"names", "remove", "publish"},
    "enoent_once": _LOOKS,
    "stale": _LOOKS | {"names"},
    "zeros": frozenset({"read", "read_into"}),
}

_ERRNO: dict[str, int] = {
    "lost_eexist": errno.EEXIST,
    "lost_eio": errno.EIO,
    "lost_etimedout": errno.ETIMEDOUT,
    "lost_estale": errno.ESTALE,
    "enospc": errno.ENOSPC,
    "edquot": errno.EDQUOT,
    "eio": errno.EIO,
    "estale": errno.ESTALE,
}


class Crash(BaseException):
    """The simulated process died here. Not an Exception, so that no handler of the code under test goes on after its
    death."""


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong. Calls are counted from 1, per view.

    `crash_at` kills the process before, within or after call n (within: a stage leaves a part of its file, any other
    call has or has not happened). `at` sets one fault for a call number; one that does not apply to that kind of call
    (`APPLIES`) or finds no occasion is skipped. `rates` gives each fault a probability per call that it applies to.
    `enoent_under` limits `enoent_once` to names below these prefixes, because for a name never looked up before
    absence is fresh (rule 5 of the port), and floors rest on that. `link_refused`: the file system has no hard links,
    so `publish` goes by rename and keeps no staged name."""

    seed: int = 0
    crash_at: tuple[int, Moment] | None = None
    at: dict[int, Fault] = {}
    rates: dict[Fault, float] = {}
    stale_s: float = 1.0
    enoent_under: tuple[str, ...] = ("objects/",)
    link_refused: bool = False


class FaultyFiles:
    """One host's view of `inner`. `clock` gives this host's seconds; without one, each call takes a millisecond.

    `calls` is every call as (kind, path), `counts` their number by kind, `bytes_staged` and `bytes_read` their
    payload, `fired` the faults that took effect as (call number, fault, path). `hook(moment, kind, path)` runs before
    and after each call, outside of all locks: tests force races by waiting in it."""

    def __init__(
        self, inner: MemoryFiles, plan: FaultPlan | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self.inner = inner
        self.plan = plan or FaultPlan()
        self.calls: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.fired: list[tuple[int, Fault, str]] = []
        self.bytes_staged = 0
        self.bytes_read = 0
        self.dead = False
        self.hook: Callable[[Moment, str, str], None] | None = None
        self._chance = random.Random(self.plan.seed)
        self._clock = clock or (lambda: len(self.calls) / 1000)
        self._lock = threading.RLock()
        self._looked: set[str] = set()
        self._removing: set[str] = set()
        self._ghosts: dict[str, tuple[bytes, float]] = {}
        self._listings: dict[str, tuple[list[str], float]] = {}
        inner.on_remove(self._hear_of_removal)

    @property
    def keeps_staged(self) -> bool:
        """Whether the staged name is still there after `publish`."""
        return self.inner.keeps_staged and not self.plan.link_refused

    def power_cut(self, policy: CrashPolicy = "mixed") -> None:
        """The machine under this view dies: the process with it, and what was not synced by the policy. Open a new
        view to go on."""
        self.dead = True
        self.inner.crash(self._chance, policy)

    # What another host's removal leaves in this host's caches.

    def _hear_of_removal(self, path: str, data: bytes) -> None:
        with self._lock:
            if path in self._looked and path not in self._removing:
                self._ghosts[path] = (data, self._clock())
            self._looked.discard(path)

    def _ghost(self, path: str) -> bytes | None:
        found = self._ghosts.get(path)
        if found is None:
            return None
        if self._clock() - found[1] > self.plan.stale_s:
            del self._ghosts[path]
            return None
        return found[0]

    # One way through which every call goes.

    def _begin(self, kind: str, path: str) -> tuple[int, Fault | None, Moment | None]:
        with self._lock:
            if self.dead:
                raise Crash(f"{kind} {path}: this process is dead")
            self.calls.append((kind, path))
            self.counts[kind] += 1
            number = len(self.calls)
            crash = self.plan.crash_at
            moment = crash[1] if crash is not None and crash[0] == number else None
            return number, self._choose(number, kind), moment

    def _choose(self, number: int, kind: str) -> Fault | None:
        planned = self.plan.at.get(number)
        if planned is not None and kind in APPLIES[planned]:
            return planned
        chosen: Fault | None = None
        for fault, rate in sorted(self.plan.rates.items()):
            # Drawn also when one was chosen already, so that what one call meets does not shift what the next one does.
            if kind in APPLIES[fault] and self._chance.random() < rate and chosen is None:
                chosen = fault
        return chosen

    def _run(
        self,
        kind: str,
        path: str,
        act: Callable[[], _T],
        wrong: Callable[[Fault], _T | None] | None = None,
        part: Callable[[], object] | None = None,
        killed: Callable[[], object] | None = None,
    ) -> _T:
        """`wrong` answers a fault with a wrong result (None: no occasion for it), `part` does half of the call, and
        `killed` leaves what only a process that dies within the call leaves."""
        number, fault, crash = self._begin(kind, path)
        if self.hook is not None:
            self.hook("before", kind, path)
        if crash == "before":
            self._die(number, kind, path, crash)
        if crash == "within":
            if part is not None:
                part()
            elif killed is not None and self._chance.random() < 0.5:
                killed()
            elif self._chance.random() < 0.5:
                self._try(act)
            self._die(number, kind, path, crash)
        try:
            answer = self._wronged(fault, path, number, act, wrong, part) if fault is not None else None
            if answer is None:
                answer = act()
        except OSError:
            if crash is not None:
                self._die(number, kind, path, crash)
            raise
        if self.hook is not None:
            self.hook("after", kind, path)
        if crash is not None:
            self._die(number, kind, path, crash)
        return answer

    def _wronged(
        self,
        fault: Fault,
        path: str,
        number: int,
        act: Callable[[], _T],
        wrong: Callable[[Fault], _T | None] | None,
        part: Callable[[], object] | None,
    ) -> _T | None:
        if fault in _ERRNO:
            if fault.startswith("lost_"):
                act()  # where the call itself fails, its own error is the answer
            elif part is not None and fault != "estale" and self._chance.random() < 0.5:
                part()
            self.fired.append((number, fault, path))
            raise OSError(_ERRNO[fault], os.strerror(_ERRNO[fault]), path)
        try:
            answer = wrong(fault) if wrong is not None else None
        except OSError:
            self.fired.append((number, fault, path))
            raise
        if answer is not None:
            self.fired.append((number, fault, path))
        return answer

    def _die(self, number: int, kind: str, path: str, moment: Moment) -> NoReturn:
        self.dead = True
        raise Crash(f"crash {moment} call {number}: {kind} {path}")

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError:
            return  # nobody is left to hear it

    # The port.

    def stage(self, path: str, buffers: Sequence[Buffer]) -> int:
        data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)

        def part() -> None:
            self._try(lambda: self.inner.stage_part(path, data[: self._chance.randrange(len(data) + 1)]))

        size = self._run("stage", path, lambda: self.inner.stage(path, [data]), part=part)
        self.bytes_staged += size
        return size

    def publish(self, staged: str, path: str) -> None:
        def act() -> bool:
            self.inner.publish(staged, path, "rename" if self.plan.link_refused else None)
            with self._lock:
                self._ghosts.pop(path, None)
            return True

        self._run("publish", path, act)

    def replace(self, path: str, data: Buffer) -> None:
        def act() -> bool:
            self.inner.replace(path, data)
            return True

        def part() -> None:
            """The draft that is renamed into place stays behind."""
            draft = bytes(data)[: self._chance.randrange(memoryview(data).nbytes + 1)]
            name = f"{layout.STAGING}/{self._chance.getrandbits(64):016x}-{len(self.calls)}"
            self._try(lambda: self.inner.stage_part(name, draft))

        self._run("replace", path, act, killed=part)

    def read(self, path: str) -> bytes:
        data = self._run("read", path, lambda: self.inner.read(path), lambda fault: self._look_wrong(fault, path))
        self._looked_at(path)
        self.bytes_read += len(data)
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        def wrong(fault: Fault) -> int | None:
            data = self._look_wrong(fault, path)
            if data is None:
                return None
            part = data[offset : offset + buffer.nbytes]
            buffer.cast("B")[: len(part)] = part
            return len(part)

        count = self._run("read_into", path, lambda: self.inner.read_into(path, offset, buffer), wrong)
        self._looked_at(path)
        self.bytes_read += count
        return count

    def size(self, path: str) -> int:
        def wrong(fault: Fault) -> int | None:
            data = self._look_wrong(fault, path)
            return None if data is None else len(data)

        size = self._run("size", path, lambda: self.inner.size(path), wrong)
        self._looked_at(path)
        return size

    def _looked_at(self, path: str) -> None:
        with self._lock:
            self._looked.add(path)

    def _look_wrong(self, fault: Fault, path: str) -> bytes | None:
        with self._lock:
            if fault == "stale":
                return self._ghost(path)
            if fault == "zeros":
                return bytes(self.inner.size(path)) or None
            if fault == "enoent_once" and path not in self._looked and path.startswith(self.plan.enoent_under):
                self.inner.size(path)  # no occasion if it is truly absent
                self._looked.add(path)
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return None

    def names(self, path: str) -> list[str]:
        prefix = path + "/" if path else ""

        def wrong(_: Fault) -> list[str] | None:
            with self._lock:
                listing, when = self._listings.get(path, ([], float("-inf")))
                if self._clock() - when <= self.plan.stale_s:
                    return list(listing)
                ghosts = {
                    ghost[len(prefix) :]
                    for ghost in list(self._ghosts)
                    if ghost.rpartition("/")[0] == path and self._ghost(ghost) is not None
                }
                return sorted(ghosts.union(self.inner.names(path))) if ghosts else None

        def act() -> list[str]:
            found = self.inner.names(path)
            with self._lock:
                self._listings[path] = (found, self._clock())
                self._looked.update(prefix + name for name in found)
            return found

        return self._run("names", path, act, wrong)

    def remove(self, path: str) -> bool:
        def act() -> bool:
            with self._lock:
                self._removing.add(path)
            try:
                return self.inner.remove(path)
            finally:
                with self._lock:
                    self._removing.discard(path)
                    self._ghosts.pop(path, None)

        return self._run("remove", path, act)

    def make_directory(self, path: str) -> None:
        def act() -> bool:
            self.inner.make_directory(path)
            return True

        self._run("make_directory", path, act)

    def remove_directory(self, path: str) -> bool:
        return self._run("remove_directory", path, lambda: self.inner.remove_directory(path))

    def sync_directory(self, path: str) -> None:
        def act() -> bool:
            self.inner.sync_directory(path)
            return True

        self._run("sync_directory", path, act)
