"""The end of a simulation: no more misfortunes, all work is brought to its end, and nothing is left over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strawq.core.image import thaw_branch
from strawq.core.state import Branch
from strawq.core.tables import Journal
from strawq.garbage import collect_garbage
from strawq.handles import Held
from strawq.storage import layout
from strawq.testing.simulation import actors
from strawq.testing.simulation.book import Line
from strawq.testing.simulation.host import Process
from strawq.testing.simulation.settings import small
from strawq.testing.simulation.violation import require
from strawq.trimming import trim_log

if TYPE_CHECKING:
    from strawq.testing.simulation.world import World

_ROUNDS = 200


def finish_all(world: World) -> None:
    for slot in world.slots:
        process = slot.process
        if process is not None:
            process.files.plan = type(process.files.plan)()
            if slot.role in ("operator", "producer"):
                world.kill(slot)
    # Sleepers wake now, find out what has happened to their leases, and go on or stop.
    world.scheduler.run(world.scheduler.now + 2.5 * world.settings.lease_s)
    for slot in world.slots:
        world.kill(slot)
    world.scheduler.run(world.scheduler.now + 0.001)
    if world.truth.torn:
        world.process("mender", {}).pool.log.void_tip()
    world.truth.sound()
    read_everything(world, world.process("reader", {}))
    work_off(world)
    leave_nothing(world)


def read_everything(world: World, process: Process) -> None:
    """Every group of the active branch, of every checkpoint, of every branch that was left and of every archive is what
    was saved."""
    reader = actors.Actor(world, process)
    state = process.pool.log.refresh(lambda machine: machine.state)
    world.truth.follows(process.pool.log.machine.seq, process.pool.log.tip, process.name)
    world.truth.same(state, process.name)
    book = world.book
    for archive in state.archives.values():
        for task in archive.tasks:
            held = Held(task, {part.object: state.objects[part.object] for part in task.parts})
            reader.check(process.pool.payloads.load(held), task.id, book.archives[archive.name].notes[task.id])
    lines: list[tuple[Branch, Line]] = [(state.branch, book.line)]
    lines += [(thaw_branch(point.image, Journal()), book.kept[point.name]) for point in state.checkpoints.values()]
    lines += [
        (thaw_branch(row.image, Journal()), book.branches[row.id]) for row in state.branches.values() if row.image
    ]
    for branch, line in lines:
        for name in branch.queues:
            for task in branch.queues[name].tasks.values():
                held = Held(task, {part.object: state.objects[part.object] for part in task.parts})
                reader.check(process.pool.payloads.load(held), task.id, line.notes[task.id])
            for producer in branch.queues[name].producers.values():
                require(line.producers[producer.id] == producer.cursor, f"{producer.id} stands at {producer.cursor}")


def work_off(world: World) -> None:
    """One worker and one trainer without faults end everything that is left, in a bounded number of rounds."""
    process = world.process("finisher", {})
    process.pool.resume()
    worker, trainer = actors.Worker(world, process), actors.Trainer(world, process)
    for _ in range(_ROUNDS):
        process.pool.keeper.round()
        for work in worker.lease(8):
            changes = [worker.change(work, "complete")]
            worker.queue.report(changes, request_id=worker.promise(changes))
        trainer.step(4, True, 1.0)
        counts = worker.queue.counts()
        if counts.trained + counts.dropped + counts.failed == counts.total:
            break
        process.clock.sleep(process.pool.keeper.round_seconds)
    else:
        require(False, f"work is stuck: {worker.queue.counts()}")
    world.truth.sound()
    process.pool.close()


def leave_nothing(world: World) -> None:
    """After collection and trimming, what is on the mount is what the state reaches."""
    process = world.process("cleaner", {})
    pool = process.pool
    pool.keeper.require()
    for _ in range(50):
        pool.keeper.round()
        if len(pool.log.refresh(lambda machine: list(machine.state.sessions))) == 1:
            break
        process.clock.sleep(pool.keeper.round_seconds)
    pool.close()
    for _ in range(3):
        pool.snapshot()
        pool.publish_version("x")
        pool.publish_version("y")
        trim_log(pool, keep_entries=0, snapshots_kept=2)
    with small({"SWEEP_AGAIN_EPOCHS": 0}):
        collect_garbage(pool, wait_seconds=0)
        collect_garbage(pool, wait_seconds=0)
    memory, state = world.memory, world.truth.state
    reached = {layout.record_file(row.ref.epoch, row.ref.name) for row in state.objects.values() if row.ref.epoch}
    reached |= {layout.pack_file(row.ref.epoch, row.ref.pack) for row in state.objects.values() if row.ref.pack}
    files = {path for path in memory.everything() if path.startswith("objects/") and not path.endswith("/swept")}
    require(not reached - files, f"after collection {sorted(reached - files)[:4]} are missing")
    require(not files - reached, f"after collection {sorted(files - reached)[:4]} are left over")
    require(not memory.names(layout.STAGING), f"staging files are left: {memory.names(layout.STAGING)[:4]}")
    require(not memory.names(layout.SESSIONS), f"heartbeats are left: {memory.names(layout.SESSIONS)[:4]}")
    require(len(memory.names(layout.SNAPSHOTS)) <= 3, f"snapshots are left: {memory.names(layout.SNAPSHOTS)}")
    entries = [path for path in memory.everything() if path.startswith("log/")]
    require(len(entries) <= 24, f"{len(entries)} log entries are left after trimming")
