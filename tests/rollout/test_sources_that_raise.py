"""A data source of the user's own may raise what ends iterators, tasks or processes: the call says so and ends, what is
in hand is given back, and the rollouts can be closed."""

import asyncio
import sys
import threading

import pytest
from scene import WAIT_S, ListSource, indices

from strawq_workers.rollout import close_rollouts, generate_rollout, generate_rollout_fully_async
from strawq_workers.rollout.background import LoopThread
from strawq_workers.slime.object_store import ObjectStoreDataSource
from strawq_workers.worker.views import HookFailed

FUNCTIONS = [generate_rollout, generate_rollout_fully_async]
HERE = "test_sources_that_raise"


class Own(BaseException):
    pass


RAISED = [StopIteration, SystemExit, KeyboardInterrupt, asyncio.CancelledError, Own]


class Raises(ListSource):
    """The second call of `get_samples` raises; `add_samples` does once, when it is told to."""

    def __init__(self, error):
        super().__init__(prompts=3)
        self.error, self.calls, self.back = error, 0, None

    def get_samples(self, num_samples):
        self.calls += 1
        if self.calls > 1:
            raise self.error
        return super().get_samples(num_samples)

    def add_samples(self, samples):
        error, self.back = self.back, None
        if error is not None:
            raise error
        super().add_samples(samples)


def within_time(call, *args):
    """What the call returns or raises; fails the test if it does not end."""
    ended = []

    def run():
        try:
            ended.append((call(*args), None))
        except BaseException as error:  # noqa: BLE001
            ended.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert ended, "the call hangs"
    return ended[0]


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("function", FUNCTIONS, ids=["sync", "async"])
def test_what_get_samples_raises_ends_the_call_in_words(args_of, engine, function, error):
    data = Raises(error("no data"))
    out, failure = within_time(function, args_of(), 0, data)
    taken = [] if out is None else indices(out.samples)
    if failure is None:
        _, failure = within_time(function, args_of(), 1, data)
    assert isinstance(failure, HookFailed) and f"the data source raised {error.__name__}" in str(failure)
    assert within_time(close_rollouts, data) == (None, None)
    assert sorted([*taken, *indices(data.buffer)]) == [0, 1, 2]


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("function", FUNCTIONS, ids=["sync", "async"])
def test_what_add_samples_raises_costs_no_group(args_of, engine, function, error):
    data = Raises(ValueError("no more"))
    args = args_of(rollout_batch_size=2, over_sampling_batch_size=3)
    data.back = error("full")
    out, failure = within_time(function, args, 0, data)
    taken = [] if out is None else indices(out.samples)
    assert failure is None or (isinstance(failure, HookFailed) and error.__name__ in str(failure))
    while (closed := within_time(close_rollouts, data)) != (None, None):
        assert isinstance(closed[1], HookFailed)
    assert sorted([*taken, *indices(data.buffer)]) == sorted(set(data.handed_out))


def test_a_task_that_exits_does_not_end_the_loop():
    loop = LoopThread()

    async def exits():
        sys.exit(3)

    async def work(stop):
        task = asyncio.ensure_future(exits())
        await asyncio.wait({task})
        return type(task.exception())

    try:
        assert within_time(loop.call, work) == (SystemExit, None)
        assert within_time(loop.call, work) == (SystemExit, None)
    finally:
        loop.close()


def stops(args, rollout_id, buffer, num_samples):
    return [next(iter(()))]


async def test_a_buffer_filter_that_runs_out_does_not_hang(args_of):
    source = ObjectStoreDataSource(args_of(buffer_filter_path=f"{HERE}.stops"))
    source.add_samples(source.get_samples(1))
    with pytest.raises(HookFailed, match="buffer-filter-path raised StopIteration"):
        await asyncio.wait_for(source.get_samples_async(1), WAIT_S)
