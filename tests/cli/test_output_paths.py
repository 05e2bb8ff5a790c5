"""Where output goes: into a directory that is there. A path that was mistyped is refused, and nothing is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from strawq import Pool, Prompt, Sample, VersionSpan
from strawq.samples import Group
from tests.cli.conftest import Run

WRITERS = [
    ("collect {pool} -n 1 --out", "x.jsonl"),
    ("export {pool}", "x.parquet"),
    ("export {pool} --archive kept", "x.parquet"),
    ("archive load {pool} kept --out", "x.jsonl"),
]


@pytest.fixture
def ready(pool: Path, run: Run) -> Path:
    """A pool with a ready group, kept in the archive `kept` too."""
    with Pool.open(pool) as opened:
        queue = opened.queue()
        queue.submit([Prompt(group_id="g", text="?")])
        work = queue.open(queue.acquire(1).leases[0])
        sample = Sample(0, np.arange(2), np.full(2, -0.5), versions=(VersionSpan(0, 2, "1"),), status="completed")
        queue.complete(work, Group(work.task, work.group.prompt, (sample,)))
    run("archive", "save", pool, "kept")
    return pool


@pytest.mark.parametrize(
    ("words", "name", "scheme"),
    [(*writer, scheme) for writer in WRITERS for scheme in ("", "file://") if not scheme or "collect" not in writer[0]],
)
def test_a_directory_that_is_not_there_is_named_and_not_made(
    words: str, name: str, scheme: str, ready: Path, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "file").write_text("mine")
    before = sorted(path.name for path in tmp_path.iterdir())
    for parent in ("absent", "absent/deeper", "file"):
        ran = run(*words.format(pool=ready).split(), f"{scheme}{tmp_path}/{parent}/{name}", code=2)
        assert f"{tmp_path}/{parent}" in ran.err and "cannot be written" in ran.err and ran.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    with Pool.open(ready) as opened:
        assert opened.queue().counts().ready == 1


@pytest.mark.parametrize(("words", "name"), WRITERS)
def test_a_name_alone_is_a_file_of_the_current_directory(
    words: str, name: str, ready: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run(*words.format(pool=ready).split(), name)
    assert (tmp_path / "here" / name).stat().st_size


def test_an_archive_is_a_directory_of_its_own_and_is_made(ready: Path, tmp_path: Path, run: Run) -> None:
    run("archive", "save", ready, "kept", "--to", tmp_path / "new" / "archive")
    (record,) = run("archive", "load", tmp_path / "new" / "archive", "--json").data["records"]
    assert record["group_id"] == "g" and json.loads((tmp_path / "new/archive/manifest.json").read_text())
