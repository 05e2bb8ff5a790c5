"""Prompts from files: JSONL (also gzipped) or Parquet, from a path, any fsspec URL, or `-` for stdin.

The rule: a file is read whole, checked row by row and digested before the first of its prompts is submitted, so that a
bad row on the last line stops the first. Memory is bounded: local files are read several times, what cannot be read
twice is spooled to a temporary file. A bad row is named by file and line.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Container, Iterable, Iterator
from typing import IO, Any, BinaryIO, Literal, cast

import msgspec
import numpy as np

from strawq.cli.options import digest_of
from strawq.errors import BadInput
from strawq.json_values import json_text
from strawq.samples import Prompt

Format = Literal["jsonl", "parquet"]

LINE_BYTES_MAX = 256 << 20
BAD_ROWS_SHOWN = 20
PARQUET_ROWS = 512
INPUT_KEYS = ("prompt", "text", "messages", "input_ids", "tokens")
"""Looked for in this order when no key is given."""

_decode = msgspec.json.Decoder().decode


class Keys(msgspec.Struct, frozen=True):
    """Names of the fields of a row; "" where there is none (for `input`: the first of `INPUT_KEYS` that is there)."""

    input: str = ""
    label: str = ""
    metadata: str = ""
    id: str = ""

    def used(self, names: Container[str]) -> tuple[str, ...]:
        """The fields that are read of a row, or of a table, that has these."""
        found = self.input or next((name for name in INPUT_KEYS if name in names), "")
        return tuple(name for name in (found, self.label, self.metadata, self.id) if name)


class BadRow(msgspec.Struct, frozen=True):
    """A row that is no prompt: where it stands, and what is wrong with it."""

    place: str
    reason: str


class Source:
    """One input file. `digest` is that of its content (BLAKE3, 32 hex digits), gzipped or not; `rows` counts all of
    its rows, bad ones too; `bad` holds the first of the `bad_count` bad ones."""

    def __init__(self, url: str, file: BinaryIO, kind: Format, local: bool) -> None:
        self.url = url
        self.kind = kind
        self.digest = ""
        self.rows = 0
        self.bad: list[BadRow] = []
        self.bad_count = 0
        self.keys = Keys()
        self._file = file
        self._state = _state(file) if local else None

    def require_unchanged(self) -> None:
        """`BadInput` if the file is not what was checked."""
        if self._state is not None and _state(self._file) != self._state:
            raise BadInput(f"{self.url} was changed while it was read; leave it alone and run the command again")

    def read(self) -> Iterator[tuple[str, Any]]:
        """Every row: its place, and a mapping or a `BadRow`."""
        self._file.seek(0)
        return self._parquet() if self.kind == "parquet" else self._lines()

    def content(self) -> IO[bytes]:
        """The bytes from their start on, without the gzip around them."""
        self._file.seek(0)
        magic = self._file.read(2)
        self._file.seek(0)
        return cast(IO[bytes], gzip.GzipFile(fileobj=self._file)) if magic == b"\x1f\x8b" else self._file

    def _lines(self) -> Iterator[tuple[str, Any]]:
        lines = self.content()
        number = 0
        while line := self._line(lines, number + 1):
            number += 1
            place = f"{self.url}:{number}"
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            if len(text) > LINE_BYTES_MAX:
                raise BadInput(f"{place}: the line is longer than {LINE_BYTES_MAX >> 20} MiB; is this JSONL?")
            try:
                row = _decode(text)
                if isinstance(row, dict):
                    again = _repeated(text, self.keys.used(row))
                    yield place, BadRow(place, f"{again!r} is there more than once") if again else row
                else:
                    yield place, BadRow(place, f"{_kind(row)} where an object is needed (JSONL: one object a line)")
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                yield place, BadRow(place, f"not JSON ({_refused(text, error)})")

    def _line(self, lines: IO[bytes], number: int) -> bytes:
        with _reading(f"{self.url}:{number}"):
            return lines.readline(LINE_BYTES_MAX + 1)

    def _parquet(self) -> Iterator[tuple[str, Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        number = 0
        try:
            file = pq.ParquetFile(self._file)
            names = file.schema_arrow.names
            wanted = set(self.keys.used(names)) if self.keys.input else set(names)
            for name in self.keys.used(names):
                if names.count(name) > 1:
                    raise BadInput(
                        f"{self.url} has {names.count(name)} columns {name!r}; keep or name the one that is meant"
                    )
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[n for n in names if n in wanted]):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{self.url}: row {number}", row
        except (pa.ArrowException, OSError, ValueError) as error:
            raise BadInput(f"{self.url} is not a readable Parquet file: {error}") from error


def _refused(text: str | bytes, error: Exception) -> str:
    """Why the decoder refused a text. Half of a surrogate pair is no character, and it calls that a text that is cut
    off, or names a place in it."""
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError as half:
        return f"\\u{ord(half.object[half.start]):04x} is half of a surrogate pair, which is no character"
    except (ValueError, RecursionError):
        pass
    return str(error)


def _repeated(line: bytes, names: Iterable[str]) -> str:
    """The first of these fields that a row has more than once. The decoder takes the last and says nothing, so names
    are counted in the text first: only a line that has one twice, somewhere, is decoded pair by pair."""
    for name in names:
        if sum(line.count(spelling) for spelling in _spellings(name)) > 1:
            pairs = json.loads(line, object_pairs_hook=list, parse_int=str, parse_float=str)
            if [key for key, _ in pairs].count(name) > 1:
                return name
    return ""


@functools.cache
def _spellings(name: str) -> frozenset[bytes]:
    """A name as it is, and as writers that keep to ASCII have it."""
    return frozenset(json.dumps(name, ensure_ascii=ascii).encode() for ascii in (True, False))


def _state(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


@contextlib.contextmanager
def opened_source(url: str, kind: Format | None, keys: Keys) -> Iterator[Source]:
    """The file behind `url`, checked row by row. `BadInput` if it cannot be read, is empty, or has no prompt at
    all."""
    with contextlib.ExitStack() as stack:
        file, local = _open(url, stack)
        if kind is None:
            kind = _guess(url, file)
        source = Source(url, file, kind, local)
        source.keys = keys
        with _reading(url):
            source.digest = digest_of(source.content())[:32]
        _check(source)
        yield source


def _open(url: str, stack: contextlib.ExitStack) -> tuple[BinaryIO, bool]:
    """A file that can be read again and again, and whether it is the original."""
    if not url or "\0" in url:
        raise BadInput(f"{url!r} is no file; name a path, a URL, or - for stdin")
    path = url.removeprefix("file://")
    try:
        if url == "-":
            return _spooled(sys.stdin.buffer, stack), False
        if "://" not in path and "::" not in path:
            plain = stack.enter_context(open(os.path.expanduser(path), "rb"))  # noqa: SIM115
            return (plain, True) if plain.seekable() else (_spooled(plain, stack), False)
        import fsspec

        with fsspec.open(url, "rb") as remote:
            return _spooled(remote, stack), False
    except Exception as error:  # stores behind fsspec raise errors of their own kinds
        raise _unreadable(url, error) from error


def _spooled(file: Any, stack: contextlib.ExitStack) -> BinaryIO:
    copy = stack.enter_context(tempfile.TemporaryFile(prefix="strawq-input-"))  # noqa: SIM115
    shutil.copyfileobj(file, copy, 1 << 20)
    return cast(BinaryIO, copy)


@contextlib.contextmanager
def _reading(place: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadInput(f"{place}: the gzip data are damaged ({error}); nothing was submitted") from error
    except OSError as error:
        raise _unreadable(place, error) from error


def _unreadable(url: str, error: BaseException) -> BadInput:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and error.name:
        return BadInput(
            f"{url} cannot be read: this kind of URL needs the package {error.name}; `pip install {error.name}`"
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return BadInput(f"{url} cannot be read: {reason}; check the path or URL")


def _guess(url: str, file: BinaryIO) -> Format:
    file.seek(0)
    return "parquet" if file.read(4) == b"PAR1" or url.endswith((".parquet", ".pq")) else "jsonl"


def _check(source: Source) -> None:
    """Look at every row; counts and bad rows go to `source`, and the input key is settled."""
    for place, row in source.read():
        source.rows += 1
        if not source.keys.input and not isinstance(row, BadRow):
            source.keys = _settle(source, row)
        found = row if isinstance(row, BadRow) else None
        if found is None:
            try:
                to_prompt(row, source.keys, 0, place)
            except BadInput as error:
                found = BadRow(place, str(error).removeprefix(f"{place}: "))
        if found is not None:
            source.bad_count += 1
            if len(source.bad) < BAD_ROWS_SHOWN:
                source.bad.append(found)
    if not source.rows:
        raise BadInput(f"{source.url} is empty: there is no prompt to submit")


def _settle(source: Source, row: dict[str, Any]) -> Keys:
    for name in INPUT_KEYS:
        if name in row:
            return msgspec.structs.replace(source.keys, input=name)
    raise BadInput(
        f"{source.url}: which field holds the prompt? The first row has {_names(row)}; say it with --input-key"
    )


def _names(row: dict[str, Any]) -> str:
    names = ", ".join(map(repr, list(row)[:12]))
    return names + (", ..." if len(row) > 12 else "") if names else "no fields"


def to_prompt(row: dict[str, Any], keys: Keys, samples: int, place: str) -> Prompt:
    """The prompt in a row. `BadInput` names `place` and the field."""
    value = _field(row, keys.input, place)
    what: dict[str, Any]
    if isinstance(value, str) and value:
        what = {"text": value}
    elif isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        json_text(value, f"{place}: {keys.input!r}")
        if any(not isinstance(message.get("role"), str) for message in value):
            raise BadInput(f"{place}: a chat message in {keys.input!r} has no 'role'")
        what = {"messages": value}
    elif isinstance(value, list) and value and all(type(token) is int for token in value):
        if not all(0 <= token < 1 << 31 for token in value):
            raise BadInput(f"{place}: a token id in {keys.input!r} is negative or does not fit 32 bits")
        what = {"tokens": np.array(value, np.int32)}
    else:
        raise BadInput(f"{place}: {keys.input!r} is {_kind(value)}, not text, chat messages or token ids")
    return Prompt(
        group_id=_group_id(row, keys.id, place),
        label=_label(row, keys.label, place),
        metadata=_metadata(row, keys.metadata, place),
        samples=samples,
        **what,
    )


def _field(row: dict[str, Any], key: str, place: str) -> Any:
    if key not in row:
        raise BadInput(f"{place}: there is no {key!r} (it has {_names(row)})")
    return row[key]


def _group_id(row: dict[str, Any], key: str, place: str) -> str:
    value = _field(row, key, place) if key else ""
    if isinstance(value, str) or type(value) is int:
        return str(value)
    raise BadInput(f"{place}: {key!r} is {_kind(value)}, not text or a whole number")


def _label(row: dict[str, Any], key: str, place: str) -> str | None:
    """Text as it is; any other JSON value as its JSON text."""
    value = _field(row, key, place) if key else None
    return value if value is None or isinstance(value, str) else json_text(value, f"{place}: {key!r}")


def _metadata(row: dict[str, Any], key: str, place: str) -> dict[str, Any]:
    """An object, or text that holds one; null is none."""
    value = _field(row, key, place) if key else None
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = _decode(value)
        except msgspec.MsgspecError as error:
            raise BadInput(f"{place}: {key!r} is text that is not JSON ({_refused(value, error)})") from error
    if not isinstance(value, dict):
        raise BadInput(f"{place}: {key!r} is {_kind(value)}, not an object")
    json_text(value, f"{place}: {key!r}")
    return value


def _kind(value: Any) -> str:
    if value in ("", [], {}) and value is not False and not isinstance(value, (int, float)):
        return f"empty ({'text' if isinstance(value, str) else 'list' if isinstance(value, list) else 'object'})"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
