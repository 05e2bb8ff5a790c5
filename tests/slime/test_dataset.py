import gzip
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strawq.errors import BadInput
from strawq_workers.slime.dataset import Cursor, DatasetError, PromptDataset


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"input": f"p{at}", "answer": str(at)} for at in range(count)]


def dataset(path: str | None, **changes: Any) -> PromptDataset:
    usual = {"n_samples_per_prompt": 2, "rollout_seed": 42, "rollout_shuffle": True, "prompt_data": path}
    return PromptDataset(SimpleNamespace(**{**usual, **changes}))


def texts(samples: list[Any]) -> list[str]:
    return [sample.prompt for sample in samples]


@pytest.mark.parametrize("shuffled", [False, True])
def test_one_call_crosses_any_number_of_epochs_and_no_id_repeats(tmp_path: Path, shuffled: bool) -> None:
    data = dataset(jsonl(tmp_path / "d.jsonl", prompts(7)), rollout_shuffle=shuffled)
    samples, cursor = data.take(Cursor(), 28)
    assert cursor == Cursor(7, 3, 28, 56)
    for epoch in range(4):
        assert sorted(texts(samples[epoch * 7 : epoch * 7 + 7])) == [f"p{at}" for at in range(7)]
    assert [sample.group_index for sample in samples] == list(range(28))
    assert [sample.index for sample in samples] == list(range(0, 56, 2))
    orders = {tuple(texts(samples[epoch * 7 : epoch * 7 + 7])) for epoch in range(4)}
    assert len(orders) == (4 if shuffled else 1)
    assert data.take(cursor, 1)[1].epoch_id == 4


def test_what_follows_a_cursor_is_the_same_however_it_was_reached(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", prompts(5))
    whole, end = dataset(path).take(Cursor(metadata={"k": 1}), 13)
    pieces, cursor = [], Cursor(metadata={"k": 1})
    for count in (1, 0, 4, 7, 1):
        fresh, cursor = dataset(path).take(Cursor.from_json(cursor.to_json()), count)
        pieces += fresh
    assert [vars(sample) for sample in pieces] == [vars(sample) for sample in whole]
    assert cursor == end


def test_the_shuffle_does_not_touch_anybody_elses_random_state(tmp_path: Path) -> None:
    data = dataset(jsonl(tmp_path / "d.jsonl", prompts(9)))
    random.seed(5)
    np.random.seed(5)
    state, other = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    data.take(Cursor(), 20)
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == other  # type: ignore[index]


def test_rows_of_jsonl_and_parquet_give_equal_samples(tmp_path: Path) -> None:
    rows = [
        {"q": [{"role": "user", "content": "hi"}], "a": "b", "m": {"source": "x", "n": 1}, "t": '[{"name": "add"}]'},
        {"q": [{"role": "user", "content": "you"}], "a": None, "m": None, "t": None},
    ]
    names = {"input_key": "q", "label_key": "a", "metadata_key": "m", "tool_key": "t"}
    path = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    zipped = tmp_path / "d.jsonl.gz"
    zipped.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    plain = dataset(jsonl(tmp_path / "d.jsonl", rows), rollout_shuffle=False, **names)
    wanted = [vars(sample) for sample in plain.take(Cursor(), 2)[0]]
    assert wanted[0]["prompt"] == [{"role": "user", "content": "hi"}]
    assert wanted[0]["label"] == "b"
    assert wanted[0]["metadata"] == {"source": "x", "n": 1, "tools": [{"name": "add"}]}
    assert (wanted[1]["label"], wanted[1]["metadata"]) == (None, {})
    for other in (str(path), f"file://{path}", str(zipped)):
        found = dataset(other, rollout_shuffle=False, **names)
        assert [vars(sample) for sample in found.take(Cursor(), 2)[0]] == wanted
    assert dataset(str(zipped), **names).sha256 == plain.sha256


def test_a_slice_takes_some_rows_and_is_part_of_the_identity(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", prompts(10))
    for piece, wanted in (("[2:4]", ["p2", "p3"]), ("[:1]", ["p0"]), ("[-2:]", ["p8", "p9"])):
        data = dataset(f"{path}@{piece}", rollout_shuffle=False)
        assert texts(data.take(Cursor(), len(wanted))[0]) == wanted
        assert data.identity() != dataset(path, rollout_shuffle=False).identity()
    assert dataset(path).identity()["dataset"]["sha256"] == dataset(f"{path}@[:1]").identity()["dataset"]["sha256"]
    assert dataset(path).identity() == dataset(path).identity()


def test_an_empty_dataset_and_an_offset_outside_of_it_are_runtime_errors(tmp_path: Path) -> None:
    empty = dataset(jsonl(tmp_path / "e.jsonl", []))
    assert empty.take(Cursor(), 0) == ([], Cursor())
    with pytest.raises(RuntimeError, match="empty dataset"):
        empty.take(Cursor(), 1)
    data = dataset(jsonl(tmp_path / "d.jsonl", prompts(3)))
    for offset in (4, -1):
        with pytest.raises(RuntimeError, match="invalid dataset offset"):
            data.take(Cursor(sample_offset=offset), 1)
    with pytest.raises(DatasetError, match="no dataset cursor"):
        Cursor.from_json('{"offset": 1}')
    with pytest.raises(BadInput, match="nonnegative"):
        data.take(Cursor(), -1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", r"d.jsonl: row 2 is a list"),
        ("{", r"d.jsonl: row 2 is not JSON"),
        ('{"prompt": "x"}', r"row 2: there is no 'input' \(it has 'prompt'\); say the field with --input-key"),
        ('{"input": 5}', "row 2: 'input' is 5, not text"),
        ('{"input": [-1]}', "negative"),
        ('{"input": "x", "metadata": [1]}', "not an object"),
        ('{"input": "x", "tools": "{"}', "'tools' is text that is not JSON"),
    ],
)
def test_a_bad_row_is_named_before_anything_is_generated(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "d.jsonl").write_text('{"input": "fine"}\n' + line + "\n")
    with pytest.raises(BadInput, match=said):
        dataset(str(tmp_path / "d.jsonl"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere.jsonl cannot be read"):
        dataset(str(tmp_path / "nowhere.jsonl"))


def test_samples_do_not_share_what_a_hook_may_change(tmp_path: Path) -> None:
    rows: list[Any] = [{"input": [{"role": "user", "content": "x"}], "metadata": {"a": []}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    for path in (jsonl(tmp_path / "d.jsonl", rows), str(tmp_path / "d.parquet")):
        data = dataset(path)
        (first, second), _ = data.take(Cursor(), 2)
        first.metadata["a"].append(1)
        first.prompt[0]["content"] = "y"
        assert (second.metadata, second.prompt) == ({"a": []}, [{"role": "user", "content": "x"}])
        assert data.prompts()[0].metadata == {"a": []}


def test_token_ids_are_prompts_and_the_longest_is_known(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"input": [1, 2, 3]}, {"input": [4]}])
    data = dataset(path, rollout_max_prompt_len=2)
    assert len(data) == 1
    assert data.take(Cursor(), 1)[0][0].tokens == [4]
    text = jsonl(tmp_path / "t.jsonl", prompts(1))
    with pytest.raises(BadInput, match="--rollout-max-prompt-len with prompts of text needs a tokenizer"):
        dataset(text, rollout_max_prompt_len=2)
    with pytest.raises(BadInput, match="--apply-chat-template needs a tokenizer"):
        dataset(text, apply_chat_template=True)


def test_without_prompt_data_prompts_are_empty_and_have_no_end() -> None:
    samples, cursor = dataset(None).take(Cursor(), 5)
    assert texts(samples) == [""] * 5
    assert cursor == Cursor(5, 0, 5, 10)
