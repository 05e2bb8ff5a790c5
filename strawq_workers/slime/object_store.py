"""The data source in memory, for `--rollout-data-transport object-store`: slime's buffer over a dataset.

The rule: a group that came from `get_samples` is the caller's until `add_samples` brings it back, and what was brought
back comes out before anything new. Between `save` and `load` lies one file: the dataset's cursor with what it belongs
to, the metadata, and every buffered group with its tensors. Nothing else survives the process; `StrawDataSource` is for
that.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from strawq.errors import BadInput
from strawq.model import UNVERSIONED, policy_number
from strawq_workers.slime.arguments import validate_rollout_arguments, value_of
from strawq_workers.slime.buffer_file import Saved, in_words, read_saved, saved_path, saved_rollouts, write_saved
from strawq_workers.slime.dataset import Cursor, PromptDataset
from strawq_workers.slime.places import expanded, require_places
from strawq_workers.worker.hooks import as_raised, load_hook

log = logging.getLogger("strawq.slime")

Samples = list[list[Any]]
BufferFilter = Callable[[Any, Any, Samples, int], Samples]


class ObjectStoreDataSource:
    """See the module's docstring. Safe from many threads; its methods have slime's names and meanings."""

    def __init__(self, args: Any) -> None:
        """Raises `BadInput` for flags or data that cannot be obeyed."""
        validate_rollout_arguments(args)
        require_places(args, pool=False)
        self.args = args
        self.dataset = PromptDataset(args)
        self.buffer: Samples = []
        self._cursor = Cursor()
        self._lock = threading.RLock()
        self._filter = _buffer_filter(args)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="strawq-data")
        self._closed = False

    # -- samples ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self.dataset)

    def get_samples(self, num_samples: int) -> Samples:
        """`num_samples` groups: what the buffer's filter gives first, then fresh ones, over as many epochs as it takes.

        Raises `BadInput` for a negative number, `DatasetError` for an empty dataset; then nothing has moved."""
        if num_samples < 0:
            raise BadInput("num_samples must be nonnegative")
        self._require_open()
        with self._lock:
            kept = list(self.buffer)
            try:
                found = self._from_buffer(num_samples)
                prototypes, after = self.dataset.take(self._cursor, num_samples - len(found))
            except BaseException:
                self.buffer[:] = kept
                raise
            self._cursor = after
        return found + [self._group_of(prototype) for prototype in prototypes]

    async def get_samples_async(self, num_samples: int) -> Samples:
        """`get_samples` in a thread, so that the event loop goes on. If the caller is cancelled meanwhile, the groups
        go back."""
        self._require_open()
        future = self._reader.submit(self.get_samples, num_samples)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back_late)
            raise

    def add_samples(self, samples: Samples) -> None:
        """Bring groups back. `BadInput` for something else than a list of groups of `n_samples_per_prompt` samples;
        then none is taken."""
        if not isinstance(samples, list):
            raise BadInput(f"samples must be a list of groups, not {type(samples).__name__}")
        size = self.dataset.group_size
        for at, group in enumerate(samples):
            if not isinstance(group, list):
                raise BadInput(f"samples must be a list of groups: item {at} is a {type(group).__name__}")
            if len(group) != size:
                raise BadInput(f"group {at} has {len(group)} samples; --n-samples-per-prompt is {size}")
        self._require_open()
        with self._lock:
            self.buffer.extend(samples)

    def get_buffer_length(self) -> int:
        """Groups that wait in the buffer."""
        return len(self.buffer)

    def _from_buffer(self, count: int) -> Samples:
        if not self.buffer or not count:
            return []
        try:
            found: Any = self._filter(self.args, None, self.buffer, count)
        except (Exception, SystemExit) as error:
            raise as_raised("the function of --buffer-filter-path", error) from error
        if not isinstance(found, list) or len(found) > count or not all(isinstance(group, list) for group in found):
            raise BadInput(
                f"--buffer-filter-path {value_of(self.args, 'buffer_filter_path')} answered something else than at "
                "most "
                f"{count} groups: remove groups from the buffer and return them as a list"
            )
        return list(found)

    def _group_of(self, prototype: Any) -> list[Any]:
        group = [copy.deepcopy(prototype) for _ in range(self.dataset.group_size)]
        for at, sample in enumerate(group):
            sample.index = prototype.index + at
        return group

    def _give_back_late(self, future: Any) -> None:
        if future.cancelled() or future.exception() is not None or self._closed:
            return
        self.add_samples(future.result())

    # -- metadata and state -------------------------------------------------------------------------------------

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Keep values under these keys; they are saved with the rest."""
        with self._lock:
            self._cursor = msgspec.structs.replace(self._cursor, metadata={**self._cursor.metadata, **metadata})

    def get_metadata(self) -> dict[str, Any]:
        return copy.deepcopy(self._cursor.metadata)

    @property
    def metadata(self) -> dict[str, Any]:
        return self._cursor.metadata

    @property
    def epoch_id(self) -> int:
        return self._cursor.epoch_id

    @property
    def sample_offset(self) -> int:
        return self._cursor.sample_offset

    @property
    def sample_group_index(self) -> int:
        return self._cursor.sample_group_index

    @property
    def sample_index(self) -> int:
        return self._cursor.sample_index

    def state_dict(self) -> dict[str, Any]:
        """Cursor, metadata and buffer under slime's keys. Groups in it are the buffer's own."""
        with self._lock:
            cursor: dict[str, Any] = msgspec.to_builtins(self._cursor)
            return {**cursor, "metadata": self.get_metadata(), "buffer": list(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from such a state. `BadInput` for keys that it lacks."""
        given = {name: value for name, value in state.items() if name != "buffer"}
        try:
            cursor = msgspec.convert(given, Cursor)
        except msgspec.ValidationError as error:
            raise BadInput(f"this is no state of a data source: {error}") from error
        buffer = list(state.get("buffer") or [])
        with self._lock:
            previous, self.buffer = self.buffer, []
            try:
                self.add_samples(buffer)
            except BadInput:
                self.buffer = previous
                raise
            self._cursor = cursor

    # -- checkpoints --------------------------------------------------------------------------------------------

    def save(self, rollout_id: int) -> None:
        """Write the state to `<save>/rollout/`, durably. `BadInput` without `--save`, or for what cannot be stored.

        A rollout of ours that works in the background on this data source gives back what it has, which is saved with
        the rest, and begins again at the next call."""
        directory = getattr(self.args, "save", None)
        if not directory:
            raise BadInput("saving needs --save, the directory of the checkpoints")
        # What a fully async rollout has in hand is behind the cursor already: it comes back into the buffer first.
        rollouts = sys.modules.get("strawq_workers.rollout.station")
        if rollouts is not None:
            rollouts.give_back(self)
        with self._lock:
            saved = Saved(
                rollout_id=int(rollout_id),
                cursor=msgspec.structs.replace(self._cursor, metadata={}),
                identity=self.dataset.identity(),
            )
            write_saved(saved_path(expanded(directory), rollout_id), saved, self._cursor.metadata, self.buffer)

    def load(self, rollout_id: int | None = None) -> bool:
        """Go on from the state that was saved after `rollout_id` in `--load`; None: after the newest. Returns whether
        there was one. Where none was ever saved, and for a model from scratch (-1), the dataset starts from its
        beginning, which is said in the log, as slime does.

        `BadInput` if there are states, but not of that rollout, and for a state of another dataset or other flags, with
        what differs; `Damaged` for bytes that were changed."""
        directory = getattr(self.args, "load", None)
        if not directory:
            return False
        base = expanded(directory)
        there = saved_rollouts(base)
        if rollout_id is None:
            rollout_id = there[-1] if there else -1
        path = saved_path(base, rollout_id)
        if rollout_id < 0 or rollout_id not in there:
            _require_none(path, rollout_id, there)
            log.warning("%s: the dataset starts from its beginning", _why(base, there))
            return False
        saved, metadata, buffer = read_saved(path)
        self._require_same(path, saved)
        self.load_state_dict({**msgspec.to_builtins(saved.cursor), "metadata": metadata, "buffer": buffer})
        return True

    def _require_same(self, path: Path, saved: Saved) -> None:
        now = self.dataset.identity()
        for name, value in now.items():
            if saved.identity.get(name) != value:
                raise BadInput(
                    f"Data source checkpoint differs in {name}: {path} has {saved.identity.get(name)}, the flags "
                    "now say "
                    f"{value}"
                )

    def close(self) -> None:
        """Wait for a read that is under way. Again: nothing."""
        self._closed = True
        self._reader.shutdown()

    def _require_open(self) -> None:
        if self._closed:
            raise BadInput("the data source is closed")


def _require_none(path: Path, rollout_id: int, there: list[int]) -> None:
    """`BadInput` if a job that goes on after this rollout would skip what it should have."""
    foreign = path.with_suffix(".pt")
    if foreign.exists():
        raise BadInput(
            f"{foreign} was written by slime's own data source, as a pickle, which strawq does not read: start "
            "from the beginning with another --load, or go on with slime's data source"
        )
    if rollout_id >= 0 and there:
        raise BadInput(
            f"{path} is not there: {path.parent} has the states after rollouts {in_words(there)}; choose "
            "one of them with --ckpt-step, or another --load"
        )


def _why(base: Path, there: list[int]) -> str:
    if not there:
        return f"no state of a data source was saved in {base}"
    return f"the model is not one that was saved in {base}, though states after {len(there)} rollouts are there"


def pop_first(args: Any, rollout_id: Any, buffer: Samples, num_samples: int) -> Samples:
    """What came back first."""
    del args, rollout_id
    found = buffer[:num_samples]
    del buffer[:num_samples]
    return found


def pop_oldest(args: Any, rollout_id: Any, buffer: Samples, num_samples: int) -> Samples:
    """Groups with the oldest weight version first, those without a number last, ties as they came back."""
    buffer.sort(key=_oldest_version)
    return pop_first(args, rollout_id, buffer, num_samples)


def _oldest_version(group: list[Any]) -> float:
    numbers = [policy_number(str(version)) for sample in _flat(group) for version in sample.weight_versions or ()]
    return min((number for number in numbers if number != UNVERSIONED), default=float("inf"))


def _flat(group: list[Any]) -> list[Any]:
    return [one for item in group for one in (_flat(item) if isinstance(item, list) else [item])]


def _buffer_filter(args: Any) -> BufferFilter:
    path = value_of(args, "buffer_filter_path")
    if path:
        return load_hook(path, "--buffer-filter-path")
    return pop_oldest if value_of(args, "buffer_sort_by_staleness") else pop_first
