"""The cluster port on a real Ray cluster.

The rule: what goes to an actor and comes back is bytes of JSON, so that no class of ours has to be the same on both
sides; an actor is pinned to its node, is never restarted by Ray (a worker that comes back has another session), and
needs no CPU of Ray's books: the node's CPUs may all be promised to others, and a worker mostly waits.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from strawq.errors import BadInput, TryAgain
from strawq_workers.on_ray.actor import WorkerActor
from strawq_workers.on_ray.nodes import Ended, Failed, Lost, Node, Outcome, nodes_of
from strawq_workers.worker.options import WorkerOptions

log = logging.getLogger("strawq.ray")

_DECODER = msgspec.json.Decoder(Ended | Failed)
REASON_MAX = 200
CONNECT_S = 10.0


class _Handle:
    """An actor and the promise of how it ends."""

    def __init__(self, actor: Any, ending: Any) -> None:
        self.actor = actor
        self.ending = ending


class RayCluster:
    """Workers of the pool at `pool` as actors. `ray` is the imported and connected module."""

    def __init__(self, ray: Any, pool: str) -> None:
        self._ray = ray
        self._pool = pool

    def nodes(self) -> list[Node]:
        return nodes_of(self._ray.nodes())

    def start(self, node: Node, options: WorkerOptions) -> _Handle:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        placed = self._ray.remote(WorkerActor).options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False),
        )
        actor = placed.remote(self._pool, msgspec.json.encode(options), log.getEffectiveLevel())
        return _Handle(actor, actor.run.remote())

    def outcomes(self, handles: Sequence[_Handle], seconds: float) -> list[tuple[_Handle, Outcome]]:
        if not handles:
            time.sleep(seconds)
            return []
        by_ending = {handle.ending: handle for handle in handles}
        # The first one that is ready ends the wait; others that are ready by then are taken by the next call.
        ready, _ = self._ray.wait(list(by_ending), num_returns=1, timeout=seconds)
        return [(by_ending[ending], self._outcome(ending)) for ending in ready]

    def _outcome(self, ending: Any) -> Outcome:
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            outcome: Outcome = _DECODER.decode(self._ray.get(ending))
            return outcome
        except RayTaskError as error:  # it raised what is not an error of strawq's: a fault, with its traceback
            log.error("a worker ended by a fault: %s", error)
            return Failed("fault", 1, _line(error.cause if error.cause is not None else error))
        except RayActorError as error:
            return Lost(_line(error))
        except RayError as error:
            return Lost(_line(error))

    def divide(self, handle: _Handle, workers: int, index: int) -> None:
        handle.actor.divide.remote(workers, index)

    def stop(self, handle: _Handle) -> None:
        handle.actor.stop.remote()

    def kill(self, handle: _Handle) -> None:
        self._ray.kill(handle.actor)


def _check_address(address: str) -> None:
    """Ray asks an address that nobody answers at for minutes, and does not take all that it accepts elsewhere."""
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise BadInput(
            f"Ray address {address!r} is not of the form host:port, which `ray start` prints; run this on a node of "
            "the "
            "cluster"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise TryAgain(f"no Ray cluster at {address}: {error}; start one with `ray start --head`") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:REASON_MAX] or type(error).__name__


@contextmanager
def connected(pool: str, address: str = "") -> Iterator[RayCluster]:
    """The Ray cluster at `address` (empty: `RAY_ADDRESS`, or the one that runs on this machine). A process that is
    connected already stays so. Raises `BadInput` without ray, `TryAgain` without a cluster."""
    try:
        import ray
    except ImportError as error:
        raise BadInput(
            f"--ray needs the package ray, which is not installed: pip install 'strawq[ray]' ({error})"
        ) from error
    if ray.is_initialized():
        yield RayCluster(ray, pool)
        return
    _check_address(address or os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(address=address or "auto", logging_level=logging.WARNING, log_to_driver=True)
    except ConnectionError as error:
        named = f"at {address}" if address else "found: RAY_ADDRESS is not set, and none runs on this machine"
        raise TryAgain(
            f"no Ray cluster {named}; start one with `ray start --head`, or name it ({_line(error)})"
        ) from error
    except ValueError as error:
        raise BadInput(f"Ray address {address!r}: {_line(error)}") from error
    try:
        yield RayCluster(ray, pool)
    finally:
        ray.shutdown()
