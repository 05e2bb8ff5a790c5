"""Kill the process of every public operation at every file call, with and without a power cut: the survivors find a
sound pool, the operation has happened or not, and the work that was begun is finished to the same end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from strawq.storage.memory import CrashPolicy
from strawq.testing.crashes import crash_points
from strawq.testing.scenes import Scene
from tests.crash.operations import OPERATIONS, RENAMING, SCENE, Operation, settle


def uncrashed(operation: Operation, scene: Scene = SCENE) -> dict[str, object]:
    world = scene.world.twin()
    pool = world.process()
    operation.act(pool, operation.prepare(pool))
    return settle(world.process(), operation)


def kill_everywhere(operation: Operation, scene: Scene, seeds: Sequence[int]) -> None:
    wanted = uncrashed(operation, scene)
    points = 0
    for point in crash_points(scene.world, operation.prepare, operation.act, seeds=seeds):
        points += 1
        try:
            found = settle(point.world.process(), operation)
            assert found == wanted
        except Exception as error:
            raise AssertionError(f"{operation.name} {point}: {error!r}") from error
    assert points


each_operation = pytest.mark.parametrize(
    "operation", OPERATIONS, ids=lambda operation: operation.name.replace(" ", "-")
)


@each_operation
def test_killed_at_any_file_call(operation: Operation) -> None:
    kill_everywhere(operation, SCENE, seeds=(0,))


@pytest.mark.campaign
@pytest.mark.parametrize("scene", [SCENE, RENAMING], ids=["link", "rename"])
@each_operation
def test_killed_at_any_file_call_with_many_outcomes(operation: Operation, scene: Scene) -> None:
    kill_everywhere(operation, scene, seeds=range(8))


@each_operation
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
