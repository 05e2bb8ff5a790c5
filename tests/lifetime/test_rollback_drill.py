"""A rollback under a worker that is at work: nothing of the future that was left reaches a batch, and one can go
back to it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from strawq import Pool, Prompt
from strawq.errors import BadInput, Fenced
from strawq.samples import Group
from strawq.verification import verify
from tools.golden_pool import answer, complete


def test_nothing_of_the_future_that_was_left_reaches_a_batch(pool: Path) -> None:
    leased, rolled_back = threading.Event(), threading.Event()
    refused: list[type[Exception]] = []

    def work() -> None:
        with Pool.open(pool) as mine:
            queue = mine.queue()
            (lease,) = queue.acquire(1)
            held = queue.open(lease)
            leased.set()
            assert rolled_back.wait(20)
            try:
                queue.complete(held, Group(lease.task, held.group.prompt, (answer(0, 99),)))
            except Fenced as error:
                refused.append(type(error))
            (again,) = queue.acquire(1)  # The same process goes on with the new branch.
            queue.complete(queue.open(again), Group(again.task, queue.open(again).group.prompt, (answer(0, 7),)))

    with Pool.open(pool) as trainer:
        queue = trainer.queue()
        queue.submit([Prompt(f"g{n}", np.array([1, 2, n], np.int32)) for n in range(3)])
        trainer.checkpoint("step-1")
        complete(queue, 1)
        queue.submit([Prompt("later", np.array([1, 2, 3], np.int32))])
        worker = threading.Thread(target=work)
        worker.start()
        assert leased.wait(20)
        trainer.rollback("step-1", branch="again")
        rolled_back.set()
        worker.join(30)
        assert len(refused) == 1
        queue = trainer.queue()
        batch = queue.take_batch(1).batch
        assert batch is not None
        (group,) = queue.read_batch(batch)
        assert group.samples[0].tokens.tolist() == answer(0, 7).tokens.tolist()
        queue.finish_batch(batch)
        assert queue.counts().ready == 0
        trainer.gc()
        assert verify(trainer, full=True).findings == ()
        trainer.rollback("main", branch="third")
        queue = trainer.queue()
        assert (queue.counts().ready, queue.counts().trained) == (1, 0)
        batch = queue.take_batch(1).batch
        assert batch is not None
        (group,) = queue.read_batch(batch)
        assert group.samples[0].text == "answer 0"


def test_a_branch_that_was_dropped_is_garbage(pool: Path) -> None:
    with Pool.open(pool) as opened:
        opened.checkpoint("start")
        opened.queue().submit([Prompt(f"g{n}", np.array([1, 2, n], np.int32)) for n in range(2)])
        complete(opened.queue(), 2)
        opened.rollback("start")
        assert opened.gc().files == 0
        opened.drop_branch("main")
        assert opened.gc().files > 0
        assert verify(opened, full=True).findings == ()
        with pytest.raises(BadInput, match="main"):
            opened.rollback("main")
