"""Other tools open what lies in a pool, and what is exported from one, in the very words of docs/payloads.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow.feather import read_feather

from strawq import Pool, Prompt
from strawq.storage.packs import PackHeader
from strawq.testing.scenes import GROUP_TOKENS, completed
from strawq.trimming import trim_log
from tests.cli.conftest import Run
from tests.cli.conftest import run as run
from tools.golden_pool import TOKENS, answer, complete

duckdb = pytest.importorskip("duckdb")
polars = pytest.importorskip("polars")
pytest.importorskip("pandas")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "payloads.md"
GROUPS = 3


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A pool with ready groups, whose prompts are too large to ride inside an entry."""
    root = tmp_path / "pool"
    with Pool.init(root, background=False) as pool:
        prompts = [
            Prompt(f"g{n}", np.array([1, 2, n], np.int32), f"q{n}", payload=bytes(70_000)) for n in range(GROUPS)
        ]
        pool.queue().submit(prompts)
        complete(pool.queue(), GROUPS)
    return root


def snippets() -> list[str]:
    """The page's Python, in order."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def segments(root: Path) -> Path:
    """The records of one publication of samples."""
    found = [path for path in sorted(root.glob("objects/*/*/*.arrow")) if "sample" in polars.read_ipc(path).columns]
    return found[0]


def pack_of(root: Path, records: Path) -> Path:
    digest = polars.read_ipc(records)["tensors"][0][0]["pack"]
    (path,) = root.glob(f"objects/*/*/{digest}.safetensors")
    return path


def test_the_pages_lines_open_a_pools_objects(stored: Path) -> None:
    records = segments(stored)
    pack = pack_of(stored, records)
    text = snippets()[0]
    for written, real in (("objects/000001/3/3f….arrow", records), ("objects/000001/7/77….safetensors", pack)):
        assert written in text
        text = text.replace(written, str(real))
    seen: dict[str, Any] = {}
    exec(text, seen)
    name = seen["records"].column("group_id")[0].as_py()
    expected = answer(0, int(name[1:]))
    assert seen["frame"]["group_id"].to_list() == list(seen["pandas_frame"]["group_id"]) == [name]
    assert (
        seen["frame"]["tokens"][0].to_list() == seen["pandas_frame"]["tokens"][0].tolist() == expected.tokens.tolist()
    )
    assert seen["frame"]["logprobs"][0].to_list() == [-0.5] * TOKENS
    assert seen["spans"] == [(0, TOKENS, "1")]
    assert seen["routes"].shape == (3 + TOKENS - 1, 2, 2) and np.all(seen["routes"] == int(name[1:]))
    assert (
        "0/r3" in PackHeader(str(pack), pack.read_bytes()[: 8 + int.from_bytes(pack.read_bytes()[:8], "little")]).keys
    )


def test_prompts_open_in_each_of_them(stored: Path) -> None:
    (path,) = set(stored.glob("objects/*/*/*.arrow")) - {
        path for path in stored.glob("objects/*/*/*.arrow") if "sample" in polars.read_ipc(path).columns
    }
    frame = polars.read_ipc(path)
    assert frame["group_id"].to_list() == [f"g{n}" for n in range(GROUPS)]
    assert frame["tokens"].to_list() == [[1, 2, n] for n in range(GROUPS)]
    assert frame["payload"].to_list() == [bytes(70_000)] * GROUPS
    arrow = frame.to_arrow()
    assert duckdb.sql("select text, tokens[3] from arrow order by 1").fetchall() == [
        (f"q{n}", n) for n in range(GROUPS)
    ]
    assert len(arrow) == GROUPS


def test_the_pages_lines_open_an_export(run: Run, stored: Path, tmp_path: Path) -> None:
    exported = tmp_path / "rollout.parquet"
    run("export", stored, exported)
    text = snippets()[1]
    assert text.count("rollout.parquet") == 2
    seen: dict[str, Any] = {"duckdb": duckdb, "polars": polars}
    exec(text.replace("rollout.parquet", str(exported)), seen)
    assert sorted(seen["rewards"]) == [(f"g{n}", float(n)) for n in range(GROUPS)]
    frame = seen["exported"]
    assert frame["tokens"].to_list() == [answer(0, n).tokens.tolist() for n in range(GROUPS)]
    assert frame["tensors"].to_list() == [["r3", "sc"]] * GROUPS


def test_each_of_them_opens_a_merged_file_as_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 1)
    root = tmp_path / "pool"
    with Pool.init(root, background=False) as pool:
        queue = pool.queue()
        for n in range(GROUPS):
            queue.submit([Prompt(f"g{n}", np.array([1, 2, n], np.int32), f"q{n}")])
            completed(queue, queue.open(queue.acquire(1).leases[0]))
        for version in (1, 2):
            pool.snapshot()
            pool.publish_version(version)
        assert trim_log(pool, keep_entries=0).moved == 2 * GROUPS
    asked, answered = sorted(root.glob("objects/*/*/*.arrow"), key=lambda path: "sample" in polars.read_ipc(path))
    names = [f"g{n}" for n in range(GROUPS)]
    for path in (asked, answered):
        records = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        assert records["group_id"].to_pylist() == names
        assert polars.read_ipc(path)["group_id"].to_list() == names
        assert polars.scan_ipc(path).select("group_id").collect()["group_id"].to_list() == names
        assert list(read_feather(path)["group_id"]) == names
        assert duckdb.sql("select count(*), sum(len(tokens)) from records").fetchall()[0][0] == GROUPS
    assert polars.read_ipc(answered)["tokens"].to_list() == [
        [sum(map(ord, name)) * 100 + at for at in range(GROUP_TOKENS)] for name in names
    ]
