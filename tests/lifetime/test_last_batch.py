"""A queue is not used up while a batch may come back (found by the soak: the successor of a killed trainer left)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from strawq import Pool, Prompt
from tools.golden_pool import complete


def test_a_trainers_successor_waits_for_the_last_batch_of_the_dead(pool: Path) -> None:
    with Pool.open(pool, background=False) as first, Pool.open(pool, background=False) as second:
        queue = first.queue()
        queue.submit([Prompt(f"g{n}", np.array([1, 2, n], np.int32)) for n in range(2)])
        complete(queue, 2, tensors=False)
        queue.seal()
        held = queue.take_batch(2).batch
        assert held is not None
        # Nobody has noticed yet that the first trainer is gone.
        waiting = second.queue().take_batch(2)
        assert waiting.status == "empty" and held.id in waiting.detail and held.session in waiting.detail
        assert second.queue().take_batch(2, consumer="another").status == "sealed", "its own batches are all finished"
        assert queue.take_batch(2).status == "sealed", "whoever holds it may look ahead, and is told of the end"
        second.expire_session(held.session)
        again = second.queue().take_batch(2).batch
        assert again is not None and (again.id, again.delivery) == (held.id, 2)
        second.queue().finish_batch(again)
        assert second.queue().take_batch(2).status == "sealed"
