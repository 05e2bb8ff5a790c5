"""A leased group in a process's hands, and what is reported of it.

The rule: what is reported is the group as it is now; what is new in it, beyond what is saved, is found and written by
the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from strawq.core.commands import Outcome
from strawq.handles import Lease

if TYPE_CHECKING:
    from strawq.samples import Group


class Work:
    """A leased group in this process's hands: the lease, and the group as it is saved. One owner at a time."""

    __slots__ = ("group", "lease", "parts")

    def __init__(self, lease: Lease, group: Group) -> None:
        self.lease = lease
        self.group = group
        self.parts = len(lease.held.task.parts)
        """How many parts the saved group has, as far as this process knows."""

    @property
    def task(self) -> str:
        return self.lease.task


class Change(msgspec.Struct, frozen=True):
    """What to report of one piece of work. `group` is the group as it is now (None: nothing new); what it has beyond
    the saved one is written. Saved tokens that are not in it any more are an error, unless `rewrite` says that they
    were thrown away on purpose. A complete group that is saved or yielded with something new is work again; `complete`
    hands it in anew."""

    work: Any
    outcome: Outcome
    group: Any = None
    reason: str = ""
    retryable: bool = True
    rewrite: bool = False


def unchanged(lease: Lease) -> Change:
    """Gives the lease back as it came. Nothing is read for that."""
    from strawq.samples import Group, Prompt

    return Change(Work(lease, Group(lease.task, Prompt())), "yield")
