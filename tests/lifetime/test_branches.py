"""`strawq branch`: which lines of history there are, and where each was left."""

from __future__ import annotations

from pathlib import Path

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
