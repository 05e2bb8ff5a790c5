"""Verbs that tell the history, check the pool, configure queues and trim the log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strawq import Pool, Prompt
from strawq.limits import ENTRIES_PER_SEGMENT, SNAPSHOTS_KEPT
from strawq.storage import layout
from strawq.trimming import trim_log
from tests.cli.conftest import Run
from tools.golden_pool import complete


def test_log_tells_what_happened_newest_first(run: Run, pool: Path) -> None:
    with Pool.open(pool) as opened:
        opened.queue().submit(
            [Prompt("g0", np.array([1, 2, 3], np.int32)), Prompt("g1", np.array([1, 2, 3], np.int32))]
        )
        complete(opened.queue(), 1)
        opened.checkpoint("step-1")
    seen = run("log", pool, "-n", 0, "--json").data
    numbers = [event["seq"] for event in seen["events"]]
    assert numbers == sorted(numbers, reverse=True) and numbers[-1] == 1
    assert (seen["begins_at"], seen["trimmed"]) == (1, False)
    oldest = run("log", pool, "--oldest-first", "-n", 2, "--json").data["events"]
    assert [event["seq"] for event in oldest] == [1, 2]
    assert all(event["who"] and event["time_ms"] for event in seen["events"])
    life = run("log", pool, "--task", "1-0", "--json").data["events"]
    assert [event["event"] for event in life][:3] == ["submitted", "acquired", "reported"]
    assert "is not a task id" in run("log", pool, "--task", "nonsense", code=2).err


def test_a_task_that_never_was_is_not_found_and_one_that_was_trimmed_is_said_to_be(run: Run, pool: Path) -> None:
    with Pool.open(pool) as opened:
        opened.queue().submit([Prompt(text="a"), Prompt(text="b")])
        opened.checkpoint("start")
        opened.rollback("start")
    for task in ("2-0", "1-2", "9-9", "0-0"):
        assert f"there never was a task {task}" in run("log", pool, "--task", task, code=2).err
    assert "is not a task id" in run("log", pool, "--task", "1-" + "9" * 5000, code=2).err
    events = run("log", pool, "--task", "01-01", "--json").data["events"]
    assert [event["event"] for event in events] == ["submitted", "rolled_back"]
    with Pool.open(pool) as opened:
        for number in range(6):
            opened.publish_version(number)
            opened.snapshot()
        trim_log(opened, keep_entries=1, step=1)
    for task in ("1-0", "1-7"):
        assert "were trimmed" in run("log", pool, "--task", task).out
    assert "there never was a task 2-0" in run("log", pool, "--task", "2-0", code=2).err


def test_verify_names_the_object_what_depends_on_it_and_the_remedy(run: Run, pool: Path) -> None:
    with Pool.open(pool) as opened:
        opened.queue().submit([Prompt("g0", np.array([1, 2, 3], np.int32))])
        complete(opened.queue(), 1)
        opened.checkpoint("step-1")
    assert run("verify", pool, "--full", "--json").data["findings"] == []
    (pack,) = pool.glob("objects/*/*/*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    assert run("verify", pool, "--json").data["findings"] == []
    (finding,) = run("verify", pool, "--full", "--json", code=1).data["findings"]
    assert finding["what"] == str(pack.relative_to(pool))
    assert "checkpoint step-1" in finding["depends"] and finding["remedy"]
    assert "remedy" in run("verify", pool, "--full", code=1).out


def test_verify_counts_what_a_dead_session_holds(run: Run, pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strawq.verification.known_dead", lambda _: True)
    with Pool.open(pool) as dead:
        dead.queue().submit([Prompt(f"g{n}", text="x") for n in range(5)])
        complete(dead.queue(), 4, tensors=False)
        assert dead.queue().take_batch(2).batch and dead.queue().take_batch(2, consumer="eval").batch
        assert dead.queue().acquire(1)
        (finding,) = run("verify", pool, "--json", code=1).data["findings"]
    assert finding["depends"] == ["1 leases, 2 open batches"]


def test_queue_changes_only_what_is_named(run: Run, pool: Path) -> None:
    made = run("queue", pool, "eval", "--max-attempts", 3, "--max-ready", 7, "--json").data
    assert made["created"] is True
    changed = run("queue", pool, "eval", "--max-leased", 2, "--json").data
    assert changed["created"] is False
    assert changed["config"] == {"max_attempts": 3, "max_expirations": 20, "max_ready": 7, "max_leased": 2}
    head = run("inspect", pool, "--json").data["head_seq"]
    run("queue", pool, "eval")
    assert run("inspect", pool, "--json").data["head_seq"] == head
    assert run("queue", pool, "no/name", code=2).err.count("\n") == 1


def test_gc_trims_the_log_behind_snapshots(run: Run, pool: Path) -> None:
    with Pool.open(pool, background=False) as opened:
        opened.queue().submit([Prompt("g0", text="rides inside an entry that goes")])
        for number in range(1, ENTRIES_PER_SEGMENT + 10):
            opened.publish_version(number)
        for number in range(10, 10 + SNAPSHOTS_KEPT):  # the floor stays below all snapshots that are kept
            opened.snapshot()
            opened.publish_version(ENTRIES_PER_SEGMENT + number)
    planned = run("gc", pool, "--keep-entries", 0, "--dry-run", "--json").data["log"]
    assert (pool / layout.entry(1)).exists()
    done = run("gc", pool, "--keep-entries", 0, "--json").data["log"]
    assert planned == done, "the same code makes the plan"
    assert (done["floor"], done["entries"], done["moved"]) == (ENTRIES_PER_SEGMENT, ENTRIES_PER_SEGMENT - 1, 1)
    assert not (pool / layout.entry(1)).exists()
    assert f"history begins at entry {ENTRIES_PER_SEGMENT}" in run("log", pool).out
    assert run("verify", pool, "--full", "--json").data["findings"] == []
    with Pool.open(pool) as opened:
        (lease,) = opened.queue().acquire(1)
        assert opened.queue().open(lease).group.prompt.text == "rides inside an entry that goes"
