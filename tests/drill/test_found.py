"""What drills have found, each as a race that is forced by events."""

from __future__ import annotations

import threading
from pathlib import Path

from strawq.pool import Pool
from strawq.storage import layout
from strawq.storage.clock import SystemClock
from strawq.storage.exclusive import Step
from strawq.storage.posix import PosixFiles
from strawq.verification import verify


class HeldFiles(PosixFiles):
    """Stops in the middle of a heartbeat: the draft is written and has not got its name yet."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "link", layout.STAGING)
        self.holding = False
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def _two(self, source: str, target: str, step: Step) -> None:
        if self.holding and target.startswith("sessions/"):
            self.reached.set()
            assert self.go_on.wait(30)
        super()._two(source, target, step)


class ActingClock(SystemClock):
    """Sleeps no time; the first sleep lets the heartbeat go on, if it may."""

    def __init__(self, files: HeldFiles, lets_go: bool) -> None:
        self.files, self.lets_go, self.beating = files, lets_go, threading.Thread()

    def sleep(self, seconds: float) -> None:
        if self.lets_go:
            self.files.go_on.set()
            self.beating.join()


def verified_in_the_middle_of_a_heartbeat(root: Path, lets_go: bool) -> list[str]:
    """Findings of a verify that begins while another process's heartbeat is a draft."""
    Pool.init(root).close()
    files = HeldFiles(root)
    other = Pool(files, path=str(root), background=False)
    other.keeper.require()
    files.holding = True
    clock = ActingClock(files, lets_go)
    clock.beating = threading.Thread(target=other.keeper.beat)
    clock.beating.start()
    try:
        assert files.reached.wait(30)
        return [found.what for found in verify(Pool(PosixFiles(root, "link", layout.STAGING), clock=clock)).findings]
    finally:
        files.go_on.set()
        clock.beating.join()
        other.close()


def test_the_heartbeat_of_a_living_process_is_no_leftover(tmp_path: Path) -> None:
    assert verified_in_the_middle_of_a_heartbeat(tmp_path / "pool", lets_go=True) == []


def test_a_draft_that_stays_is_a_leftover(tmp_path: Path) -> None:
    assert verified_in_the_middle_of_a_heartbeat(tmp_path / "pool", lets_go=False) == ["tmp/"]
