"""What is decided about a complete group before it is handed in: sample hooks, reward, filter, in that order.

The rule: hooks see copies, and the group that comes out is put back as a whole only when all of them have answered: an
attempt that fails in between leaves no half of their work behind.
"""

from __future__ import annotations

import asyncio

import msgspec

from strawq.samples import Group
from strawq_workers.filters import DynamicFilterOutput
from strawq_workers.worker.place import Place


async def judged(place: Place, group: Group) -> tuple[Group, DynamicFilterOutput]:
    """The group as hooks and reward leave it, and the filter's verdict. Raises `HookFailed`, `Misaligned`."""
    hooks = place.hooks
    if hooks.need_text:
        group = await with_text(place, group)
    group = await hooks.change(group)
    group = await hooks.score(group)
    return group, await hooks.judge(group)


async def judged_unless(stop: asyncio.Event, place: Place, group: Group) -> tuple[Group, DynamicFilterOutput] | None:
    """The same; None, with nothing of it done, if `stop` is set first."""
    judging = asyncio.ensure_future(judged(place, group))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({judging, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if judging.done():
            return judging.result()
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)
        return None
    finally:
        stopping.cancel()


async def with_text(place: Place, group: Group) -> Group:
    """The group with the text of each response, as far as somebody can decode it."""
    samples = [
        sample
        if sample.text is not None
        else msgspec.structs.replace(sample, text=await place.texts.text_of(sample.tokens))
        for sample in group.samples
    ]
    return msgspec.structs.replace(group, samples=tuple(samples))
