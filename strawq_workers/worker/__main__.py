"""`python -m strawq_workers.worker POOL OPTIONS [LEVEL]`: a worker without the rest of strawq's command line.

The rule: OPTIONS is one JSON object with the fields of `WorkerOptions` (a path to a file that holds it, or `-` for
stdin); the summary is one JSON object on stdout, the log goes to stderr.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from strawq.errors import BadInput, StrawqError
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.process import run_worker

LEVELS = ("WARNING", "INFO", "DEBUG")
"""Of what is logged, and of everything above it; INFO if none is given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until the work ends or a signal; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) not in (2, 3) or "--help" in given or given[2:] not in ([], *([level] for level in LEVELS)):
        print(f"usage: python -m strawq_workers.worker POOL OPTIONS.json|- [{'|'.join(LEVELS)}]", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=given[2] if given[2:] else logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    try:
        summary = run_worker(given[0], _options(given[1]))
    except StrawqError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


def _options(where: str) -> WorkerOptions:
    try:
        text = sys.stdin.read() if where == "-" else Path(where).read_text(encoding="utf-8")
        return msgspec.json.decode(text, type=WorkerOptions)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise BadInput(f"worker options {where}: {error}") from error


if __name__ == "__main__":
    raise SystemExit(main())
