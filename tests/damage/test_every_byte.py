"""Every prefix and one flipped bit at every byte of every kind of file: refused by name or irrelevant, never accepted,
and the rest of the pool is served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strawq.errors import Damaged, FormatUnsupported, Gone, NotAPool, OperatorNeeded, StrawqError
from strawq.garbage import collect_garbage
from strawq.model import StoredObject
from strawq.pool import Pool
from strawq.storage import layout
from strawq.storage.floors import encode_floor
from strawq.storage.tensors import PackReader
from strawq.testing.scenes import Scene, build, finish_work, image, prompts, require_healthy, require_sound, take_over
from strawq.testing.worlds import World
from strawq.verification import verify


def damages(data: bytes, step: int = 1) -> Iterator[bytes]:
    """Every proper prefix, one flipped bit at every byte, and what a mount may show for a while."""
    for at in range(0, len(data), step):
        yield data[:at]
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        yield bytes(flipped)
    yield bytes(len(data))
    yield data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
    yield data + b"\n"
    yield data + data


def with_file(world: World, path: str, data: bytes | None) -> World:
    twin = world.twin()
    twin.memory.remove(path)
    if data is not None:
        twin.memory.stage(path, [data])
    return twin


@pytest.fixture(scope="module")
def scene() -> Scene:
    return build()


def tip(scene: Scene) -> int:
    seq: int = scene.worker.log.refresh(lambda machine: machine.seq)
    return seq


def test_a_damaged_header_is_named_and_the_pool_is_not_opened(scene: Scene) -> None:
    for data in damages(scene.world.memory.read(layout.HEADER)):
        with pytest.raises((Damaged, FormatUnsupported), match=r"strawq\.json|format version"):
            with_file(scene.world, layout.HEADER, data).process()
    with pytest.raises(NotAPool, match=r"strawq\.json"):
        with_file(scene.world, layout.HEADER, None).process()


@pytest.mark.parametrize("inline", [False, True])
def test_a_damaged_newest_entry_is_named_the_state_before_it_is_shown_and_a_repair_lets_history_go_on(
    scene: Scene, inline: bool
) -> None:
    world = scene.world.twin()
    pool = world.process()
    before = pool.inspect()
    if inline:
        work = pool.queue().open(pool.queue().acquire(1, stages=["fresh"]).leases[0])
        before = pool.inspect()
        pool.queue().yield_(work, work.group)
        pool.queue().submit([work.group.prompt])
        pool.queue().counts()
    else:
        pool.publish_version("5")
    seq = pool.log.machine.seq
    path = layout.entry(seq)
    before = with_file(world, path, None).process().inspect()
    data = world.memory.read(path)
    head = data.index(b"\n", data.index(b"\n") + 1) + 1
    cuts = [data[:at] for at in range(head, len(data), 97)]
    for number, torn in enumerate([*(torn + data[head:] if inline and len(torn) == head else torn
                                     for torn in damages(data[:head])), *cuts]):  # fmt: skip
        twin = with_file(world, path, torn)
        reader = twin.process()
        seen = reader.inspect()
        assert seen.head_seq == before.head_seq and seen.queues == before.queues
        assert any(path in sentence for sentence in seen.damage)
        with pytest.raises(Damaged, match=path):
            reader.publish_version("6")
        if number % 16 == 0:
            assert reader.log.void_tip() == seq
            later = twin.process()
            later.publish_version("7")
            take_over(later)
            finish_work(later, scene.saved)
            assert later.queue().counts().trained == before.queues["rollout"].tasks.total


def test_a_damaged_entry_in_the_middle_is_named_and_not_voided(scene: Scene) -> None:
    path = layout.entry(5)
    for data in damages(scene.world.memory.read(path), 3):
        reader = with_file(scene.world, path, data).process()
        assert any(path in sentence for sentence in reader.inspect().damage)
        assert reader.inspect().head_seq == 4
        with pytest.raises(Damaged, match=path):
            reader.log.void_tip()


def test_an_entry_behind_a_snapshot_is_history_and_its_damage_touches_nobody(scene: Scene) -> None:
    world = scene.world.twin()
    world.process().snapshot()
    path = layout.entry(5)
    whole = image(world.process())
    for data in damages(world.memory.read(path), 3):
        reader = with_file(world, path, data).process()
        assert image(reader) == whole
        assert [finding.what for finding in verify(reader).findings] == [path]


def test_an_entry_of_another_pool_is_refused_and_not_voided(scene: Scene) -> None:
    """It is whole: whoever repairs must not throw away what somebody was told."""
    other = build(seed=9).world
    path = layout.entry(tip(scene))
    twin = with_file(scene.world, path, other.memory.read(path))
    reader = twin.process()
    with pytest.raises(Damaged, match="another history"):
        reader.log.void_tip()
    with pytest.raises(FileNotFoundError):
        twin.memory.read(layout.entry(tip(scene) + 1))


def test_an_entry_of_a_newer_version_is_refused_and_not_voided(scene: Scene) -> None:
    """A repair by an old program would undo what a newer one has acknowledged."""
    import msgspec

    from strawq.storage.entry import EntryLine, encode_entry

    pool = scene.world.twin().process()
    pool.inspect()
    seq = pool.log.machine.seq + 1
    line = EntryLine(seq, pool.log.tip, "x" * 32, "somebody", 0, [msgspec.Raw(b'{"event":"invented_later"}')])
    twin = with_file(scene.world, layout.entry(seq), encode_entry(line)[0])
    reader = twin.process()
    with pytest.raises(Damaged, match="newer strawq"):
        reader.log.void_tip()
    assert twin.memory.names(layout.segment_directory(0))[-1] == f"{seq:012d}.json"


def test_a_damaged_snapshot_is_named_and_older_ones_serve() -> None:
    world = World()
    pool = world.process()
    pool.queue().submit(prompts(["one"]))
    pool.snapshot()
    pool.publish_version("3")
    newest = layout.snapshot(pool.snapshot())
    whole = image(pool)
    for data in damages(world.memory.read(newest)):
        twin = with_file(world, newest, data)
        reader = twin.process()
        assert image(reader) == whole
        assert newest in reader.log.damage
        reader.publish_version("4")
        # What was committed behind it is what those read who never saw the damaged one.
        twin.memory.remove(newest)
        assert twin.process().policy_version() == "4"


def test_a_damaged_snapshot_that_is_all_there_is_is_an_error_that_names_the_way_out(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 1)
    from strawq.trimming import trim_log

    world = scene.world.twin()
    pool = world.process()
    pool.snapshot()
    trim_log(pool, keep_entries=0, snapshots_kept=1)
    for name in world.memory.names(layout.SNAPSHOTS):
        data = world.memory.read(f"{layout.SNAPSHOTS}/{name}")
        world.memory.remove(f"{layout.SNAPSHOTS}/{name}")
        world.memory.stage(f"{layout.SNAPSHOTS}/{name}", [data[:-1]])
    with pytest.raises(OperatorNeeded, match="strawq verify"):
        world.process().publish_version("8")


def test_a_damaged_floor_that_no_trim_has_logged_is_named_and_a_repair_resets_it(scene: Scene) -> None:
    """A trimmer died between the floor and its log entry; then the floor was damaged."""
    world = scene.world.twin()
    path = layout.floor(1)
    whole = image(world.process())
    for data in damages(encode_floor(1, 0)):
        twin = with_file(world, path, data)
        reader = twin.process()
        with pytest.raises(Damaged, match=path):
            reader.publish_version("3")
        assert any(path in sentence for sentence in reader.inspect().damage)
        with pytest.raises(Damaged, match=path):
            reader.log.void_tip()
        assert path in [finding.what for finding in verify(twin.process()).findings]
        repaired = verify(twin.process(), repair=True)
        assert repaired.repaired and [f for f in repaired.findings if "floor" in f.what] == []
        assert image(twin.process()) == whole


def test_a_floor_whose_trim_is_logged_is_not_needed_any_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 1)
    from strawq.trimming import trim_log

    world = scene.world.twin()
    pool = world.process()
    pool.snapshot()
    pool.publish_version("3")
    pool.snapshot()
    assert trim_log(pool, keep_entries=0, snapshots_kept=2).floor > 0
    whole = image(pool)
    for data in damages(world.memory.read(layout.floor(1))):
        assert image(with_file(world, layout.floor(1), data).process()) == whole


def test_a_damaged_heartbeat_costs_nobody_a_lease(scene: Scene) -> None:
    session = scene.worker.keeper.current
    path = layout.session_file(session)
    for data in damages(scene.world.memory.read(path)):
        twin = with_file(scene.world, path, data)
        observer = twin.process()
        for _ in range(3):
            twin.clock.now += 1
            assert observer.keeper.round() == []
        assert session in observer.log.refresh(lambda machine: list(machine.state.sessions))
        collect_garbage(observer, wait_seconds=0)


def _collect_twice(world: World) -> tuple[Pool, str]:
    """A world in which garbage was collected, and the marker of an epoch that still holds files."""
    pool = world.process()
    collect_garbage(pool, wait_seconds=0)
    assert world.memory.names("objects") != []
    return pool, "objects/000001/swept"


def test_a_damaged_sweep_marker_leaves_no_garbage(scene: Scene) -> None:
    """A marker that was believed with one bit wrong would hide what is garbage by now."""
    world = scene.world.twin()
    pool, path = _collect_twice(world)
    data = world.memory.read(path)
    take_over(pool)
    finish_work(pool, scene.saved)
    for damaged in damages(data):
        twin = with_file(world, path, damaged)
        collect_garbage(twin.process(), wait_seconds=0)
        reachable = twin.process().log.refresh(lambda m: {row.ref.digest for row in m.state.objects.values()})
        found = {
            name.partition(".")[0]
            for part in twin.memory.names("objects/000001")
            if part != "swept"
            for name in twin.memory.names(f"objects/000001/{part}")
        }
        assert found <= reachable


def test_a_torn_staging_file_is_nobodys_and_is_collected(scene: Scene) -> None:
    path = f"{layout.STAGING}/{'f' * 32}-7"
    for data in damages(scene.world.memory.read(layout.entry(2)), 11):
        twin = with_file(scene.world, path, data)
        collect_garbage(twin.process(), wait_seconds=0)
        assert twin.memory.names(layout.STAGING) == []


# Objects.


def stored(pool: Pool, packed: bool) -> StoredObject:
    rows: list[StoredObject] = pool.log.refresh(lambda machine: list(machine.state.objects.values()))
    return min((row for row in rows if bool(row.ref.pack) == packed and row.ref.epoch), key=lambda row: row.ref.bytes)


def test_a_damaged_record_file_is_never_read(scene: Scene) -> None:
    row = stored(scene.worker, packed=True)
    path = layout.record_file(row.ref.epoch, row.ref.digest)
    world = scene.world.twin()
    pool = world.process()
    for data in damages(scene.world.memory.read(path)):
        world.memory.remove(path)
        world.memory.stage(path, [data])
        with pytest.raises(Damaged, match=row.ref.digest):
            pool.objects.read_checked(row)
    with pytest.raises(Gone, match=row.ref.digest):
        with_file(scene.world, path, None).process().objects.read_checked(row)


def test_a_damaged_inline_object_is_never_read(scene: Scene) -> None:
    rows = scene.worker.log.refresh(lambda machine: list(machine.state.objects.values()))
    row = min((row for row in rows if not row.ref.epoch), key=lambda row: row.ref.bytes)
    path = layout.entry(row.seq)
    data = scene.world.memory.read(path)
    start = len(data) - row.ref.bytes
    for at in range(start, len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        pool = with_file(scene.world, path, bytes(flipped)).process()
        with pytest.raises(Damaged, match=path):
            pool.objects.read_checked(row)
    assert pool.inspect().damage == ()


def test_a_damaged_tensor_pack_gives_no_wrong_number(scene: Scene) -> None:
    pool = scene.world.twin().process()
    row = stored(pool, packed=True)
    path = layout.pack_file(row.ref.epoch, row.ref.pack)
    data = scene.world.memory.read(path)
    lease = next(work for name, work in scene.works.items() if name == "routed").lease
    held = pool.log.refresh(lambda machine: machine.state.branch.queues["rollout"].tasks[lease.task])
    assert held.id == lease.task
    for damaged in damages(data):
        files = with_file(scene.world, path, damaged).memory
        reader = PackReader(files, again=())
        with pytest.raises(OperatorNeeded, match=path):
            reader.verify(path, row.ref.pack)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        *(
            (kind, damage)
            for kind in ("records", "pack")
            for damage in ("emptied", "zeroed", "half", "flipped", "absent")
        ),
        ("inline", "zeroed"),
        ("inline", "flipped"),
    ],
)
def test_a_damaged_object_stops_only_the_groups_that_need_it(scene: Scene, kind: str, damage: str) -> None:
    work = scene.works["inline" if kind == "inline" else "routed"]
    part = scene.worker.log.refresh(lambda m: m.state.branch.queues["rollout"].tasks[work.task].parts[-1])
    row = scene.worker.log.refresh(lambda m: m.state.objects[part.object])
    path = {
        "records": layout.record_file(row.ref.epoch, row.ref.digest),
        "pack": layout.pack_file(row.ref.epoch, row.ref.pack),
        "inline": layout.entry(row.seq),
    }[kind]
    data = scene.world.memory.read(path)
    keep = len(data) - row.ref.bytes if kind == "inline" else 0
    bodies: dict[str, bytes | None] = {
        "emptied": data[:keep], "zeroed": data[:keep] + bytes(len(data) - keep),
        "half": data[: (len(data) + keep) // 2], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "absent": None,
    }  # fmt: skip
    twin = with_file(scene.world, path, bodies[damage])
    pool = twin.process()
    pool.payloads._pack_reader = PackReader(pool.files, again=())
    take_over(pool)
    queue = pool.queue()
    bad: dict[str, str] = {}
    for lease in queue.acquire(100):
        try:
            require_sound(queue.open(lease).group, scene.saved.get(lease.task, 0))
        except StrawqError as error:
            bad[lease.task] = str(error)
    assert list(bad) == [work.task], "this group and no other"
    assert path in bad[work.task] or row.ref.digest[:12] in bad[work.task]
    assert path in " ".join(f"{f.what} {f.problem}" for f in verify(pool, full=True).findings)


def test_the_scene_is_healthy_without_damage(scene: Scene) -> None:
    pool = scene.world.twin().process()
    take_over(pool)
    finish_work(pool, scene.saved)
    require_healthy(pool)
