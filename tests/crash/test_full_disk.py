"""A full disk or a used-up quota at every write of every operation: one clear error, nothing half-done, and the same
call succeeds when there is space again."""

from __future__ import annotations

from typing import Any

import pytest

from strawq.core.invariants import findings
from strawq.errors import StorageFailed
from strawq.pool import Pool
from strawq.storage.faulty import APPLIES, Fault, FaultPlan, FaultyFiles
from strawq.testing.scenes import take_over
from tests.crash.operations import OPERATIONS, SCENE, Operation, settle

WRITES = APPLIES["enospc"]


def start(operation: Operation, seed: int) -> tuple[Pool, FaultyFiles, Any]:
    pool = SCENE.world.twin().process(plan=FaultPlan(seed=seed))
    given = operation.prepare(pool)
    assert isinstance(pool.files, FaultyFiles)
    return pool, pool.files, given


def writes(operation: Operation) -> list[int]:
    """Which of the operation's file calls may find the disk full."""
    pool, files, given = start(operation, 0)
    before = len(files.calls)
    operation.act(pool, given)
    return [at for at, (kind, _) in enumerate(files.calls[before:], 1) if kind in WRITES]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name.replace(" ", "-"))
def test_a_full_disk_at_any_write(operation: Operation) -> None:
    wanted: dict[str, object] | None = None
    faults: tuple[Fault, ...] = ("enospc", "edquot")
    for call in writes(operation):
        for fault in faults:
            pool, files, given = start(operation, call)
            files.plan = FaultPlan(at={len(files.calls) + call: fault})
            words = "the disk is full" if fault == "enospc" else "the quota is used up"
            if operation.name in ("collect garbage", "merge and collect"):
                # It frees space: it goes on past what it could not write, and tries that again.
                said = words
                try:
                    operation.act(pool, given)
                except StorageFailed as error:
                    said = str(error)
                assert words in said
            else:
                with pytest.raises(StorageFailed, match=words):
                    operation.act(pool, given)
            assert [(number, name) for number, name, _ in files.fired] == [
                (len(files.calls[: files.fired[0][0]]), fault)
            ]
            assert findings(pool.log.refresh_leniently(lambda machine: machine.state)) == []
            operation.act(pool, given)
            if fault == "enospc":
                twin_pool, _, twin_given = start(operation, call)
                wanted = wanted or (operation.act(twin_pool, twin_given), settle(twin_pool, operation))[1]
                assert settle(pool, operation) == wanted, f"the disk was full at call {call}"


def test_leases_that_could_not_be_given_back_are_given_back_by_the_next_close() -> None:
    """Else they stay until everybody has watched the dead session for a whole lease."""
    pool = SCENE.world.twin().process()
    take_over(pool)
    leases = pool.queue().acquire(2).leases
    files = pool.files
    assert isinstance(files, FaultyFiles)
    files.plan = FaultPlan(rates={"enospc": 1.0})
    with pytest.raises(StorageFailed, match="the disk is full"):
        pool.close()
    files.plan = FaultPlan()
    pool.close()
    state = pool.log.refresh(lambda machine: machine.state)
    assert not state.sessions
    assert all(not state.branch.queues["rollout"].tasks[lease.task].session for lease in leases)
