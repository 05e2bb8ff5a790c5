"""What a rollback would bring back and set aside, held against the groups themselves."""

from __future__ import annotations

from strawq.core.state import Branch, State
from strawq.pool import Pool
from strawq.rollback_plan import plan_rollback
from strawq.testing.scenes import completed, grown, prompts
from strawq.testing.worlds import World

Groups = dict[str, tuple[int, bool]]
"""Tokens of each group that is in the queue, and whether it is complete."""


def groups_of(branch: Branch) -> Groups:
    queue = branch.queues["rollout"]
    found = {f"{row.number}-{at}": (0, False) for row in queue.submissions.values() for at in range(row.next, row.end)}
    return found | {task.id: (task.tokens, task.stage == "ready") for task in queue.tasks.values()}


def checked(pool: Pool, target: str) -> tuple[int, int, int, int, int | None]:
    """What the plan says, after the real rollback and the groups of both branches have been held against it."""

    def branch(machine: object) -> Branch:
        state: State = machine.state  # type: ignore[attr-defined]
        return state.branch

    before = pool.log.refresh(lambda machine: groups_of(branch(machine)))
    plan = pool.log.refresh(lambda machine: plan_rollback(machine.state, target)).queues["rollout"]
    pool.rollback(target)
    after = pool.log.refresh(lambda machine: groups_of(branch(machine)))
    assert plan.brought_back == len(after.keys() - before.keys())
    less = [key for key, (tokens, ready) in before.items() if key not in after or (tokens, ready) > after[key]]
    assert plan.set_aside == len(less)
    partial = [tokens for tokens, ready in after.values() if tokens and not ready]
    assert (plan.prefixes, plan.prefix_tokens) == (len(partial), sum(partial))
    return plan.brought_back, plan.set_aside, plan.prefixes, plan.prefix_tokens, plan.oldest_version


def test_each_group_is_counted_where_it_goes() -> None:
    world = World()
    pool = world.process()
    queue = pool.queue()
    pool.publish_version(4)
    queue.submit(prompts([f"p{number}" for number in range(8)]))
    works = [queue.open(lease) for lease in queue.acquire(3)]
    completed(queue, works[0])
    queue.yield_(works[1], grown(works[1].group, 2, "3"))
    queue.yield_(works[2])
    pool.checkpoint("middle")
    # From here on: two are trained, one has begun and one more is complete, a prefix grows, new prompts come.
    for lease in queue.acquire(2, stages=("partial", "fresh")):
        completed(queue, queue.open(lease))
    taken = queue.take_batch(2).batch
    assert taken is not None
    queue.finish_batch(taken)
    (lease,) = queue.acquire(1)
    queue.yield_(queue.open(lease), grown(queue.open(lease).group, 3, "4"))
    queue.submit(prompts(["new1", "new2"]))
    assert checked(pool, "middle") == (2, 4, 1, 2, 1)
    # And back: what the first branch had is brought back, what the second has not is set aside.
    brought, aside, prefixes, *_ = checked(pool, "main")
    assert (brought, aside, prefixes) == (2, 2, 1)


def test_a_checkpoint_before_all_work_brings_back_every_prompt() -> None:
    pool = World().process()
    queue = pool.queue()
    queue.submit(prompts(["a", "b", "c"]))
    pool.checkpoint("start")
    for lease in queue.acquire(2):
        completed(queue, queue.open(lease))
    taken = queue.take_batch(2).batch
    assert taken is not None
    queue.finish_batch(taken)
    assert checked(pool, "start") == (2, 0, 0, 0, None)
