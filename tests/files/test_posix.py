"""What can only go wrong on a real file system: planted names, full disks, failing flushes,
refused primitives, lost roots."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strawq.storage import posix
from strawq.storage.exclusive import Primitive, rename_exclusive
from strawq.storage.posix import PosixFiles

from .conftest import refused


@pytest.fixture
def files(tmp_path: Path) -> Iterator[PosixFiles]:
    made = PosixFiles(tmp_path / "pool")
    for name in ("", "tmp", "log"):
        made.make_directory(name)
    yield made
    made.close()


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


class TestPlantedNames:
    def test_a_link_to_a_directory_leads_nowhere(self, files: PosixFiles, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "x").write_bytes(b"secret")
        (tmp_path / "pool/log/door").symlink_to(outside)
        for call in (
            lambda: files.read("log/door/x"),
            lambda: files.size("log/door/x"),
            lambda: files.names("log/door"),
            lambda: files.stage("log/door/y", [b"y"]),
            lambda: files.replace("log/door/x", b"y"),
            lambda: files.remove("log/door/x"),
            lambda: files.make_directory("log/door"),
            lambda: files.make_directory("log/door/below"),
        ):
            with pytest.raises(NotADirectoryError):
                call()
        assert sorted(path.name for path in outside.iterdir()) == ["x"]
        assert (outside / "x").read_bytes() == b"secret"

    def test_a_link_to_a_file_is_not_followed(self, files: PosixFiles, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"secret")
        (tmp_path / "pool/log/1").symlink_to(secret)
        for call in (files.read, files.size, lambda path: files.read_into(path, 0, memoryview(bytearray(1)))):
            with refused(errno.ELOOP):
                call("log/1")
        with pytest.raises(FileExistsError):
            files.stage("log/1", [b"x"])
        files.stage("tmp/s", [b"x"])
        with pytest.raises(FileExistsError):
            files.publish("tmp/s", "log/1")
        files.replace("log/1", b"x")
        assert secret.read_bytes() == b"secret"
        assert files.read("log/1") == b"x"

    def test_a_dangling_link_still_holds_its_name(self, files: PosixFiles, tmp_path: Path) -> None:
        (tmp_path / "pool/log/1").symlink_to(tmp_path / "nothing")
        files.stage("tmp/s", [b"x"])
        with pytest.raises(FileExistsError):
            files.publish("tmp/s", "log/1")
        assert not (tmp_path / "nothing").exists()

    def test_a_fifo_does_not_block_the_reader(self, files: PosixFiles, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pool/log/1")
        with pytest.raises(OSError, match="not a regular file"):
            files.read("log/1")


class TestFailures:
    def test_a_file_that_does_not_fit_leaves_nothing(self, files: PosixFiles) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                files.stage("tmp/s", [b"x" * 70_000, b"y" * 70_000])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert files.names("tmp") == []

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
    def test_a_failed_flush_is_told_once_and_never_tried_again(
        self, files: PosixFiles, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        flushes: list[int] = []

        def fsync(fd: int) -> None:
            flushes.append(fd)
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fsync)
        with refused(code):
            files.stage("tmp/s", [b"x"])
        assert len(flushes) == 1
        assert files.names("tmp") == []
        with refused(code):
            files.sync_directory("log")
        assert len(flushes) == 2

    def test_the_descriptor_of_a_failed_stage_is_closed(
        self, files: PosixFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, "writev", failing(errno.ENOSPC))
        for number in range(20):
            with pytest.raises(OSError, match="No space"):
                files.stage(f"tmp/{number}", [b"x"])
            with pytest.raises(OSError, match="No space"):
                files.replace("log/session", b"x")
        assert len(os.listdir("/proc/self/fd")) == before
        assert files.names("tmp") == files.names("log") == []
        assert os.listdir(os.path.join(files.root, "log")) == []

    def test_a_replace_that_fails_keeps_the_old_content(
        self, files: PosixFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files.replace("log/session", b"old")
        monkeypatch.setattr(os, "rename", failing(errno.EDQUOT))
        with refused(errno.EDQUOT):
            files.replace("log/session", b"new")
        assert files.read("log/session") == b"old"

    def test_a_publish_of_unknown_outcome_is_not_tried_again(
        self, files: PosixFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second try would meet the first one's name and call it somebody else's."""
        links: list[str] = []

        def link_and_lose_the_reply(source_fd: int, source: str, target_fd: int, target: str) -> None:
            links.append(target)
            os.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
            raise OSError(errno.ETIMEDOUT, "reply lost")

        monkeypatch.setattr(posix, "link_exclusive", link_and_lose_the_reply)
        files.stage("tmp/s", [b"x"])
        with pytest.raises(TimeoutError):
            files.publish("tmp/s", "log/1")
        assert links == ["1"]
        assert files.read("log/1") == b"x"

    def test_a_stale_handle_is_looked_up_again_for_a_read(
        self, files: PosixFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files.stage("log/1", [b"x"])
        real = os.open
        failed: list[str] = []

        def stale_once(path: str, *arguments: int, **options: int) -> int:
            if path == "1" and not failed:
                failed.append(path)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(path, *arguments, **options)

        monkeypatch.setattr(os, "open", stale_once)
        assert files.read("log/1") == b"x"
        assert failed == ["1"]


class TestPrimitives:
    @pytest.mark.parametrize(
        ("primitive", "step", "code"),
        [
            ("link", "link_exclusive", errno.EPERM),
            ("link", "link_exclusive", errno.EOPNOTSUPP),
            ("rename", "rename_exclusive", errno.EINVAL),
            ("rename", "rename_exclusive", errno.ENOSYS),
        ],
    )
    def test_where_one_is_refused_the_other_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, primitive: Primitive, step: str, code: int
    ) -> None:
        files = PosixFiles(tmp_path, primitive)
        monkeypatch.setattr(posix, step, failing(code))
        for name, there in (("1", False), ("1", True), ("2", False)):
            files.stage(f"s{name}{there}", [name.encode()])
            if there:
                with pytest.raises(FileExistsError):
                    files.publish(f"s{name}{there}", name)
            else:
                files.publish(f"s{name}{there}", name)
        assert files.read("1") == b"1"
        assert files.read("2") == b"2"
        assert files.primitive == ("rename" if primitive == "link" else "link")
        assert files.keeps_staged is (primitive == "rename")

    def test_where_both_are_refused_it_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = PosixFiles(tmp_path)
        monkeypatch.setattr(posix, "link_exclusive", failing(errno.EPERM))
        monkeypatch.setattr(posix, "rename_exclusive", failing(errno.EINVAL))
        files.stage("s", [b"x"])
        with pytest.raises(OSError, match="Invalid"):
            files.publish("s", "1")
        assert files.names("") == ["s"]

    def test_both_primitives_exclude_each_other(self, tmp_path: Path) -> None:
        by_link, by_rename = PosixFiles(tmp_path, "link"), PosixFiles(tmp_path, "rename")
        for first, second in ((by_link, by_rename), (by_rename, by_link)):
            first.stage("first", [b"first"])
            second.stage("second", [b"second"])
            first.publish("first", "name")
            with pytest.raises(FileExistsError):
                second.publish("second", "name")
            assert second.read("name") == b"first"
            for name in ("first", "second", "name"):
                first.remove(name)

    def test_rename_exclusive_names_both_ends_in_its_error(self, tmp_path: Path) -> None:
        fd = os.open(tmp_path, os.O_RDONLY)
        try:
            with pytest.raises(FileNotFoundError, match=r"'gone'.*'there'"):
                rename_exclusive(fd, "gone", fd, "there")
        finally:
            os.close(fd)


class TestDirectoryDescriptors:
    def test_their_number_is_bounded(self, files: PosixFiles) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(300):
            files.make_directory(f"log/{number:03}")
            files.stage(f"log/{number:03}/x", [b"%d" % number])
        assert len(os.listdir("/proc/self/fd")) - before <= posix._DIRECTORIES_OPEN_MAX
        for number in range(300):
            assert files.read(f"log/{number:03}/x") == b"%d" % number
        files.close()
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_a_forked_child_neither_blocks_nor_harms_its_parent(self, files: PosixFiles) -> None:
        files.stage("log/1", [b"x"])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                files.stage("tmp/child", [files.read("log/1")])
                files.replace("log/session", b"child")
                code = 0
            finally:
                os._exit(code)
        files.replace("log/session", b"parent")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert files.read("tmp/child") == b"x"
        assert files.read("log/session") in (b"child", b"parent")
        files.stage("tmp/parent", [b"y"])
        assert files.names("tmp") == ["child", "parent"]

    def test_descriptors_are_not_inherited_by_programs_we_start(self, files: PosixFiles) -> None:
        files.names("log")
        own = [int(name) for name in os.listdir("/proc/self/fd")]
        directories = [
            fd
            for fd in own
            if os.path.exists(f"/proc/self/fd/{fd}") and files.root in os.readlink(f"/proc/self/fd/{fd}")
        ]
        assert directories
        assert not any(os.get_inheritable(fd) for fd in directories)


def test_modes_leave_the_umask_in_charge(tmp_path: Path) -> None:
    files = PosixFiles(tmp_path / "pool")
    before = os.umask(0o007)
    try:
        files.make_directory("log")
        files.stage("log/1", [b"x"])
        files.replace("log/2", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "pool/log").stat().st_mode & 0o777 == 0o770
    assert {(tmp_path / "pool/log" / name).stat().st_mode & 0o777 for name in "12"} == {0o660}


def test_what_is_synced_and_in_which_order(files: PosixFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data before the name, the name's directory before the acknowledgement, a new directory in its parent."""
    steps: list[str] = []
    real_fsync, real_link, real_mkdir = os.fsync, posix.link_exclusive, os.mkdir

    def fsync(fd: int) -> None:
        steps.append("fsync " + os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), files.root))
        real_fsync(fd)

    def link(source_fd: int, source: str, target_fd: int, target: str) -> None:
        steps.append("link " + target)
        real_link(source_fd, source, target_fd, target)

    def mkdir(path: str, mode: int, *, dir_fd: int) -> None:
        steps.append("mkdir " + path)
        real_mkdir(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(posix, "link_exclusive", link)
    monkeypatch.setattr(os, "mkdir", mkdir)
    files.make_directory("log/0")
    files.stage("tmp/s", [b"x"])
    files.publish("tmp/s", "log/0/1")
    files.sync_directory("log/0")
    assert steps == ["mkdir 0", "fsync log", "fsync tmp/s", "link 1", "fsync log/0"]
    steps.clear()
    files.make_directory("log/0")
    assert steps == []  # known to be durable: asked for on every commit, paid for once
