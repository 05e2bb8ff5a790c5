"""The faulty view does each thing that it claims, only where it may, and the same again from the same seed."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import get_args

import pytest

from strawq.storage.faulty import APPLIES, Crash, Fault, FaultPlan, FaultyFiles, Moment
from strawq.storage.memory import MemoryFiles

from .conftest import refused


@pytest.fixture
def tree() -> MemoryFiles:
    made = MemoryFiles()
    for name in ("tmp", "log", "objects"):
        made.make_directory(name)
    made.stage("log/0", [b"zero"])
    made.stage("tmp/s", [b"staged"])
    return made


CALLS: dict[str, Callable[[FaultyFiles], object]] = {
    "stage": lambda files: files.stage("tmp/new", [b"ABCDEF"]),
    "publish": lambda files: files.publish("tmp/s", "log/1"),
    "replace": lambda files: files.replace("log/session", b"beat"),
    "remove": lambda files: files.remove("log/0"),
    "make_directory": lambda files: files.make_directory("objects/1"),
    "remove_directory": lambda files: files.remove_directory("objects"),
    "sync_directory": lambda files: files.sync_directory("log"),
    "read": lambda files: files.read("log/0"),
    "read_into": lambda files: files.read_into("log/0", 0, memoryview(bytearray(4))),
    "size": lambda files: files.size("log/0"),
    "names": lambda files: files.names("log"),
}


def everything(tree: MemoryFiles) -> dict[str, list[str]]:
    return {path: tree.names(path) for path in ("", "tmp", "log", "objects")}


def effect(kind: str, tree: MemoryFiles) -> dict[str, list[str]]:
    CALLS[kind](FaultyFiles(tree))
    return everything(tree)


def test_every_fault_is_described(tree: MemoryFiles) -> None:
    assert set(APPLIES) == set(get_args(Fault))
    assert {kind for kinds in APPLIES.values() for kind in kinds} == set(CALLS)


class TestCrash:
    @pytest.mark.parametrize("kind", CALLS)
    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_before_nothing_and_after_everything_has_happened(
        self, tree: MemoryFiles, kind: str, moment: Moment
    ) -> None:
        wanted = everything(tree) if moment == "before" else effect(kind, tree.copy())
        files = FaultyFiles(tree, FaultPlan(crash_at=(1, moment)))
        with pytest.raises(Crash):
            CALLS[kind](files)
        assert everything(tree) == wanted

    def test_within_a_stage_a_part_is_there(self) -> None:
        sizes = set()
        for seed in range(60):
            tree = MemoryFiles()
            files = FaultyFiles(tree, FaultPlan(seed=seed, crash_at=(1, "within")))
            with pytest.raises(Crash):
                files.stage("s", [b"ABC", b"DEF"])
            data = tree.read("s")
            assert b"ABCDEF".startswith(data)
            sizes.add(len(data))
        assert sizes == set(range(7))

    def test_within_a_publish_it_is_there_or_not(self, tree: MemoryFiles) -> None:
        found = set()
        for seed in range(20):
            twin = tree.copy()
            with pytest.raises(Crash):
                FaultyFiles(twin, FaultPlan(seed=seed, crash_at=(1, "within"))).publish("tmp/s", "log/1")
            found.add("1" in twin.names("log"))
        assert found == {True, False}

    def test_the_dead_touch_nothing(self, tree: MemoryFiles) -> None:
        """Clean-up code of the process that died runs in the test, and must find no files."""
        files = FaultyFiles(tree, FaultPlan(crash_at=(1, "after")))

        def publish_and_clean_up() -> None:
            try:
                files.publish("tmp/s", "log/1")
            finally:
                files.remove("log/1")

        with pytest.raises(Crash):
            publish_and_clean_up()
        assert tree.names("log") == ["0", "1"]
        for call in CALLS.values():
            with pytest.raises(Crash):
                call(files)

    def test_it_outranks_the_error_of_the_call(self, tree: MemoryFiles) -> None:
        files = FaultyFiles(tree, FaultPlan(crash_at=(1, "after")))
        with pytest.raises(Crash):
            files.read("log/none")

    def test_a_power_cut_takes_what_was_not_synced(self, tree: MemoryFiles) -> None:
        for path in ("", "log", "tmp"):
            tree.sync_directory(path)
        files = FaultyFiles(tree)
        files.publish("tmp/s", "log/1")
        files.power_cut("drop")
        assert tree.names("log") == ["0"]
        with pytest.raises(Crash):
            files.names("log")


class TestErrors:
    @pytest.mark.parametrize(
        ("fault", "kind", "code"),
        [
            (fault, kind, getattr(errno, fault.removeprefix("lost_").upper()))
            for fault, kinds in APPLIES.items()
            if fault.startswith("lost_")
            for kind in sorted(kinds)
        ],
    )
    def test_a_lost_reply_says_failure_of_what_worked(
        self, tree: MemoryFiles, fault: Fault, kind: str, code: int
    ) -> None:
        wanted = effect(kind, tree.copy())
        files = FaultyFiles(tree, FaultPlan(at={1: fault}))
        with refused(code):
            CALLS[kind](files)
        assert everything(tree) == wanted
        assert [name for _, name, _ in files.fired] == [fault]

    @pytest.mark.parametrize(
        ("fault", "kind"), [(fault, kind) for fault in ("enospc", "edquot") for kind in sorted(APPLIES[fault])]
    )
    def test_a_full_disk_changes_nothing_but_staging(self, tree: MemoryFiles, fault: Fault, kind: str) -> None:
        before = everything(tree)
        parts = set()
        for seed in range(20):
            twin = tree.copy()
            with refused(errno.ENOSPC if fault == "enospc" else errno.EDQUOT):
                CALLS[kind](FaultyFiles(twin, FaultPlan(seed=seed, at={1: fault})))
            after = everything(twin)
            parts.add("new" in after["tmp"])
            after["tmp"] = [name for name in after["tmp"] if name != "new"]
            assert after == before
        assert parts == ({True, False} if kind == "stage" else {False})

    def test_a_failed_sync_makes_nothing_durable(self, tree: MemoryFiles) -> None:
        files = FaultyFiles(tree, FaultPlan(at={2: "eio"}))
        files.publish("tmp/s", "log/1")
        with refused(errno.EIO):
            files.sync_directory("log")
        files.power_cut("drop")
        assert tree.names("log") == []

    @pytest.mark.parametrize("kind", sorted(APPLIES["estale"]))
    def test_a_stale_handle_does_nothing(self, tree: MemoryFiles, kind: str) -> None:
        before = everything(tree)
        files = FaultyFiles(tree, FaultPlan(at={1: "estale"}))
        with refused(errno.ESTALE):
            CALLS[kind](files)
        assert everything(tree) == before
        CALLS[kind](files)  # and is over

    def test_a_lost_reply_to_a_call_that_failed_gives_its_own_error(self, tree: MemoryFiles) -> None:
        tree.stage("log/1", [b"theirs"])
        files = FaultyFiles(tree, FaultPlan(at={1: "lost_eio"}))
        with pytest.raises(FileExistsError):
            files.publish("tmp/s", "log/1")
        assert files.fired == []

    def test_no_hard_links(self, tree: MemoryFiles) -> None:
        files = FaultyFiles(tree, FaultPlan(link_refused=True))
        assert not files.keeps_staged
        files.publish("tmp/s", "log/1")
        assert tree.names("tmp") == []
        assert files.read("log/1") == b"staged"
        files.stage("tmp/s", [b"late"])
        with pytest.raises(FileExistsError):
            files.publish("tmp/s", "log/1")


class TestStaleness:
    def two_hosts(self, fault: Fault) -> tuple[FaultyFiles, FaultyFiles, list[float]]:
        tree = MemoryFiles()
        for name in ("tmp", "log", "objects"):
            tree.make_directory(name)
        now = [100.0]
        stale = FaultPlan(rates={fault: 1.0})
        return FaultyFiles(tree, clock=lambda: now[0]), FaultyFiles(tree, stale, clock=lambda: now[0]), now

    def test_what_another_host_removed_is_seen_for_a_second(self) -> None:
        a, b, now = self.two_hosts("stale")
        a.stage("log/1", [b"old"])
        assert b.read("log/1") == b"old"
        assert a.remove("log/1")
        with pytest.raises(FileNotFoundError):
            a.read("log/1")
        now[0] += 0.9
        buffer = bytearray(2)
        assert b.read("log/1") == b"old"
        assert b.size("log/1") == 3
        assert b.read_into("log/1", 1, memoryview(buffer)) == 2 and buffer == b"ld"
        assert b.names("log") == ["1"]
        now[0] += 0.2
        for look in (b.read, b.size):
            with pytest.raises(FileNotFoundError):
                look("log/1")
        assert b.names("log") == []

    def test_the_old_content_hides_a_new_file_of_the_same_name(self) -> None:
        a, b, _ = self.two_hosts("stale")
        a.stage("log/1", [b"old"])
        assert b.read("log/1") == b"old"
        a.remove("log/1")
        a.stage("log/1", [b"new"])
        assert b.read("log/1") == b"old"
        assert a.read("log/1") == b"new"

    def test_a_name_never_looked_at_is_fresh(self) -> None:
        a, b, _ = self.two_hosts("stale")
        a.stage("log/1", [b"old"])
        a.remove("log/1")
        with pytest.raises(FileNotFoundError):
            b.read("log/1")
        a.stage("log/2", [b"new"])
        assert b.read("log/2") == b"new"

    def test_ones_own_removal_is_seen_at_once(self) -> None:
        _, b, _ = self.two_hosts("stale")
        b.stage("log/1", [b"old"])
        assert b.read("log/1") == b"old"
        assert b.remove("log/1")
        with pytest.raises(FileNotFoundError):
            b.read("log/1")

    def test_publish_is_never_fooled(self) -> None:
        a, b, _ = self.two_hosts("stale")
        a.stage("log/1", [b"old"])
        assert b.read("log/1") == b"old"
        a.remove("log/1")
        b.stage("tmp/s", [b"mine"])
        b.publish("tmp/s", "log/1")
        assert b.read("log/1") == b"mine"

    def test_a_listing_may_be_an_old_one(self) -> None:
        a, b, now = self.two_hosts("stale")
        a.stage("log/1", [b""])
        assert b.names("log") == ["1"]
        a.stage("log/2", [b""])
        assert b.names("log") == ["1"]
        now[0] += 1.1
        assert b.names("log") == ["1", "2"]

    def test_absent_once_after_a_publish_but_never_where_absence_must_be_fresh(self) -> None:
        a, b, _ = self.two_hosts("enoent_once")
        for path in ("objects/1", "log/1"):
            a.stage(path, [b"new"])
        with pytest.raises(FileNotFoundError):
            b.read("objects/1")
        assert b.read("objects/1") == b"new"
        assert b.read("log/1") == b"new"

    def test_zeros_of_the_right_size(self, tree: MemoryFiles) -> None:
        files = FaultyFiles(tree, FaultPlan(at={1: "zeros"}))
        assert files.read("log/0") == bytes(4)
        assert files.read("log/0") == b"zero"


def history(seed: int) -> tuple[list[str], list[tuple[int, Fault, str]]]:
    tree = MemoryFiles()
    tree.make_directory("log")
    rates: dict[Fault, float] = {"lost_eio": 0.2, "enospc": 0.2, "estale": 0.1, "zeros": 0.1}
    files = FaultyFiles(tree, FaultPlan(seed=seed, rates=rates))
    answers = []
    for number in range(60):
        for call in (lambda path: files.stage(path, [b"data"]), files.read, files.remove):
            try:
                answers.append(repr(call(f"log/{number}")))
            except OSError as error:
                answers.append(repr(error.errno))
    return answers, files.fired


def test_one_seed_one_history() -> None:
    assert history(7) == history(7)
    assert history(7) != history(8)
    assert {fault for _, fault, _ in history(7)[1]} == {"lost_eio", "enospc", "estale", "zeros"}


def test_calls_and_bytes_are_counted(tree: MemoryFiles) -> None:
    files = FaultyFiles(tree)
    files.stage("tmp/1", [b"ab", b"c"])
    files.publish("tmp/1", "log/1")
    files.sync_directory("log")
    files.read("log/1")
    files.read_into("log/1", 1, memoryview(bytearray(8)))
    assert files.calls == [
        ("stage", "tmp/1"),
        ("publish", "log/1"),
        ("sync_directory", "log"),
        ("read", "log/1"),
        ("read_into", "log/1"),
    ]
    assert files.counts == {"stage": 1, "publish": 1, "sync_directory": 1, "read": 1, "read_into": 1}
    assert (files.bytes_staged, files.bytes_read) == (3, 5)


def test_the_hook_holds_one_call_while_others_go_on(tree: MemoryFiles) -> None:
    """How tests force a race: one host is stopped between deciding and publishing."""
    slow, fast = FaultyFiles(tree), FaultyFiles(tree)
    reached, go_on = threading.Event(), threading.Event()

    def hook(moment: Moment, kind: str, _: str) -> None:
        if (moment, kind) == ("before", "publish"):
            reached.set()
            assert go_on.wait(10)

    slow.hook = hook
    lost: list[str] = []

    def publish() -> None:
        try:
            slow.publish("tmp/s", "log/1")
        except FileExistsError as error:
            lost.append(str(error))

    thread = threading.Thread(target=publish)
    thread.start()
    assert reached.wait(10)
    fast.stage("tmp/fast", [b"fast"])
    fast.publish("tmp/fast", "log/1")
    assert slow.names("log") == ["0", "1"]  # another thread of the stopped host
    go_on.set()
    thread.join(10)
    assert len(lost) == 1
    assert fast.read("log/1") == b"fast"
