"""Kill the process of every public operation at every file call, with and without a power cut: the survivors find a
sound pool, the operation has happened or not, and the work that was begun is finished to the same end."""

from __future__ import annotations

import random

import pytest

from strawq.storage.memory import CrashPolicy
from strawq.testing.crashes import crash_points
from tests.crash.operations import OPERATIONS, SCENE, Operation, settle


def uncrashed(operation: Operation) -> dict[str, object]:
    world = SCENE.world.twin()
    pool = world.process()
    operation.act(pool, operation.prepare(pool))
    return settle(world.process(), operation)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name.replace(" ", "-"))
def test_killed_at_any_file_call(operation: Operation) -> None:
    wanted = uncrashed(operation)
    points = 0
    for point in crash_points(SCENE.world, operation.prepare, operation.act):
        points += 1
        try:
            found = settle(point.world.process(), operation)
            assert found == wanted
        except Exception as error:
            raise AssertionError(f"{operation.name} {point}: {error!r}") from error
    assert points


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name.replace(" ", "-"))
def test_what_was_acknowledged_survives_a_power_cut(operation: Operation) -> None:
    """The call has returned; then the machine dies. Nobody asks again."""
    wanted = uncrashed(operation)
    world = SCENE.world.twin()
    pool = world.process()
    operation.act(pool, operation.prepare(pool))
    deaths: list[tuple[CrashPolicy, int]] = [("drop", 0), ("mixed", 1), ("mixed", 2)]
    for policy, seed in deaths:
        left = world.twin()
        left.memory.crash(random.Random(seed), policy)
        assert settle(left.process(), operation, again=False) == wanted, (operation.name, policy, seed)
