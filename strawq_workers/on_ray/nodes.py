"""Nodes of a cluster, and what the launcher needs of it: a port with Ray behind it in production and a script in tests.

The rule: nodes are in order of address and id, so that whoever divides shares over the same nodes divides them alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from strawq_workers.worker.options import WorkerOptions


class Node(msgspec.Struct, frozen=True, order=True):
    """One machine, or one raylet of several on a machine. `id` is new whenever it (re)joins the cluster."""

    address: str
    id: str

    def __str__(self) -> str:
        return f"{self.address} ({self.id[:8]})"


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A worker that ended by itself, with its summary as JSON values."""

    summary: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A worker that could not go on: `kind`, exit code and message of the error."""

    kind: str
    exit_code: int
    message: str


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """A worker whose process or node is gone."""

    reason: str


Outcome = Ended | Failed | Lost


class Cluster(Protocol):
    """Starts and watches workers. A handle stands for one of them, and is good until its outcome was told."""

    def nodes(self) -> list[Node]:
        """Alive nodes with a CPU, in order."""

    def start(self, node: Node, options: WorkerOptions) -> Any:
        """A worker on that node; returns its handle at once. A node that is gone by then is a lost worker."""

    def outcomes(self, handles: Sequence[Any], seconds: float) -> list[tuple[Any, Outcome]]:
        """Those of `handles` that have ended, after at most `seconds`."""

    def divide(self, handle: Any, workers: int, index: int) -> None:
        """Tells a worker which of how many it is now."""

    def stop(self, handle: Any) -> None:
        """Asks a worker to end in good order."""

    def kill(self, handle: Any) -> None:
        """Ends it at once."""


def nodes_of(rows: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Alive nodes with a CPU of `ray.nodes()`, in order of address and id."""
    return sorted(
        Node(str(row["NodeManagerAddress"]), str(row["NodeID"]))
        for row in rows
        if row.get("Alive") and row.get("Resources", {}).get("CPU", 0) > 0
    )
