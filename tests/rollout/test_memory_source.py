"""The queue in memory: every group that was fetched is in one place, and one holder's at a time."""

import asyncio
import random
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from scene import ListSource, indices

from strawq.model import VersionSpan
from strawq.samples import Sample
from strawq.work import Change
from strawq_workers.rollout.aging import begin_stale_anew
from strawq_workers.slime import codec
from strawq_workers.worker.memory import MemorySource
from strawq_workers.worker.metrics import Counters


def grown(work, tokens, status="aborted"):
    """The group with so many more tokens in each of its two samples."""
    before = {sample.index: sample for sample in work.group.samples}
    samples = []
    for index in range(2):
        count = (len(before[index].tokens) if index in before else 0) + tokens
        samples.append(
            Sample(
                index,
                tokens=np.arange(count, dtype=np.int32),
                logprobs=np.zeros(count, np.float32),
                versions=(VersionSpan(0, count, "1"),),
                status=status,
                prompt_tokens=np.array([5], np.int32),
            )
        )
    return msgspec.structs.replace(work.group, samples=tuple(samples))


async def leased(source, count):
    return [await source.open(lease) for lease in await source.acquire(count)]


async def test_a_report_of_an_older_attempt_does_not_count():
    source = MemorySource(ListSource(), codec)
    (first,) = await leased(source, 1)
    await source.report([Change(first, "yield", grown(first, 3))])
    (second,) = await leased(source, 1)
    assert second.task == first.task and [len(s.tokens) for s in second.group.samples] == [3, 3]
    for outcome in ("save", "complete", "drop", "fail", "yield"):
        assert (await source.report([Change(first, outcome, None)])).stale == (first.task,)
    assert (await source.report([Change(second, "complete", grown(second, 2, "completed"))])).counts(second.task)
    assert (await source.report([Change(second, "complete", None)])).stale == (second.task,)
    assert [[len(s.tokens) for s in entry.group.samples] for entry in source.take(5)] == [[5, 5]]


async def test_a_group_that_fails_is_tried_again_and_then_kept_until_it_is_given_back():
    data = ListSource(prompts=1)
    source = MemorySource(data, codec, max_attempts=2)
    for dead in ((), ("0",)):
        (work,) = await leased(source, 1)
        assert (await source.report([Change(work, "fail", None, "bad")])).dead == dead
    assert (await source.acquire(1)).status == "sealed"
    assert (await source.give_back()).fresh == 1 and indices(data.buffer) == [0]


async def test_a_caller_that_is_cancelled_while_the_data_source_works_loses_nothing():
    data, began, goes_on = ListSource(), threading.Event(), threading.Event()
    give = data.get_samples

    def get_samples(count):
        began.set()
        assert goes_on.wait(30)
        return give(count)

    data.get_samples = get_samples
    source = MemorySource(data, codec)
    asking = asyncio.ensure_future(source.acquire(3))
    await asyncio.to_thread(began.wait, 30)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    goes_on.set()
    assert (await source.give_back()).fresh == 3 and indices(data.buffer) == [0, 1, 2]


async def test_what_goes_back_is_in_the_order_of_its_use_and_as_it_was_saved():
    data = ListSource()
    source = MemorySource(data, codec)
    works = await leased(source, 6)
    await source.report([Change(works[4], "complete", grown(works[4], 2, "completed"))])
    await source.report([Change(works[1], "complete", grown(works[1], 2, "truncated"))])
    await source.report([Change(works[3], "yield", grown(works[3], 1))])
    await source.report([Change(works[2], "yield", None), Change(works[5], "drop", None, "even")])
    await source.report([Change(works[0], "save", grown(works[0], 4))])  # still leased: its run has died
    marked = []
    returned = await source.give_back(marked.append)
    assert (returned.ready, returned.partial, returned.fresh) == (2, 2, 1)
    assert indices(data.buffer) == [1, 4, 0, 3, 2]
    assert [[s.response_length for s in group] for group in data.buffer] == [[2, 2], [2, 2], [4, 4], [1, 1], [0, 0]]
    assert [[s.index for s in group] for group in data.buffer] == [[2, 3], [8, 9], [0, 1], [6, 7], [4, 5]]
    assert {sample.group_index for sample in marked} == {0, 3}
    # The next source resumes them, the same tokens after the same prompt.
    again = await leased(MemorySource(data, codec), 5)
    assert [lease.lease.stage for lease in again] == ["ready", "ready", "partial", "partial", "fresh"]
    assert all(s.prompt_tokens is not None or work.group.prompt.tokens is not None
               for work in again[:4] for s in work.group.samples)  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
async def test_every_group_is_in_one_place_whatever_happens(seed):
    chance = random.Random(seed)
    data = ListSource(prompts=40)
    source = MemorySource(data, codec, ready_max=chance.choice([0, 4]))
    source.window = chance.choice([0, 6])
    works, trained, dropped, dead = [], [], [], []
    for _ in range(120):
        act = chance.choice(["acquire", "acquire", "report", "report", "report", "take", "pause", "resume"])
        if act == "acquire":
            works += await leased(source, chance.randint(1, 4))
            assert not source.window or len(works) + source.ready + source.untrained <= source.window
        elif act == "report" and works:
            work = works[chance.randrange(len(works))]
            outcome = chance.choice(["save", "yield", "complete", "drop", "fail"])
            group = None
            if outcome in ("save", "yield", "complete"):
                group = grown(work, chance.randint(1, 3), "completed" if outcome == "complete" else "aborted")
            receipt = await source.report([Change(work, outcome, group)])
            assert receipt.counts(work.task)
            if outcome != "save":
                works.remove(work)
            number = int(work.group.prompt.group_id)
            dropped += [number] if outcome == "drop" else []
            dead += [number] if receipt.dead else []
        elif act == "take":
            entries = source.take(chance.randint(1, 3))
            orders = [entry.order for entry in entries]
            assert orders == sorted(orders)
            trained += indices(await source.samples(entries))
        elif act == "pause":
            source.pause("test")
        elif act == "resume":
            source.resume()
    await source.give_back()
    back = indices(data.buffer)
    assert sorted(trained + dropped + back) == sorted(data.handed_out)
    assert set(dead) <= set(back)


async def test_what_was_begun_is_leased_however_much_is_complete():
    """A caller under `oldest_first` may wait for it."""
    source = MemorySource(ListSource(8), codec, ready_max=2)
    source.window = 3
    first, second, third = await leased(source, 3)
    await source.report([Change(second, "complete", grown(second, 2, "completed"))])
    await source.report([Change(third, "complete", grown(third, 2, "completed"))])
    await source.report([Change(first, "yield", grown(first, 1))])
    assert source.ready == 2
    assert [work.task for work in await leased(source, 3)] == [first.task]
    assert (await source.acquire(1)).status == "backpressured"
    await source.close()


async def test_only_what_was_begun_where_that_is_asked_for():
    source = MemorySource(ListSource(8), codec)
    first, second = await leased(source, 2)
    await source.report([Change(first, "yield"), Change(second, "yield", grown(second, 1))])
    assert [work.task for work in [await source.open(one) for one in await source.acquire(2, begun_only=True)]] == [
        second.task
    ]
    await source.close()


def source_with(own):
    """A data source whose samples have these attributes of their own."""
    data = ListSource(2)
    give = data.get_samples

    def get_samples(count):
        groups = give(count)
        for sample in (sample for group in groups for sample in group):
            vars(sample).update(own(sample))
        return groups

    data.get_samples = get_samples
    return data


async def test_a_hook_sees_what_a_sample_of_its_own_came_with():
    """Also where it has not begun, and where its group differs from sample to sample."""
    source = MemorySource(source_with(lambda sample: {"hint": f"hint {sample.index}"}), codec)
    (work,) = await leased(source, 1)
    seen = codec.samples_of(work.group, None)
    assert [sample.hint for sample in seen] == [f"hint {sample.index}" for sample in seen]
    await source.close()


async def test_a_complete_group_that_got_too_old_keeps_what_its_samples_came_with():
    source = MemorySource(source_with(lambda sample: {"metadata": {"hard": sample.index}}), codec)
    (work,) = await leased(source, 1)
    await source.report([Change(work, "complete", grown(work, 2, "completed"))])
    source.policy_version = "9"
    options = SimpleNamespace(max_staleness=1, staleness_policy="drop", stale_drops_max=3)
    place = SimpleNamespace(options=options, counters=Counters(), changed=asyncio.Event())
    begin_stale_anew(source, place)
    assert source.ready == 0 and place.counters.stale_drops == 1
    (again,) = await leased(source, 1)
    assert again.task == work.task and not any(len(sample.tokens) for sample in again.group.samples)
    assert [sample.metadata["hard"] for sample in codec.samples_of(again.group, None)] == [
        sample.index for sample in codec.samples_of(again.group, None)
    ]
    await source.close()
