"""The probe believes what the mount does: each broken promise makes the report say so, and nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from strawq.errors import BadInput
from strawq.making import make_pool
from strawq.storage import probe as probing
from strawq.storage.probe import ProbeReport, probe
from tools.juicefs.volume import Client, Volume


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert os.listdir(tmp_path) == []


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_local_disk_is_not_unfit(tmp_path: Path) -> None:
    report = probe(tmp_path)
    assert report.verdict in ("fit", "fit_with_warnings")
    assert report.reasons == []
    assert report.exclusive_create == "link"
    assert report.measured["link"] and report.measured["rename"] and report.measured["flock"]
    assert report.measured["free_bytes"] > 0
    assert all(report.measured[f"{step}_ms"] > 0 for step in ("stage", "publish", "sync_directory", "read", "absent"))
    assert any("--peer" in note for note in report.notes)


def test_a_report_is_data(tmp_path: Path) -> None:
    report = probe(tmp_path)
    assert msgspec.json.decode(msgspec.json.encode(report), type=ProbeReport) == report


def test_no_directory(tmp_path: Path) -> None:
    for call in (lambda: probe(tmp_path / "none"), lambda: probe(tmp_path, tmp_path / "none")):
        with pytest.raises(BadInput, match="none is not a directory"):
            call()


class TestPrimitives:
    def test_no_links(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probing, "link_exclusive", failing(errno.EPERM))
        report = probe(tmp_path)
        assert report.verdict == "fit_with_warnings"
        assert report.exclusive_create == "rename"
        assert report.measured["link_error"] == "EPERM"

    def test_links_that_overwrite(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def overwrite(source_fd: int, source: str, target_fd: int, target: str) -> None:
            os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)

        monkeypatch.setattr(probing, "link_exclusive", overwrite)
        report = probe(tmp_path)
        assert report.exclusive_create == "rename"
        assert "winners of one name" in report.measured["link_error"]

    def test_links_that_lose_their_content(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = probing.link_exclusive

        def link(source_fd: int, source: str, target_fd: int, target: str) -> None:
            real(source_fd, source, target_fd, target)
            os.truncate(os.open(target, os.O_WRONLY, dir_fd=target_fd), 0)

        monkeypatch.setattr(probing, "link_exclusive", link)
        report = probe(tmp_path)
        assert report.measured["link"] is False
        assert "content" in report.measured["link_error"]

    def test_neither(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probing, "link_exclusive", failing(errno.EPERM))
        monkeypatch.setattr(probing, "rename_exclusive", failing(errno.EINVAL))
        report = probe(tmp_path)
        assert (report.verdict, report.exclusive_create) == ("unfit", "none")
        assert "exclusively" in report.reasons[0]


class TestPromises:
    def test_a_disk_that_cannot_sync(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fsync", failing(errno.EIO))
        report = probe(tmp_path)
        assert (report.verdict, report.exclusive_create) == ("unfit", "none")
        assert "fsync" in report.reasons[0]

    def test_directories_that_cannot_be_synced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.fsync

        def fsync(fd: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        report = probe(tmp_path)
        assert report.verdict == "unfit"
        assert "directories" in report.reasons[0]

    def test_locks_that_exclude_nobody(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        report = probe(tmp_path)
        assert report.verdict == "fit_with_warnings"
        assert report.measured["flock"] is False
        assert any("flock" in warning for warning in report.warnings)

    def test_no_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
        report = probe(tmp_path)
        assert report.verdict == "fit_with_warnings"
        assert report.measured["flock_error"] == "ENOLCK"

    def test_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.statvfs

        def statvfs(path: str) -> object:
            found = list(real(path))
            found[4] = 0  # f_bavail
            return os.statvfs_result(found)

        monkeypatch.setattr(os, "statvfs", statvfs)
        report = probe(tmp_path)
        assert report.verdict == "unfit"
        assert "full" in report.reasons[0]

    def test_what_a_file_system_does_not_count_is_not_full(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.statvfs
        zeros: list[int] = []

        def statvfs(path: str) -> object:
            found = list(real(path))
            for at in zeros:
                found[at] = 0
            return os.statvfs_result(found)

        monkeypatch.setattr(os, "statvfs", statvfs)
        zeros[:] = [2, 3, 4, 5, 6, 7]  # f_blocks to f_favail
        assert probe(tmp_path).verdict == "fit"
        zeros[:] = [4, 5, 6, 7]  # no inodes are counted, and no block is free
        assert probe(tmp_path).reasons[0] == f"{tmp_path} is full (0 bytes free); make room"

    def test_a_disk_that_fills_in_the_middle(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real, left = os.writev, [7]

        def writev(fd: int, buffers: list[memoryview]) -> int:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, buffers)

        monkeypatch.setattr(os, "writev", writev)
        report = probe(tmp_path)
        assert report.verdict == "unfit"
        assert "No space" in report.reasons[0]


def test_a_peer_that_is_another_directory(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "WAIT_S_MAX", 0.1)
    report = probe(tmp_path, tmp_path_factory.mktemp("other"))
    assert report.verdict == "unfit"
    assert "does not show what is written" in report.reasons[0]


def test_a_peer_that_is_no_second_client(tmp_path: Path) -> None:
    report = probe(tmp_path, tmp_path)
    assert report.verdict == "fit_with_warnings"
    assert any("same mount" in warning for warning in report.warnings)


@pytest.mark.juicefs
class TestJuiceFS:
    @pytest.fixture
    def third(self, juicefs: Volume) -> Iterator[Callable[..., Client]]:
        clients: list[Client] = []

        def mount(*options: str) -> Client:
            clients.append(juicefs.mount(f"third-{os.urandom(4).hex()}", *options))
            return clients[-1]

        yield mount
        for client in clients:
            client.unmount()

    def test_two_clients_are_fit(self, juicefs_pair: tuple[Path, Path]) -> None:
        report = probe(*juicefs_pair)
        assert report.verdict == "fit", report
        assert report.exclusive_create == "link"
        assert report.measured["link"] and report.measured["rename"] and report.measured["flock"]
        assert report.measured["visible_absent_before_s"] < probing.ABSENCE_S_MAX
        assert report.measured["stale_removed_s"] < 3
        assert report.measured["stale_replaced_s"] < 3
        assert report.juicefs is not None
        assert report.storage.writeback is False
        assert list(juicefs_pair[0].iterdir()) == []

    def test_cached_absence_is_measured_even_where_it_is_not_read(
        self, juicefs_pair: tuple[Path, Path], third: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peer = third("--negative-entry-cache", "1").path / juicefs_pair[0].name
        told = probe(juicefs_pair[0], peer)
        assert told.verdict == "unfit"
        assert any("--negative-entry-cache 0" in reason for reason in told.reasons)
        assert any("absence is cached" in reason for reason in told.reasons)
        monkeypatch.setattr(probing, "read_juicefs_settings", lambda _: None)
        measured = probe(juicefs_pair[0], peer)
        assert measured.verdict == "unfit"
        assert measured.measured["visible_absent_before_s"] > probing.ABSENCE_S_MAX

    def test_writeback_is_unfit_unless_accepted(
        self, juicefs_pair: tuple[Path, Path], third: Callable[..., Client]
    ) -> None:
        path = third("--writeback").path / juicefs_pair[0].name
        refused = probe(path)
        assert refused.verdict == "unfit"
        assert "writeback" in refused.reasons[0]
        accepted = probe(path, accept_writeback=True)
        assert accepted.verdict == "fit_with_warnings"
        assert "writeback" in accepted.warnings[0]

    def test_read_only_is_unfit(self, juicefs_pair: tuple[Path, Path], third: Callable[..., Client]) -> None:
        report = probe(third("--read-only").path / juicefs_pair[0].name)
        assert (report.verdict, report.exclusive_create) == ("unfit", "none")
        assert any("--read-only" in reason for reason in report.reasons)


class TestLeftBehind:
    """A probe that was killed leaves its directory: it is in nobody's way, and the next probe removes it."""

    KILLED = """
import os, signal, sys
from strawq.storage import probe
probe._measure = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
probe.probe(sys.argv[1])
"""

    def left(self, path: Path) -> str:
        assert subprocess.run([sys.executable, "-c", self.KILLED, str(path)], check=False).returncode == -9
        (name,) = os.listdir(path)
        return name

    def test_a_pool_is_made_where_a_probe_was_killed(self, tmp_path: Path) -> None:
        root = tmp_path / "pool"
        root.mkdir()
        assert self.left(root).startswith(".strawq-probe-")
        pool, _ = make_pool(root)
        pool.close()
        assert not [name for name in os.listdir(root) if name.startswith(".")]
        shutil.rmtree(root)

    def test_a_live_probes_directory_stays_and_is_no_content(self, tmp_path: Path) -> None:
        root = tmp_path / "pool"
        root.mkdir()
        found: list[str] = []

        def made_meanwhile(*_: object) -> Literal["link"]:
            """Another start comes while this probe is under way."""
            monkey.undo()
            pool, _report = make_pool(root)
            pool.close()
            found.extend(name for name in os.listdir(root) if name.startswith("."))
            return "link"

        with pytest.MonkeyPatch.context() as monkey:
            monkey.setattr(probing, "_measure", made_meanwhile)
            assert probe(root).verdict != "unfit"
        assert len(found) == 1, "of the two probes the one that is under way"
        shutil.rmtree(root)

    def test_what_came_from_elsewhere_goes_when_it_is_old(self, tmp_path: Path) -> None:
        fresh, old = (tmp_path / f".strawq-probe-{kernel}-1-2-3" for kernel in ("0" * 12, "1" * 12))
        for path in (fresh, old):
            path.mkdir()
        (tmp_path / ".strawq-probe-0a1b2c").mkdir()
        os.utime(old, (0, 0))
        probe(tmp_path)
        assert sorted(os.listdir(tmp_path)) == sorted([fresh.name, ".strawq-probe-0a1b2c"])
        for name in os.listdir(tmp_path):
            (tmp_path / name).rmdir()
