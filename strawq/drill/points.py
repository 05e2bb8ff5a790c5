"""Named moments at which a process of a drill kills or freezes itself.

Each is a file call of strawq: just before it, just after it, or with half of it done. Only processes of a drill use
these files; nothing in strawq asks for them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from strawq.storage.exclusive import Primitive, Step
from strawq.storage.files import Buffer
from strawq.storage.posix import PosixFiles


class Point(msgspec.Struct, frozen=True):
    """`when` is before, within or after the file call `call` on a path that begins with `path`; it is reached by
    `often` calls of a life or so."""

    call: str
    path: str
    when: str
    often: int = 12


POINTS = {
    "before a staged file": Point("stage", "tmp/", "before"),
    "half of a staged file": Point("stage", "tmp/", "within"),
    "after a staged file": Point("stage", "tmp/", "after"),
    "before an entry has its name": Point("publish", "log/", "before"),
    "between an entry's name and its acknowledgement": Point("publish", "log/", "after"),
    "after an entry is durable": Point("sync_directory", "log/", "after"),
    "before a heartbeat": Point("replace", "sessions/", "before", 4),
    "in the middle of a heartbeat": Point("replace", "sessions/", "within", 4),
    "after a heartbeat": Point("replace", "sessions/", "after", 4),
    "before an object has its name": Point("publish", "objects/", "before", 4),
    "after an object has its name": Point("publish", "objects/", "after", 4),
    "after an object is durable": Point("sync_directory", "objects/", "after", 4),
    "before a snapshot has its name": Point("publish", "snapshots/", "before", 2),
    "after a snapshot has its name": Point("publish", "snapshots/", "after", 2),
    "before a floor has its name": Point("publish", "floors/", "before", 1),
    "after a floor has its name": Point("publish", "floors/", "after", 1),
    "while entries are trimmed": Point("remove", "log/", "after", 20),
    "while objects are collected": Point("remove", "objects/", "after", 4),
    "before a staged name goes": Point("remove", "tmp/", "before"),
}
CLEANERS = frozenset(
    name
    for name, point in POINTS.items()
    if point.path in ("snapshots/", "floors/") or (point.call == "remove" and point.path in ("log/", "objects/"))
)
"""Points that a cleaner comes to, and hardly anybody else."""


class DrillFiles(PosixFiles):
    """PosixFiles that send their own process `number` at the `left`-th passage of a point. It writes the point's name
    to `mark` first."""

    def __init__(self, root: str | os.PathLike[str], primitive: Primitive, drafts: str) -> None:
        super().__init__(root, primitive, drafts)
        self._name = ""
        self._point: Point | None = None
        self._left = 0
        self._number = 0
        self._mark = Path(os.devnull)

    def arm(self, name: str, left: int, number: int, mark: Path) -> None:
        self._name, self._point, self._left, self._number, self._mark = name, POINTS[name], left, number, mark

    def _here(self, call: str, path: str, when: str) -> bool:
        point = self._point
        if point is None or (point.call, point.when) != (call, when) or not path.startswith(point.path):
            return False
        self._left -= 1
        return self._left == 0

    def _pass(self, call: str, path: str, when: str) -> None:
        if self._here(call, path, when):
            self._strike()

    def _strike(self) -> None:
        self._point = None
        with open(self._mark, "a", encoding="utf-8") as mark:
            mark.write(f"{signal.Signals(self._number).name}\t{self._name}\n")
        os.kill(os.getpid(), self._number)

    def stage(self, path: str, buffers: Sequence[Buffer]) -> int:
        self._pass("stage", path, "before")
        if self._here("stage", path, "within") and self._number == signal.SIGKILL:
            whole = b"".join(bytes(buffers[at]) for at in range(len(buffers)))
            super().stage(path, [whole[: len(whole) // 2]])
            self._strike()
        size = super().stage(path, buffers)
        self._pass("stage", path, "after")
        return size

    def publish(self, staged: str, path: str) -> None:
        self._pass("publish", path, "before")
        super().publish(staged, path)
        self._pass("publish", path, "after")

    def replace(self, path: str, data: Buffer) -> None:
        self._pass("replace", path, "before")
        super().replace(path, data)
        self._pass("replace", path, "after")

    def remove(self, path: str) -> bool:
        self._pass("remove", path, "before")
        removed = super().remove(path)
        self._pass("remove", path, "after")
        return removed

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        self._pass("sync_directory", f"{path}/", "after")

    def _two(self, source: str, target: str, step: Step) -> None:
        if target.startswith("sessions/"):
            self._pass("replace", target, "within")
        super()._two(source, target, step)
