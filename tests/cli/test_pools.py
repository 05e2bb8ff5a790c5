"""Making a pool and looking at it: what is refused, what is remembered, and the shape of what is shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from strawq import Pool, Prompt, QueueConfig
from strawq.cli import pool_verbs
from strawq.storage.mounts import Mount
from strawq.storage.probe import ProbeReport, probe
from tests.cli.conftest import Run, write_lines

INSPECTED = {
    "format_version": int, "run_id": str, "pool_id": str, "branch": str, "head_seq": int, "policy_version": str,
    "paused": type(None), "epoch": int, "queues": dict, "sessions": list, "checkpoints": list, "branches": list,
    "objects": dict, "damage": list,
}  # fmt: skip
COUNTS = (
    "fresh_pending", "fresh_leased", "partial_pending", "partial_leased", "ready", "in_batch", "trained", "dropped",
    "failed", "total",
)  # fmt: skip


def report(directory: Path, **changes: Any) -> ProbeReport:
    """What the probe finds here, changed."""
    import msgspec

    return msgspec.structs.replace(probe(directory), **changes)


def test_init_says_what_it_made(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "pool"
    made = run("init", path, "--run-id", "run-7", "-q", "a", "-q", "b", "--json").data
    assert (made["pool"], made["run_id"], made["queues"]) == (str(path), "run-7", ["a", "b"])
    assert (made["storage_profile"], made["exclusive_create"], made["forced"]) == ("local", "link", [])
    assert "is ready" in run("init", tmp_path / "other").out
    header = json.loads((path / "strawq.json").read_text())
    assert header["pool_id"] == made["pool_id"]


def test_a_directory_that_cannot_become_a_pool(run: Run, pool: Path, tmp_path: Path) -> None:
    assert "holds a pool already" in run("init", pool, code=2).err
    (tmp_path / "full").mkdir()
    write_lines(tmp_path / "full" / "notes")
    assert "is not empty (it holds 'notes')" in run("init", tmp_path / "full", code=2).err
    assert "is not a directory" in run("init", tmp_path / "full" / "notes", code=2).err
    assert run("init", tmp_path / "full" / "notes" / "x", code=None).code in (2, 6)
    assert os.listdir(tmp_path / "full") == ["notes"]


def test_an_unfit_mount_is_refused_and_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfit = report(tmp_path, verdict="unfit", reasons=["absent names are cached; mount otherwise"])
    monkeypatch.setattr(pool_verbs, "_probe", lambda *_: unfit)
    path = tmp_path / "deep" / "pool"
    ran = run("init", path, "--json", code=6)
    assert ran.data["error"]["kind"] == "unfit_mount"
    assert "absent names are cached" in ran.err
    assert "--force" in ran.err
    assert not (tmp_path / "deep").exists()
    forced = run("init", path, "--force", "--json").data
    assert (forced["verdict"], forced["forced"]) == ("unfit", ["absent names are cached; mount otherwise"])
    with Pool.open(path) as opened:
        assert opened.header.forced == ("absent names are cached; mount otherwise",)


def test_force_cannot_replace_an_exclusive_create(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfit = report(tmp_path, verdict="unfit", reasons=["neither works"], exclusive_create="none")
    monkeypatch.setattr(pool_verbs, "_probe", lambda *_: unfit)
    assert "neither works" in run("init", tmp_path / "pool", "--force", code=6).err
    assert not (tmp_path / "pool").exists()


def test_the_probes_primitive_and_warnings_are_used(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(tmp_path, verdict="fit_with_warnings", warnings=["links do not work"], exclusive_create="rename")
    monkeypatch.setattr(pool_verbs, "_probe", lambda *_: found)
    ran = run("init", tmp_path / "pool", "--json")
    assert ran.err == "strawq: warning: links do not work\n"
    assert ran.data["exclusive_create"] == "rename"
    with Pool.open(tmp_path / "pool") as opened:
        assert opened.header.exclusive_create == "rename"


def test_a_declaration_is_held_against_the_mount_and_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strawq.storage.mounts import MeasuredStorage

    assert "not on a JuiceFS mount" in run("init", tmp_path / "p", "--profile", "juicefs", code=2).err
    assert not (tmp_path / "p").exists()
    measured = MeasuredStorage(
        direct_mount=True, writeback=False, open_cache=0.0, readdir_cache=False, client_version="1.4.2"
    )
    mount = Mount("JuiceFS:vol", str(tmp_path), "fuse.juicefs", {"rw": ""})
    monkeypatch.setattr(pool_verbs, "_probe", lambda *_: found)
    found = report(tmp_path, mount=mount, storage=measured, verdict="fit", warnings=[])
    declared = {
        "direct_mount": True, "writeback": False, "open_cache": 0, "readdir_cache": False, "client_version": "1.4.2",
        "durability_description": "three copies",
    }  # fmt: skip
    file = tmp_path / "declaration.json"
    file.write_text(json.dumps({**declared, "writeback": True}))
    words = ("init", tmp_path / "p", "--profile", "juicefs", "--declaration", file)
    assert "writeback is declared as true" in run(*words, code=2).err
    file.write_text("{")
    assert str(file) in run(*words, code=2).err
    assert not (tmp_path / "p").exists()
    file.write_text(json.dumps(declared))
    run(*words)
    with Pool.open(tmp_path / "p") as opened:
        kept = opened.header.declaration or {}
    assert {name: kept[name] for name in declared} == declared
    assert kept["measured_client_version"] == "1.4.2"
    assert kept["measured_writeback"] is False


def test_probe_reports_and_leaves_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("probe", tmp_path, "--json").data
    assert found["verdict"] in ("fit", "fit_with_warnings")
    assert found["exclusive_create"] == "link"
    assert os.listdir(tmp_path) == []
    assert "publish_ms" in run("probe", tmp_path).out
    assert "is not a directory" in run("probe", tmp_path / "absent", code=2).err
    unfit = report(tmp_path, verdict="unfit", reasons=["no"])
    monkeypatch.setattr(pool_verbs, "_probe", lambda *_: unfit)
    assert run("probe", tmp_path, "--json", code=6).data["reasons"] == ["no"]


def test_inspect_counts_every_place_a_task_can_be(run: Run, pool: Path) -> None:
    with Pool.open(pool, role="tester") as opened:
        opened.configure("rollout", QueueConfig(max_attempts=1))
        queue = opened.queue()
        queue.submit([Prompt(text=str(number)) for number in range(5)])
        held, failed, dropped = queue.acquire(3)
        queue.fail(queue.open(failed), "it broke")
        queue.drop(queue.open(dropped), "too easy")
        view = run("inspect", pool, "--json").data
        assert {name: type(value) for name, value in view.items()} == INSPECTED
        tasks = view["queues"]["rollout"]["tasks"]
        assert tuple(tasks) == COUNTS
        assert all(type(count) is int for count in tasks.values())
        assert tasks == {**dict.fromkeys(COUNTS, 0), "fresh_pending": 2, "fresh_leased": 1, "dropped": 1, "failed": 1,
                         "total": 5}  # fmt: skip
        (session,) = view["sessions"]
        assert session == {**session, "id": held.session, "pid": os.getpid(), "role": "tester", "leases": 1}
        assert set(session) >= {"id", "host", "pid", "state", "leases"}
        assert view["queues"]["rollout"]["drop_reasons"] == {"too easy": 1}
        assert set(view["objects"]) >= {"files", "bytes"}
        text = run("inspect", pool).out
        for words in ("run run-1", "rollout", "tester", "objects: "):
            assert words in text
        assert run("sessions", "list", pool, "--json").data["sessions"] == view["sessions"]


def test_inspect_names_damage_and_shows_the_rest(run: Run, pool: Path) -> None:
    (pool / "log" / "000000000" / "000000000002.json").write_bytes(b"torn")
    ran = run("inspect", pool, "--json", code=1)
    assert ran.data["head_seq"] == 1
    assert "000000000002" in ran.data["damage"][0]
    assert "damaged: " in run("inspect", pool, code=1).out


def test_inspect_of_one_queue(run: Run, tmp_path: Path) -> None:
    Pool.init(tmp_path / "pool", queues=["a", "b"]).close()
    assert list(run("inspect", tmp_path / "pool", "-q", "b", "--json").data["queues"]) == ["b"]
    assert "there is no queue 'c'" in run("inspect", tmp_path / "pool", "-q", "c", code=2).err


def test_a_queue_must_be_named_if_there_are_several(run: Run, tmp_path: Path) -> None:
    Pool.init(tmp_path / "pool", queues=["a", "b"]).close()
    assert "has 2 queues (a, b); say which with --queue" in run("seal", tmp_path / "pool", code=2).err
    assert run("seal", tmp_path / "pool", "-q", "b", "--json").data == {"queue": "b", "sealed": True}


def test_pause_resume_and_versions(run: Run, pool: Path) -> None:
    paused = run("pause", pool, "--reason", "new weights", "--json").data
    assert paused["paused"]["reason"] == "new weights"
    assert "paused (new weights)" in run("inspect", pool).out
    assert run("resume", pool, "--policy-version", "3", "--json").data["policy_version"] == "3"
    assert run("publish-version", pool, "4", "--json").data == {
        "policy_version": "4", "paused": None, "branch": "main",
    }  # fmt: skip
    assert "is not above 4" in run("publish-version", pool, "2", code=2).err
    assert run("resume", pool).out == "policy version 4, admission open (branch main)\n"


def test_a_session_is_expired_by_hand(run: Run, pool: Path) -> None:
    with Pool.open(pool, background=False) as opened:
        queue = opened.queue()
        queue.submit([Prompt(text="?")])
        (lease,) = queue.acquire(1)
        assert run("sessions", "expire", pool, lease.session, "--json").data == {"expired": lease.session}
        assert run("inspect", pool, "--json").data["queues"]["rollout"]["tasks"]["fresh_pending"] == 1
        assert run("sessions", "list", pool).out == "no live session\n"
        assert "there is no live session" in run("sessions", "expire", pool, lease.session, code=2).err


def test_dead_letters_are_shown_retried_and_dropped(run: Run, pool: Path) -> None:
    with Pool.open(pool) as opened:
        opened.configure("rollout", QueueConfig(max_attempts=1))
        queue = opened.queue()
        queue.submit([Prompt(text=str(number)) for number in range(5)])
        for lease in queue.acquire(4):
            queue.fail(queue.open(lease), "it broke\x1b[31m")
    found = run("failed", "list", pool, "--json").data["failed"]
    assert [(row["task"], row["failures"], row["reason"]) for row in found] == [
        (f"1-{number}", 1, "it broke\x1b[31m") for number in range(4)
    ]
    assert "\x1b" not in run("failed", "list", pool).out
    assert run("failed", "retry", pool, "1-0", "--json").data == {
        "queue": "rollout", "retried": ["1-0"], "untouched": [],
    }  # fmt: skip
    partly = run("failed", "drop", pool, "1-0", "1-1", "--reason", "hopeless", "--json", code=1).data
    assert (partly["dropped"], partly["untouched"]) == (["1-1"], ["1-0"])
    assert run("failed", "retry", pool, "--all", "--json").data["retried"] == ["1-2", "1-3"]
    assert run("failed", "list", pool).out == "queue rollout has no dead letters\n"
    assert "name tasks, or use --all" in run("failed", "drop", pool, code=2).err
    assert "name tasks, or use --all" in run("failed", "retry", pool, "1-2", "--all", code=2).err
    assert run("failed", "drop", pool, "--all", "--json").data["dropped"] == []
    view = run("inspect", pool, "--json").data["queues"]["rollout"]
    assert view["drop_reasons"] == {"hopeless": 1}


def test_pending_tasks_are_dropped_and_leased_ones_are_not(run: Run, pool: Path) -> None:
    with Pool.open(pool) as opened:
        queue = opened.queue()
        queue.submit([Prompt(text=str(number)) for number in range(3)])
        back, _ = queue.acquire(2)
        queue.yield_(queue.open(back))
        ran = run("drop", pool, "1-0", "1-1", "9-9", "--reason", "wrong data", "--json", code=1)
        assert (ran.data["dropped"], ran.data["untouched"]) == (["1-0"], ["1-1", "9-9"])
    assert "Missing option" in run("drop", pool, "1-1", code=2).err
