"""A queue in this process, fed by a slime data source: the worker's face of `get_samples` and `add_samples`.

The rule: a group that came from `get_samples` is in exactly one place: waiting, leased, complete and not yet taken, or
back in the data source. What nobody takes goes back with `add_samples`, complete groups first, then prefixes, then what
was not started, each in the order in which it came; so what was started first is used first. The data source is called
by one thread, one call at a time, and never by the event loop's.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, cast

import msgspec

from strawq.errors import BadInput
from strawq.handles import Held, Lease, Leases, Reported
from strawq.model import Pause, Stage, Task
from strawq.samples import Group, Prompt, Sample
from strawq.work import Change, Work
from strawq_workers.worker.generation import finished
from strawq_workers.worker.hooks import answered, as_raised
from strawq_workers.worker.source import Around

log = logging.getLogger("strawq.worker")

T = TypeVar("T")
BRANCH = SESSION = "memory"
MAX_ATTEMPTS = 3


class DataSource(Protocol):
    """What is used of a slime data source. A group is a list of samples."""

    def get_samples(self, num_samples: int) -> list[list[Any]]: ...

    def add_samples(self, samples: list[list[Any]]) -> None: ...


class Codec(Protocol):
    """Between a data source's samples and strawq's groups, exact both ways."""

    def prompt_of(self, sample: Any, group_index: Any) -> Prompt: ...

    def group_of(self, task_id: str, prompt: Prompt, samples: Sequence[Any]) -> Group: ...

    def samples_of(self, group: Group, cls: Any) -> list[Any]: ...


class Entry:
    """One group that was fetched: as it came (`original`, and `given` by sample), and as it is now (`group`, without
    the samples of which there is nothing to say)."""

    __slots__ = ("attempt", "failures", "given", "group", "key", "leased", "order", "original", "touched")

    def __init__(self, key: str, order: int, original: list[Any], group: Group) -> None:
        self.key = key
        self.order = order
        self.original = original
        self.given = {sample.index: sample for sample in group.samples}
        self.group = msgspec.structs.replace(group, samples=tuple(filter(_has_something, group.samples)))
        self.attempt = 0
        self.failures = 0
        self.leased = False
        self.touched = False

    @property
    def stage(self) -> Stage:
        if self.complete:
            return "ready"
        return "partial" if any(len(s.tokens) or finished(s) for s in self.group.samples) else "fresh"

    @property
    def complete(self) -> bool:
        return len(self.group.samples) >= len(self.original) and all(map(finished, self.group.samples))


class Returned(msgspec.Struct, frozen=True):
    """Groups given back to the data source."""

    ready: int = 0
    partial: int = 0
    fresh: int = 0


class MemorySource:
    """Belongs to one event loop. `ready_max`: nothing is leased while so many complete groups wait to be taken (0: no
    bound). `window`: no more groups than that are in hand, complete, or taken and not trained (`untrained`); 0: no
    bound."""

    pool = None
    session = SESSION

    def __init__(self, data: DataSource, codec: Codec, *, ready_max: int = 0, max_attempts: int = MAX_ATTEMPTS) -> None:
        self.data = data
        self.ready_max = ready_max
        self.window = self.untrained = 0
        self.policy_version = ""
        self.arrived = asyncio.Event()
        """Set when a group is complete; whoever waits for it clears it."""
        self.acknowledged = asyncio.Event()
        self.fetched = self.taken = self.dropped = 0
        self._codec = codec
        self._max_attempts = max_attempts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="strawq-data")
        self._fetching = asyncio.Lock()
        self._entries: dict[str, Entry] = {}
        self._done: dict[str, Entry] = {}
        self._pause: Pause | None = None
        self._requests = 0

    # -- the worker's face --------------------------------------------------------------------------------------

    def new_request(self) -> str:
        self._requests += 1
        return f"memory.{self._requests}"

    async def run(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        made = functools.partial(answered, call, *args, **options)
        answer, error = await asyncio.get_running_loop().run_in_executor(self._thread, made)
        if error is not None:
            raise as_raised("the data source", error) from error
        return cast(T, answer)

    async def acquire(self, count: int = 1, *, begun_only: bool = False, request_id: str | None = None) -> Leases:
        """Leases what waits here, then what the data source has; what was begun is never held back, for a caller may
        wait for it. Being cancelled loses nothing: what was fetched waits for the next call."""
        del request_id  # nothing is lost on the way, so nothing is asked twice
        if self._paused():
            return Leases("paused")
        full = bool(self.ready_max) and len(self._done) >= self.ready_max
        begun = [key for key in self._waiting() if self._entries[key].stage == "partial"]
        if begun and (full or begun_only):
            return Leases("acquired", tuple(self._lease(key) for key in begun[:count]))
        if full:
            return Leases("backpressured", (), f"{len(self._done)} complete groups wait to be taken")
        waiting = len(self._waiting())
        count = min(count, waiting + self._room(count))
        if count < 1:
            return Leases("backpressured", (), f"{self.window} groups are in hand, complete, or not trained yet")
        came = await asyncio.shield(self._fetch(count - waiting)) if count > waiting else 0
        if self._paused():
            return Leases("paused")
        chosen = self._waiting()[:count]
        if not chosen:
            ended = not came and not any(entry.leased for entry in self._entries.values())
            return Leases("sealed" if ended else "empty", (), "the data source has no samples")
        return Leases("acquired", tuple(self._lease(key) for key in chosen))

    async def open(self, lease: Lease) -> Work:
        return Work(lease, self._entries[lease.task].group)

    async def report(self, changes: Sequence[Change], *, request_id: str | None = None) -> Reported:
        del request_id
        accepted, stale, dead = [], [], []
        for change in changes:
            lease: Lease = change.work.lease
            entry = self._entries.get(lease.task)
            if entry is None or not entry.leased or entry.attempt != lease.attempt:
                stale.append(lease.task)
                continue
            if change.group is not None:
                entry.group = change.group
                entry.touched = True
                change.work.group = change.group
            accepted.append(lease.task)
            if self._settle(lease.task, entry, change):
                dead.append(lease.task)
        return Reported(tuple(accepted), stale=tuple(stale), dead=tuple(dead))

    async def look(self) -> Around:
        return Around(BRANCH, frozenset({SESSION}), self._pause, self.policy_version)

    async def acknowledge_pause(self) -> None:
        if self._pause is not None:
            self._pause = msgspec.structs.replace(self._pause, acknowledged=(SESSION,))
            self.acknowledged.set()

    async def close(self) -> None:
        async with self._fetching:
            self._thread.shutdown(wait=False)

    # -- the consumer's face ------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Complete groups that wait to be taken."""
        return len(self._done)

    @property
    def held(self) -> int:
        """Groups that are here and not complete."""
        return len(self._entries)

    def entries(self) -> tuple[list[Entry], list[Entry]]:
        """Complete groups that wait to be taken, and those that may still become complete."""
        return list(self._done.values()), [e for e in self._entries.values() if e.leased or self._waits(e)]

    def take(self, count: int) -> list[Entry]:
        """Up to `count` complete groups, those first that came first; the rest stay."""
        keys = sorted(self._done, key=lambda key: self._done[key].order)[:count]
        self.taken += len(keys)
        return [self._done.pop(key) for key in keys]

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Undo a `take` of which nothing came."""
        self.taken -= len(entries)
        self._done.update({entry.key: entry for entry in entries})

    def begin_anew(self, entry: Entry, samples: Sequence[Sample]) -> None:
        """A complete group that nobody has taken is work again, with these samples."""
        self._entries[entry.key] = self._done.pop(entry.key)
        entry.group = msgspec.structs.replace(entry.group, samples=tuple(samples))
        entry.touched = True

    async def samples(self, entries: Sequence[Entry]) -> list[list[Any]]:
        """Groups as the data source's own kind of samples."""
        return await self.run(lambda: [self._samples(entry) for entry in entries])

    def pause(self, reason: str) -> None:
        """Fetch nothing more until `resume`; `acknowledged` is set when the worker's work has stopped."""
        self.acknowledged.clear()
        self._pause = Pause(reason, "")

    def resume(self, version: str = "") -> None:
        self._pause = None
        self.policy_version = version or self.policy_version

    async def give_back(self, mark: Callable[[Any], None] | None = None) -> Returned:
        """Everything that is here goes back to the data source. The worker must have ended. `mark` is called with each
        sample of an unfinished group that has a response."""
        async with self._fetching:
            for entry in self._entries.values():
                if entry.leased:
                    # Its run ended by a fault, without a report: it goes back as it was saved.
                    log.warning("group %s was in hand when the worker ended", entry.key)
                    entry.leased = False
            ranks: dict[Stage, int] = {"ready": 0, "partial": 1, "fresh": 2}
            entries = [*self._done.values(), *self._entries.values()]
            going = sorted(entries, key=lambda entry: (ranks[entry.stage], entry.order))
            if going:
                await self.run(self._add, going, mark)
            self._done.clear()
            self._entries.clear()
        stages = [entry.stage for entry in going]
        return Returned(*(stages.count(stage) for stage in ranks))

    # -- inside -------------------------------------------------------------------------------------------------

    def _room(self, count: int) -> int:
        """How many groups may be fetched."""
        if not self.window:
            return count
        done, rest = self.entries()
        return max(0, self.window - len(rest) - len(done) - self.untrained)

    def _paused(self) -> bool:
        return self._pause is not None

    def _waiting(self) -> list[str]:
        waiting = [(entry.order, key) for key, entry in self._entries.items() if self._waits(entry)]
        return [key for _, key in sorted(waiting)]

    def _waits(self, entry: Entry) -> bool:
        return not entry.leased and entry.failures < self._max_attempts

    def _lease(self, key: str) -> Lease:
        entry = self._entries[key]
        entry.attempt += 1
        entry.leased = True
        task = Task(key, entry.order, entry.stage, (), attempt=entry.attempt, session=SESSION)
        return Lease("", BRANCH, SESSION, key, entry.attempt, Held(task, {}))

    async def _fetch(self, count: int) -> int:
        async with self._fetching:
            entries = await self.run(self._get, count, self.fetched)
            self._entries.update({entry.key: entry for entry in entries})
            self.fetched += len(entries)
            return len(entries)

    def _get(self, count: int, order: int) -> list[Entry]:
        """Runs in the data source's thread."""
        got = self.data.get_samples(count)
        try:
            return [self._entry(order + at, samples) for at, samples in enumerate(got)]
        except BaseException:
            self.data.add_samples(got)
            raise

    def _entry(self, order: int, samples: list[Any]) -> Entry:
        if not samples:
            raise BadInput("the data source returned a group without samples")
        key = f"{order}"
        prompt = self._codec.prompt_of(samples[0], getattr(samples[0], "group_index", None))
        prompt = msgspec.structs.replace(prompt, samples=len(samples))
        return Entry(key, order, samples, self._codec.group_of(key, prompt, samples))

    def _samples(self, entry: Entry) -> list[Any]:
        """The group as the data source's own kind of samples, with all that they came with."""
        if not entry.touched:
            return entry.original
        return self._codec.samples_of(_whole(entry), type(entry.original[0]))

    def _settle(self, key: str, entry: Entry, change: Change) -> bool:
        """Carry out what was reported; returns whether the group has failed for good."""
        if change.outcome == "save":
            return False
        entry.leased = False
        if change.outcome == "complete":
            self._done[key] = self._entries.pop(key)
            self.arrived.set()
        elif change.outcome == "drop":
            del self._entries[key]
            self.dropped += 1
        elif change.outcome == "fail":
            entry.failures = entry.failures + 1 if change.retryable else self._max_attempts
            return not self._waits(entry)
        return False

    def _add(self, entries: list[Entry], mark: Callable[[Any], None] | None) -> None:
        """Runs in the data source's thread."""
        groups = []
        for entry in entries:
            samples = self._samples(entry)
            for sample in samples if not entry.complete else ():
                if mark is not None and sample.response_length:
                    mark(sample)
            groups.append(samples)
        self.data.add_samples(groups)


def _whole(entry: Entry) -> Group:
    """The group with the samples that have not begun."""
    now = {**entry.given, **{sample.index: sample for sample in entry.group.samples}}
    return msgspec.structs.replace(entry.group, samples=tuple(now[index] for index in sorted(now)))


def _has_something(sample: Sample) -> bool:
    """Whether the sample is more than its prompt: begun, or with fields of its own, which hooks are to see."""
    return bool(len(sample.tokens) or finished(sample) or sample.payload or sample.metadata or sample.tensors)
