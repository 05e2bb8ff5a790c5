"""Many seeds of the simulation, or one seed again with every line of its history.

    python -m tools.campaign --seed 1234                       one seed, readable, with its digest at the end
    python -m tools.campaign --seeds 10000 --jobs 2            seeds 0 to 9999
    python -m tools.campaign --seeds 1000000 --minutes 600     as many as there is time for

A seed that fails is printed with what broke and with the command that shows it again. The exit code is 1 if any did.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path

from strawq.testing.simulation import History, Violation, simulate

FAILURES_SHOWN = 20
CHARACTERS_SHOWN = 1500


def attempt(seed: int) -> tuple[int, History | str]:
    """The history of a seed, or what broke."""
    logging.disable(logging.CRITICAL)
    try:
        return seed, simulate(seed)
    except Violation as error:
        return seed, str(error)


def replay(seed: int) -> int:
    """Print the whole history of one seed."""
    logging.disable(logging.CRITICAL)
    try:
        history = simulate(seed, print)
    except Violation as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(f"\nseed {seed}: {history.entries} entries, {history.calls} file calls, digest {history.digest}")
    return 0


class Report:
    """What a campaign has seen so far."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.clean = 0
        self.failed: list[int] = []
        self.totals: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    def add(self, seed: int, outcome: History | str) -> None:
        if isinstance(outcome, str):
            self.failed.append(seed)
            if len(self.failed) <= FAILURES_SHOWN:
                print(f"seed {seed} FAILED\n{outcome[-CHARACTERS_SHOWN:]}\n", flush=True)
            return
        self.clean += 1
        self.events.update(outcome.events)
        self.totals.update(
            entries=outcome.entries,
            file_calls=outcome.calls,
            ghosts=outcome.ghosts,
            power_cuts=outcome.power_cuts,
            torn=outcome.torn,
        )

    def line(self) -> str:
        seconds = time.monotonic() - self.begun
        done = self.clean + len(self.failed)
        totals = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in self.totals.items())
        return f"{done:,} seeds in {seconds:,.0f} s, {len(self.failed)} failed; {totals}"


def campaign(first: int, seeds: int, jobs: int, minutes: float, output: Path | None) -> int:
    """Run seeds `first` to `first + seeds - 1` in `jobs` processes, for at most `minutes` (0: no bound)."""
    report, end = Report(), time.monotonic() + minutes * 60
    # A fresh interpreter for each worker, now and then, so that nothing one seed leaves behind reaches the next.
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=500) as pool:
        for number, (seed, outcome) in enumerate(pool.imap_unordered(attempt, range(first, first + seeds), 4), 1):
            report.add(seed, outcome)
            if number % 500 == 0:
                print(report.line(), flush=True)
            if minutes and time.monotonic() > end:
                pool.terminate()
                break
    print(report.line())
    print("events: " + ", ".join(f"{name} {count:,}" for name, count in report.events.most_common()))
    if output is not None:
        record = {"first": first, "clean": report.clean, "failed": sorted(report.failed), **report.totals}
        output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 1 if report.failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.campaign", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, help="show this one seed, line by line")
    parser.add_argument("--first", type=int, default=0, help="first seed of a campaign")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long (0: when all are done)")
    parser.add_argument("--output", type=Path, help="write the figures to this file, as JSON")
    given = parser.parse_args()
    if given.seed is not None:
        return replay(given.seed)
    return campaign(given.first, given.seeds, given.jobs, given.minutes, given.output)


if __name__ == "__main__":
    sys.exit(main())
