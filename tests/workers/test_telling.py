"""What a worker says by itself: that it waits, for what, and what ends that; not the same line again and again."""

import logging

import pytest

from strawq.doubling import doubled
from strawq.errors import BadInput, EngineUnavailable
from strawq_workers.admission.slots import divide_samples, divide_slots
from strawq_workers.sglang.fleet import Fleet
from strawq_workers.sglang.options import EngineOptions
from strawq_workers.telling import Telling
from strawq_workers.worker import watching


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_same_is_said_at_growing_intervals_and_a_change_at_once():
    now = 0.0
    telling = Telling(lambda: now)
    said = []
    for now in range(200):
        if telling.due("down" if now != 100 else "away"):
            said.append(now)
    assert said == [0, 10, 30, 70, 100, 101, 111, 131, 171]
    assert not telling.due("") and telling.due("down"), "what has ended is news when it comes again"


def test_a_count_is_told_when_it_is_news_and_whenever_it_has_doubled_also_one_that_skips_numbers():
    told, said = 0, []
    for count in (0, 1, 7, 9, 16, 17, 18, 35, 40, 79, 80):
        if doubled(count, told, 8):
            said.append(told := count)
    assert said == [9, 18, 40, 80]


async def test_a_dead_engine_is_named_once_while_it_is_asked_again_and_again(caplog, monkeypatch):
    asked = []
    probe = Fleet._adopt

    async def adopt(self, url):
        asked.append(url)
        await probe(self, url)

    monkeypatch.setattr(Fleet, "_adopt", adopt)
    options = EngineOptions(start_timeout_s=0.5, backoff_s=0.01, backoff_max_s=0.02)
    with pytest.raises(EngineUnavailable):
        await Fleet.open(["http://127.0.0.1:1"], options)
    (line,) = (text for text in warnings(caplog) if "no engine yet" in text)
    assert len(asked) > 3 and "127.0.0.1:1" in line and "asking again" in line


async def test_a_pool_that_is_paused_when_a_worker_comes_is_named_with_what_resumes_it(stage_of, caplog):
    async with stage_of() as stage:
        stage.submit(1)
        stage.pool.pause("maintenance\nof the disk")
        worker = stage.start()
        await stage.until("it is said", lambda: warnings(caplog), worker)
        path = stage.pool.path
        assert warnings(caplog) == [
            f"the pool is paused (maintenance of the disk): nothing is leased until `strawq resume {path}`"
        ]
        stage.pool.resume()
        assert (await worker).counters.groups_accepted == 1
        assert warnings(caplog)[1:] == ["resumed at policy version (none)"]


@pytest.mark.parametrize("lasts", [False, True])
async def test_a_trainers_short_pause_is_no_news_and_one_that_lasts_is(stage_of, caplog, monkeypatch, lasts):
    if lasts:
        monkeypatch.setattr(watching, "LONG_PAUSE_S", 0.0)
    async with stage_of() as stage:
        stage.submit(1)
        stage.stand_at(3)
        worker = stage.start()
        await stage.until("it has work", lambda: stage.standing() == 2, worker)
        stage.pool.pause("weights")
        await stage.until("it has stopped", lambda: stage.pool.inspect().paused.acknowledged, worker)
        await stage.go_on()
        stage.pool.resume()
        await worker
        said = [text for text in warnings(caplog) if "the pool is paused (weights)" in text]
        assert len(said) == int(lasts)


def test_too_few_slots_name_the_rule_and_never_zero_workers():
    with pytest.raises(
        BadInput, match=r"C·E = 1 samples .* W·G = 1·8 = 8.*raise C .* until C·E >= W·G, .*groups smaller$"
    ):
        divide_slots(1, 8, 1)
    with pytest.raises(BadInput, match="; or run at most 2 workers"):
        divide_slots(17, 8, 3)
    with pytest.raises(BadInput, match="raise max_concurrent_samples") as refused:
        divide_samples(4, 8, 1)
    assert "at most" not in str(refused.value) and "C·E" not in str(refused.value)


@pytest.mark.parametrize("refusals_max", [1, 3])
async def test_a_worker_whose_options_are_refused_names_what_brings_its_groups_back(stage_of, refusals_max):
    async with stage_of() as stage:
        stage.submit(4)
        with pytest.raises(BadInput, match=f"{refusals_max} groups in a row were refused") as refused:
            await stage.run(sampling_extra={"no_such_option": 1}, refusals_max=refusals_max, max_groups=1)
        assert f"`strawq failed retry {stage.pool.path} --all`" in str(refused.value)
