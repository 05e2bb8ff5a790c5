"""The launcher: keeps one worker on each alive node, divides the engines' slots over them, ends when the work does.

The rule: a worker that is gone is replaced while its node lives, and the shares of all are divided anew whenever the
number of workers changes; its leases need no care here, for they expire and others take them. A worker that ended by
itself is not started again. A division that would leave a worker without room for one group is refused at the start;
later it only keeps further nodes waiting. When nobody is left to do the work, that is an error and not an end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from strawq import errors
from strawq.errors import StrawqError, TryAgain
from strawq_workers.admission.slots import divide_slots, total_slots
from strawq_workers.on_ray.nodes import Cluster, Ended, Failed, Node, Outcome
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.process import open_fleet

log = logging.getLogger("strawq.ray")

POLL_S = 1.0
LOSSES_MAX = 5
"""Workers in a row that one node may lose, each within `SETTLED_S` of its start, before it gets no other."""
SETTLED_S = 60.0
RESTART_S = 1.0
RESTART_MAX_S = 30.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ClusterSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended. `workers`: the summaries of those that ended by themselves, as JSON values; `lost`, `failed`: how
    many others there were; `nodes`: on how many nodes there was a worker at some time; `exit_code`: that of the first
    that failed."""

    reason: str
    groups_accepted: int
    workers: list[dict[str, Any]]
    failed: int
    lost: int
    nodes: int
    failures: list[str]
    exit_code: int = 0


class _Seat(msgspec.Struct):
    node: Node
    handle: Any
    started: float
    share: tuple[int, int] = (0, 0)


class Launcher:
    """Runs workers on a cluster. `engines`: E, as counted at the start."""

    def __init__(
        self, cluster: Cluster, options: WorkerOptions, engines: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._engines = engines
        self._clock = clock
        self._seats: dict[str, _Seat] = {}
        self._barred: dict[str, str] = {}
        self._losses: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._used: set[str] = set()
        self._waiting: set[str] = set()
        self._failed: list[Failed] = []
        self._ended: list[dict[str, Any]] = []
        self._lost = 0
        self._over = False
        self.stopping = False
        self._told: set[str] = set()

    def stop(self) -> None:
        """Let every worker give back what it has; `run` returns when they have ended. Safe in a signal handler."""
        self.stopping = True

    def kill(self) -> None:
        """End every worker at once; leases expire by themselves."""
        for seat in list(self._seats.values()):
            self._cluster.kill(seat.handle)
        self._seats.clear()

    def run(self) -> ClusterSummary:
        """Blocks until the work is done or `stop`. Raises `BadInput` if there are too few slots for the nodes, the
        first worker's error if none is left that could go on, `TryAgain` if all are lost."""
        nodes = self._cluster.nodes()
        if not nodes:
            raise TryAgain("the Ray cluster has no alive node with a CPU: start one (`ray start`), then run this again")
        self._check(len(nodes))
        try:
            self._fill(nodes)
            while self._turn():
                pass
        finally:
            self.kill()
        return ClusterSummary(
            reason="signal" if self.stopping else "sealed" if self._over else "ended",
            groups_accepted=sum(summary["counters"]["groups_accepted"] for summary in self._ended),
            workers=self._ended,
            failed=len(self._failed),
            lost=self._lost,
            nodes=len(self._used),
            failures=[failed.message for failed in self._failed],
            exit_code=self._failed[0].exit_code if self._failed else 0,
        )

    def _turn(self) -> bool:
        """One look at everything; false when it is over."""
        if self.stopping:
            self._pass_stop_on()
        by_handle = {id(seat.handle): seat for seat in self._seats.values()}
        for handle, outcome in self._cluster.outcomes([seat.handle for seat in self._seats.values()], POLL_S):
            self._take(by_handle[id(handle)], outcome)
        if self.stopping or self._over:
            return bool(self._seats)
        nodes = self._cluster.nodes()
        self._fill(nodes)
        return bool(self._seats) or self._somebody_is_due(nodes)

    def _somebody_is_due(self, nodes: list[Node]) -> bool:
        """No worker runs. True if one will be started again; false if each ended well; else the error."""
        if any(node.id not in self._barred for node in nodes):
            return True
        if self._failed:
            raise _error_of(self._failed[0])
        if self._lost and not nodes:
            raise TryAgain(
                f"all workers are lost: the cluster has no alive node with a CPU any more ({self._lost} were lost). "
                "What they had saved is in the pool; start nodes, then run this again"
            )
        if any(node_id in self._losses for node_id in self._barred):
            raise TryAgain(f"all workers are lost: {'; '.join(sorted(set(self._barred.values())))}")
        return False

    def _fill(self, nodes: list[Node]) -> None:
        """Start a worker on each node that has none and may have one, and divide the shares if anything changed."""
        fresh = self._fresh(nodes)
        order = sorted([*(seat.node for seat in self._seats.values()), *fresh])
        for index, node in enumerate(order):
            share = (len(order), index)
            seat = self._seats.get(node.id)
            if seat is None:
                self._used.add(node.id)
                options = msgspec.structs.replace(self._options, workers=share[0], worker_index=share[1])
                self._seats[node.id] = _Seat(node, self._cluster.start(node, options), self._clock(), share)
                log.info("a worker is started on %s, %d of %d", node, index + 1, len(order))
            elif seat.share != share:
                seat.share = share
                self._cluster.divide(seat.handle, *share)

    def _fresh(self, nodes: list[Node]) -> list[Node]:
        now, most = self._clock(), self._most()
        fresh: list[Node] = []
        for node in nodes:
            if node.id in self._seats or node.id in self._barred or now < self._not_before.get(node.id, now):
                continue
            if most and len(self._seats) + len(fresh) >= most:
                if node.id not in self._waiting:
                    log.warning("no worker on %s: %d workers have room for one group each, and no more", node, most)
                self._waiting.add(node.id)
                continue
            self._waiting.discard(node.id)
            fresh.append(node)
        return fresh

    def _take(self, seat: _Seat, outcome: Outcome) -> None:
        node = seat.node
        del self._seats[node.id]
        if isinstance(outcome, Ended):
            self._ended.append(outcome.summary)
            self._losses.pop(node.id, None)
            self._barred[node.id] = f"the worker on {node} has ended"
            self._over = self._over or outcome.summary.get("reason") == "sealed"
            return
        if isinstance(outcome, Failed):
            self._failed.append(outcome)
            self._losses.pop(node.id, None)
            self._barred[node.id] = f"the worker on {node} has failed"
            log.error("the worker on %s ended: %s; others go on with what it had saved", node, outcome.message)
            return
        self._lost += 1
        log.warning("the worker on %s is lost (%s); its leases expire and others go on", node, outcome.reason)
        now = self._clock()
        losses = 1 if now - seat.started > SETTLED_S else self._losses.get(node.id, 0) + 1
        self._losses[node.id] = losses
        self._not_before[node.id] = now + min(RESTART_MAX_S, RESTART_S * 2 ** (losses - 1))
        if losses >= LOSSES_MAX:
            self._barred[node.id] = f"{node} has lost {losses} workers in a row, the last one: {outcome.reason}"
            log.error("%s; it gets no other", self._barred[node.id])

    def _pass_stop_on(self) -> None:
        for seat in self._seats.values():
            if seat.node.id not in self._told:
                self._told.add(seat.node.id)
                self._cluster.stop(seat.handle)

    def _check(self, workers: int) -> None:
        if not self._options.max_groups:
            divide_slots(total_slots(self._options.concurrency, self._engines), self._options.samples, workers)

    def _most(self) -> int:
        """Workers for whom there is room; 0 if their shares are set by hand."""
        if self._options.max_groups:
            return 0
        return total_slots(self._options.concurrency, self._engines) // self._options.samples


def _error_of(failed: Failed) -> StrawqError:
    kinds = {one.kind: one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, StrawqError)}
    return kinds.get(failed.kind, StrawqError)(f"no worker is left; the first one ended: {failed.message}")


def run_on_ray(pool: str, options: WorkerOptions, address: str = "") -> ClusterSummary:
    """Work on the pool in directory `pool`, which every node sees under the same path, with a worker on each alive node
    of the Ray cluster at `address` (empty: `RAY_ADDRESS`, or the one that runs on this machine). Blocks.

    Raises `BadInput` (no ray, too few slots, options), `TryAgain` (no cluster, all workers lost), `EngineUnavailable`,
    or the first worker's error when none is left."""
    from strawq_workers.on_ray.cluster import connected

    path = str(Path(pool).resolve())
    with connected(path, address) as cluster:
        launcher = Launcher(cluster, options, asyncio.run(_count_engines(options)))
        with _signals(launcher):
            return launcher.run()


async def _count_engines(options: WorkerOptions) -> int:
    """E: engines as a worker would count them, those behind routers too."""
    fleet = await open_fleet(options, asyncio.Event())
    assert fleet is not None, "nobody has set the stop event"
    async with fleet:
        return len(fleet.engines)


@contextmanager
def _signals(launcher: Launcher) -> Iterator[None]:
    def on_signal(number: int, _frame: FrameType | None) -> None:
        if launcher.stopping:
            launcher.kill()
            raise SystemExit(128 + number)
        log.warning(
            "%s: workers give back what they have; a second signal ends them at once", signal.Signals(number).name
        )
        launcher.stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
