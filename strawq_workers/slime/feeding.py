"""From the dataset into the queue: prompts become tasks in the commit that moves the dataset's cursor.

The rule: filling starts from the cursor that was committed last, so whatever fails in between skips nothing and repeats
nothing, and of two that fill at once one finds the other's prompts. The dataset that a cursor belongs to stands beside
it; another one is refused by what differs.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from strawq.errors import BadInput, Fenced
from strawq.pool import Pool
from strawq.queue import Queue
from strawq_workers.asking import sure
from strawq_workers.slime.codec import prompt_of
from strawq_workers.slime.dataset import Cursor, PromptDataset

PRODUCER = "dataset"
IDENTITY = "dataset.identity"
FILL_MIN, FILL_MAX = 8, 1024
"""Prompts of one commit."""


class Feeding:
    """The dataset of `args` and the queue that it feeds. Safe from many threads."""

    def __init__(self, pool: Pool, queue_name: str, args: Any) -> None:
        """Raises `BadInput` if the dataset cannot be read, or is not the one that the queue was fed from."""
        self._pool = pool
        self._queue_name = queue_name
        self._lock = threading.Lock()
        self.dataset = PromptDataset(args)
        self._identified = ""
        self._require_same(pool.queue(queue_name))

    def __len__(self) -> int:
        return len(self.dataset)

    def position(self) -> dict[str, Any]:
        """The cursor under slime's names."""
        cursor = self._cursor(self._pool.queue(self._queue_name).cursor(PRODUCER))
        found: dict[str, Any] = msgspec.to_builtins(cursor)
        return {name: value for name, value in found.items() if name != "metadata"}

    def fill(self, count: int) -> int:
        """Submit prompts until at least `count` groups are pending; returns how many were."""
        submitted = 0
        with self._lock:
            while True:
                queue = self._pool.queue(self._queue_name)
                counts = queue.counts()
                missing = count - counts.fresh_pending - counts.partial_pending
                if missing <= 0:
                    return submitted
                added = self._submit(queue, min(max(missing, FILL_MIN), FILL_MAX))
                if added == 0:
                    return submitted
                submitted += max(added, 0)

    def _submit(self, queue: Queue, count: int) -> int:
        """How many prompts were added; -1 if somebody else was first, and it must be looked at again."""
        self._require_same(queue)
        before = queue.cursor(PRODUCER)
        samples, after = self.dataset.take(self._cursor(before), count)
        if not samples:
            return 0
        prompts = [prompt_of(sample, samples=self.dataset.group_size) for sample in samples]
        try:
            sure(
                self._pool,
                lambda request: queue.submit(
                    prompts, producer=PRODUCER, cursor=after.to_json(), expect=before, request_id=request
                ),
            )
        except Fenced:
            return -1
        return len(prompts)

    def _cursor(self, text: str) -> Cursor:
        return Cursor.from_json(text) if text else Cursor()

    def _require_same(self, queue: Queue) -> None:
        """Note which dataset the cursor is of, once on each branch; refuse another one."""
        branch = self._pool.branch()
        if branch == self._identified:
            return
        mine = self.dataset.identity()
        known = queue.cursor(IDENTITY)
        if not known:
            text = msgspec.json.encode(mine).decode()
            sure(self._pool, lambda request: queue.move_cursor(IDENTITY, text, request_id=request))
        else:
            theirs = msgspec.json.decode(known)
            if queue.cursor(PRODUCER):
                require_equal(mine, theirs, self._pool.path)
            elif theirs != mine:
                text = msgspec.json.encode(mine).decode()
                sure(self._pool, lambda request: queue.move_cursor(IDENTITY, text, request_id=request))
        self._identified = branch


def require_equal(mine: dict[str, Any], theirs: dict[str, Any], pool: str) -> None:
    """`BadInput` names the first thing in which the dataset differs from the one that the queue was fed from."""
    for name in [*theirs, *(name for name in mine if name not in theirs)]:
        now, then = mine.get(name), theirs.get(name)
        if isinstance(now, dict) and isinstance(then, dict):
            require_equal(now, then, pool)
        elif now != then:
            raise BadInput(
                f"Data source checkpoint differs in {name}: {pool} was fed with {then!r}, the job has {now!r}; give "
                "the "
                "dataset and flags that it was begun with, or another --rollout-data-dir"
            )
