"""A durable, lease-based rollout queue for RL training of language models, in one directory of immutable files.

    from strawq import Pool, Prompt

    with Pool.init("/mnt/pool") as pool:
        pool.queue("rollout").submit([Prompt(group_id="0", text="1 + 1 =")])

Names are imported when they are first used, so that `import strawq` costs little.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strawq.version import VERSION as __version__

if TYPE_CHECKING:
    from strawq.aio import AsyncQueue as AsyncQueue
    from strawq.model import QueueConfig as QueueConfig
    from strawq.model import VersionSpan as VersionSpan
    from strawq.pool import Pool as Pool
    from strawq.queue import Queue as Queue
    from strawq.samples import Group as Group
    from strawq.samples import Prompt as Prompt
    from strawq.samples import Sample as Sample
    from strawq.work import Change as Change
    from strawq.work import Work as Work

_WHERE = {
    "AsyncQueue": "strawq.aio",
    "Change": "strawq.work",
    "Group": "strawq.samples",
    "Pool": "strawq.pool",
    "Prompt": "strawq.samples",
    "Queue": "strawq.queue",
    "QueueConfig": "strawq.model",
    "Sample": "strawq.samples",
    "VersionSpan": "strawq.model",
    "Work": "strawq.work",
}

__all__ = [*sorted(_WHERE), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'strawq' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
