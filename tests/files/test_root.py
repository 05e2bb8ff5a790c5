"""A pool is one directory: one that was opened is not made again, left for another, or taken for an empty one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strawq.errors import OutcomeUnknown, StorageFailed
from strawq.pool import Pool
from strawq.storage.failure import Displaced
from strawq.storage.posix import PosixFiles
from tools.juicefs.volume import Volume


def everything(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def move(pool: Path) -> Callable[[], object]:
    moved = pool.rename(pool.with_name("moved"))
    return lambda: moved.rename(pool)


def replace_by_a_copy(pool: Path) -> Callable[[], object]:
    moved = pool.rename(pool.with_name("moved"))
    shutil.copytree(moved, pool)

    def back() -> None:
        shutil.rmtree(pool)
        moved.rename(pool)

    return back


def replace_by_an_empty_one(pool: Path) -> Callable[[], object]:
    moved = pool.rename(pool.with_name("moved"))
    pool.mkdir()

    def back() -> None:
        pool.rmdir()  # it is empty
        moved.rename(pool)

    return back


def replace_by_a_file(pool: Path) -> Callable[[], object]:
    moved = pool.rename(pool.with_name("moved"))
    pool.write_text("")

    def back() -> None:
        pool.unlink()
        moved.rename(pool)

    return back


WAYS = pytest.mark.parametrize(
    "displace", [move, replace_by_a_copy, replace_by_an_empty_one, replace_by_a_file], ids=lambda way: way.__name__
)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool.init(tmp_path / "pool", background=False)
    made.keeper.require()
    yield made
    made.files.close()  # type: ignore[attr-defined]


@WAYS
def test_nothing_is_written_anywhere_and_all_goes_on_when_it_is_back(
    pool: Pool, tmp_path: Path, displace: Callable[[Path], Callable[[], object]]
) -> None:
    path = Path(pool.path)
    pool.publish_version(1)
    back = displace(path)
    before = everything(tmp_path)
    for call in (
        lambda: pool.publish_version(2),
        pool.snapshot,
        pool.keeper.beat,
        pool.policy_version,  # a free number would be taken for the log's end
        pool.close,
    ):
        with pytest.raises(StorageFailed, match="moved, replaced or removed"):
            call()
    assert everything(tmp_path) == before
    back()
    pool.publish_version(2)
    pool.keeper.beat()
    pool.close()
    with Pool.open(path) as other:
        assert other.policy_version() == "2"


def test_a_pool_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    pool = Pool.init(tmp_path / "pool", background=False)
    pool.keeper.require()
    shutil.rmtree(pool.path)
    for call in (lambda: pool.publish_version(1), pool.keeper.beat, pool.policy_version):
        with pytest.raises(StorageFailed, match="moved, replaced or removed"):
            call()
    assert everything(tmp_path) == []


def test_a_copy_is_another_pool_also_under_the_inode_of_one_that_was_removed(tmp_path: Path) -> None:
    """ext4 gives a freed inode to the next directory: whoever holds on to the removed one keeps it from that."""
    pool = Pool.init(tmp_path / "pool", background=False)
    shutil.copytree(pool.path, tmp_path / "copy")
    pool.publish_version(1)
    shutil.rmtree(pool.path)
    with pytest.raises(StorageFailed):
        pool.publish_version(2)
    shutil.copytree(tmp_path / "copy", pool.path)
    with pytest.raises(StorageFailed, match="moved, replaced or removed"):
        pool.publish_version(2)
    assert everything(tmp_path / "pool") == everything(tmp_path / "copy")


def stepping(real: Callable[..., object], step: Callable[[], object]) -> Callable[..., object]:
    def call(self: PosixFiles, *words: object) -> object:
        step()
        return real(self, *words)

    return call


@WAYS
def test_moved_between_any_two_file_calls_of_a_commit(
    pool: Pool,
    tmp_path: Path,
    displace: Callable[[Path], Callable[[], object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The entry is in the directory that was opened, or nowhere; and whoever was not told so asks again."""
    names = ("stage", "publish", "remove", "read", "sync_directory", "make_directory")
    for at in range(12):
        before, left, back = pool.policy_version(), at, None

        def step() -> None:
            nonlocal left, back
            if left == 0:
                back = displace(Path(pool.path))
            left -= 1

        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(PosixFiles, name, stepping(getattr(PosixFiles, name), step))
            try:
                pool.publish_version(at + 1)
                told = "committed"
            except OutcomeUnknown:
                told = "unknown"
            except StorageFailed:
                told = "nothing happened"
        if back is not None:
            assert not list(Path(pool.path).glob("log/*/*")) or displace is replace_by_a_copy
            back()
        with Pool.open(pool.path, background=False) as other:
            after = other.policy_version()
        assert told != "committed" or after == str(at + 1)
        assert told != "nothing happened" or after == before
        assert told != "unknown" or after in (before, str(at + 1))
        if after == before:
            pool.publish_version(at + 1)


def test_the_port_says_that_no_name_is_free(tmp_path: Path) -> None:
    """`FileNotFoundError` would: a free number is the log's end, and an absent floor says that nothing was trimmed."""
    files = PosixFiles(tmp_path / "pool")
    for name in ("tmp", "log"):
        files.make_directory(name)
    files.stage("tmp/s", [b"x"])
    (tmp_path / "pool").rename(tmp_path / "moved")
    for call in (
        lambda: files.read("log/1"),
        lambda: files.size("log/1"),
        lambda: files.names("floors"),
        lambda: files.remove("log/1"),
        lambda: files.stage("tmp/t", [b"x"]),
        lambda: files.replace("log/1", b"x"),
        lambda: files.make_directory("log/0"),
        lambda: files.make_directory(""),
        lambda: files.remove_directory("snapshots"),
    ):
        with pytest.raises(Displaced):
            call()
    assert everything(tmp_path) == ["moved", "moved/log", "moved/tmp", "moved/tmp/s"]


def mounted(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


@pytest.mark.parametrize("kind", ["bind", "tmpfs"])
def test_a_mount_that_is_detached_leaves_no_pool_below_it(tmp_path: Path, kind: str) -> None:
    """The mount point is an empty directory then; the descriptors go on working, in what nobody else may see."""
    store, point = tmp_path / "store", tmp_path / "point"
    store.mkdir()
    point.mkdir()
    how = ["--bind", str(store), str(point)] if kind == "bind" else ["-t", "tmpfs", "none", str(point)]
    mounted(*how)
    try:
        pool = Pool.init(point / "pool", background=False)
        pool.keeper.require()
        subprocess.run(["umount", "-l", str(point)], check=True)
        for call in (lambda: pool.publish_version(1), pool.keeper.beat, pool.policy_version):
            with pytest.raises(StorageFailed, match="its mount is gone"):
                call()
        assert everything(point) == []
        mounted(*how)
        if kind == "bind":
            pool.publish_version(1)
            assert Pool.open(point / "pool").policy_version() == "1"
        else:  # an empty one: what was in the other is lost
            with pytest.raises(StorageFailed, match="its mount is gone"):
                pool.publish_version(1)
            assert everything(point) == []
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False, capture_output=True)


@pytest.mark.juicefs
def test_another_mount_of_the_same_volume_is_the_same_directory(juicefs: Volume) -> None:
    client = juicefs.mount(f"again-{os.urandom(4).hex()}")
    pool = Pool.init(client.path / f"pool-{os.urandom(4).hex()}", background=False)
    pool.keeper.require()
    pool.publish_version(1)
    client.unmount()
    for call in (lambda: pool.publish_version(2), pool.keeper.beat, pool.policy_version):
        with pytest.raises(StorageFailed):
            call()
    assert everything(client.path) == []
    again = juicefs.mount(client.path.name)
    try:
        pool.publish_version(2)
        pool.close()
    finally:
        again.unmount()


@pytest.mark.juicefs
def test_another_volume_at_the_same_path_is_another_directory(juicefs: Volume, tmp_path: Path) -> None:
    """The root of every volume has the same inode, so that alone says nothing. (`juicefs` skips where none mounts.)"""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = Volume(tmp_path / "one"), Volume(tmp_path / "two")
    point = tmp_path / "point"
    try:
        for volume in (one, two):
            Pool.init(volume.mount("a").path, background=False).close()
        point.symlink_to(one.clients["a"].path)
        pool = Pool.open(point, background=False)
        pool.keeper.require()
        point.unlink()
        point.symlink_to(two.clients["a"].path)
        assert point.stat().st_ino == one.clients["a"].path.stat().st_ino
        before = everything(point)
        with pytest.raises(StorageFailed, match="moved, replaced or removed"):
            pool.publish_version(1)
        assert everything(point) == before
        pool.files.close()  # type: ignore[attr-defined]
    finally:
        one.close()
        two.close()
