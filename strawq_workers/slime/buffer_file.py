"""The file of an in-memory data source: its cursor, its metadata and the groups in its buffer.

The rule: the file appears whole or not at all, carries a digest of its content, and holds values, never code. It is
named as slime names its own, with another ending, since slime's is a pickle.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, cast

import msgspec
from blake3 import blake3

from strawq.errors import BadInput, Damaged, FormatUnsupported, StorageFailed
from strawq_workers.durable import replace_file, sync_directory
from strawq_workers.slime.columns import classes_of
from strawq_workers.slime.dataset import Cursor
from strawq_workers.slime.sample import sample_class
from strawq_workers.slime.tree import Tree, TreeReader

MARK = b"strawq.buffer\n"
VERSION = 1
_DIGEST_BYTES = 32
_NAME = "global_dataset_state_dict_{}.msgpack"
_NUMBER = re.compile(r"global_dataset_state_dict_(\d+)\.msgpack$")


class Saved(msgspec.Struct, frozen=True):
    """What stands before the tree of metadata and buffer."""

    rollout_id: int
    cursor: Cursor
    identity: dict[str, Any]
    version: int = VERSION


def saved_path(directory: Path, rollout_id: int) -> Path:
    return directory / "rollout" / _NAME.format(rollout_id)


def saved_rollouts(directory: Path) -> list[int]:
    """Rollouts after which a state was saved, in order."""
    names = (path.name for path in (directory / "rollout").glob("*.msgpack"))
    return sorted(int(match[1]) for name in names if (match := _NUMBER.match(name)))


def in_words(rollouts: list[int]) -> str:
    """Their numbers, the first and the last of many."""
    few = rollouts if len(rollouts) <= 12 else [*rollouts[:6], "…", *rollouts[-5:]]
    return ", ".join(map(str, few)) or "none"


def write_saved(path: Path, saved: Saved, metadata: dict[str, Any], buffer: list[list[Any]]) -> None:
    """Write durably; a file of that name is replaced. `BadInput` names what cannot be stored, `StorageFailed` the
    file."""
    tree = Tree(None, {found: name for name, found in classes_of(cast(Hashable, sample_class())).items()})
    nodes = [tree.encode(metadata, "metadata"), tree.encode(buffer, "buffer")]
    content = msgspec.msgpack.encode([saved, *nodes])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, MARK + blake3(content).digest() + content)
        sync_directory(path.parent.parent)  # the directory may have been made just now
    except OSError as error:
        raise StorageFailed(f"{path} cannot be written: {error.strerror or error}") from error


def read_saved(path: Path) -> tuple[Saved, dict[str, Any], list[list[Any]]]:
    """What was written, the metadata and the buffer. `Damaged` if the bytes are not those that were written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read: {error.strerror or error}") from error
    if not data.startswith(MARK):
        raise BadInput(f"{path} is no state of a data source")
    digest, content = data[len(MARK) :][:_DIGEST_BYTES], data[len(MARK) + _DIGEST_BYTES :]
    if blake3(content).digest() != digest:
        raise Damaged(f"{path} is damaged (its bytes do not match its digest); restore it from a copy")
    head, metadata, buffer = msgspec.msgpack.decode(content)
    if head.get("version") != VERSION:
        raise FormatUnsupported(f"{path} is of version {head.get('version')}; this strawq reads {VERSION}")
    reader = TreeReader(classes_of(cast(Hashable, sample_class())), {})
    return msgspec.convert(head, Saved), reader.decode(metadata), reader.decode(buffer)
