"""What a synchronous rollout makes of groups that fail and come again."""

from types import SimpleNamespace

import rollout_hooks as hooks

from strawq.handles import Lease
from strawq_workers.admission.refill import RolloutPlan
from strawq_workers.rollout import generate_rollout
from strawq_workers.rollout.intake import PlanIntake
from strawq_workers.worker.place import attempt_of


def _lease(attempt):
    return Lease("", "main", "s", "1-0", attempt, SimpleNamespace(task=SimpleNamespace(stage="fresh")))


def _run(lease, end):
    return SimpleNamespace(lease=lease, attempt=attempt_of(lease), end=end, samples={})


def test_a_group_may_be_leased_again_before_its_first_run_has_ended_here():
    """Its failure is in the queue before the run that reported it is over."""
    place = SimpleNamespace(dead={}, drop_reasons={}, stop=lambda reason: None)
    plan = RolloutPlan(1)
    intake = PlanIntake(plan, place)
    first, second = _lease(1), _lease(2)
    intake.leased(first)
    intake.leased(second)
    intake.ended(_run(first, "failed"))
    intake.ended(_run(second, "accepted"))
    account = plan.close()
    assert (account.fetched, account.kept, account.returned_fresh) == (2, 1, 1)


def test_a_reward_that_raises_once_for_each_group_costs_the_rollout_nothing(source_of, engine):
    hooks.raised.clear()
    source = source_of("object-store")
    args = source.args(rollout_batch_size=8, custom_rm_path="rollout_hooks.raises_once")
    for rollout_id in range(6):
        assert len(generate_rollout(args, rollout_id, source.data).samples) == 8
    assert len(hooks.raised) >= 6 * 8
