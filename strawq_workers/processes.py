"""Child processes that do not outlive their parent.

The rule: whatever ends the block (an error, Ctrl-C, SIGTERM, SIGHUP, or on Linux a SIGKILL of the parent), every
process that was started in it is ended, a frozen one too. A child that dies early is named with the end of its log.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from strawq.errors import TryAgain

TERMINATE_SECONDS = 5.0
LOG_TAIL_CHARACTERS = 600
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Runs in the child, between fork and exec."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ending(code: int) -> str:
    """How a process ended, by its exit code (negative: the signal that ended it)."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class Child:
    """One process. Its stdout is for its answer, its stderr goes to `log`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self.expected_dead = False
        self._process = process
        self._line = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def first_line(self, seconds: float) -> str:
        """The first line that it prints. `TryAgain` if none comes in time, or it has ended."""
        out = self._stdout()
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self._line:
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TryAgain(f"{self.name} has said nothing for {seconds:g} s: {self.tail()}")
                data = os.read(out.fileno(), 65536)
                if not data:
                    raise TryAgain(f"{self.name} ended at its start: {self.tail()}")
                self._line += data
        line, _, self._line = self._line.partition(b"\n")
        return line.decode().strip()

    def answer(self, seconds: float) -> dict[str, Any]:
        """The JSON object that it prints when it ends by itself. `TryAgain` if it does not end well, or in time."""
        try:
            out, _ = self._process.communicate(timeout=max(seconds, 0.1))
        except subprocess.TimeoutExpired as error:
            raise TryAgain(f"{self.name} has not ended within {seconds:g} s: {self.tail()}") from error
        self.expected_dead = True
        if self._process.returncode:
            how = ending(self._process.returncode)
            raise TryAgain(f"{self.name} ended badly ({how}); the last that it logged: {self.tail()}")
        found: dict[str, Any] = json.loads(out)
        return found

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        # The process has really stopped when the kernel says so, not when the signal was sent.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.expected_dead = True
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float) -> int:
        """Its exit code. `TryAgain` if it does not end in time."""
        try:
            code = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise TryAgain(f"{self.name} has not ended within {seconds:g} s: {self.tail()}") from error
        self.expected_dead = True
        return code

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it), or None while it runs."""
        return self._process.poll()

    def require_alive(self) -> None:
        """`TryAgain`, with the end of its log, if it has died of itself. One that has ended well is no concern."""
        code = self._process.poll()
        if code and not self.expected_dead:
            raise TryAgain(f"{self.name} died ({ending(code)}); the last that it logged: {self.tail()}")

    def end(self) -> None:
        """Ask it to end, then insist."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)

    def reap(self, deadline: float) -> None:
        try:
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def last_error(self) -> str:
        """What it says last of an error that ended it (`error: ...`); empty if it does not."""
        _, said, why = ("\n" + self._logged()).rpartition("\nerror: ")
        return " ".join(why.split()) if said else ""

    def _logged(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def tail(self) -> str:
        """The end of its log, and where that is."""
        text = self._logged()[-LOG_TAIL_CHARACTERS:].strip()
        return f"{text or 'it has logged nothing'} ({self.log})"


class Children:
    """Starts Python processes; ends them when the block ends. Logs go to files in the directory `logs`."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._children: list[Child] = []
        self._before: dict[int, Any] = {}

    def start(
        self, name: str, arguments: Sequence[str], stdin: bytes | None = None, own_session: bool = False
    ) -> Child:
        """`python ARGUMENTS`, with `stdin` written to it. In a session of its own the terminal's Ctrl-C does not reach
        it."""
        log = self.logs / f"{name}.log"
        # One BLAS thread each: the products are small, and the machine may be too.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with open(log, "wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                start_new_session=own_session,
                preexec_fn=_die_with_parent,
            )
        child = Child(name, process, log)
        self._children.append(child)
        if stdin is not None and process.stdin is not None:
            process.stdin.write(stdin)
            process.stdin.close()
            process.stdin = None
        return child

    def require_alive(self) -> None:
        for child in self._children:
            child.require_alive()

    def __enter__(self) -> Children:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                # A handler that is there leaves the block too, and says more; one that ignores the signal is obeyed.
                if signal.getsignal(number) == signal.SIG_DFL:
                    self._before[number] = signal.signal(number, _leave)
        return self

    def close(self) -> None:
        """End them all."""
        for child in self._children:
            child.end()
        deadline = time.monotonic() + TERMINATE_SECONDS
        for child in self._children:
            child.reap(deadline)

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
