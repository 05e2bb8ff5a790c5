"""The processes of a drill: started by forks, struck, thawed, reaped, ended.

The rule: signals are counted as the kernel reports them, and every child is in the list from its first moment until it
is reaped, so that none is left alone.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from strawq.drill.life import ASKING_TO_END, Life, die_with, live, own_log
from strawq.drill.points import CLEANERS, POINTS
from strawq.drill.roles import ROLES
from strawq.errors import TryAgain

CLEANER_STRUCK = 0.15
"""From outside it is struck less often than others: its turns take seconds, and its own points lie behind them."""
TICK_SECONDS = 0.005


class Settings(msgspec.Struct, frozen=True):
    """`peer` is the same directory through a second client, or empty. `lease_seconds` 0: what the mount needs."""

    directory: str
    peer: str = ""
    workers: int = 4
    minutes: float = 1.0
    kill_every: float = 0.5
    stop_every: float = 0.0
    seed: int = 0
    lease_seconds: float = 0.0
    keep: bool = False


@dataclass
class Running:
    """One child. `thaw_at` is when it goes on if it is frozen, else 0."""

    pid: int
    life: Life
    strikeable: bool
    thaw_at: float = 0.0


@dataclass
class Troupe:
    """All children that live, and what has become of the others."""

    settings: Settings
    roots: tuple[str, str]
    ledgers: Path
    lease_seconds: float
    chance: random.Random
    running: list[Running] = field(default_factory=list)
    lives: int = 0
    kills: int = 0
    stops: int = 0
    died: list[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    """Named points, by how many lives have ended at them."""

    def start(self, role: str, side: int, *, strikeable: bool = True, finishing: bool = False) -> Running:
        self.lives += 1
        point, passage, number = self._strike(role) if strikeable else ("", 1, int(signal.SIGKILL))
        life = Life(
            self.lives,
            role,
            self.roots[side],
            side,
            self.chance.getrandbits(32),
            self.lease_seconds,
            str(self.ledgers),
            point,
            passage,
            number,
            finishing,
        )
        with asking_to_end_waits():
            running = Running(start_life(life), life, strikeable)
            self.running.append(running)
        return running

    def _strike(self, role: str) -> tuple[str, int, int]:
        """Half of all lives, and most of a cleaner's, end or stand still at a point of their own."""
        cleaning = role == "cleaner"
        if self.chance.random() < (0.2 if cleaning else 0.5):
            return "", 1, int(signal.SIGKILL)
        # The one that was struck least yet, counting those that are on their way to it: so all are, before long.
        waiting = Counter(child.life.point for child in self.running)
        names = [name for name in POINTS if (name in CLEANERS) == cleaning]
        name = min(names, key=lambda name: (self.struck[name] + waiting[name], self.chance.random()))
        number = signal.SIGSTOP if self.chance.random() < 0.15 else signal.SIGKILL
        return name, self.chance.randint(1, POINTS[name].often), int(number)

    def reap(self) -> list[Running]:
        """Those that have ended since. Thaws those whose time has come."""
        ended = []
        for child in list(self.running):
            pid, status = os.waitpid(child.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                self.stops += 1
                child.thaw_at = time.monotonic() + self.lease_seconds * self.chance.uniform(1.2, 2.5)
            elif pid:
                self._ended(child, status)
                ended.append(child)
            elif child.thaw_at and time.monotonic() >= child.thaw_at:
                self.thaw(child)
        return ended

    def replace_the_dead(self) -> None:
        for ended in self.reap():
            if ended.strikeable:
                self.start(ended.life.role, ended.life.side)

    def _ended(self, child: Running, status: int) -> None:
        self.running.remove(child)
        mark = child.life.path("mark")
        if child.life.point and mark.exists():
            self.struck[child.life.point] += 1
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            self.kills += 1
        elif status:
            tail = child.life.path("log").read_text(encoding="utf-8", errors="replace")[-400:].strip()
            self.died.append(f"{child.life.name} ended with status {status}: {tail}")

    def thaw(self, child: Running) -> None:
        child.thaw_at = 0.0
        os.kill(child.pid, signal.SIGCONT)

    def strike(self, number: int) -> None:
        """Send the signal to one of those that may be struck. Only a kill reaches a frozen one."""
        able = [child for child in self.running if child.strikeable and (number == signal.SIGKILL or not child.thaw_at)]
        if able:
            weights = [CLEANER_STRUCK if child.life.role == "cleaner" else 1.0 for child in able]
            os.kill(self.chance.choices(able, weights)[0].pid, number)

    def end(self, children: list[Running], seconds: float, ask: bool = True) -> None:
        """Wait until they have ended; with `ask`, ask them to. `TryAgain` names those that do not."""
        deadline = time.monotonic() + seconds
        for child in children:
            if ask and child in self.running:
                os.kill(child.pid, signal.SIGTERM)
                self.thaw(child)
        while any(child in self.running for child in children):
            self.reap()
            if time.monotonic() > deadline:
                names = ", ".join(child.life.name for child in children if child in self.running)
                raise TryAgain(f"{names} did not end within {seconds:g} s; see {self.ledgers} and {self.roots[0]}")
            time.sleep(TICK_SECONDS)

    def kill_all(self) -> None:
        for child in self.running:
            os.kill(child.pid, signal.SIGKILL)
        for child in self.running:
            os.waitpid(child.pid, 0)
        self.running.clear()


@contextmanager
def asking_to_end_waits() -> Iterator[None]:
    """Signals that ask to end wait for the end of the block: what a handler raises within a fork hook is not heard, the
    child has no handler of its own yet, and a child that is not written down yet would be left alone.

    Blocking them is for the child. For us it is not enough: another thread may take a signal that this one blocks, and
    its handler would still run here; so for that long the handlers only write down what came. Main thread only."""
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda heard, _: came.append(heard)) for number in ASKING_TO_END}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for heard in came:
            signal.raise_signal(heard)


def start_life(life: Life) -> int:
    """A child that lives `life`. Forked, not started anew: imports would take longer than many a life.

    Returns when the child is bound to die with us: one that is frozen before that would stay."""
    parent = os.getpid()
    bound, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        os.read(bound, 1)
        os.close(bound)
        return pid
    code = 1
    try:
        die_with(parent)
        os.close(tell)
        os.close(bound)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        own_log(life.path("log"))
        code = live(life, ROLES[life.role])
    finally:
        os._exit(code)
