"""The advisory lock: it cuts contention between processes and decides nothing.

Taken only while races are being lost, and for a bounded time; with a lock that excludes nobody, never lets go, or
does not exist, commits are as safe as without.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from strawq.storage.clock import Clock

_CALM_SECONDS = 2.0
_WAIT_SECONDS = 0.25
_POLL_SECONDS_MIN = 0.001
_POLL_SECONDS_MAX = 0.008


Meanwhile = Callable[[], None]


class AdvisoryLock(Protocol):
    @property
    def contended(self) -> bool:
        """Whether a race was lost lately: then it pays to look before deciding."""
        ...

    def lost_race(self) -> None: ...

    def held(self, meanwhile: Meanwhile | None = None) -> AbstractContextManager[None]:
        """Holds the lock, or goes on without. `meanwhile` is done again and again while it waits."""
        ...


class NoLock:
    """For simulations and files without a path."""

    @property
    def contended(self) -> bool:
        return True

    def lost_race(self) -> None:
        return None

    @contextmanager
    def held(self, meanwhile: Meanwhile | None = None) -> Iterator[None]:
        yield


class CommitLock:
    """`locks/commit.lock`, held while a process that has lost a race lately commits."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._until = -1.0

    @property
    def contended(self) -> bool:
        return self._clock.monotonic() < self._until

    def lost_race(self) -> None:
        self._until = self._clock.monotonic() + _CALM_SECONDS

    @contextmanager
    def held(self, meanwhile: Meanwhile | None = None) -> Iterator[None]:
        if not self.contended:
            yield
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
        except OSError:
            yield
            return
        try:
            self._wait_for(fd, meanwhile)
            yield
        finally:
            os.close(fd)  # which lets go of the lock

    def _wait_for(self, fd: int, meanwhile: Meanwhile | None) -> None:
        """Lock, or give up after a while. Those who wait longer ask less often, so that many who wait do not take the
        processors from the one that works."""
        end = self._clock.monotonic() + _WAIT_SECONDS
        pause = _POLL_SECONDS_MIN
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._clock.monotonic() >= end:
                    return
            except OSError:
                return
            if meanwhile is not None:
                meanwhile()
            self._clock.sleep(pause * (0.5 + self._clock.jitter()))
            pause = min(1.5 * pause, _POLL_SECONDS_MAX)
