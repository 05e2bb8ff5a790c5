"""Heartbeats: a counter in each session's own file. Observers time on their own clock how long it stands still.

No clock of another host is ever compared. An observer that was itself asleep counts at most two of its own rounds for
that sleep, so a machine that wakes does not take all others for dead. What is decided here is only *when* work is
tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from strawq.model import Session
from strawq.storage import layout
from strawq.storage.clock import Clock
from strawq.storage.failure import storage_failed
from strawq.storage.files import Files
from strawq.storage.staging import make_directories


class Beat(msgspec.Struct, frozen=True, omit_defaults=True):
    """Content of `sessions/<session>.json`. `epoch` is the newest one that the process has seen."""

    session: str
    beat: int
    epoch: int = 0
    instance: str = ""


_decoder = msgspec.json.Decoder(Beat)


def write_beat(files: Files, beat: Beat) -> None:
    """`StorageFailed` if the mount does not take it."""
    path, data = layout.session_file(beat.session), msgspec.json.encode(beat)
    try:
        try:
            files.replace(path, data)
        except FileNotFoundError:
            make_directories(files)
            files.replace(path, data)
    except OSError as error:
        raise storage_failed("write the heartbeat", path, error) from error


def read_beat(files: Files, session: str) -> Beat | None:
    """The session's last beat; None if its file is missing or unreadable just now (which proves nothing)."""
    try:
        return _decoder.decode(files.read(layout.session_file(session)))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _decode(data: bytes) -> Beat | None:
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


@dataclass
class _Watched:
    """What one observer knows of a heartbeat. `still_seconds`: how long the same beat has been read. `dark_seconds`:
    how long nothing has been read that is a beat (no file, or bytes that are none), since it last was."""

    beat: int
    still_seconds: float
    dark_seconds: float
    seen_at: float


class Observer:
    """Decides which sessions have stopped. One for each process; called from its heartbeat thread.

    A session has stopped when the same beat was read for a lease, up to and including this look; or when there was
    nothing to read for a whole lease. One wrong answer of the mount decides nothing, nor does time in which none of
    the observer's own heartbeats landed: a disk that is full, or a mount that hangs, holds up everybody's."""

    def __init__(self, files: Files, clock: Clock, round_seconds: float, known_dead: Callable[[Session], bool]) -> None:
        self._files = files
        self._clock = clock
        self._round_seconds = round_seconds
        self._known_dead = known_dead
        self._watched: dict[str, _Watched] = {}

    def stopped(self, sessions: Iterable[Session], counting: bool = True) -> list[tuple[Session, str]]:
        """Sessions to expire, each with the reason. Call it every `round_seconds`. Not `counting`: the time since the
        last look stopped nobody."""
        found: list[tuple[Session, str]] = []
        alive: dict[str, _Watched] = {}
        for session in sessions:
            if self._known_dead(session):
                found.append((session, f"process {session.pid} on {session.host} is dead"))
                continue
            now = self._clock.monotonic()
            before = self._watched.get(session.id, _Watched(-1, 0.0, 0.0, now))
            alive[session.id] = before
            if not counting:
                before.seen_at = now
                continue
            try:
                beat = _decode(self._files.read(layout.session_file(session.id)))
            except FileNotFoundError:
                beat = None
            except OSError:
                # The trouble is ours: what cannot be looked at has not been seen to stand still.
                before.seen_at = now
                continue
            watched = alive[session.id] = self._seen(before, beat, now)
            seconds = watched.dark_seconds if beat is None else watched.still_seconds
            if seconds > session.lease_seconds:
                found.append((session, f"no heartbeat for {seconds:.1f} s"))
        self._watched = alive
        return found

    def _seen(self, before: _Watched, beat: Beat | None, now: float) -> _Watched:
        elapsed = min(now - before.seen_at, 2 * self._round_seconds)
        if beat is None:
            return _Watched(before.beat, before.still_seconds, before.dark_seconds + elapsed, now)
        if beat.beat != before.beat:
            return _Watched(beat.beat, 0.0, 0.0, now)
        return _Watched(beat.beat, before.still_seconds + elapsed, 0.0, now)
