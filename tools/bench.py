"""Measure strawq, beside straw-queue where that is installed, on one directory.

    python tools/bench.py [--root DIR] [--peer straw-queue] [--json]

The two sides take turns, work by work, in processes of their own; each figure is the median of the rounds, and each
ratio that of the two medians of this run (above 1 is better for strawq). Absolute figures are those of the machine, the
mount and the minute. `docs/benchmarks.md` says what is measured and what the figures do not mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # runs from a plain checkout
    sys.path.insert(0, str(ROOT))

from tools.benchmarks import overhead  # noqa: E402
from tools.benchmarks.side import Side, SideFailed  # noqa: E402

PEERS = {"straw-queue": "peer_straw_queue"}
PROCESSES = 8


class Compared(NamedTuple):
    """A figure of both sides: the work that gives it, and whether more is better."""

    key: str
    work: str
    more_is_better: bool
    unit: str
    turns: int = 1
    """How often the sides take turns at it within one round: short work feels the machine's other guests most."""


COMPARED = (
    Compared("single_tasks_per_s", "single", True, "tasks/s", 3),
    Compared("batched_tasks_per_s", "batched", True, "tasks/s", 3),
    Compared("tensor_write_mb_per_s", "write", True, "MB/s"),
    Compared("row_slice_ms", "slice", False, "ms"),
    Compared("tensor_read_mb_per_s", "read", True, "MB/s"),
    Compared("reopen_s", "reopen", False, "s"),
)
ALONE = {
    "reopen_s_at_100k_history": "s",
    "commit_p50_ms": "ms",
    "eight_process_tasks_per_s": "tasks/s",
    "resume_bytes_per_new_byte": "",
    "stored_bytes_per_logical_byte": "",
    "import_s": "s",
    "peak_rss_mb": "MB",
    "eight_process_loss": "of one process's rate",
    "eight_process_fewest_tasks": "tasks of the slowest of the eight",
    "tensor_write_of_disk": "of write + fsync of the same stored bytes",
    "publish_peak_per_byte": "",
    "file_calls_per_task": "calls at each length of history",
    **overhead.FIGURES,
}


class Size(NamedTuple):
    """How much is done. `long_history` 0 leaves the figures at 100,000 tasks out (null)."""

    rounds: int
    tasks: int
    batches: int
    history: int
    long_history: int
    million: bool
    seconds: float
    samples: int
    tokens: int
    quick: bool = False


FULL = Size(
    rounds=5,
    tasks=60,
    batches=10,
    history=2000,
    long_history=100_000,
    million=False,
    seconds=3.0,
    samples=4,
    tokens=8192,
)
QUICK = Size(
    rounds=1,
    tasks=10,
    batches=1,
    history=128,
    long_history=0,
    million=False,
    seconds=0.5,
    samples=1,
    tokens=1024,
    quick=True,
)


def compare(size: Size, strawq: Side, peer: Side | None, say: Any) -> dict[str, Any]:
    """The compared figures and, beside them, what the disk alone took for each tensor write."""
    sides = [side for side in (strawq, peer) if side is not None]
    arguments = {"single": {"tasks": size.tasks}, "batched": {"rounds": size.batches}}
    figures: dict[tuple[str, str], list[float]] = {}
    for side in sides:
        say(f"{side.module}: {size.history} tasks of history, for reopening")
        side.ask("grow_history", tasks=size.history)
        side.ask("single", tasks=2)
        side.ask("batched", rounds=1)
    for turn in range(size.rounds + 1):
        say(f"round {turn} of {size.rounds}" if turn else "warming up")
        for compared in COMPARED:
            # Who goes first changes, so that neither always finds the other's dirty pages.
            for side in (sides if turn % 2 else sides[::-1]) * compared.turns:
                given = arguments.get(compared.work, {"seed": turn} if compared.work == "write" else {})
                value = side.ask(compared.work, **given)
                if turn:
                    figures.setdefault((compared.key, side.module), []).append(value)
            if compared.work == "write" and turn:
                figures.setdefault(("disk", "strawq_queue"), []).append(strawq.ask("disk", turn=turn))
    report: dict[str, Any] = {}
    for compared in COMPARED:
        mine = statistics.median(figures[compared.key, strawq.module])
        theirs = statistics.median(figures[compared.key, peer.module]) if peer is not None else None
        ratio = None
        if theirs is not None:
            ratio = mine / theirs if compared.more_is_better else theirs / mine
        report[compared.key] = {"strawq": mine, "peer": theirs, "ratio": ratio}
    written = figures["tensor_write_mb_per_s", strawq.module]
    report["tensor_write_of_disk"] = statistics.median(
        mine / disk for mine, disk in zip(written, figures["disk", strawq.module], strict=True)
    )
    return report


def measure_alone(size: Size, directory: Path, strawq: Side, say: Any) -> dict[str, Any]:
    """The figures that strawq has to itself."""
    report: dict[str, Any] = {}
    say("commits")
    report["commit_p50_ms"] = statistics.median(strawq.ask("commits", count=max(20, size.tasks)))
    with Side("strawq_alone", directory, sys.executable) as side:
        say("memory of a publish, growth of a group")
        memory = side.ask("memory", samples=size.samples, tokens=size.tokens)
        report["peak_rss_mb"] = memory["peak_mb"]
        report["publish_peak_per_byte"] = (memory["peak_mb"] - memory["before_mb"]) / memory["given_mb"]
        growth = side.ask("growth", samples=size.samples, tokens=size.tokens)
        report["resume_bytes_per_new_byte"] = growth["resumed"]
        report["stored_bytes_per_logical_byte"] = growth["stored"]
        say(f"{PROCESSES} processes at once")
        report |= _crowd(size, directory, side)
        history = directory / "strawq" / "history"
        calls = {str(size.history): side.ask("file_calls", path=str(history), tasks=20)}
        report["reopen_s_at_100k_history"] = None
        if size.long_history:
            say(f"{size.long_history} tasks of history")
            strawq.ask("grow_history", tasks=size.long_history, to=size.history)
            times = [strawq.ask("reopen") for _ in range(max(3, size.rounds))]
            report["reopen_s_at_100k_history"] = statistics.median(times)
            calls[str(size.long_history)] = side.ask("file_calls", path=str(history), tasks=20)
        if size.million:
            say("1000000 tasks of history")
            strawq.ask("grow_history", tasks=1_000_000, to=size.long_history or size.history)
            calls["1000000"] = side.ask("file_calls", path=str(history), tasks=20)
        report["file_calls_per_task"] = {length: sum(counts.values()) for length, counts in calls.items()}
    report |= measure_overhead(size, directory, say)
    report["import_s"] = statistics.median(_import_seconds() for _ in range(max(3, size.rounds)))
    return report


def measure_overhead(size: Size, directory: Path, say: Any) -> dict[str, Any]:
    """What a worker's reading of the engines' streams costs."""
    streams = overhead.QUICK if size.quick else overhead.FULL._replace(rounds=size.rounds)
    return overhead.measure(streams, directory / "overhead", say)


def _crowd(size: Size, directory: Path, first: Side) -> dict[str, Any]:
    """One process and eight, by turns, on one queue of one pool, batches of 64."""
    path = str(directory / "crowd")
    first.ask("make", path=path)
    rates: dict[int, list[float]] = {1: [], PROCESSES: []}
    fewest = []
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(Side("strawq_alone", directory, sys.executable)) for _ in range(PROCESSES - 1)]
        for _ in range(min(3, size.rounds)):
            for crowd in ([first], [first, *others]):
                for side in crowd:
                    side.send("run", path=path, seconds=size.seconds)
                done = [side.receive("run") for side in crowd]
                rates[len(crowd)].append(sum(one["tasks"] for one in done) / max(one["seconds"] for one in done))
                if len(crowd) > 1:
                    fewest.append(min(one["tasks"] for one in done))
    eight, one = statistics.median(rates[PROCESSES]), statistics.median(rates[1])
    return {
        "eight_process_tasks_per_s": eight,
        "eight_process_loss": max(0.0, 1 - eight / one),
        "eight_process_fewest_tasks": min(fewest),
    }


def _import_seconds() -> float:
    code = "import time; start = time.perf_counter(); import strawq; print(time.perf_counter() - start)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout)


def find_peer(name: str, python: str | None) -> str | None:
    """The interpreter that has the peer, or None. `SystemExit` if one was named and has it not."""
    if name == "none":
        return None
    interpreter = python or sys.executable
    done = subprocess.run([interpreter, "-c", "import straw"], capture_output=True, check=False)
    if done.returncode == 0:
        return interpreter
    if python:
        raise SystemExit(f"{python} cannot import straw: {done.stderr.decode(errors='replace').strip()}")
    return None


def filesystem_of(path: Path) -> str:
    """Type of the mount that `path` is on, as /proc/mounts names it."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, found = line.split()[1:3]
        mount = mount.replace("\\040", " ")
        if (path == Path(mount) or Path(mount) in path.parents) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


@contextlib.contextmanager
def work_directory(root: Path | None) -> Iterator[Path]:
    """A fresh directory below `root`, or below the system's temporary one, removed at the end."""
    if root is not None:
        root.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="strawq-bench-", dir=root)).resolve()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run(
    size: Size, root: Path | None, peer_name: str, peer_python: str | None, alone: bool, say: Any
) -> dict[str, Any]:
    start = time.time()
    interpreter = find_peer(peer_name, peer_python)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(work_directory(root))
        load = os.getloadavg()[0]
        strawq = stack.enter_context(Side("strawq_queue", directory / "strawq", sys.executable))
        peer = None
        if interpreter is not None:
            peer = stack.enter_context(Side(PEERS[peer_name], directory / "peer", interpreter))
        report = compare(size, strawq, peer, say)
        report |= measure_alone(size, directory, strawq, say) if alone else {}
        report["conditions"] = {
            "filesystem": filesystem_of(directory),
            "cpus": len(os.sched_getaffinity(0)),
            "load_before": load,
            "load_after": os.getloadavg()[0],
            "python": platform.python_version(),
            "kernel": platform.release(),
            "peer": peer_name if peer is not None else None,
            "rounds": size.rounds,
            "tasks": size.tasks,
            "history": size.history,
            "seconds": time.time() - start,
        }
    return report


def run_overhead(size: Size, root: Path | None, say: Any) -> dict[str, Any]:
    """The figures of the worker's streams alone."""
    load = os.getloadavg()[0]
    with work_directory(root) as directory:
        report = measure_overhead(size, directory, say)
        conditions = {"filesystem": filesystem_of(directory), "cpus": len(os.sched_getaffinity(0))}
    return report | {"conditions": conditions | {"load_before": load, "load_after": os.getloadavg()[0]}}


def show(report: dict[str, Any]) -> None:
    if COMPARED[0].key in report:
        show_compared(report)
    for key, unit in ALONE.items():
        if key not in report:
            continue
        value = report[key]
        if isinstance(value, dict):
            text = ", ".join(f"{part:.4g} at {name}" for name, part in value.items())
        else:
            text = "-" if value is None else f"{value:,.4g}"
        print(f"{key:32}{text:>12}  {unit}")
    print("\n" + ", ".join(f"{name} {value}" for name, value in report["conditions"].items()))


def show_compared(report: dict[str, Any]) -> None:
    print(f"{'':32}{'strawq':>12}{'peer':>12}{'ratio':>8}")
    for compared in COMPARED:
        mine, theirs, ratio = (report[compared.key][name] for name in ("strawq", "peer", "ratio"))
        row = f"{compared.key:32}{mine:12,.4g}"
        row += f"{theirs:12,.4g}{ratio:8.1f}" if theirs is not None else f"{'-':>12}{'-':>8}"
        print(f"{row}  {compared.unit}")


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="directory (or mount) to measure on; default: the temporary one")
    parser.add_argument("--peer", choices=(*PEERS, "none"), default="straw-queue", help="default: straw-queue")
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has the peer; default: this one")
    parser.add_argument("--rounds", type=int, help=f"default: {FULL.rounds}")
    parser.add_argument("--history", type=int, help=f"tasks behind reopen_s, on both sides; default: {FULL.history}")
    parser.add_argument("--quick", action="store_true", help="see that it works: one small round, no 100k history")
    parser.add_argument("--million", action="store_true", help="count file calls after 1,000,000 tasks too (minutes)")
    parser.add_argument("--compare-only", action="store_true", help="leave out what strawq is measured at alone")
    parser.add_argument("--overhead", action="store_true", help="measure only what a worker's reading of streams costs")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    size = size._replace(
        rounds=options.rounds or size.rounds, history=options.history or size.history, million=options.million
    )

    def say(text: str) -> None:
        print(f"{text} ...", file=sys.stderr)

    try:
        if options.overhead:
            report = rounded(run_overhead(size, options.root, say))
        else:
            alone = not options.compare_only
            report = rounded(run(size, options.root, options.peer, options.peer_python, alone, say))
    except SideFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
