"""A side's process as the comparing program sees it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class SideFailed(RuntimeError):
    """A side reported an error, or ended."""


class Side:
    """`python -m tools.benchmarks.<module> DIRECTORY` under the interpreter `python`. Use as a context manager."""

    def __init__(self, module: str, directory: Path, python: str) -> None:
        self.module = module
        command = [python, "-m", f"tools.benchmarks.{module}", str(directory)]
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PYTHONPATH")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )

    def ask(self, work: str, **arguments: Any) -> Any:
        """Have it done, and wait for the answer. `SideFailed`."""
        self.send(work, **arguments)
        return self.receive(work)

    def send(self, work: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        # A side that has ended is noticed when its answer is missing.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"work": work, **arguments}) + "\n")
            self._process.stdin.flush()

    def receive(self, work: str) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(f"{self.module} ended with code {self._process.wait()} during {work!r}")
        reply = json.loads(line)
        if "error" in reply:
            raise SideFailed(f"{self.module} failed during {work!r}:\n{reply['error']}")
        return reply["answer"]

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
