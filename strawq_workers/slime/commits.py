"""`committed_<n>.json`: that a model and a queue belong together.

The rule: the file is written last, whole or not at all, and never again. It names the pool's checkpoint and the model's
files by digest, and carries a digest of itself; one that was edited, cut or copied under another name is refused with
its path.

They lie in `<save>/strawq/<branch>/`: a branch of the pool is a line of training, and each has commits of its own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from blake3 import blake3

from strawq.errors import BadInput, Damaged, FormatUnsupported, StorageFailed
from strawq_workers.durable import sync_directory
from strawq_workers.slime.model_files import ModelFiles

DIRECTORY = "strawq"
VERSION = 1


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete pair after rollout `rollout_id`. `trained` counts the groups that had been trained on the branch, and
    `open_batches` the groups of each rollout that was collected and not finished, when the checkpoint was taken.
    `model` is None where there were no files to bind; `model_note` says why. `blake3` is over all the rest."""

    format: Literal["strawq-joint-checkpoint"] = "strawq-joint-checkpoint"
    version: Literal[1] = 1
    rollout_id: int
    run_id: str
    pool_id: str
    pool: str
    queue: str
    branch: str
    checkpoint: str
    seq: int
    policy_version: str
    trained: int
    open_batches: dict[str, int]
    model: ModelFiles | None = None
    model_note: str = ""
    blake3: str = ""


def commit_path(save: Path, branch: str, rollout_id: int) -> Path:
    return save / DIRECTORY / branch / f"committed_{rollout_id}.json"


def _digest(commit: Commit) -> str:
    return blake3(msgspec.json.encode(msgspec.structs.replace(commit, blake3=""))).hexdigest()


def write_commit(save: Path, commit: Commit) -> Path:
    """Publish the commit, durably. `BadInput` if one of this rollout and branch is there."""
    path = commit_path(save, commit.branch, commit.rollout_id)
    data = msgspec.json.encode(msgspec.structs.replace(commit, blake3=_digest(commit)))
    staged = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(staged, "xb") as file:
            file.write(msgspec.json.format(data, indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(staged, path)
        finally:
            os.unlink(staged)
        for directory in (path.parent, path.parent.parent, save):
            sync_directory(directory)
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise StorageFailed(f"{path} cannot be written: {error}") from error
    return path


def _taken(path: Path) -> BadInput:
    return BadInput(f"{path} is there already and is never overwritten; roll back first, or use another --save")


def require_absent(save: Path, branch: str, rollout_id: int) -> None:
    """`BadInput` if this rollout of this branch is committed already."""
    path = commit_path(save, branch, rollout_id)
    if path.exists():
        raise _taken(path)


class _Version(msgspec.Struct):
    version: int


def read_commit(path: Path) -> Commit:
    """`Damaged` names the file if it is not what was written, `FormatUnsupported` one of a newer strawq."""
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_Version).version
        if version > VERSION:
            raise FormatUnsupported(f"{path} is of version {version}, and this strawq reads {VERSION}: use a newer one")
        commit = msgspec.json.decode(data, type=Commit)
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(f"{path} is not a commit of strawq ({error}); restore it from a copy, or remove it") from error
    if commit.blake3 != _digest(commit) or path != commit_path(_base(path), commit.branch, commit.rollout_id):
        raise Damaged(f"{path} was changed or moved after it was written; restore it from a copy, or remove it")
    return commit


def _base(path: Path) -> Path:
    return path.parent.parent.parent


def rollout_of(path: Path) -> int:
    """The number in a commit's name; -1 if it is not one."""
    number = path.stem.removeprefix("committed_")
    return int(number) if number.isascii() and number.isdigit() else -1


def commit_files(bases: Iterable[Path], branches: Sequence[str] | None = None) -> list[Path]:
    """Commits of these branches (None: of all) below the given directories, the highest rollout first."""
    found: dict[Path, Path] = {}
    for base in bases:
        root = base / DIRECTORY
        names = branches if branches is not None else sorted(p.name for p in root.iterdir()) if root.is_dir() else []
        for name in names:
            for path in (root / name).glob("committed_*.json"):
                if rollout_of(path) >= 0:
                    found.setdefault(path.resolve(), path)
    return sorted(found.values(), key=lambda path: (-rollout_of(path), str(path)))
