"""Groups in the hands of a sampler that takes samples and gives samples back: who holds what, and what becomes of it.

The rule: a group is held from when it is handed out until it is delivered, dropped or given back, each at most once. A
sample says to which group it belongs by a private attribute, or, where a custom generator made a new object, by its
`group_index`; samples of two groups in one are refused.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from strawq.errors import BadInput, Fenced
from strawq.samples import Group
from strawq.work import Change, Work
from strawq_workers.slime.codec import group_of
from strawq_workers.slime.sample import word

logger = logging.getLogger("strawq.slime")

TASK = "_strawq_task"
"""Attribute of a sample in a sampler's hands: its task and attempt."""
BATCH = "_strawq_batch"
"""Attribute of a sample of a collected batch: its rollout."""

Verdict = Literal["", "dropped"]


class Handed:
    """One group in a sampler's hands. `samples` are the objects that it works on."""

    __slots__ = ("_masks", "reason", "samples", "verdict", "work")

    def __init__(self, work: Work, samples: list[Any]) -> None:
        self.work = work
        self.samples = samples
        self.verdict: Verdict = ""
        self.reason = ""
        self._masks: dict[int, Any] = {}
        if is_finished(samples):
            self._masks = {id(sample): copy.copy(getattr(sample, "loss_mask", None)) for sample in flat(samples)}

    def restore_masks(self, args: Any) -> None:
        """slime's sampler masks all tokens that it finds, as those of an older policy, before it sees that a sample has
        ended. A group that was handed out complete gets the loss masks back that it had."""
        if getattr(args, "partial_rollout", False) and getattr(args, "mask_offpolicy_in_partial_rollout", False):
            for sample in flat(self.samples):
                mask = getattr(sample, "loss_mask", None)
                if id(sample) in self._masks and mask is not None and not any(mask):
                    sample.loss_mask = self._masks[id(sample)]

    @property
    def mark(self) -> str:
        return f"task {self.work.task}@{self.work.lease.attempt}"


class HandedOut:
    """All of them, by task. Not safe from many threads by itself."""

    def __init__(self) -> None:
        self._by_mark: dict[str, Handed] = {}
        self._by_index: dict[Any, str] = {}
        self._taken: set[Any] = set()
        """`group_index` of groups that were taken from the sampler, and not handed out again."""

    def __len__(self) -> int:
        return len(self._by_mark)

    def __iter__(self) -> Iterator[Handed]:
        return iter(list(self._by_mark.values()))

    def add(self, handed: Handed) -> None:
        for sample in flat(handed.samples):
            setattr(sample, TASK, handed.mark)
            index = getattr(sample, "group_index", None)
            if index is not None:
                self._by_index[index] = handed.mark
                self._taken.discard(index)
        self._by_mark[handed.mark] = handed

    def remove(self, handed: Handed, *, taken: bool = False) -> None:
        """The group is not held any more. `taken`: without the sampler's knowledge, who may deliver it nevertheless;
        its samples keep their marks then, so that this is seen."""
        if self._by_mark.pop(handed.mark, None) is not None:
            indices = [index for index, mark in self._by_index.items() if mark == handed.mark]
            for index in indices:
                del self._by_index[index]
            if taken:
                self._taken.update(indices)
        if not taken:
            unmark(handed.samples)

    def find(self, samples: Sequence[Any]) -> Handed | None:
        """The group that these samples are of; None if none of them was handed out and is held still. `BadInput` if
        they are of several, `Fenced` if theirs was given back before."""
        marks, unmarked = set(), []
        for sample in flat(samples):
            mark = getattr(sample, TASK, None)
            if mark is None:
                unmarked.append(sample)
            else:
                marks.add(mark)
        for sample in unmarked:
            index = getattr(sample, "group_index", None)
            mark = self._by_index.get(index, f"group {index}" if index in self._taken else None)
            if mark is not None:
                marks.add(mark)
        if len(marks) > 1:
            raise BadInput(
                f"A queue group must preserve one task authorization across all trajectories: these samples are of "
                f"{', '.join(sorted(marks))}"
            )
        if not marks:
            return None
        mark = marks.pop()
        handed = self._by_mark.get(mark)
        if handed is None:
            raise Fenced(
                f"{mark.partition('@')[0]} is not held any more: it was given back at the end of its rollout. A "
                "rollout function that works across rollouts has `fully_async` in its dotted path"
            )
        return handed


def unmark(samples: Iterable[Any]) -> None:
    """The samples are of no held group any more."""
    for sample in flat(samples):
        vars(sample).pop(TASK, None)


def flat(samples: Iterable[Any]) -> Iterator[Any]:
    """The samples of a group that may be nested."""
    for entry in samples:
        if isinstance(entry, (list, tuple)):
            yield from flat(entry)
        else:
            yield entry


def _status(sample: Any) -> str:
    return word(getattr(sample, "status", "pending"))


def is_finished(samples: Iterable[Any]) -> bool:
    """Whether every sample has ended and was scored."""
    found = list(flat(samples))
    return bool(found) and all(
        _status(sample) in ("completed", "truncated") and getattr(sample, "reward", None) is not None
        for sample in found
    )


def has_failed(samples: Iterable[Any]) -> bool:
    return any(_status(sample) == "failed" for sample in flat(samples))


def has_tokens(samples: Iterable[Any]) -> bool:
    return any(getattr(sample, "response_length", 0) for sample in flat(samples))


def stored(args: Any, handed: Handed, samples: Sequence[Any]) -> Group:
    """The group as it is saved. Raises `Misaligned` or `BadInput` if its captures do not cover its tokens, or a field
    cannot be stored."""
    work = handed.work
    group = group_of(work.task, work.group.prompt, list(samples), work.group)
    missing = missing_captures(args, group)
    if missing:
        raise BadInput(f"task {work.task}: {missing}")
    return group


def missing_captures(args: Any, group: Group) -> str:
    """What `args` wants captured and a sample with tokens lacks; empty if nothing."""
    routes = getattr(args, "use_rollout_routing_replay", False)
    heads = getattr(args, "use_score_centering", False)
    for sample in group.samples:
        if not len(sample.tokens):
            continue
        if routes and sample.r3 is None:
            return f"sample {sample.index} has {len(sample.tokens)} tokens and no routed experts"
        if heads and sample.sc is None:
            return f"sample {sample.index} has {len(sample.tokens)} tokens and no score-centering rows"
    return ""


def progress(args: Any, handed: Handed, samples: Sequence[Any], *, keep_prefix: bool) -> tuple[Change, str]:
    """How the group goes back: with what it has, if that is complete in itself, else as it was. The second value says
    why it is as it was, empty if that was meant."""
    handed.restore_masks(args)
    if has_failed(samples):
        return Change(handed.work, "fail", None, "a sample failed"), ""
    complete = is_finished(samples)
    if not (complete or (keep_prefix and has_tokens(samples)) or handed.work.lease.stage == "ready"):
        return Change(handed.work, "yield"), ""
    try:
        group = stored(args, handed, without_marks(samples))
    except BadInput as error:
        return Change(handed.work, "yield"), str(error)
    # One that was complete and is not any more must not be trained on as it was; without news it stays what it is.
    again = complete and handed.work.lease.stage == "ready"
    return Change(handed.work, "complete" if again else "yield", group, rewrite=True), ""


def without_marks(samples: Sequence[Any]) -> list[Any]:
    """Shallow copies: what is stored does not change while it is written, and the sampler keeps its objects."""
    return [without_marks(entry) if isinstance(entry, (list, tuple)) else copy.copy(entry) for entry in samples]
