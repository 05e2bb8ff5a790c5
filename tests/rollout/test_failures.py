"""Groups that fail for good, or are dropped, one after the other: what is spent on them, and what is said."""

import logging
import os
from pathlib import Path

import pytest
import rollout_hooks as hooks
from scene import indices, until

from strawq.testing.scenes import completed
from strawq_workers.rollout import RolloutFailed, close_rollouts, generate_rollout, generate_rollout_fully_async
from strawq_workers.rollout.failures import Failures
from strawq_workers.rollout.on_pool import WorkersLost
from strawq_workers.rollout.station import station_of

SLOTS = 8
"""Groups that may be in hand at once: 16 requests, two to a group; also so many failures in a row are too many."""


@pytest.fixture(autouse=True)
def hooks_of_worker_processes(monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
    )


def told_to_operator(error, source, reason):
    text, path = str(error.value), source.data.pool.path
    assert reason in text and "groups in a row failed for good" in text
    assert f"strawq failed list {path}" in text and f"strawq failed retry {path} --all" in text


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        ({"custom_rm_path": "rollout_hooks.no_judge"}, "reward hook raised RuntimeError: no judge at all"),
        (
            {"custom_generate_function_path": "rollout_hooks.no_tool"},
            "generate hook raised RuntimeError: no tool at all",
        ),
        (
            {"dynamic_sampling_filter_path": "rollout_hooks.no_judge"},
            "dynamic_filter hook raised RuntimeError: no judge",
        ),
    ],
)
def test_a_hook_that_always_raises_ends_a_rollout_on_a_pool_before_the_data_are_spent(source_of, engine, hook, reason):
    source = source_of("straw")
    with pytest.raises(RolloutFailed) as error:
        generate_rollout_fully_async(source.args(rollout_workers=2, **hook), 0, source.data)
    told_to_operator(error, source, reason)
    close_rollouts(source.data)
    queue = source.data.pool.queue()
    # Each of two workers stops after eight in a row, with at most its four others in hand that fail as well; what
    # takes its place until the rollout has ended it does the same.
    assert SLOTS <= queue.counts().failed <= 4 * (SLOTS + 4) and source.leased() == 0
    # The hook is mended: what has failed is trained first, from the answers that were there.
    queue.retry_failed([task.id for task in queue.dead_letters()])
    out = generate_rollout_fully_async(source.args(rollout_workers=1), 0, source.data)
    assert len(out.samples) == 3


def test_a_synchronous_rollout_says_what_to_do_about_its_dead_letters(source_of, engine):
    source = source_of("straw")
    with pytest.raises(
        RolloutFailed, match=r"reward hook raised RuntimeError: no judge at all; dead letters: [123], `"
    ) as error:
        generate_rollout(source.args(custom_rm_path="rollout_hooks.no_judge"), 0, source.data)
    assert f"`strawq failed retry {source.data.pool.path} --all`" in str(error.value)


def test_groups_that_fail_among_others_are_told_and_the_rollout_goes_on(source_of, engine, caplog):
    source = source_of("straw")
    args = source.args(rollout_workers=1, custom_rm_path="rollout_hooks.raises_for_every_third", rollout_batch_size=12)
    for rollout_id in range(3):
        out = generate_rollout_fully_async(args, rollout_id, source.data)
        assert len(out.samples) == 12 and all(number % 3 for number in indices(out.samples))
        source.finish(rollout_id)
    assert out.metrics["rollout/groups/failed"] > SLOTS and "no score for prompt" in caplog.text


def test_a_data_set_of_which_nothing_is_left_but_failures_is_not_taken_for_used_up(source_of, engine):
    source = source_of("straw", prompts=2, num_epoch=1)
    args = source.args(rollout_workers=1, custom_rm_path="rollout_hooks.no_judge")
    with pytest.raises(RolloutFailed) as error:
        generate_rollout_fully_async(args, 0, source.data)
    told_to_operator(error, source, "no judge at all")


def test_workers_that_are_gone_after_failures_are_told_with_the_reason(source_of, engine):
    """Elsewhere somebody has worked, and left."""
    source = source_of("straw")
    args = source.args(rollout_worker_wait_seconds=0.1)
    with pytest.raises(WorkersLost):
        generate_rollout_fully_async(args, 0, source.data)
    fail(source.data.pool, 2)
    with pytest.raises(WorkersLost, match=r"2 groups in a row failed for good.*it is cold"):
        generate_rollout_fully_async(args, 0, source.data)


@pytest.mark.parametrize("function", [generate_rollout, generate_rollout_fully_async])
def test_a_filter_that_keeps_nothing_is_told_by_a_worker_in_this_process(source_of, engine, caplog, function):
    hooks.dropped.clear()
    source = source_of("object-store")
    args = source.args(dynamic_sampling_filter_path="rollout_hooks.drops_forty")
    assert len(function(args, 0, source.data).samples) == 3
    told = [record.getMessage() for record in caplog.records if "and none kept" in record.getMessage()]
    assert [text.split()[0] for text in told] == ["8", "16", "32"] and "too early" in told[0]


def test_a_hook_that_always_raises_stops_the_worker_in_the_background(source_of, engine):
    source = source_of("object-store")
    args = source.args(custom_rm_path="rollout_hooks.no_judge")
    with pytest.raises(RolloutFailed, match="no judge at all"):
        generate_rollout_fully_async(args, 0, source.data)
    running = station_of(source.data).running
    if running is not None:
        until("it has stopped of itself", running._over.is_set)
        assert "groups in a row failed for good" in str(running._failure)
    assert len(source.data.handed_out) <= 3 * SLOTS


def fail(pool, count):
    queue = pool.queue()
    for lease in queue.acquire(count):
        queue.fail(queue.open(lease), "it is cold", retryable=False)


def drop(pool):
    queue = pool.queue()
    (lease,) = queue.acquire(1)
    queue.drop(queue.open(lease), "easy")


def test_only_failures_in_a_row_are_counted_and_those_of_before_are_not(source_of):
    source = source_of("straw")
    pool = source.data.pool
    source.data.fill(20)
    fail(pool, 3)
    failures = Failures(pool, "rollout", limit=4)
    assert not failures.look() and failures.words() == ""
    fail(pool, 3)
    failures.look()
    failures.check(0, over=False)
    assert failures.in_a_row == 3
    drop(pool)
    failures.look()
    assert failures.in_a_row == 0
    fail(pool, 3)
    failures.look()
    failures.check(0, over=False)
    # What is sent back to work is not a failure any more, and counts again when it fails again.
    pool.queue().retry_failed([task.id for task in pool.queue().dead_letters()])
    failures.look()
    assert failures.in_a_row == 0
    fail(pool, 4)
    failures.look()
    with pytest.raises(RolloutFailed, match=r"rollout 7: 4 groups in a row .*it is cold"):
        failures.check(7, over=False)


def test_the_end_of_the_data_is_a_failure_only_if_nothing_was_accepted(source_of, caplog):
    source = source_of("straw")
    pool = source.data.pool
    source.data.fill(20)
    failures = Failures(pool, "rollout", limit=4)
    fail(pool, 1)
    failures.look()
    with pytest.raises(RolloutFailed):
        failures.check(0, over=True)
    (lease,) = pool.queue().acquire(1)
    completed(pool.queue(), pool.queue().open(lease))
    assert failures.look()
    fail(pool, 1)
    failures.look()
    failures.check(0, over=True)
    with caplog.at_level(logging.WARNING):
        failures.tell()
        failures.tell()
    assert caplog.text.count("dead letters") == 1 and "2 groups more" in caplog.text


def test_drops_in_a_row_are_told_at_each_doubling_of_the_limit(source_of, caplog):
    source = source_of("straw")
    pool = source.data.pool
    source.data.fill(40)
    failures = Failures(pool, "rollout", limit=2)
    for _ in range(9):
        drop(pool)
        failures.look()
    (lease,) = pool.queue().acquire(1)
    completed(pool.queue(), pool.queue().open(lease))
    assert failures.look()
    drop(pool)
    failures.look()
    drop(pool)
    failures.look()
    told = [record.getMessage() for record in caplog.records if "dropped and none kept" in record.getMessage()]
    assert [text.split()[0] for text in told] == ["2", "4", "8", "2"] and "easy" in told[0]
