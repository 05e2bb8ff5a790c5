"""Whether the groups of a queue fail one after the other, as its counts tell, whoever works on it.

The rule: a group that fails for good is a dead letter, and the rollout goes on without it. When as many in a row have
failed as all workers may hold at once, with none in between that was accepted or dropped by the filter, the fault is
not theirs, and no further prompt is spent on it. A filter that keeps nothing is told, and goes on.
"""

from __future__ import annotations

import logging

from strawq.doubling import doubled
from strawq.inspection import QueueView
from strawq.pool import Pool
from strawq_workers.rollout.station import RolloutFailed

log = logging.getLogger("strawq.rollout")


def remedy(pool: Pool) -> str:
    """What an operator does about dead letters, once their reason is mended."""
    path = pool.path
    return f"`strawq failed list {path}` shows them, `strawq failed retry {path} --all` sends them back to work"


class Failures:
    """The ends of one queue's groups since the last one that was accepted, from one look to the next. `limit`: so many
    failures in a row are too many."""

    def __init__(self, pool: Pool, queue: str, limit: int) -> None:
        self._pool = pool
        self._queue = queue
        self._limit = limit
        view = self._view()
        self._accepted, self._dropped = view.accepted, view.tasks.dropped
        self._failed_before, self._dropped_before = view.tasks.failed, view.tasks.dropped
        self._told, self._drops_told = view.tasks.failed, 0
        self._any_accepted = False
        self.in_a_row = 0
        """Groups that failed for good since one was accepted or dropped, or since this was made."""

    def look(self) -> bool:
        """Whether groups were accepted since the look before. Warns of a filter that keeps nothing."""
        view = self._view()
        failed, dropped = view.tasks.failed, view.tasks.dropped
        accepted = view.accepted > self._accepted
        if accepted:
            self._any_accepted, self._dropped_before, self._drops_told = True, dropped, 0
        if accepted or dropped > self._dropped:
            self._failed_before = failed
        self._accepted, self._dropped = view.accepted, dropped
        self._failed_before = min(self._failed_before, failed)  # some may have been sent back to work
        self.in_a_row = failed - self._failed_before
        unkept = dropped - self._dropped_before
        if doubled(unkept, self._drops_told, self._limit):
            self._drops_told = unkept
            log.warning("%d groups in a row were dropped and none kept: %s", unkept, view.drop_reasons)
        return accepted

    def tell(self) -> None:
        """Warn of the groups that failed for good since this was told last."""
        failed = self._view().tasks.failed
        if failed > self._told:
            log.warning("%d groups more are dead letters, %s", failed - self._told, self._remedy())
        self._told = failed

    def check(self, rollout_id: int, over: bool) -> None:
        """`RolloutFailed` if there were too many; if nothing more comes (`over`), of whatever number, unless some
        group was accepted."""
        if self.in_a_row >= self._limit or (over and self.in_a_row and not self._any_accepted):
            raise RolloutFailed(f"rollout {rollout_id}: {self.words()}")

    def words(self) -> str:
        """What has failed, and why; empty if nothing has since the last accepted group."""
        if not self.in_a_row:
            return ""
        return f"{self.in_a_row} groups in a row failed for good and none was accepted in between, {self._remedy()}"

    def _remedy(self) -> str:
        letters = self._pool.queue(self._queue).dead_letters()
        newest = max(letters, key=lambda task: task.order, default=None)
        why = f"the newest is {newest.id}: {newest.reason}; " if newest is not None else ""
        return why + remedy(self._pool)

    def _view(self) -> QueueView:
        return self._pool.inspect().queues[self._queue]
