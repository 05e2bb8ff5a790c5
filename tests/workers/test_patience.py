"""Storage that refuses for a while: what is in hand stays in hand, and nothing new is taken."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from strawq.errors import Damaged, Fenced, OutcomeUnknown, StorageFailed
from strawq.handles import Lease
from strawq.model import MAX_ATTEMPTS
from strawq.work import Work
from strawq_workers.worker import group, patience
from strawq_workers.worker.metrics import Counters
from strawq_workers.worker.patience import Patience
from strawq_workers.worker.source import PoolSource

FULL = StorageFailed("cannot commit to the log: No space left on device")


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0.002)
    monkeypatch.setattr(patience, "PAUSE_MAX_S", 0.01)


class Disk:
    """Answers `errors` in order, then the number of calls."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


def test_what_was_refused_is_tried_again_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        counters = Counters()
        waits = Patience(60.0, counters)
        assert await waits.call(Disk(*[FULL] * 20, OutcomeUnknown("?"))) == 22
        assert counters.retries == 21 and waits.well.is_set()

    with caplog.at_level(logging.WARNING, "strawq.worker"):
        asyncio.run(run())
    first, last = caplog.messages
    assert first.startswith(
        "storage refuses: cannot commit to the log: No space left on device; what is in hand is kept"
    )
    assert last.startswith("storage works again after ")


def test_other_errors_are_not_waited_for_and_end_the_trouble() -> None:
    async def run() -> None:
        waits = Patience(60.0, Counters())
        for error in (Fenced("x"), Damaged("y")):
            with pytest.raises(type(error)):
                await waits.call(Disk(FULL, error))
            assert waits.well.is_set()

    asyncio.run(run())


def test_patience_ends_and_then_nobody_waits_again(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        waits = Patience(0.05, Counters())
        disk = Disk(*[FULL] * 1000)
        with pytest.raises(StorageFailed, match="No space left"):
            await waits.call(disk)
        assert disk.calls > 2
        later = Disk(FULL, FULL)
        with pytest.raises(StorageFailed):
            await waits.call(later)
        assert later.calls == 1 and waits.well.is_set()

    asyncio.run(run())
    assert sum("storage has refused for" in message for message in caplog.messages) == 1


def test_a_stop_ends_the_wait_for_new_work_at_once_and_for_what_is_in_hand_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 1000.0)
    monkeypatch.setattr(patience, "PAUSE_MAX_S", 1000.0)

    async def run() -> None:
        waits = Patience(10_000.0, Counters())
        leasing = asyncio.ensure_future(waits.call(Disk(*[FULL] * 9), ending_s=0.0))
        handing_in = asyncio.ensure_future(waits.call(Disk(FULL), ending_s=5.0))
        lost = asyncio.ensure_future(waits.call(Disk(*[FULL] * 9), ending_s=0.05))
        for _ in range(10):
            await asyncio.sleep(0)
        assert waits._trying == 3
        waits.end()
        with pytest.raises(StorageFailed):
            await asyncio.wait_for(leasing, 20)
        assert await asyncio.wait_for(handing_in, 20) == 2
        with pytest.raises(StorageFailed):
            await asyncio.wait_for(lost, 20)

    asyncio.run(run())


class FullDisk:
    """Refuses every report and lease of the workers of this process while `full`; a mount that is `gone`, all calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *gone: str) -> None:
        self.full = self.fills_after_a_lease = False
        self.refused = dict.fromkeys(("report", "acquire", *gone), 0)
        for name in self.refused:
            monkeypatch.setattr(PoolSource, name, self._refusing(name, getattr(PoolSource, name)))

    def _refusing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        async def call(source: PoolSource, *args: Any, **options: Any) -> Any:
            if self.full:
                self.refused[name] += 1
                raise FULL
            answer = await real(source, *args, **options)
            if name == "acquire" and len(answer) and self.fills_after_a_lease:
                self.full, self.fills_after_a_lease = True, False
            return answer

        return call


def test_a_full_disk_ends_no_worker_and_costs_no_group(stage_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)

    async def run() -> None:
        async with stage_of() as stage:
            stage.submit(12)
            disk.full = True
            task = stage.start(max_groups=4)
            await stage.until("refused leases", lambda: disk.refused["acquire"] > 8, task)
            disk.full, disk.fills_after_a_lease = False, True
            await stage.until("refused reports", lambda: disk.refused["report"] > 8, task)
            session = stage.worker.place.queue.session
            leases = disk.refused["acquire"]
            reports = disk.refused["report"]
            await stage.until("more of them", lambda: disk.refused["report"] > reports + 8, task)
            assert disk.refused["acquire"] == leases, "new work was asked for while storage refused"
            disk.full = False
            summary = await asyncio.wait_for(task, 30)
            assert summary.reason == "sealed" and summary.counters.groups_accepted == 12
            assert summary.counters.sessions_lost == 0 and stage.worker.place.queue.session in ("", session)
            assert summary.counters.tokens_discarded == 0
            assert stage.queue.counts().ready == 12

    asyncio.run(run())


def test_a_disk_that_stays_full_ends_the_worker_with_the_storage_error(
    stage_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)

    async def run() -> None:
        async with stage_of() as stage:
            stage.submit(4)
            disk.fills_after_a_lease = True
            task = stage.start(storage_timeout_s=0.2, max_groups=4)
            with pytest.raises(StorageFailed, match="No space left"):
                await asyncio.wait_for(task, 30)
            counts = stage.queue.counts()
            assert disk.refused["report"] > 2 and counts.fresh_pending == 4, counts

    asyncio.run(run())


def test_a_mount_that_is_gone_for_a_while_costs_no_attempt_of_a_group_that_was_to_be_read(
    stage_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch, "open", "look")

    async def run() -> None:
        async with stage_of() as stage:
            stage.submit(12)
            disk.fills_after_a_lease = True
            task = stage.start(max_groups=4)
            await stage.until("refused looks", lambda: disk.refused["look"] > 40, task)
            assert disk.refused["open"] == 4 and disk.refused["acquire"] == 0, "new work was asked for"
            disk.full = False
            summary = await asyncio.wait_for(task, 30)
            assert summary.counters.groups_accepted == 12 and summary.counters.groups_failed == 0

    asyncio.run(run())


UNREADABLE = StorageFailed("cannot read objects/1/x: Input/output error; look at the mount")


def test_one_group_that_cannot_be_read_fails_alone_and_ends_no_worker(
    stage_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PoolSource.open

    async def read(source: PoolSource, lease: Lease) -> Work:
        if lease.task == "1-0":
            raise UNREADABLE
        return await real(source, lease)

    monkeypatch.setattr(PoolSource, "open", read)

    async def run() -> None:
        async with stage_of() as stage:
            stage.submit(12)
            summary = await stage.run(max_groups=1, storage_timeout_s=1000.0)
            assert summary.reason == "sealed" and summary.counters.groups_accepted == 11
            [dead] = stage.queue.dead_letters()
            assert dead.id == "1-0" and "Input/output error" in dead.reason
            assert dead.failures == summary.counters.groups_failed == MAX_ATTEMPTS

    asyncio.run(run())


def test_a_tensor_that_cannot_be_read_when_it_is_touched_costs_its_group_an_attempt(
    stage_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = group.take_segment, [UNREADABLE]

    def touch(*args: Any) -> Any:
        if broken:
            raise broken.pop()
        return real(*args)

    monkeypatch.setattr(group, "take_segment", touch)

    async def run() -> None:
        async with stage_of() as stage:
            stage.submit(4)
            summary = await stage.run(max_groups=2)
            assert summary.counters.groups_accepted == 4 and summary.counters.groups_failed == 1

    asyncio.run(run())
