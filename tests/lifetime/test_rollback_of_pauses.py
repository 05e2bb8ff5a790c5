"""What a rollback does to a pause, and to a trainer that does not know of the rollback yet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strawq.errors import BranchMoved
from strawq.pool import Pool
from strawq.testing.scenes import prompts
from strawq.testing.worlds import World


def two() -> tuple[Pool, Pool]:
    """An operator and a worker of one pool with prompts and the checkpoint `start`."""
    world = World()
    operator, worker = world.process(), world.process()
    operator.queue().submit(prompts(["a", "b"]))
    operator.checkpoint("start")
    return operator, worker


def test_a_pause_holds_over_a_rollback_and_is_acknowledged_anew() -> None:
    """The engines still have the weights of the branch that is left: whoever paused says when it goes on."""
    operator, worker = two()
    operator.pause("bad step")
    worker.acknowledge_pause()
    operator.rollback("start")
    paused = operator.inspect().paused
    assert paused is not None and (paused.reason, paused.acknowledged) == ("bad step", ())
    assert worker.queue().acquire(1).status == "paused"
    worker.acknowledge_pause()
    operator.resume()
    assert worker.queue().acquire(1).status == "acquired"


def test_a_pause_of_the_checkpoint_does_not_come_back() -> None:
    operator, worker = two()
    operator.pause("weights")
    operator.checkpoint("paused")
    operator.resume()
    operator.rollback("paused")
    assert worker.queue().acquire(1).status == "acquired"


@pytest.mark.parametrize(
    "call",
    [
        lambda pool, branch: pool.publish_version(7, branch=branch),
        lambda pool, branch: pool.pause("weights", branch=branch),
        lambda pool, branch: pool.resume(7, branch=branch),
    ],
    ids=["publish", "pause", "resume"],
)
def test_a_trainer_of_the_branch_that_is_left_changes_nothing(call: Callable[[Pool, str], None]) -> None:
    operator, trainer = two()
    trainer.publish_version(1)
    mine = trainer.branch()
    operator.rollback("start")
    before = operator.inspect()
    with pytest.raises(BranchMoved):
        call(trainer, mine)
    assert operator.inspect().head_seq == before.head_seq
    call(trainer, trainer.branch())
