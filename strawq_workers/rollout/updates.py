"""Weights change while nothing is generated, and everybody knows under which version it goes on.

The rule: generation stands still before the block that updates the engines begins, work in hand keeps its place, and it
goes on after the block whatever became of it: each token's version is what the engine says, so tokens are never taken
for those of another policy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from strawq.model import UNVERSIONED, policy_number
from strawq.pool import Pool
from strawq_workers.rollout.in_background import InBackground
from strawq_workers.rollout.on_pool import OnPool, pause_workers
from strawq_workers.rollout.settings import StrawSource, straw_source
from strawq_workers.rollout.station import station_of

log = logging.getLogger("strawq.rollout")

PAUSE_S = 60.0


@contextlib.contextmanager
def weight_update(data_source: Any, version: str | int, *, timeout_s: float = PAUSE_S) -> Iterator[None]:
    """While the block runs, rollouts of this data source stand still; afterwards they go on under `version`, or under
    the old one if the block raises.

    Workers that do not answer within `timeout_s` are named in the log and not waited for."""
    running, straw, reason = station_of(data_source).running, straw_source(data_source), f"weights {version}"
    by_hand = isinstance(running, OnPool) and straw is not None and _paused_by_hand(straw.pool)
    reached = ""
    try:
        # Also a pause of which nothing comes is ended: what waits for it may have failed after it was there.
        if isinstance(running, InBackground):
            if not running.pause(reason, timeout_s):
                log.warning("generation has not stood still within %g s", timeout_s)
        elif isinstance(running, OnPool) and straw is not None:
            pause_workers(straw, reason, timeout_s)
        yield
        reached = str(version)
    finally:
        if isinstance(running, InBackground):
            running.resume(reached)
        elif isinstance(running, OnPool) and straw is not None and not by_hand:
            straw.pool.resume(_onward(straw.pool, reached) or None, branch=straw.branch)
        elif straw is not None:
            _publish(straw, _onward(straw.pool, reached))


def _publish(straw: StrawSource, version: str) -> None:
    """Tell the pool of the version, and end a pause that a trainer before this one did not live to end. One of an
    operator stays."""
    pool = straw.pool
    pause = pool.inspect().paused
    if pause is not None and not _paused_by_hand(pool):
        log.warning("going on after a pause (%s) whose process has died", pause.reason)
        pool.resume(version or None, branch=straw.branch)
    elif version:
        pool.publish_version(version, branch=straw.branch)


def _paused_by_hand(pool: Pool) -> bool:
    """Whether somebody has paused the pool who is not a process of a training that has died: it is theirs to end."""
    seen = pool.inspect()
    live = {"", *(session.id for session in seen.sessions)} - {pool.keeper.current}
    return seen.paused is not None and seen.paused.session in live


def _onward(pool: Pool, reached: str) -> str:
    """The version to publish; empty if the pool has it already or is beyond it, as after a trainer that was lost. A
    word says where it is only if no number was published before."""
    number, highest = policy_number(reached), pool.highest_version()
    if UNVERSIONED != number < highest:
        log.warning(
            "policy version %d is not told to the pool, where %d was published: ages count from that", number, highest
        )
    if number == highest == UNVERSIONED:
        return reached if pool.policy_version() in ("", "default") else ""
    return reached if number > highest else ""
