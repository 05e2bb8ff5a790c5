"""What every implementation of the Files port must do: memory, faulty without faults, POSIX and JuiceFS, with both
primitives."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from strawq.storage.files import Files

from .conftest import Pair

_T = TypeVar("_T")

STALE_S_MAX = 20.0  # JuiceFS answers from its caches for 1 s; the rest is patience with a busy machine


def put(files: Files, path: str, data: bytes, staged: str = "tmp/staged") -> None:
    """Stage, publish, sync, clean up: what a commit does."""
    files.stage(staged, [data])
    files.publish(staged, path)
    files.sync_directory(path.rpartition("/")[0])
    files.remove(staged)


def eventually(look: Callable[[], _T], wanted: _T) -> None:
    """A stale positive is normal for a while (rule 5 of the port); it must end."""
    deadline = time.monotonic() + STALE_S_MAX
    while (found := look()) != wanted:
        assert time.monotonic() < deadline, f"still {found!r}, not {wanted!r}"
        time.sleep(0.05)


def is_absent(files: Files, path: str) -> bool:
    try:
        files.read(path)
    except FileNotFoundError:
        return True
    return False


def together(*calls: Callable[[], _T]) -> list[_T | BaseException]:
    """Run the calls in threads that start at one barrier; give each result or error."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], _T]) -> _T | BaseException:
        barrier.wait()
        try:
            return call()
        except OSError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_it_is_a_files(pair: Pair) -> None:
    assert isinstance(pair.a, Files)


class TestStage:
    def test_bytes_of_all_buffers_in_order(self, pool: Pair) -> None:
        numbers = array("d", [1.5, -2.0])
        buffers = [b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3], b"", memoryview(numbers)]
        assert pool.a.stage("tmp/s", buffers) == 6 + 16
        assert pool.a.read("tmp/s") == b"abcdef" + numbers.tobytes()
        assert pool.a.size("tmp/s") == 22

    def test_more_buffers_than_one_system_call_takes(self, pool: Pair) -> None:
        pieces = [bytes([number % 251]) * (number % 7) for number in range(2500)]
        assert pool.a.stage("tmp/s", pieces) == sum(map(len, pieces))
        assert pool.b.read("tmp/s") == b"".join(pieces)

    def test_nothing_at_all(self, pool: Pair) -> None:
        assert pool.a.stage("tmp/s", []) == 0
        assert pool.b.read("tmp/s") == b""

    def test_several_megabytes(self, pool: Pair) -> None:
        block = bytes(range(256)) * 4096
        assert pool.a.stage("tmp/s", [block] * 5) == 5 << 20
        assert pool.b.read("tmp/s") == block * 5

    def test_a_file_that_is_there_is_neither_opened_nor_changed(self, pool: Pair) -> None:
        pool.a.stage("tmp/s", [b"first"])
        for files in pool:
            with pytest.raises(FileExistsError):
                files.stage("tmp/s", [b"second"])
        assert pool.b.read("tmp/s") == b"first"

    def test_directory_missing(self, pool: Pair) -> None:
        with pytest.raises(FileNotFoundError):
            pool.a.stage("nowhere/s", [b"x"])
        assert pool.a.names("") == ["log", "tmp"]

    @pytest.mark.parametrize("path", ["../x", "tmp/../../x", "tmp//x", "/etc/x", "./x", "/x", "tmp/x\0y"])
    def test_a_path_that_leaves_the_pool_is_refused(self, pool: Pair, path: str) -> None:
        with pytest.raises(ValueError, match=r"below the pool|null byte"):
            pool.a.stage(path, [b"x"])
        with pytest.raises(ValueError, match=r"below the pool|null byte"):
            pool.a.make_directory(path if "\0" not in path else "tmp/../x")
        assert pool.a.names("tmp") == []


class TestPublish:
    def test_the_other_client_sees_it_whole_at_once(self, pool: Pair) -> None:
        for number in range(20):
            path = f"log/{number}"
            assert is_absent(pool.b, path)  # it has looked before: a cached absence would show
            put(pool.a, path, b"%d" % number * 1000)
            assert pool.b.read(path) == b"%d" % number * 1000
            assert pool.b.size(path) == len(b"%d" % number) * 1000
        assert sorted(map(int, pool.b.names("log"))) == list(range(20))

    def test_whether_the_staged_name_stays_is_told(self, pool: Pair) -> None:
        pool.a.stage("tmp/s", [b"x"])
        pool.a.publish("tmp/s", "log/1")
        assert pool.a.remove("tmp/s") is pool.a.keeps_staged
        assert pool.a.read("log/1") == b"x"
        assert pool.a.names("tmp") == []

    def test_a_taken_name_keeps_its_first_content(self, pool: Pair) -> None:
        put(pool.a, "log/1", b"first")
        for files in pool:
            files.stage("tmp/late", [b"second"])
            with pytest.raises(FileExistsError):
                files.publish("tmp/late", "log/1")
            assert files.read("tmp/late") == b"second"  # the loser can publish the same file elsewhere
            assert files.remove("tmp/late")
        assert pool.b.read("log/1") == b"first"

    def test_a_directory_in_the_place_of_the_name(self, pool: Pair) -> None:
        pool.a.make_directory("log/1")
        pool.a.stage("tmp/s", [b"x"])
        with pytest.raises(FileExistsError):
            pool.a.publish("tmp/s", "log/1")
        assert pool.a.names("log/1") == []

    def test_staged_file_missing(self, pool: Pair) -> None:
        with pytest.raises(FileNotFoundError):
            pool.a.publish("tmp/never", "log/1")
        assert pool.a.names("log") == []

    def test_target_directory_missing(self, pool: Pair) -> None:
        pool.a.stage("tmp/s", [b"x"])
        with pytest.raises(FileNotFoundError):
            pool.a.publish("tmp/s", "log/nowhere/1")
        assert pool.a.read("tmp/s") == b"x"

    def test_two_clients_race_for_each_name_and_one_wins(self, pool: Pair) -> None:
        for number in range(30):
            for label, files in (("a", pool.a), ("b", pool.b)):
                files.stage(f"tmp/{label}{number}", [label.encode() * 100])
            path = f"log/{number}"
            results = together(
                lambda path=path, number=number: pool.a.publish(f"tmp/a{number}", path),
                lambda path=path, number=number: pool.b.publish(f"tmp/b{number}", path),
            )
            winners = [label for label, result in zip("ab", results, strict=True) if result is None]
            losers = [result for result in results if result is not None]
            assert len(winners) == 1
            assert isinstance(losers[0], FileExistsError)
            for files in pool:
                assert files.read(path) == winners[0].encode() * 100

    def test_eight_threads_of_one_client_race_and_one_wins(self, pool: Pair) -> None:
        for thread in range(8):
            pool.a.stage(f"tmp/{thread}", [b"%d" % thread])
        results = together(*[lambda thread=thread: pool.a.publish(f"tmp/{thread}", "log/1") for thread in range(8)])
        assert results.count(None) == 1
        assert sum(isinstance(result, FileExistsError) for result in results) == 7
        assert pool.b.read("log/1") == b"%d" % results.index(None)


class TestReplace:
    def test_both_clients_see_the_new_content(self, pool: Pair) -> None:
        for beat in range(3):
            pool.a.replace("log/session", b"beat %d" % beat)
            assert pool.a.read("log/session") == b"beat %d" % beat
            eventually(lambda: pool.b.read("log/session"), b"beat %d" % beat)
        assert pool.a.names("log") == ["session"]
        assert pool.a.names("tmp") == []

    def test_a_reader_never_sees_a_mixture_or_nothing(self, pool: Pair) -> None:
        done = threading.Event()
        wholes = {bytes([letter]) * (20_000 + letter) for letter in range(65, 91)}
        pool.a.replace("log/session", b"A" * (20_000 + 65))

        def write() -> None:
            for _ in range(3):
                for whole in sorted(wholes):
                    pool.a.replace("log/session", whole)
            done.set()

        def read() -> None:
            seen = 0
            while not done.is_set() or not seen:
                assert pool.a.read("log/session") in wholes
                seen += 1

        assert together(write, read, read) == [None, None, None]


class TestReading:
    def test_what_is_not_there(self, pool: Pair) -> None:
        for look in (pool.a.read, pool.a.size):
            with pytest.raises(FileNotFoundError):
                look("log/1")
            with pytest.raises(FileNotFoundError):
                look("nowhere/1")
        with pytest.raises(FileNotFoundError):
            pool.a.read_into("log/1", 0, memoryview(bytearray(1)))

    def test_a_directory_is_not_a_file(self, pool: Pair) -> None:
        for look in (pool.a.read, pool.a.size):
            with pytest.raises(IsADirectoryError):
                look("log")

    @pytest.mark.parametrize(
        ("offset", "length", "wanted"),
        [
            (0, 4, b"0123"),
            (3, 4, b"3456"),
            (8, 4, b"89"),
            (10, 4, b""),
            (99, 4, b""),
            (0, 10, b"0123456789"),
            (5, 0, b""),
        ],
    )
    def test_a_range(self, pool: Pair, offset: int, length: int, wanted: bytes) -> None:
        put(pool.a, "log/1", b"0123456789")
        buffer = bytearray(b"#" * length)
        assert pool.b.read_into("log/1", offset, memoryview(buffer)) == len(wanted)
        assert bytes(buffer) == wanted + b"#" * (length - len(wanted))

    def test_a_range_into_an_array_of_numbers(self, pool: Pair) -> None:
        put(pool.a, "log/1", b"....." + array("d", [1.0, 2.0, 3.0]).tobytes())
        numbers = array("d", [0.0, 0.0])
        assert pool.b.read_into("log/1", 13, memoryview(numbers)) == 16
        assert list(numbers) == [2.0, 3.0]

    def test_names_are_sorted_and_dot_names_are_not_ours(self, pool: Pair) -> None:
        for name in ("b", "a", ".nfs000123", "10", "9"):
            pool.a.stage(f"log/{name}", [b""])
        pool.a.make_directory("log/d")
        assert pool.a.names("log") == pool.b.names("log") == ["10", "9", "a", "b", "d"]

    def test_names_of_a_directory_that_is_not_there(self, pool: Pair) -> None:
        assert pool.a.names("nowhere") == []
        assert pool.a.names("nowhere/below") == []

    def test_listing_from_many_threads(self, pool: Pair) -> None:
        # One descriptor has one read position: threads that shared it would each see a part.
        wanted = sorted(f"n{number}" for number in range(40))
        for name in wanted:
            pool.a.stage(f"log/{name}", [b""])

        def look() -> bool:
            return all(pool.a.names("log") == wanted for _ in range(10))

        assert together(look, look, look, look) == [True] * 4


class TestRemove:
    def test_once_and_again(self, pool: Pair) -> None:
        put(pool.a, "log/1", b"x")
        assert pool.a.remove("log/1") is True
        assert pool.a.remove("log/1") is False
        assert pool.a.remove("nowhere/1") is False
        assert is_absent(pool.a, "log/1")
        assert pool.a.names("log") == []

    def test_the_other_client_stops_seeing_it(self, pool: Pair) -> None:
        put(pool.a, "log/1", b"x")
        assert pool.b.read("log/1") == b"x"
        assert pool.a.remove("log/1") is True
        eventually(lambda: is_absent(pool.b, "log/1"), True)
        eventually(lambda: pool.b.names("log"), [])

    def test_the_published_name_outlives_the_staged_one(self, pool: Pair) -> None:
        put(pool.a, "log/1", b"x" * 5000)
        assert is_absent(pool.a, "tmp/staged")
        assert pool.b.read("log/1") == b"x" * 5000

    def test_never_a_directory(self, pool: Pair) -> None:
        with pytest.raises((IsADirectoryError, PermissionError)):
            pool.a.remove("log")
        assert pool.a.names("") == ["log", "tmp"]

    def test_two_clients_remove_one_name(self, pool: Pair) -> None:
        for number in range(10):
            put(pool.a, f"log/{number}", b"x")
            results = together(*[lambda files=files, number=number: files.remove(f"log/{number}") for files in pool])
            assert sorted(results, key=str) == [False, True]


class TestDirectories:
    def test_with_parents_and_again(self, pair: Pair) -> None:
        for files in (pair.a, pair.b, pair.a):
            files.make_directory("objects/1/ab")
        pair.b.stage("objects/1/ab/x", [b"x"])
        assert pair.a.names("objects") == ["1"]
        assert pair.a.read("objects/1/ab/x") == b"x"

    def test_two_clients_make_it_at_once(self, pair: Pair) -> None:
        pair.a.make_directory("")
        for number in range(10):
            path = f"objects/{number}/ab"
            makers = [lambda files=files, path=path: files.make_directory(path) for files in pair]
            assert together(*makers) == [None, None]
            for label, files in zip("ab", pair, strict=True):
                files.stage(f"{path}/{label}", [b""])
            assert pair.a.names(path) == ["a", "b"]

    def test_a_file_in_the_way(self, pool: Pair) -> None:
        pool.a.stage("log/x", [b"x"])
        for path in ("log/x", "log/x/below"):
            with pytest.raises(NotADirectoryError):
                pool.a.make_directory(path)
        assert pool.a.read("log/x") == b"x"

    def test_only_an_empty_one_is_removed(self, pool: Pair) -> None:
        pool.a.make_directory("log/1")
        pool.a.stage("log/1/.nfs000123", [b""])
        assert pool.a.names("log/1") == []
        assert pool.a.remove_directory("log/1") is False  # a leftover that is not listed still counts
        pool.a.remove("log/1/.nfs000123")
        assert pool.a.remove_directory("log/1") is True
        assert pool.a.remove_directory("log/1") is False
        assert pool.a.remove_directory("nowhere/1") is False
        assert pool.a.names("log") == []

    def test_the_pool_itself_is_not_removed(self, pair: Pair) -> None:
        pair.a.make_directory("")
        with pytest.raises(ValueError, match="pool"):
            pair.a.remove_directory("")

    def test_one_that_was_removed_and_made_again_is_usable_by_both(self, pool: Pair) -> None:
        # Both clients have the first directory open when it goes.
        for path in ("log/1", "log/1/deep"):
            pool.a.make_directory(path)
        pool.a.stage("log/1/deep/x", [b"old"])
        assert pool.b.read("log/1/deep/x") == b"old"
        pool.b.remove("log/1/deep/x")
        assert pool.b.remove_directory("log/1/deep") and pool.b.remove_directory("log/1")
        pool.b.make_directory("log/1/deep")
        pool.b.stage("log/1/deep/y", [b"new"])
        eventually(lambda: pool.a.names("log/1/deep"), ["y"])
        assert pool.a.read("log/1/deep/y") == b"new"
        pool.a.stage("tmp/z", [b"z"])
        pool.a.publish("tmp/z", "log/1/deep/z")
        pool.a.sync_directory("log/1/deep")
        assert pool.b.read("log/1/deep/z") == b"z"

    def test_a_removed_one_takes_no_new_names(self, pool: Pair) -> None:
        pool.a.make_directory("log/1")
        pool.a.stage("tmp/s", [b"x"])
        assert pool.a.names("log/1") == []
        assert pool.b.remove_directory("log/1") is True
        with pytest.raises(FileNotFoundError):
            pool.a.publish("tmp/s", "log/1/x")
        with pytest.raises(FileNotFoundError):
            pool.a.stage("log/1/x", [b"x"])
        assert pool.a.read("tmp/s") == b"x"

    def test_syncing_one_that_is_not_there(self, pool: Pair) -> None:
        with pytest.raises(FileNotFoundError):
            pool.a.sync_directory("nowhere")
        for path in ("", "log"):
            pool.a.sync_directory(path)
