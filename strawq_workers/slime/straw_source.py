"""slime's data source on a pool: `--data-source-path strawq_workers.slime.StrawDataSource` on a slime of any version.

The rule: nothing lives in this object that the pool does not have. The dataset's cursor moves in the commit that
submits its prompts, groups in hand are leases, batches are found by their rollout, and a process that dies leaves all
of it to the next. One job owns the pool and the save directory, for as long as its process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from strawq.errors import BadInput, StrawqError, TryAgain
from strawq.handles import Leases
from strawq.model import QueueConfig
from strawq.pool import Pool
from strawq.upkeep import Upkeep
from strawq_workers.asking import sure
from strawq_workers.slime import witness
from strawq_workers.slime.arguments import uses_our_rollout, validate_rollout_arguments, value_of
from strawq_workers.slime.batches import RolloutBatches
from strawq_workers.slime.checkpoint import Restored, load_pair, save_pair
from strawq_workers.slime.codec import samples_of
from strawq_workers.slime.commits import DIRECTORY
from strawq_workers.slime.dataset import PromptDataset
from strawq_workers.slime.feeding import Feeding
from strawq_workers.slime.handed import BATCH, flat
from strawq_workers.slime.job_lock import JobLock
from strawq_workers.slime.places import require_places
from strawq_workers.slime.sampling import Sampling
from strawq_workers.slime.storage_check import QUEUE, ROLE, io_concurrency, open_job_pool
from strawq_workers.stale_groups import AgeLimit, staleness_metrics

logger = logging.getLogger("strawq.slime")

PAGE = 64
"""Groups of one lease."""
WAIT_S = 0.05
READER = "metadata.owner"
"""Producer whose cursor holds the metadata of this reader."""
STATE_VERSION = 1


class StrawDataSource:
    """slime's `DataSource` with a durable queue behind it. `BadInput` names the flag that does not fit.

    `pool` and `queue_name` are where the groups are; `restored` is what `load` did. Once somebody else has rolled the
    pool back, every call is `BranchMoved` until `load`: the trainer's model has seen what the new branch has not."""

    def __init__(self, args: Any) -> None:
        if getattr(args, "buffer_filter_path", None):
            raise BadInput(
                "--buffer-filter-path is not supported by straw; scheduling is persisted in the queue and prioritizes "
                "older weight versions within ready and partial groups"
            )
        if uses_our_rollout(args):
            validate_rollout_arguments(args)
        require_places(args, pool=True)
        self.args = args
        self.queue_name = QUEUE
        self.restored: Restored | None = None
        self._closed = False
        self._saved = -1
        """Rollouts up to this one are saved with the model."""
        self._sampling_began = self._collecting = False
        self._metadata_lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            if getattr(args, "save", None):
                save = Path(args.save).expanduser().resolve()
                self._lock(undo, save / DIRECTORY / "session.lock", f"save directory {save}")
            self.pool: Pool = undo.enter_context(open_job_pool(args))
            self._lock(undo, Path(self.pool.path) / "locks" / "job.lock", f"pool {self.pool.path}")
            self._expire_predecessors()
            self._threads = ThreadPoolExecutor(io_concurrency(args), "strawq-read")
            undo.callback(self._threads.shutdown)
            self._reader = ThreadPoolExecutor(1, "strawq-reader")
            undo.callback(self._reader.shutdown)
            self._feeding = Feeding(self.pool, self.queue_name, args)
            self._batches = RolloutBatches(self.pool, self.queue_name)
            self._sampling = Sampling(self.pool, self.queue_name, args, self._batches, self._threads)
            self._upkeep = Upkeep(self.pool)
            undo.callback(self._upkeep.close)
            self._watch_hooks(undo)
            self._resources = undo.pop_all()

    def _lock(self, undo: contextlib.ExitStack, path: Path, what: str) -> None:
        lock = JobLock(path, what)
        undo.callback(lock.close)

    def _watch_hooks(self, undo: contextlib.ExitStack) -> None:
        """Our own rollout functions work on the pool; of any other slime's hooks tell what it did."""
        if not uses_our_rollout(self.args):
            name = self.pool.instance
            witness.install(self.args, name, self._sampling)
            undo.callback(witness.uninstall, self.args, name)

    def _expire_predecessors(self) -> None:
        """The job's lock is ours, so the processes that had it before are dead: what they held is free at once."""
        own = self.pool.keeper.require()
        for session in self.pool.inspect().sessions:
            if session.role == ROLE and session.id != own:
                with contextlib.suppress(BadInput):
                    self.pool.expire_session(session.id, "its job has ended: another process holds the job's lock")
        self.pool.keeper.round()

    # -- prompts and samples --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._feeding)

    @property
    def dataset(self) -> PromptDataset:
        """What older managers take the length of."""
        return self._feeding.dataset

    @property
    def branch(self) -> str:
        """The branch that the trainer's model is of."""
        return self._batches.branch

    def fill(self, count: int) -> int:
        """Make sure that at least `count` groups are pending, submitting prompts of the dataset, whose cursor moves in
        the same commit. Returns how many were submitted; 0 with nothing pending is the end of the input."""
        self._require_open()
        return self._feeding.fill(count)

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Lease that many groups: ready ones that came back, then partial, then fresh ones. Blocks while admission is
        paused; fewer at the end of the input."""
        if num_samples < 0:
            raise BadInput("num_samples must be nonnegative")
        self._require_open()
        self._begin_sampling()
        found: list[list[Any]] = []
        try:
            while len(found) < num_samples:
                self._require_open()
                answer = self._lease(min(PAGE, num_samples - len(found)))
                if answer.leases:
                    found += self._sampling.hand_out(answer.leases)
                elif answer.status in ("paused", "backpressured"):
                    # Where all that is held is what the caller does not have yet, nobody else could make room.
                    alone = answer.status == "backpressured" and self._sampling.held == len(found)
                    if not (alone and self._lift_bound(num_samples)):
                        time.sleep(WAIT_S)
                elif answer.status == "sealed" or not self._refill(num_samples - len(found)):
                    break
        except BaseException:
            if found:
                self._sampling.take_back(found)
            raise
        return found

    def _begin_sampling(self) -> None:
        self._sampling.settle()
        if not self._sampling_began:
            self._sampling_began = True
            count = self._batches.give_back_open()
            if count:
                logger.info("%d groups of batches that were not trained are handed out again", count)

    def _lease(self, count: int) -> Leases:
        queue = self.pool.queue(self.queue_name)
        answer: Leases = sure(
            self.pool,
            lambda request: queue.acquire(count, stages=("ready", "partial", "fresh"), request_id=request),
        )
        if answer.status not in ("acquired", "paused", "backpressured", "empty", "sealed"):
            raise TryAgain(f"Queue cannot supply rollout inputs: {answer.status} {answer.detail}".rstrip())
        return answer

    def _lift_bound(self, wanted: int) -> bool:
        """A bound on ready groups, left by workers, would keep them from the sampler that is to use them. `BadInput` if
        so many can never be leased at once."""

        def view(machine: Any) -> QueueConfig:
            found: QueueConfig = machine.state.branch.queues[self.queue_name].row.config
            return found

        config = self.pool.log.refresh(view)
        if 0 < config.max_leased < wanted:
            raise BadInput(
                f"{wanted} groups are asked for at once, and queue {self.queue_name} lets {config.max_leased} be "
                f"leased: raise that (`strawq queue {self.pool.path} {self.queue_name} --max-leased {wanted}`)"
            )
        if config.max_ready:
            logger.warning("the queue's max_ready of %d is lifted: this sampler uses ready groups", config.max_ready)
            self.pool.configure(self.queue_name, msgspec.structs.replace(config, max_ready=0))
        return bool(config.max_ready)

    def _refill(self, count: int) -> bool:
        """Whether there is anything to lease now. Another reader may have taken what was just submitted."""
        if self.fill(count):
            return True
        counts = self.pool.queue(self.queue_name).counts()
        return bool(counts.fresh_pending + counts.partial_pending)

    async def get_samples_async(self, num_samples: int) -> list[list[Any]]:
        """`get_samples` in a thread of its own: the event loop goes on. What comes after a cancellation goes back."""
        self._require_open()
        future = self._reader.submit(self.get_samples, num_samples)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._take_back_late)
            raise

    def _take_back_late(self, future: Future[list[list[Any]]]) -> None:
        if not future.cancelled() and future.exception() is None and future.result():
            self._sampling.take_back(future.result())

    def add_samples(self, samples: Sequence[Sequence[Any]]) -> None:
        """Give groups back with what they have: anyone goes on from there. A group whose captures do not cover its
        tokens goes back as it was saved last."""
        self._require_open()
        self._sampling.take_back(samples)

    def get_buffer_length(self) -> int:
        """Groups that came back and wait: partial and ready ones."""
        counts = self.pool.queue(self.queue_name).counts()
        return counts.partial_pending + counts.ready

    # -- batches --------------------------------------------------------------------------------------------------

    def collect(
        self,
        rollout_id: int,
        count: int,
        *,
        timeout: float | None = None,
        fewer: bool = False,
        limit: AgeLimit | None = None,
    ) -> list[list[Any]]:
        """The batch of that rollout: the same groups again until it is finished, and none older than `limit` asks.
        Empty when the queue is sealed and used up; `TryAgain` says what is missing after `timeout` seconds; with
        `fewer` the data have ended, and what is ready is taken. Rollout n ends rollouts up to n - 2, since a trainer
        overlaps by one."""
        self._require_open()
        self._batches.finish_up_to(max(rollout_id - 2, min(self._saved, rollout_id - 1)))
        batch = self._batches.collect(rollout_id, count, timeout=timeout, fewer=fewer, limit=limit)
        if batch is None:
            return []
        queue = self.pool.queue(self.queue_name)
        groups = self._threads.map(lambda held: samples_of(queue.read_group(batch.batch, held)), batch.batch.groups)
        found = list(groups)
        for group in found:
            for sample in flat(group):
                setattr(sample, BATCH, rollout_id)
        return found

    def finish(self, rollout_id: int) -> None:
        """The rollout is trained. Once, however often it is said."""
        self._require_open()
        self._batches.finish(rollout_id)

    def batch_metrics(self, rollout_id: int, max_staleness: int = -1) -> dict[str, float]:
        """Staleness of that rollout's batch, under slime's names, with a budget (-1: none) also what is beyond it; and
        what was begun anew since the batch before. `BadInput` if this process has not collected it."""
        batch = self._batches.collected(rollout_id)
        if batch is None:
            raise BadInput(f"rollout {rollout_id} has no batch here: collect it first")
        ages = staleness_metrics((held.task.version for held in batch.batch.groups), batch.served, max_staleness)
        return {**ages, **self._batches.begun_anew()}

    def accept(self, rollout_id: int, samples: Sequence[Any]) -> None:
        """Say what a rollout delivered, for a rollout function of one's own under a manager that does not call
        `--custom-rollout-log-function-path`: these groups are its batch, the others that it had go back."""
        self._sampling.saw_delivery(rollout_id, samples)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, rollout_id: int) -> None:
        """Commit queue and model of this rollout together; the batches up to it are finished. Call it when the model is
        saved. Where a staleness budget bounds what is begun, they are finished when the next batch is collected, or at
        the end: their room is for groups of the weights that come now. Whoever restores the pair finishes them too."""
        self._require_open()
        self._sampling.settle()
        self._sampling.settle_silent(rollout_id)
        save_pair(self.pool, self.queue_name, self.args, rollout_id, self.branch)
        if value_of(self.args, "max_staleness") is None:
            self._batches.finish_up_to(rollout_id)
        else:
            self._saved = max(self._saved, rollout_id)

    def load(self, rollout_id: int | None = None) -> Restored:
        """Bring the queue to where the model is: `rollout_id` is the rollout that it has seen last, -1 if none, None to
        find it. `BadInput` names what is missing of that pair."""
        self._require_not_closed()
        self._sampling.give_up()
        self.restored = load_pair(self.pool, self.queue_name, self.args, rollout_id)
        self._batches.follow(self.restored.branch)
        self._saved = -1
        self._sampling_began = False
        if self.restored.rollout_id >= 0:
            self._batches.finish_up_to(self.restored.rollout_id)
        if getattr(self.args, "rollout_queue_online_gc", False) and not self._collecting:
            self._collecting = True
            self._upkeep.start()
        return self.restored

    def state_dict(self) -> dict[str, Any]:
        """Where the reader stands, for a look: the dataset's cursor, the metadata, and the pool that has all the
        rest."""
        return {
            "version": STATE_VERSION,
            "pool_id": self.pool.header.pool_id,
            "run_id": self.pool.header.run_id,
            "branch": self.pool.branch(),
            **self._feeding.position(),
            "metadata": self.get_metadata(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Take the metadata of such a state over. `BadInput` if it is of another pool: tasks are restored by `load`."""
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION or "pool_id" not in state:
            raise BadInput(
                "Reader-local buffer checkpoints require migration before using the durable queue scheduler: this "
                "state "
                "was not made by StrawDataSource"
            )
        if state["pool_id"] != self.pool.header.pool_id:
            raise BadInput(f"this state is of pool {state['pool_id']}, not of {self.pool.path}: use load()")
        self._write_metadata(dict(state.get("metadata") or {}))

    # -- metadata -------------------------------------------------------------------------------------------------

    def get_metadata(self) -> dict[str, Any]:
        """What `update_metadata` kept, on this branch."""
        text = self.pool.queue(self.queue_name).cursor(READER)
        return dict(msgspec.json.decode(text)) if text else {}

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Keep JSON values under these keys, durably; checkpoints have them too."""
        self._require_open()
        with self._metadata_lock:
            self._write_metadata({**self.get_metadata(), **metadata})

    def _write_metadata(self, metadata: dict[str, Any]) -> None:
        try:
            text = msgspec.json.encode(metadata).decode()
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise BadInput(f"metadata are JSON values with string keys: {error}") from error
        queue = self.pool.queue(self.queue_name)
        sure(self.pool, lambda request: queue.move_cursor(READER, text, request_id=request))

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all leases and batches back and let go of the pool. Again: nothing."""
        if self._closed:
            return
        self._closed = True
        with self._resources:
            self._finish_saved()
            # In its own thread, behind a read that is under way.
            self._reader.submit(self._sampling.give_up).result()

    def _finish_saved(self) -> None:
        """The model has them: they must not go back."""
        if self._saved >= 0:
            try:
                self._batches.finish_up_to(self._saved)
            except StrawqError as error:
                logger.warning(
                    "rollout %d is saved, and its batch is not finished (whoever loads the pair finishes it): %s",
                    self._saved, error,
                )  # fmt: skip

    def _require_not_closed(self) -> None:
        if self._closed:
            raise BadInput("Queue reader is closed")

    def _require_open(self) -> None:
        self._require_not_closed()
        self._batches.require_branch()
