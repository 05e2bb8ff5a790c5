"""Small files become few, and nobody notices: not a reader with an old handle, not a second merger, not a collection
in between. Nothing is copied that does not pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from strawq import Pool
from strawq.archives import load_archive, open_archive, save_batch, write_archive
from strawq.core import commands as c
from strawq.core import events as e
from strawq.core.invariants import findings
from strawq.errors import BadInput, Damaged, Gone
from strawq.export import live_groups, write_parquet
from strawq.garbage import collect_garbage
from strawq.merging import Merging, merge_objects
from strawq.model import ObjectRef, StoredObject
from strawq.retention import NO_REASON, retained
from strawq.storage import layout
from strawq.storage.faulty import FaultyFiles
from strawq.storage.merged import layout_of, merge
from strawq.testing.crashes import content
from strawq.testing.scenes import completed, finish_work, prompts, require_healthy
from strawq.testing.worlds import World
from strawq.trimming import trim_log
from strawq.verification import verify
from strawq.work import Work
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every publication is a file, and four are many."""
    monkeypatch.setattr("strawq.payloads.INLINE_OBJECT_BYTES", 0)
    monkeypatch.setattr("strawq.merging.MERGE_FILES", 4)
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 1)


def scattered(world: World, count: int = 6, first: int = 0) -> Pool:
    """A pool with `count` small files of prompts in a closed epoch."""
    pool = world.process()
    for number in range(first, first + count):
        pool.queue().submit(prompts([f"g{number}"]))
    collect_garbage(pool, wait_seconds=0)
    return pool


def collected(pool: Pool) -> int:
    """Collect until nothing is left to collect; returns how many objects' files went."""
    return sum(collect_garbage(pool, wait_seconds=0)[1].by_reason.get("unreachable object", 0) for _ in range(2))


def record_files(world: World) -> list[str]:
    return [path for path, _ in content(world.memory) if path.endswith(".arrow")]


def stored(pool: Pool) -> list[StoredObject]:
    rows: list[StoredObject] = pool.log.refresh(lambda machine: list(machine.state.objects.values()))
    return rows


def before_commit(pool: Pool, act: Callable[[], object]) -> None:
    """Run `act` once, when the pool's process is about to publish its next log entry."""
    files = pool.files
    assert isinstance(files, FaultyFiles)

    def look(moment: str, kind: str, path: str) -> None:
        if (moment, kind) == ("before", "publish") and path.startswith("log/"):
            files.hook = None
            act()

    files.hook = look


def names_read(pool: Pool) -> list[str]:
    return [pool.payloads.prompt(held).group_id for held in live_groups(pool, "rollout", ready=False)]


# What a merge does.


def test_many_small_files_become_one_and_every_group_is_read(world: World) -> None:
    pool = scattered(world)
    assert len(record_files(world)) == 6
    done = merge_objects(pool)
    assert (done.files, done.into, done.objects) == (6, 1, 6)
    assert len(record_files(world)) == 7, "the old files stay until the next collection"
    assert collected(pool) == 6
    (path,) = record_files(world)
    assert {row.ref.file for row in stored(pool)} == {Path(path).stem}
    assert names_read(world.process()) == [f"g{n}" for n in range(6)]
    assert pool.inspect().objects.files == 1
    finish_work(pool)
    require_healthy(pool)
    assert path not in record_files(world)


def test_any_arrow_reader_opens_a_merged_file_as_one_table(world: World) -> None:
    pool = scattered(world, 5)
    merge_objects(pool)
    collected(pool)
    (path,) = record_files(world)
    table = pa.ipc.open_file(pa.py_buffer(world.memory.read(path))).read_all()
    table.validate(full=True)
    assert sorted(table["group_id"].to_pylist()) == [f"g{n}" for n in range(5)]
    assert table.schema.metadata[b"strawq.kind"] == b"prompts"


def test_prompts_and_segments_go_into_files_of_their_own(world: World) -> None:
    pool = world.process()
    pool.queue().submit(prompts([f"g{n}" for n in range(4)]))
    for lease in pool.queue().acquire(4):
        completed(pool.queue(), pool.queue().open(lease))
    scattered(world, 3, first=10)
    assert (merge_objects(pool).files, merge_objects(pool).files) == (8, 0)
    collected(pool)
    kinds = [
        pa.ipc.open_file(pa.py_buffer(world.memory.read(path))).schema.metadata[b"strawq.kind"]
        for path in record_files(world)
    ]
    assert sorted(kinds) == [b"prompts", b"segments"]
    finish_work(pool)
    require_healthy(pool)


def test_a_trim_writes_what_it_moves_into_few_files(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strawq.payloads.INLINE_OBJECT_BYTES", 64 << 10)
    pool = world.process()
    for number in range(30):
        pool.queue().submit(prompts([f"g{number}"]))
    assert record_files(world) == []
    for version in range(3):
        pool.snapshot()
        pool.publish_version(version)
    assert trim_log(pool, keep_entries=0, snapshots_kept=2).moved == 30
    assert len(record_files(world)) == 1
    finish_work(pool)
    require_healthy(pool)


# When it pays.


def test_too_few_files_are_left_alone(world: World) -> None:
    pool = scattered(world, 3)
    files = pool.files
    assert isinstance(files, FaultyFiles)
    before = len(files.calls)
    assert merge_objects(pool) == Merging()
    assert {kind for kind, _ in files.calls[before:]} <= {"read", "names"}


def test_files_of_the_open_epoch_are_left_alone(world: World) -> None:
    pool = world.process()
    for number in range(6):
        pool.queue().submit(prompts([f"g{number}"]))
    assert merge_objects(pool) == Merging()
    assert merge_objects(pool, dry_run=True).files == 6, "after the collection that a real run would make first"


def test_objects_that_are_large_or_have_tensors_stay_where_they_are(world: World) -> None:
    pool = world.process()
    pool.queue().submit(prompts([f"r{n}" for n in range(4)]))
    pool.queue().submit(prompts(["big"], payload_bytes=40_000))
    for lease in pool.queue().acquire(4):
        completed(pool.queue(), pool.queue().open(lease))
    scattered(world, 4, first=10)
    where = {row.ref.digest: row.ref for row in stored(pool)}
    assert merge_objects(pool).files == 5
    for row in stored(pool):
        if row.ref.pack or row.ref.bytes > 64 << 10:
            assert row.ref == where[row.ref.digest]
    finish_work(pool)
    require_healthy(pool)


def test_a_merged_file_is_merged_again_when_no_more_than_half_of_it_is_live(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strawq.merging.MERGED_OBJECTS", 4)
    pool = scattered(world, 16)
    assert merge_objects(pool).into == 4
    collected(pool)
    assert len(record_files(world)) == 4
    works: dict[str, list[Work]] = {}
    for lease in pool.queue().acquire(16):
        place = next(iter(lease.held.objects.values())).ref
        works.setdefault(place.file, []).append(pool.queue().open(lease))
    assert [len(there) for there in works.values()] == [4] * 4
    for there in works.values():
        pool.queue().drop(there.pop(), "dull")
    assert merge_objects(pool).files == 0, "three of four are live in each"
    for there in works.values():
        pool.queue().drop(there.pop(), "dull")
    done = merge_objects(pool)
    assert (done.files, done.into, done.objects) == (4, 2, 8)
    collected(pool)
    assert len(record_files(world)) == 2
    require_healthy(pool)


def test_a_long_life_of_small_groups_keeps_few_files(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every ten groups nine end; the tenth stays for good, under a checkpoint or waiting."""
    monkeypatch.setattr("strawq.merging.MERGED_OBJECTS", 8)
    pool = world.process()
    most = 0
    for turn in range(40):
        pool.queue().submit(prompts([f"g{turn}"]))
        pool.queue().submit(prompts([f"h{turn}-{n}" for n in range(9)]))
        for lease in pool.queue().acquire(10):
            work = pool.queue().open(lease)
            if work.group.prompt.group_id.startswith("h"):
                pool.queue().drop(work, "dull")
            else:
                pool.queue().fail(work, "kept", retryable=False)
        collect_garbage(pool, wait_seconds=0)
        merge_objects(pool)
        most = max(most, len(record_files(world)))
    assert len(stored(pool)) == 40
    assert most <= 40 / 4 + 2 * 4 + 2
    assert len(world.memory.names("objects")) <= 16
    collected(pool)
    assert len(record_files(world)) <= 40 / 4 + 4
    require_healthy(pool)


# Beside others.


def test_a_reader_with_an_old_handle_is_served_from_the_new_place(world: World) -> None:
    pool, reader = scattered(world), world.process()
    leases = reader.queue().acquire(6).leases
    merge_objects(pool)
    collected(pool)
    assert [reader.queue().open(lease).group.prompt.group_id for lease in leases] == [f"g{n}" for n in range(6)]


def test_a_reader_whose_group_has_ended_meanwhile_gets_one_clear_error(world: World) -> None:
    pool, reader = scattered(world), world.process()
    held = live_groups(reader, "rollout", ready=False)
    merge_objects(pool)
    for lease in pool.queue().acquire(6):
        pool.queue().drop(pool.queue().open(lease), "dull")
    collected(pool)
    with pytest.raises(Gone, match="garbage collection has taken it"):
        reader.payloads.prompt(held[0])


def test_of_two_mergers_at_once_one_moves_each_object(world: World) -> None:
    pool, other = scattered(world), world.process()
    done: list[Merging] = []
    pool.queue().submit(prompts(["late"]))  # else both would write the same bytes under the same name
    before_commit(pool, lambda: done.append(merge_objects(other)))
    assert merge_objects(pool) == Merging()
    assert done[0].objects == 6
    collected(pool)
    assert len({row.ref.name for row in stored(pool)}) == len(record_files(world)) == 2
    require_healthy(pool)


def test_a_merger_that_slept_through_a_collection_writes_again_in_a_young_epoch(world: World) -> None:
    pool, other = scattered(world), world.process()
    taken: list[int] = []
    before_commit(pool, lambda: taken.append(collected(other)))
    assert merge_objects(pool).objects == 6
    assert taken == [1], "what nothing referred to yet was collected"
    collected(other)
    assert names_read(world.process()) == [f"g{n}" for n in range(6)]
    assert len(record_files(world)) == 1
    require_healthy(pool)


def test_what_ends_between_the_copy_and_the_commit_is_not_brought_back(world: World) -> None:
    pool, other = scattered(world), world.process()

    def end_one() -> None:
        lease = other.queue().acquire(1).leases[0]
        other.queue().drop(other.queue().open(lease), "dull")

    before_commit(pool, end_one)
    assert merge_objects(pool).objects == 5
    assert len(stored(pool)) == 5
    assert findings(pool.log.refresh(lambda machine: machine.state)) == []
    collected(pool)
    require_healthy(pool)


def test_the_same_prompt_submitted_again_is_read_from_where_the_first_one_is(world: World) -> None:
    """Its file is written in the open epoch, and is garbage: the state knows where these bytes are."""
    pool = scattered(world)
    merge_objects(pool)
    pool.queue().submit(prompts(["g3"]))
    collected(pool)
    assert len(record_files(world)) == 1
    assert sorted(names_read(world.process())) == sorted([*(f"g{n}" for n in range(6)), "g3"])
    require_healthy(pool)


def test_a_verification_that_began_before_a_merge_finds_nothing_amiss(world: World) -> None:
    pool, other = scattered(world), world.process()

    def away(*_: object) -> None:
        if len(record_files(world)) == 6:
            merge_objects(other)
            collected(other)

    assert verify(pool, full=True, progress=away).findings == ()
    assert len(record_files(world)) == 1


def test_checkpoints_branches_pins_archives_and_exports_follow(world: World, tmp_path: Path) -> None:
    pool = scattered(world)
    works = [pool.queue().open(lease) for lease in pool.queue().acquire(2)]
    for work in works:
        completed(pool.queue(), work)
    pool.checkpoint("before")
    batch = pool.queue().take_batch(2).batch
    assert batch is not None
    save_batch(pool, "kept", batch)
    pool.pin("reading", batch.groups)
    pool.queue().finish_batch(batch)
    pool.rollback("before")
    collect_garbage(pool, wait_seconds=0)
    assert merge_objects(pool).objects == 8
    collected(pool)
    reader = world.process()
    assert len(list(load_archive(reader, "kept"))) == 2
    manifest = write_archive(reader, "kept", str(tmp_path / "away"))
    assert all(not ref.file and not ref.offset for ref in manifest.objects)
    with open_archive(str(tmp_path / "away")) as groups:
        assert [len(group.samples) for group in groups] == [1, 1]
    assert [len(group.samples) for group in pool.queue().read_batch(batch)] == [1, 1], "they are pinned"
    exported = write_parquet(
        (reader.payloads.load(held) for held in live_groups(reader, "rollout", ready=False)),
        str(tmp_path / "all.parquet"),
    )
    assert exported.groups == 6
    reader.rollback("main")
    assert reader.queue().counts().trained == 2
    require_healthy(pool)


# What must not happen.


def test_a_move_names_what_is_there_and_goes_forward_only(world: World) -> None:
    pool = scattered(world, 1)
    (row,) = stored(pool)
    epoch = pool.epoch()
    place = {"file": "a" * 64, "offset": 64}

    def move(**fields: Any) -> Any:
        ref = ObjectRef(**{"digest": row.ref.digest, "epoch": epoch, "bytes": row.ref.bytes, "rows": 1} | fields)
        return pool.commit(c.MoveObjects(objects=(ref,)))

    with pytest.raises(BadInput, match="BLAKE3"):
        move(file="../../etc")
    with pytest.raises(BadInput, match="cannot move"):
        move(**place, epoch=epoch + 1)
    with pytest.raises(BadInput, match="cannot move"):
        move(**place, bytes=row.ref.bytes + 1)
    assert move(**place, epoch=row.ref.epoch).status == "done", "it is there already"
    assert move(**place, digest="b" * 64).status == "done", "nothing reaches that"
    new = ObjectRef(digest="c" * 64, epoch=epoch, bytes=1, rows=1, file="a" * 64)
    with pytest.raises(BadInput, match="merged file"):
        pool.commit(c.Submit(request="x", queue="rollout", objects=(new,)))
    assert stored(pool) == [row]


def test_records_do_not_move_away_from_their_tensors(world: World) -> None:
    pool = world.process()
    pool.queue().submit(prompts(["r0"]))
    completed(pool.queue(), pool.queue().open(pool.queue().acquire(1).leases[0]))
    collect_garbage(pool, wait_seconds=0)
    (row,) = [row for row in stored(pool) if row.ref.pack]
    ref = ObjectRef(row.ref.digest, pool.epoch(), row.ref.bytes, row.ref.rows, file="a" * 64)
    assert isinstance(pool.commit(c.MoveObjects(objects=(ref,))), e.Refusal)
    assert row in stored(pool)


@pytest.fixture
def merged_world(world: World) -> World:
    pool = scattered(world, 4)
    merge_objects(pool)
    collected(pool)
    pool.close()
    return world


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        yield at, bytes(flipped)


def test_a_flipped_bit_in_a_live_object_of_a_merged_file_is_found_and_never_read_and_elsewhere_is_no_finding(
    merged_world: World,
) -> None:
    (path,) = record_files(merged_world)
    data = merged_world.memory.read(path)
    pool = merged_world.process()
    rows = stored(pool)
    for at, flipped in flips(data):
        merged_world.memory.remove(path)
        merged_world.memory.stage(path, [flipped])
        hit = [row for row in rows if row.ref.offset <= at < row.ref.offset + row.ref.bytes]
        for row in hit:
            with pytest.raises(Damaged, match=path):
                pool.objects.read_checked(row)
        if at % 16 == 0:
            found = verify(pool, full=True).findings
            assert [finding.what for finding in found] == [path][: len(hit)], at
            assert all("fresh prompts" in " ".join(finding.depends) for finding in found)
            for row in rows:
                if row not in hit:
                    pool.objects.read_checked(row)


def test_damage_is_no_finding_any_more_when_the_objects_that_have_it_have_ended(merged_world: World) -> None:
    """And the file is merged away or collected as any other."""
    pool = merged_world.process()
    (path,) = record_files(merged_world)
    leases = list(pool.queue().acquire(4))
    works = [pool.queue().open(lease) for lease in leases]
    bad = next(iter(leases[0].held.objects.values()))
    flipped = bytearray(merged_world.memory.read(path))
    flipped[bad.ref.offset + bad.ref.bytes // 2] ^= 1
    merged_world.memory.remove(path)
    merged_world.memory.stage(path, [bytes(flipped)])
    (finding,) = verify(merged_world.process(), full=True).findings
    assert (finding.what, bad.ref.digest[:12] in finding.problem) == (path, True) and leases[0].task in finding.remedy
    pool.queue().drop(works[0], "damaged")
    assert verify(pool, full=True).findings == ()
    for work in works[1:]:
        pool.queue().drop(work, "dull")
    collected(pool)
    assert record_files(merged_world) == []
    require_healthy(pool)


def test_a_merged_file_that_is_cut_short_or_gone_is_named(merged_world: World) -> None:
    (path,) = record_files(merged_world)
    data = merged_world.memory.read(path)
    pool = merged_world.process()
    last = max(stored(pool), key=lambda row: row.ref.offset)
    for length in (0, 100, last.ref.offset, last.ref.offset + last.ref.bytes - 1):
        merged_world.memory.remove(path)
        merged_world.memory.stage(path, [data[:length]])
        with pytest.raises(Damaged, match=path):
            pool.objects.read_checked(last)
        assert path in {finding.what for finding in verify(pool).findings}
    merged_world.memory.remove(path)
    with pytest.raises(Gone, match=path):
        pool.objects.read_checked(last)
    assert path in {finding.what for finding in verify(pool).findings}


def test_an_object_that_is_damaged_stays_and_does_not_stop_the_others(world: World) -> None:
    pool = scattered(world)
    (bad, *_) = stored(pool)
    path = layout.record_file(bad.ref.epoch, bad.ref.digest)
    data = world.memory.read(path)
    world.memory.remove(path)
    world.memory.stage(path, [data[:-1]])
    assert merge_objects(world.process()).objects == 5
    assert next(row for row in stored(pool) if row.ref.digest == bad.ref.digest).ref == bad.ref
    collected(pool)
    assert path in {finding.what for finding in verify(pool, full=True).findings}


def test_bytes_that_are_no_records_go_into_no_merged_file() -> None:
    whole = merge([one_record("a"), one_record("b")])
    together = b"".join(whole.buffers)
    assert layout_of(together) is None, "more than one batch"
    for data in (b"", b"ARROW1\0\0ARROW1", one_record("a")[:-1], one_record("a")[8:], bytes(900)):
        assert layout_of(data) is None
        with pytest.raises(ValueError, match="Arrow"):
            merge([one_record("a"), data])
    with pytest.raises(ValueError, match="nothing"):
        merge([])


def test_a_damaged_footer_is_no_layout_and_no_crash() -> None:
    data = one_record("a")
    known = layout_of(data)
    assert known is not None
    for _, flipped in flips(data):
        layout_of(flipped)  # whatever it says: bytes are checked against their digest before


def one_record(name: str) -> bytes:
    from strawq.storage.records import encode_prompts

    return bytes(encode_prompts(prompts([name])).records)


# The command line.


def test_the_verb_merges_shows_what_it_would_merge_and_can_leave_it_out(run: Run, pool: Path) -> None:
    with Pool.open(pool) as opened:
        for number in range(6):
            opened.queue().submit(prompts([f"g{number}"]))
    plan = run("gc", pool, "--dry-run", "--json").data["merged"]
    assert plan["files"] == 6 and plan["into"] == 1 and plan["bytes"] > 0
    assert "6 small files" in run("gc", pool, "--dry-run").out
    assert run("gc", pool, "--no-merge", "--json").data["merged"] is None
    assert run("gc", pool, "--json").data["merged"] == plan
    again = run("gc", pool, "--json").data
    assert again["merged"]["files"] == 0 and again["by_reason"]["unreachable object"] == 6
    assert len(list(pool.glob("objects/*/*/*.arrow"))) == 1
    with Pool.open(pool) as opened:
        kept = retained(opened)
        assert NO_REASON not in {reason for item in kept for reason in item.reasons}
        on_disk = sum(path.stat().st_size for path in pool.glob("objects/*/*/*.arrow"))
        assert sum(item.bytes for item in kept if item.path.startswith("objects/")) == on_disk
        assert names_read(opened) == [f"g{n}" for n in range(6)]


@pytest.fixture
def world() -> World:
    return World()
