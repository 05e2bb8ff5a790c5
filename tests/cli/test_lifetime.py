"""Checkpoints and rollbacks: bound to files of one step, and a dry run that tells what the real one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blake3 import blake3

from strawq import Pool, Prompt
from tests.cli.conftest import Run, write_lines


def counts(run: Run, pool: Path) -> Any:
    return {name: queue["tasks"] for name, queue in run("inspect", pool, "--json").data["queues"].items()}


def test_a_checkpoint_has_a_position_metadata_and_bindings(run: Run, pool: Path, tmp_path: Path) -> None:
    manifest = write_lines(tmp_path / "step-5.json", {"step": 5})
    digest = blake3(manifest.read_bytes()).hexdigest()
    made = run("checkpoint", pool, "step-5", "--metadata", '{"step": 5}', "--bind", f"model={manifest}", "--json").data
    assert made == {"checkpoint": "step-5", "seq": 2, "bindings": {"model": digest}}
    (listed,) = run("checkpoint", pool, "--list", "--json").data["checkpoints"]
    assert (listed["metadata"], listed["bindings"], listed["seq"]) == ({"step": 5}, {"model": digest}, 2)
    assert "step-5" in run("checkpoint", pool, "--list").out
    assert "is taken" in run("checkpoint", pool, "step-5", code=2).err
    assert run("checkpoint", pool, "step-5", "--delete", "--json").data == {"deleted": "step-5"}
    assert run("checkpoint", pool, "--list").out == "no checkpoint\n"
    assert "there is no checkpoint" in run("checkpoint", pool, "step-5", "--delete", code=2).err


def test_what_a_checkpoint_refuses(run: Run, pool: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f")
    for words in (
        (), ("--list", "x"), ("--list", "--delete"), ("x", "--metadata", "[1]"), ("x", "--metadata", "{"),
        ("x", "--bind", "model"), ("x", "--bind", "=f"), ("x", "--bind", f"model={tmp_path / 'absent'}"),
        ("x", "--bind", f"model={tmp_path}"), ("x", "--bind", f"a={file}", "--bind", f"a={file}"),
        ("x", "--delete", "--bind", f"a={file}"),
    ):  # fmt: skip
        assert run("checkpoint", pool, *words, code=2).err.count("\n") == 1
    assert run("inspect", pool, "--json").data["head_seq"] == 1


def test_the_dry_run_tells_what_the_rollback_does_and_does_nothing(run: Run, pool: Path) -> None:
    with Pool.open(pool) as opened:
        queue = opened.queue()
        opened.publish_version(1)
        queue.submit([Prompt(text=str(number)) for number in range(6)])
        queue.acquire(2)
        run("checkpoint", pool, "before")
        at_checkpoint = counts(run, pool)
        queue.acquire(1)
        queue.submit([Prompt(text="later")])
        opened.publish_version(2)
        opened.configure("eval")
        head = run("inspect", pool, "--json").data
        plan = run("rollback", pool, "before", "--dry-run", "--json").data
        assert plan["dry_run"] is True
        assert run("inspect", pool, "--json").data == head
        text = run("rollback", pool, "before", "--dry-run").out
        done = run("rollback", pool, "before", "--json").data
    planned = plan["plan"]
    places = ("branch", "target", "left", "paused")
    assert [plan[place] for place in places] == [done[place] for place in places], "the same keys at the same places"
    assert planned["paused"] is done["paused"] is False
    assert (planned["branch"], planned["left"]) == (done["branch"], done["left"]) == ("branch-2", "main")
    assert (planned["version_now"], planned["version_then"], planned["leases_ended"]) == ("2", "1", 3)
    assert {name: queue["now"] for name, queue in planned["queues"].items()} == {
        name: queue["tasks"] for name, queue in head["queues"].items()
    }
    # Leases of the checkpoint's own moment are free again: that is what both say.
    expected = at_checkpoint["rollout"] | {"fresh_pending": 6, "fresh_leased": 0}
    assert planned["queues"]["rollout"]["then"] == expected
    assert planned["queues"]["eval"]["then"] is None
    assert counts(run, pool) == {"rollout": expected}
    rollout = planned["queues"]["rollout"]
    assert (rollout["brought_back"], rollout["set_aside"]) == (0, 1), "`later` is of the branch that is left"
    for words in ("branch-2 would go on from before", "policy version 2 -> 1", "fresh_leased", "eval", "1 set aside"):
        assert words in text


def test_a_rollback_of_other_files_is_refused(run: Run, pool: Path, tmp_path: Path) -> None:
    five, six = write_lines(tmp_path / "5", "five"), write_lines(tmp_path / "6", "six")
    run("checkpoint", pool, "step-5", "--bind", f"model={five}")
    for words in (("--dry-run",), ()):
        assert "not of one step" in run("rollback", pool, "step-5", "--bind", f"model={six}", *words, code=2).err
        assert "not of one step" in run("rollback", pool, "step-5", "--bind", f"other={five}", *words, code=2).err
        assert "there is no checkpoint or branch" in run("rollback", pool, "step-6", *words, code=2).err
    assert "from step-5" in run("rollback", pool, "step-5", "--bind", f"model={five}", "--branch", "second").out
    assert run("inspect", pool, "--json").data["branch"] == "second"


def test_branches_are_shown_gone_back_to_and_dropped(run: Run, pool: Path) -> None:
    run("checkpoint", pool, "a")
    run("rollback", pool, "a")
    found = run("branch", pool, "--json").data["branches"]
    assert [(branch["name"], branch["active"], branch["source"]) for branch in found] == [
        ("branch-2", True, "a"), ("main", False, ""),
    ]  # fmt: skip
    assert "main" in run("branch", pool).out
    assert "is active" in run("branch", pool, "--delete", "branch-2", code=2).err
    run("rollback", pool, "main")
    assert run("branch", pool, "--delete", "branch-2", "--json").data == {"deleted": "branch-2"}
    assert "there is no branch" in run("branch", pool, "--delete", "branch-2", code=2).err


def test_a_submission_after_a_rollback_goes_on_from_the_cursor_of_that_branch(
    run: Run, pool: Path, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "a.jsonl", *({"prompt": str(number)} for number in range(4)))
    run("checkpoint", pool, "empty")
    run("submit", pool, file)
    run("rollback", pool, "empty")
    assert run("submit", pool, file, "--json").data["submitted"] == 4
    run("rollback", pool, "main")
    assert run("submit", pool, file, "--json").data["already"] == 4
