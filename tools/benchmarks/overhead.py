"""What a worker's reading of streams costs, beside a bare loop over the same streams.

The rule: engine and reader have a processor each (where there are two), the readers take turns, and each figure is the
median of the rounds. At full speed the engine writes as fast as it can; paced, it makes a token for each stream every
`STEP_MS`, as engines do, and what counts is the processor time that a token takes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tools.benchmarks.side import ROOT, Side

STEP_MS = 40.0
HOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "worker": ("worker", {}),
    "bare": ("bare", {}),
    "drain": ("bare", {"decode": False}),
}
FIGURES = {
    "stream_tokens_per_s": "tokens/s, 512 streams on one core, engine at full speed",
    "stream_of_bare": "of a bare aiohttp loop that decodes the same streams",
    "stream_of_drain": "of a loop that only drains the sockets",
    "stream_paced_of_bare": "of the bare loop's tokens per second of processor time, engine at a token each 40 ms",
    "stream_paced_core": "of one core for 12,800 tokens/s (512 streams, a token each 40 ms)",
    "loop_lag_p99_ms": "ms, while 512 streams are read and 200 MB groups published",
    "loop_lag_p99_ms_without": "ms, while they are read and nothing is published",
    "loop_lag_max_ms": "ms",
    "loop_lag_published_mb": "MB published meanwhile",
}


class Streams(NamedTuple):
    """`tokens` of each stream: as long as answers are, so that what a request costs once counts as much as it does in
    a rollout. `paced_tokens`, `lag_tokens`: the same, where a token comes each `STEP_MS`."""

    rounds: int
    streams: int
    tokens: int
    paced_tokens: int
    lag_tokens: int
    samples: int
    rows: int


FULL = Streams(rounds=5, streams=512, tokens=1000, paced_tokens=400, lag_tokens=200, samples=10, rows=8192)
QUICK = Streams(rounds=1, streams=32, tokens=20, paced_tokens=20, lag_tokens=30, samples=1, rows=1024)
PACED_ROUNDS = 3


def measure(size: Streams, directory: Path, say: Any) -> dict[str, Any]:
    """The figures named in `FIGURES`."""
    cpus = sorted(os.sched_getaffinity(0))
    with Side("overhead_reader", directory, sys.executable) as reader:
        reader.ask("pin", cpus=[cpus[-1]])
        fast = _rounds(reader, size, 0.0, cpus[0], say)
        slow = size._replace(tokens=size.paced_tokens, rounds=min(PACED_ROUNDS, size.rounds))
        paced = _rounds(reader, slow, STEP_MS, cpus[0], say)
        reader.ask("pin", cpus=cpus)
        lags = []
        for samples in (0, size.samples):
            say(f"{size.streams} streams, {'with' if samples else 'without'} publications beside them")
            given = {"streams": size.streams, "tokens": size.lag_tokens, "samples": samples, "length": size.rows}
            with _engine(size.streams, size.lag_tokens, STEP_MS, cpus[0], spread=size.lag_tokens) as url:
                lags.append(reader.ask("lag", url=url, **given))
    quiet, lag = lags
    rate = {how: statistics.median(one["tokens"] / one["seconds"] for one in fast[how]) for how in HOWS}
    per_cpu = {how: statistics.median(one["tokens"] / one["cpu_s"] for one in paced[how]) for how in HOWS}
    return {
        "stream_tokens_per_s": rate["worker"],
        "stream_of_bare": rate["worker"] / rate["bare"],
        "stream_of_drain": rate["worker"] / rate["drain"],
        "stream_paced_of_bare": per_cpu["worker"] / per_cpu["bare"],
        "stream_paced_core": size.streams * 1000 / STEP_MS / per_cpu["worker"],
        "loop_lag_p99_ms": lag["p99_ms"],
        "loop_lag_p99_ms_without": quiet["p99_ms"],
        "loop_lag_max_ms": lag["max_ms"],
        "loop_lag_published_mb": lag["published_mb"],
    }


def _rounds(reader: Side, size: Streams, step_ms: float, cpu: int, say: Any) -> dict[str, list[dict[str, float]]]:
    taken: dict[str, list[dict[str, float]]] = {how: [] for how in HOWS}
    with _engine(size.streams, size.tokens, step_ms, cpu) as url:
        for turn in range(size.rounds + 1):
            say(
                f"streams, {f'a token each {step_ms:g} ms' if step_ms else 'full speed'}, round {turn} of {size.rounds}"
            )
            for how in list(HOWS) if turn % 2 else reversed(HOWS):
                work, options = HOWS[how]
                one = reader.ask(work, url=url, streams=size.streams, tokens=size.tokens, **options)
                if one["tokens"] != size.streams * size.tokens:
                    raise AssertionError(f"{how} read {one['tokens']} of {size.streams * size.tokens} tokens")
                if turn or size.rounds == 1:
                    taken[how].append(one)
    return taken


@contextmanager
def _engine(streams: int, tokens: int, step_ms: float, cpu: int, spread: int = 0) -> Iterator[str]:
    words = [str(streams), str(tokens), str(step_ms), str(spread), str(cpu)]
    command = [sys.executable, "-m", "tools.benchmarks.overhead_engine", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()
