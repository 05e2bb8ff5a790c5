"""Two observers see one process die, each with its own words for it."""

from __future__ import annotations

import errno

import pytest

from strawq.garbage import collect_garbage
from strawq.storage import layout
from strawq.storage.sessions import Beat, write_beat
from strawq.testing.worlds import World


def test_two_observers_that_expire_one_session_do_not_trip_over_each_other() -> None:
    world = World(lease_seconds=4.0)
    dead, first, second = world.process(), world.process(), world.process()
    dead.queue()
    session = dead.keeper.require()
    for _ in range(3):
        first.keeper.round()
        world.clock.sleep(0.3)
    started = [False]
    for _ in range(20):
        first.keeper.beat()
        second.keeper.beat()
        reasons = first.keeper._observer.stopped(first.keeper._others(list(_sessions(first))))
        others = second.keeper._observer.stopped(second.keeper._others(list(_sessions(second))))
        if reasons and others:
            started[0] = True
            assert first.keeper._expire(*reasons[0]) == session
            assert second.keeper._expire(others[0][0], "in other words") == session
            break
        world.clock.sleep(1.0)
    assert started[0]
    assert session not in {row.id for row in _sessions(first)}


def _sessions(pool):  # type: ignore[no-untyped-def]
    return pool.log.refresh(lambda machine: list(machine.state.sessions.values()))


def test_collection_spares_the_heartbeat_of_a_process_that_is_just_joining() -> None:
    world = World()
    joining, collector = world.process(), world.process()
    joining.queue()
    real = world.clock.sleep
    started, sessions = [False], []

    def sleep(seconds: float) -> None:
        """The collector looks twice; between its looks the other joins."""
        real(seconds)
        if not started[0]:
            started[0] = True
            sessions.append(joining.keeper.require())

    write_beat(joining.files, Beat(f"{joining.instance[:16]}-1", 1, 0, joining.instance))
    world.clock.sleep = sleep  # type: ignore[method-assign]
    collect_garbage(collector, wait_seconds=0)
    assert world.memory.names(layout.SESSIONS) == [f"{sessions[0]}.json"]


def test_an_observer_whose_mount_is_sick_takes_nobody_for_dead() -> None:
    world = World(lease_seconds=2.0)
    living, observer = world.process(), world.process()
    living.queue()
    session = living.keeper.require()
    observer.keeper.require()
    observer.keeper.round()

    def sick(moment: str, kind: str, path: str) -> None:
        if kind == "read" and path.startswith("sessions/"):
            raise OSError(errno.EIO, "sick")

    observer.files.hook = sick  # type: ignore[attr-defined]
    for _ in range(20):
        world.clock.sleep(0.5)
        living.keeper.beat()
        assert observer.keeper.round() == []
    observer.files.hook = None  # type: ignore[attr-defined]
    assert session in {row.id for row in _sessions(observer)}
    for _ in range(8):
        world.clock.sleep(0.5)
        if observer.keeper.round() == [session]:
            break
    else:
        raise AssertionError("a process that stands still is found out all the same")


@pytest.mark.parametrize("garbled", [b"\0" * 60, b"", None], ids=["zeros", "empty", "absent"])
def test_one_wrong_look_at_the_end_of_a_lease_takes_nobody_for_dead(garbled: bytes | None) -> None:
    """The process stood still for nearly a lease, and beats again; the observer's mount answers once with garbage."""
    world = World(lease_seconds=2.0)
    living, observer = world.process(), world.process()
    living.queue()
    session = living.keeper.require()
    observer.keeper.require()
    path = layout.session_file(session)
    for _ in range(6):
        assert observer.keeper.round() == []
        world.clock.sleep(0.39)
    living.keeper.beat()
    true = world.memory.read(path)
    world.memory.remove(path)
    if garbled is not None:
        world.memory.replace(path, garbled)
    assert observer.keeper.round() == []
    world.memory.replace(path, true)
    world.clock.sleep(0.4)
    assert observer.keeper.round() == []


@pytest.mark.parametrize("left", [b"\0" * 60, None], ids=["zeros", "absent"])
def test_a_dead_process_whose_heartbeat_cannot_be_read_any_more_is_found_out(left: bytes | None) -> None:
    world = World(lease_seconds=2.0)
    dead, observer = world.process(), world.process()
    dead.queue()
    session = dead.keeper.require()
    observer.keeper.require()
    observer.keeper.round()
    path = layout.session_file(session)
    world.memory.remove(path)
    if left is not None:
        world.memory.replace(path, left)
    rounds = 0
    while observer.keeper.round() != [session]:
        world.clock.sleep(0.5)
        rounds += 1
        assert rounds < 8
    assert rounds > 3


@pytest.mark.parametrize("look", ["watch", "standing"])
def test_a_look_that_began_before_a_session_joined_does_not_take_it_for_lost(
    look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread looks; before it says what it has seen, another one has joined."""
    world = World()
    process, other = world.process(), world.process()
    process.queue()
    lost = process.keeper.require()
    other.expire_session(lost, "in a test")
    if look == "watch":
        process.keeper.watch()
    real, joined = process.log.refresh, []

    def refresh(view=None, **options):  # type: ignore[no-untyped-def]
        seen = real(view, **options)
        if not joined:
            if process.keeper.current:
                process.keeper.forget(lost)  # the other thread was refused
            joined.append("")
            joined[0] = process.keeper.require()
        return seen

    monkeypatch.setattr(process.log, "refresh", refresh)
    process.keeper.watch() if look == "watch" else process.standing()
    assert process.keeper.current == joined[0]
    assert process.keeper.lost == [lost]
