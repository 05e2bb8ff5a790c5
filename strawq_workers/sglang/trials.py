"""What is known of an engine by its answers: its own record, and small requests that are sent to find out.

The rule: an engine whose answers made no sense so many times in a row is set aside while others are up, whatever those
answer meanwhile, and gets no request until a trial of what it failed at comes back sound: at growing intervals, or at
each probe while no engine is up. The last engine that is up is never set aside: whether all are wrong, or what they are
asked, is for the caller to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from strawq.errors import Misaligned, StrawqError
from strawq_workers.sglang.wire import GenerateRequest, ModelShape, Sampling

if TYPE_CHECKING:
    from strawq_workers.sglang.client import EngineClient

log = logging.getLogger("strawq.engines")

GARBLED_MAX = 3
"""Answers in a row that make no sense before an engine is set aside."""
TRIAL_TOKENS = 8
TRIAL_MAX_S = 600.0


class Record:
    """An engine's answers. `garbled`: those in a row that made no sense; `aside`: whether it gets no requests."""

    def __init__(self, pause_s: float) -> None:
        self.garbled = 0
        self.aside = False
        self.failed_at: GenerateRequest | None = None
        self.pause_s = self._first_pause_s = pause_s
        self.due = 0.0
        """When the next trial is due, by the event loop's clock."""

    def sound(self) -> None:
        """An answer to a request made sense."""
        self.garbled, self.pause_s = 0, self._first_pause_s

    def wrong(self, request: GenerateRequest, now: float) -> None:
        """One did not."""
        self.garbled += 1
        self.failed_at = request
        self.due = now + self.pause_s


def blame(engine: EngineClient, request: GenerateRequest, error: Misaligned, others: Sequence[str]) -> None:
    """The engine's answer made no sense. `others`: engines that are up and can be asked instead."""
    record = engine.record
    record.wrong(request, asyncio.get_running_loop().time())
    if record.garbled >= GARBLED_MAX and others and not record.aside:
        record.aside = True
        engine.doubt(error, "aside")
    elif others:
        log.info("%s, %d in a row; one of %d others is asked", error, record.garbled, len(others))


async def try_again(engine: EngineClient, *, at_once: bool = False) -> None:
    """If a trial of an engine that is aside is due, or wanted before: what it failed at, cut short. A sound answer
    takes it back with the next probe; else a trial that was due is followed by the next after twice as long."""
    record, clock = engine.record, asyncio.get_running_loop().time
    due = clock() >= record.due
    if not record.aside or engine.state != "aside" or record.failed_at is None or not (due or at_once):
        return
    sampling = record.failed_at.sampling
    few = min(TRIAL_TOKENS, sampling.max_new_tokens)
    trial = msgspec.structs.replace(
        record.failed_at, sampling=msgspec.structs.replace(sampling, max_new_tokens=few, min_new_tokens=0)
    )
    if due:
        record.pause_s = min(2 * record.pause_s, TRIAL_MAX_S)
    try:
        await asyncio.wait_for(engine.attempt(trial), engine.options.control_timeout_s)
    except (StrawqError, asyncio.TimeoutError) as failed:
        if due:
            record.due = clock() + record.pause_s
        log.info("%s stays aside: %s", engine.url, failed)
        return
    # On parole: the next answer that makes no sense sets it aside again, for longer.
    record.aside, record.garbled = False, GARBLED_MAX - 1
    engine.doubted.set()


async def passes_routes(router: EngineClient, shape: ModelShape) -> bool:
    """Whether R3 rows come back through the router; it drops fields that it does not know without an error."""
    if not (shape.layers and shape.topk):
        return False
    ids = np.zeros(1, dtype=np.int32)
    trial = GenerateRequest(input_ids=ids, sampling=Sampling(max_new_tokens=1, ignore_eos=True), routed_experts=True)
    try:
        segment = await asyncio.wait_for(router.attempt(trial), router.options.control_timeout_s)
        return segment.routed_experts is not None
    except (StrawqError, asyncio.TimeoutError) as failed:
        log.warning(
            "router %s gives no routed experts, requests for them go to the engines directly: %s", router.url, failed
        )
        return False
