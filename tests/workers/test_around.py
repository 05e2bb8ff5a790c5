"""Pauses, rollbacks and lost sessions, seen by a worker with work in its hands."""

import asyncio
import logging
import urllib.request
from types import SimpleNamespace

import msgspec
import pytest

from strawq.core.commands import Expire
from strawq.samples import token_count
from strawq_workers.worker.place import Hold


async def started(stage, requests, **changes):
    """A worker whose requests, so many, stand in mid-generation, until `go_on`."""
    stop = asyncio.Event()
    stage.stand_at(5)
    worker = stage.start(stop, **changes)
    await stage.until("requests are in mid-generation", lambda: stage.standing() == requests, worker)
    return worker, stop


def _running(stage) -> int:
    return stage.engine._scheduler.loads().running


def _acknowledged(stage) -> bool:
    paused = stage.pool.inspect().paused
    return paused is not None and stage.worker.place.queue.session in paused.acknowledged


async def load_weights(stage, version: str, *, flush_cache: bool = True) -> None:
    body = msgspec.json.encode({"model_path": "w", "weight_version": version, "flush_cache": flush_cache})
    request = urllib.request.Request(
        stage.url + "/update_weights_from_disk", data=body, headers={"Content-Type": "application/json"}
    )
    await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=20).read())


# -- pause ----------------------------------------------------------------------------------------------------------


async def test_a_pause_saves_prefixes_keeps_leases_and_burns_no_attempt(stage_of):
    async with stage_of() as stage:
        stage.submit(2)
        worker, _ = await started(stage, 4)
        await asyncio.to_thread(stage.pool.pause, "weights")
        await stage.until("the pause is acknowledged", lambda: _acknowledged(stage), worker)
        held = stage.held(stage="partial")
        assert len(held) == 2 and all(part.task.session and part.task.attempt == 1 for part in held)
        saved = sum(part.task.tokens for part in held)
        assert saved == stage.worker.place.counters.tokens_generated and stage.in_flight() == 0
        assert _running(stage) == 0
        await stage.go_on()
        await load_weights(stage, "2")
        await asyncio.to_thread(stage.pool.resume, 2)
        summary = await worker
        assert summary.counters.groups_accepted == 2 and summary.counters.tokens_generated == 2 * 48
        assert summary.counters.pauses == 1 and summary.policy_versions == ("1", "2")
        assert summary.counters.tokens_resumed == 0
        for group in stage.groups(stage="ready"):
            for sample in group.samples:
                assert [span.version for span in sample.versions] in (["1", "2"], ["2"])
                assert len(sample.tokens) == 24


async def test_a_pause_that_masks_old_tokens_masks_exactly_those(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        worker, _ = await started(stage, 2, mask_offpolicy_in_partial_rollout=True)
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the pause is acknowledged", lambda: _acknowledged(stage), worker)
        await stage.go_on()
        await load_weights(stage, "2")
        await asyncio.to_thread(stage.pool.resume, 2)
        summary = await worker
        (group,) = stage.groups(stage="ready")
        masked = 0
        for sample in group.samples:
            old = sum(span.end for span in sample.versions if span.version == "1")
            assert sample.loss_mask.tolist() == [0] * old + [1] * (24 - old)
            masked += old
        assert masked == summary.counters.tokens_masked > 0


async def test_a_draining_worker_acknowledges_when_its_groups_are_handed_in(stage_of):
    async with stage_of() as stage:
        stage.submit(3)
        worker, _ = await started(stage, 4, pause_policy="drain", max_groups=2)
        await asyncio.to_thread(stage.pool.pause)
        await stage.go_on()
        await stage.until("the pause is acknowledged", lambda: _acknowledged(stage), worker)
        counts = stage.queue.counts()
        assert counts.ready == 2 and counts.fresh_pending == 1 and stage.in_flight() == 0
        await asyncio.to_thread(stage.pool.resume)
        summary = await worker
        assert summary.counters.groups_accepted == 3 and summary.counters.aborts == 0


async def test_an_in_place_pause_freezes_requests_which_go_on_under_the_new_policy(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        worker, _ = await started(stage, 2, pause_policy="in_place")
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the pause is acknowledged", lambda: _acknowledged(stage), worker)
        assert stage.in_flight() == 2
        await stage.go_on()
        await load_weights(stage, "2", flush_cache=False)
        await asyncio.to_thread(stage.pool.resume, 2)
        summary = await worker
        assert summary.counters.aborts == 0 and summary.counters.requests == 2
        (group,) = stage.groups(stage="ready")
        for sample in group.samples:
            assert len(sample.segments) == 1 and [span.version for span in sample.versions] == ["1", "2"]


async def test_an_idle_worker_acknowledges_a_pause_too(stage_of):
    async with stage_of() as stage:
        stage.submit(1, seal=False)
        worker = stage.start()
        await stage.until("the group is accepted", lambda: stage.queue.counts().ready == 1, worker)
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the pause is acknowledged", lambda: _acknowledged(stage), worker)
        await asyncio.to_thread(stage.pool.resume)
        await asyncio.to_thread(stage.queue.seal)
        assert (await worker).counters.groups_accepted == 1


async def test_a_worker_that_cannot_acknowledge_by_a_fault_of_its_own_ends(stage_of):
    """It would hold the trainer up until its deadline, at every pause."""
    async with stage_of() as stage:
        stage.submit(1)
        worker, _ = await started(stage, 2)

        async def fault():
            raise ZeroDivisionError("a fault")

        stage.worker.place.queue.acknowledge_pause = fault
        await asyncio.to_thread(stage.pool.pause, "weights")
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(worker, 20)
        assert all(not row.task.session for row in stage.held(stage="partial"))


async def test_a_second_pause_right_after_the_first_is_acknowledged_as_well(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        worker, _ = await started(stage, 2)
        for _ in range(3):
            await asyncio.to_thread(stage.pool.pause)
            await stage.until("the pause is acknowledged", lambda: _acknowledged(stage), worker)
            await asyncio.to_thread(stage.pool.resume)
        await stage.go_on()
        assert (await worker).counters.tokens_generated == 48


async def test_a_stop_during_a_pause_gives_the_leases_back(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        worker, stop = await started(stage, 2)
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the pause is acknowledged", lambda: _acknowledged(stage), worker)
        stop.set()
        assert (await worker).reason == "signal"
        (held,) = stage.held(stage="partial", session="")
        assert held.task.tokens and held.task.failures == held.task.expirations == 0


async def test_requests_of_before_a_quick_resume_still_see_their_stop():
    hold = Hold()
    before = hold.stopped
    hold.close()
    hold.open()
    assert before.is_set() and not hold.stopped.is_set() and hold.released.is_set()


# -- branches and sessions ------------------------------------------------------------------------------------------


async def test_after_a_rollback_old_work_is_dropped_and_the_new_branch_served_without_a_restart(stage_of, caplog):
    async with stage_of() as stage:
        stage.submit(2)
        await asyncio.to_thread(stage.pool.checkpoint, "before")
        worker, _ = await started(stage, 4)
        with caplog.at_level(logging.WARNING, "strawq.worker"):
            looks = judged(stage)
            await asyncio.to_thread(stage.pool.rollback, "before")
            await stage.until("old groups are dropped", lambda: stage.worker.place.counters.groups_stale == 2, worker)
            assert next(lost for branch, lost in looks if branch != "main") == [True, True], "by the first look"
            await stage.go_on()
            await stage.until("new leases", lambda: len([h for h in stage.held() if h.task.session]) == 2, worker)
            summary = await worker
        assert summary.counters.groups_accepted == 2 and summary.counters.branches_left == 1
        assert summary.counters.tokens_discarded > 0 and summary.counters.groups_failed == 0
        assert sum("went from branch" in record.getMessage() for record in caplog.records) == 1
        assert stage.queue.counts().ready == 2


def judged(stage):
    """Of each look at the pool from now on: its branch, and of each group in hand of another branch if it let it go."""
    looks, let_go = [], stage.worker.watcher._let_go

    def noted(around, held, session):
        let_go(around, held, session)
        looks.append((around.branch, [bool(run.lost) for run in held if run.lease.branch != around.branch]))

    stage.worker.watcher._let_go = noted
    return looks


async def test_a_worker_taken_for_dead_drops_its_work_says_so_once_and_goes_on(stage_of, caplog):
    async with stage_of() as stage:
        stage.submit(2)
        worker, _ = await started(stage, 4, max_groups=2)
        session = stage.worker.place.queue.session
        with caplog.at_level(logging.WARNING):
            # On the worker's own loop, so that it cannot lease the groups anew in between.
            stage.pool.commit(Expire(request="e", session=session, reason="test"))
            leases = stage.queue.acquire(2)
            assert len(leases) == 2
            await stage.until("old groups are dropped", lambda: stage.worker.place.counters.groups_stale == 2, worker)

            def said():
                return sum("taken for dead" in record.getMessage() for record in caplog.records)

            # The pool says it, in a thread of its own.
            await stage.until("it is said", lambda: said() > 0, worker)
        assert stage.worker.place.counters.sessions_lost == 1
        await stage.go_on()
        for lease in leases:
            work = await asyncio.to_thread(stage.queue.open, lease)
            assert token_count(work.group) == 0
            await asyncio.to_thread(stage.queue.yield_, work)
        summary = await worker
        assert summary.counters.groups_accepted == 2 and summary.counters.groups_failed == 0
        assert stage.pool.inspect().queues["rollout"].accepted == 2
        assert said() == 1


async def test_a_report_that_comes_too_late_does_not_count(stage_of):
    """The hook holds the finished group back until its lease is another's."""
    import hooks_for_tests as hooks

    hooks.release.clear()
    hooks.calls["waits"] = 0
    async with stage_of() as stage:
        stage.submit(1)
        worker = stage.start(reward="hooks_for_tests:waits", max_groups=1)
        await stage.until("the hook is called", lambda: hooks.calls["waits"] == 2, worker)
        run = next(iter(stage.worker.runs.values()))
        session = stage.worker.place.queue.session
        stage.worker.watcher._seconds = 60.0  # the report itself must find out
        stage.pool.commit(Expire(request="e", session=session, reason="test"))
        (lease,) = stage.queue.acquire(1)
        hooks.release.set()
        await stage.until("the report is refused", lambda: run.end == "stale", worker)
        assert stage.queue.counts().ready == 0
        stolen = await asyncio.to_thread(stage.queue.open, lease)
        await asyncio.to_thread(stage.queue.yield_, stolen)
        assert (await worker).counters.groups_accepted == 1


async def test_a_worker_resumes_what_is_left_of_a_session_that_died(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        stop = asyncio.Event()
        stage.stand_in_the_second_request()
        worker = stage.start(stop, save_tokens=4)
        (held,) = await stage.until("progress is saved", lambda: stage.held(stage="partial"), worker)
        await stage.until("and more is under way", lambda: stage.standing() == 2, worker)
        session = stage.worker.place.queue.session
        await asyncio.to_thread(stage.pool.commit, Expire(request="e", session=session, reason="test"))
        await stage.go_on()
        summary = await worker
        assert summary.counters.groups_accepted == 1 and summary.counters.tokens_resumed >= held.task.tokens
        assert not stop.is_set()


async def test_a_look_that_began_before_a_lease_does_not_call_it_lost(stage_of):
    """The pool was read, then a new session leased, then the worker heard of what was read."""
    async with stage_of() as stage:
        stop = asyncio.Event()
        worker = stage.start(stop)
        await stage.until("the worker is there", lambda: stage.worker is not None, worker)
        place, watcher = stage.worker.place, stage.worker.watcher
        lost, leased, before_each_look = [], [], []
        lease = SimpleNamespace(branch="main", session="of-the-new-session")
        run = SimpleNamespace(lease=lease, lost="", lose=lost.append)
        look = place.queue.look

        async def look_and_be_late():
            before_each_look.append((len(leased), len(lost)))
            around = await look()
            leased.append(run)
            watcher.look_now.set()
            return around

        place.queue.look, watcher.runs = look_and_be_late, lambda: leased[:1]
        await stage.until("several looks", lambda: len(before_each_look) > 3, worker)
        judged = dict(before_each_look)
        assert judged[1] == 0 and judged[2] == 1, "not by the look that it came behind, and by the next"
        assert place.counters.sessions_lost == 1, "the session is counted once"
        watcher.runs = list
        stop.set()
        await worker
