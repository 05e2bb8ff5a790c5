"""Who may use the engines: workers that come and go, aborts that nobody confirmed, engines that lag behind."""

import asyncio
import logging

import pytest
from test_around import load_weights

from strawq.core.commands import Expire
from strawq.errors import BadInput, EngineUnavailable
from strawq_workers.admission.reservations import Admission, Limits
from strawq_workers.sglang.flight import AbortUnconfirmed
from strawq_workers.worker.loop import Worker
from strawq_workers.worker.process import work
from strawq_workers.worker.unconfirmed import Unconfirmed

# -- shares among live workers --------------------------------------------------------------------------------------


class Crew:
    """Workers on one event loop, each with a pool of its own, as processes have."""

    def __init__(self, stage) -> None:
        self.stage = stage
        self.workers: list[Worker] = []

    def start(self, **changes):
        options = self.stage.options(workers=0, **changes)
        task = asyncio.ensure_future(work(self.stage.root, options, started=self.workers.append))
        self.stage._tasks.append(task)
        return task

    def shares(self) -> list[int]:
        return [worker.place.admission.limits.groups for worker in self.workers]


async def test_shares_follow_the_live_workers_as_they_come_and_go(stage_of):
    async with stage_of() as stage:
        crew = Crew(stage)
        first = crew.start(concurrency=10)
        await stage.until("one worker has it all", lambda: crew.shares() == [5], first)
        second = crew.start(concurrency=10)
        await stage.until("two divide", lambda: crew.shares() == [3, 2], second)
        other = crew.start(concurrency=10, role="evaluator")
        await stage.until("another role does not count", lambda: crew.shares() == [3, 2, 5], other)
        crew.workers[0].place.stop("stopped")
        await first
        await stage.until("the second has it all", lambda: crew.shares()[1] == 5, second)


async def test_a_worker_for_which_no_slot_is_left_leaves_with_the_error_and_the_others_keep_theirs(stage_of):
    async with stage_of() as stage:
        crew = Crew(stage)
        first, second = crew.start(concurrency=4), crew.start(concurrency=4)
        await stage.until("both have one", lambda: crew.shares() == [1, 1])
        third = crew.start(concurrency=4)
        with pytest.raises(BadInput, match=r"C·E = 4 .* W·G = 3·2 = 6.*at most 2 workers"):
            await asyncio.wait_for(third, 20)
        assert crew.shares()[:2] == [1, 1] and not first.done() and not second.done()


async def test_a_worker_that_lost_its_session_goes_on_with_a_share(stage_of):
    async with stage_of() as stage:
        crew = Crew(stage)
        first = crew.start(concurrency=4)
        await stage.until("it has joined", lambda: crew.workers and crew.workers[0].place.queue.session, first)
        session = crew.workers[0].place.queue.session
        await asyncio.to_thread(stage.pool.commit, Expire(request="e", session=session, reason="test"))
        await asyncio.to_thread(stage.submit, 3)
        summary = await asyncio.wait_for(first, 30)
        assert summary.counters.groups_accepted == 3


# -- aborts that nobody confirmed -----------------------------------------------------------------------------------


class Load:
    def __init__(self, idle: bool) -> None:
        self.idle = idle


class FakeEngine:
    def __init__(self, url: str) -> None:
        self.url, self.state, self.idle, self.asked, self.dumb = url, "up", False, 0, False

    async def loads(self) -> Load:
        self.asked += 1
        if self.dumb:
            raise EngineUnavailable("no answer")
        return Load(self.idle)


class FakeFleet:
    def __init__(self, *engines: FakeEngine) -> None:
        self.engines = engines


def held(*engines: FakeEngine, limit_s: float = 60.0):
    admission = Admission(Limits(groups=1, group_size=2))
    admission.reserve("a", range(2))
    unconfirmed = Unconfirmed(admission, FakeFleet(*engines), limit_s)  # type: ignore[arg-type]
    unconfirmed.note("a", 0, engines[0].url)
    admission.sample_finished("a", 1)
    admission.release("a")
    return admission, unconfirmed


@pytest.mark.parametrize("ending", ["idle", "down", "restarted"])
async def test_a_slot_stays_taken_until_the_engine_is_idle_or_gone(ending):
    engine, other = FakeEngine("http://a"), FakeEngine("http://b")
    admission, unconfirmed = held(engine, other)
    assert await unconfirmed.settle() == 0 and admission.free_groups() == 0 and len(unconfirmed) == 1
    engine.dumb = True
    assert await unconfirmed.settle() == 0 and admission.free_groups() == 0, "no answer proves nothing"
    engine.dumb = ending == "down"
    if ending == "down":
        engine.state = "down"
    else:
        engine.idle = True
    assert await unconfirmed.settle() == 1 and admission.free_groups() == 1 and len(unconfirmed) == 0
    assert other.asked == 0


async def test_an_engine_that_is_never_idle_gives_the_slot_back_after_the_limit_with_a_warning(caplog):
    engine = FakeEngine("http://a")
    admission, unconfirmed = held(engine, limit_s=0.0)
    with caplog.at_level(logging.WARNING, "strawq.worker"):
        assert await unconfirmed.settle() == 1 and admission.free_groups() == 1
    assert "was not seen idle" in caplog.text


async def test_an_abort_that_is_not_confirmed_keeps_the_slots_and_gives_the_lease_back(stage_of):
    async with stage_of() as stage:
        worker = stage.start(save_seconds=0.2, concurrency=4, max_groups=2)
        await stage.until("the worker is up", lambda: stage.worker, worker)
        place = stage.worker.place
        generate, settle = place.fleet.generate, place.unconfirmed.settle
        lost: list[object] = []

        async def first_two_are_lost(request, stop=None):
            if len(lost) == 2:
                return await generate(request, stop)
            lost.append(request)
            await stop.wait()  # the cut of save_seconds
            raise AbortUnconfirmed("it did not end its work", stage.url)

        async def not_yet() -> int:
            return 0

        place.fleet.generate, place.unconfirmed.settle = first_two_are_lost, not_yet
        await asyncio.to_thread(stage.submit, 1, seal=False)
        await stage.until("the group is accepted by another attempt", lambda: stage.queue.counts().ready, worker)
        await stage.until("that attempt has ended", lambda: not stage.worker.runs, worker)
        (held,) = stage.held(stage="ready")
        assert held.task.attempt == 2 and held.task.failures == 0 and place.counters.groups_yielded == 1
        assert [index for _, index, _ in place.admission.lingering()] == [0, 1] and place.admission.free_groups() == 1
        place.unconfirmed.settle = settle
        await stage.until("the idle engine frees them", lambda: place.admission.free_groups() == 2, worker)
        assert place.admission.lingering() == []


# -- engines that lag -----------------------------------------------------------------------------------------------


def acknowledged(stage) -> bool:
    paused = stage.pool.inspect().paused
    return paused is not None and stage.worker.place.queue.session in paused.acknowledged


@pytest.mark.parametrize("policy", ["abort", "drain", "in_place"])
async def test_after_a_resume_nothing_is_sent_before_the_engines_serve_the_new_version(stage_of, caplog, policy):
    async with stage_of() as stage:
        stage.submit(2)
        stage.stand_at(3)
        worker = stage.start(pause_policy=policy, max_groups=1)
        await stage.until("requests are in mid-generation", lambda: stage.standing() == 2, worker)
        await asyncio.to_thread(stage.pool.pause)
        if policy == "drain":
            await stage.go_on()
        await stage.until("the pause is acknowledged", lambda: acknowledged(stage), worker)
        requests = stage.worker.place.counters.requests
        with caplog.at_level(logging.WARNING, "strawq.worker"):
            await asyncio.to_thread(stage.pool.resume, 2)
            await stage.until("the worker says that it waits", lambda: "waiting up to" in caplog.text, worker)
        assert stage.worker.watcher.paused and stage.worker.place.counters.requests == requests
        if policy != "drain":
            await stage.go_on()
        await load_weights(stage, "2", flush_cache=policy != "in_place")
        summary = await worker
        assert summary.counters.groups_accepted == 2 and summary.policy_versions == ("1", "2")
        ends = [sample.versions[-1].version for group in stage.groups(stage="ready") for sample in group.samples]
        assert ends == (["1", "1", "2", "2"] if policy == "drain" else ["2"] * 4)


async def test_an_engine_that_does_not_get_there_is_used_after_the_limit_and_its_tokens_say_what_made_them(
    stage_of, caplog
):
    async with stage_of() as stage:
        stage.submit(1)
        stage.stand_at(3)
        worker = stage.start(version_wait_s=0.2)
        await stage.until("requests are in mid-generation", lambda: stage.standing() == 2, worker)
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the pause is acknowledged", lambda: acknowledged(stage), worker)
        await stage.go_on()
        with caplog.at_level(logging.WARNING, "strawq.worker"):
            await asyncio.to_thread(stage.pool.resume, 2)
            summary = await worker
        assert "going on there" in caplog.text and summary.policy_versions == ("1",)
        (group,) = stage.groups(stage="ready")
        assert all([span.version for span in sample.versions] == ["1"] for sample in group.samples)


async def test_a_second_pause_while_engines_are_waited_for_is_acknowledged(stage_of):
    async with stage_of() as stage:
        stage.submit(1)
        stage.stand_at(3)
        worker = stage.start(version_wait_s=60.0)
        await stage.until("requests are in mid-generation", lambda: stage.standing() == 2, worker)
        for version in (2, 3):
            await asyncio.to_thread(stage.pool.pause)
            await stage.until("the pause is acknowledged", lambda: acknowledged(stage), worker)
            await asyncio.to_thread(stage.pool.resume, version)
        await stage.go_on()
        await load_weights(stage, "3")
        summary = await worker
        assert summary.counters.groups_accepted == 1 and "2" not in summary.policy_versions


async def test_versions_that_are_no_numbers_are_not_waited_for(stage_of):
    async with stage_of(weight_version="default") as stage:
        stage.submit(1)
        stage.stand_at(3)
        worker = stage.start(version_wait_s=1000.0)
        await stage.until("requests are in mid-generation", lambda: stage.standing() == 2, worker)
        await asyncio.to_thread(stage.pool.pause)
        await stage.until("the pause is acknowledged", lambda: acknowledged(stage), worker)
        await stage.go_on()
        await asyncio.to_thread(stage.pool.resume, 7)
        assert (await asyncio.wait_for(worker, 30)).counters.groups_accepted == 1
