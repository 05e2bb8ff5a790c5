"""Real processes, real signals, a real directory: one slice on the local disk and one on two JuiceFS clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from strawq.drill.life import Life
from strawq.drill.troupe import asking_to_end_waits, start_life

NUMBERS = ("groups", "kills", "stops", "lost", "duplicated", "stale_commits", "leaked_leases", "staging_left")


def drill(*arguments: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "strawq", "drill", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def require_clean(code: int, told: dict[str, Any], talk: str) -> None:
    assert all(type(told[name]) is int for name in NUMBERS)
    assert (code, told["ok"], told["findings"]) == (0, True, []), talk
    assert [told[name] for name in NUMBERS[3:]] == [0] * 5
    assert told["groups"] > 0
    assert told["prompts"] >= told["groups"]


@pytest.mark.slow
def test_kills_and_stops_on_a_local_disk_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("not yours")
    code, told, talk = drill(str(tmp_path), "--minutes", "0.06", "--kill-every", "0.2", "--stop-every", "0.8")
    require_clean(code, told, talk)
    assert told["kills"] >= 10
    assert told["stops"] >= 1
    assert sum(told["points"].values()) >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
@pytest.mark.juicefs
def test_kills_and_stops_on_two_juicefs_clients_lose_nothing(juicefs_pair: tuple[Path, Path]) -> None:
    mine, other = juicefs_pair
    code, told, talk = drill(
        str(mine), "--peer", str(other), "--minutes", "0.06", "--kill-every", "0.3", "--stop-every", "1.2"
    )
    require_clean(code, told, talk)
    assert told["kills"] >= 5
    assert list(mine.iterdir()) == []


def test_a_directory_that_will_not_do_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for arguments in (
        [str(tmp_path / "gone")],
        [str(tmp_path / "a"), "--peer", str(tmp_path / "b")],
        [str(tmp_path / "a"), "--minutes", "0"],
        [str(tmp_path / "a"), "--kill-every", "nan"],
        [str(tmp_path / "a"), "--lease", "0.01"],
    ):
        code, told, _ = drill(*arguments)
        assert (code, told["error"]["kind"]) == (2, "bad_input"), (arguments, told)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b"]


def test_no_child_outlives_a_drill_that_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "strawq", "drill", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        deadline = time.monotonic() + 30
        while len(children := children_of(process.pid)) < 5:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(children[-2], signal.SIGSTOP)  # The newest may not be bound to its parent yet.
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 30
    while alive := [pid for pid in children if living(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


def test_a_drill_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "strawq", "drill", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        deadline = time.monotonic() + 30
        while len(children_of(process.pid)) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        assert process.wait(30) == 143
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other_thread", [False, True], ids=["taken here", "taken by another thread"])
def test_a_request_to_end_is_not_lost_while_a_child_is_made(
    other_thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python swallows what a signal handler raises within a fork hook; so a signal in the middle of a fork waits."""
    fork = os.fork
    heard: list[int] = []
    over = threading.Event()
    other = threading.Thread(target=over.wait)

    def fork_with_a_signal() -> int:
        pid = fork()
        if pid:
            thread = other if other_thread else threading.main_thread()
            assert thread.ident is not None
            signal.pthread_kill(thread.ident, signal.SIGTERM)
        return pid

    monkeypatch.setattr(os, "fork", fork_with_a_signal)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    other.start()
    try:
        # Its pool is not there: it writes that into its ledger and ends.
        with asking_to_end_waits():
            pid = start_life(Life(1, "worker", str(tmp_path / "gone"), 0, 1, 1.0, str(tmp_path)))
            assert heard == []
        # A thread that has no processor yet takes its signal when it has one.
        deadline = time.monotonic() + 30
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)
        assert heard == [signal.SIGTERM]
        assert os.waitpid(pid, 0)[1] != 0
    finally:
        over.set()
        other.join()
        signal.signal(signal.SIGTERM, before)


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def living(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
