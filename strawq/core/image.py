"""State as bytes: snapshots of the whole state, images of one branch. The same state gives the same bytes, whoever
writes them."""

from __future__ import annotations

import msgspec

from strawq.core.state import Answered, Branch, BranchMeta, Meta, Queue, QueueRow, State, pin_key
from strawq.core.tables import Journal
from strawq.errors import Damaged
from strawq.model import (
    Archive,
    Batch,
    BranchRow,
    Checkpoint,
    Pin,
    Producer,
    Receipt,
    Session,
    StoredObject,
    Submission,
    Task,
)


class QueueImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    row: QueueRow
    producers: list[Producer]
    submissions: list[Submission]
    tasks: list[Task]
    batches: list[Batch]
    receipts: list[Receipt]


class BranchImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    meta: BranchMeta
    queues: list[QueueImage]
    answered: list[Answered]


class StateImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    meta: Meta
    active: str
    sessions: list[Session]
    objects: list[StoredObject]
    checkpoints: list[Checkpoint]
    branches: list[BranchRow]
    branch: BranchImage
    pins: list[Pin]
    archives: list[Archive]


_encoder = msgspec.msgpack.Encoder()
_state_decoder = msgspec.msgpack.Decoder(StateImage)
_branch_decoder = msgspec.msgpack.Decoder(BranchImage)


def freeze_branch(branch: Branch) -> bytes:
    return _encoder.encode(_branch_image(branch))


def thaw_branch(image: bytes, journal: Journal) -> Branch:
    return _build_branch(_branch_decoder.decode(image), journal)


def dump_state(state: State) -> bytes:
    return _encoder.encode(
        StateImage(
            meta=state.meta,
            active=state.active.row,
            sessions=list(state.sessions.values()),
            objects=list(state.objects.values()),
            checkpoints=list(state.checkpoints.values()),
            branches=list(state.branches.values()),
            branch=_branch_image(state.branch),
            pins=list(state.pins.values()),
            archives=list(state.archives.values()),
        )
    )


def load_state(data: bytes | memoryview, seq: int) -> State:
    """The state that `dump_state` wrote at entry `seq`. `Damaged` if the bytes are not such a dump."""
    try:
        image = _state_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # Its bytes are those that were written: they have been checked against their digest.
        raise Damaged(
            f"snapshot {seq} holds what this version of strawq does not know ({error}); use a newer strawq"
        ) from error
    state = State()
    state.seq = seq
    state.branches.drop("main")
    state.cell.put(image.meta)
    state.active.put(image.active)
    for session in image.sessions:
        state.sessions.put(session.id, session)
    for row in image.objects:
        state.objects.put(row.ref.digest, row)
    for checkpoint in image.checkpoints:
        state.checkpoints.put(checkpoint.name, checkpoint)
    for branch in image.branches:
        state.branches.put(branch.id, branch)
    for pin in image.pins:
        state.pins.put(pin_key(pin.session, pin.name), pin)
    for archive in image.archives:
        state.archives.put(archive.name, archive)
    state.branch_cell.put(_build_branch(image.branch, state.journal))
    state.journal.clear()
    return state


def _branch_image(branch: Branch) -> BranchImage:
    queues = [
        QueueImage(
            name=name,
            row=queue.row,
            producers=list(queue.producers.values()),
            submissions=list(queue.submissions.values()),
            tasks=list(queue.tasks.values()),
            batches=list(queue.batches.values()),
            receipts=list(queue.receipts.values()),
        )
        for name, queue in ((name, branch.queues[name]) for name in branch.queues)
    ]
    return BranchImage(meta=branch.meta, queues=queues, answered=list(branch.answered.values()))


def _build_branch(image: BranchImage, journal: Journal) -> Branch:
    branch = Branch(journal, image.meta)
    for index, answer in enumerate(image.answered):
        branch.answered.put(image.meta.answered_first + index, answer)
    for part in image.queues:
        queue = Queue(journal, part.row)
        for producer in part.producers:
            queue.producers.put(producer.id, producer)
        for submission in part.submissions:
            queue.submissions.put(submission.number, submission)
        for task in part.tasks:
            queue.tasks.put(task.id, task)
        for batch in part.batches:
            queue.batches.put(batch.number, batch)
        for index, receipt in enumerate(part.receipts):
            queue.receipts.put(part.row.receipts_first + index, receipt)
        branch.queues.put(part.name, queue)
    return branch
