"""Crash everywhere: run one operation again and again, and kill its process at every file call in turn.

The rule: what is enumerated is complete. An operation that makes n file calls is killed before, within and after each
of them; each resulting tree is then looked at as it stands (the process died) and as a power cut leaves it, by each
policy. Trees that are equal byte for byte are looked at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import blake3
import msgspec

from strawq.pool import Pool
from strawq.storage.faulty import Crash, FaultPlan, FaultyFiles, Moment
from strawq.storage.memory import CrashPolicy, MemoryFiles
from strawq.testing.worlds import World

Death = Literal["process"] | CrashPolicy
"""`process`: the files stay as the process saw them. The others: the machine lost power too."""

MOMENTS: tuple[Moment, ...] = ("before", "within", "after")


class CrashPoint(msgspec.Struct, frozen=True):
    """Where the process was killed, and the world as the survivors find it. `call` counts the operation's own calls."""

    call: int
    moment: Moment
    kind: str
    path: str
    death: Death
    seed: int
    world: World

    def __str__(self) -> str:
        seed = f" (seed {self.seed})" if self.death == "mixed" else ""
        return f"killed {self.moment} call {self.call}, {self.kind} {self.path}; {self.death}{seed}"


def content(memory: MemoryFiles, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Every visible file below `path`, by name."""
    for name in memory.names(path):
        inner = f"{path}/{name}" if path else name
        try:
            yield inner, memory.read(inner)
        except IsADirectoryError:
            yield inner + "/", b""
            yield from content(memory, inner)


def fingerprint(memory: MemoryFiles) -> str:
    digest = blake3.blake3()
    for path, data in content(memory):
        digest.update(f"{path}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def count_calls(world: World, prepare: Callable[[Pool], Any], act: Callable[[Pool, Any], object]) -> int:
    """File calls of `act` in a world like this one."""
    return _run(world.twin(), prepare, act, None)[1]


def crash_points(
    world: World,
    prepare: Callable[[Pool], Any],
    act: Callable[[Pool, Any], object],
    deaths: Sequence[Death] = ("process", "drop", "keep", "mixed"),
    seeds: Sequence[int] = (0,),
) -> Iterator[CrashPoint]:
    """Every distinct world in which the death of `act`'s process at one of its file calls may leave the pool. `act`
    gets what `prepare` has returned; both run in the process that dies, and only `act` is interrupted."""
    seen: set[str] = set()
    for call in range(1, count_calls(world, prepare, act) + 1):
        for moment in MOMENTS:
            # Only "within" draws chance: a part of a file, or whether the call happened.
            for seed in seeds if moment == "within" else seeds[:1]:
                dead = world.twin()
                (kind, path), _ = _run(dead, prepare, act, (call, moment, seed))
                for death in deaths:
                    for cut in seeds if death == "mixed" else seeds[:1]:
                        left = dead.twin()
                        if death != "process":
                            left.memory.crash(random.Random(cut * 7919 + call), death)
                        mark = fingerprint(left.memory)
                        if mark not in seen:
                            seen.add(mark)
                            yield CrashPoint(call, moment, kind, path, death, cut, left)


def _run(
    world: World,
    prepare: Callable[[Pool], Any],
    act: Callable[[Pool, Any], object],
    crash: tuple[int, Moment, int] | None,
) -> tuple[tuple[str, str], int]:
    """Run `act` in `world`, to its end or to the crash; returns the last file call and the number of `act`'s calls."""
    seed = crash[2] * 104729 + crash[0] if crash is not None else 0
    pool = world.process(plan=FaultPlan(seed=seed))
    given = prepare(pool)
    files = pool.files
    assert isinstance(files, FaultyFiles)
    before = len(files.calls)
    if crash is None:
        act(pool, given)
    else:
        call, moment, _ = crash
        files.plan = FaultPlan(seed=seed, crash_at=(before + call, moment))
        try:
            act(pool, given)
        except Crash:
            pass
        else:
            raise AssertionError(f"the operation made fewer than {call} calls this time")
    return files.calls[-1], len(files.calls) - before
