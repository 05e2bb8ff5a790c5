"""Ctrl-C and SIGTERM: one line, one object, the exit code, and an end within seconds whatever stands still."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import start
from tests.cli.test_errors import _open_for_reader

SIGNALS = pytest.mark.parametrize(
    ("number", "code", "kind"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
BEGIN = """
import sys, threading
from strawq.cli import main, errors
from strawq.cli.output import print_json, say
from strawq.pool import Pool
from strawq_workers import signals
from strawq_workers.processes import Children

def stand_still(word, look_s=0.05):
    say(word)
    while True:  # a signal that comes on the way into a wait does not end it
        threading.Event().wait(look_s)
"""
END = "\nsys.exit(main())"
ENDING_STANDS_STILL = """
def inspect(pool):
    try:
        stand_still("begun")
    finally:
        stand_still("ending", None)
Pool.inspect = inspect
"""


class Command:
    """`strawq inspect POOL --json` in a process where something stands still."""

    def __init__(self, pool: Path, script: str) -> None:
        words = [sys.executable, "-c", BEGIN + script + END, "inspect", str(pool), "--json"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def says(self, word: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            assert "Traceback" not in line
            if word in line:
                return
        pytest.fail(f"it has ended, and not said {word!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def tell(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> tuple[int, Any, str]:
        """Exit code, the one object, the rest of stderr."""
        out, err = self.process.communicate(timeout=60)
        assert "Traceback" not in err and out.count("\n") == 1, (out, err)
        return self.process.returncode, json.loads(out), err


CommandOf = Callable[[str], Command]


@pytest.fixture
def command_of(pool: Path) -> Iterator[CommandOf]:
    started: list[Command] = []

    def start_command(script: str) -> Command:
        started.append(Command(pool, script))
        return started[-1]

    yield start_command
    for command in started:
        command.close()


@SIGNALS
def test_a_signal_leaves_one_error_object(number: int, code: int, kind: str, pool: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = start("submit", pool, fifo, "--json")
    with os.fdopen(_open_for_reader(fifo, process), "wb"):
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, f"strawq: {kind}\n")
    assert json.loads(out) == {"error": {"kind": kind, "message": kind}}


@SIGNALS
def test_a_second_signal_ends_what_stands_still(number: int, code: int, kind: str, command_of: CommandOf) -> None:
    command = command_of(ENDING_STANDS_STILL)
    command.says("begun")
    command.tell(number)
    command.says("ending")
    command.tell(number)
    ended, answer, err = command.ended()
    assert (ended, answer["error"]["kind"]) == (code, kind)
    assert err.count("a second signal") == err.count("\n") == 1, err


def test_one_signal_waits_for_so_long_and_says_so(command_of: CommandOf) -> None:
    command = command_of("signals.SAY_S, signals.IN_ORDER_S = 0.1, 0.3" + ENDING_STANDS_STILL)
    command.says("begun")
    command.tell(signal.SIGINT)
    command.says("waiting for what is under way (hooks, requests, storage) for 0.3 s at most; a second signal ends it")
    ended, answer, err = command.ended()
    assert (ended, answer["error"]["kind"], err.count("\n")) == (130, "interrupted", 1)
    assert "not ended 0.3 s after the signal" in err


def test_a_second_signal_ends_a_process_that_waits_for_its_threads(command_of: CommandOf) -> None:
    command = command_of(
        """
def inspect(pool):
    threading.Thread(target=threading.Event().wait).start()
    stand_still("begun")
Pool.inspect = inspect
""",
    )
    command.says("begun")
    command.tell(signal.SIGINT)
    command.says("interrupted")
    command.tell(signal.SIGINT)
    ended, answer, _ = command.ended()
    assert (ended, answer) == (130, {"error": {"kind": "interrupted", "message": "interrupted"}})


def test_a_signal_behind_the_answer_writes_no_second_object(command_of: CommandOf) -> None:
    command = command_of(
        """
def show(answer, as_json):
    print_json(answer.data)
    stand_still("written")
errors.show = show
""",
    )
    command.says("written")
    command.tell(signal.SIGINT)
    ended, answer, _ = command.ended()
    assert ended == 130 and "error" not in answer


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_verb_that_has_started_processes_ends_as_others_do(number: int, code: int, command_of: CommandOf) -> None:
    """Their block has handlers of its own where there are none."""
    command = command_of(
        """
def inspect(pool):
    with Children(pool.path):
        stand_still("begun")
Pool.inspect = inspect
""",
    )
    command.says("begun")
    command.tell(number)
    ended, answer, err = command.ended()
    assert (ended, answer["error"]["kind"], err) == (code, "terminated", "strawq: terminated\n")


def test_nobody_reads_and_a_signal_comes(command_of: CommandOf) -> None:
    command = command_of('def inspect(pool):\n    stand_still("begun")\nPool.inspect = inspect')
    assert command.process.stdout is not None and command.process.stderr is not None
    command.says("begun")
    command.process.stdout.close()
    command.tell(signal.SIGTERM)
    assert command.process.stderr.read() == "strawq: terminated\n"
    assert command.process.wait(60) == 143


def test_a_signal_while_modules_are_imported_ends_the_process_without_a_word() -> None:
    script = """
import sys, time
class Waits:
    def find_spec(self, name, path=None, target=None):
        if name == "strawq.cli.errors":
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Waits())
from strawq.cli import main
sys.exit(main(["--version"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")
