"""The server did what it was asked, lost its reply, was asked again by the kernel and says that the name is taken: by
us. At every staging and every publish of every operation, the caller never hears of it."""

from __future__ import annotations

import pytest

from strawq.core.invariants import findings
from strawq.errors import StorageFailed
from strawq.model import PoolHeader
from strawq.storage import layout
from strawq.storage.faulty import APPLIES, Fault, FaultPlan, FaultyFiles
from strawq.storage.header import create_pool, read_header
from strawq.storage.memory import MemoryFiles
from strawq.storage.staging import Staging
from tests.crash.operations import OPERATIONS, Operation, settle
from tests.crash.test_full_disk import start

LOST: Fault = "lost_eexist"


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name.replace(" ", "-"))
def test_a_name_that_is_taken_by_ourselves_is_no_failure(operation: Operation) -> None:
    pool, files, given = start(operation, 0)
    before = len(files.calls)
    operation.act(pool, given)
    calls = [at for at, (kind, _) in enumerate(files.calls[before:], 1) if kind in APPLIES[LOST]]
    wanted = settle(pool, operation)
    for call in calls:
        pool, files, given = start(operation, 0)
        files.plan = FaultPlan(at={len(files.calls) + call: LOST})
        operation.act(pool, given)
        assert [fault for _, fault, _ in files.fired] == [LOST]
        assert findings(pool.log.refresh(lambda machine: machine.state)) == []
        assert not [name for name in files.inner.names(layout.STAGING) if name.startswith(pool.instance)]
        assert settle(pool, operation) == wanted, f"the reply of call {call} was lost"


def test_a_pool_whose_header_was_written_by_ourselves_is_ours() -> None:
    header = PoolHeader(1, "a" * 32, "run", "local", created="2026-01-01T00:00:00+00:00")
    counting = FaultyFiles(MemoryFiles())
    create_pool(counting, header)
    for call, (kind, _) in enumerate(counting.calls, 1):
        if kind in APPLIES[LOST]:
            files = FaultyFiles(MemoryFiles(), FaultPlan(at={call: LOST}))
            create_pool(files, header)
            assert read_header(files, "").pool_id == header.pool_id
            assert files.names(layout.STAGING) == []
    with pytest.raises(FileExistsError):
        create_pool(counting, PoolHeader(1, "b" * 32, "run", "local", created="2026-01-01T00:00:00+00:00"))
    assert read_header(counting, "").pool_id == header.pool_id


def test_a_mount_that_takes_every_name_for_taken_fails_after_a_while_and_keeps_nothing() -> None:
    files = FaultyFiles(MemoryFiles(), FaultPlan(rates={LOST: 1.0}))
    files.inner.make_directory(layout.STAGING)
    with pytest.raises(FileExistsError):
        Staging(files, "a" * 32).write([b"data"])
    assert files.inner.names(layout.STAGING) == []


def test_the_error_of_a_mount_that_takes_every_name_for_taken_names_the_file() -> None:
    pool, files, given = start(next(one for one in OPERATIONS if one.name.startswith("submit")), 0)
    files.plan = FaultPlan(rates={LOST: 1.0})
    operation = next(one for one in OPERATIONS if one.name.startswith("submit"))
    with pytest.raises(StorageFailed):
        operation.act(pool, given)
