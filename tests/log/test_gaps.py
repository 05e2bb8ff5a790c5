"""An entry that is missing while others stand behind it: its number is not free, and nobody commits under it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strawq.errors import Damaged
from strawq.history import read_history
from strawq.limits import ENTRIES_PER_SEGMENT
from strawq.pool import Pool
from strawq.storage import layout
from strawq.storage.faulty import FaultyFiles
from strawq.testing.worlds import World
from strawq.trimming import trim_log
from strawq.verification import verify


def published(world: World, versions: int) -> int:
    """The head after so many versions, all behind the newest snapshot."""
    pool = world.process()
    pool.snapshot()
    for _ in range(versions):
        pool.publish_version(pool.highest_version() + 1)
    head: int = pool.log.refresh(lambda machine: machine.seq)
    return head


def entries(world: World) -> dict[str, bytes]:
    return {
        f"log/{segment}/{name}": world.memory.read(f"log/{segment}/{name}")
        for segment in world.memory.names("log")
        for name in world.memory.names(f"log/{segment}")
    }


def commit(pool: Pool) -> None:
    pool.publish_version(99)


@pytest.mark.parametrize(
    "call",
    [commit, Pool.queue, Pool.snapshot, Pool.policy_version, lambda pool: pool.keeper.require()],
    ids=["commit", "queue", "snapshot", "look", "join"],
)
@pytest.mark.parametrize("holes", [1, 2, 3])
def test_nobody_commits_where_an_entry_is_missing(call: Callable[[Pool], object], holes: int) -> None:
    world = World()
    head = published(world, 5)
    lost = {number: world.memory.read(layout.entry(number)) for number in range(head - holes, head)}
    for number in lost:
        world.memory.remove(layout.entry(number))
    before = entries(world)
    pool = world.process()
    for _ in range(2):
        with pytest.raises(
            Damaged, match=f"{layout.entry(head - holes)} is missing, and entry {head} stands behind it"
        ):
            call(pool)
    assert entries(world) == before
    for number, data in lost.items():
        world.memory.stage(layout.entry(number), [data])
    call(pool)
    assert verify(world.process(), full=True).findings == ()


def test_it_is_shown_what_is_missing_what_it_costs_and_how_to_go_on() -> None:
    world = World()
    head = published(world, 4)
    missing = head - 2
    world.memory.remove(layout.entry(missing))
    seen = world.process().inspect()
    assert seen.head_seq == missing - 1
    assert len(seen.damage) == 1 and layout.entry(missing) in seen.damage[0]
    for repair in (False, True):
        before = entries(world)
        found = verify(world.process(), full=True, repair=repair)
        (finding,) = found.findings
        assert finding.what == layout.entry(missing)
        assert finding.problem == f"is missing, and entries up to {head} stand behind it"
        assert f"move entries {missing} to {head} out of log/: it goes on from entry {missing - 1}" in finding.remedy
        assert found.repaired == () and entries(world) == before
    assert read_history(world.process())
    # As the remedy says:
    for number in range(missing + 1, head + 1):
        world.memory.remove(layout.entry(number))
    pool = world.process()
    assert pool.policy_version() == "0"
    pool.publish_version(2)
    assert verify(world.process(), full=True).findings == ()


def test_all_that_are_missing_are_named() -> None:
    world = World()
    head = published(world, 5)
    for number in (head - 3, head - 2, head - 1):
        world.memory.remove(layout.entry(number))
    (finding,) = verify(world.process()).findings
    assert finding.problem == f"is missing, as all up to entry {head - 1}, and entries up to {head} stand behind it"


def test_the_first_entry_of_all_can_be_missing() -> None:
    world = World()
    world.process().publish_version(1)
    world.memory.remove(layout.entry(1))
    with pytest.raises(Damaged, match=f"{layout.entry(1)} is missing"):
        world.process().publish_version(2)


def test_over_the_end_of_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the newest segment is empty so far: whoever made it may have died before its entry had a name."""
    monkeypatch.setattr(layout, "ENTRIES_PER_SEGMENT", 4)
    for lost in range(5, 12):
        world = World()
        head = published(world, 12)
        world.memory.remove(layout.entry(lost))
        world.memory.make_directory(layout.segment_directory(layout.segment(head) + 1))
        before = entries(world)
        snapshot = max(layout.snapshot_seq(name) for name in world.memory.names(layout.SNAPSHOTS))
        assert snapshot < lost < head
        with pytest.raises(Damaged, match=f"{layout.entry(lost)} is missing"):
            commit(world.process())
        assert entries(world) == before


def test_names_that_are_no_entries_say_nothing() -> None:
    world = World()
    head = published(world, 1)
    directory = layout.segment_directory(layout.segment(head))
    for name in (f"{head + 2:012d}.json~", f"{head + 2:012d}", "9.json", f"{head + 2:013d}.json", "notes.json"):
        world.memory.stage(f"{directory}/{name}", [b""])
    world.memory.make_directory("log/old")
    world.process().publish_version(7)
    assert verify(world.process()).findings == ()


def during_the_listing(pool: Pool, act: Callable[[], object], moment: str, where: str = "log/") -> None:
    files, done = pool.files, []
    assert isinstance(files, FaultyFiles)

    def others(when: str, kind: str, path: str) -> None:
        if when == moment and kind == "names" and path.startswith(where) and not done:
            done.append(True)
            act()

    files.hook = others


@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_others_commit_during_the_look_is_no_gap(moment: str) -> None:
    world = World()
    published(world, 2)
    other, pool = world.process(), world.process()
    during_the_listing(pool, lambda: [other.publish_version(number) for number in range(10, 14)], moment)
    assert pool.policy_version() == ("13" if moment == "before" else "1")
    pool.publish_version(14)
    assert verify(world.process()).findings == ()


def test_what_others_commit_and_trim_during_the_look_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number after the end that was found is gone by then, and younger ones are there: below a floor."""
    monkeypatch.setattr(layout, "ENTRIES_PER_SEGMENT", 4)
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 4)
    world = World()
    head = published(world, 2)
    other, pool = world.process(), world.process()

    def act() -> None:
        for number in range(10, 40):
            other.publish_version(number)
            if number % 10 == 0:
                other.snapshot()
        assert trim_log(other, keep_entries=2, snapshots_kept=1).floor > head + 1

    during_the_listing(pool, act, "before", "log")
    assert pool.policy_version() == "39"
    pool.publish_version(40)
    assert verify(world.process()).findings == ()


def test_a_log_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    published(world, 2)
    pool = world.process()
    pool.publish_version(10)
    assert isinstance(pool.files, FaultyFiles)
    assert [path for kind, path in pool.files.calls if kind == "names"] == ["snapshots", "log", "log/000000000"]
    at = len(pool.files.calls)
    pool.publish_version(11)
    assert "names" not in [kind for kind, _ in pool.files.calls[at:]]
    assert ENTRIES_PER_SEGMENT <= 10_000  # a listing of one segment is what opening pays for it


def test_two_histories_that_meet_are_told_apart_from_damage() -> None:
    """What an older strawq made of a gap: an entry written anew where one was missing."""
    world = World()
    head = published(world, 3)
    entry = layout.entry(head - 1)
    kept = world.memory.read(layout.entry(head))
    for number in (head, head - 1):
        world.memory.remove(layout.entry(number))
    world.process().publish_version(50)
    assert entry.rpartition("/")[2] in world.memory.names("log/000000000")
    world.memory.stage(layout.entry(head), [kept])
    with pytest.raises(Damaged, match="follows another history"):
        world.process().queue()
    (finding,) = verify(world.process()).findings
    assert finding.what == layout.entry(head)
    assert f"than the one that entry {head - 1} ends" in finding.problem
    assert f"move entry {head} and those behind it out of log/" in finding.remedy
