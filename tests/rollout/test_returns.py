"""A data source that fails for a while to take groups back costs none of them."""

import pytest
import rollout_hooks as hooks
from scene import SLOW, MemoryScene, indices, until

from strawq_workers.rollout import close_rollouts, generate_rollout, generate_rollout_fully_async

HOOKS = "rollout_hooks"


def sick(source, times=1):
    """`add_samples` raises so often, and takes nothing then."""
    usual, left = source.data.add_samples, [times]

    def add_samples(samples):
        if left[0]:
            left[0] -= 1
            raise OSError("the disk is full")
        usual(samples)

    source.data.add_samples = add_samples


def accounted(source, trained):
    close_rollouts(source.data)
    waiting = [number for number, _ in source.waiting()]
    assert sorted([*trained, *waiting]) == sorted(set(source.data.handed_out))


def test_groups_of_a_synchronous_rollout_come_back_with_the_next(source_of, engine):
    source = source_of("object-store")
    hooks.gate["ready"] = lambda: engine.generated() >= 6 * 2 * 16
    args = source.args(over_sampling_batch_size=6, custom_rm_path=f"{HOOKS}.when_ready")
    sick(source)
    with pytest.raises(OSError, match="disk is full"):
        generate_rollout(args, 0, source.data)
    hooks.gate["ready"] = lambda: True
    out = generate_rollout(source.args(), 0, source.data)
    assert len(out.samples) == 3 and max(indices(out.samples)) < 6, "what was started first is used first"
    accounted(source, indices(out.samples))


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
def test_closing_again_gives_back_what_could_not_be_given_back(source_of, engine, args_of):
    source, other = source_of("object-store"), MemoryScene(args_of, 1000)
    trained = indices(generate_rollout_fully_async(source.args(), 0, source.data).samples)
    others = indices(generate_rollout_fully_async(other.args(), 0, other.data).samples)
    engine.pace(1.0)
    until("more is in hand", lambda: engine.running() > 0)
    sick(source)
    with pytest.raises(OSError, match="disk is full"):
        close_rollouts()
    accounted(other, others)
    accounted(source, trained)
    assert engine.running() == 0
