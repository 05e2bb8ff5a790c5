"""Operators' calls asked again with one request id: the first answer, and nothing happens a second time."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from strawq.archives import delete_archive, list_archives, save_archive
from strawq.core.image import dump_state
from strawq.errors import BadInput, OutcomeUnknown, RequestConflict
from strawq.pool import Pool
from strawq.storage.faulty import FaultyFiles
from strawq.testing.scenes import prompts
from strawq.testing.worlds import World

Call = Callable[[Pool, str], Any]


def _prepared() -> tuple[World, Pool]:
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(["a", "b"]))
    pool.checkpoint("old")
    pool.rollback("old", branch="second")
    return world, pool


CALLS: dict[str, tuple[Call, Call]] = {
    # The call, and another one under the same id.
    "checkpoint": (
        lambda pool, request: pool.checkpoint("new", {"step": 1}, {"m": "1"}, request_id=request),
        lambda pool, request: pool.checkpoint("new", {"step": 2}, {"m": "1"}, request_id=request),
    ),
    "drop checkpoint": (
        lambda pool, request: pool.drop_checkpoint("old", request_id=request),
        lambda pool, request: pool.drop_checkpoint("other", request_id=request),
    ),
    "rollback": (
        lambda pool, request: pool.rollback("old", request_id=request),
        lambda pool, request: pool.rollback("main", request_id=request),
    ),
    "drop branch": (
        lambda pool, request: pool.drop_branch("main", request_id=request),
        lambda pool, request: pool.drop_branch("other", request_id=request),
    ),
    "pause": (
        lambda pool, request: pool.pause("weights", request_id=request),
        lambda pool, request: pool.pause("other", request_id=request),
    ),
    "resume": (
        lambda pool, request: pool.resume("7", request_id=request),
        lambda pool, request: pool.resume("8", request_id=request),
    ),
    "publish version": (
        lambda pool, request: pool.publish_version("7", request_id=request),
        lambda pool, request: pool.publish_version("8", request_id=request),
    ),
    "seal": (
        lambda pool, request: pool.queue().seal(request_id=request),
        lambda pool, request: pool.queue().seal(False, request_id=request),
    ),
    "drop tasks": (
        lambda pool, request: pool.queue().drop_tasks(["1-0"], "why", request_id=request),
        lambda pool, request: pool.queue().drop_tasks(["1-1"], "why", request_id=request),
    ),
    "archive": (
        lambda pool, request: save_archive(pool, "kept", "rollout", ["1-0"], request_id=request),
        lambda pool, request: save_archive(pool, "kept", "rollout", ["1-1"], request_id=request),
    ),
}


def _leave_started(pool: Pool) -> None:
    """Tasks of their own, not rows that nobody has leased."""
    queue = pool.queue()
    for lease in queue.acquire(2):
        queue.yield_(queue.open(lease))


@pytest.mark.parametrize("name", CALLS)
def test_a_repeat_after_a_lost_reply_gives_the_first_answer_and_changes_nothing(name: str) -> None:
    call, other = CALLS[name]
    world, pool = _prepared()
    _leave_started(pool)
    twin = world.twin().process()
    told = call(twin, "mine")
    files = pool.files
    assert isinstance(files, FaultyFiles)

    def lose(moment: str, kind: str, path: str) -> None:
        if moment == "after" and kind == "publish" and path.startswith("log/"):
            files.hook = sick

    def sick(moment: str, kind: str, path: str) -> None:
        raise OSError(errno.EIO, "the mount is gone")

    files.hook = lose
    with pytest.raises(OutcomeUnknown):
        call(pool, "mine")
    files.hook = None
    survivor = world.process()  # The caller was restarted: nothing is remembered but the id.
    before = survivor.log.refresh(lambda machine: (machine.seq, dump_state(machine.state)))
    world.clock.sleep(5)
    assert call(survivor, "mine") == told
    assert call(survivor, "mine") == told
    assert survivor.log.refresh(lambda machine: (machine.seq, dump_state(machine.state))) == before
    with pytest.raises(RequestConflict):
        other(survivor, "mine")
    with pytest.raises(BadInput, match="empty"):
        call(survivor, "")


def test_a_repeat_is_answered_on_the_branch_that_another_rollback_made() -> None:
    """Checkpoints, branches and archives are there on every line of history, and so are the answers about them."""
    world, pool = _prepared()
    seq = pool.checkpoint("new", request_id="take")
    branch = pool.rollback("new", request_id="roll")
    archive = save_archive(pool, "kept", "rollout", _started(pool), request_id="keep")
    pool.rollback("old", branch="third")
    pool.drop_checkpoint("new", request_id="drop")
    pool.rollback(branch, branch="fourth")
    before = pool.log.refresh(lambda machine: machine.seq)
    again = world.process()
    assert again.checkpoint("new", request_id="take") == seq
    assert again.rollback("new", request_id="roll") == branch
    assert save_archive(again, "kept", "rollout", [task.id for task in archive.tasks], request_id="keep") == archive
    again.drop_checkpoint("new", request_id="drop")
    assert again.branch() == "fourth"
    assert again.log.refresh(lambda machine: machine.seq) == before


def _started(pool: Pool) -> list[str]:
    _leave_started(pool)
    tasks: list[str] = pool.log.refresh(lambda machine: list(machine.state.branch.queues["rollout"].tasks))
    return tasks


def test_the_position_of_a_checkpoint_is_that_of_its_own_taking() -> None:
    _, pool = _prepared()
    seq = pool.checkpoint("new", request_id="first")
    pool.publish_version(1)
    pool.drop_checkpoint("new")
    assert pool.checkpoint("new") > seq
    assert pool.checkpoint("new", request_id="first") == seq


def test_an_archive_that_was_deleted_since_is_not_kept_again_by_a_repeat() -> None:
    _, pool = _prepared()
    tasks = _started(pool)
    save_archive(pool, "kept", "rollout", tasks, request_id="keep")
    delete_archive(pool, "kept", request_id="delete")
    with pytest.raises(BadInput, match="deleted since"):
        save_archive(pool, "kept", "rollout", tasks, request_id="keep")
    delete_archive(pool, "kept", request_id="delete")
    assert list_archives(pool) == []
