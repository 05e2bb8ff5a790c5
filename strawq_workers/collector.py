"""What a trainer calls: the next batch of complete groups, read and checked, until it says that it is done with it.

The rule: a batch is the same groups from the moment it is taken until it is finished, whoever dies in between. One
consumer name is one trainer: while a batch of that name is open in another process, no other one is taken, for the
trainer that comes after a crash must see the same batch again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from strawq.errors import BadInput, TryAgain
from strawq.handles import Batch, Held, Taken
from strawq.pool import Pool
from strawq.samples import Group
from strawq_workers.admission.staleness import STALE_DROPS_MAX, Policy
from strawq_workers.age_gate import AgeGate
from strawq_workers.asking import sure
from strawq_workers.rates import Rates, summed
from strawq_workers.stale_groups import AgeLimit, staleness_metrics

log = logging.getLogger("strawq.collector")

POLL_S = 0.02
POLL_MAX_S = 1.0
SAY_SECONDS = 30.0


class Shard:
    """Some groups of a batch, in its order. Nothing is read before it is asked for."""

    def __init__(self, pool: Pool, batch: Batch, held: Sequence[Held]) -> None:
        self._pool = pool
        self.batch = batch
        self._held = tuple(held)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(held.task.id for held in self._held)

    def __iter__(self) -> Iterator[Group]:
        """The groups, each read and verified as it is reached; tensors are read when they are touched. `Damaged` or
        `Gone` name the object that is not what it should be; `Fenced`: the batch went to somebody else meanwhile."""
        queue = self._pool.queue(self.batch.queue)
        return (queue.read_group(self.batch, held) for held in self._held)

    def groups(self) -> list[Group]:
        return list(self)

    def split(self, rank: int, world: int) -> Shard:
        """The share of one of `world` ranks: groups `rank`, `rank + world`, ... Only their rows are read."""
        if not 0 <= rank < world:
            raise BadInput(f"rank {rank} is not one of {world}")
        return Shard(self._pool, self.batch, self._held[rank::world])


class CollectedBatch(Shard):
    """A batch in this trainer's hands. `served` is the policy version when it was taken, `max_staleness` the budget
    of its groups (-1: none)."""

    def __init__(
        self,
        pool: Pool,
        batch: Batch,
        served: str,
        rates: Mapping[str, float] | None = None,
        *,
        max_staleness: int = -1,
    ) -> None:
        super().__init__(pool, batch, batch.groups)
        self.served = served
        self._rates = dict(rates or {})
        self._max_staleness = max_staleness

    @property
    def id(self) -> str:
        return self.batch.id

    @property
    def delivery(self) -> int:
        """Above 1: an earlier holder died or let go before finishing it."""
        return self.batch.delivery

    def metrics(self) -> dict[str, float]:
        """Ages of the groups (see `staleness_metrics`). With them what has happened in the queue since the batch before
        (see `Rates`), for batches of a `Collector`. Reads nothing."""
        oldest = (held.task.version for held in self._held)
        return {**self._rates, **staleness_metrics(oldest, self.served, self._max_staleness)}

    def share(self) -> bytes:
        """The batch as bytes, for ranks in other processes: `open_shared` reads its groups there. It names objects, and
        holds no tensors."""
        return msgspec.msgpack.encode((self.batch, self.served))


def open_shared(pool: Pool, shared: bytes) -> CollectedBatch:
    """The batch that another process has taken and `share`d. Finishing it is that process's business."""
    try:
        batch, served = msgspec.msgpack.decode(shared, type=tuple[Batch, str])
    except msgspec.MsgspecError as error:
        raise BadInput(f"these {len(shared)} bytes are not a shared batch: {error}") from error
    return CollectedBatch(pool, batch, served)


class Collector:
    """Takes batches of one queue for one consumer. Not safe from many threads.

    With `max_staleness` (in versions) and the policy `oldest_first` a batch waits for older groups, and under `drop` a
    group that got too old while it was ready starts anew, at most `stale_drops_max` times; `admit` is the workers'
    alone (see `AgeGate`). Groups that are delivered beyond the budget are counted.
    """

    def __init__(
        self,
        pool: Pool,
        queue: str = "rollout",
        consumer: str = "trainer",
        *,
        max_staleness: int = -1,
        staleness_policy: Policy = "admit",
        stale_drops_max: int = STALE_DROPS_MAX,
    ) -> None:
        self.pool = pool
        self.queue = queue
        self.consumer = consumer
        self._gate = AgeGate(pool, queue, AgeLimit(max_staleness, staleness_policy, stale_drops_max))
        self._rates: Rates | None = None

    def next_batch(
        self,
        count: int,
        *,
        timeout: float | None = None,
        fewer: bool = False,
        wait: Callable[[float], Any] = time.sleep,
    ) -> CollectedBatch | None:
        """The batch that was left unfinished, else `count` ready groups; None when the queue is sealed and used up (the
        last batch may be smaller).

        Waits until there are enough, at most `timeout` seconds: then `TryAgain` says what is missing. `fewer`: what is
        ready by then is taken, if there is any. `wait` is called with the seconds to sleep, and may raise."""
        if count < 1:
            raise BadInput(f"a batch has at least one group, not {count}")
        started = said = time.monotonic()
        delay = POLL_S
        self._rates = self._rates or Rates(self.pool, self.queue)
        while True:
            left = None if timeout is None else started + timeout - time.monotonic()
            late = left is not None and left <= 0
            missing = self._holder() or self._gate.blocked(self.consumer, count)
            if not missing:
                taken = self._take(count, fewer and late)
                if taken.batch is not None and self._gate.outgrown(taken.batch):
                    self.pool.queue(self.queue).return_batch(taken.batch)
                    continue
                if taken.batch is not None:
                    return self._collected(taken.batch)
                if taken.status == "sealed":
                    return None
                missing = taken.detail
            if late:
                raise TryAgain(f"no batch of {count} groups within {timeout:g} s: {missing}; {self._who_works()}")
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                log.warning("waiting for %d groups: %s; %s", count, missing, self._who_works())
            wait(delay if left is None else min(delay, max(left, 0.001)))
            delay = min(2 * delay, POLL_MAX_S)

    def _take(self, count: int, fewer: bool) -> Taken:
        """One whose reply was lost is asked for again as the same: nobody else would ever get it from this session."""
        queue = self.pool.queue(self.queue)
        return sure(
            self.pool,
            lambda request: queue.take_batch(count, consumer=self.consumer, fewer=fewer, request_id=request),
        )

    def _collected(self, batch: Batch) -> CollectedBatch:
        rates = summed(self._rates.since_last() if self._rates is not None else {}, self._gate.added())
        collected = CollectedBatch(
            self.pool, batch, self.pool.policy_version(), rates, max_staleness=self._gate.limit.max_staleness
        )
        if batch.delivery > 1:
            log.info("batch %s is delivered again (%d)", batch.id, batch.delivery)
        return collected

    def _holder(self) -> str | None:
        """Who else has an open batch of this consumer, in words. A dead one is expired by our heartbeat thread."""
        own = self.pool.keeper.require()

        def view(machine: Any) -> str | None:
            state = machine.state
            queue = state.branch.queues.get(self.queue)
            for batch in queue.batches.values() if queue is not None else ():
                if batch.consumer == self.consumer and batch.session not in ("", own):
                    session = state.sessions.get(batch.session)
                    where = f"{session.host}, pid {session.pid}" if session is not None else "unknown"
                    return (
                        f"batch {batch.id} of consumer {self.consumer} is open in session {batch.session} ({where}): "
                        "it comes back when that process is dead; a second trainer needs a consumer name of its own"
                    )
            return None

        found: str | None = self.pool.log.refresh(view)
        return found

    def _who_works(self) -> str:
        """Whether waiting makes sense, in words."""
        seen = self.pool.inspect()
        view = seen.queues[self.queue]
        leases = sum(session.leases for session in seen.sessions)
        words = f"{leases} groups are leased by {sum(1 for s in seen.sessions if s.leases)} processes"
        if seen.paused is not None:
            words += f", admission is paused ({seen.paused.reason or 'no reason given'})"
        if view.tasks.failed:
            words += f", {view.tasks.failed} dead letters (`strawq failed list POOL`)"
        if not leases and not seen.paused:
            words += ": is a worker running?"
        return words

    def finish(self, batch: CollectedBatch, dropped: Sequence[tuple[str, str]] = ()) -> None:
        """The trainer is done with the batch; groups in `dropped` (task, reason) end as dropped. `Fenced` if it has
        been delivered to somebody else since: what was trained on it counts twice then."""
        self.pool.queue(self.queue).finish_batch(batch.batch, dropped=dropped)

    def give_back(self, batch: CollectedBatch) -> None:
        """Its groups are ready again, for any consumer."""
        self.pool.queue(self.queue).return_batch(batch.batch)
