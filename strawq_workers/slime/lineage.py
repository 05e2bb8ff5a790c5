"""Which commits a job may go on from: those of the pool's active branch, and of its ancestors up to where it left them.

The rule: what was abandoned by a rollback is never chosen by its number. A pair is offered only if all its parts are
there and fit; one that was passed over is named with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from strawq.errors import BadInput, BranchMoved, FormatUnsupported, OperatorNeeded
from strawq.model import Checkpoint
from strawq.pool import Pool
from strawq_workers.slime.commits import Commit, commit_files, read_commit, rollout_of
from strawq_workers.slime.model_files import model_directory, read_model

START = "rollout-start"
"""Checkpoint of the pool before its first rollout."""
TRACKER = "latest_checkpointed_iteration.txt"


class Stretch(msgspec.Struct, frozen=True):
    """A branch up to log position `until`."""

    branch: str
    until: int


class History(msgspec.Struct, frozen=True):
    """The pool's lines and checkpoints, as of one look. `ends` are the active branch and those whose end it is a return
    to; `source` is the checkpoint that the last of these went on from."""

    stretches: tuple[Stretch, ...]
    checkpoints: dict[str, Checkpoint]
    ends: tuple[str, ...]
    source: str

    @property
    def branch(self) -> str:
        return self.stretches[0].branch


def require_line(pool: Pool, mine: str, active: str) -> None:
    """`BranchMoved` if somebody else has rolled the pool back: the trainer's model, of branch `mine`, has seen groups
    that are ready again on the active one."""
    if active != mine:
        raise BranchMoved(
            f"{pool.path} was rolled back from branch {mine} to {active}, and the model of this trainer is of {mine}: "
            f"nothing more of it is recorded; start the job again with --load, which goes on from where {active} does "
            f"(if the pool is paused then, `strawq resume {pool.path}`)"
        )


def read_history(pool: Pool) -> History:
    def view(machine: Any) -> History:
        state = machine.state
        row = state.branches[state.active.row]
        stretches, ends, source = [Stretch(row.id, state.seq + 1)], [row.id], row.source
        while row is not None and row.parent:
            stretches.append(Stretch(row.parent, row.base_seq))
            parent = state.branches.get(row.parent)
            if row.id == ends[-1] and source == row.parent:
                ends.append(row.parent)
                source = parent.source if parent is not None else ""
            row = parent
        points = {point.name: point for point in state.checkpoints.values()}
        return History(tuple(stretches), points, tuple(ends), source)

    found: History = pool.log.refresh(view)
    return found


class Candidate(msgspec.Struct, frozen=True):
    """A commit on the job's line, or why it cannot be used (`fault`)."""

    path: Path
    rollout_id: int
    commit: Commit | None
    fault: str = ""


def candidates(pool: Pool, bases: Sequence[Path], history: History, *, check_model: bool = True) -> list[Candidate]:
    """Commits of the line, newest first, each checked."""
    until = {stretch.branch: stretch.until for stretch in reversed(history.stretches)}
    found = []
    for path in commit_files(bases, list(until)):
        try:
            commit = read_commit(path)
        except (OperatorNeeded, FormatUnsupported) as error:
            found.append(Candidate(path, rollout_of(path), None, str(error)))
            continue
        point = history.checkpoints.get(commit.checkpoint)
        if is_of(pool, commit) and (point.seq if point is not None else commit.seq) > until[commit.branch]:
            continue  # of a future that was abandoned
        fault = _fault(pool, path, commit, point, check_model)
        found.append(Candidate(path, commit.rollout_id, commit, fault))
    return found


def _fault(pool: Pool, path: Path, commit: Commit, point: Checkpoint | None, check_model: bool) -> str:
    header = pool.header
    if not is_of(pool, commit):
        return (
            f"{path} belongs to pool {commit.pool_id[:12]} (then at {commit.pool}), and {pool.path} is pool "
            f"{header.pool_id[:12]}: give that pool as --rollout-data-dir"
        )
    if commit.run_id != header.run_id:
        return f"{path} is of run {commit.run_id!r}, the pool of run {header.run_id!r}: give its --rollout-queue-run-id"
    if point is None:
        return f"checkpoint {commit.checkpoint}, which {path} names, is not in {pool.path}: it was deleted"
    if dict(point.bindings).get("model") != model_binding(commit):
        return f"checkpoint {commit.checkpoint} in {pool.path} is bound to another model than {path} names"
    return _model_fault(path, commit) if check_model else ""


def is_of(pool: Pool, commit: Commit) -> bool:
    return commit.pool_id == pool.header.pool_id


def model_binding(commit: Commit) -> str:
    """What the pool's checkpoint says of the model."""
    return commit.model.blake3 if commit.model is not None else "absent"


def _model_fault(path: Path, commit: Commit) -> str:
    if commit.model is None:
        return ""
    base = path.parent.parent.parent
    there = read_model(base, commit.rollout_id)
    where = model_directory(base, commit.rollout_id)
    if there is None:
        return f"the model {where}, which {path} names, is missing: restore it, or choose another step"
    if there.blake3 != commit.model.blake3:
        return (
            f"the model {where} is not the one that {path} names ({there.files} files, {there.bytes} bytes; it had "
            f"{commit.model.files} files, {commit.model.bytes} bytes): restore it, or choose another step"
        )
    return ""


def read_tracker(bases: Sequence[Path]) -> int | None:
    """The step that Megatron's tracker file names; None if there is none, or it names no step (`release`)."""
    for base in bases:
        try:
            text = (base / TRACKER).read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise BadInput(f"{base / TRACKER} cannot be read: {error}") from error
        return int(text) if text.isascii() and text.isdigit() else None
    return None
