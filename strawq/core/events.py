"""What has happened: one event for each accepted command, written to the log and folded by `apply`.

An event says everything that the fold needs, so that a later version of `decide` cannot change the past. It is also
the answer to its command. `request` and `content` let a repeated command be recognised.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from strawq.core.commands import ReportItem
from strawq.model import ObjectRef, QueueConfig, Session

Refused = Literal["repeated", "stale", "conflict"]


class Event(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="event"
):
    request: str = ""
    content: str = ""


class Configured(Event, frozen=True, kw_only=True, tag="configured"):
    queue: str
    config: QueueConfig


class Joined(Event, frozen=True, kw_only=True, tag="joined"):
    session: Session


class Left(Event, frozen=True, kw_only=True, tag="left"):
    session: str


class Expired(Event, frozen=True, kw_only=True, tag="expired"):
    session: str
    reason: str = ""


class Submitted(Event, frozen=True, kw_only=True, tag="submitted"):
    """`numbers[i]` is the submission made of `objects[i]`: its tasks are `<number>-<row>`."""

    queue: str
    numbers: tuple[int, ...]
    objects: tuple[ObjectRef, ...]
    producer: str = ""
    cursor: str = ""

    @property
    def rows(self) -> int:
        return sum(ref.rows for ref in self.objects)


class Sealed(Event, frozen=True, kw_only=True, tag="sealed"):
    queue: str
    sealed: bool = True


class Acquired(Event, frozen=True, kw_only=True, tag="acquired"):
    """Leases of `session`: pairs of task and attempt."""

    queue: str
    session: str
    leases: tuple[tuple[str, int], ...]


class Reported(Event, frozen=True, kw_only=True, tag="reported"):
    """`items` happened; `refused` did not: `repeated` (it had happened before), `stale` (the lease is not current) or
    `conflict` (it had happened before with other content). A conflict under a current lease gives the lease back: it
    is among `items` as a `yield` too."""

    queue: str
    session: str
    items: tuple[ReportItem, ...]
    objects: tuple[ObjectRef, ...] = ()
    refused: tuple[tuple[str, int, Refused], ...] = ()
    dead: tuple[str, ...] = ()
    """Of the failed items, those that have used up their attempts."""


class BatchTaken(Event, frozen=True, kw_only=True, tag="batch_taken"):
    queue: str
    batch: str
    number: int
    attempt: int
    tasks: tuple[str, ...]
    consumer: str
    session: str


class BatchFinished(Event, frozen=True, kw_only=True, tag="batch_finished"):
    queue: str
    batch: str
    attempt: int
    dropped: tuple[tuple[str, str], ...] = ()


class BatchReturned(Event, frozen=True, kw_only=True, tag="batch_returned"):
    queue: str
    batch: str
    attempt: int


class FailedRetried(Event, frozen=True, kw_only=True, tag="failed_retried"):
    queue: str
    tasks: tuple[str, ...]


class TasksDropped(Event, frozen=True, kw_only=True, tag="tasks_dropped"):
    queue: str
    tasks: tuple[str, ...]
    reason: str


class VersionPublished(Event, frozen=True, kw_only=True, tag="version_published"):
    version: str


class Paused(Event, frozen=True, kw_only=True, tag="paused"):
    reason: str = ""
    session: str = ""


class PauseAcknowledged(Event, frozen=True, kw_only=True, tag="pause_acknowledged"):
    session: str


class Resumed(Event, frozen=True, kw_only=True, tag="resumed"):
    version: str = ""


class Checkpointed(Event, frozen=True, kw_only=True, tag="checkpointed"):
    """`seq` is the entry that holds this event (0: of a strawq that did not say so)."""

    name: str
    seq: int = 0
    metadata: str = ""
    bindings: tuple[tuple[str, str], ...] = ()
    time_ms: int = 0


class CheckpointDropped(Event, frozen=True, kw_only=True, tag="checkpoint_dropped"):
    name: str


class RolledBack(Event, frozen=True, kw_only=True, tag="rolled_back"):
    """From here on `branch` is active; it goes on from `target`. `left` is the branch that was active; its answers
    about checkpoints, branches and archives are remembered on the new one too. Empty: of a strawq that forgot them.
    `paused`: the pause that is on holds on; without it, it ended here."""

    target: str
    branch: str
    left: str = ""
    paused: bool = False


class BranchDropped(Event, frozen=True, kw_only=True, tag="branch_dropped"):
    name: str


class Pinned(Event, frozen=True, kw_only=True, tag="pinned"):
    session: str
    name: str
    objects: tuple[str, ...]


class Unpinned(Event, frozen=True, kw_only=True, tag="unpinned"):
    session: str
    name: str


class Archived(Event, frozen=True, kw_only=True, tag="archived"):
    name: str
    queue: str
    tasks: tuple[str, ...]
    metadata: str = ""
    time_ms: int = 0


class ArchiveDropped(Event, frozen=True, kw_only=True, tag="archive_dropped"):
    name: str


class EpochOpened(Event, frozen=True, kw_only=True, tag="epoch_opened"):
    epoch: int


class EpochClosed(Event, frozen=True, kw_only=True, tag="epoch_closed"):
    epoch: int


class Trimmed(Event, frozen=True, kw_only=True, tag="trimmed"):
    number: int
    floor: int


class ObjectsMoved(Event, frozen=True, kw_only=True, tag="objects_moved"):
    objects: tuple[ObjectRef, ...]


AnyEvent = (
    Configured
    | Joined
    | Left
    | Expired
    | Submitted
    | Sealed
    | Acquired
    | Reported
    | BatchTaken
    | BatchFinished
    | BatchReturned
    | FailedRetried
    | TasksDropped
    | VersionPublished
    | Paused
    | PauseAcknowledged
    | Resumed
    | Checkpointed
    | CheckpointDropped
    | RolledBack
    | BranchDropped
    | Pinned
    | Unpinned
    | Archived
    | ArchiveDropped
    | EpochOpened
    | EpochClosed
    | Trimmed
    | ObjectsMoved
)


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Backpressure is an answer, not an exception. Nothing happened and nothing was logged."""

    status: Literal["empty", "backpressured", "paused", "sealed", "epoch_closed", "done"]
    detail: str = ""


def identified(event: AnyEvent, request: str, content: str) -> AnyEvent:
    """The same event with the identity of the command that caused it."""
    return msgspec.structs.replace(event, request=request, content=content)
