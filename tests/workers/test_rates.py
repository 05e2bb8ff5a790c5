"""What a trainer sees of its workers: counts that they leave, and what has happened between two batches."""

import asyncio
import functools
import time

import msgspec
import pytest

from strawq import Pool, Prompt
from strawq.garbage import collect_garbage
from strawq_workers.collector import Collector
from strawq_workers.rates import Rates
from strawq_workers.worker.counts import WorkerCounts, keep_counts, read_counts
from strawq_workers.worker.metrics import Counters, percentile, watch_loop


def leave(pool, session: str, instance: str, queue: str = "rollout", seconds: float = 0.0, **counted) -> None:
    counts = WorkerCounts(instance, queue, 0, Counters(**counted), seconds)
    pool.files.replace(f"sessions/{session}.work.json", msgspec.json.encode(counts))


@pytest.fixture
def pool(tmp_path):
    with Pool.init(tmp_path / "pool", queues=("rollout", "eval")) as opened:
        yield opened


async def test_a_batch_says_what_its_workers_did_since_the_batch_before(stage_of):
    async with stage_of() as stage:
        stage.submit(8)
        rates = await asyncio.to_thread(Rates, stage.pool)
        summary = await stage.run(reward="hooks_for_tests:length", dynamic_filter="hooks_for_tests:drop_even")
        found = await asyncio.to_thread(rates.since_last)
        assert found["rollout/dynamic_filter/drop_even"] == found["rollout/dynamic_filter/dropped_groups"] == 4
        assert found["rollout/dynamic_filter/dropped_ratio"] == 0.5 and found["rollout/accepted_groups"] == 4
        assert found["rollout/accepted_groups_per_hour"] > 4
        assert found["rollout/generated_tokens"] == summary.counters.tokens_generated == 8 * 48
        assert found["rollout/resumed_tokens"] == found["rollout/regenerated_tokens"] == found["rollout/aborts"] == 0
        assert found["rollout/workers"] == 1 and found["rollout/event_loop_lag_ms_p99"] >= 0
        again = await asyncio.to_thread(rates.since_last)
        assert again["rollout/generated_tokens"] == again["rollout/dynamic_filter/dropped_groups"] == 0


async def test_batches_of_a_collector_carry_them(stage_of):
    async with stage_of() as stage:
        stage.submit(2)
        await stage.run()
        batch = await asyncio.to_thread(Collector(stage.pool).next_batch, 2, timeout=5)
        found = batch.metrics()
        assert found["rollout/staleness/unknown_count"] == 2 and found["rollout/dynamic_filter/dropped_ratio"] == 0


def test_counts_of_all_workers_of_the_queue_are_added_and_differences_survive_a_missing_file(pool):
    now = [0.0]
    leave(pool, "a-1", "a", tokens_generated=100, requests=1)
    rates = Rates(pool, clock=lambda: now[0])
    leave(pool, "a-1", "a", tokens_generated=150, tokens_discarded=7, requests=2, loop_lag_ms_p99=3.0)
    leave(
        pool,
        "b-1",
        "b",
        tokens_generated=10,
        requests=1,
        loop_lag_ms_p99=40.0,
        engine_seconds=10.0,
        engine_idle_seconds=4.0,
    )
    leave(pool, "c-1", "c", queue="eval", tokens_generated=999, requests=1)
    now[0] = 3600.0
    found = rates.since_last()
    assert (found["rollout/generated_tokens"], found["rollout/regenerated_tokens"]) == (60, 7)
    assert found["rollout/engine_idle_share"] == 0.4 and found["rollout/event_loop_lag_ms_p99"] == 40.0
    assert found["rollout/workers"] == 2 and found["rollout/accepted_groups_per_hour"] == 0
    pool.files.remove("sessions/a-1.work.json")
    assert rates.since_last()["rollout/generated_tokens"] == 0
    leave(pool, "a-1", "a", tokens_generated=155, requests=3)
    assert rates.since_last()["rollout/generated_tokens"] == 5


def test_a_worker_that_lost_its_session_is_counted_once(pool):
    leave(pool, "a-1", "a", tokens_generated=100, requests=4)
    leave(pool, "a-2", "a", tokens_generated=130, requests=6)
    pool.files.replace("sessions/x.work.json", b"{ half")
    assert {name: left.counters.tokens_generated for name, left in read_counts(pool, "rollout").items()} == {"a": 130}


def test_after_a_rollback_nothing_is_counted_backwards(pool):
    queue = pool.queue()
    pool.checkpoint("start")
    queue.submit([Prompt(tokens=[1])])
    (lease,) = queue.acquire(1)
    queue.drop(queue.open(lease), "dull")
    rates = Rates(pool)
    pool.rollback("start")
    found = rates.since_last()
    assert found["rollout/dynamic_filter/dropped_groups"] == found["rollout/accepted_groups"] == 0


def test_collection_takes_the_counts_of_workers_that_are_gone(pool):
    leave(pool, "gone-1", "gone", requests=1)
    collected = pool.gc()
    assert read_counts(pool, "rollout") == {} and collected.unknown == ()
    assert collected.by_reason == {"counts of a worker whose session has ended": 1}


def test_collection_leaves_the_counts_of_workers_that_live(pool):
    with Pool.open(pool.path) as worker:
        session = worker.keeper.require()
        leave(pool, session, worker.instance, requests=1)
        leave(pool, pool.keeper.require(), pool.instance, requests=2)
        assert collect_garbage(pool, dry_run=True)[0].removals == ()
        assert pool.gc().files == 0
        assert set(read_counts(pool, "rollout")) == {worker.instance, pool.instance}
    pool.gc()
    assert set(read_counts(pool, "rollout")) == {pool.instance}


def test_a_worker_that_was_at_work_before_is_not_told_its_whole_life_when_its_file_comes_back(pool):
    """Its file was missing at the first look: what it counted before that was not since then."""
    now = [1000.0]
    rates = Rates(pool, clock=lambda: now[0])
    now[0] += 6.0
    leave(pool, "a-1", "a", seconds=900.0, tokens_generated=10_000, requests=5)
    leave(pool, "b-1", "b", seconds=4.0, tokens_generated=70, requests=1)
    found = rates.since_last()
    assert found["rollout/generated_tokens"] == 70, "only b began since"
    now[0] += 60.0
    leave(pool, "a-1", "a", seconds=960.0, tokens_generated=10_400, requests=7)
    leave(pool, "c-1", "c", seconds=62.0, tokens_generated=9, requests=1)
    assert rates.since_last()["rollout/generated_tokens"] == 409, "c began since these looks began"


async def test_a_worker_leaves_counts_as_soon_as_it_has_a_session(stage_of, monkeypatch):
    """Whoever looks right after finds them, and counts from there."""
    monkeypatch.setattr("strawq_workers.worker.loop.keep_counts", functools.partial(keep_counts, seconds=3600.0))
    async with stage_of() as stage:
        stage.submit(1)
        stage.stand_at(3)
        task = stage.start()
        (counts,) = (await stage.until("its counts", lambda: read_counts(stage.pool, "rollout"), task)).values()
        assert counts.counters.tokens_generated <= 2 * 3
        await stage.go_on()
        await task


@pytest.mark.parametrize(
    ("values", "share", "due"), [([], 0.99, 0.0), ([5.0], 0.99, 5.0), (list(range(1, 101)), 0.99, 99)]
)
def test_percentiles(values, share, due):
    assert percentile(values, share) == due


async def test_idle_engines_and_a_loop_that_stands_still_are_noticed():
    class Engine:
        def __init__(self, claimed):
            self.state, self.claimed = "up", claimed

    class Fleet:
        engines = (Engine(0), Engine(3))

    counters = Counters()
    watching = asyncio.ensure_future(watch_loop(counters, Fleet(), 0.01))
    await until(lambda: counters.engine_seconds > 0)
    time.sleep(0.12)  # noqa: ASYNC251 (the event loop stands still)
    await until(lambda: counters.loop_lag_ms_max >= 50)
    watching.cancel()
    assert counters.loop_lag_ms_p99 >= 50
    assert counters.engine_idle_seconds == pytest.approx(counters.engine_seconds / 2)


async def until(probe) -> None:
    for _ in range(2000):
        if probe():
            return
        await asyncio.sleep(0.01)
    pytest.fail("not within 20 s")
