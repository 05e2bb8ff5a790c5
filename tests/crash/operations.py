"""Every public operation that changes files, each with what a survivor does when its process died in the middle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from strawq.core import commands as c
from strawq.core.invariants import findings
from strawq.errors import BadInput
from strawq.garbage import collect_garbage
from strawq.merging import merge_objects
from strawq.model import QueueConfig
from strawq.pool import Pool
from strawq.storage import layout
from strawq.storage.faulty import FaultyFiles
from strawq.testing.scenes import (
    GROUP_TOKENS,
    Scene,
    build,
    completed,
    finish_work,
    grown,
    prompts,
    require_healthy,
    summary,
    take_over,
)
from strawq.trimming import trim_log
from strawq.verification import verify
from strawq.work import Change, Work

Works = dict[str, Work]


def nothing(*_: Any) -> None:
    return None


class Operation(msgspec.Struct, frozen=True):
    """`prepare` runs in the process that will die and its answer goes to `act`. `again` is what a survivor calls to
    have the operation happened, whether or not it had; `fates` are groups that are dropped by their names."""

    name: str
    act: Callable[[Pool, Any], object]
    prepare: Callable[[Pool], Any] = nothing
    again: Callable[[Pool], object] = nothing
    fates: Mapping[str, str] = {}


def looked(pool: Pool) -> None:
    pool.inspect()


def works(pool: Pool) -> Works:
    """Everything that the scene's dead worker left, leased by this process, by group id."""
    take_over(pool)
    queue = pool.queue()
    opened = [queue.open(lease) for lease in queue.acquire(100).leases]
    return {work.group.prompt.group_id: work for work in opened}


def batch(pool: Pool) -> Any:
    take_over(pool)
    return pool.queue().take_batch(2).batch


def report(name: str, outcome: Any, tokens: int = 0, **more: Any) -> Callable[[Pool, Works], object]:
    def act(pool: Pool, held: Works) -> object:
        work = held[name]
        group = grown(work.group, tokens) if tokens else None
        return pool.queue().report([Change(work, outcome, group, **more)])

    return act


def report_all(pool: Pool, held: Works) -> object:
    changes = [Change(held["a2"], "drop", None, "dull"), Change(held["a3"], "fail", None, "slipped")]
    changes += [Change(held[name], "complete", grown(held[name].group, GROUP_TOKENS)) for name in ("r1", "big0")]
    changes += [Change(held[name], "save", grown(held[name].group, 5)) for name in ("a1", "r2", "big1")]
    return pool.queue().report(changes)


def has(kind: str, name: str) -> Callable[[Pool], bool]:
    return lambda pool: any(row.name == name for row in getattr(pool.inspect(), kind))


def unless(known: Callable[[Pool], bool], act: Callable[[Pool], object]) -> Callable[[Pool], object]:
    return lambda pool: None if known(pool) else act(pool)


def roll_back(target: str) -> Callable[..., object]:
    return lambda pool, *_: pool.rollback(target, branch="third")


def archive(pool: Pool, *_: Any) -> object:
    tasks = tuple(task.id for task in pool.queue().dead_letters())
    return pool.log.commit(c.KeepArchive(request="archive-2", queue="rollout", name="letters", tasks=tasks, time_ms=1))


def drop_archive(pool: Pool, *_: Any) -> object:
    return pool.log.commit(c.DropArchive(request="drop-archive", name="kept"))


def paused(pool: Pool) -> None:
    pool.pause("weights")
    pool.keeper.require()


def pinned(pool: Pool) -> Any:
    held = batch(pool)
    pool.pin("reader", held.groups)
    return held


def garbage(pool: Pool) -> None:
    """Objects that nothing reaches, in two epochs; a staging file and a heartbeat of processes that are gone."""
    take_over(pool)
    queue = pool.queue()
    collect_garbage(pool, wait_seconds=0)
    held = works(pool)
    for name in ("r1", "r2", "big0", "big1", "big2"):
        queue.save(held[name], grown(held[name].group, 4))
        queue.drop(held[name], "dull")
    files = pool.files
    assert isinstance(files, FaultyFiles)
    files.inner.stage(f"{layout.STAGING}/{'e' * 32}-1", [b"left"])
    files.inner.stage(layout.session_file("gone-1"), [b"{}"])
    files.inner.sync_directory(layout.STAGING)
    files.inner.sync_directory(layout.SESSIONS)


def entries(pool: Pool) -> None:
    """Two snapshots, so that what is before them can be trimmed."""
    pool.snapshot()
    pool.publish_version(int(pool.policy_version()) + 1)
    pool.snapshot()


def trim(pool: Pool, *_: Any) -> object:
    return trim_log(pool, keep_entries=0, snapshots_kept=2)


def scattered(pool: Pool) -> None:
    """Small files in closed epochs, one for each trim, and in the last one several that were merged already."""
    for number in range(3):
        pool.queue().submit(prompts([f"s{number}"]))
        entries(pool)
        trim(pool)
        collect_garbage(pool, wait_seconds=0)


def merged_and_collected(pool: Pool, *_: Any) -> None:
    merge_objects(pool)
    collect_garbage(pool, wait_seconds=0)


def torn_snapshot(pool: Pool) -> None:
    """The newest snapshot of a trimmed log is damaged; no entry has come since, or its own name would not be needed."""
    for _ in range(2):
        entries(pool)
    trim(pool)
    pool.publish_version(int(pool.policy_version()) + 1)
    path = layout.snapshot(pool.snapshot())
    files = pool.files
    assert isinstance(files, FaultyFiles)
    data = files.inner.read(path)
    files.inner.remove(path)
    files.inner.stage(path, [data[:-1]])
    files.inner.sync_directory(layout.SNAPSHOTS)


def torn(pool: Pool) -> None:
    """The newest entry is half there, as after a power cut on a disk that lies about fsync."""
    files = pool.files
    assert isinstance(files, FaultyFiles)
    directory = layout.segment_directory(0)
    path = f"{directory}/{files.inner.names(directory)[-1]}"
    data = files.inner.read(path)
    files.inner.remove(path)
    files.inner.stage(path, [data[: len(data) // 2]])
    files.inner.sync_directory(directory)


def rounds(pool: Pool, *_: Any) -> None:
    for _ in range(3):
        pool.clock.sleep(1)
        pool.keeper.round()


def watched(pool: Pool) -> None:
    """One round before the sessions of the scene count as stopped."""
    pool.keeper.require()
    for _ in range(10):
        pool.clock.sleep(1)
        pool.keeper.round()


def operations(scene: Scene) -> list[Operation]:
    held = tuple(scene.batch.tasks) if scene.batch is not None else ()
    dull = scene.works["leased"].task

    def submit(pool: Pool, *_: Any) -> object:
        return pool.queue().submit(prompts(["n1", "n2"]), producer="data", cursor="14", expect="12", request_id="more")

    def submit_large(pool: Pool, *_: Any) -> object:
        many = prompts([f"n{i}" for i in range(4)], payload_bytes=30_000)
        return pool.queue().submit(many, producer="other", cursor="4", request_id="large")

    def finish(pool: Pool, taken: Any) -> object:
        return pool.queue().finish_batch(taken, dropped=[(held[0], "stale")])

    def finish_again(pool: Pool) -> None:
        take_over(pool)
        taken = pool.queue().take_batch(2, fewer=True).batch
        if taken is not None:
            finish(pool, taken) if taken.tasks == held else pool.queue().return_batch(taken)

    def drop_letters(pool: Pool, *_: Any) -> object:
        return pool.queue().drop_tasks([scene.dead], "hopeless")

    def resume(pool: Pool, *_: Any) -> object:
        return pool.resume("2")

    def expire(pool: Pool, *_: Any) -> None:
        take_over(pool)

    def checkpoint(pool: Pool, *_: Any) -> object:
        return pool.checkpoint("step", {"loss": 0.5}, {"model": "m2"})

    def late_branch(pool: Pool) -> bool:
        return pool.inspect().branch == "third"

    def ignoring_absent(act: Callable[[Pool], object]) -> Callable[[Pool], object]:
        def again(pool: Pool) -> None:
            with contextlib.suppress(BadInput):
                act(pool)

        return again

    op = Operation
    return [
        op("open", lambda pool, _: pool.queue()),
        op("join", lambda pool, _: pool.keeper.require(), looked),
        op("leave", lambda pool, _: pool.close(), works),
        op("heartbeat", rounds, watched),
        op("expire", expire, looked, lambda pool: expire(pool)),
        op("configure", lambda pool, _: pool.configure("rollout", QueueConfig(max_attempts=9)), looked,
           lambda pool: pool.configure("rollout", QueueConfig(max_attempts=9))),
        op("new queue", lambda pool, _: pool.configure("eval"), looked, lambda pool: pool.configure("eval")),
        op("submit", submit, looked, submit),
        op("submit large", submit_large, looked, submit_large),
        op("seal", lambda pool, _: pool.queue().seal(), looked, lambda pool: pool.queue().seal()),
        op("acquire", lambda pool, _: pool.queue().acquire(3), take_over),
        op("acquire joins", lambda pool, _: pool.queue().acquire(3), looked),
        op("open work", lambda pool, lease: pool.queue().open(lease),
           lambda pool: (take_over(pool), pool.queue().acquire(1).leases[0])[1]),
        op("save", report("a1", "save", 4), works),
        op("save tensors", report("r2", "save", 5), works),
        op("yield", report("a1", "yield", 4), works),
        op("yield tensors", report("r1", "yield", 4), works),
        op("yield nothing", report("a2", "yield"), works),
        op("complete", lambda pool, held: completed(pool.queue(), held["a2"]), works),
        op("complete tensors", lambda pool, held: completed(pool.queue(), held["r1"]), works),
        op("drop", report("a2", "drop", reason="dull"), works, fates={dull: "dull"}),
        op("fail", report("a2", "fail", reason="slipped"), works),
        op("fail for good", report("a2", "fail", reason="slipped", retryable=False), works),
        op("report many", report_all, works, fates={dull: "dull"}),
        op("take batch", lambda pool, _: pool.queue().take_batch(1, consumer="eval"), take_over),
        op("take batch again", lambda pool, _: pool.queue().take_batch(2), take_over),
        op("read batch", lambda pool, taken: list(pool.queue().read_batch(taken)), batch),
        op("finish batch", finish, batch, finish_again),
        op("return batch", lambda pool, taken: pool.queue().return_batch(taken), batch),
        op("retry dead letters", lambda pool, _: pool.queue().retry_failed([scene.dead]), looked),
        op("drop dead letters", drop_letters, looked, drop_letters),
        op("publish version", lambda pool, _: pool.publish_version(4), looked, lambda pool: pool.publish_version(4)),
        op("pause", lambda pool, _: pool.pause("weights"), looked),
        op("acknowledge pause", lambda pool, _: pool.acknowledge_pause(), paused),
        op("resume", resume, paused, resume),
        op("checkpoint", checkpoint, looked, unless(has("checkpoints", "step"), checkpoint)),
        op("drop checkpoint", lambda pool, _: pool.drop_checkpoint("first"), looked,
           ignoring_absent(lambda pool: pool.drop_checkpoint("first"))),
        op("roll back to a checkpoint", roll_back("first"), works, unless(late_branch, roll_back("first"))),
        op("roll back to a branch", roll_back("main"), batch, unless(late_branch, roll_back("main"))),
        op("drop branch", lambda pool, _: pool.drop_branch("main"), looked,
           ignoring_absent(lambda pool: pool.drop_branch("main"))),
        op("pin", lambda pool, taken: pool.pin("reader", taken.groups), batch),
        op("unpin", lambda pool, _: pool.unpin("reader"), pinned),
        op("archive", archive, looked, archive),
        op("drop archive", drop_archive, looked, drop_archive),
        op("snapshot", lambda pool, _: pool.snapshot(), looked),
        op("trim", trim, entries, trim),
        op("collect garbage", lambda pool, _: collect_garbage(pool, wait_seconds=0), garbage),
        op("merge", lambda pool, _: merge_objects(pool), scattered, merge_objects),
        op("merge and collect", merged_and_collected, scattered),
        op("repair", lambda pool, _: verify(pool, repair=True), torn, lambda pool: verify(pool, repair=True)),
        op("repair a snapshot", lambda pool, _: verify(pool, repair=True), torn_snapshot,
           lambda pool: verify(pool, repair=True)),
    ]  # fmt: skip


SCENE = build()
OPERATIONS = operations(SCENE)
SAVED = SCENE.saved
RENAMING = build(primitive="rename")
"""The same scene where the exclusive step is a rename, which keeps no staged name."""


def settle(pool: Pool, operation: Operation, *, again: bool = True) -> dict[str, object]:
    """What survivors do: have the operation happened, take over, finish the work, collect the garbage."""
    if again:
        operation.again(pool)
    take_over(pool)
    assert findings(pool.log.refresh(lambda machine: machine.state)) == []
    finish_work(pool, SAVED, operation.fates)
    require_healthy(pool)
    return summary(pool)
