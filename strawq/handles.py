"""What queue calls hand out: leases, batches, receipts. Plain data; a handle proves nothing by itself, the log does."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from strawq.model import Stage, StoredObject, Task


class Held(msgspec.Struct, frozen=True):
    """A task's rows in the state and the objects that they refer to, as of one log position."""

    task: Task
    objects: dict[str, StoredObject]


class Lease(msgspec.Struct, frozen=True):
    """One group is this process's work until it reports or is taken for dead. `attempt` is the fencing number."""

    queue: str
    branch: str
    session: str
    task: str
    attempt: int
    held: Held

    @property
    def stage(self) -> Stage:
        return self.held.task.stage


class Leases(msgspec.Struct, frozen=True):
    """Answer of `acquire`: leases, or why there are none (`empty`, `backpressured`, `paused`, `sealed`)."""

    status: str
    leases: tuple[Lease, ...] = ()
    detail: str = ""

    def __iter__(self) -> Iterator[Lease]:
        return iter(self.leases)

    def __len__(self) -> int:
        return len(self.leases)


class Submitted(msgspec.Struct, frozen=True):
    """Receipt of `submit`: the submissions made, how many prompts are in them, and the producer's cursor now."""

    numbers: tuple[int, ...]
    prompts: int
    cursor: str = ""


class Reported(msgspec.Struct, frozen=True):
    """Receipt of a report. `accepted` counted now, `repeated` had counted before; `stale` and `conflict` did not
    count: drop that work (a lease that was still ours is given back). `dead` are those of the failed tasks that have
    become dead letters."""

    accepted: tuple[str, ...]
    repeated: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    conflict: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()

    def counts(self, task: str) -> bool:
        """Whether the report of this task stands."""
        return task in self.accepted or task in self.repeated


class Batch(msgspec.Struct, frozen=True):
    """Groups for a trainer. `delivery` above 1 means that an earlier holder died or let go before finishing it."""

    queue: str
    branch: str
    session: str
    id: str
    number: int
    delivery: int
    consumer: str
    groups: tuple[Held, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(held.task.id for held in self.groups)


class Taken(msgspec.Struct, frozen=True):
    """Answer of `take_batch`: a batch, or why there is none (`empty`, `sealed`)."""

    status: str
    batch: Batch | None = None
    detail: str = ""
