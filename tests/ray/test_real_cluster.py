"""`strawq work --ray` on a real Ray cluster of several local nodes (`make test-ray`): nodes come, die and are
stopped."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strawq import Pool, Prompt
from strawq_workers.processes import Children

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed here; `make test-ray` runs this in an environment that has it",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 2.0
WAIT_S = 150.0
STORE_BYTES = 80 * 1024 * 1024
PROMPTS, GROUP, TOKENS = 24, 2, 48
# A node counts as dead after so long without a sign: Ray's own default is 15 s and more.
SYSTEM = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without a CPU; tests add the nodes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False, "_system_config": SYSTEM}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield made
        finally:
            made.shutdown()


class Theatre:
    def __init__(self, cluster: Any, pool: Pool, children: Children, directory: Path) -> None:
        self.cluster, self.pool, self.children, self.directory = cluster, pool, children, directory
        self.queue = pool.queue()
        self.nodes: list[Any] = []
        engine = children.start("engine", ["-m", "strawq_workers.engine", "--tokens-per-second", "60"])
        self.url = engine.first_line(30)
        self.queue.submit([Prompt(group_id=f"g{i}", text=f"prompt {i}") for i in range(PROMPTS)])
        self.queue.seal()
        self.stack = contextlib.ExitStack()

    def add_node(self) -> Any:
        self.nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES))
        return self.nodes[-1]

    def kill_node(self, node: Any) -> None:
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def launch(self, *more: str, address: str = "") -> Launched:
        words = ["-m", "strawq", "-v", "work", self.pool.path, "--json", "--ray"]
        words += ["--ray-address", address or self.cluster.address, "--engine", self.url]
        words += ["--concurrency", "8", "--group-size", str(GROUP), "--max-new-tokens", str(TOKENS), "--ignore-eos"]
        words += ["--lease-seconds", str(LEASE_S), "--save-tokens", "8", "--abort-timeout-s", "10", *more]
        return self.stack.enter_context(Launched(words, self.directory / "launcher.log"))

    def workers(self) -> dict[int, int]:
        """Pid of each worker that has a lease, to the pid of the raylet that it belongs to."""
        found = {}
        for session in self.pool.inspect().sessions:
            if session.role == "worker" and session.leases:
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{session.pid}/stat").read_text()
                    found[session.pid] = int(text.rpartition(")")[2].split()[1])
        return found

    def raylets(self) -> dict[int, Any]:
        return {node.all_processes["raylet"][0].process.pid: node for node in self.nodes}

    def until(self, what: str, probe: Callable[[], Any], launched: Launched) -> Any:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            found = probe()
            if found:
                return found
            if launched.process.poll() is not None:
                pytest.fail(f"the launcher ended before: {what}\n{launched.said()}")
            time.sleep(0.05)
        return pytest.fail(f"not within {WAIT_S} s: {what}\n{launched.said()}")

    def ready(self) -> int:
        return self.queue.counts().ready

    def saved(self) -> bool:
        return self.queue.counts().partial_leased > 0


class Launched:
    """`strawq work --ray` as a process."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                stdout=subprocess.PIPE,
                stderr=err,
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def answer(self, code: int = 0) -> dict[str, Any]:
        out, _ = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == code, self.said()
        found: dict[str, Any] = json.loads(out)
        return found

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def theatre(cluster: Any, tmp_path: Path) -> Iterator[Theatre]:
    (tmp_path / "logs").mkdir()
    with Children(tmp_path / "logs") as children, Pool.init(tmp_path / "pool", lease_seconds=LEASE_S) as pool:
        made = Theatre(cluster, pool, children, tmp_path)
        try:
            yield made
        finally:
            made.stack.close()
            for node in list(made.nodes):
                cluster.remove_node(node, allow_graceful=False)


def test_each_node_with_a_cpu_has_a_worker_and_everything_is_accepted(theatre: Theatre) -> None:
    for _ in range(3):
        theatre.add_node()
    launched = theatre.launch()
    raylets = theatre.until(
        "three workers hold leases", lambda: len(theatre.workers()) == 3 and set(theatre.workers().values()), launched
    )
    assert raylets == set(theatre.raylets())  # none on the head, which has no CPU
    summary = launched.answer()
    assert (summary["reason"], summary["nodes"], summary["lost"], summary["failed"]) == ("sealed", 3, 0, 0)
    assert summary["groups_accepted"] == PROMPTS == theatre.ready()
    assert len(summary["workers"]) == 3
    made = sum(worker["counters"]["tokens_generated"] for worker in summary["workers"])
    assert made == PROMPTS * GROUP * TOKENS


def test_a_node_that_dies_is_taken_over_and_one_that_joins_gets_a_worker(theatre: Theatre) -> None:
    first, _ = theatre.add_node(), theatre.add_node()
    launched = theatre.launch()
    theatre.until(
        "two workers hold leases with saved prefixes", lambda: len(theatre.workers()) == 2 and theatre.saved(), launched
    )
    theatre.kill_node(first)
    theatre.add_node()
    theatre.until(
        "the node that joined has a worker with leases",
        lambda: set(theatre.workers().values()) == set(theatre.raylets()),
        launched,
    )
    summary = launched.answer()
    assert (summary["reason"], summary["nodes"], summary["lost"]) == ("sealed", 3, 1)
    assert theatre.ready() == PROMPTS
    assert theatre.pool.inspect().queues["rollout"].expirations > 0


def test_a_worker_that_is_killed_is_replaced_on_its_node(theatre: Theatre) -> None:
    for _ in range(2):
        theatre.add_node()
    launched = theatre.launch()
    before = theatre.until(
        "two workers hold leases", lambda: len(theatre.workers()) == 2 and theatre.workers(), launched
    )
    victim = min(before)
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        now = theatre.workers()
        return any(pid not in before and raylet == before[victim] for pid, raylet in now.items())

    theatre.until("its node has another one with leases", replaced, launched)
    summary = launched.answer()
    assert (summary["lost"], summary["nodes"], theatre.ready()) == (1, 2, PROMPTS)


def test_sigterm_gives_all_leases_and_prefixes_back(theatre: Theatre) -> None:
    for _ in range(2):
        theatre.add_node()
    launched = theatre.launch()
    theatre.until(
        "two workers hold leases with saved prefixes", lambda: len(theatre.workers()) == 2 and theatre.saved(), launched
    )
    launched.process.send_signal(signal.SIGTERM)
    summary = launched.answer()
    assert (summary["reason"], len(summary["workers"]), summary["lost"]) == ("signal", 2, 0)
    counts = theatre.queue.counts()
    assert counts.partial_leased == counts.fresh_leased == 0 and counts.partial_pending > 0
    assert not [session for session in theatre.pool.inspect().sessions if session.role == "worker"]
    assert theatre.pool.inspect().queues["rollout"].expirations == 0


def test_when_every_node_is_lost_the_command_says_so(theatre: Theatre) -> None:
    node = theatre.add_node()
    launched = theatre.launch()
    theatre.until("a worker holds leases", lambda: theatre.workers(), launched)
    theatre.kill_node(node)
    error = launched.answer(4)["error"]
    assert error["kind"] == "try_again" and "all workers are lost" in error["message"]


def test_more_nodes_than_slots_are_refused_at_the_start(theatre: Theatre) -> None:
    for _ in range(2):
        theatre.add_node()
    error = theatre.launch("--concurrency", "3").answer(2)["error"]
    assert "C·E = 3 samples is less than W·G = 2·2 = 4" in error["message"]
    assert theatre.queue.counts().fresh_pending == PROMPTS


def test_an_address_without_a_cluster_is_named(theatre: Theatre) -> None:
    error = theatre.launch(address="127.0.0.1:9").answer(4)["error"]
    assert error["kind"] == "try_again" and "no Ray cluster at 127.0.0.1:9" in error["message"]
