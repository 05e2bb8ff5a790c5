"""The benchmark runs on a bare checkout, gives every figure it promises, and its ratios point the right way."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from tools import bench
from tools.benchmarks.side import Side, SideFailed
from tools.benchmarks.workload import PAYLOAD_BYTES, captures, given_bytes, payloads

ROOT = Path(__file__).resolve().parents[2]


class Scripted:
    """A side whose every work takes a number from a list, round by round."""

    def __init__(self, module: str, answers: list[float]) -> None:
        self.module, self.answers = module, answers
        self.asked: list[str] = []
        self.order: list[str] = []

    def ask(self, work: str, **_: Any) -> float:
        self.asked.append(work)
        self.order.append(f"{self.module} {work}")
        turn = self.asked.count(work) - 1
        return self.answers[min(turn, len(self.answers) - 1)]


def compared(mine: list[float], theirs: list[float] | None, rounds: int = 3) -> dict[str, Any]:
    strawq = cast(Side, Scripted("strawq_queue", mine))
    peer = cast(Side, Scripted("peer", theirs)) if theirs is not None else None
    return bench.compare(bench.QUICK._replace(rounds=rounds), strawq, peer, lambda _: None)


def test_a_ratio_above_one_is_better_whether_more_or_less_is() -> None:
    report = compared([8.0], [2.0])
    assert report["single_tasks_per_s"] == {"strawq": 8.0, "peer": 2.0, "ratio": 4.0}
    assert report["reopen_s"] == {"strawq": 8.0, "peer": 2.0, "ratio": 0.25}
    assert report["row_slice_ms"]["ratio"] == 0.25


def test_figures_are_medians_and_the_first_round_does_not_count() -> None:
    report = compared([1e9, 5.0, 1.0, 100.0], None)
    # `single` is asked twice before the rounds that count, `write` and `reopen` once.
    assert report["reopen_s"]["strawq"] == statistics.median([5.0, 1.0, 100.0])
    assert report["tensor_write_mb_per_s"]["strawq"] == 5.0


def test_without_a_peer_there_is_no_ratio() -> None:
    assert all(
        report == {"strawq": 3.0, "peer": None, "ratio": None}
        for report in (compared([3.0], None)[figure.key] for figure in bench.COMPARED)
    )


@pytest.mark.campaign
def test_it_runs_without_the_peer_and_gives_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, "tools/bench.py", "--quick", "--peer", "none", "--json", "--root", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report["single_tasks_per_s"]) == ["strawq", "peer", "ratio"]
    for figure in bench.COMPARED:
        assert report[figure.key]["strawq"] > 0 and report[figure.key]["peer"] is None
    assert set(bench.ALONE) <= report.keys()
    for key in bench.ALONE:
        # A short run has no 100,000 tasks of history, and says so.
        assert (report[key] is None) == (key == "reopen_s_at_100k_history"), key
    assert 0 < report["resume_bytes_per_new_byte"] < 1 and 0 < report["stored_bytes_per_logical_byte"] < 1
    assert report["eight_process_fewest_tasks"] > 0 and 0 <= report["eight_process_loss"] < 1
    assert report["conditions"]["filesystem"] not in ("", "unknown")
    assert list(tmp_path.iterdir()) == []


def test_a_side_that_fails_or_dies_is_named(tmp_path: Path) -> None:
    with Side("strawq_queue", tmp_path / "a", sys.executable) as side:
        with pytest.raises(SideFailed, match=r"strawq_queue failed during 'single':(.|\n)*TypeError"):
            side.ask("single", nonsense=1)
        assert side.ask("single", tasks=1) > 0
    with Side("no_such_side", tmp_path, sys.executable) as side, pytest.raises(SideFailed, match="ended with code 1"):
        side.ask("single", tasks=1)


def test_a_peer_that_was_named_and_is_not_there_is_an_error() -> None:
    with pytest.raises(SystemExit, match="cannot import straw"):
        bench.find_peer("straw-queue", "/usr/bin/env")
    assert bench.find_peer("none", None) is None


def test_the_work_is_what_it_says() -> None:
    stream = payloads()
    first, second = next(stream), next(stream)
    assert len(first) == len(second) == PAYLOAD_BYTES and first != second
    assert round(given_bytes(captures()) / 1e6) == 84
