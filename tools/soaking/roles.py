"""The processes of a soak, and what they handle: small groups whose every token follows from their number.

The rule: a trainer writes down what it has read before it finishes the batch, so that whatever becomes of it, the
last delivery of each batch says which groups were trained.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from strawq.drill.life import die_with, own_log
from strawq.errors import BadInput, Fenced, OutcomeUnknown, TryAgain
from strawq.handles import Batch, Leases
from strawq.model import VersionSpan
from strawq.pool import Pool
from strawq.queue import Queue
from strawq.samples import Group, Prompt, Sample
from strawq.upkeep import Upkeep
from strawq.work import Change, Work

T = TypeVar("T")

PROMPT_TOKENS, TOKENS, SAVED_TOKENS = 16, 48, 16
SAMPLES = 2
TENSORS_EVERY = 8
"""One group in so many has a tensor, so that packs come and go too."""
LIVE_MAX = 1500
BATCH_GROUPS = 32
CHECKPOINT_BATCHES = 40
CHECKPOINTS_KEPT = 3
LEASE_SECONDS = 2.0
ASK_TRIES = 100


class Life(msgspec.Struct, frozen=True):
    """One process of the soak. `number` names its files below `notes`."""

    number: int
    role: str
    root: str
    notes: str
    groups: int
    gc_seconds: float
    keep_entries: int

    def path(self, suffix: str) -> Path:
        return Path(self.notes) / f"{self.number:05d}-{self.role}.{suffix}"


class Read(msgspec.Struct, frozen=True):
    """Groups that one delivery of a batch held."""

    batch: str
    delivery: int
    groups: list[int]


class Timed(msgspec.Struct, frozen=True):
    """How long one commit took, from the call to the acknowledgement."""

    ms: float


# Content.


def expected(index: int, sample: int, count: int) -> npt.NDArray[np.int32]:
    return (index * 7919 + sample * 104_729 + np.arange(count, dtype=np.int64)).astype(np.int32) & 0x7FFF


def make_prompt(index: int) -> Prompt:
    return Prompt(group_id=str(index), tokens=expected(index, 9, PROMPT_TOKENS), samples=SAMPLES)


def answered(group: Group, count: int) -> Group:
    """The group with `count` tokens in each sample, all its fields as they follow from its number."""
    index = int(group.prompt.group_id)
    return Group(group.task_id, group.prompt, tuple(_answer(index, sample, count) for sample in range(SAMPLES)))


def _answer(index: int, sample: int, count: int) -> Sample:
    tokens = expected(index, sample, count)
    beside: dict[str, Any] = {}
    if index % TENSORS_EVERY == 0:
        beside["beside"] = np.repeat(tokens[:, None], 16, axis=1)
    return Sample(
        index=sample,
        tokens=tokens,
        logprobs=-(tokens % 97).astype(np.float32),
        versions=(VersionSpan(0, count, "1"),),
        status="completed" if count == TOKENS else "pending",
        token_tensors=beside,
    )


def require_whole(group: Group) -> int:
    """The group's number. `AssertionError` says what is not as it was made."""
    index = int(group.prompt.group_id)
    for sample, held in enumerate(group.samples):
        tokens = expected(index, sample, TOKENS)
        assert np.array_equal(held.tokens, tokens), f"group {index}: other tokens"
        if index % TENSORS_EVERY == 0:
            assert np.array_equal(held.token_tensors["beside"][:], np.repeat(tokens[:, None], 16, axis=1)), index
    assert len(group.samples) == SAMPLES, f"group {index}: {len(group.samples)} samples"
    return index


# Roles.


class Player:
    """What a role works with. `done` is set by SIGTERM."""

    def __init__(self, life: Life, pool: Pool) -> None:
        self.life, self.pool, self.queue = life, pool, pool.queue()
        self.chance = random.Random(life.number)
        self.done = False
        self._notes = os.open(life.path("notes"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o664)
        self._asked = 0

    def write(self, *notes: msgspec.Struct) -> None:
        # No fsync: processes are killed here, the machine is not.
        os.write(self._notes, b"".join(msgspec.json.encode(note) + b"\n" for note in notes))

    def ask(self, call: Callable[[str], T]) -> T:
        """`call` with a request id of its own, again with the same one while nothing happened or nobody knows."""
        self._asked += 1
        request = f"soak-{self.life.number}-{self._asked}"
        for _ in range(ASK_TRIES):
            try:
                return call(request)
            except (OutcomeUnknown, TryAgain):
                time.sleep(0.02)
        return call(request)


def submit(player: Player) -> None:
    queue, groups = player.queue, player.life.groups
    while not player.done:
        start = int(queue.cursor("soak") or 0)
        if start >= groups:
            return queue.seal()
        counts = queue.counts()
        if counts.total - counts.trained > LIVE_MAX:
            time.sleep(0.05)
            continue
        stop = min(groups, start + player.chance.randint(16, 128))
        prompts = [make_prompt(index) for index in range(start, stop)]
        expect = str(start) if start else ""

        def add(request: str, prompts: list[Prompt] = prompts, stop: int = stop, expect: str = expect) -> None:
            queue.submit(prompts, producer="soak", cursor=str(stop), expect=expect, request_id=request)

        try:
            player.ask(add)
        except Fenced:
            continue  # An earlier life of the producer was faster: the cursor is read again.
    return None


def work(player: Player) -> None:
    queue, chance = player.queue, player.chance
    while not player.done:
        count = chance.randint(4, 32)
        try:
            leases = player.ask(partial(_acquire, queue, count))
            if leases.status == "sealed":
                return
            if not leases:
                time.sleep(0.02)
                continue
            held = [queue.open(lease) for lease in leases]
            if chance.random() < 0.2:
                fresh = [piece for piece in held if not piece.group.samples]
                _report(player, [Change(piece, "save", answered(piece.group, SAVED_TOKENS)) for piece in fresh])
            _report(player, [_end(player, piece) for piece in held])
        except Fenced:
            continue


def _acquire(queue: Queue, count: int, request: str) -> Leases:
    return queue.acquire(count, request_id=request)


def _finish(queue: Queue, batch: Batch, _request: str) -> None:
    queue.finish_batch(batch)  # Its request is named by the delivery.


def _end(player: Player, piece: Work) -> Change:
    if not piece.group.samples and player.chance.random() < 0.05:
        return Change(piece, "yield", answered(piece.group, SAVED_TOKENS))
    return Change(piece, "complete", answered(piece.group, TOKENS))


def _report(player: Player, changes: list[Change]) -> None:
    if changes:
        told = player.ask(lambda request: player.queue.report(changes, request_id=request))
        assert not told.conflict, told.conflict


def train(player: Player) -> None:
    queue, batches = player.queue, 0
    while not player.done:
        try:
            taken = player.ask(lambda request: queue.take_batch(BATCH_GROUPS, request_id=request))
            if taken.batch is None:
                if taken.status == "sealed":
                    return
                time.sleep(0.02)
                continue
            batch = taken.batch
            player.write(Read(batch.id, batch.delivery, [require_whole(group) for group in queue.read_batch(batch)]))
            player.ask(partial(_finish, queue, batch))
        except Fenced:
            continue
        batches += 1
        if batches % CHECKPOINT_BATCHES == 0:
            _checkpoint(player, batch)


def _checkpoint(player: Player, batch: Batch) -> None:
    """Take one; drop all but the newest few, those of earlier lives too."""
    player.pool.checkpoint(f"after-{batch.id}-{player.life.number}")
    points = sorted(player.pool.checkpoints(), key=lambda point: point.seq)
    for point in points[:-CHECKPOINTS_KEPT]:
        try:
            player.pool.drop_checkpoint(point.name)
        except BadInput:
            continue  # Dropped by the life before, whose answer nobody heard.


ROLES: dict[str, Callable[[Player], None]] = {"submitter": submit, "worker": work, "steady": work, "trainer": train}


# One life.


def live(life: Life) -> int:
    with Pool.open(life.root, role=f"soak {life.role}", lease_seconds=LEASE_SECONDS) as pool:
        player = Player(life, pool)

        def stop(_number: int, _frame: object) -> None:
            player.done = True

        signal.signal(signal.SIGTERM, stop)
        if life.role == "steady":
            _time_commits(player)
        keeping = Upkeep(pool, life.gc_seconds, keep_entries=life.keep_entries)
        with keeping if life.role in ("worker", "steady") else nullcontext():
            ROLES[life.role](player)
    return 0


def _time_commits(player: Player) -> None:
    """Write down how long each commit of this process takes."""
    commit: Callable[..., Any] = player.pool.commit

    def timed(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return commit(*given, **named)
        finally:
            player.write(Timed(round((time.perf_counter() - start) * 1000, 3)))

    player.pool.commit = timed  # type: ignore[method-assign]


def start(life: Life) -> int:
    """A child that lives `life`: its process id. Forked, not started anew: imports would take longer than many a
    life."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        own_log(life.path("log"))
        code = live(life)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
    finally:
        os._exit(code)
