"""The calls that slime's manager makes, in its order, on `StrawDataSource`: with two generations of slime's `Sample`, a
sampler like the stock one and our own rollout functions."""

import argparse
import asyncio
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shapes
from stand_in import Engine, Manager, flat, job_args, save_model

from strawq import Pool
from strawq_workers.engine.launch import running_engine
from strawq_workers.engine.options import EngineOptions
from strawq_workers.filters import DynamicFilterOutput
from strawq_workers.rollout import close_rollouts
from strawq_workers.slime.arguments import add_rollout_arguments

Start = Callable[..., Manager]


@pytest.fixture(params=["older", "newer"])
def sample_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """slime is importable, with one of its two generations of `Sample`."""
    kind = shapes.Older if request.param == "older" else shapes.Newer
    for name in ("slime", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType("slime.utils.types")
    module.Sample = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slime.utils.types", module)
    return kind


@pytest.fixture
def start(tmp_path: Path, sample_kind: Any) -> Iterator[Start]:
    Pool.init(tmp_path / "save" / "rollout_data").close()
    managers: list[Manager] = []

    def run(after: int | None = -1, tells: bool = True, **changes: Any) -> Manager:
        for manager in managers:
            manager.dispose()
        managers.append(Manager(job_args(tmp_path, **changes), tells))
        managers[-1].load(after)
        return managers[-1]

    yield run
    for manager in managers:
        manager.dispose()


def counts(manager: Manager) -> Any:
    return manager.data_source.pool.queue().counts()


def indices(samples: Any) -> list[int]:
    return sorted({sample.group_index for sample in flat(samples)})


def save(manager: Manager, rollout_id: int) -> None:
    save_model(manager.args, rollout_id)
    manager.save(rollout_id)


# -- the stock sampler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tells", [True, False])
def test_a_job_from_construction_to_the_end_and_again(start: Start, sample_kind: Any, tells: bool) -> None:
    manager = start(tells=tells)
    assert manager.rollouts_per_epoch() == 3
    for name in ("close", "state_dict", "load_state_dict", "get_samples_async", "get_buffer_length"):
        assert callable(getattr(manager.data_source, name, None)), name
    seen: list[int] = []
    for rollout_id in range(3):
        samples = manager.generate(rollout_id)
        assert all(type(sample) is sample_kind for sample in samples)
        assert [sample.reward for sample in samples] == [0.0, 1.0] * 2
        seen += indices(samples)
        if rollout_id == 1:
            save(manager, rollout_id)
            assert counts(manager).trained == 4
            assert manager.eval(rollout_id)["held-out"]["rewards"] == [1.0]
    assert seen == [0, 1, 2, 3, 4, 5]
    # The third rollout was not saved: the model that comes back has not seen it, and gets it again.
    manager = start(1, tells=tells)
    samples = manager.generate(2)
    assert indices(samples) == [4, 5]
    assert manager.args.engine.requests == []  # without generating it again
    save(manager, 2)
    assert counts(manager).trained == 6
    assert start(2, tells=tells).generate(3)[0].group_index == 6


def test_leftovers_of_a_rollout_go_back_at_its_boundary(start: Start) -> None:
    """Over-sampling: two groups are delivered, one is finished beyond the batch, one is aborted."""
    engine = Engine(waits=lambda sample: sample.group_index in (1, 3))
    manager = start(over_sampling_batch_size=4, partial_rollout=True, engine=engine)
    assert indices(manager.generate(0)) == [0, 2]
    assert counts(manager).in_batch == 2
    save(manager, 0)
    now = counts(manager)
    assert (now.trained, now.fresh_leased, now.partial_leased, now.partial_pending) == (2, 0, 0, 2)
    engine.waits = lambda sample: False
    engine.requests.clear()
    assert indices(manager.generate(1)) == [1, 3]
    # Each goes on from its two tokens, before anything new is begun.
    assert engine.requests == [(2, 2), (3, 2), (6, 2), (7, 2), (8, 0), (9, 0), (10, 0), (11, 0)]


def test_without_partial_rollout_unfinished_work_starts_anew(start: Start) -> None:
    engine = Engine(waits=lambda sample: sample.group_index == 1)
    manager = start(over_sampling_batch_size=3, engine=engine)
    assert indices(manager.generate(0)) == [0, 2]
    engine.waits = lambda sample: False
    engine.requests.clear()
    assert indices(manager.generate(1)) == [1, 3]
    assert (2, 0) in engine.requests
    assert (3, 0) in engine.requests


def test_a_finished_surplus_group_is_delivered_later_without_being_generated_again(start: Start) -> None:
    manager = start(over_sampling_batch_size=3)
    assert indices(manager.generate(0)) == [0, 1]
    manager.args.engine.requests.clear()
    assert indices(manager.generate(1)) == [2, 3]
    assert sorted(index for index, _ in manager.args.engine.requests) == [6, 7, 8, 9]  # groups 3 and 4 alone


def test_a_complete_group_that_is_handed_out_again_keeps_its_loss_masks(start: Start) -> None:
    """slime's sampler masks the tokens that it finds before it sees that the sample has ended."""
    flags = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True, "over_sampling_batch_size": 3}
    engine = Engine(waits=lambda sample: sample.group_index == 2)
    manager = start(engine=engine, **flags)
    assert indices(manager.generate(0)) == [0, 1]
    engine.waits = lambda sample: False
    manager.args.rollout_batch_size, manager.args.global_batch_size = 1, 2
    assert [sample.loss_mask for sample in manager.generate(1)] == [[0, 0, 1, 1]] * 2
    # Both rollouts come again, complete: none was saved.
    again = start(-1, engine=Engine(), **flags)
    again.args.rollout_batch_size, again.args.global_batch_size = 3, 6
    delivered = again.generate(0)
    assert indices(delivered) == [0, 1, 2]
    assert [sample.loss_mask for sample in delivered] == [None] * 4 + [[0, 0, 1, 1]] * 2


def keep_even(_args: Any, samples: Any, **_: Any) -> DynamicFilterOutput:
    even = samples[0].group_index % 2 == 0
    return DynamicFilterOutput(even, None if even else "odd")


def drop_first(_args: Any, groups: Any) -> None:
    groups.pop(0)


def test_what_the_dynamic_filter_drops_is_dropped_and_counted(start: Start) -> None:
    manager = start(dynamic_sampling_filter_path="test_manager.keep_even")
    assert indices(manager.generate(0)) == [0, 2]
    assert indices(manager.generate(1)) == [4, 6]
    save(manager, 1)
    view = manager.data_source.pool.inspect().queues["rollout"]
    assert view.drop_reasons == {"odd": 4}
    assert (view.tasks.trained, view.tasks.partial_pending, view.tasks.fresh_leased) == (4, 0, 0)


def test_what_the_sample_filter_takes_out_does_not_come_back(start: Start) -> None:
    manager = start(rollout_sample_filter_path="test_manager.drop_first", global_batch_size=2)
    assert indices(manager.generate(0)) == [1]
    assert indices(manager.generate(1)) == [3]
    save(manager, 1)
    view = manager.data_source.pool.inspect().queues["rollout"]
    assert view.drop_reasons == {"rollout_sample_filter": 2}
    assert view.tasks.trained == 2


def test_a_group_that_the_manager_trims_away_goes_back(start: Start) -> None:
    manager = start(global_batch_size=2, rollout_batch_size=3, over_sampling_batch_size=3)
    manager.args.global_batch_size = 4
    assert indices(manager.generate(0)) == [0, 1]
    manager.args.engine.requests.clear()
    assert indices(manager.generate(1)) == [2, 3]
    assert 4 not in [index for index, _ in manager.args.engine.requests]


def users_log(rollout_id: int, args: Any, samples: Any, extra: Any, seconds: float) -> bool:
    args.logged.append((rollout_id, len(samples), extra, seconds))
    return True


def test_the_users_own_hooks_are_called_as_before_and_put_back(start: Start) -> None:
    manager = start(custom_rollout_log_function_path="test_manager.users_log", logged=[])
    manager.generate(0)
    assert manager.args.logged == [(0, 4, None, 1.0)]
    manager.dispose()
    assert manager.args.custom_rollout_log_function_path == "test_manager.users_log"


def test_training_that_overlaps_by_one_saves_only_what_it_has_seen(start: Start) -> None:
    """train_async: rollout 1 is generated while rollout 0 trains, then rollout 0 is saved."""
    manager = start()
    first, second = indices(manager.generate(0)), indices(manager.generate(1))
    save(manager, 0)
    assert (counts(manager).trained, counts(manager).in_batch) == (2, 2)
    again = start(0)
    assert first == [0, 1]
    assert indices(again.generate(1)) == second
    assert again.args.engine.requests == []


def across_rollouts(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A worker that goes on between rollouts: it has one group more in hand than it delivers."""
    hand = args.hand
    while len(hand) < args.rollout_batch_size + 1:
        hand += data_source.get_samples(1)
    delivered, args.hand = hand[:-1], hand[-1:]
    for sample in flat(delivered):
        args.engine.answer(args, sample, 4, "completed")
        sample.reward = 1.0
    return delivered


across_rollouts_fully_async = across_rollouts


def test_a_function_that_works_across_rollouts_keeps_its_groups(start: Start) -> None:
    manager = start(rollout_function_path="test_manager.across_rollouts_fully_async", hand=[])
    seen = [indices(manager.generate(rollout_id)) for rollout_id in range(3)]
    assert seen == [[0, 1], [2, 3], [4, 5]]
    assert manager.data_source._sampling.held == 1
    save(manager, 2)
    assert counts(manager).trained == 6


def test_the_newest_version_that_is_seen_is_the_pools_policy(start: Start) -> None:
    manager = start(engine=Engine(version="3"))
    manager.generate(0)
    assert manager.data_source.pool.policy_version() == "3"
    manager.args.engine.version = "default"
    manager.generate(1)
    assert manager.data_source.pool.policy_version() == "3"


# -- our own rollout functions ----------------------------------------------------------------------------------------


@pytest.fixture
def engine_url() -> Iterator[str]:
    """The embedded engine on an event loop of its own."""
    found: list[Any] = []
    ready = threading.Event()

    async def serve() -> None:
        async with running_engine(EngineOptions()) as (url, _):
            end = asyncio.Event()
            found.extend((url, asyncio.get_running_loop(), end))
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    yield found[0]
    close_rollouts()
    found[1].call_soon_threadsafe(found[2].set)
    thread.join(30)


def test_our_rollout_function_on_the_same_manager(
    start: Start, sample_kind: Any, engine_url: str, tmp_path: Path
) -> None:
    flags = vars(add_rollout_arguments(argparse.ArgumentParser()).parse_args([]))
    changes = {name: value for name, value in flags.items() if name not in vars(job_args(tmp_path))}
    changes |= {
        "rollout_function_path": "strawq_workers.slime.generate_rollout",
        "rollout_engines": [engine_url],
        "rollout_max_response_len": 6,
        "rollout_data_transport": "straw",
        "sglang_server_concurrency": 8,
    }
    manager = start(**changes)
    first = manager.generate(0)
    assert indices(first) == [0, 1]
    assert all(type(sample) is sample_kind for sample in first)
    assert all(len(sample.rollout_log_probs) == sample.response_length > 0 for sample in first)
    tokens = [sample.tokens for sample in first]
    assert [sample.tokens for sample in manager.generate(0)] == tokens  # the same rollout, the same batch
    save(manager, 0)
    assert counts(manager).trained == 2
    second = manager.generate(1)
    close_rollouts()
    again = start(0, **changes)
    assert [sample.tokens for sample in again.generate(1)] == [sample.tokens for sample in second]
