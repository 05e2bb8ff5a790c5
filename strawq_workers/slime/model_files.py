"""A model checkpoint as one digest, cheap enough for hundreds of gigabytes.

The rule: the digest covers the name and size of every file, small files whole, and blocks spread over large ones. A
file that is missing, cut or of another step changes it; a single flipped bit in the middle of a large file may not,
which is the trainer's own format's to find.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from blake3 import blake3

from strawq.errors import StorageFailed

WHOLE_BYTES_MAX = 1 << 20
BLOCKS = 16
BLOCK_BYTES = 64 << 10


class ModelFiles(msgspec.Struct, frozen=True):
    """What is in a model checkpoint's directory. `path` is relative to the directory of the job."""

    path: str
    files: int
    bytes: int
    blake3: str


def model_directory(root: Path, rollout_id: int) -> Path:
    """Where slime's Megatron trainer saves the model after a rollout."""
    return root / f"iter_{rollout_id:07d}"


def read_model(root: Path, rollout_id: int) -> ModelFiles | None:
    """The digest of the model checkpoint below `root`; None if there is none (or nothing in it)."""
    directory = model_directory(root, rollout_id)
    try:
        files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".nfs"))
        if not files:
            return None
        digest, total = blake3(), 0
        for path in files:
            size = path.stat().st_size
            total += size
            digest.update(msgspec.json.encode((path.relative_to(directory).as_posix(), size)))
            _add_content(digest, path, size)
    except OSError as error:
        raise StorageFailed(f"model checkpoint {directory} cannot be read: {error}") from error
    return ModelFiles(directory.name, len(files), total, digest.hexdigest())


def _add_content(digest: blake3, path: Path, size: int) -> None:
    with open(path, "rb") as file:
        if size <= WHOLE_BYTES_MAX:
            digest.update(file.read(size))
            return
        for number in range(BLOCKS):
            file.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1), os.SEEK_SET)
            digest.update(file.read(BLOCK_BYTES))
