"""Whoever waits, waits on the pool's clock: else a simulation would not see it, and would take real time for it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import strawq
from strawq.errors import Gone
from strawq.limits import READ_AGAIN_SECONDS
from strawq.testing.scenes import completed, prompts
from strawq.testing.worlds import World

ROOT = Path(strawq.__file__).parent
REAL_TIME = ("storage/clock.py", "storage/probe.py", "storage/posix.py", "drill/", "cli/")
"""The clock itself; what measures a real mount; and processes that are real by their nature."""


def _uses_time(source: str) -> bool:
    return any(
        isinstance(node, (ast.Import, ast.ImportFrom))
        and "time" in {getattr(node, "module", None), *(alias.name for alias in node.names)}
        for node in ast.walk(ast.parse(source))
    )


def test_no_module_has_a_time_of_its_own() -> None:
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if _uses_time(path.read_text("utf-8"))}
    assert {name for name in found if not name.startswith(REAL_TIME)} == set()
    assert "storage/clock.py" in found, "the search finds what there is"


def test_a_pack_that_is_not_there_yet_is_waited_for_on_the_pools_clock() -> None:
    world = World()
    pool = world.process()
    queue = pool.queue()
    queue.submit(prompts(["r1"]))
    work = queue.open(queue.acquire(1).leases[0])
    completed(queue, work)
    (path,) = [
        f"objects/000001/{part}/{name}"
        for part in world.memory.names("objects/000001")
        for name in world.memory.names(f"objects/000001/{part}")
        if name.endswith(".safetensors")
    ]
    reader = world.process()
    batch = reader.queue().take_batch(1).batch
    assert batch is not None
    (group,) = reader.queue().read_batch(batch)
    world.memory.remove(path)
    routes = group.samples[0].r3
    assert routes is not None
    before = world.clock.now
    with pytest.raises(Gone):
        routes[:]
    assert world.clock.now == pytest.approx(before + sum(READ_AGAIN_SECONDS))
