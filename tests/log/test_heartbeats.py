"""The heart beats while everything else of its process hangs."""

from __future__ import annotations

import errno
import logging
import threading

import pytest

from strawq.errors import StorageFailed
from strawq.limits import LEASE_SECONDS_MIN
from strawq.pool import Pool
from strawq.session import BEATS_PER_LEASE
from strawq.storage.clock import SystemClock
from strawq.storage.faulty import FaultyFiles
from strawq.testing.scenes import prompts
from strawq.testing.worlds import World, _keeper

PATIENCE_SECONDS = 20.0


class Hanging:
    """A process whose next commit hangs between its publish and the fsync of its name, until it is let go."""

    def __init__(self, world: World) -> None:
        self.files = FaultyFiles(world.memory)
        self.pool = Pool(
            self.files, lease_seconds=LEASE_SECONDS_MIN, clock=SystemClock(), background=True, keeper=_keeper
        )
        self.hangs, self.let_go = threading.Event(), threading.Event()
        self.beats = threading.Semaphore(0)

    def hang(self) -> None:
        def hook(moment: str, kind: str, path: str) -> None:
            if moment == "after" and kind == "replace" and path.startswith("sessions/") and self.hangs.is_set():
                self.beats.release()
            if moment == "after" and kind == "publish" and path.startswith("log/"):
                self.hangs.set()
                assert self.let_go.wait(PATIENCE_SECONDS)

        self.files.hook = hook

    def lives_for_leases(self, observer: Pool, count: int) -> None:
        """Others look at it after each beat of so many leases, and never find it dead."""
        for beat in range(count * BEATS_PER_LEASE):
            assert self.beats.acquire(timeout=PATIENCE_SECONDS / 4), f"the heart has stopped after {beat} beats"
            assert observer.keeper.watch() == []


def _observer(world: World) -> Pool:
    observer = Pool(
        FaultyFiles(world.memory), lease_seconds=LEASE_SECONDS_MIN, clock=SystemClock(), background=False,
        keeper=_keeper,
    )  # fmt: skip
    observer.keeper.require()
    return observer


def test_a_commit_that_hangs_for_longer_than_a_lease_does_not_stop_the_heart() -> None:
    world = World()
    holder, observer = Hanging(world), _observer(world)
    queue = holder.pool.queue()
    queue.submit(prompts(["a"]))
    work = queue.open(queue.acquire(1).leases[0])
    holder.hang()
    committer = threading.Thread(target=holder.pool.publish_version, args=(1,))
    committer.start()
    try:
        assert holder.hangs.wait(PATIENCE_SECONDS)
        holder.lives_for_leases(observer, 3)
    finally:
        holder.let_go.set()
        committer.join()
    holder.files.hook = None
    assert queue.yield_(work).accepted == (work.task,)
    assert holder.pool.keeper.lost == []
    holder.pool.close()


def test_a_join_that_hangs_for_longer_than_a_lease_does_not_stop_the_heart() -> None:
    """Others see the session as soon as its entry has a name, long before the process itself knows."""
    world = World()
    joining, observer = Hanging(world), _observer(world)
    joining.pool.queue()
    joining.hang()
    told: list[str] = []
    joiner = threading.Thread(target=lambda: told.append(joining.pool.keeper.require()))
    joiner.start()
    try:
        assert joining.hangs.wait(PATIENCE_SECONDS)
        (seen,) = set(observer.log.refresh(lambda machine: list(machine.state.sessions))) - {observer.keeper.current}
        joining.lives_for_leases(observer, 3)
    finally:
        joining.let_go.set()
        joiner.join()
    joining.files.hook = None
    assert told == [seen]
    assert seen in observer.log.refresh(lambda machine: list(machine.state.sessions))
    joining.pool.close()


def test_a_process_that_goes_on_after_a_close_has_a_heart_again() -> None:
    world = World()
    living, observer = Hanging(world), _observer(world)
    queue = living.pool.queue()
    queue.submit(prompts(["a"]))
    first = queue.acquire(1).leases[0]
    living.pool.close()
    living.let_go.set()  # Nothing hangs; only beats are counted.
    living.hang()
    work = queue.open(queue.acquire(1).leases[0])
    assert work.lease.session != first.session
    living.lives_for_leases(observer, 3)
    assert queue.yield_(work).accepted == (work.task,)
    living.pool.close()
    assert work.lease.session not in observer.log.refresh(lambda machine: list(machine.state.sessions))


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "half joined"])
@pytest.mark.parametrize("trouble", ["full", "hanging"])
def test_a_mount_that_takes_no_heartbeat_for_longer_than_a_lease_costs_nobody_the_session(
    trouble: str, joined: bool
) -> None:
    """Full, it refuses them; hanging, it has them wait. What was read all the while says nothing then."""
    world = World(lease_seconds=10.0)
    views = [world.files(), world.files()]
    holder, observer = (world.process(files=view) for view in views)
    queue = holder.queue()
    queue.submit(prompts(["a"]))
    work = queue.open(queue.acquire(1).leases[0])
    if joined:
        observer.keeper.require()

    def full(moment: str, kind: str, _path: str) -> None:
        if moment == "before" and kind in ("replace", "stage", "publish"):
            raise OSError(errno.ENOSPC, "No space left on device")

    for pool in (holder, observer):
        pool.keeper.round()
    for view in views:
        view.hook = full
    if not joined:
        with pytest.raises(StorageFailed):
            observer.keeper.require()
    for _ in range(30):
        world.clock.sleep(1.0)
        for pool in (holder, observer):
            if trouble == "full" and pool.keeper._beating:
                with pytest.raises(StorageFailed):
                    pool.keeper.beat()
            assert pool.keeper.watch() == []
    for view in views:
        view.hook = None
    observer.keeper.require()
    observer.keeper.beat()
    assert observer.keeper.watch() == []  # before the holder's next beat, which comes within its round
    world.clock.sleep(1.0)
    holder.keeper.beat()
    assert observer.keeper.watch() == []
    assert queue.yield_(work).accepted == (work.task,)
    # One that stays silent once the mount is well is still found out.
    for _ in range(12):
        world.clock.sleep(1.0)
        observer.keeper.beat()
        stopped = observer.keeper.watch()
        if stopped:
            break
    assert stopped == [work.lease.session]


def test_a_heartbeat_that_fails_again_and_again_is_said_at_each_doubling(caplog: pytest.LogCaptureFixture) -> None:
    keeper = World().process().keeper
    failures = 0

    class Rounds(threading.Event):
        """Ends after eight rounds, without waiting."""

        def wait(self, timeout: float | None = None) -> bool:
            return failures == 8

    def refused() -> None:
        nonlocal failures
        failures += 1
        raise StorageFailed("full")

    with caplog.at_level(logging.WARNING, "strawq.session"):
        keeper._keep("heartbeat", refused, Rounds())
    assert all(f"({count} in a row): full" in said for count, said in zip((1, 2, 4, 8), caplog.messages, strict=True))
    assert all("heartbeat of session" in said for said in caplog.messages)
