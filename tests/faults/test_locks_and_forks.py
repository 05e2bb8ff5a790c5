"""Real processes on a real directory: locks that exclude nobody, that never let go, and identity across a fork."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from strawq.errors import BadInput
from strawq.pool import Pool
from strawq.storage import layout
from strawq.testing.scenes import image, prompts

WRITER = """
import errno, fcntl, sys, threading
def granted(fd, operation): return None
def no_locks(fd, operation): raise OSError(errno.ENOLCK, "No locks available")
flock = {"granted": granted, "enolck": no_locks, "real": fcntl.flock}[sys.argv[2]]
fcntl.flock = flock
from strawq.pool import Pool
from strawq.samples import Prompt
with Pool.open(sys.argv[1]) as pool:
    queue = pool.queue()
    pool.log._advisory.lost_race()  # contended from the start: the lock is wanted
    print("ready", flush=True)
    sys.stdin.readline()
    def submit(name):
        for i in range(8):
            pool.log._advisory.lost_race()
            queue.submit([Prompt(group_id=f"{name}.{i}", text="?")])
    threads = [threading.Thread(target=submit, args=(f"{sys.argv[3]}.{t}",)) for t in range(2)]
    [t.start() for t in threads]; [t.join() for t in threads]
print("done", pool.log.commits, pool.log.races_lost, flush=True)
"""


@pytest.mark.parametrize("flock", ["granted", "enolck", "real"])
def test_commits_do_not_rest_on_the_lock(tmp_path: Path, flock: str) -> None:
    """Two processes at once, with a lock that is always granted or cannot be had: everything is there once."""
    pool = Pool.init(tmp_path / "pool")
    command = [sys.executable, "-c", WRITER, str(tmp_path / "pool"), flock]
    writers = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        said = [writer.communicate(timeout=60)[0].split() for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert [words[0] for words in said] == ["done", "done"]
    queue = pool.queue()
    assert queue.counts().total == 32
    names = [queue.open(lease).group.prompt.group_id for lease in queue.acquire(100)]
    assert len(set(names)) == 32
    assert image(pool) == image(Pool.open(tmp_path / "pool"))
    pool.close()


def test_a_lock_that_never_lets_go_only_slows(tmp_path: Path) -> None:
    """Its holder died on another host, and the mount still believes in it."""
    with Pool.init(tmp_path / "pool") as pool:
        with open(tmp_path / "pool" / layout.COMMIT_LOCK, "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            for number in range(3):
                pool.log._advisory.lost_race()
                pool.publish_version(number)
        assert pool.policy_version() == "2"


def test_a_forked_childs_exit_releases_nothing(tmp_path: Path) -> None:
    """And the child cannot act under its parent's name."""
    with Pool.init(tmp_path / "pool") as pool:
        queue = pool.queue()
        queue.submit(prompts(["a", "b"]))
        lease = queue.acquire(1).leases[0]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    queue.acquire(1)
                except BadInput as error:
                    code = 0 if "fork" in str(error) else 2
                pool.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with Pool.open(tmp_path / "pool") as other:
            assert lease.session in other.log.refresh(lambda machine: list(machine.state.sessions))
            assert other.keeper.round() == [], "the parent lives, and so does its lease"
            assert other.queue().counts().fresh_leased == 1
        work = queue.open(lease)
        assert queue.yield_(work).accepted == (lease.task,)


def test_a_restarted_process_of_the_same_role_vouches_for_nothing(tmp_path: Path) -> None:
    """Liveness belongs to a process, not to its name: the killed one's lease ends although its successor beats."""
    script = (
        "import os, sys\nfrom strawq.pool import Pool\n"
        "pool = Pool.open(sys.argv[1], role='worker-1')\npool.queue().acquire(1)\nos._exit(9)\n"
    )
    Pool.init(tmp_path / "pool").queue().submit(prompts(["a"]))
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "pool")], check=False).returncode == 9
    with Pool.open(tmp_path / "pool", role="worker-1") as again:
        dead = again.log.refresh(lambda machine: list(machine.state.sessions))
        assert again.queue().acquire(1).status == "empty"
        assert again.keeper.round() == dead, "a dead pid on this kernel is known at once"
        assert len(again.queue().acquire(1)) == 1
        assert again.keeper.current not in dead


def test_file_times_decide_nothing_in_garbage_collection(tmp_path: Path) -> None:
    """Retention is by reach, not by age: files of 1970, and of the next century, stay exactly as long as others."""
    from strawq.garbage import collect_garbage

    with Pool.init(tmp_path / "pool") as pool:
        queue = pool.queue()
        queue.submit(prompts(["keep"], payload_bytes=30_000))
        dropped = queue.submit(prompts(["drop"], payload_bytes=30_000)).numbers[0]
        lease = next(lease for lease in queue.acquire(9) if lease.task == f"{dropped}-0")
        queue.drop(queue.open(lease), "dull")
        files = [path for path in (tmp_path / "pool").rglob("*") if path.is_file()]
        for number, path in enumerate(files):
            os.utime(path, (0, 0) if number % 2 else (4e9, 4e9))
        _, collected = collect_garbage(pool, wait_seconds=0)
        assert collected.by_reason.get("unreachable object", 0) == 1
        again = collect_garbage(pool, wait_seconds=0)[1]
        assert again.files == 0 and again.kept_files == 1


BUSY = """
import base64, json, sys, time
from strawq.pool import Pool
text = "[" + ",".join(["0.123456789012"] * 2_700_000) + "]"  # 40 MB
coded = b"A" * (200 << 20)
calls = (lambda: json.loads(text), lambda: base64.b64decode(coded))
took = []
for call in calls:
    begun = time.monotonic()
    call()
    took.append(time.monotonic() - begun)
lease_seconds = max(3.0, 6 * max(took))  # where the machine does other work, a call takes as long as that makes it take
pool = Pool.open(sys.argv[1], lease_seconds=lease_seconds)
lease = pool.queue().acquire(1).leases[0]
print(lease.session, flush=True)
end = time.monotonic() + lease_seconds + 1
while time.monotonic() < end:
    for call in calls:
        call()
assert pool.queue().yield_(pool.queue().open(lease)).accepted and pool.keeper.lost == []
print("kept", flush=True)
pool.queue().acquire(1)
print("again", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_heartbeat_goes_on_while_the_interpreter_is_held_and_ends_with_the_process(tmp_path: Path) -> None:
    """40 MB of JSON and 200 MB of base64 in single calls. The lease: three seconds, or six calls on a busy machine."""
    Pool.init(tmp_path / "pool").queue().submit(prompts(["a"]))
    busy = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(tmp_path / "pool")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert busy.stdout is not None
        session = busy.stdout.readline().strip()
        with Pool.open(tmp_path / "pool", lease_seconds=3.0, background=False) as observer:
            # Only silence counts here: the observer does not look at the process.
            observer.keeper._observer._known_dead = lambda _: False
            observer.keeper.require()
            said: list[str] = []
            reader = threading.Thread(target=lambda: said.append(busy.stdout.readline()) if busy.stdout else None)
            reader.start()
            while reader.is_alive():
                assert observer.keeper.round() == []
                reader.join(timeout=0.5)
            assert said == ["kept\n"] and busy.stdout.readline() == "again\n"
            busy.kill()
            busy.wait()
            expired: list[str] = []
            start = time.monotonic()
            while not expired and time.monotonic() < start + 120:
                expired = observer.keeper.round()
                time.sleep(observer.keeper.round_seconds)
            assert expired == [session]
    finally:
        busy.kill()
        busy.wait()
        for pipe in (busy.stdin, busy.stdout):
            if pipe is not None:
                pipe.close()
