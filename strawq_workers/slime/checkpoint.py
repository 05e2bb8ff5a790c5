"""The queue's checkpoint, taken and restored together with the model's.

The rule: a pair counts when its `committed_<n>.json` is there, which is written last. A restore never mixes steps: the
queue goes on from the pair that the model is of, on the same line if the model has seen all that was trained on it,
else on a new branch; parts that are missing or do not fit are errors that name the file and the remedy. Versions that a
lost model published stay what they are, since engines count as they like: they never cost a group.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from strawq.errors import BadInput, Contended
from strawq.limits import NAME_BYTES
from strawq.pool import Pool
from strawq_workers.asking import sure
from strawq_workers.slime.commits import Commit, commit_files, require_absent, write_commit
from strawq_workers.slime.lineage import (
    START,
    Candidate,
    History,
    candidates,
    is_of,
    model_binding,
    read_history,
    read_tracker,
    require_line,
)
from strawq_workers.slime.model_files import ModelFiles, model_directory, read_model

logger = logging.getLogger("strawq.slime")

LOOKS_MAX = 8
CONSUMER = "rollout-"
"""A batch of rollout n is taken under the consumer name `rollout-<n>`, so that it is found again by its number."""


class Restored(msgspec.Struct, frozen=True):
    """What `load` did. `rollout_id` is the rollout that the model has seen last (-1: none); `skipped` says which pairs
    were passed over, and why."""

    mode: Literal["new", "same queue", "rolled back"]
    rollout_id: int
    branch: str
    checkpoint: str = ""
    skipped: tuple[str, ...] = ()


class Standing(msgspec.Struct, frozen=True):
    """One look at the queue: the active branch, groups trained so far on it, groups of each open batch by consumer,
    whether it was ever used."""

    branch: str
    trained: int
    open_batches: dict[str, int]
    used: bool
    policy_version: str


def read_standing(pool: Pool, queue_name: str) -> Standing:
    def view(machine: Any) -> Standing:
        branch = machine.state.branch
        queue = branch.queues[queue_name]
        batches = {batch.consumer: len(batch.tasks) for batch in queue.batches.values()}
        return Standing(
            machine.state.active.row, queue.row.trained, batches, queue.row.submitted > 0, branch.meta.policy_version
        )

    found: Standing = pool.log.refresh(view)
    return found


def directories(args: Any) -> tuple[Path, ...]:
    """Where commits and models are looked for: `--load`, then `--save`."""
    given = (getattr(args, "load", None), getattr(args, "save", None))
    return tuple(dict.fromkeys(Path(path).expanduser().resolve() for path in given if path))


def checkpoint_name(branch: str, rollout_id: int) -> str:
    """In the pool. Branches are lines of training: each has a rollout 7 of its own."""
    name = f"rollout-{rollout_id}.{branch}"
    if len(name) > NAME_BYTES:
        raise BadInput(f"the name of branch {branch} is too long for its checkpoints; roll back to a shorter one")
    return name


# -- saving -----------------------------------------------------------------------------------------------------------


def save_pair(pool: Pool, queue_name: str, args: Any, rollout_id: int, branch: str) -> Commit:
    """Take the pool's checkpoint, bound to the model's files, and commit the pair. Batches of this rollout and earlier
    ones are still open in it: whoever restores it finishes them. `BadInput` if it is committed already, `BranchMoved`
    if the active branch is not the one that the model is of."""
    save = getattr(args, "save", None)
    if not save:
        raise BadInput("a joint checkpoint needs --save, the directory of the model checkpoints")
    base = Path(save).expanduser().resolve()
    require_absent(base, branch, rollout_id)
    model, note = _bound_model(args, base, rollout_id)
    bindings = {"model": model.blake3 if model is not None else "absent"}
    metadata = {"rollout_id": rollout_id, "model": note or (model.path if model is not None else "")}
    name, seq, standing = _take_checkpoint(pool, queue_name, rollout_id, branch, metadata, bindings)
    commit = Commit(
        rollout_id=rollout_id,
        run_id=pool.header.run_id,
        pool_id=pool.header.pool_id,
        pool=pool.path,
        queue=queue_name,
        branch=standing.branch,
        checkpoint=name,
        seq=seq,
        policy_version=standing.policy_version,
        trained=standing.trained,
        open_batches=standing.open_batches,
        model=model,
        model_note=note,
    )
    path = write_commit(base, commit)
    logger.info("rollout %d is committed: %s", rollout_id, path)
    return commit


def _take_checkpoint(
    pool: Pool, queue_name: str, rollout_id: int, branch: str, metadata: dict[str, Any], bindings: dict[str, str]
) -> tuple[str, int, Standing]:
    """The checkpoint's name and position, and how the queue stood there: as it did just before and just after.
    `BranchMoved` if the pool was rolled back meanwhile; then nothing is kept."""
    before = read_standing(pool, queue_name)
    name = checkpoint_name(branch, rollout_id)
    for _ in range(LOOKS_MAX):
        require_line(pool, branch, before.branch)
        if name in {point.name for point in pool.checkpoints()}:
            # Without a commit nobody can have restored it: an earlier save died in between.
            logger.warning("checkpoint %s of an unfinished save is taken anew", name)
            _drop(pool, name)
        seq = sure(pool, partial(_checkpoint, pool, name, metadata, bindings))
        after = read_standing(pool, queue_name)
        if after == before:
            return name, seq, after
        _drop(pool, name)
        before = after
    raise Contended(f"the batches of {pool.path} are taken and finished all the time by others: save again")


def _checkpoint(pool: Pool, name: str, metadata: dict[str, Any], bindings: dict[str, str], request: str) -> int:
    return pool.checkpoint(name, metadata, bindings, request_id=request)


def _drop(pool: Pool, checkpoint: str) -> None:
    sure(pool, lambda request: pool.drop_checkpoint(checkpoint, request_id=request))


def _bound_model(args: Any, base: Path, rollout_id: int) -> tuple[ModelFiles | None, str]:
    if getattr(args, "async_save", False):
        return None, "not bound: with --async-save its files may still be written"
    model = read_model(base, rollout_id)
    where = model_directory(base, rollout_id)
    return model, "" if model is not None else f"not bound: {where} was not there"


# -- restoring --------------------------------------------------------------------------------------------------------


def load_pair(pool: Pool, queue_name: str, args: Any, rollout_id: int | None = None) -> Restored:
    """Bring the queue to where the model is. `rollout_id`: the rollout that the model has seen last, -1 for none; None
    to find it: `--ckpt-step`, else the newest complete pair that the tracker file does not forbid. `BadInput` if the
    pair that is asked for is not complete."""
    bases = directories(args)
    history = read_history(pool)
    asked = _asked(args, rollout_id)
    began = _began_after(history)
    if asked is not None and (asked < 0 or asked == began):
        return _from_the_start(pool, queue_name, bases, history, asked)
    found = candidates(pool, bases, history)
    chosen, skipped = _exact(pool, queue_name, found, asked, bases) if asked is not None else _newest(found, bases)
    for reason in skipped:
        logger.warning("passed over: %s", reason)
    if chosen is None:
        if asked is None and any(candidate.fault for candidate in found):
            raise BadInput(f"no complete pair of model and queue: {'; '.join(skipped)}")
        return _without_pair(pool, queue_name, asked, skipped)
    assert chosen.commit is not None
    return _restore(pool, queue_name, chosen.commit, history, found, tuple(skipped))


def _asked(args: Any, rollout_id: int | None) -> int | None:
    step = getattr(args, "ckpt_step", None)
    if rollout_id is None:
        return None if step is None else int(step)
    if step is not None and int(step) != rollout_id:
        raise BadInput(
            f"the trainer goes on after rollout {rollout_id}, and --ckpt-step says {step}: --start-rollout-id must be "
            f"{int(step) + 1} (or left out)"
        )
    return rollout_id


def _exact(
    pool: Pool, queue_name: str, found: list[Candidate], asked: int, bases: tuple[Path, ...]
) -> tuple[Candidate | None, list[str]]:
    """The pair of that rollout on the job's line. `BadInput` says what is missing of it."""
    of_step = [candidate for candidate in found if candidate.rollout_id == asked]
    for candidate in of_step:
        if not candidate.fault:
            return candidate, []
    whole = sorted({candidate.rollout_id for candidate in found if not candidate.fault})
    remedy = f"complete pairs: {', '.join(map(str, whole)) or 'none'} (--ckpt-step)"
    if of_step:
        raise BadInput(f"rollout {asked} cannot be restored: {of_step[0].fault}; {remedy}")
    everywhere = commit_files(bases)
    abandoned = [path for path in everywhere if path.name == f"committed_{asked}.json"]
    if abandoned:
        branch = abandoned[0].parent.name
        raise BadInput(
            f"{abandoned[0]} is of branch {branch}, which branch {pool.branch()} left before rollout {asked}: return "
            f"to it with `strawq rollback {pool.path} {branch}`; {remedy}"
        )
    if not everywhere and not read_standing(pool, queue_name).used:
        return None, [f"there is no committed_{asked}.json: the model comes from a job without this queue"]
    raise BadInput(
        f"committed_{asked}.json is missing below {' and '.join(map(str, bases)) or '--save'}: the model of rollout "
        f"{asked} was saved without its queue, or the job died in between; {remedy}, or a new --rollout-data-dir to "
        "start with an empty queue"
    )


def _newest(found: list[Candidate], bases: tuple[Path, ...]) -> tuple[Candidate | None, list[str]]:
    tracker, skipped = read_tracker(bases), []
    highest = max((candidate.rollout_id for candidate in found), default=-1)
    if tracker is not None and tracker > highest:
        skipped.append(f"the tracker names step {tracker}, which has no commit")
        tracker = None
    for candidate in found:
        if tracker is not None and candidate.rollout_id > tracker:
            skipped.append(f"{candidate.path}: the tracker names step {tracker}")
        elif candidate.fault:
            skipped.append(candidate.fault)
        else:
            return candidate, skipped
    return None, skipped


def _without_pair(pool: Pool, queue_name: str, asked: int | None, skipped: list[str]) -> Restored:
    """No pair was ever committed: a new job, or one that died before its first commit. Its model is lost: what was
    collected is still there for the next one, and if some of it was trained, all of it begins anew."""
    standing = read_standing(pool, queue_name)
    began = -1 if asked is None else asked
    marked = START in {point.name for point in pool.checkpoints()}
    if marked and standing.trained:
        logger.warning("%d groups were trained by a model that was never saved", standing.trained)
        return _begin_anew(pool, began, tuple(skipped))
    if not marked:
        # So that a model from scratch can have the queue again as it was before the first rollout.
        sure(pool, lambda request: pool.checkpoint(START, {"rollout_id": began}, request_id=request))
    mode: Literal["new", "same queue"] = "same queue" if standing.used else "new"
    return Restored(mode, began, standing.branch, "", tuple(skipped))


def _began_after(history: History) -> int:
    """The rollout that the job's first model had seen; -1 if it came from scratch, or nobody knows."""
    point = history.checkpoints.get(START)
    noted: dict[str, Any] = msgspec.json.decode(point.metadata) if point is not None and point.metadata else {}
    found = noted.get("rollout_id")
    return found if isinstance(found, int) else -1


def _begin_anew(pool: Pool, began: int, skipped: tuple[str, ...] = ()) -> Restored:
    left = pool.branch()
    branch = sure(pool, lambda request: pool.rollback(START, request_id=request))
    logger.warning("the queue starts anew on branch %s; %s is left and kept", branch, left)
    return Restored("rolled back", began, branch, START, skipped)


def _from_the_start(pool: Pool, queue_name: str, bases: tuple[Path, ...], history: History, asked: int) -> Restored:
    """The model is the one that the job began with. If its line has commits, it begins a line of its own."""
    found = candidates(pool, bases, history, check_model=False)
    foreign = [candidate.fault for candidate in found if candidate.commit and not is_of(pool, candidate.commit)]
    if foreign:
        raise BadInput(f"{foreign[0]}; or choose a --save of its own for this pool")
    if not found:
        return _without_pair(pool, queue_name, asked, [])
    if START not in history.checkpoints:
        raise BadInput(
            f"the trainer starts from scratch, and {pool.path} has no checkpoint {START} any more: give --load to "
            "go on "
            "from a pair, or a new --save and --rollout-data-dir"
        )
    return _begin_anew(pool, asked)


def _restore(
    pool: Pool, queue_name: str, commit: Commit, history: History, found: list[Candidate], skipped: tuple[str, ...]
) -> Restored:
    now = read_standing(pool, queue_name)
    require_line(pool, history.branch, now.branch)
    if _is_tip(commit, history, found) and _has_seen_all(commit, now):
        logger.info("going on after rollout %d with the queue as it is, on branch %s", commit.rollout_id, pool.branch())
        return Restored("same queue", commit.rollout_id, now.branch, commit.checkpoint, skipped)
    bindings = {"model": model_binding(commit)}
    branch = sure(pool, lambda request: pool.rollback(commit.checkpoint, bindings, request_id=request))
    logger.warning(
        "rolled back to rollout %d: branch %s goes on from checkpoint %s, %s is left and kept",
        commit.rollout_id, branch, commit.checkpoint, history.branch,
    )  # fmt: skip
    return Restored("rolled back", commit.rollout_id, branch, commit.checkpoint, skipped)


def _is_tip(commit: Commit, history: History, found: list[Candidate]) -> bool:
    """Whether nothing was committed after this pair on the line that the queue is at the end of."""
    later = [
        candidate
        for candidate in found
        if candidate.path.parent.name in history.ends
        and (candidate.commit is None or candidate.commit.checkpoint != commit.checkpoint)
        and (candidate.commit is None or candidate.commit.seq > commit.seq)
    ]
    return not later and (commit.branch in history.ends or history.source == commit.checkpoint)


def _has_seen_all(commit: Commit, now: Standing) -> bool:
    """Whether the model has seen every group that was trained on the branch."""
    finished = sum(
        count
        for consumer, count in commit.open_batches.items()
        if is_up_to(consumer, commit.rollout_id) and consumer not in now.open_batches
    )
    return now.trained == commit.trained + finished


def is_up_to(consumer: str, rollout_id: int) -> bool:
    """Whether a batch of that consumer is of this rollout or an earlier one."""
    number = consumer.removeprefix(CONSUMER)
    return consumer.startswith(CONSUMER) and number.isdigit() and int(number) <= rollout_id
