"""Archives outlive batches, collection and rollbacks; one that was carried away is checked when it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from strawq import Pool, Prompt
from strawq.archives import load_archive, open_archive, save_batch, write_archive
from strawq.errors import BadInput, Damaged
from tests.cli.conftest import Run
from tools.golden_pool import answer, complete


def ready(pool: Path, count: int = 3) -> None:
    with Pool.open(pool) as opened:
        opened.queue().submit([Prompt(f"g{n}", np.array([1, 2, n], np.int32), f"q{n}") for n in range(count)])
        complete(opened.queue(), count)


def test_an_archive_survives_finish_collection_and_rollback(pool: Path) -> None:
    with Pool.open(pool) as opened:
        opened.checkpoint("start")
    ready(pool)
    with Pool.open(pool) as opened:
        queue = opened.queue()
        batch = queue.take_batch(2).batch
        assert batch is not None
        save_batch(opened, "kept", batch)
        queue.finish_batch(batch)
        opened.gc()
        opened.rollback("start")
        opened.drop_branch("main")
        opened.gc()
        groups = list(load_archive(opened, "kept"))
        assert [group.prompt.text for group in groups] == ["q0", "q1"]
        for row, group in enumerate(groups):
            assert np.array_equal(group.samples[0].r3[:], answer(0, row).r3)  # type: ignore[index,arg-type]


def test_the_verbs_of_archives(run: Run, pool: Path, tmp_path: Path) -> None:
    ready(pool)
    url = tmp_path / "away"
    assert run("archive", "save", pool, "a", "--to", url, "--json").data["groups"] == 3
    assert "is an archive" in run("archive", "save", pool, "a", code=2).err
    assert [item["name"] for item in run("archive", "ls", pool, "--json").data["archives"]] == ["a"]
    inside = run("archive", "load", pool, "a", "--json").data["records"]
    outside = [json.loads(line) for line in run("archive", "load", url).out.splitlines()]
    assert inside == outside and [record["group_id"] for record in inside] == ["g0", "g1", "g2"]
    assert run("archive", "load", url, "--out", tmp_path / "x.jsonl", "--json").data["groups"] == 3
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 3
    assert "holds an archive already" in run("archive", "save", pool, "a", "--to", url, code=2).err
    assert run("archive", "rm", pool, "a", "--json").data == {"deleted": "a"}
    assert "no archive" in run("archive", "load", pool, "a", code=2).err


@pytest.mark.parametrize(
    ("to", "code", "why"),
    [
        ("taken", 2, "holds an archive already"),
        ("nobody://x/y", 2, "Protocol not known"),
        ("http://127.0.0.1:9/x", 2, "does not do that"),
        ("a-file/x", 6, "cannot write"),
    ],
)
def test_an_archive_that_cannot_be_written_there_is_not_kept_either(
    run: Run, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, code: int, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    ready(pool, 1)
    run("archive", "save", pool, "first", "--to", "taken")
    assert why in run("archive", "save", pool, "second", "--to", to, code=code).err
    assert [row["name"] for row in run("archive", "ls", pool, "--json").data["archives"]] == ["first"]
    run("archive", "save", pool, "first", "--to", to, code=code)
    assert [row["name"] for row in run("archive", "ls", pool, "--json").data["archives"]] == ["first"], "it was there"


def test_a_place_that_is_taken_between_the_look_and_the_copy_keeps_nothing(
    run: Run, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(pool, 1)
    to = tmp_path / "carried"
    looks = iter([False, True])
    monkeypatch.setattr("strawq.archives.exists", lambda url, name: next(looks))
    assert "choose another place" in run("archive", "save", pool, "late", "--to", to, code=2).err
    assert run("archive", "ls", pool, "--json").data["archives"] == []


def test_an_export_that_is_refused_leaves_no_trace_in_the_log(run: Run, pool: Path, tmp_path: Path) -> None:
    ready(pool, 1)
    head = run("inspect", pool, "--json").data["head_seq"]
    assert "does not end in .parquet" in run("export", pool, tmp_path / "x.csv", code=2).err
    assert run("inspect", pool, "--json").data["head_seq"] == head


def test_loading_names_what_there_is(run: Run, pool: Path, tmp_path: Path) -> None:
    assert "is a pool: name one of its archives (archives: none)" in run("archive", "load", pool, code=2).err
    ready(pool, 1)
    to = tmp_path / "carried"
    run("archive", "save", pool, "one", "--to", to)
    assert "(archives: one)" in run("archive", "load", pool, code=2).err
    assert "leave 'one' out" in run("archive", "load", to, "one", code=2).err
    assert run("archive", "load", to).out == run("archive", "load", pool, "one").out


def test_a_carried_archive_is_checked_byte_by_byte(pool: Path, tmp_path: Path) -> None:
    ready(pool)
    with Pool.open(pool) as opened:
        batch = opened.queue().take_batch(3).batch
        assert batch is not None
        save_batch(opened, "a", batch)
        write_archive(opened, "a", str(tmp_path / "a"))
    with open_archive(str(tmp_path / "a")) as groups:
        rows = [np.asarray(group.samples[0].r3[:]) for group in groups]  # type: ignore[index]
    assert [int(row[0, 0, 0]) for row in rows] == [0, 1, 2]
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".arrow", ".safetensors", ".json"}
    for path in files:
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        path.write_bytes(flipped)
        with pytest.raises((Damaged, BadInput)), open_archive(str(tmp_path / "a")) as groups:
            list(groups)
        path.write_bytes(whole)
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(BadInput, match="is no archive"), open_archive(str(tmp_path / "a")):
        pass


def test_an_export_has_a_row_for_each_sample(run: Run, pool: Path, tmp_path: Path) -> None:
    ready(pool, 2)
    with Pool.open(pool) as opened:
        opened.queue().submit([Prompt("fresh", text="no answer yet")])
    assert run("export", pool, tmp_path / "r.parquet", "--json").data == {"groups": 2, "samples": 2, "rows": 2}
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert [row["tokens"] for row in rows] == [answer(0, n).tokens.tolist() for n in range(2)]
    assert rows[0]["tensors"] == ["r3", "sc"] and rows[1]["reward"] == 1.0
    assert run("export", pool, f"file://{tmp_path}/all.parquet", "--what", "all", "--json").data["groups"] == 3
    assert pq.read_table(tmp_path / "all.parquet").to_pylist()[-1]["tokens"] is None
    run("archive", "save", pool, "a")
    assert run("export", pool, "memory://x/a.parquet", "--archive", "a", "--json").data["groups"] == 2
    assert ".parquet" in run("export", pool, tmp_path / "r.csv", code=2).err
    assert not (tmp_path / "r.csv").exists()
