"""`strawq branch`: which lines of history there are, and where each was left."""

from __future__ import annotations

from pathlib import Path

from strawq import Pool, Prompt
from tests.cli.conftest import Run


def test_the_list_names_each_branch_and_where_it_was_left(run: Run, pool: Path) -> None:
    run("checkpoint", pool, "start")
    run("rollback", pool, "start", "--branch", "again")
    rows = run("branch", pool, "--list", "--json").data["branches"]
    assert [(row["name"], row["active"], row["parent"]) for row in rows] == [
        ("again", True, "main"),
        ("main", False, ""),
    ]
    again, main = rows
    assert again["source"] == "start" and main["left_seq"] > again["base_seq"] > 0
    assert rows == run("branch", pool, "--json").data["branches"], "and without an option it is the same"
    text = run("branch", pool, "--list").out
    assert "main" in text and "again" in text and str(main["left_seq"]) in text
    run("branch", pool, "--delete", "main")
    assert [row["name"] for row in run("branch", pool, "--list", "--json").data["branches"]] == ["again"]


def test_list_stands_alone(run: Run, pool: Path) -> None:
    for words in (("--delete", "main"), ("--request-id", "x")):
        assert "stands alone" in run("branch", pool, "--list", *words, code=2).err


def test_a_request_id_is_for_what_changes_something(run: Run, pool: Path) -> None:
    run("checkpoint", pool, "start")
    head = run("inspect", pool, "--json").data["head_seq"]
    assert "goes with --delete" in run("branch", pool, "--request-id", "x", code=2).err
    assert "--dry-run changes nothing" in run("rollback", pool, "start", "--dry-run", "--request-id", "x", code=2).err
    assert run("inspect", pool, "--json").data["head_seq"] == head


def test_what_came_later_is_shown_later(run: Run, pool: Path) -> None:
    """Not `rollout-10` before `rollout-2`."""
    names = [f"rollout-{number}" for number in (1, 2, 10, 11, 3)]
    with Pool.open(pool) as opened:
        for name in names:
            opened.checkpoint(name)
        for _ in range(10):
            opened.rollback("rollout-1")
        opened.queue().submit([Prompt(text=f"p{number}") for number in range(12)])
        for lease in opened.queue().acquire(12):
            opened.queue().fail(opened.queue().open(lease), "hopeless", retryable=False)
    shown = run("inspect", pool, "--json").data
    failed = run("failed", "list", pool, "--json").data["failed"]
    assert [row["task"] for row in failed] == [f"1-{number}" for number in range(12)]
    assert [row["name"] for row in shown["checkpoints"]] == names
    assert [row["name"] for row in run("checkpoint", pool, "--list", "--json").data["checkpoints"]] == names
    assert [row["name"] for row in shown["branches"]] == [*(f"branch-{number}" for number in range(2, 12)), "main"]
