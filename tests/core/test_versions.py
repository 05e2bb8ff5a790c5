"""The version of a task is that of the oldest token it has now, not of one it ever had. The version of a branch goes
up, whatever words lie between its numbers."""

from __future__ import annotations

import msgspec
import pytest

from strawq.core.image import dump_state, load_state
from strawq.core.machine import Machine
from strawq.core.state import highest_number
from strawq.errors import BadInput
from strawq.model import UNVERSIONED, QueueConfig, VersionSpan
from strawq.pool import Pool
from strawq.queue import Queue
from strawq.samples import Group, Prompt, Sample
from strawq.testing.worlds import World
from strawq.work import Change


def _sample(*versions: str) -> Sample:
    spans = tuple(VersionSpan(at, at + 1, version) for at, version in enumerate(versions))
    tokens = list(range(len(versions)))
    return Sample(0, tokens=tokens, logprobs=[-1.0] * len(versions), versions=spans, status="aborted")  # type: ignore[arg-type]


def test_a_process_that_dies_with_a_complete_group_is_not_held_against_the_group() -> None:
    """It was no work on it that killed the process: a trainer that dies again and again loses no group."""
    world = World()
    pool = world.process()
    pool.configure("rollout", QueueConfig(max_expirations=1))
    queue = pool.queue()
    queue.submit([Prompt(text="p")])
    work = queue.open(queue.acquire(1).leases[0])
    queue.complete(work, Group(work.task, work.group.prompt, (_sample("3"),)))
    for _ in range(3):
        mortal = world.process()
        (lease,) = mortal.queue().acquire(1, stages=("ready",))
        pool.expire_session(lease.session)
    assert queue.counts().ready == 1 and queue.counts().failed == 0


def test_a_group_that_was_generated_anew_is_as_young_as_its_tokens() -> None:
    queue = World().process().queue()
    queue.submit([Prompt(text="p")])
    work = queue.open(queue.acquire(1).leases[0])
    grown = [("3",), ("3", "5")]
    for versions in grown:
        queue.save(work, Group(work.task, work.group.prompt, (_sample(*versions),)))
        assert _version(queue, work.task) == 3
    anew = Group(work.task, work.group.prompt, (_sample("6"),))
    queue.report([Change(work, "save", anew, rewrite=True)])
    assert _version(queue, work.task) == 6
    queue.yield_(work)
    assert _version(queue, work.task) == 6, "a report that adds nothing changes nothing"


def _version(queue: Queue, task: str) -> int:
    def look(machine: Machine) -> int:
        rows = [row for row in machine.state.branch.queues["rollout"].tasks.values() if row.id == task]
        return rows[0].version

    version: int = queue.pool.log.refresh(look)
    return version


def _highest(pool: Pool) -> int:
    found: int = pool.log.refresh(lambda machine: highest_number(machine.state.branch.meta))
    return found


def test_a_version_goes_back_only_through_a_rollback() -> None:
    world = World()
    pool = world.process()
    for version in ("3", "default", "7"):
        pool.publish_version(version)
    pool.checkpoint("seven")
    for version in ("9", "x", "y"):
        pool.publish_version(version)
    pool.snapshot()
    for other in (pool, world.process()):
        assert (other.policy_version(), _highest(other)) == ("y", 9)
        for version in ("0", "8", "9", "009"):
            with pytest.raises(BadInput, match=r"is not above 9, the highest published on this branch \(now: y\)"):
                other.publish_version(version)
            with pytest.raises(BadInput, match="is not above 9"):
                other.resume(version)
    pool.rollback("seven")
    assert (pool.policy_version(), _highest(pool)) == ("7", 7)
    pool.publish_version("8")
    pool.rollback("main")
    assert (pool.policy_version(), _highest(pool)) == ("y", 9)
    pool.publish_version("10")
    pool.publish_version("10")


def test_a_pause_ends_under_the_number_that_is_published() -> None:
    pool = World().process()
    pool.publish_version("9")
    pool.pause()
    pool.resume("9")
    assert pool.inspect().paused is None and pool.policy_version() == "9"


@pytest.mark.parametrize(("version", "highest"), [("9", 9), ("default", UNVERSIONED)])
def test_a_state_from_before_the_mark_has_its_current_number_for_one(version: str, highest: int) -> None:
    """Numbers are written as they always were, and a word alone says nothing of what came before it."""
    pool = World().process()
    for each in ("4", version):
        pool.publish_version(each)
    image = msgspec.msgpack.decode(pool.log.refresh(lambda machine: dump_state(machine.state)))
    assert ("highest_number" in image["branch"]["meta"]) == (highest == UNVERSIONED)
    image["branch"]["meta"].pop("highest_number", None)
    old = load_state(msgspec.msgpack.encode(image), 3)
    assert (old.branch.meta.policy_version, highest_number(old.branch.meta)) == (version, highest)
