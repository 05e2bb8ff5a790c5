"""The command line in this process (`run`), and as users start it (`start`) where a process of its own matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from strawq import Pool
from strawq.cli import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The one JSON object on stdout."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("STRAWQ_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `strawq WORDS...`; fails on any traceback."""

    def call(*words: object, code: int | None = 0) -> Ran:
        capsys.readouterr()
        ended = main([str(word) for word in words])
        ran = Ran(ended, *capsys.readouterr())
        assert "Traceback" not in ran.out + ran.err
        assert code is None or ended == code, ran
        return ran

    return call


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "strawq", *map(str, words)]


def start(*words: object, **options: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command(*words), text=True, **pipes)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A pool with the queue `rollout`."""
    path = tmp_path / "pool"
    Pool.init(path, run_id="run-1").close()
    return path


def write_lines(path: Path, *rows: Any) -> Path:
    """A JSONL file: text as it is, anything else as JSON."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def prompts_of(pool: Path, queue: str = "rollout") -> list[Any]:
    """Every pending prompt, in order of submission."""
    with Pool.open(pool) as opened:
        leases = opened.queue(queue).acquire(1000)
        return [opened.queue(queue).open(lease).group.prompt for lease in leases]
