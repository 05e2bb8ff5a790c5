"""Submission is exactly once: nothing of a bad file, nothing twice after a crash, nothing twice by accident."""

from __future__ import annotations

import gzip
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strawq import Pool, Prompt
from strawq.cli import input as cli_input
from strawq.errors import OutcomeUnknown
from strawq.queue import Queue
from tests.cli.conftest import Run, prompts_of, start, write_lines


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "n": number} for number in range(count)]


def total(run: Run, pool: Path) -> int:
    count: int = run("inspect", pool, "--json").data["queues"]["rollout"]["tasks"]["total"]
    return count


def test_every_field_of_a_row_arrives(run: Run, pool: Path, tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "a.jsonl",
        {"q": "text", "label": "4", "meta": {"source": "x", "n": 1}, "id": "g0"},
        {"q": [1, 2, 2**31 - 1], "label": 4, "meta": '{"source": "y"}', "id": 7},
        {"q": [{"role": "user", "content": "hi"}], "label": None, "meta": None, "id": ""},
        {"q": "ünïcode 🐈", "label": ["a", 1], "meta": {}, "id": "g3"},
    )
    keys = ["--input-key", "q", "--label-key", "label", "--metadata-key", "meta", "--id-key", "id"]
    assert run("submit", pool, file, *keys, "--group-size", 4, "--json").data["submitted"] == 4
    first, second, third, fourth = prompts_of(pool)
    assert (first.text, first.label, first.metadata, first.group_id) == ("text", "4", {"source": "x", "n": 1}, "g0")
    assert (second.tokens.tolist(), second.label, second.metadata) == ([1, 2, 2**31 - 1], "4", {"source": "y"})
    assert second.group_id == "7"
    assert (third.messages, third.label, third.metadata) == ([{"role": "user", "content": "hi"}], None, {})
    assert (fourth.text, fourth.label) == ("ünïcode 🐈", '["a",1]')
    assert {prompt.samples for prompt in (first, second, third, fourth)} == {4}


@pytest.mark.parametrize("name", ["prompt", "text", "messages", "input_ids", "tokens"])
def test_the_usual_input_keys_are_found(name: str, run: Run, pool: Path, tmp_path: Path) -> None:
    value: Any = (
        [5, 6] if name in ("input_ids", "tokens") else [{"role": "user", "content": "?"}] if name == "messages" else "?"
    )
    run("submit", pool, write_lines(tmp_path / "a.jsonl", {"other": 1, name: value}))
    assert len(prompts_of(pool)) == 1


def test_formats_and_places_to_read_from(run: Run, pool: Path, tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows(3))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "bom.json").write_bytes(
        b"\xef\xbb\xbf" + b'{"prompt": "bom"}\r\n\r\n   \n{"prompt": "no newline at the end"}'
    )
    pq.write_table(pa.table({"prompt": ["p1", "p2"], "x": [1, 2]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": "c"}]]}), tmp_path / "chat.data")
    url = f"file://{write_lines(tmp_path / 'c.jsonl', {'prompt': 'by url'})}"
    files = [tmp_path / "a.jsonl.gz", tmp_path / "bom.json", tmp_path / "b.parquet", tmp_path / "chat.data", url]
    answer = run("submit", pool, *files, "--json").data
    assert [file["submitted"] for file in answer["files"]] == [3, 2, 2, 1, 1]
    texts = [prompt.text or prompt.messages for prompt in prompts_of(pool)]
    expected = ["bom", "no newline at the end", "p1", "p2", [{"role": "user", "content": "c"}], "by url"]
    assert texts == [row["prompt"] for row in rows(3)] + expected


def test_any_fsspec_url(run: Run, pool: Path) -> None:
    import fsspec

    with fsspec.open("memory://prompts/a.jsonl", "w") as file:
        file.write('{"prompt": "from memory"}\n')
    run("submit", pool, "memory://prompts/a.jsonl")
    assert [prompt.text for prompt in prompts_of(pool)] == ["from memory"]
    ran = run("submit", pool, "memory://absent.jsonl", code=2)
    assert "absent.jsonl cannot be read" in ran.err
    assert "cannot be read" in run("submit", pool, "nosuchstore://x", code=2).err


def test_standard_input(pool: Path, tmp_path: Path, run: Run) -> None:
    with open(write_lines(tmp_path / "a.jsonl", *rows(2))) as file:
        process = start("submit", pool, "-", "--json", stdin=file)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err, json.loads(out)["submitted"]) == (0, "", 2)


BAD_LINES = [
    ('{"prompt": ', "not JSON"),
    ("[1, 2]", "a list where an object is needed"),
    ('{"prompt": NaN}', "not JSON"),
    (r'{"prompt": "\ud800"}', r"not JSON (\ud800 is half of a surrogate pair"),
    (r'{"prompt": "x", "more": ["a \udc00 b"]}', r"not JSON (\udc00 is half of a surrogate pair"),
    ('{"prompt": "a", "label": 1, "prompt": "b"}', "'prompt' is there more than once"),
    (r'{"prompt": "a", "other": {"prompt": 1}, "prompt": {"\u0061": 1}}', "'prompt' is there more than once"),
    (b'{"prompt": "\xff"}', "not JSON"),
    ({"other": 1}, "there is no 'prompt'"),
    ({"prompt": ""}, "'prompt' is empty"),
    ({"prompt": []}, "'prompt' is empty"),
    ({"prompt": None}, "'prompt' is null"),
    ({"prompt": 3}, "'prompt' is a number"),
    ({"prompt": True}, "'prompt' is true or false"),
    ({"prompt": {"a": 1}}, "'prompt' is an object"),
    ({"prompt": [1, "a"]}, "'prompt' is a list"),
    ({"prompt": [1, True]}, "'prompt' is a list"),
    ({"prompt": [1.5]}, "'prompt' is a list"),
    ({"prompt": [-1]}, "negative or does not fit"),
    ({"prompt": [2**31]}, "negative or does not fit"),
    ({"prompt": [{"content": "no role"}]}, "no 'role'"),
    ("[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_named_and_nothing_of_the_command_is_submitted(
    line: Any, reason: str, run: Run, pool: Path, tmp_path: Path
) -> None:
    good = write_lines(tmp_path / "good.jsonl", *rows(2))
    bad = tmp_path / "bad.jsonl"
    data = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    bad.write_bytes(b'{"prompt": "fine"}\n\n' + data + b'\n{"prompt": "fine too"}\n')
    ran = run("submit", pool, good, bad, "--batch", 1, "--json", code=2)
    assert f"{bad}:3: " in ran.err
    assert reason in ran.err
    assert ran.err.count("\n") == 1
    assert total(run, pool) == 0
    skipped = run("submit", pool, good, bad, "--batch", 1, "--skip-bad", "--json")
    assert (skipped.data["submitted"], skipped.data["skipped"]) == (4, 1)
    assert f"skipped {bad}:3: " in skipped.err
    assert run("submit", pool, good, bad, "--skip-bad", "--json").data["submitted"] == 0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "?", "meta": {}, "id": 1}, "there is no 'label'"),
        ({"prompt": "?", "label": 1, "id": 1}, "there is no 'meta'"),
        ({"prompt": "?", "label": 1, "meta": {}}, "there is no 'id'"),
        ({"prompt": "?", "label": 1, "meta": 5, "id": 1}, "'meta' is a number, not an object"),
        ({"prompt": "?", "label": 1, "meta": "{", "id": 1}, "'meta' is text that is not JSON"),
        (
            {"prompt": "?", "label": 1, "meta": '{"a": "\\ud800"}', "id": 1},
            "'meta' is text that is not JSON (\\ud800 is half",
        ),
        ({"prompt": "?", "label": 1, "meta": {}, "id": 1.5}, "'id' is a number, not text"),
    ],
)
def test_a_missing_or_wrong_field_is_named(row: Any, words: str, run: Run, pool: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "?", "label": 1, "meta": {}, "id": 1}, row)
    ran = run("submit", pool, file, "--label-key", "label", "--metadata-key", "meta", "--id-key", "id", code=2)
    assert f"{file}:2: {words}" in ran.err
    assert total(run, pool) == 0


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("twice", ["prompt", "label", "metä", "id"])
def test_a_field_that_is_there_twice_is_refused_if_it_is_used(
    twice: str, ascii_only: bool, run: Run, pool: Path, tmp_path: Path
) -> None:
    row = {"prompt": "?", "label": "prompt", "metä": {"id": 1, "label": 2}, "id": 1, "more": {"prompt": {"prompt": 1}}}
    line = json.dumps(row, ensure_ascii=ascii_only)
    name = json.dumps(twice, ensure_ascii=ascii_only)
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(line[:-1] + ', "more": 2, "other": 1}\n')
    bad.write_text(f"{line[:-1]}, {name}: {json.dumps(row[twice])}}}\n")
    keys = ("--label-key", "label", "--metadata-key", "metä", "--id-key", "id")
    assert f"{bad}:1: {twice!r} is there more than once" in run("submit", pool, good, bad, *keys, code=2).err
    assert total(run, pool) == 0
    assert run("submit", pool, good, *keys, "--json").data["submitted"] == 1


def test_a_column_that_is_there_twice_is_refused_if_it_is_used(run: Run, pool: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"]), pa.array(["d"])]
    pq.write_table(pa.Table.from_arrays(columns, ["prompt", "other", "prompt", "other"]), file)
    assert f"{file} has 2 columns 'prompt'" in run("submit", pool, file, code=2).err
    assert f"{file} has 2 columns 'prompt'" in run("submit", pool, file, "--input-key", "prompt", code=2).err
    pq.write_table(pa.Table.from_arrays(columns, ["prompt", "other", "label", "other"]), file)
    assert "columns 'other'" in run("submit", pool, file, "--label-key", "other", code=2).err
    assert run("submit", pool, file, "--label-key", "label", "--json").data["submitted"] == 1


def test_a_bad_row_of_a_parquet_file_is_named(run: Run, pool: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", None, ""], "m": [{"x": 1.0}, {"x": float("nan")}, {"x": 1.0}]}), file)
    ran = run("submit", pool, file, code=2)
    assert f"{file}: row 2: 'prompt' is null" in ran.err
    assert "(1 further bad row)" in ran.err
    assert "there is no 'q' (it has" in run("submit", pool, file, "--input-key", "q", code=2).err
    pq.write_table(pa.table({"prompt": ["a", "b"], "m": [{"x": 1.0}, {"x": float("nan")}]}), file)
    assert "row 2: 'm' does not survive JSON" in run("submit", pool, file, "--metadata-key", "m", code=2).err


def test_files_that_hold_nothing_or_nonsense(run: Run, pool: Path, tmp_path: Path) -> None:
    cases = {
        "empty.jsonl": (b"", "is empty"),
        "blank.jsonl": (b"\n \n", "is empty"),
        "all-bad.jsonl": (b'{"a": 1}\n', "--input-key"),
        "cut.jsonl.gz": (gzip.compress(b'{"prompt": "a"}\n' * 1000)[:40], "gzip data are damaged"),
        "broken.parquet": (b"PAR1" + b"\0" * 100, "not a readable Parquet file"),
    }
    for name, (data, words) in cases.items():
        (tmp_path / name).write_bytes(data)
        ran = run("submit", pool, tmp_path / name, code=2)
        assert words in ran.err
        assert str(tmp_path / name) in ran.err
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    assert "is empty" in run("submit", pool, tmp_path / "none.parquet", code=2).err
    all_bad = write_lines(tmp_path / "b.jsonl", {"prompt": 1}, {"prompt": 2})
    assert "has no row that is a prompt" in run("submit", pool, all_bad, "--skip-bad", code=2).err
    assert "Is a directory" in run("submit", pool, tmp_path, code=2).err
    assert "No such file" in run("submit", pool, tmp_path / "absent", code=2).err
    assert total(run, pool) == 0


def test_a_line_without_end_does_not_fill_the_memory(
    run: Run, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_input, "LINE_BYTES_MAX", 1000)
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "x" * 2000})
    assert f"{file}:1: the line is longer" in run("submit", pool, file, code=2).err


def test_the_same_command_again_adds_nothing(run: Run, pool: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *rows(5))
    assert run("submit", pool, file, "--json").data["submitted"] == 5
    again = run("submit", pool, file, "--json").data
    assert (again["submitted"], again["already"]) == (0, 5)
    # By another way to the same file, too.
    (tmp_path / "link.jsonl").symlink_to(file)
    assert run("submit", pool, tmp_path / "link.jsonl", "--json").data["already"] == 5
    assert total(run, pool) == 5


def test_a_copy_of_a_submitted_file_is_refused(run: Run, pool: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *rows(5))
    run("submit", pool, file)
    copy = write_lines(tmp_path / "copy.jsonl", *rows(5))
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    for other in (copy, packed):
        assert "was submitted by producer a.jsonl-" in run("submit", pool, other, code=2).err
        assert "was submitted by producer" in run("submit", pool, other, "--producer", "p", code=2).err
    assert "named twice" in run("submit", pool, copy, packed, "--again", code=2).err
    assert total(run, pool) == 5
    run("submit", pool, copy, "--again")
    assert total(run, pool) == 10


def test_a_file_that_has_grown_is_refused_unless_again(run: Run, pool: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *rows(3))
    run("submit", pool, file)
    write_lines(file, *rows(4))
    assert "was submitted before with other content (3 of 3 rows" in run("submit", pool, file, code=2).err
    assert total(run, pool) == 3
    assert run("submit", pool, file, "--again", "--json").data["submitted"] == 4
    assert run("submit", pool, file, "--json").data["submitted"] == 0
    # The former content has not been forgotten.
    write_lines(file, *rows(3))
    assert run("submit", pool, file, "--json").data["already"] == 3


def test_again_submits_once_more(run: Run, pool: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *rows(3))
    for expected in (3, 6, 9):
        run("submit", pool, file, "--again")
        assert total(run, pool) == expected


class Crash(Exception):
    pass


def crash_at(number: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends before or after commit `number` of the command."""
    calls = 0
    submit = Queue.submit

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and when == "before":
            raise Crash
        answer = submit(*args, **kwargs)
        if calls == number:
            raise OutcomeUnknown("the reply was lost")
        return answer

    monkeypatch.setattr(Queue, "submit", call)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize("producer", [(), ("--producer", "p")])
def test_a_crash_at_any_commit_is_continued_exactly_once(
    producer: tuple[str, ...],
    number: int,
    when: str,
    run: Run,
    pool: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = "not json"
    one = write_lines(tmp_path / "one.jsonl", *rows(5), bad)
    two = write_lines(
        tmp_path / "two.jsonl", bad, *({"prompt": f"two {at}"} for at in range(4)), bad, {"prompt": "last"}
    )
    words = ("submit", pool, one, two, "--batch", 2, "--skip-bad", *producer)
    with monkeypatch.context() as patch:
        crash_at(number, when, patch)
        patch.setattr("tempfile.tempdir", str(tmp_path))
        ended = run(*words, code=None)
    # Three commits for each file.
    assert ended.code == (0 if number == 7 else 1 if when == "before" else 5)
    run(*words)
    run(*words)
    expected = [row["prompt"] for row in rows(5)] + [f"two {at}" for at in range(4)] + ["last"]
    assert [prompt.text for prompt in prompts_of(pool)] == expected


def test_again_finishes_what_was_begun_first(
    run: Run, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(tmp_path / "a.jsonl", *rows(6))
    with monkeypatch.context() as patch:
        crash_at(2, "after", patch)
        run("submit", pool, file, "--batch", 2, code=5)
    assert "4 of 6 rows" in run("submit", pool, file, "--again", code=2).err
    assert run("submit", pool, file, "--json").data["submitted"] == 2
    assert total(run, pool) == 6


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes by signal")
def test_a_killed_submission_is_continued_exactly_once(run: Run, pool: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *rows(400))
    process = start("submit", pool, file, "--batch", 1)
    entry = pool / "log" / "000000000" / "000000000005.json"
    while not entry.exists() and process.poll() is None:
        pass
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert 0 < total(run, pool) < 400
    run("submit", pool, file)
    assert [prompt.text for prompt in prompts_of(pool)] == [row["prompt"] for row in rows(400)]


def test_two_commands_at_once_submit_each_row_once(run: Run, pool: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *rows(60))
    both = [start("submit", pool, file, "--batch", 1) for _ in range(2)]
    ended = {}
    for process in both:
        _, err = process.communicate(timeout=120)
        ended[process.returncode] = err
    assert set(ended) <= {0, 3}, ended
    run("submit", pool, file)
    assert sorted(prompt.text for prompt in prompts_of(pool)) == sorted(row["prompt"] for row in rows(60))


def test_a_file_that_changes_between_check_and_commit_is_noticed(
    run: Run, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(tmp_path / "a.jsonl", *rows(6))
    submit = Queue.submit

    def call(*args: Any, **kwargs: Any) -> Any:
        write_lines(file, *rows(7))
        return submit(*args, **kwargs)

    monkeypatch.setattr(Queue, "submit", call)
    assert "was changed while it was read" in run("submit", pool, file, "--batch", 2, code=2).err
    assert total(run, pool) == 2


def test_a_foreign_cursor_is_left_alone(run: Run, pool: Path, tmp_path: Path) -> None:
    with Pool.open(pool) as opened:
        opened.queue().submit([Prompt(text="?")], producer="mine", cursor="row 7")
    file = write_lines(tmp_path / "a.jsonl", *rows(1))
    assert "keeps a cursor that" in run("submit", pool, file, "--producer", "mine", code=2).err


def test_one_producer_takes_one_file_after_the_other(
    run: Run, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = write_lines(tmp_path / "1.jsonl", *rows(4)), write_lines(tmp_path / "2.jsonl", {"prompt": "two"})
    with monkeypatch.context() as patch:
        crash_at(1, "after", patch)
        run("submit", pool, one, "--producer", "p", "--batch", 2, code=5)
    assert "is in the middle of another file (2 of 4 rows" in run("submit", pool, two, "--producer", "p", code=2).err
    run("submit", pool, one, "--producer", "p")
    assert run("submit", pool, two, "--producer", "p", "--json").data["submitted"] == 1
    assert run("submit", pool, one, "--producer", "p", "--json").data["already"] == 4
    assert total(run, pool) == 5


def test_seal(run: Run, pool: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *rows(1))
    assert run("submit", pool, file, "--seal", "--json").data["sealed"] is True
    other = write_lines(tmp_path / "b.jsonl", {"prompt": "b"})
    assert "`strawq seal POOL --queue rollout --open` opens it" in run("submit", pool, other, code=2).err
    assert run("seal", pool, "--open", "--json").data == {"queue": "rollout", "sealed": False}
    run("submit", pool, other)
    run("seal", pool)
    assert run("inspect", pool, "--json").data["queues"]["rollout"]["sealed"] is True
