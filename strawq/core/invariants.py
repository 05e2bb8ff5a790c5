"""What is true of every state, whatever happened: checked by `strawq verify`, by the simulator and by the tests.

Each finding is a sentence; a sound state has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from strawq.core.image import dump_state, load_state, thaw_branch
from strawq.core.state import Branch, Queue, State, place
from strawq.core.tables import Journal
from strawq.model import StoredObject


def findings(state: State) -> list[str]:
    """Everything that is wrong with `state`, as sentences."""
    found = [*_references(state), *_meta(state)]
    for name in state.branch.queues:
        found += [f"queue {name}: {sentence}" for sentence in _queue(state, state.branch.queues[name])]
    dumped = dump_state(state)
    if dump_state(load_state(dumped, state.seq)) != dumped:
        found.append("the state does not come back from its own snapshot")
    return found


def _meta(state: State) -> Iterator[str]:
    meta = state.meta
    if state.active.row not in state.branches:
        yield f"the active branch {state.active.row} is not among the branches"
    if meta.closed_epoch >= meta.epoch:
        yield f"epoch {meta.closed_epoch} is closed while {meta.epoch} is open"
    branch = state.branch.meta
    weight = sum(answer.weight for answer in state.branch.answered.values())
    if weight != branch.answered_weight:
        yield f"remembered answers weigh {weight}, not {branch.answered_weight}"
    if len(state.branch.answered) != branch.answered_next - branch.answered_first:
        yield "the ring of remembered answers has holes"


def _references(state: State) -> Iterator[str]:
    """Every object is counted as often as it is referred to, and nothing refers to what is not there."""
    counts = Counter(_branch_references(state.branch))
    roots: list[tuple[str, bytes, tuple[str, ...]]] = [
        (f"checkpoint {point.name}", point.image, point.objects) for point in state.checkpoints.values()
    ]
    roots += [(f"branch {row.id}", row.image, row.objects) for row in state.branches.values() if row.image]
    for name, image, objects in roots:
        reached = set(_branch_references(thaw_branch(image, Journal())))
        if reached != set(objects):
            yield f"{name} lists {len(objects)} objects and reaches {len(reached)}"
        counts.update(objects)
    for pin in state.pins.values():
        counts.update(pin.objects)
        if pin.session not in state.sessions:
            yield f"pin {pin.name} is held by session {pin.session}, which is not live"
    for archive in state.archives.values():
        counts.update(archive.objects)
        if {part.object for task in archive.tasks for part in task.parts} != set(archive.objects):
            yield f"archive {archive.name} does not list what it refers to"
    stored: dict[str, StoredObject] = {row.ref.digest: row for row in state.objects.values()}
    for digest in counts.keys() - stored.keys():
        yield f"object {digest[:12]} is referred to and not stored"
    for digest, row in stored.items():
        if row.count != counts[digest]:
            yield f"object {digest[:12]} is counted {row.count} times and referred to {counts[digest]} times"


def _branch_references(branch: Branch) -> Iterator[str]:
    for name in branch.queues:
        queue = branch.queues[name]
        for submission in queue.submissions.values():
            yield submission.object
        for task in queue.tasks.values():
            for part in task.parts:
                yield part.object


def _queue(state: State, queue: Queue) -> Iterator[str]:
    row = queue.row
    places = Counter((task.stage, place(task)) for task in queue.tasks.values())
    if {key: count for key, count in queue.counts.items() if count} != dict(places):
        yield "the counts by stage do not match the tasks"
    live = queue.unstarted + len(queue.tasks)
    if live + row.trained + row.dropped != row.submitted:
        ended = f"{row.trained} trained and {row.dropped} dropped"
        yield f"{row.submitted} prompts were submitted; {live} live, {ended} are left"
    if row.dropped != sum(count for _, count in row.reasons):
        yield "the drop reasons do not add up"
    in_batches = Counter(key for batch in queue.batches.values() for key in batch.tasks)
    for batch in queue.batches.values():
        for key in batch.tasks:
            task = queue.tasks.get(key)
            if task is None or task.batch != batch.id:
                yield f"batch {batch.id} holds task {key}, which is not in it"
        if batch.session and batch.session not in state.sessions:
            yield f"batch {batch.id} is held by session {batch.session}, which is not live"
    for task in queue.tasks.values():
        if bool(task.batch) != bool(in_batches[task.id]) or in_batches[task.id] > 1:
            yield f"task {task.id} is in {in_batches[task.id]} batches"
        if task.session and (task.batch or task.failed):
            yield f"task {task.id} is leased and also {'in a batch' if task.batch else 'a dead letter'}"
        if task.session and task.session not in state.sessions:
            yield f"task {task.id} is leased by session {task.session}, which is not live"
        if task.stage != "fresh" and len(task.parts) < 2:
            yield f"task {task.id} is {task.stage} without data"
        if queue.receipt(task.id) is not None:
            yield f"task {task.id} is live and has ended"
    if len(queue.receipts) != row.receipts_next - row.receipts_first:
        yield "the ring of receipts has holes"
