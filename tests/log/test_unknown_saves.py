"""A save that counted and whose answer never arrived: what the worker does next neither doubles rows nor breaks the
group."""

from __future__ import annotations

import errno

import pytest

from strawq.errors import OutcomeUnknown
from strawq.model import VersionSpan
from strawq.queue import Queue
from strawq.samples import Group, Prompt, Sample
from strawq.storage.faulty import FaultyFiles
from strawq.testing.worlds import World
from strawq.work import Work


def grown(work: Work, tokens: list[int]) -> Group:
    sample = Sample(0, tokens=tokens, logprobs=[-1.0] * len(tokens), versions=(VersionSpan(0, len(tokens), "1"),))
    return Group(work.task, work.group.prompt, (sample,))


@pytest.fixture
def unknown() -> tuple[World, Queue, Work]:
    return unknown_save()


def unknown_save() -> tuple[World, Queue, Work]:
    """A worker that saved [1, 2], and does not know it."""
    world = World()
    pool = world.process()
    queue = pool.queue()
    queue.submit([Prompt(text="p")])
    work = queue.open(queue.acquire(1).leases[0])
    files = pool.files
    assert isinstance(files, FaultyFiles)

    def hook(moment: str, kind: str, path: str) -> None:
        if moment == "before" and kind == "read" and path.startswith("floors/"):
            raise OSError(errno.EACCES, "failed")

    def arm(moment: str, kind: str, path: str) -> None:
        if moment == "after" and kind == "publish" and path.startswith("log/"):
            files.hook = hook

    files.hook = arm
    with pytest.raises(OutcomeUnknown):
        queue.save(work, grown(work, [1, 2]))
    files.hook = None
    return world, queue, work


def stored(world: World) -> list[int]:
    queue = world.process().queue()
    groups = queue.take_batch(1).batch
    if groups is not None:
        return [int(token) for token in next(queue.read_batch(groups)).samples[0].tokens]
    return [int(token) for token in queue.open(queue.acquire(1).leases[0]).group.samples[0].tokens]


def test_the_same_save_again_counts_once(unknown: tuple[World, Queue, Work]) -> None:
    world, queue, work = unknown
    assert queue.save(work, grown(work, [1, 2])).repeated == (work.task,)
    queue.complete(work, grown(work, [1, 2, 3]))
    assert stored(world) == [1, 2, 3]


def test_a_completion_with_the_same_rows_counts_and_adds_none(unknown: tuple[World, Queue, Work]) -> None:
    world, queue, work = unknown
    assert queue.complete(work, grown(work, [1, 2])).accepted == (work.task,)
    assert stored(world) == [1, 2]


@pytest.mark.parametrize("outcome", ["save", "yield_", "complete"])
def test_other_rows_do_not_follow_and_the_saved_ones_go_on(unknown: tuple[World, Queue, Work], outcome: str) -> None:
    world, queue, work = unknown
    receipt = getattr(queue, outcome)(work, grown(work, [1, 9, 9]))
    assert receipt.conflict == (work.task,)
    assert not receipt.counts(work.task)
    assert stored(world) == [1, 2], "the group is whole and anyone may go on with it"
