"""What a soak looks at while it runs: how much lies in the pool's directories, what a process weighs, how long its
commits took. Each tenth of the work gets the largest value that was seen in it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from strawq.storage import layout


class Look(msgspec.Struct, frozen=True):
    """One look at a pool's directory. `names_max` is the largest number of names in one directory."""

    log_files: int
    log_bytes: int
    object_files: int
    object_bytes: int
    snapshot_files: int
    snapshot_bytes: int
    floor_files: int
    session_files: int
    staging_files: int
    directories: int
    names_max: int
    rss_kb: int = 0


class Written:
    """Counts the log entries that were written between two trims, `most`, from looks. Each trim leaves a floor, and was
    made after the look before the one that sees it: so no fewer are counted than there were."""

    def __init__(self) -> None:
        self.most = 0
        self._floors = self._head = self._since = 0

    def see(self, floors: int, head: int) -> None:
        """There are so many floors, and the newest entry is `head`."""
        self.most = max(self.most, head - self._since)
        if floors > self._floors:
            self._floors, self._since = floors, self._head
        self._head = head


class Busiest:
    """Counts the log entries that were written within `seconds`, at most: `most`, from looks."""

    def __init__(self, seconds: float) -> None:
        self.most = 0
        self._seconds = seconds
        self._looks: deque[tuple[float, int]] = deque()

    def see(self, now: float, head: int) -> None:
        """At `now` (seconds) the newest entry is `head`."""
        self._looks.append((now, head))
        # The first one is kept that is as old: so no fewer are counted than there were.
        while len(self._looks) > 1 and self._looks[1][0] <= now - self._seconds:
            self._looks.popleft()
        self.most = max(self.most, head - self._looks[0][1])


class Tenth(msgspec.Struct, frozen=True):
    """One tenth of the groups: the largest of each look in it, and the commits of the worker that is never killed.
    `seconds` is how long it took, `looks` how often it was looked at."""

    groups: int
    seconds: float
    looks: int
    largest: Look
    smallest: Look
    commits: int
    commit_p50_ms: float
    commit_p99_ms: float


def look(root: str | os.PathLike[str], pid: int = 0) -> Look:
    """The pool at `root` now; with `pid`, the resident memory of that process."""
    sizes = {name: _weigh(os.path.join(root, name)) for name in layout.DIRECTORIES}
    log, objects, snapshots = (sizes[name] for name in (layout.LOG, layout.OBJECTS, layout.SNAPSHOTS))
    return Look(
        log_files=log[0],
        log_bytes=log[1],
        object_files=objects[0],
        object_bytes=objects[1],
        snapshot_files=snapshots[0],
        snapshot_bytes=snapshots[1],
        floor_files=sizes[layout.FLOORS][0],
        session_files=sizes[layout.SESSIONS][0],
        staging_files=sizes[layout.STAGING][0],
        directories=sum(size[2] for size in sizes.values()),
        names_max=max(size[3] for size in sizes.values()),
        rss_kb=resident_kb(pid) if pid else 0,
    )


def _weigh(directory: str) -> tuple[int, int, int, int]:
    """Files, their bytes, directories, and the most names in one of them. What goes meanwhile is not counted."""
    files = size = directories = names_max = 0
    stack = [directory]
    while stack:
        try:
            entries = list(os.scandir(stack.pop()))
        except FileNotFoundError:
            continue
        directories += 1
        names_max = max(names_max, len(entries))
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                stack.append(entry.path)
                continue
            try:
                size += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
            files += 1
    return files, size, directories, names_max


def newest_entry(root: str | os.PathLike[str]) -> int:
    """The number of the newest log entry; 0 if there is none."""
    log = os.path.join(root, layout.LOG)
    for segment in sorted(os.listdir(log), reverse=True):
        try:
            names = os.listdir(os.path.join(log, segment))
        except FileNotFoundError:
            continue
        if names:
            return int(max(names).partition(".")[0])
    return 0


def resident_kb(pid: int) -> int:
    """0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)


def summed(groups: int, seconds: float, looks: Sequence[Look], times_ms: Sequence[float]) -> Tenth:
    ordered = sorted(times_ms) or [0.0]
    return Tenth(
        groups=groups,
        seconds=round(seconds, 1),
        looks=len(looks),
        largest=_each(looks, max),
        smallest=_each(looks, min),
        commits=len(times_ms),
        commit_p50_ms=ordered[len(ordered) // 2],
        commit_p99_ms=ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
    )


def _each(looks: Sequence[Look], choose: Callable[[Iterator[int]], int]) -> Look:
    return Look(*(choose(getattr(seen, name) for seen in looks) for name in Look.__struct_fields__))
