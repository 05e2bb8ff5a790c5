"""What a process leaves when it is killed while it replaces a file: a draft in staging, which is seen and collected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strawq.garbage import collect_garbage
from strawq.pool import Pool
from strawq.storage.posix import PosixFiles


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test runs."""


def test_a_draft_of_a_killed_heartbeat_lies_in_staging_and_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strawq.garbage.STAGING_LOOK_SECONDS", 0.01)
    root = tmp_path / "pool"
    Pool.init(root).close()
    victim = Pool.open(root, background=False)
    victim.keeper.require()

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(Killed):
            victim.keeper.beat()
    assert os.listdir(root / "sessions") == [f"{victim.keeper.current}.json"]
    assert len(os.listdir(root / "tmp")) == 1
    with Pool.open(root) as other:
        _, collected = collect_garbage(other, wait_seconds=0)
        assert collected.by_reason == {"staging of a process that is gone": 1}
    assert os.listdir(root / "tmp") == []
    victim.close()


def test_two_processes_of_one_pid_on_two_hosts_never_share_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    drafts: list[str] = []
    real = os.rename

    def rename(source: str, target: str, **where: int) -> None:
        drafts.append(source)
        real(source, target, **where)

    monkeypatch.setattr(os, "rename", rename)
    (tmp_path / "tmp").mkdir()
    for host in (PosixFiles(tmp_path, drafts="tmp"), PosixFiles(tmp_path, drafts="tmp")):
        for _ in range(3):
            host.replace("beat", b"1")
    assert len(set(drafts)) == 6


def test_a_draft_whose_name_is_taken_by_ourselves_is_written_under_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has lost its reply is asked again by the kernel, and says EEXIST."""
    real, lost = os.open, ["the first reply"]

    def opened(path: str, flags: int, *rest: int, **where: int) -> int:
        fd = real(path, flags, *rest, **where)
        if flags & os.O_EXCL and lost:
            lost.clear()
            os.close(fd)
            raise FileExistsError(path)
        return fd

    (tmp_path / "tmp").mkdir()
    files = PosixFiles(tmp_path, drafts="tmp")
    files.names("tmp")
    monkeypatch.setattr(os, "open", opened)
    files.replace("beat", b"1")
    assert not lost and (tmp_path / "beat").read_bytes() == b"1"
