"""What a call costs does not grow with what was ever stored: file calls are counted, not seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strawq.garbage import collect_garbage
from strawq.pool import Pool
from strawq.storage import log
from strawq.storage.faulty import FaultyFiles
from strawq.testing.scenes import GROUP_TOKENS, grown, prompts
from strawq.testing.worlds import World
from strawq.trimming import trim_log
from strawq.work import Change


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Snapshots and trims as often, for these sizes, as the real limits are for real ones."""
    monkeypatch.setattr(log, "SNAPSHOT_ENTRIES", 16)
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 16)
    return


def calls(pool: Pool) -> int:
    assert isinstance(pool.files, FaultyFiles)
    return len(pool.files.calls)


def costs(world: World) -> dict[str, int]:
    """File calls of each step of one group's life, in a process that is open and knows the state."""
    pool = world.process()
    counted: dict[str, int] = {}
    at = calls(pool)

    def count(name: str) -> None:
        nonlocal at
        counted[name], at = calls(pool) - at, calls(pool)

    pool.inspect()
    count("open")
    queue = pool.queue()
    pool.keeper.require()
    count("join")
    queue.submit(prompts(["r0", "r1"]))
    count("submit")
    leases = queue.acquire(2).leases
    count("acquire")
    works = [queue.open(lease) for lease in leases]
    count("read")
    queue.report([Change(work, "save", grown(work.group, 2)) for work in works])
    count("save")
    queue.report([Change(work, "complete", grown(work.group, GROUP_TOKENS)) for work in works])
    count("complete")
    taken = queue.take_batch(2).batch
    assert taken is not None
    count("take batch")
    assert len(list(queue.read_batch(taken))) == 2
    count("read batch")
    queue.finish_batch(taken)
    count("finish batch")
    queue.counts()
    count("look")
    pool.close()
    count("leave")
    return counted


def history(count: int) -> World:
    """A pool in which `count` tasks have ended, one entry for every ten of them at most, and `count` are pending."""
    world = World()
    pool = world.process()
    queue = pool.queue()
    step = max(10, count // 100)
    for start in range(0, count, step):
        queue.submit(prompts([f"h{at}" for at in range(start, start + step)]))
        works = [queue.open(lease) for lease in queue.acquire(step)]
        while works:
            part, works = works[:1000], works[1000:]
            queue.report([Change(work, "drop", None, "done") for work in part])
    # Pending ahead of what is measured would be leased first: it waits in a queue of its own.
    other = pool.configure("pending")
    other.submit(prompts([f"p{at}" for at in range(count)]))
    pool.snapshot()
    pool.publish_version("1")
    pool.snapshot()
    trim_log(pool, keep_entries=16)
    pool.close()
    return world


def test_a_call_costs_the_same_after_a_thousand_tasks_and_after_ten_thousand() -> None:
    empty, thousand, ten_thousand = costs(World()), costs(history(1000)), costs(history(10_000))
    for name, count in ten_thousand.items():
        if name != "open":
            assert count == thousand[name] <= empty[name] + 1, f"{name}: {empty[name]}, {thousand[name]}, {count} calls"
    assert ten_thousand["open"] <= thousand["open"] + 2, "opening reads what is live and a bounded tail of history"


@pytest.mark.campaign
def test_a_call_costs_the_same_after_a_hundred_thousand_tasks() -> None:
    assert costs(history(100_000)) == costs(history(1000))


def test_each_call_of_a_lone_worker_costs_a_handful_of_file_calls() -> None:
    """The figures that docs and benchmarks rest on: a change here is a change of the cost of every task."""
    counted = costs(World())
    commits = {name: counted[name] for name in ("submit", "acquire", "take batch", "finish batch")}
    assert max(commits.values()) <= 9, commits
    assert counted["read"] <= 2 and counted["look"] <= 3


def test_a_second_collection_with_nothing_new_does_far_less() -> None:
    world = World()
    pool = world.process()
    queue = pool.queue()
    for number in range(60):
        queue.submit(prompts([f"g{number}"], payload_bytes=30_000))
    for lease in queue.acquire(30):
        queue.drop(queue.open(lease), "dull")
    spent = []
    for _ in range(3):
        before = calls(pool)
        _, collected = collect_garbage(pool, wait_seconds=0)
        spent.append(calls(pool) - before)
    assert collected.files == 0 and collected.kept_files == 30
    assert spent[1] < spent[0] / 4 and spent[2] == spent[1], spent


def test_directories_and_files_are_bounded_by_what_is_live() -> None:
    world = history(1000)
    collect_garbage(world.process(), wait_seconds=0)
    names = {directory: len(world.memory.names(directory)) for directory in ("snapshots", "sessions", "tmp", "objects")}
    assert names["snapshots"] <= 4 and names["sessions"] == names["tmp"] == 0 and names["objects"] <= 2, names
