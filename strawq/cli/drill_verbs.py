"""The verb that kills: a drill on the operator's own mount."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from strawq.cli.app import verb
from strawq.cli.output import Answer, say

if TYPE_CHECKING:
    from strawq.drill.conductor import Drilled


@verb("drill")
def drill(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A directory on the mount to try.", show_default=False)
    ],
    peer: Annotated[
        str,
        typer.Option("--peer", metavar="DIR", show_default=False, help="The same directory through a second client."),
    ] = "",
    workers: Annotated[int, typer.Option("--workers", min=1, max=256, help="Worker processes at a time.")] = 4,
    minutes: Annotated[float, typer.Option("--minutes", help="How long processes are struck.")] = 1.0,
    kill_every: Annotated[float, typer.Option("--kill-every", help="Seconds between two SIGKILLs, about.")] = 0.5,
    stop_every: Annotated[
        float, typer.Option("--stop-every", show_default="7 kills", help="Seconds between two SIGSTOPs, about.")
    ] = 0.0,
    lease: Annotated[
        float, typer.Option("--lease", show_default="1; 3 on a network mount", help="Seconds of a lease.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option("--seed", show_default="random", help="Of the schedule; the processes' own order is chance.")
    ] = -1,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the pool and the ledgers of a drill that went well.")] = (
        False
    ),
) -> Answer:
    """Kill and freeze processes of a new pool, and audit it.

    They are struck at chance moments and at named points. The pool is a new directory in DIR; nothing else there is
    touched. It is removed if all is well. Exit code 1 if anything was lost, doubled or left over: the findings are
    listed, and pool and ledgers are kept.
    """
    # Before NumPy is loaded: processes are forked from this one, which should have no threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from strawq.drill.conductor import run_drill
    from strawq.drill.troupe import Settings

    if seed < 0:
        seed = int.from_bytes(os.urandom(4), "big")
    settings = Settings(directory, peer, workers, minutes, kill_every, stop_every, seed, lease, keep)
    try:
        drilled = run_drill(settings, _show)
    finally:
        _show("")
    for finding in drilled.findings:
        say(finding)
    return Answer(drilled, _describe(drilled), 0 if drilled.ok else 1)


_SHOWN = {"text": ""}


def _show(text: str) -> None:
    """One line on a terminal, written over; an empty text clears it."""
    if text != _SHOWN["text"] and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
    _SHOWN["text"] = text


def _describe(drilled: Drilled) -> str:
    struck = sum(drilled.points.values())
    lines = [
        f"{drilled.kills} processes killed and {drilled.stops} frozen in {drilled.seconds:g} s ({struck} at named "
        f"points), seed {drilled.seed}",
        f"{drilled.prompts} prompts, {drilled.groups} groups accepted, {drilled.entries} log entries",
        f"lost {drilled.lost}, duplicated {drilled.duplicated}, stale commits {drilled.stale_commits}, leaked leases "
        f"{drilled.leaked_leases}, staging files left {drilled.staging_left}",
        "all is well" if drilled.ok else f"{len(drilled.findings)} findings; pool and ledgers are kept",
    ]
    if drilled.pool:
        lines.append(f"pool {drilled.pool}, ledgers {drilled.ledgers}")
    return "\n".join(lines)
