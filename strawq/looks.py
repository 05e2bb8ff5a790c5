"""How a verification looks at files: at once, and once more when a mount that is behind has had its time.

A mount may show a fresh file late, or zeros in its place for a while. Whatever the log referred to before a
verification began was durable by then: a look that is later than the mount's time after that beginning is believed at
once. So the whole pass waits once, however many files are damaged, and not once for each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strawq.errors import Damaged, StrawqError
from strawq.limits import VOIDED_IN_A_ROW
from strawq.storage import layout
from strawq.storage.entry import Entry, decode_entry
from strawq.storage.failure import storage_failed

if TYPE_CHECKING:
    from strawq.pool import Pool

BEHIND_SECONDS = 1.5
"""So long a mount may be behind; what reads for work waits as long for one damaged log entry."""


class Looks:
    """Of one pass over a pool whose log has been folded up to entry `head`, just now."""

    def __init__(self, pool: Pool, head: int) -> None:
        self._pool = pool
        self._head = head
        self._sure_at = pool.clock.monotonic() + BEHIND_SECONDS

    def wait(self) -> bool:
        """Wait until what is seen can be believed; False if that time was here already."""
        left = self._sure_at - self._pool.clock.monotonic()
        if left <= 0:
            return False
        self._pool.clock.sleep(left)
        return True

    def entry(self, seq: int) -> Entry | str | None:
        """The entry, what is wrong with it, or None if it is not there."""
        if seq > self._head:  # it may have come just now
            return read_entry(self._pool, seq)
        path = layout.entry(seq)
        while True:
            try:
                return decode_entry(seq, path, self._pool.files.read(path))
            except FileNotFoundError:
                return None
            except Damaged as error:
                problem = str(error)
            except OSError as error:
                problem = str(storage_failed("read", path, error))
            if not self.wait():
                return problem

    def past(self, seq: int) -> Entry | None:
        """The first whole entry behind `seq`, which is damaged; None if there is none, or too far away."""
        for number in range(seq + 1, seq + 1 + VOIDED_IN_A_ROW):
            entry = self.entry(number)
            if not isinstance(entry, str):
                return entry
        return None


def read_entry(pool: Pool, seq: int) -> Entry | str | None:
    """The entry, what is wrong with it after all patience, or None if it is not there."""
    try:
        return pool.log.read_entry(seq)
    except StrawqError as error:
        return str(error)
