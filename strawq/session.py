"""This process's session: joined when the first lease is wanted, kept alive by a thread of its own, left on a clean
stop.

The heartbeat waits for nothing: not for the log, whose commits may hang on a slow mount for longer than a lease, and
not for this module's lock, which is held while a session joins. A second thread watches the other sessions and
expires those that have stopped, and folds new log entries, so that a rollback is noticed within a second. Losing the
session (we were taken for dead) is not an error here: the next piece of work joins with a fresh id.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from strawq.core.commands import Expire, Join, Leave
from strawq.core.events import Refusal
from strawq.core.machine import Machine
from strawq.doubling import doubled
from strawq.errors import BadInput, StrawqError
from strawq.limits import LEASE_SECONDS_MIN
from strawq.model import Session
from strawq.storage import layout
from strawq.storage.clock import Clock
from strawq.storage.log import CommitLog
from strawq.storage.process import known_dead, this_process
from strawq.storage.sessions import Beat, Observer, write_beat

__all__ = ["SessionKeeper", "known_dead", "this_process"]

logger = logging.getLogger("strawq.session")

BEATS_PER_LEASE = 4
ROUND_SECONDS_MAX = 1.0


class SessionKeeper:
    """Joins, beats, watches, leaves. Threads call `beat()` and `watch()` over and over, or a simulation does; `round()`
    is one of each."""

    def __init__(
        self,
        log: CommitLog[Machine],
        clock: Clock,
        instance: str,
        role: str,
        lease_seconds: float,
        background: bool = True,
        identify: Callable[[str, str, float], Session] = this_process,
        dead: Callable[[Session], bool] = known_dead,
    ) -> None:
        if not lease_seconds >= LEASE_SECONDS_MIN:
            raise BadInput(f"a lease of {lease_seconds} s is too short; at least {LEASE_SECONDS_MIN} s")
        self.current = ""
        self.lost: list[str] = []
        """Sessions of this process that others took for dead."""
        self.round_seconds = min(lease_seconds / BEATS_PER_LEASE, ROUND_SECONDS_MAX)
        self._log = log
        self._clock = clock
        self._instance = instance
        self._role = role
        self._lease_seconds = lease_seconds
        self._background = background
        self._identify = identify
        self._observer = Observer(log.files, clock, self.round_seconds, dead)
        self._joined = 0
        self._beating = ""
        """The session whose heart beats: `current`, or one that is just joining. Read and written without a lock."""
        self._beat = 0
        self._landed_at: float | None = None
        """When the mount has last taken a heartbeat of ours, by the monotonic clock."""
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()

    def require(self) -> str:
        """The id of a live session of this process, joining if there is none."""
        self.require_same_process()
        with self._lock:
            if not self.current:
                self._join()
            return self.current

    def require_same_process(self) -> None:
        """A fork copies memory, not identity: the child must open the pool for itself, and its exit releases
        nothing."""
        if os.getpid() != self._pid:
            raise BadInput("this pool was opened before a fork; open it again in the child process")

    def _join(self) -> None:
        self._joined += 1
        session = f"{self._instance[:16]}-{self._joined}"
        self._beat = 1
        write_beat(self._log.files, Beat(session, 1, 0, self._instance))
        self._landed_at = self._clock.monotonic()
        # It beats from here on: others see the session as soon as its entry has a name, and that is acknowledged later.
        self._beating = session
        self._start()
        try:
            self._log.commit(
                Join(request=f"join-{session}", session=self._identify(session, self._role, self._lease_seconds))
            )
        except BaseException:
            self._beating = ""
            raise
        self.current = session

    def _start(self) -> None:
        if self._background and not self._threads:
            # Of these threads alone: one of before a close that still hangs ends when it wakes.
            self._stop = threading.Event()
            for name, act in (("heartbeat", self.beat), ("watch", self.watch)):
                words = (name, act, self._stop)
                thread = threading.Thread(target=self._keep, args=words, name=f"strawq-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _keep(self, name: str, act: Callable[[], object], stop: threading.Event) -> None:
        failed = told = 0
        while not stop.wait(self.round_seconds):
            try:
                act()
                failed = told = 0
            except (OSError, StrawqError) as error:
                # The next round tries again; if the mount stays away, others expire us, which is right.
                failed += 1
                level, told = (logging.WARNING, failed) if doubled(failed, told) else (logging.INFO, told)
                until = "; until one lands, no other session is taken for dead here" if name == "heartbeat" else ""
                logger.log(
                    level, "%s of session %s failed (%d in a row): %s%s", name, self.current, failed, error, until
                )

    def round(self) -> list[str]:
        """One heartbeat, one look around. Returns the sessions that were expired."""
        self.beat()
        return self.watch()

    def watch(self) -> list[str]:
        """One look around: whether our session is still ours, and which others have stopped. Returns those that were
        expired."""
        mine = self.current  # read first: one that joins during the look is not in it
        sessions = self._log.refresh(lambda machine: list(machine.state.sessions.values()))
        if mine and mine not in {session.id for session in sessions}:
            self.forget(mine)
        stopped = self._observer.stopped(self._others(sessions), counting=self._heard())
        return [self._expire(session, reason) for session, reason in stopped]

    def beat(self) -> None:
        """One heartbeat. It takes no lock; two at once are as good as one, for only a counter that moves is wanted."""
        session = self._beating
        self._beat += 1
        if session:
            # The epoch is a hint: it is read while the state may be on the move.
            epoch = self._log.machine.state.meta.epoch
            write_beat(self._log.files, Beat(session, self._beat, epoch, self._instance))
            self._landed_at = self._clock.monotonic()

    def _heard(self) -> bool:
        """Whether the mount takes heartbeats: one of ours has landed in the last two rounds. Where it refuses or holds
        them up, everybody's stand still. Without a session we do not know; whoever wants work has one."""
        landed = self._landed_at
        return bool(self._beating) and landed is not None and self._clock.monotonic() - landed <= 2 * self.round_seconds

    def _others(self, sessions: list[Session]) -> list[Session]:
        return [session for session in sessions if session.id != self.current]

    def forget(self, session: str) -> None:
        """That session is not ours any more; the next work joins anew, if it has not by now. Said here, and so once,
        whoever has noticed."""
        with self._lock:
            if session and session == self.current:
                logger.warning(
                    "session %s was taken for dead (this process stood still longer than its lease); its leases "
                    "belong to others now, nothing of them will be committed; going on with a new session",
                    self.current,
                )
                self.lost.append(self.current)
                self.current = self._beating = ""

    def _expire(self, session: Session, reason: str) -> str:
        # A request of its own for each observer: their reasons differ, and the second finds it done.
        request = f"expire-{session.id}-{self._clock.new_id()[:8]}"
        if not isinstance(self._log.commit(Expire(request=request, session=session.id, reason=reason)), Refusal):
            logger.warning(
                "session %s (%s, pid %d) expired: %s; its leases are free",
                session.id,
                session.host,
                session.pid,
                reason,
            )
        self._forget_file(session.id)
        return session.id

    def _forget_file(self, session: str) -> None:
        """The session has ended; a heartbeat file that cannot be removed now is left to garbage collection."""
        with contextlib.suppress(OSError):
            self._log.files.remove(layout.session_file(session))

    def close(self) -> None:
        """Give leases and batches back and stop the threads; work that is wanted afterwards joins anew. In a forked
        child: nothing. If that fails, nothing has been given back, and closing again tries again."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)
        self._threads = []
        with self._lock:
            session = self.current
            if session:
                self._log.commit(Leave(request=f"leave-{session}", session=session))
                self.current = self._beating = ""
                self._forget_file(session)
        self._log.snapshot_for_next()
