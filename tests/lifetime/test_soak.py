"""A soak in small: nothing grows, nothing is lost while processes are killed, and its account sees what is."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from strawq.limits import ENTRIES_PER_SEGMENT, SNAPSHOTS_KEPT
from strawq.upkeep import OVERDUE_ENTRIES
from tools.soak import Soaked, account
from tools.soaking.gauges import Busiest, Look, Tenth, Written, look, newest_entry, summed
from tools.soaking.roles import TENSORS_EVERY, Read

ROOT = Path(__file__).resolve().parents[2]
KEPT = ENTRIES_PER_SEGMENT
"""Entries that the trims of the long soak leave: the first of them is due no later than the others."""


def soaked(root: Path, *options: str) -> Soaked:
    """The answer of a soak in a process of its own: it forks."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.soak", "--root", str(root), "--json", *options],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert done.stdout, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=Soaked)


@pytest.mark.slow
def test_groups_are_trained_exactly_once_while_processes_are_killed(tmp_path: Path) -> None:
    done = soaked(tmp_path, "--groups", "1200", "--gc-seconds", "0.5", "--kill-every", "0.3", "--look-seconds", "0.1")
    assert done.findings == ()
    assert done.ok and done.kills > 0 and len(done.tenths) == 10
    assert done.epochs > 0, "garbage was collected"
    assert done.end.staging_files == 0 and done.end.session_files <= 1
    assert list(tmp_path.iterdir()) == [], "a pool in which nothing was found is removed"


def largest(tenths: Sequence[Tenth], name: str) -> int:
    found: int = max(getattr(tenth.largest, name) for tenth in tenths)
    return found


@pytest.mark.campaign
def test_nothing_grows_from_the_middle_to_the_end(tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # it takes as long as the machine's other work makes it take
    # Turns come much more often than the log grows by what is overdue, so that a product that skips them is told apart.
    done = soaked(
        tmp_path, "--groups", "100000", "--gc-seconds", "1", "--look-seconds", "0.3", "--keep-entries", str(KEPT)
    )
    assert done.findings == () and done.trims > 0 and done.kills > 0
    # By then the log has been trimmed several times. When a collector comes depends on the machine's other work.
    middle, end = done.tenths[4:7], done.tenths[7:]
    for name in ("object_files", "snapshot_files", "session_files", "staging_files", "directories", "names_max"):
        assert largest(end, name) <= 2 * largest(middle, name) + 4, name
    assert largest(end, "rss_kb") <= 1.25 * largest(middle, "rss_kb")
    # A process that is never killed keeps the pool: nobody lets a turn pass when so much was written since the last
    # trim, and the next turn trims, an interval later at the latest. What is written until it has is measured.
    assert done.written_max <= OVERDUE_ENTRIES + done.busiest
    # What is kept by rule: the newest entries or what lies behind the oldest snapshot that is kept, in whole segments,
    # and what was written since. Each trim writes a snapshot, so those that are kept span no more than as many trims.
    kept = max(KEPT, SNAPSHOTS_KEPT * done.written_max) + ENTRIES_PER_SEGMENT
    assert largest(end, "log_files") <= kept + done.written_max
    assert largest(end, "floor_files") <= done.log_entries // ENTRIES_PER_SEGMENT


def notes(directory: Path, *reads: Read, life: int = 1) -> Path:
    lines = b"".join(msgspec.json.encode(read) + b"\n" for read in reads)
    (directory / f"{life:05d}-trainer.notes").write_bytes(lines)
    return directory


def test_the_account_sees_groups_that_are_missing_doubled_or_foreign(tmp_path: Path) -> None:
    assert account(notes(tmp_path, Read("1", 1, [0, 1]), Read("2", 1, [2])), 3) == []
    assert account(notes(tmp_path, Read("1", 1, [0]), Read("2", 1, [2])), 3) == ["1 groups were never trained: [1] ..."]
    assert account(notes(tmp_path, Read("1", 1, [0, 1]), Read("2", 1, [1, 2])), 3) == ["group 1 was trained 2 times"]
    assert account(notes(tmp_path, Read("1", 1, [0, 1, 7])), 2) == ["group 7 was never submitted"]


def test_a_batch_that_was_delivered_again_counts_once(tmp_path: Path) -> None:
    notes(tmp_path, Read("1", 1, [0, 1]), life=1)
    (tmp_path / "00002-trainer.notes").write_bytes(
        msgspec.json.encode(Read("1", 2, [0, 1])) + b'\n{"batch":"2","delivery":1,"gro'
    )
    assert account(tmp_path, 2) == [], "and a line that a kill has cut off was never relied on"


def test_a_look_counts_files_bytes_and_the_fullest_directory(pool: Path) -> None:
    before = look(pool)
    directory = pool / "objects" / "000001" / "a"
    directory.mkdir(parents=True)
    for name in range(TENSORS_EVERY):
        (directory / str(name)).write_bytes(b"12345")
    after = look(pool)
    assert (after.object_files, after.object_bytes) == (TENSORS_EVERY, 5 * TENSORS_EVERY)
    assert after.names_max == TENSORS_EVERY and after.directories == before.directories + 2
    assert after.log_files == before.log_files > 0


def test_entries_between_two_trims_are_counted_from_the_look_before_the_one_that_sees_the_trim(pool: Path) -> None:
    written = Written()
    for floors, head in ((0, 100), (0, 900), (1, 1100), (1, 1500), (3, 1900), (3, 2000)):
        written.see(floors, head)
    assert written.most == 1100
    for floors, head in ((3, 2700), (4, 2750)):
        written.see(floors, head)
    assert written.most == 1250
    assert newest_entry(pool) == len(list((pool / "log").rglob("*.json"))) > 0


def test_entries_of_the_busiest_time_are_counted_from_the_look_before_it_begins() -> None:
    busiest = Busiest(3.0)
    for now, head in ((0.0, 10), (2.0, 30), (4.0, 230), (5.0, 260), (9.0, 280)):
        busiest.see(now, head)
    assert busiest.most == 230, "from 2 to 5"
    busiest.see(11.0, 600)
    assert busiest.most == 340, "from 5, the look before 8"


def test_a_tenth_has_the_largest_of_each_look() -> None:
    fields = len(Look.__struct_fields__)
    tenth = summed(10, 1.0, [Look(*range(fields)), Look(*reversed(range(fields)))], [5.0, 1.0, 9.0])
    assert (tenth.largest.log_files, tenth.largest.rss_kb, tenth.smallest.log_files) == (fields - 1, fields - 1, 0)
    assert (tenth.commits, tenth.commit_p50_ms, tenth.commit_p99_ms) == (3, 5.0, 9.0)
