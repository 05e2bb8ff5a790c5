"""One pool with something in every place: fresh, leased, partial, ready, in a batch, a dead letter, a checkpoint, a
branch that was left, an archive, objects inside log entries and in files.

What each group must contain is a function of its task and the position alone, so whoever ends up with a group can
check every token of it, whoever generated which part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from strawq.core import commands as c
from strawq.core.image import dump_state
from strawq.core.invariants import findings
from strawq.garbage import collect_garbage
from strawq.handles import Batch
from strawq.model import QueueConfig, VersionSpan
from strawq.pool import Pool
from strawq.queue import Queue
from strawq.samples import Group, Prompt, Sample, extend
from strawq.storage.exclusive import Primitive
from strawq.testing.worlds import World
from strawq.verification import verify
from strawq.work import Change, Work

PROMPT = (7, 8, 9)
GROUP_TOKENS = 6
"""Response tokens of a complete group."""
CONSUMERS = ("eval", "trainer")
ROUTED = "r"
"""Groups whose id begins so carry R3 routes, and with them a tensor pack."""


def prompts(names: Sequence[str], payload_bytes: int = 0) -> list[Prompt]:
    return [Prompt(group_id=name, tokens=np.array(PROMPT, np.int32), payload=name.encode() * payload_bytes or None)
            for name in names]  # fmt: skip


def token(group: Group, at: int) -> int:
    """The only token that may stand at this place of this group."""
    return sum(ord(letter) for letter in group.prompt.group_id) * 100 + at


def _routes(start: int, stop: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return (np.arange(start * 4, stop * 4, dtype=np.int32) % 250).reshape(stop - start, 2, 2)


def grown(group: Group, count: int, version: str = "1") -> Group:
    """The group with its one sample `count` tokens long, in all its parts; what is there stays as it is."""
    old = group.samples[0] if group.samples else Sample(0)
    have = len(old.tokens)
    more = count - have
    routed = group.prompt.group_id.startswith(ROUTED)
    first, last = (0 if have == 0 else len(PROMPT) + have - 1), len(PROMPT) + count - 1
    new = Sample(
        0,
        tokens=np.array([token(group, at) for at in range(have, count)], np.int32),
        logprobs=np.full(more, -1.0, np.float32),
        versions=(VersionSpan(0, more, version),),
        status="completed" if count >= GROUP_TOKENS else "aborted",
        r3=_routes(first, last) if routed else None,
    )
    return Group(group.task_id, group.prompt, (extend(old, new) if have else new,))


def require_sound(group: Group, at_least: int = 0) -> None:
    """Every value of the group is the one that belongs there."""
    count = len(group.samples[0].tokens) if group.samples else 0
    assert count >= at_least, f"{group.task_id}: {at_least} tokens were saved, {count} are left"
    if not count:
        return
    sample = group.samples[0]
    assert list(sample.tokens) == [token(group, at) for at in range(count)], group.task_id
    assert sample.logprobs is not None and len(sample.logprobs) == count
    assert sample.versions[-1].end == count
    if group.prompt.group_id.startswith(ROUTED):
        assert sample.r3 is not None
        np.testing.assert_array_equal(np.asarray(sample.r3), _routes(0, len(PROMPT) + count - 1))


def completed(queue: Queue, work: Work) -> None:
    queue.complete(work, grown(work.group, GROUP_TOKENS))


class Scene(msgspec.Struct):
    """`world` with a pool as the module says, and who holds what. `saved` are tokens acknowledged, by task."""

    world: World
    worker: Pool
    trainer: Pool
    works: dict[str, Work] = {}
    batch: Batch | None = None
    saved: dict[str, int] = {}
    dead: str = ""

    @property
    def queue(self) -> Queue:
        return self.worker.queue()


def build(seed: int = 0, primitive: Primitive = "link") -> Scene:
    """A `Scene`. Tasks of the worker by name in `works`: `leased` (nothing saved), `inline` (2 tokens saved inside the
    log), `routed` (2 tokens with a tensor pack)."""
    world = World(seed, config=QueueConfig(max_attempts=2), primitive=primitive)
    worker, trainer = world.process(role="worker"), world.process(role="trainer")
    queue = worker.queue()
    worker.publish_version("1")
    queue.submit(prompts(["left1", "left2"]), producer="data", cursor="2")
    worker.checkpoint("first", {"step": 1}, {"model": "m1"})
    completed(queue, queue.open(queue.acquire(1).leases[0]))
    worker.rollback("first", branch="second")
    queue = worker.queue()
    queue.submit(prompts([f"a{i}" for i in range(5)] + ["r1", "r2"]), producer="data", cursor="9")
    works = [queue.open(lease) for lease in queue.acquire(9).leases]
    by_name = {work.group.prompt.group_id: work for work in works}
    for name in ("left1", "left2", "a0"):
        completed(queue, by_name[name])
    queue.save(by_name["a1"], grown(by_name["a1"].group, 2))
    queue.save(by_name["r1"], grown(by_name["r1"].group, 2))
    queue.yield_(by_name["r2"], grown(by_name["r2"].group, 3))
    queue.fail(by_name["a4"], "it fails", retryable=False)
    queue.submit(prompts([f"big{i}" for i in range(3)], payload_bytes=8000), producer="data", cursor="12")
    batch = trainer.queue().take_batch(2).batch
    worker.log.commit(
        c.KeepArchive(request="archive", queue="rollout", name="kept", tasks=(by_name["left1"].task,), time_ms=1)
    )
    scene = Scene(world, worker, trainer, {}, batch, {}, by_name["a4"].task)
    scene.works = {"leased": by_name["a2"], "other": by_name["a3"], "inline": by_name["a1"], "routed": by_name["r1"]}
    scene.saved = {by_name["a1"].task: 2, by_name["r1"].task: 2, by_name["r2"].task: 3}
    return scene


def take_over(pool: Pool) -> None:
    """What happens when every other process has died: their sessions end."""
    sessions = pool.log.refresh(lambda machine: list(machine.state.sessions))
    for session in sessions:
        if session != pool.keeper.current:
            pool.expire_session(session, "its process is dead")


def finish_work(pool: Pool, saved: Mapping[str, int] | None = None, fates: Mapping[str, str] | None = None) -> None:
    """Do everything that is left, checking every group on the way: each saved prefix is at least as long as `saved`
    says. `fates` are tasks to drop, with the reason."""
    saved, fates = saved or {}, fates or {}
    queue = pool.queue()
    pool.resume()
    queue.retry_failed([task.id for task in queue.dead_letters()])
    while leases := queue.acquire(100).leases:
        works = [queue.open(lease) for lease in leases]
        for work in works:
            require_sound(work.group, saved.get(work.task, 0))
        queue.report(
            [
                Change(work, "drop", None, fates[work.task])
                if work.task in fates
                else Change(work, "complete", grown(work.group, GROUP_TOKENS))
                for work in works
            ]
        )
    for consumer in CONSUMERS:
        while (batch := queue.take_batch(4, consumer=consumer, fewer=True).batch) is not None:
            for group in queue.read_batch(batch):
                require_sound(group, GROUP_TOKENS)
            queue.finish_batch(batch)


def require_healthy(pool: Pool, *, staging: bool = True) -> None:
    """No invariant is broken, every byte is what its name says, and garbage collection leaves nothing behind."""
    state = pool.log.refresh(lambda machine: machine.state)
    assert findings(state) == []
    _, collected = collect_garbage(pool, wait_seconds=0)
    assert collected.unknown == ()
    verified = verify(pool, full=True)
    assert verified.findings == ()
    if staging:
        assert pool.files.names("tmp") == []


def summary(pool: Pool) -> dict[str, object]:
    """What must be the same whatever happened on the way."""
    look = pool.inspect()
    queue = look.queues["rollout"]
    return {
        "tasks": queue.tasks, "submitted": queue.submitted, "sealed": queue.sealed, "reasons": queue.drop_reasons,
        "producers": queue.producers, "batches": queue.batches, "branch": look.branch,
        "version": look.policy_version, "paused": look.paused is not None,
        "checkpoints": sorted((point.name, point.branch, point.policy_version) for point in look.checkpoints),
        "branches": sorted(branch.name for branch in look.branches),
        "archives": pool.log.peek(lambda machine: sorted(machine.state.archives)),
        "queues": sorted(look.queues),
    }  # fmt: skip


def image(pool: Pool) -> bytes:
    """The whole state, bit for bit."""
    dumped: bytes = pool.log.refresh(lambda machine: dump_state(machine.state))
    return dumped
