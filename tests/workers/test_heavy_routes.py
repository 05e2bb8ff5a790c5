"""Heartbeats of a worker that decodes 40 MB of routes after another, with a short lease."""

import itertools
import time
from pathlib import Path

import msgspec
import numpy as np
from heavy_engine import LAYERS, OUTPUT, TOPK

from strawq import Pool, Prompt
from strawq_workers.processes import Children
from strawq_workers.worker import WorkerOptions

LEASE_S = 2.0
PROMPT_TOKENS = 20_000
"""30.7 MB of R3 rows, 41 MB as base64."""
GROUPS, SAMPLES = 2, 2
WAIT_S = 120.0


def test_a_worker_that_decodes_40_mb_of_routes_keeps_its_leases_and_its_heart_beats(tmp_path, record_property):
    (tmp_path / "logs").mkdir()
    here = Path(__file__).parent
    with Children(tmp_path / "logs") as children, Pool.init(tmp_path / "pool", lease_seconds=LEASE_S) as pool:
        engine = children.start("engine", [str(here / "heavy_engine.py"), str(PROMPT_TOKENS)])
        queue = pool.queue()
        queue.submit([Prompt(group_id=f"g{i}", tokens=np.arange(PROMPT_TOKENS) % 500) for i in range(GROUPS)])
        queue.seal()
        pool.keeper.require()  # this process watches, and takes for dead whoever stands still for a lease
        options = WorkerOptions(
            engines=(engine.first_line(30),), samples=SAMPLES, max_new_tokens=OUTPUT, routed_experts=True,
            lease_seconds=LEASE_S, concurrency=GROUPS * SAMPLES, engine_timeout_s=60.0,
        )  # fmt: skip
        worker = children.start(
            "worker", ["-m", "strawq_workers.worker", pool.path, "-"], stdin=msgspec.json.encode(options)
        )
        longest, usual = longest_standstills(pool, worker)
        summary = worker.answer(WAIT_S)
        gap_ms, lag_ms = round(longest * 1000), round(summary["counters"]["loop_lag_ms_max"])
        record_property("longest_standstill_ms", gap_ms)
        print(
            f"longest standstill of the heartbeat {gap_ms} ms of a lease of {LEASE_S:g} s, loop lag at most {lag_ms} ms"
        )
        assert summary["counters"]["groups_accepted"] == GROUPS and summary["counters"]["sessions_lost"] == 0
        assert pool.inspect().queues["rollout"].expirations == 0
        # A busy machine keeps our own heart waiting too, which decodes nothing.
        assert longest - usual < LEASE_S / 2
        batch = queue.take_batch(GROUPS).batch
        for group in queue.read_batch(batch):
            for sample in group.samples:
                assert sample.r3.shape == (PROMPT_TOKENS + OUTPUT - 1, LAYERS, TOPK)


class Standstill:
    """The longest time for which a heartbeat stood still, from its first beat until it has left."""

    def __init__(self) -> None:
        self.longest, self._beat, self._since = 0.0, b"", 0.0

    def look(self, beat: bytes) -> bool:
        """Whether it is over: there was one, and there is none now."""
        now = time.monotonic()
        if beat and self._beat:
            self.longest = max(self.longest, now - self._since)
        if beat != self._beat:
            was, self._beat, self._since = self._beat, beat, now
            return bool(was and not beat)
        return False


def longest_standstills(pool, worker) -> tuple[float, float]:
    """Seconds for which the worker's heartbeat, and the one of this process, stood still at most."""
    theirs, ours = Standstill(), Standstill()
    for look in itertools.count():
        paths = [path for path in (Path(pool.path) / "sessions").glob("*.json") if ".work." not in path.name]
        (own,) = (path.read_bytes() for path in paths if pool.keeper.current in path.name)
        others = [path.read_bytes() for path in paths if pool.keeper.current not in path.name]
        ours.look(own)
        if theirs.look(others[0] if others else b"") or worker.poll() is not None or look > WAIT_S / 0.01:
            return theirs.longest, ours.longest
        time.sleep(0.01)
    raise AssertionError
