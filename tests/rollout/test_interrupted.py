"""Processes that are told to end while a hook stands still."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import rollout_hooks as hooks
from scene import ListSource

from strawq import Pool, Prompt
from strawq_workers.daemon_threads import DaemonThreads
from strawq_workers.rollout.station import Station
from strawq_workers.worker import WorkerOptions, work

WAIT_S = 60.0
started: list["Command"] = []


class Command:
    """`strawq WORDS... --json` with the hooks of `standing_hooks`."""

    def __init__(self, *words):
        started.append(self)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "strawq", *map(str, words), "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )  # fmt: skip

    def says(self, *words):
        """In any order."""
        missing = list(words)
        for line in self.process.stderr:
            assert "Traceback" not in line
            for word in [word for word in missing if word in line][:1]:
                missing.remove(word)
            if not missing:
                return
        pytest.fail(f"it has ended, and not said {missing}")

    def tell(self, number):
        self.process.send_signal(number)

    def ended(self):
        out, err = self.process.communicate(timeout=WAIT_S)
        assert "Traceback" not in err and "Task was destroyed" not in err and out.count("\n") == 1, (out, err)
        return self.process.returncode, json.loads(out)


@pytest.fixture(autouse=True)
def none_is_left():
    yield
    while started:
        process = started.pop().process
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def rollout(engine, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"prompt {row}"}) + "\n" for row in range(100)))

    def start(hook, *words):
        return Command(
            "rollout", "--engine", engine.url, "--prompt-data", prompts, "--rollout-batch-size", 3, "--num-rollout", 3,
            "--n-samples-per-prompt", 4, "--rollout-max-response-len", 8, "--custom-rm-path", f"standing_hooks.{hook}",
            "--rollout-data-dir", tmp_path / "pool", *words,
        )  # fmt: skip

    return start


def nothing_leased(pool):
    with Pool.open(pool) as opened:
        counts = opened.queue().counts()
        return counts.fresh_leased == counts.partial_leased == 0 and counts.total > 0


@pytest.mark.parametrize(
    ("mode", "transport", "number", "code"),
    [("sync", "straw", signal.SIGINT, 130), ("fully-async", "object-store", signal.SIGTERM, 143)],
)
def test_one_signal_ends_a_rollout_whose_reward_stands_still(rollout, tmp_path, mode, transport, number, code):
    command = rollout("one_in_a_thread", "--mode", mode, "--rollout-data-transport", transport)
    command.says("rollout 0:", "stands")
    command.tell(number)
    ended, answer = command.ended()
    assert (ended, answer["error"]["kind"]) == (code, "interrupted" if code == 130 else "terminated")
    assert [trained["rollout_id"] for trained in answer["error"]["reached"]["rollouts"]] == [0]
    assert transport != "straw" or nothing_leased(tmp_path / "pool")


@pytest.mark.parametrize(
    ("hook", "number", "code"), [("on_the_loop", signal.SIGTERM, 143), ("never_cancelled", signal.SIGINT, 130)]
)
def test_a_second_signal_ends_a_rollout_at_once(rollout, hook, number, code):
    command = rollout(hook, "--rollout-data-transport", "straw")
    command.says("stands")
    command.tell(number)
    command.says("was cancelled" if hook == "never_cancelled" else "waiting for what is under way")
    command.tell(number)
    ended, answer = command.ended()
    assert ended == code and answer["error"]["reached"] == {"rollouts": []}


def worker(engine, tmp_path, hook):
    with Pool.init(tmp_path / "pool") as pool:
        pool.queue().submit([Prompt(group_id=f"g{at}", text=f"prompt {at}") for at in range(20)])
    return Command(
        "work", tmp_path / "pool", "--engine", engine.url, "--group-size", 8, "--max-new-tokens", 8, "--reward",
        f"standing_hooks:{hook}",
    )  # fmt: skip


def test_one_signal_ends_a_worker_all_of_whose_threads_stand_still(engine, tmp_path):
    command = worker(engine, tmp_path, "in_a_thread")
    command.says(*["stands"] * min(32, (os.cpu_count() or 1) + 4))
    command.tell(signal.SIGTERM)
    ended, answer = command.ended()
    assert (ended, answer["reason"]) == (0, "signal") and answer["counters"]["groups_yielded"] > 0
    assert nothing_leased(tmp_path / "pool")


def test_a_second_signal_ends_a_worker_whose_loop_stands_still(engine, tmp_path):
    command = worker(engine, tmp_path, "on_the_loop")
    command.says("stands")
    command.tell(signal.SIGINT)
    command.says("waiting for what is under way")
    command.tell(signal.SIGINT)
    ended, answer = command.ended()
    assert (ended, answer["error"]["kind"]) == (130, "interrupted")


def test_a_worker_leaves_its_session_though_a_tokenize_hook_stands_still(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("strawq_workers.worker.process.HOOKS_S", 0.1)
    hooks.reached.clear()
    hooks.release.clear()
    with Pool.init(tmp_path / "pool") as pool:
        pool.queue().submit([Prompt(group_id="g", text="prompt")])
    options = WorkerOptions(engines=(engine.url,), tokenize="rollout_hooks.blocks", abort_timeout_s=0.1)

    async def stopped():
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        stop = asyncio.Event()
        working = asyncio.ensure_future(work(tmp_path / "pool", options, stop=stop))
        assert await asyncio.to_thread(hooks.reached.wait, WAIT_S)
        stop.set()
        return await asyncio.wait_for(working, WAIT_S)

    try:
        assert asyncio.run(stopped()).reason == "signal"
        with Pool.open(tmp_path / "pool") as opened:
            counts = opened.queue().counts()
            assert counts.fresh_pending == 1 and counts.failed == 0 and len(opened.queue().dead_letters()) == 0
    finally:
        hooks.release.set()


def test_daemon_threads_make_every_call_and_are_not_waited_for():
    threads, gate, errors = DaemonThreads(), threading.Event(), []

    async def calls():
        asyncio.get_running_loop().set_default_executor(threads)
        assert await asyncio.gather(*(asyncio.to_thread(pow, at, 2) for at in range(200))) == [
            n * n for n in range(200)
        ]
        try:
            await asyncio.to_thread(int, "none")
        except ValueError as error:
            errors.append(error)
        standing = asyncio.ensure_future(asyncio.to_thread(gate.wait))
        assert await asyncio.to_thread(threading.active_count) <= 40
        standing.cancel()

    asyncio.run(calls())  # it ends, though the call stands still
    assert errors and not gate.is_set()
    gate.set()
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(int)


def test_a_station_is_not_closed_under_work_that_is_left():
    """As a caller leaves it who was interrupted twice."""
    station, begun = Station(ListSource()), threading.Event()

    async def left():
        begun.set()
        await asyncio.Event().wait()

    work = station.loop.start(left())
    assert begun.wait(WAIT_S)
    station.close()
    assert work.cancelled()
