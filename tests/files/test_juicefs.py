"""What only a real distributed mount can show: a client that is killed while it writes, and one that comes back."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from strawq.storage.exclusive import Primitive
from strawq.storage.posix import PosixFiles
from tools.juicefs.volume import Client, Volume

from .conftest import refused

pytestmark = pytest.mark.juicefs

DEAD = (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV)


@pytest.fixture
def doomed(juicefs: Volume) -> Iterator[Client]:
    """A third client of the volume, to be killed."""
    client = juicefs.mount(f"doomed-{os.urandom(4).hex()}")
    yield client
    client.unmount()


def remount(juicefs: Volume, client: Client) -> Client:
    client.unmount()
    return juicefs.mount(client.path.name)


@pytest.mark.parametrize("primitive", ["link", "rename"])
def test_a_client_killed_in_mid_stage_publishes_nothing_and_works_after_a_remount(
    juicefs: Volume, doomed: Client, monkeypatch: pytest.MonkeyPatch, primitive: Primitive
) -> None:
    name = f"pool-{os.urandom(4).hex()}"
    files = PosixFiles(doomed.path / name, primitive)
    other = PosixFiles(juicefs.clients["a"].path / name, primitive)
    for directory in ("", "tmp", "log"):
        files.make_directory(directory)
    files.stage("tmp/1", [b"acknowledged"])
    files.publish("tmp/1", "log/1")
    files.sync_directory("log")

    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        doomed.kill()
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with refused(*DEAD):
        files.stage("tmp/2", [b"x" * 1_000_000] * 8)
    monkeypatch.undo()
    for call in (lambda: files.publish("tmp/2", "log/2"), lambda: files.read("log/1"), lambda: files.names("log")):
        with refused(*DEAD):
            call()

    # The other host goes on meanwhile.
    assert other.read("log/1") == b"acknowledged"
    assert other.names("log") == ["1"]
    other.stage("tmp/3", [b"by the other"])
    other.publish("tmp/3", "log/2")
    other.sync_directory("log")

    again = remount(juicefs, doomed)
    try:
        assert files.read("log/1") == b"acknowledged"  # the same object, with the descriptors of the dead mount
        assert files.read("log/2") == b"by the other"
        files.stage("tmp/4", [b"late"])
        with pytest.raises(FileExistsError):
            files.publish("tmp/4", "log/2")
        files.publish("tmp/4", "log/3")
        assert other.read("log/3") == b"late"
        # What is left of the staged file, if anything, was never acknowledged and has no other name.
        assert other.names("log") == ["1", "2", "3"]
    finally:
        files.close()
        other.close()
        again.unmount()


@pytest.mark.parametrize("primitive", ["link", "rename"])
def test_what_was_acknowledged_survives_the_client(juicefs: Volume, doomed: Client, primitive: Primitive) -> None:
    name = f"pool-{os.urandom(4).hex()}"
    files = PosixFiles(doomed.path / name, primitive)
    other = PosixFiles(juicefs.clients["b"].path / name, primitive)
    files.make_directory("tmp")
    files.make_directory("log")
    contents = {str(number): os.urandom(100_000) for number in range(10)}
    for number, data in contents.items():
        files.stage(f"tmp/{number}", [data])
        files.publish(f"tmp/{number}", f"log/{number}")
        files.sync_directory("log")
    doomed.kill()
    assert {number: other.read(f"log/{number}") for number in other.names("log")} == contents
    files.close()
    other.close()
