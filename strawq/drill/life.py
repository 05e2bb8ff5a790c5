"""One life of one process of a drill: opens the pool as its side of the mount shows it, plays its role until SIGTERM or
until it is killed, and says in its ledger what it was told.

Processes of side 1 say that they run on another host, so that their death is known by their silence alone, as it is
with real hosts.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from strawq.drill.ledger import Ledger, Line
from strawq.drill.points import DrillFiles
from strawq.errors import OutcomeUnknown, TryAgain
from strawq.model import Session
from strawq.pool import Pool
from strawq.session import SessionKeeper
from strawq.storage import layout
from strawq.storage.clock import SystemClock
from strawq.storage.contention import CommitLock
from strawq.storage.header import read_header
from strawq.storage.posix import PosixFiles
from strawq.storage.process import this_process

T = TypeVar("T")

ASK_AGAIN_TRIES = 50
ASKING_TO_END = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Life(msgspec.Struct, frozen=True):
    """Who it is, and when it strikes itself (`point` empty: never)."""

    number: int
    role: str
    root: str
    side: int
    seed: int
    lease_seconds: float
    ledgers: str
    point: str = ""
    point_passage: int = 1
    point_signal: int = signal.SIGKILL
    finishing: bool = False

    @property
    def name(self) -> str:
        return f"{self.number:05d}-{self.role}"

    def path(self, suffix: str) -> Path:
        return Path(self.ledgers) / f"{self.name}.{suffix}"


class Stage:
    """What a role works with. `done` is set by SIGTERM."""

    def __init__(self, life: Life, pool: Pool, ledger: Ledger) -> None:
        self.life = life
        self.pool = pool
        self.queue = pool.queue()
        self.ledger = ledger
        self.chance = random.Random(life.seed)
        self.done = False
        self._asked = 0

    def ask(self, call: Callable[[str], T]) -> T:
        """`call` with a request id of its own, again with the same one while nothing happened or nobody knows."""
        self._asked += 1
        request = f"drill-{self.life.number}-{self._asked}"
        for _ in range(ASK_AGAIN_TRIES):
            try:
                return call(request)
            except (OutcomeUnknown, TryAgain):
                time.sleep(0.05)
        return call(request)

    def fault(self, text: str) -> None:
        self.ledger.write(Line("fault", text=f"{self.life.name}: {text}"))

    def nap(self, seconds: float) -> None:
        time.sleep(seconds * (0.5 + self.chance.random()))


def die_with(parent: int) -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def own_log(path: Path) -> None:
    """Give a forked child standard streams of its own: nothing to read, and errors that are kept."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o664)
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, null), (1, null), (2, log)):
        os.dup2(source, target)


def elsewhere(session: str, role: str, lease_seconds: float) -> Session:
    """This process as a process of another host."""
    return msgspec.structs.replace(this_process(session, role, lease_seconds), host="elsewhere", boot="elsewhere")


elsewhere_keeper = functools.partial(SessionKeeper, identify=elsewhere)
"""Makes a session whose process nobody here can look up."""


def open_pool(life: Life) -> Pool:
    root = life.root
    header = read_header(PosixFiles(root), root)
    files = DrillFiles(root, header.exclusive_create, layout.STAGING)
    if life.point:
        files.arm(life.point, life.point_passage, life.point_signal, life.path("mark"))
    clock = SystemClock()
    return Pool(
        files,
        path=root,
        role=f"drill {life.role}",
        lease_seconds=life.lease_seconds,
        clock=clock,
        lock=CommitLock(os.path.join(root, layout.COMMIT_LOCK), clock),
        keeper=elsewhere_keeper if life.side else SessionKeeper,
    )


def live(life: Life, role: Callable[[Stage], None]) -> int:
    """The whole life; the exit code. Whatever stops it that is not a kill is a fault in its ledger."""
    ledger = Ledger(life.path("ledger"))
    stage: Stage | None = None
    stopped = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True
        if stage is not None:
            stage.done = True

    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING_TO_END)  # Blocked since the fork.
    try:
        with open_pool(life) as pool:
            stage = Stage(life, pool, ledger)
            stage.done = stopped
            role(stage)
    except Exception:  # noqa: BLE001 (it is written down, and fails the drill)
        ledger.write(Line("fault", text=f"{life.name} died of itself: {traceback.format_exc()}"))
        return 1
    finally:
        ledger.close()
    return 0
