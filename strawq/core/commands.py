"""What a process may ask of a pool. A command changes nothing until its event stands in the log.

`request` identifies the command: asked again with the same content it gets its first answer. `branch` is the line of
history that the caller believes to be active; a command of another line is refused.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from strawq.model import UNVERSIONED, ObjectRef, QueueConfig, Session, Slice, Stage

Outcome = Literal["save", "yield", "complete", "drop", "fail"]


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="command"):
    request: str = ""
    """Identity of the command; the face makes one up when the caller gives none."""


class QueueCommand(Command, frozen=True, kw_only=True, tag_field="command"):
    queue: str
    branch: str = ""


class Configure(Command, frozen=True, kw_only=True, tag="configure"):
    """Create a queue or change its settings."""

    queue: str
    config: QueueConfig


class Join(Command, frozen=True, kw_only=True, tag="join"):
    session: Session


class Leave(Command, frozen=True, kw_only=True, tag="leave"):
    """A clean stop: leases and batches are given back, and no attempt is held against them."""

    session: str


class Expire(Command, frozen=True, kw_only=True, tag="expire"):
    """An observer saw no sign of life. `pid`-death or a heartbeat that stood still on the observer's own clock."""

    session: str
    reason: str = ""


class Submit(QueueCommand, frozen=True, kw_only=True, tag="submit"):
    """Add every row of `objects` as a fresh prompt, and move the producer's cursor from `expect` to `cursor` in the
    same commit."""

    objects: tuple[ObjectRef, ...]
    producer: str = ""
    cursor: str = ""
    expect: str | None = None


class Seal(QueueCommand, frozen=True, kw_only=True, tag="seal"):
    """No further input will come (or, with `sealed` false, it may again)."""

    sealed: bool = True


class Acquire(QueueCommand, frozen=True, kw_only=True, tag="acquire"):
    session: str
    count: int
    stages: tuple[Stage, ...] = ("partial", "fresh")


class ReportItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one leased task. `parts` are appended to its data; `tokens` counts the response tokens in them;
    `version` is the oldest numbered policy that made one of them."""

    task: str
    attempt: int
    outcome: Outcome
    parts: tuple[Slice, ...] = ()
    tokens: int = 0
    version: int = UNVERSIONED
    reason: str = ""
    retryable: bool = True
    after: int = 0
    """How many parts the task had when the caller last knew: new ones follow those and no others. 0: not said."""


class Report(QueueCommand, frozen=True, kw_only=True, tag="report"):
    """Save progress (the lease goes on), yield, complete, drop or fail leased tasks, all in one commit."""

    session: str
    items: tuple[ReportItem, ...]
    objects: tuple[ObjectRef, ...] = ()


class TakeBatch(QueueCommand, frozen=True, kw_only=True, tag="take_batch"):
    session: str
    count: int
    consumer: str = "trainer"
    fewer: bool = False
    """Take what is ready even if it is less than `count` (but not nothing)."""


class FinishBatch(QueueCommand, frozen=True, kw_only=True, tag="finish_batch"):
    """The trainer is done with a batch: its groups have ended as trained, those in `dropped` as dropped."""

    session: str
    batch: str
    attempt: int
    dropped: tuple[tuple[str, str], ...] = ()


class ReturnBatch(QueueCommand, frozen=True, kw_only=True, tag="return_batch"):
    """Give a batch back: its groups are ready again."""

    session: str
    batch: str
    attempt: int


class RetryFailed(QueueCommand, frozen=True, kw_only=True, tag="retry_failed"):
    """Dead letters go back to work with their counts cleared."""

    tasks: tuple[str, ...]


class DropTasks(QueueCommand, frozen=True, kw_only=True, tag="drop_tasks"):
    """End tasks that nobody holds: pending, ready or dead letters."""

    tasks: tuple[str, ...]
    reason: str


class PublishVersion(Command, frozen=True, kw_only=True, tag="publish_version"):
    version: str
    branch: str = ""
    """The branch that the policy was trained on, if the version is only to be published there."""


class PauseAdmission(Command, frozen=True, kw_only=True, tag="pause"):
    reason: str = ""
    session: str = ""
    branch: str = ""


class AcknowledgePause(Command, frozen=True, kw_only=True, tag="paused"):
    session: str


class Resume(Command, frozen=True, kw_only=True, tag="resume"):
    version: str = ""
    """A new policy version to publish in the same commit, if not empty."""
    branch: str = ""


class TakeCheckpoint(Command, frozen=True, kw_only=True, tag="checkpoint"):
    name: str
    branch: str = ""
    metadata: str = ""
    bindings: tuple[tuple[str, str], ...] = ()
    time_ms: int = 0


class DropCheckpoint(Command, frozen=True, kw_only=True, tag="drop_checkpoint"):
    name: str


class Rollback(Command, frozen=True, kw_only=True, tag="rollback"):
    """Go on from a checkpoint, or from where a branch was left, on a new branch."""

    target: str
    branch: str = ""
    bindings: tuple[tuple[str, str], ...] = ()


class DropBranch(Command, frozen=True, kw_only=True, tag="drop_branch"):
    name: str


class PinObjects(Command, frozen=True, kw_only=True, tag="pin"):
    """Keep objects that the state reaches for as long as the session lives. Pinning again under the same name
    replaces the pin."""

    session: str
    name: str
    objects: tuple[str, ...]


class Unpin(Command, frozen=True, kw_only=True, tag="unpin"):
    session: str
    name: str


class KeepArchive(QueueCommand, frozen=True, kw_only=True, tag="keep_archive"):
    """Keep these groups as they are now, whatever becomes of them."""

    name: str
    tasks: tuple[str, ...]
    metadata: str = ""
    time_ms: int = 0


class DropArchive(Command, frozen=True, kw_only=True, tag="drop_archive"):
    name: str


class OpenEpoch(Command, frozen=True, kw_only=True, tag="open_epoch"):
    """New objects are born in `epoch` from here on."""

    epoch: int


class CloseEpoch(Command, frozen=True, kw_only=True, tag="close_epoch"):
    """No new reference to an object of `epoch` or older is accepted from here on, unless the state reaches the object
    already."""

    epoch: int


class Trim(Command, frozen=True, kw_only=True, tag="trim"):
    """Entries below `floor` may be gone; `floors/<number>` says so already."""

    number: int
    floor: int


class MoveObjects(Command, frozen=True, kw_only=True, tag="move_objects"):
    """Objects that rode inside log entries have files now, or small files have become one. An object that is in the
    log or in an older epoch moves; any other stays where it is, so that of two moves one counts."""

    objects: tuple[ObjectRef, ...]


AnyCommand = (
    Configure
    | Join
    | Leave
    | Expire
    | Submit
    | Seal
    | Acquire
    | Report
    | TakeBatch
    | FinishBatch
    | ReturnBatch
    | RetryFailed
    | DropTasks
    | PublishVersion
    | PauseAdmission
    | AcknowledgePause
    | Resume
    | TakeCheckpoint
    | DropCheckpoint
    | Rollback
    | DropBranch
    | PinObjects
    | Unpin
    | KeepArchive
    | DropArchive
    | OpenEpoch
    | CloseEpoch
    | Trim
    | MoveObjects
)
