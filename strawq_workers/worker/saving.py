"""When a group's progress is made durable while it is generated.

The rule: after `save_tokens` new tokens, or after `save_seconds`; then requests in flight are cut first, so that what
they have made so far is in hand.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from strawq_workers.worker.place import first_of

if TYPE_CHECKING:
    from strawq_workers.worker.group import GroupRun

SAVE_GAP_S = 0.05
"""Samples that end together are saved together."""


async def save_as_it_grows(run: GroupRun) -> None:
    """Saves the group from time to time, until cancelled."""
    options = run.place.options
    if not options.partial_rollout or not (options.save_tokens or options.save_seconds):
        return
    seconds = options.save_seconds if not options.looks_back else 0.0
    clock = asyncio.get_running_loop().time
    while True:
        left = run.saved_at + seconds - clock() if seconds else None
        if left is None or left > 0:
            await first_of(run.grown, timeout=left)
        run.grown.clear()
        if seconds and clock() >= run.saved_at + seconds:
            run.saved_at = clock()
            await run.cut_requests()
            await run.keep()
        elif options.save_tokens and run.unsaved() >= options.save_tokens:
            await asyncio.sleep(SAVE_GAP_S)
            await run.keep()
