"""Prompts from a dataset, epoch after epoch, as a pure function of a cursor.

The rule: what comes after a cursor depends on the cursor, the file and the seed, and on nothing else. So a cursor that
is committed together with its prompts neither skips nor repeats one, whoever reads on from it. Group indices and sample
indices only grow, over all epochs. The shuffle of an epoch has a random state of its own.
"""

from __future__ import annotations

import copy
import hashlib
import io
import random
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from strawq.errors import BadInput
from strawq_workers.slime.prompt_text import ChatTemplate
from strawq_workers.slime.sample import sample_class

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$", re.DOTALL)
_PARQUET_ROWS = 512
_decode = msgspec.json.Decoder().decode


class DatasetError(BadInput, RuntimeError):
    """The dataset cannot give what is asked for: it is empty, or the cursor is not one of it."""

    kind = "dataset"


class Cursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a dataset has been read, under slime's names: `sample_offset` rows of epoch `epoch_id`; the next group
    has the index `sample_group_index`, its first sample `sample_index`. `metadata` is the user's."""

    sample_offset: int = 0
    epoch_id: int = 0
    sample_group_index: int = 0
    sample_index: int = 0
    metadata: dict[str, Any] = {}

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Cursor:
        """Raises `DatasetError` for something else than a cursor."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise DatasetError(f"{text!r:.200} is no dataset cursor: {error}") from error


class PromptDataset:
    """The rows of `args.prompt_data` (a path or fsspec URL of JSONL or Parquet, with `@[start:stop]` for some of its
    rows), read and checked when it is made. Without `prompt_data` it gives empty prompts without end, as slime does.

    Raises `BadInput` that names the file, row and field."""

    def __init__(self, args: Any, option: str = "--prompt-data") -> None:
        self._option = option
        self.group_size = int(getattr(args, "n_samples_per_prompt", None) or 1)
        self.seed = int(getattr(args, "rollout_seed", 42))
        self.shuffle = bool(getattr(args, "rollout_shuffle", False))
        self.input_key = getattr(args, "input_key", None) or "input"
        self.label_key = getattr(args, "label_key", None)
        self.metadata_key = getattr(args, "metadata_key", None) or "metadata"
        self.tool_key = getattr(args, "tool_key", None) or "tools"
        self.sha256 = ""
        self.row_slice: str | None = None
        self.path: str | None = getattr(args, "prompt_data", None) or None
        self._template = ChatTemplate(args)
        self._rows: list[Any] = []
        self._order: tuple[int, list[int]] = (-1, [])
        if self.path is not None:
            self._load(self.path)

    def __len__(self) -> int:
        return len(self._rows)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a cursor to mean the same: content (sha256), rows, keys, seed and shuffle."""
        return {
            "dataset": {
                "sha256": self.sha256,
                "row_slice": self.row_slice,
                "rows": len(self._rows),
                "input_key": self.input_key,
                "label_key": self.label_key,
                "metadata_key": self.metadata_key,
                "tool_key": self.tool_key,
                **self._template.identity(),
            },
            "dataset_size": len(self._rows),
            "n_samples_per_prompt": self.group_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def take(self, cursor: Cursor, count: int) -> tuple[list[Any], Cursor]:
        """The next `count` prompts, one sample each, and the cursor behind them; across as many epochs as it takes.

        Each sample has its `group_index`, and as `index` that of its group's first sample; the group has
        `n_samples_per_prompt` of them. Raises `DatasetError` ("empty dataset", "invalid dataset offset")."""
        if count < 0:
            raise BadInput(f"num_samples must be nonnegative, not {count}")
        if self.path is not None and count and not self._rows:
            raise DatasetError(f"empty dataset: {self.path} has no rows; check {self._option}")
        kind = sample_class()
        samples = []
        epoch, offset = cursor.epoch_id, cursor.sample_offset
        if offset < 0 or epoch < 0 or (self.path is not None and offset > len(self._rows)):
            raise DatasetError(
                f"invalid dataset offset: {offset} in epoch {epoch} of {self.path} with {len(self._rows)} rows"
            )
        for at in range(count):
            if self.path is not None and offset == len(self._rows):
                epoch, offset = epoch + 1, 0
            sample = kind() if self.path is None else self._sample(self._row_of(epoch, offset), kind)
            sample.group_index = cursor.sample_group_index + at
            sample.index = cursor.sample_index + at * self.group_size
            samples.append(sample)
            offset += 1
        after = Cursor(
            offset,
            epoch,
            cursor.sample_group_index + count,
            cursor.sample_index + count * self.group_size,
            cursor.metadata,
        )
        return samples, after

    def prompts(self) -> list[Any]:
        """All prompts once, in the order of the file, without indices: for evaluation."""
        kind = sample_class()
        return [self._sample(at, kind) for at in range(len(self._rows))]

    def _row_of(self, epoch: int, offset: int) -> int:
        if not self.shuffle:
            return offset
        known, order = self._order
        if known != epoch:
            order = list(range(len(self._rows)))
            random.Random(self.seed + epoch).shuffle(order)
            self._order = (epoch, order)
        return order[offset]

    # -- reading ------------------------------------------------------------------------------------------------

    def _load(self, given: str) -> None:
        match = _SLICE.match(given)
        url, rows = given, slice(None)
        if match is not None:
            url = match["path"]
            rows = slice(*(int(match[name]) if match[name] else None for name in ("start", "stop")))
            self.row_slice = f"[{match['start']}:{match['stop']}]"
        digest = hashlib.sha256()
        try:
            found = _parquet(url, digest) if _is_parquet(url) else _lines(url, digest)
            numbered = list(enumerate(found, 1))
        except BadInput:
            raise
        except Exception as error:  # stores behind fsspec raise errors of their own kinds
            raise BadInput(
                f"{url} cannot be read: {str(error) or type(error).__name__}; check {self._option}"
            ) from error
        self.sha256 = digest.hexdigest()
        for number, row in numbered[rows]:
            sample = self._sample_of(row, f"{url}: row {number}", sample_class())
            if self._template.keeps(sample):
                self._rows.append((row, f"{url}: row {number}"))

    def _sample(self, at: int, kind: Any) -> Any:
        stored, place = self._rows[at]
        return self._sample_of(stored, place, kind)

    def _sample_of(self, stored: Any, place: str, kind: Any) -> Any:
        """A new sample of a row."""
        row = copy.deepcopy(stored) if isinstance(stored, dict) else _object(stored, place)
        if self.input_key not in row:
            names = ", ".join(map(repr, islice(row, 12)))
            raise BadInput(f"{place}: there is no {self.input_key!r} (it has {names}); say the field with --input-key")
        if self.label_key and self.label_key not in row:
            raise BadInput(f"{place}: there is no {self.label_key!r}, which --label-key names")
        metadata = _metadata(row.get(self.metadata_key), f"{place}: {self.metadata_key!r}")
        tools = row.get(self.tool_key)
        if tools is not None:
            tools = _object_in(tools, f"{place}: {self.tool_key!r}")
            metadata["tools"] = tools
        sample = kind(label=row[self.label_key] if self.label_key else None, metadata=metadata)
        value = row[self.input_key]
        if isinstance(value, list) and value and all(type(token) is int for token in value):
            if not all(0 <= token < 1 << 31 for token in value):
                raise BadInput(f"{place}: a token id in {self.input_key!r} is negative or does not fit 32 bits")
            sample.tokens = value
        elif isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_message, value))):
            sample.prompt = self._template.apply(value, tools, place)
        else:
            raise BadInput(f"{place}: {self.input_key!r} is {value!r:.80}, not text, chat messages or token ids")
        return sample


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _is_parquet(url: str) -> bool:
    return url.endswith((".parquet", ".pq"))


def _open(url: str) -> Any:
    import fsspec

    return fsspec.open(url, "rb", compression="infer", expand=True)


def _lines(url: str, digest: Any) -> Iterator[bytes]:
    with _open(url) as file:
        for number, line in enumerate(file):
            digest.update(line)
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
            if text.strip():
                yield bytes(text.strip())


def _parquet(url: str, digest: Any) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with _open(url) as file:
        data = file.read()
    digest.update(data)
    for batch in pq.ParquetFile(io.BytesIO(data)).iter_batches(batch_size=_PARQUET_ROWS):
        yield from batch.to_pylist()


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{place} is not JSON ({error}); JSONL has one object a line") from error
    if not isinstance(row, dict):
        raise BadInput(f"{place} is a {type(row).__name__} where an object is needed (JSONL: one object a line)")
    return row


def _object_in(value: Any, what: str) -> Any:
    """A value that may be written as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return _decode(value)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadInput(f"{what} is text that is not JSON ({error})") from error


def _metadata(value: Any, what: str) -> dict[str, Any]:
    found = _object_in(value, what) if value else {}
    if not isinstance(found, dict):
        raise BadInput(f"{what} is {found!r:.80}, not an object")
    return dict(found)
