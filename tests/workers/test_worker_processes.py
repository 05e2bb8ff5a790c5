"""Real worker processes against a real engine process: stopped, killed, frozen."""

import json
import signal
import time

import msgspec
import pytest

from strawq import Pool, Prompt
from strawq.errors import TryAgain
from strawq.handles import Held
from strawq_workers.processes import Children
from strawq_workers.worker import WorkerOptions

LEASE_S = 1.0
WAIT_S = 40.0


class Theatre:
    def __init__(self, pool: Pool, children: Children, url: str) -> None:
        self.pool, self.queue, self.children, self.url = pool, pool.queue(), children, url
        self.count = 0

    def worker(self, **changes):
        self.count += 1
        usual = {
            "engines": (self.url,),
            "samples": 2,
            "max_new_tokens": 40,
            "ignore_eos": True,
            "concurrency": 8,
            "lease_seconds": LEASE_S,
            "save_tokens": 4,
            "abort_timeout_s": 10.0,
        }
        options = WorkerOptions(**{**usual, **changes})
        name = f"worker-{self.count}"
        return self.children.start(
            name, ["-m", "strawq_workers.worker", self.pool.path, "-"], stdin=msgspec.json.encode(options)
        )

    def until(self, what, probe):
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            found = probe()
            if found:
                return found
            self.children.require_alive()
            time.sleep(0.02)
        pytest.fail(f"not within {WAIT_S} s: {what}")

    def held_by(self, pid):
        def view(machine):
            state = machine.state
            own = {session.id for session in state.sessions.values() if session.pid == pid}
            return [
                Held(task, {part.object: state.objects[part.object] for part in task.parts})
                for task in state.branch.queues["rollout"].tasks.values()
                if task.session in own
            ]

        return self.pool.log.refresh(view)

    def saved_by(self, pid):
        return [held for held in self.held_by(pid) if held.task.tokens]

    def ready(self):
        """Groups that are ready, read and verified, by task."""
        batch = self.queue.take_batch(100, consumer="audit", fewer=True).batch
        return {group.task_id: group for group in self.queue.read_batch(batch)} if batch else {}


@pytest.fixture
def theatre(tmp_path, request):
    """`param`: tokens per second. What a test does in mid-generation, it must do before 40 are made."""
    pace = str(getattr(request, "param", 20))
    (tmp_path / "logs").mkdir()
    with Children(tmp_path / "logs") as children, Pool.init(tmp_path / "pool", lease_seconds=LEASE_S) as pool:
        engine = children.start(
            "engine", ["-m", "strawq_workers.engine", "--tokens-per-second", pace, "--weight-version", "1"]
        )
        pool.queue().submit([Prompt(group_id=f"g{i}", text=f"prompt {i}") for i in range(3)])
        pool.queue().seal()
        yield Theatre(pool, children, engine.first_line(30))


def _log(child):
    return child.log.read_text()


def test_sigterm_gives_leases_and_prefixes_back_at_once_and_exits_well(theatre):
    worker = theatre.worker(save_tokens=0)
    theatre.until("leases", lambda: len(theatre.held_by(worker.pid)) == 3)
    theatre.until("tokens flow", lambda: _generated(theatre) > 20)
    worker.signal(signal.SIGTERM)
    summary = worker.answer(20)
    assert summary["reason"] == "signal" and summary["counters"]["groups_yielded"] == 3
    counts = theatre.queue.counts()
    assert counts.partial_pending == 3 and counts.partial_leased == counts.fresh_leased == 0
    assert not [s for s in theatre.pool.inspect().sessions if s.pid == worker.pid]
    assert theatre.pool.inspect().queues["rollout"].expirations == 0
    again = theatre.worker().answer(WAIT_S)
    assert again["reason"] == "sealed" and again["counters"]["groups_accepted"] == 3
    assert again["counters"]["tokens_resumed"] == summary["counters"]["tokens_generated"] > 0
    assert again["counters"]["tokens_generated"] == 3 * 80 - again["counters"]["tokens_resumed"]


def _generated(theatre):
    import urllib.request

    with urllib.request.urlopen(theatre.url + "/server_info", timeout=10) as answer:
        return json.load(answer)["generated_tokens"]


def test_a_second_signal_ends_the_process_at_once(theatre):
    slow = theatre.worker(abort_timeout_s=600.0)
    theatre.until("leases", lambda: theatre.held_by(slow.pid))
    # An engine that answers nothing any more makes the good end long.
    theatre.children._children[0].freeze()
    slow.signal(signal.SIGTERM)
    theatre.until("the first signal is logged", lambda: "SIGTERM: giving back" in _log(slow))
    slow.signal(signal.SIGTERM)
    assert slow.wait(WAIT_S) == 128 + signal.SIGTERM


def test_a_killed_workers_prefixes_are_resumed_by_another_one(theatre):
    victim = theatre.worker(max_new_tokens=1000)
    theatre.until("progress is saved", lambda: len(theatre.saved_by(victim.pid)) == 3)
    victim.freeze()
    saved = {group.task_id: group for group in map(theatre.pool.payloads.load, theatre.saved_by(victim.pid))}
    victim.kill()
    summary = theatre.worker().answer(WAIT_S)
    resumed = sum(len(sample.tokens) for group in saved.values() for sample in group.samples)
    assert summary["counters"]["tokens_resumed"] == resumed > 0
    assert theatre.pool.inspect().queues["rollout"].expirations == len(saved)
    ready = theatre.ready()
    assert len(ready) == 3
    for task, group in saved.items():
        final = {sample.index: sample for sample in ready[task].samples}
        for sample in group.samples:
            assert final[sample.index].tokens[: len(sample.tokens)].tolist() == sample.tokens.tolist()


@pytest.mark.parametrize("theatre", [10], indirect=True)
def test_a_worker_frozen_past_its_lease_wakes_to_stale_leases_and_goes_on(theatre):
    sleeper = theatre.worker(max_groups=2)
    theatre.until("progress is saved", lambda: len(theatre.saved_by(sleeper.pid)) == 2)
    sleeper.freeze()
    taken = {held.task.id for held in theatre.held_by(sleeper.pid)}
    other = theatre.worker(max_groups=1)
    theatre.until("the sleeper's leases expire", lambda: not theatre.held_by(sleeper.pid))
    theatre.until("one of its groups is another's", lambda: taken & {h.task.id for h in theatre.held_by(other.pid)})
    sleeper.thaw()
    first, second = sleeper.answer(WAIT_S), other.answer(WAIT_S)
    assert first["counters"]["groups_stale"] == len(taken) and first["counters"]["sessions_lost"] == 1
    assert _log(sleeper).count("was taken for dead") == 1, "said once, by whoever notices first"
    assert first["counters"]["groups_failed"] == second["counters"]["groups_failed"] == 0
    assert first["counters"]["groups_accepted"] + second["counters"]["groups_accepted"] == 3
    assert theatre.pool.inspect().queues["rollout"].accepted == 3 and len(theatre.ready()) == 3


def test_children_that_die_are_named_with_the_end_of_their_log(tmp_path):
    with Children(tmp_path) as children:
        child = children.start("bad", ["-c", "import sys; sys.exit('no such thing')"])
        with pytest.raises(TryAgain, match="bad ended at its start"):
            child.first_line(20)
        child.wait(10)
        child.expected_dead = False
        with pytest.raises(TryAgain, match="no such thing"):
            children.require_alive()


def test_a_child_that_was_killed_is_said_to_be_and_what_it_logged_is_not_its_cause(tmp_path):
    with Children(tmp_path) as children:
        child = children.start("engine", ["-c", "import sys, time; print('stand-in', file=sys.stderr, flush=True); "
                                          "print('up', flush=True); time.sleep(600)"])  # fmt: skip
        assert child.first_line(20) == "up"
        child.kill()
        child.expected_dead = False
        with pytest.raises(TryAgain, match=r"engine died \(killed by SIGKILL\); the last that it logged: stand-in"):
            children.require_alive()


def test_children_are_ended_by_an_error_in_the_block_even_when_frozen(tmp_path):
    started = []

    def block():
        with Children(tmp_path) as children:
            for name in ("one", "two"):
                child = children.start(name, ["-c", "print('up', flush=True); import time; time.sleep(600)"])
                assert child.first_line(20) == "up"
                started.append(child)
            started[1].freeze()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert all(child._process.returncode is not None for child in started)
