"""Collected batches as JSON lines, one for each group, in a file or on stdout.

The rule: a batch is finished when its lines are where they should be, never before. A file is one run's at a time. It
knows by itself which batches stand in it, so there one that comes again is not written twice; from stdout nothing can
be taken back.

A batch is finished before the next one is written, so only the last one of a file may be there unfinished. Nothing is
written behind it: if it does not come, its lines go, for those of its groups that are left come in another batch.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from strawq.errors import BadInput, Damaged, Fenced, Gone, StorageFailed, TryAgain
from strawq.handles import Batch, Held
from strawq.pool import Pool
from strawq.samples import Group
from strawq.standard_output import write_stdout
from strawq_workers.admission.staleness import STALE_DROPS_MAX, Policy
from strawq_workers.collector import Collector
from strawq_workers.durable import sync_directory

log = logging.getLogger("strawq.collect")

_BEGIN = b'{"batch":"'
"""Of a line, as `group_record` makes it."""
_READ_BYTES = 1 << 20


class CollectSummary(msgspec.Struct, frozen=True):
    """`batches` were finished, `groups` and `tokens` (response tokens) are in them; `sealed`: there will be no more."""

    batches: int
    groups: int
    tokens: int
    sealed: bool
    metrics: dict[str, float]


class _Head(msgspec.Struct, frozen=True):
    """What every line has."""

    batch: str
    task: str


_head = msgspec.json.Decoder(_Head)


def group_record(group: Group, batch: Batch) -> dict[str, Any]:
    """A group as JSON values. Log-probs are those of the policy that made the token, as stored; a group whose prompt
    came without an id goes by its task's."""
    prompt = group.prompt
    return {
        "batch": f"{batch.branch}/{batch.id}",
        "task": group.task_id,
        "group_id": prompt.group_id or group.task_id,
        "prompt": {
            "text": prompt.text,
            "tokens": None if prompt.tokens is None else prompt.tokens.tolist(),
            "messages": prompt.messages,
            "label": prompt.label,
            "metadata": prompt.metadata,
        },
        "samples": [
            {
                "index": sample.index,
                "tokens": sample.tokens.tolist(),
                "logprobs": None if sample.logprobs is None else sample.logprobs.tolist(),
                "loss_mask": sample.loss_mask.tolist(),
                "versions": msgspec.to_builtins(sample.versions),
                "reward": sample.reward,
                "status": sample.status,
                "finish_reason": sample.finish_reason,
                "text": sample.text,
                "metadata": sample.metadata,
            }
            for sample in group.samples
        ],
    }


def collect_to_jsonl(
    pool: Pool,
    out: str | os.PathLike[str],
    *,
    count: int,
    batches: int = 0,
    queue: str = "rollout",
    consumer: str = "trainer",
    timeout: float | None = None,
    fewer: bool = False,
    wait: Callable[[float], Any] = time.sleep,
    max_staleness: int = -1,
    staleness_policy: Policy = "admit",
    stale_drops_max: int = STALE_DROPS_MAX,
) -> CollectSummary:
    """Write `batches` batches (0: until the queue is sealed and used up) to `out`, one line for each group, `-` for
    stdout, taken as a `Collector` with these options takes them. A batch is finished when its lines are durable; on
    stdout, when they are written and flushed. One that cannot be written to stdout is given back, and `BrokenPipeError`
    or `StorageFailed` say why.

    A file that is there is continued: a batch that an earlier run wrote, and did not live to finish, is not written
    twice. So one that cannot be written to a file stays open, and comes again. If it will not come as it was (a group
    was dropped, it was given back), or another one is written first, its lines are taken from the end of the file, and
    a warning says so. Raises `TryAgain` while another run writes to the file, or another consumer has the batch at its
    end open, and `StorageFailed` if somebody changes or removes it meanwhile."""
    collector = Collector(
        pool, queue, consumer,
        max_staleness=max_staleness, staleness_policy=staleness_policy, stale_drops_max=stale_drops_max,
    )  # fmt: skip
    groups = tokens = done = 0
    branch = ""
    metrics: dict[str, float] = {}
    with _Lines(out) as lines:
        _cut_unfinished(pool, lines)
        while not batches or done < batches:
            batch = collector.next_batch(count, timeout=timeout, fewer=fewer, wait=wait)
            if batch is None:
                return CollectSummary(done, groups, tokens, True, metrics)
            if branch and batch.batch.branch != branch:
                log.warning(
                    "the pool was rolled back: batches from %s on are of branch %s, those before of %s",
                    batch.id, batch.batch.branch, branch,
                )  # fmt: skip
            branch = batch.batch.branch
            try:
                records = [group_record(group, batch.batch) for group in batch]
                if not done:
                    _cut_unfinished(pool, lines, coming=f"{branch}/{batch.id}")
                lines.write(f"{branch}/{batch.id}", records)
            except BaseException:
                if not lines.remembers:
                    collector.give_back(batch)
                raise
            try:
                collector.finish(batch)
            except Fenced as error:
                raise Fenced(
                    f"batch {batch.id} is written to {out}, and was taken by somebody else: {error}"
                ) from error
            done += 1
            groups += len(batch)
            tokens += sum(len(sample["tokens"]) for record in records for sample in record["samples"])
            metrics = batch.metrics()
    return CollectSummary(done, groups, tokens, False, metrics)


def _cut_unfinished(pool: Pool, lines: _Lines, coming: str = "") -> None:
    """Take the last batch's lines from the file if they are of a batch that was never finished, and not of the one that
    is `coming`; while nothing is known to come, not of one that is open. What cannot be told stays."""
    name, written = lines.last()
    if not written or name == coming:
        return
    seen: Batch | None = pool.log.refresh(partial(_unfinished, name, written))
    # One that an earlier call of this process has left open: its finishing may be under way.
    own = pool.keeper.current
    if seen is None or (seen.delivery and not coming) or (own and seen.session == own):
        return
    if not any(_is_line_of(pool, seen, held, written[held.task.id]) for held in seen.groups):
        return
    if seen.session:
        raise TryAgain(
            f"{lines.path} ends with batch {name}, which consumer {seen.consumer} (session {seen.session}) has open: "
            "run the command again when it is finished or that process is dead, or write to another file"
        )
    if lines.is_as_left():
        lines.cut(name)
        log.warning(
            "the lines of batch %s were taken from the end of %s: it was never finished, and the groups that are left "
            "of it come again", name, lines.path,
        )  # fmt: skip


def _unfinished(name: str, tasks: Iterable[str], machine: Any) -> Batch | None:
    """The batch of that name, with those of `tasks` that have not ended, if there are any; `delivery` 0: it is not open
    any more. Finishing ends all its tasks, and on its branch none comes back: so it was not finished."""
    state = machine.state
    branch, _, batch = name.rpartition("/")
    if branch != state.active.row:
        return None
    queues = list(state.branch.queues.values())
    live = [queue.tasks[task] for queue in queues for task in tasks if task in queue.tasks]
    held = tuple(Held(task, {part.object: state.objects[part.object] for part in task.parts}) for task in live)
    for row in (row for queue in queues for row in queue.batches.values() if row.id == batch):
        return Batch("", branch, row.session, batch, row.number, row.attempt, row.consumer, held)
    return Batch("", branch, "", batch, 0, 0, "", held) if held else None


def _is_line_of(pool: Pool, batch: Batch, held: Held, line: bytes) -> bool:
    """Whether the group makes this line: another pool has tasks of the same names."""
    try:
        group = pool.payloads.load(held)
    except (Damaged, Gone):
        return False
    return msgspec.json.encode(group_record(group, batch)) == line


class _Lines:
    """The output file: one run's at a time, by a lock that goes with the process. It knows which batches stand in it.

    No lock is relied on: bytes are added at the end, wherever that is, and a batch counts as written once the file is
    as this run left it, with the batch's lines in it."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.path = None if os.fspath(out) == "-" else Path(out)
        self._fd = -1
        self._starts: dict[str, int] = {}
        self._end = 0  # of whole lines
        self._size = 0  # as this run left it

    @property
    def remembers(self) -> bool:
        """Whether a batch that comes again is known by what stands there already."""
        return self.path is not None

    def __enter__(self) -> _Lines:
        if self.path is not None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock()
                self._read()
            except BaseException:
                os.close(self._fd)
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise BadInput(f"{self.path} is no regular file; leave --out away, and lines go to stdout")
        try:
            # Not a record lock: those exclude nobody within a process, and go when anybody closes the file.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TryAgain(
                f"somebody else is writing to {self.path}: wait until that has ended, or write to another file"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked (%s): let nobody else write to it", self.path, error.strerror)

    def _read(self) -> None:
        with open(self._fd, "rb", closefd=False) as file:
            for line in file:
                ends = line.endswith(b"\n")
                if not ends and (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                    break
                try:
                    if not ends:
                        raise ValueError("it is cut off, and does not begin as one")
                    self._starts.setdefault(_head.decode(line).batch, self._end)
                except (ValueError, msgspec.MsgspecError) as error:
                    raise BadInput(
                        f"{self.path} has a line at byte {self._end} that is no collected group: {error}"
                    ) from error
                self._end += len(line)
        self._size = os.fstat(self._fd).st_size
        if not self._size:
            sync_directory(Path(os.path.realpath(str(self.path))).parent)

    def last(self) -> tuple[str, dict[str, bytes]]:
        """The batch whose lines are the last ones, and these by task; no lines if others are among them."""
        if not self._starts:
            return "", {}
        batch, start = next(reversed(self._starts.items()))
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(start)
            lines = [(_head.decode(line), line) for line in file.read(self._end - start).split(b"\n")[:-1]]
        whole = all(head.batch == batch for head, _ in lines)
        return batch, {head.task: line for head, line in lines} if whole else {}

    def cut(self, batch: str) -> None:
        """Take the lines of the last batch away, and half a line behind them."""
        self._end = self._size = self._starts.pop(batch)
        os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)

    def write(self, batch: str, records: list[dict[str, Any]]) -> None:
        data = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        if self.path is None:
            write_stdout(data)
            return
        start = self._starts.setdefault(batch, self._end)
        self._require(batch, self.is_as_left())
        there = self._size - start  # what an earlier run wrote, and did not live to finish
        if self._end < self._size and not (there <= len(data) and self._stands(start, data[:there])):
            os.ftruncate(self._fd, self._end)  # half a line, of a batch that has not come again
            self._size, there = self._end, self._end - start
        if not self._stands(start, data[:there]):
            raise BadInput(f"{self.path} holds another batch {batch}, or part of it in front of others; use a new file")
        left = memoryview(data)[there:]
        if left:
            self._end = self._size = start + len(data)
        while left:
            left = left[os.write(self._fd, left) :]
        os.fsync(self._fd)
        self._require(batch, self.is_as_left() and self._stands(start, data))

    def is_as_left(self) -> bool:
        """Whether the path still leads to the file that was opened, and nobody has added to it or cut it."""
        found = os.fstat(self._fd)
        try:
            named = os.stat(str(self.path))
        except FileNotFoundError:
            return False
        return os.path.samestat(found, named) and found.st_size == self._size

    def _stands(self, start: int, data: bytes) -> bool:
        """Whether these bytes stand there."""
        return all(
            os.pread(self._fd, _READ_BYTES, start + at)[: len(data) - at] == data[at : at + _READ_BYTES]
            for at in range(0, len(data), _READ_BYTES)
        )

    def _require(self, batch: str, as_left: bool) -> None:
        if not as_left:
            raise StorageFailed(
                f"{self.path} was changed or removed by somebody else while this run wrote to it: batch {batch} is "
                "not finished; see what has become of the file, and run the command again: the batch comes again"
            )
