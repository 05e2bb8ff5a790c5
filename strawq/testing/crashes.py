"""Crash everywhere: run one operation again and again, and kill its process at every file call in turn.

The rule: what is enumerated is complete. An operation is killed before, within and after each of its file calls; each
resulting tree is then looked at as it stands (the process died) and as a power cut leaves it, by each policy. What
cannot differ is done once: a call that only looks leaves what the call before it left, before one call is after the
one before, and trees that are equal byte for byte are one.
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

LOOKS = frozenset({"read", "read_into", "size", "names"})


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


def crash_points(
    world: World,
    prepare: Callable[[Pool], Any],
    act: Callable[[Pool, Any], object],
    deaths: Sequence[Death] = ("process", "drop", "keep", "mixed"),
    seeds: Sequence[int] = (0,),
) -> Iterator[CrashPoint]:
    """Every distinct world in which the death of `act`'s process at one of its file calls may leave the pool. `act`
    gets what `prepare` has returned; both run in the process that dies, and only `act` is interrupted. More `seeds`
    give more outcomes of what is left to chance: how much of a file was written, what a power cut took."""
    seen: set[str] = set()
    calls = _run(world.twin(), prepare, act, None)
    for call, moment, seed in _kills([kind for kind, _ in calls], seeds):
        dead = world.twin()
        kind, path = _run(dead, prepare, act, (call, moment, seed))[-1]
        for death in deaths:
            for cut in seeds if death == "mixed" else seeds[:1]:
                left = dead.twin()
                if death != "process":
                    left.memory.crash(random.Random(cut * 7919 + call), death)
                mark = fingerprint(left.memory)
                if mark not in seen:
                    seen.add(mark)
                    yield CrashPoint(call, moment, kind, path, death, cut, left)


def _kills(kinds: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[int, Moment, int]]:
    yield 1, "before", seeds[0]
    for call, kind in enumerate(kinds, 1):
        if kind not in LOOKS:
            yield from ((call, "within", seed) for seed in seeds)
            yield call, "after", seeds[0]


def _run(
    world: World,
    prepare: Callable[[Pool], Any],
    act: Callable[[Pool, Any], object],
    crash: tuple[int, Moment, int] | None,
) -> list[tuple[str, str]]:
    """Run `act` in `world`, to its end or to the crash; returns its file calls."""
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
    return files.calls[before:]
