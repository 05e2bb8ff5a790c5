"""The side of the data source that a sampler uses: groups are handed out under leases and come back as samples.

The rule: whatever was handed out ends in the queue exactly once. What a rollout delivered becomes that rollout's batch,
what a filter dropped is dropped, and the rest goes back: finished groups and, with partial rollout, prefixes whose
captures cover their tokens; anything else as it was before. A sampler that says nothing is believed by what it did:
see `settle_silent`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, Literal

from strawq.errors import BadInput, Fenced, StrawqError
from strawq.handles import Lease
from strawq.model import UNVERSIONED, policy_number
from strawq.pool import Pool
from strawq.samples import Group, Prompt
from strawq.work import Change, Work
from strawq_workers.asking import publish_if_newer, sure
from strawq_workers.slime.batches import RolloutBatches
from strawq_workers.slime.codec import prompt_of, samples_of
from strawq_workers.slime.handed import (
    BATCH,
    TASK,
    Handed,
    HandedOut,
    flat,
    has_tokens,
    is_finished,
    progress,
    stored,
    unmark,
    without_marks,
)

logger = logging.getLogger("strawq.slime")

REPORTS = 64
NOT_KEPT = "delivered, and not fit to be kept"
Outcome = Literal["yield", "drop"]


class Sampling:
    """Leases of this process as samples. Safe from many threads: `add_samples` does not wait for `lease`."""

    def __init__(
        self, pool: Pool, queue_name: str, args: Any, batches: RolloutBatches, threads: Executor, kind: Any = None
    ) -> None:
        self._pool = pool
        self._queue_name = queue_name
        self._args = args
        self._batches = batches
        self._threads = threads
        self._kind = kind
        self._out = HandedOut()
        self._lock = threading.RLock()
        self._verdicts: deque[tuple[Handed, list[Any], bool, str]] = deque()
        self._handed_in: set[str] = set()
        """Tasks of held groups that are complete in the queue, while a delivery is not over."""
        self._delivered = -1
        self._ended = False
        self.requeued = 0
        """Groups that came back with captures that do not cover their tokens: released to what was saved of them."""

    @property
    def held(self) -> int:
        """Groups in the sampler's hands."""
        with self._lock:
            return len(self._out)

    @property
    def _partial(self) -> bool:
        return bool(getattr(self._args, "partial_rollout", False))

    @property
    def _works_across(self) -> bool:
        """Whether the rollout function goes on between rollouts, as slime itself tells: then what was not delivered is
        still being worked on."""
        path = str(getattr(self._args, "rollout_function_path", None) or "")
        return "fully_async" in path or getattr(self._args, "flush_cache_interval", 1) not in (1, None)

    # -- out ------------------------------------------------------------------------------------------------------

    def hand_out(self, leases: Sequence[Lease]) -> list[list[Any]]:
        """The leased groups as samples. One that cannot be read is failed, with what is wrong with it."""
        queue = self._pool.queue(self._queue_name)

        def read(lease: Lease) -> Handed | tuple[Lease, StrawqError]:
            try:
                work = queue.open(lease)
                return Handed(work, samples_of(work.group, self._kind))
            except StrawqError as error:
                return lease, error

        found: list[list[Any]] = []
        failed: list[Change] = []
        for answer in self._threads.map(read, leases):
            if isinstance(answer, Handed):
                with self._lock:
                    self._out.add(answer)
                found.append(answer.samples)
                continue
            lease, error = answer
            logger.error("task %s cannot be read: %s", lease.task, error)
            failed.append(Change(Work(lease, Group(lease.task, Prompt())), "fail", None, str(error)))
        self._report(failed)
        return found

    # -- back -----------------------------------------------------------------------------------------------------

    def take_back(self, groups: Sequence[Sequence[Any]]) -> None:
        """Return groups with what they have. Groups that no prompt of the queue stands behind are submitted as prompts;
        `BadInput` if such a group has tokens already."""
        with self._judged():
            known: list[tuple[Handed, Sequence[Any]]] = []
            fresh = []
            for group in groups:
                handed = self._out.find(group)
                if handed is None:
                    fresh.append(_foreign(group))
                elif handed in (other for other, _ in known):
                    raise BadInput(f"task {handed.work.task} is given back twice in one call")
                else:
                    known.append((handed, group))
            if fresh:
                queue = self._pool.queue(self._queue_name)
                sure(self._pool, lambda request: queue.submit(fresh, request_id=request))
            self._give_back(known, keep_prefix=True)

    def _give_back(
        self, groups: Sequence[tuple[Handed, Sequence[Any]]], *, keep_prefix: bool, taken: bool = False
    ) -> None:
        changes, why = [], []
        for handed, samples in groups:
            if handed.verdict == "dropped":
                changes.append(Change(handed.work, "drop", None, handed.reason))
                continue
            change, reason = progress(self._args, handed, samples, keep_prefix=keep_prefix)
            changes.append(change)
            if reason:
                why.append(reason)
        self._report(changes)
        for handed, _ in groups:
            self._out.remove(handed, taken=taken)
        if why:
            self.requeued += len(why)
            logger.warning("Requeued %d incomplete continuations, as they were saved last: %s", len(why), why[0])

    def _report(self, changes: Sequence[Change], otherwise: Outcome = "yield", reason: str = "") -> list[str]:
        """Report in commits of `REPORTS` groups; returns the tasks of which it counts. Where one cannot be written, the
        others are, and what becomes of it is `otherwise`."""
        counted: list[str] = []
        for start in range(0, len(changes), REPORTS):
            part = list(changes[start : start + REPORTS])
            try:
                counted += self._report_part(part)
            except BadInput as error:
                if len(part) > 1:
                    for change in part:
                        counted += self._report([change], otherwise, reason)
                elif part[0].group is None:
                    raise
                else:
                    logger.error("task %s cannot be saved as it is: %s", part[0].work.task, error)
                    self._report_part([Change(part[0].work, otherwise, None, reason)])
        return counted

    def _report_part(self, part: list[Change]) -> list[str]:
        queue = self._pool.queue(self._queue_name)
        try:
            receipt = sure(self._pool, lambda request: queue.report(part, request_id=request))
        except Fenced as error:
            logger.warning("%d groups are not ours any more: %s", len(part), error)
            return []
        lost = [*receipt.stale, *receipt.conflict]
        if lost:
            logger.warning("%d groups are another's by now: %s", len(lost), ", ".join(lost[:4]))
        return [*receipt.accepted, *receipt.repeated]

    # -- what the sampler tells -----------------------------------------------------------------------------------

    def saw_verdict(self, group: Sequence[Any], keep: bool, reason: str) -> None:
        """A filter's word on a group. Groups that we do not know are nobody's business here.

        slime calls filters on the event loop that generates, so this takes no lock that is held during a commit: it
        looks the group up, and the word counts from the next call on."""
        try:
            handed = self._out.find(group if isinstance(group, (list, tuple)) else [group])
        except Fenced:
            return
        if handed is not None:
            self._verdicts.append((handed, list(group), keep, reason))

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        """The lock, and every verdict up to now taken in."""
        with self._lock:
            while self._verdicts:
                handed, samples, keep, reason = self._verdicts.popleft()
                handed.samples = samples
                handed.verdict, handed.reason = ("", "") if keep else ("dropped", reason)
            yield

    def saw_delivery(self, rollout_id: int, samples: Sequence[Any]) -> None:
        """What a rollout delivered, which ends it. Samples of collected batches are in their batch already. `Fenced`
        if a group among them was given back before: it would be trained twice."""
        with self._judged():
            by_task: dict[str, tuple[Handed, list[Any]]] = {}
            for sample in flat(samples):
                if hasattr(sample, BATCH):
                    continue
                handed = self._out.find([sample])
                if handed is not None:
                    by_task.setdefault(handed.mark, (handed, []))[1].append(sample)
            if by_task:
                self._deliver(rollout_id, list(by_task.values()))
                # A trainer overlaps by one: whoever generates rollout n has trained rollout n - 2.
                self._batches.finish_up_to(rollout_id - 2)
            self._delivered = max(self._delivered, rollout_id)
            self._ended = True

    def _deliver(self, rollout_id: int, groups: Sequence[tuple[Handed, list[Any]]]) -> None:
        complete, dropped = [], []
        for handed, delivered in groups:
            handed.restore_masks(self._args)
            # The group as it was handed out, where the delivered samples are these objects: a trainer may trim a batch.
            own = {id(sample) for sample in flat(handed.samples)}
            samples = handed.samples if all(id(sample) in own for sample in delivered) else delivered
            try:
                group = stored(self._args, handed, without_marks(samples))
                complete.append(Change(handed.work, "complete", group, rewrite=True))
            except BadInput as error:
                logger.error("task %s is delivered, and cannot be kept for another time: %s", handed.work.task, error)
                dropped.append(Change(handed.work, "drop", None, NOT_KEPT))
        ended: list[str] = []
        if complete:
            standing = self._standing(rollout_id, complete)
            missing = [change for change in complete if change.work.task not in standing]

            def hand_in() -> list[str]:
                counted = self._report(missing, "drop", NOT_KEPT)
                self._handed_in.update(standing, counted)
                return [*standing, *counted]

            ended += self._batches.take_exactly(rollout_id, hand_in)
        ended += self._report(dropped)
        for handed, samples in groups:
            self._handed_in.discard(handed.work.task)
            self._out.remove(handed)
            unmark(samples)
        self._publish_newest(samples for _, samples in groups)
        self._require_ended(rollout_id, [change.work.task for change in (*complete, *dropped)], set(ended))

    def _standing(self, rollout_id: int, complete: Sequence[Change]) -> list[str]:
        """Tasks that a delivery of this rollout which failed half-way has handed in, or put into its batch, already."""
        batch = self._batches.open_tasks(rollout_id)

        def view(machine: Any) -> list[str]:
            tasks = machine.state.branch.queues[self._queue_name].tasks
            rows = [(change.work.lease, tasks.get(change.work.task)) for change in complete]
            return [
                row.id
                for lease, row in rows
                if row is not None
                and row.stage == "ready"
                and (row.id in batch or (row.pending and (row.id in self._handed_in or row.attempt == lease.attempt)))
            ]

        found: list[str] = self._pool.log.refresh(view)
        return found

    def _require_ended(self, rollout_id: int, tasks: Sequence[str], ended: set[str]) -> None:
        lost = [task for task in tasks if task not in ended and not self._is_gone(task)]
        if lost:
            raise Fenced(
                f"{len(lost)} groups of rollout {rollout_id} ({', '.join(lost[:4])}) went to somebody else before they "
                "were delivered, since this process stood still for longer than --rollout-queue-lease-seconds: do not "
                "train on this rollout, restart the job"
            )

    def _is_gone(self, task: str) -> bool:
        """Whether the task has ended, so that nobody will generate it again."""
        found: bool = self._pool.log.refresh(
            lambda machine: task not in machine.state.branch.queues[self._queue_name].tasks
        )
        return found

    def _publish_newest(self, groups: Iterable[Sequence[Any]]) -> None:
        """Tell the pool of the newest policy that made a delivered token, if nobody has."""
        versions = (str(version) for group in groups for sample in flat(group) for version in _versions(sample))
        newest = max((policy_number(version) for version in versions), default=UNVERSIONED)
        publish_if_newer(self._pool, str(newest), self._batches.branch)

    # -- the end of a rollout -------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give back what an ended rollout left. Nothing happens in the middle of a rollout, and under a function that
        works across rollouts."""
        with self._judged():
            if self._ended and not self._works_across:
                left = [(handed, handed.samples) for handed in self._out]
                self._give_back(left, keep_prefix=self._partial, taken=True)
            self._ended = False

    def settle_silent(self, rollout_id: int) -> None:
        """At a save, for a rollout function of which no delivery was ever seen: what it finished counts as delivered
        with this rollout. What it did not finish stays in its hands."""
        with self._judged():
            if self._delivered >= 0:
                return
            finished = [
                (handed, list(flat(handed.samples)))
                for handed in self._out
                if handed.verdict != "dropped" and is_finished(handed.samples)
            ]
            if finished:
                logger.warning(
                    "no delivery was seen: %d finished groups count as trained with rollout %d",
                    len(finished),
                    rollout_id,
                )
                self._deliver(rollout_id, finished)
            self._give_back(
                [(handed, handed.samples) for handed in self._out if handed.verdict == "dropped"], keep_prefix=False
            )

    def give_up(self) -> None:
        """Give everything back, at the end of the process."""
        with self._judged():
            left = [(handed, handed.samples) for handed in self._out]
            self._give_back(left, keep_prefix=self._partial, taken=True)


def _versions(sample: Any) -> Sequence[Any]:
    return getattr(sample, "weight_versions", None) or ()


def _foreign(group: Sequence[Any]) -> Prompt:
    """The prompt of a group that did not come from the queue."""
    samples = list(flat(group))
    if not samples or has_tokens(samples) or hasattr(samples[0], TASK):
        raise BadInput(
            "Incomplete continuation has no durable task input to retry: a group that did not come from this queue "
            "can be "
            "added only before it has tokens"
        )
    return prompt_of(samples[0], samples=len(samples))
