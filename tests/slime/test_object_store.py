import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shapes import answered

from strawq.errors import BadInput, Damaged
from strawq_workers.slime import build_data_source
from strawq_workers.slime.object_store import ObjectStoreDataSource
from strawq_workers.slime.sample import Sample, Status


def args_in(root: Path, prompts: int = 5, **changes: Any) -> SimpleNamespace:
    data = root / "prompts.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps({"input": f"p{at}", "label": str(at)}) + "\n" for at in range(prompts)))
    usual: dict[str, Any] = {
        "rollout_batch_size": 2, "n_samples_per_prompt": 2, "prompt_data": str(data), "label_key": "label",
        "save": str(root / "save"), "load": str(root / "save"), "rollout_shuffle": True,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **changes})


def prompts_of(groups: list[list[Any]]) -> list[str]:
    return [group[0].prompt for group in groups]


def group(at: int, *versions: str) -> list[Any]:
    return [answered(Sample, 2 * at + member, group_index=at, weight_versions=list(versions)) for member in range(2)]


def test_it_is_the_data_source_of_the_default_transport(tmp_path: Path) -> None:
    args = args_in(tmp_path)
    assert type(build_data_source(args)) is ObjectStoreDataSource
    assert set(vars(args)) == set(vars(args_in(tmp_path)))  # no handles on args


def test_a_saved_state_has_a_durable_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its directory is new: a name that is not synced is gone after a power cut."""
    source, synced, fsync = ObjectStoreDataSource(args_in(tmp_path)), [], os.fsync

    def note(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    source.save(0)
    assert synced[-2:] == ["rollout", "save"]


def test_the_buffer_comes_first_then_fresh_groups_over_any_number_of_epochs(tmp_path: Path) -> None:
    source = ObjectStoreDataSource(args_in(tmp_path))
    first = source.get_samples(2)
    assert [[sample.index for sample in group] for group in first] == [[0, 1], [2, 3]]
    first[0][0].metadata["mark"] = 1
    assert first[0][1].metadata == {}
    source.add_samples([first[1]])
    assert (source.get_buffer_length(), len(source)) == (1, 5)
    more = source.get_samples(14)
    assert more[0] is first[1]
    assert [group[0].group_index for group in more[1:]] == list(range(2, 15))
    assert sorted(prompts_of(first + more[1:4])) == [f"p{at}" for at in range(5)]
    assert (source.epoch_id, source.sample_offset, source.sample_group_index, source.sample_index) == (2, 5, 15, 30)
    assert source.get_buffer_length() == 0


def test_a_reader_that_fails_has_moved_nothing(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("")
    source = ObjectStoreDataSource(args_in(tmp_path))
    source.add_samples([group(0), group(1)])
    with pytest.raises(RuntimeError, match="empty dataset"):
        source.get_samples(3)
    assert source.get_buffer_length() == 2
    assert len(source.get_samples(2)) == 2
    with pytest.raises(BadInput, match="nonnegative"):
        source.get_samples(-1)


@pytest.mark.parametrize(
    ("given", "said"),
    [((), "a list of groups, not tuple"), ([Sample()], "item 0 is a Sample"), ([[Sample()]], "group 0 has 1 samples")],
)
def test_what_is_no_list_of_whole_groups_is_refused(tmp_path: Path, given: Any, said: str) -> None:
    source = ObjectStoreDataSource(args_in(tmp_path))
    with pytest.raises(BadInput, match=said):
        source.add_samples(given)
    assert source.get_buffer_length() == 0


def test_the_oldest_weights_come_first_where_that_is_asked_for(tmp_path: Path) -> None:
    groups = [group(0, "7"), group(1), group(2, "3", "9"), group(3, "default"), group(4, "3"), group(5, "10")]
    source = ObjectStoreDataSource(args_in(tmp_path, buffer_sort_by_staleness=True))
    source.add_samples(list(groups))
    assert [found[0].group_index for found in source.get_samples(6)] == [2, 4, 0, 5, 1, 3]
    plain = ObjectStoreDataSource(args_in(tmp_path))
    plain.add_samples(list(groups))
    assert [found[0].group_index for found in plain.get_samples(3)] == [0, 1, 2]


def take_last(args: Any, rollout_id: Any, buffer: list[list[Any]], num_samples: int) -> list[list[Any]]:
    return [buffer.pop() for _ in range(min(num_samples, len(buffer), args.at_most))]


def take_all(args: Any, rollout_id: Any, buffer: list[list[Any]], num_samples: int) -> list[list[Any]]:
    found, buffer[:] = list(buffer), []
    return found


def test_a_filter_of_ones_own_wins_over_the_order_and_may_not_answer_more(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "own_filters", sys.modules[__name__])
    own = {"buffer_sort_by_staleness": True, "at_most": 1}
    source = ObjectStoreDataSource(args_in(tmp_path, buffer_filter_path="own_filters.take_last", **own))
    source.add_samples([group(0, "1"), group(1, "2")])
    found = source.get_samples(3)
    assert found[0][0].group_index == 1
    assert len(found) == 3
    assert source.get_buffer_length() == 1
    greedy = ObjectStoreDataSource(args_in(tmp_path, buffer_filter_path="own_filters.take_all", **own))
    greedy.add_samples([group(0), group(1)])
    with pytest.raises(BadInput, match="answered something else than at most 1 groups"):
        greedy.get_samples(1)
    assert greedy.get_buffer_length() == 2


def test_what_was_saved_comes_back_with_cursor_metadata_and_buffer(tmp_path: Path) -> None:
    source = ObjectStoreDataSource(args_in(tmp_path))
    source.get_samples(7)
    partial = group(90, "1")
    partial[0].status = Status.ABORTED
    partial[0].rollout_routed_experts = [np.arange(12, dtype=np.int32).reshape(6, 1, 2)]
    partial[1].trace = {"steps": (1, b"x"), "score": float("-inf")}
    source.add_samples([partial])
    source.update_metadata({"seen": {"a": (1, 2)}})
    source.save(3)
    wanted = source.get_samples(6)
    again = ObjectStoreDataSource(args_in(tmp_path))
    assert again.load(3)
    assert again.get_metadata() == {"seen": {"a": (1, 2)}}
    found = again.get_samples(6)
    assert prompts_of(found) == prompts_of(wanted)
    assert [[sample.index for sample in group] for group in found] == [[s.index for s in group] for group in wanted]
    assert found[0][0].status is Status.ABORTED
    np.testing.assert_array_equal(found[0][0].rollout_routed_experts[0], partial[0].rollout_routed_experts[0])
    assert found[0][1].trace == partial[1].trace
    newest = ObjectStoreDataSource(args_in(tmp_path))
    newest.load()
    assert newest.sample_group_index == 7


def test_a_state_of_another_dataset_is_refused_by_what_differs(tmp_path: Path) -> None:
    ObjectStoreDataSource(args_in(tmp_path)).save(0)
    for changes, name in (({"rollout_seed": 1}, "seed"), ({"n_samples_per_prompt": 4}, "n_samples_per_prompt")):
        with pytest.raises(BadInput, match=f"Data source checkpoint differs in {name}"):
            ObjectStoreDataSource(args_in(tmp_path, **changes)).load(0)
    (tmp_path / "prompts.jsonl").write_text('{"input": "other", "label": "x"}\n')
    with pytest.raises(BadInput, match="Data source checkpoint differs in dataset"):
        ObjectStoreDataSource(args_in(tmp_path)).load(0)


def test_damage_and_slimes_pickles_are_named_and_absence_is_a_beginning(tmp_path: Path, caplog: Any) -> None:
    source = ObjectStoreDataSource(args_in(tmp_path))
    source.save(0)
    path = tmp_path / "save" / "rollout" / "global_dataset_state_dict_0.msgpack"
    data = path.read_bytes()
    for cut in (data[:-1], data[:50] + bytes([data[50] ^ 1]) + data[51:]):
        path.write_bytes(cut)
        with pytest.raises(Damaged, match="restore it from a copy"):
            source.load(0)
    path.write_bytes(b"something else")
    with pytest.raises(BadInput, match="no state of a data source"):
        source.load(0)
    path.with_name("global_dataset_state_dict_1.pt").write_bytes(b"")
    with pytest.raises(BadInput, match="as a pickle"):
        source.load(1)
    with pytest.raises(BadInput, match=r"_2.msgpack is not there: .* has the states after rollouts 0; choose one"):
        source.load(2)
    assert not source.load(-1) and "though states after 1 rollouts are there" in caplog.text
    caplog.clear()
    for rollout_id in (None, -1, 5):
        assert not ObjectStoreDataSource(args_in(tmp_path, load=str(tmp_path / "new"))).load(rollout_id)
        assert f"saved in {tmp_path / 'new'}: the dataset starts from its beginning" in caplog.text
        caplog.clear()
    assert not ObjectStoreDataSource(args_in(tmp_path, load=None)).load(5) and not caplog.text
    with pytest.raises(BadInput, match="saving needs --save"):
        ObjectStoreDataSource(args_in(tmp_path, save=None)).save(0)


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    source = ObjectStoreDataSource(args_in(tmp_path))
    source.save(0)
    source.get_samples(1)
    bad = group(5)
    bad[0].custom = object()
    source.add_samples([bad])
    with pytest.raises(
        BadInput, match=r"Unsupported durable Sample field type: builtins.object at buffer\[0\]\[0\].custom"
    ):
        source.save(0)
    again = ObjectStoreDataSource(args_in(tmp_path))
    again.load(0)
    assert (again.sample_group_index, again.get_buffer_length()) == (0, 0)
    assert [path.name for path in (tmp_path / "save" / "rollout").iterdir()] == ["global_dataset_state_dict_0.msgpack"]


def test_state_dict_has_slimes_keys_and_is_taken_back(tmp_path: Path) -> None:
    source = ObjectStoreDataSource(args_in(tmp_path))
    source.get_samples(3)
    source.add_samples([group(0)])
    source.update_metadata({"k": 1})
    state = source.state_dict()
    assert set(state) == {"sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata", "buffer"}
    again = ObjectStoreDataSource(args_in(tmp_path))
    again.load_state_dict(state)
    assert again.state_dict() == state
    with pytest.raises(BadInput, match="no state of a data source"):
        again.load_state_dict({"sample_offset": "x"})
    with pytest.raises(BadInput, match="group 0 has 1 samples"):
        again.load_state_dict({**state, "buffer": [[1]]})
    assert again.state_dict() == state


async def test_the_event_loop_goes_on_and_a_cancelled_reader_loses_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    source = ObjectStoreDataSource(args_in(tmp_path))
    entered, go_on = threading.Event(), threading.Event()
    read = source.get_samples

    def slow(count: int) -> list[list[Any]]:
        entered.set()
        assert go_on.wait(20)
        return read(count)

    monkeypatch.setattr(source, "get_samples", slow)
    task = asyncio.ensure_future(source.get_samples_async(2))
    await asyncio.to_thread(entered.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert len(await source.get_samples_async(1)) == 1  # behind the first, in the same thread
    assert source.get_buffer_length() == 1
    source.close()
    source.close()
    with pytest.raises(BadInput, match="closed"):
        read(1)


class OwnSource:
    def __init__(self, args: Any) -> None:
        self.args = args


def test_a_data_source_of_ones_own_is_built_from_args_alone(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "own_sources", sys.modules[__name__])
    args = args_in(tmp_path, data_source_path="own_sources.OwnSource")
    assert build_data_source(args).args is args
