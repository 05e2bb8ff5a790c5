"""Several workers under one command: processes here, or actors on a Ray cluster.

The rule for processes: a signal to the parent is passed on once to each child, so that one Ctrl-C is one request to
end; a child that dies is told at once and the others go on; the exit code is that of the first that did not end well.
Children end with their parent, whatever ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from types import FrameType
from typing import Any

import msgspec

from strawq.cli.output import Answer, plural, say
from strawq_workers.worker.options import WorkerOptions

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _end_with_parent() -> None:
    """Runs in the child, between fork and exec."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_processes(pool: str, options: WorkerOptions, count: int) -> Answer:
    """Run `count` workers until all have ended."""
    # All are checked before one is started: the last index may not be one of `workers`.
    each = [
        msgspec.structs.replace(options, worker_index=options.worker_index + index if options.workers else 0)
        for index in range(count)
    ]
    children = [_start(pool, one) for one in each]
    say(f"workers {', '.join(str(child.pid) for child in children)} are running")
    before = _pass_signals_on(children)
    try:
        with ThreadPoolExecutor(count) as threads:
            waiting = {threads.submit(child.communicate): child for child in children}
            ended = [_ended(future, waiting[future]) for future in as_completed(waiting)]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = next((code for code, _ in ended if code), 0)
    summaries = [summary for _, summary in ended if summary is not None]
    accepted = sum(summary["counters"]["groups_accepted"] for summary in summaries)
    text = f"{plural(accepted, 'group')} accepted by {plural(count, 'worker')}"
    return Answer({"groups_accepted": accepted, "workers": summaries, "failed": count - len(summaries)}, text, code)


def run_on_cluster(pool: str, options: WorkerOptions, address: str) -> Answer:
    """Run a worker on each alive node of a Ray cluster until all have ended."""
    from strawq_workers.on_ray import run_on_ray

    # Ray prints what nodes and actors say to stdout, which is for the answer.
    with contextlib.redirect_stdout(sys.stderr):
        summary = run_on_ray(pool, options, address)
    groups, nodes = plural(summary.groups_accepted, "group"), plural(summary.nodes, "node")
    text = f"ended ({summary.reason}): {groups} accepted by workers that ended well, on {nodes}"
    text += f", {summary.lost} lost" if summary.lost else ""
    for message in summary.failures:
        say(f"a worker failed: {message}")
    return Answer(summary, text, summary.exit_code)


def _start(pool: str, options: WorkerOptions) -> subprocess.Popen[bytes]:
    # It says what a single process would say here.
    level = logging.getLevelName(logging.getLogger("strawq_workers").getEffectiveLevel())
    child = subprocess.Popen(
        [sys.executable, "-m", "strawq_workers.worker", pool, "-", level],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A session of its own: the terminal's Ctrl-C reaches it through us, once.
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(options))
    child.stdin.close()
    child.stdin = None
    return child


def _pass_signals_on(children: list[subprocess.Popen[bytes]]) -> dict[int, Any]:
    def pass_on(number: int, _frame: FrameType | None) -> None:
        for child in children:
            if child.returncode is None:
                child.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, pass_on) for number in _SIGNALS}


def _ended(future: Future[tuple[bytes, Any]], child: subprocess.Popen[bytes]) -> tuple[int, Any]:
    """Exit code and summary of a child; one that a signal killed has exit code 1, for the others to go on."""
    out, _ = future.result()
    if child.returncode == 0:
        return 0, msgspec.json.decode(out)
    code = child.returncode if child.returncode > 0 else 1
    word = f"exit code {child.returncode}" if child.returncode > 0 else signal.Signals(-child.returncode).name
    say(f"worker {child.pid} ended with {word}; others go on with what it had saved (pid {os.getpid()} waits for them)")
    return code, None
