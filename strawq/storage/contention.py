"""The advisory lock: it cuts contention between processes and decides nothing.

Taken only while races are being lost, and for a bounded time; with a lock that excludes nobody, never lets go, or
does not exist, commits are as safe as without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from filelock import FileLock, Timeout

from strawq.storage.clock import Clock

_CALM_SECONDS = 2.0
_WAIT_SECONDS = 0.25


class AdvisoryLock(Protocol):
    @property
    def contended(self) -> bool:
        """Whether a race was lost lately: then it pays to look before deciding."""
        ...

    def lost_race(self) -> None: ...

    def held(self) -> AbstractContextManager[None]: ...


class NoLock:
    """For simulations and files without a path."""

    @property
    def contended(self) -> bool:
        return True

    def lost_race(self) -> None:
        return None

    @contextmanager
    def held(self) -> Iterator[None]:
        yield


class CommitLock:
    """`locks/commit.lock`, held while a process that has lost a race lately commits."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._lock = FileLock(path, timeout=_WAIT_SECONDS)
        self._clock = clock
        self._until = -1.0

    @property
    def contended(self) -> bool:
        return self._clock.monotonic() < self._until

    def lost_race(self) -> None:
        self._until = self._clock.monotonic() + _CALM_SECONDS

    @contextmanager
    def held(self) -> Iterator[None]:
        if not self.contended:
            yield
            return
        taken = False
        try:
            self._lock.acquire(poll_interval=0.001)
            taken = True
        except (Timeout, OSError, NotImplementedError):
            taken = False
        try:
            yield
        finally:
            if taken:
                self._lock.release()
