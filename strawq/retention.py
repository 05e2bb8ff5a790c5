"""Why bytes are still there: every object with the reasons that keep it, and files that only an open epoch keeps.

The rule: what is explained adds up. Each retained byte belongs to one object, each object is listed once with all of
its reasons, and an object that the state counts but no reason names is a fault that shows as `no reason`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from strawq.core.machine import Machine
from strawq.garbage import explain
from strawq.storage import layout

if TYPE_CHECKING:
    from strawq.pool import Pool


class Retained(msgspec.Struct, frozen=True):
    """One object or file: its bytes on disk (records and pack), where they are, and what keeps them."""

    path: str
    bytes: int
    reasons: tuple[str, ...]


class Reason(msgspec.Struct, frozen=True):
    """What one reason keeps, alone or together with others; `only_bytes` would go with it."""

    reason: str
    objects: int
    bytes: int
    only_bytes: int


MERGED = "merged files: objects that have ended, and the list of those that are there"
NO_REASON = "no reason: report this, it is a fault of strawq"


def retained(pool: Pool) -> tuple[Retained, ...]:
    """Everything that a collection leaves, as of the newest log position."""

    def look(machine: Machine) -> tuple[list[Retained], int, set[str], dict[str, int]]:
        state = machine.state
        reasons = explain(state)
        found: list[Retained] = []
        reachable: set[str] = set()
        merged: dict[str, int] = {}
        for row in state.objects.values():
            ref = row.ref
            path = layout.record_file(ref.epoch, ref.name) if ref.epoch else layout.entry(row.seq)
            if ref.epoch:
                reachable.update((path, layout.pack_file(ref.epoch, ref.pack)))
            if ref.file:
                merged[path] = merged.get(path, 0) + ref.bytes
            found.append(Retained(path, ref.bytes + ref.pack_bytes, reasons.get(ref.digest, (NO_REASON,))))
        return found, state.meta.closed_epoch, reachable, merged

    found, closed, reachable, merged = pool.log.refresh(look)
    rests = [Retained(path, max(_size(pool, path) - live, 0), (MERGED,)) for path, live in merged.items()]
    return (*found, *rests, *_young(pool, closed, reachable))


def _young(pool: Pool, closed: int, reachable: set[str]) -> list[Retained]:
    """Files that nothing refers to (yet): an open epoch keeps them."""
    found = []
    for name in pool.files.names(layout.OBJECTS):
        if not (name.isascii() and name.isdigit()) or int(name) <= closed:
            continue
        for part in pool.files.names(f"{layout.OBJECTS}/{name}"):
            for file in pool.files.names(f"{layout.OBJECTS}/{name}/{part}"):
                path = f"{layout.OBJECTS}/{name}/{part}/{file}"
                if path not in reachable:
                    found.append(Retained(path, _size(pool, path), (f"epoch {int(name)} is open",)))
    return found


def _size(pool: Pool, path: str) -> int:
    """0 for a file that has gone since it was listed."""
    try:
        return pool.files.size(path)
    except FileNotFoundError:
        return 0


def by_reason(objects: tuple[Retained, ...]) -> tuple[Reason, ...]:
    """The same by reason, the largest first. An object with two reasons counts with both."""
    totals: dict[str, list[int]] = {}
    for item in objects:
        for reason in item.reasons:
            total = totals.setdefault(reason, [0, 0, 0])
            total[0] += 1
            total[1] += item.bytes
            total[2] += item.bytes if len(item.reasons) == 1 else 0
    ordered = sorted(totals.items(), key=lambda entry: (-entry[1][1], entry[0]))
    return tuple(Reason(reason, *total) for reason, total in ordered)
