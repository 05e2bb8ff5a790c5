"""The in-memory twin loses at a power cut exactly what a disk may lose: what was not flushed, and names not synced."""

from __future__ import annotations

import random

import pytest

from strawq.storage.memory import MemoryFiles


@pytest.fixture
def tree() -> MemoryFiles:
    made = MemoryFiles()
    made.make_directory("tmp")
    made.make_directory("log")
    return made


def committed(tree: MemoryFiles, path: str, data: bytes) -> None:
    tree.stage("tmp/s", [data])
    tree.publish("tmp/s", path)
    tree.sync_directory("log")
    tree.remove("tmp/s")


def outcomes(tree: MemoryFiles, seeds: int = 200) -> list[dict[str, bytes]]:
    found = []
    for seed in range(seeds):
        after = tree.copy()
        after.crash(random.Random(seed))
        found.append({name: after.read(f"log/{name}") for name in after.names("log")})
    return found


def test_what_was_synced_always_survives(tree: MemoryFiles) -> None:
    committed(tree, "log/1", b"one")
    assert all(outcome == {"1": b"one"} for outcome in outcomes(tree))


def test_a_name_that_was_not_synced_may_go_or_stay_but_is_never_half(tree: MemoryFiles) -> None:
    tree.stage("tmp/s", [b"one"])
    tree.publish("tmp/s", "log/1")
    found = outcomes(tree)
    assert {} in found and {"1": b"one"} in found
    assert all(outcome in ({}, {"1": b"one"}) for outcome in found)


def test_unsynced_names_go_and_stay_each_by_itself(tree: MemoryFiles) -> None:
    for name in ("1", "2"):
        tree.stage(f"tmp/{name}", [b"x"])
        tree.publish(f"tmp/{name}", f"log/{name}")
    assert {tuple(outcome) for outcome in outcomes(tree)} == {(), ("1",), ("2",), ("1", "2")}


def test_a_removed_name_may_come_back(tree: MemoryFiles) -> None:
    committed(tree, "log/1", b"one")
    tree.remove("log/1")
    found = outcomes(tree)
    assert {} in found and {"1": b"one"} in found
    tree.sync_directory("log")
    assert all(outcome == {} for outcome in outcomes(tree))


def test_bytes_that_were_not_flushed_may_be_cut_zeroed_or_gone(tree: MemoryFiles) -> None:
    tree.replace("log/1", b"ABCDEF")
    tree.sync_directory("log")
    found = [outcome["1"] for outcome in outcomes(tree)]
    assert b"ABCDEF" in found
    assert b"" in found
    assert any(0 < len(data) < 6 and b"ABCDEF".startswith(data) for data in found)
    assert any(len(data) == 6 and data.endswith(b"\0") for data in found)


@pytest.mark.parametrize(("policy", "wanted"), [("drop", []), ("keep", ["1"])])
def test_the_two_extremes(tree: MemoryFiles, policy: str, wanted: list[str]) -> None:
    tree.stage("tmp/s", [b"x"])
    tree.publish("tmp/s", "log/1")
    tree.crash(random.Random(0), "drop" if policy == "drop" else "keep")
    assert tree.names("log") == wanted
    assert tree.names("") == ["log", "tmp"]


def test_two_names_of_one_file_are_torn_alike(tree: MemoryFiles) -> None:
    for seed in range(50):
        after = tree.copy()
        after.stage_part("log/1", b"ABCDEF")
        after.publish("log/1", "log/2")
        after.sync_directory("log")
        after.crash(random.Random(seed))
        assert after.read("log/1") == after.read("log/2")


def test_after_a_crash_nothing_more_is_lost(tree: MemoryFiles) -> None:
    tree.replace("log/1", b"ABCDEF")
    tree.stage("tmp/s", [b"x"])
    tree.crash(random.Random(3))
    settled = [(name, tree.read(f"log/{name}")) for name in tree.names("log")], tree.names("tmp")
    for seed in range(20):
        tree.crash(random.Random(seed))
        assert ([(name, tree.read(f"log/{name}")) for name in tree.names("log")], tree.names("tmp")) == settled


def test_one_seed_gives_one_outcome(tree: MemoryFiles) -> None:
    for number in range(10):
        tree.replace(f"log/{number}", b"x" * 50)
    assert outcomes(tree, 10) == outcomes(tree, 10)
    assert len({str(outcome) for outcome in outcomes(tree, 10)}) > 5


def test_a_copy_is_independent(tree: MemoryFiles) -> None:
    committed(tree, "log/1", b"one")
    twin = tree.copy()
    committed(tree, "log/2", b"two")
    twin.remove("log/1")
    assert tree.names("log") == ["1", "2"]
    assert twin.names("log") == []
