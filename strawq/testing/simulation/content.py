"""Prompts and groups whose content says whose they are, so that a mix-up shows in the data.

A prompt carries its group id as text; each token of an answer carries its task, the attempt that made it and its
place. Some tasks have routes (`r3`), so that packs are written too.
"""

from __future__ import annotations

import msgspec
import numpy as np

from strawq.model import VersionSpan, policy_number
from strawq.samples import Group, Prompt, Sample, without_response

PROMPT_TOKENS = 3
_ATTEMPTS, _PLACES = 100, 1000


def make_prompt(group_id: str) -> Prompt:
    return Prompt(group_id=group_id, text=group_id, tokens=np.arange(PROMPT_TOKENS, dtype=np.int32))


def _task_number(task: str) -> int:
    number, row = (int(word) for word in task.split("-"))
    return number * 16 + row


def has_routes(task: str) -> bool:
    return _task_number(task) % 5 == 3


def tokens_of(group: Group) -> tuple[int, ...]:
    return tuple(int(token) for sample in group.samples for token in sample.tokens)


def grown(group: Group, task: str, attempt: int, count: int, version: str, complete: bool) -> Group:
    """The group with `count` more tokens of this attempt."""
    old = group.samples[0] if group.samples else None
    before = len(old.tokens) if old is not None else 0
    base = (_task_number(task) * _ATTEMPTS + attempt % _ATTEMPTS) * _PLACES
    new = np.array([base + before + i for i in range(count)], np.int32)
    tokens = np.concatenate([old.tokens, new]) if old is not None else new
    spans = (*(old.versions if old is not None else ()), VersionSpan(before, before + count, version or "default"))
    routes = _routes(task, len(tokens)) if has_routes(task) else None
    sample = Sample(
        0,
        tokens=tokens,
        logprobs=(-tokens / 7.0).astype(np.float32),
        versions=tuple(span for span in spans if span.end > span.start),
        status="completed" if complete else "aborted",
        r3=routes,
        metadata={"of": task},
    )
    return Group(group.task_id, group.prompt, (sample,))


def begun_anew(group: Group, task: str) -> Group:
    """The group without a token."""
    anew = [msgspec.structs.replace(without_response(one), metadata={"of": task}) for one in group.samples]
    return Group(group.task_id, group.prompt, tuple(anew))


def _routes(task: str, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    rows = np.arange(PROMPT_TOKENS + count - 1, dtype=np.int64) + _task_number(task)
    return np.repeat(rows % 200, 4).reshape(-1, 2, 2).astype(np.uint8)


def mistakes(group: Group, task: str, group_id: str, tokens: tuple[int, ...]) -> list[str]:
    """What is wrong with a group that was read: empty if it is exactly what was saved."""
    found = []
    if group.prompt.text != group_id or group.prompt.group_id != group_id:
        found.append(f"prompt {group.prompt.text!r} where {group_id!r} was submitted")
    read = tokens_of(group)
    if read != tokens:
        found.append(f"tokens {read} where {tokens} were saved")
    for sample in group.samples:
        if not len(sample.tokens):
            continue
        if sample.logprobs is None or not np.array_equal(sample.logprobs, (-sample.tokens / 7.0).astype(np.float32)):
            found.append("log-probs are of other tokens")
        if has_routes(task) != (sample.r3 is not None):
            found.append("routes are missing, or were never given")
        elif sample.r3 is not None and not np.array_equal(np.asarray(sample.r3[:]), _routes(task, len(sample.tokens))):
            found.append("routes are of another task")
        if any(policy_number(span.version) < -1 for span in sample.versions):
            found.append("a policy version is negative")
    return found


def in_memory(group: Group) -> Group:
    """The group with its tensors read, so that what goes wrong does so here."""
    samples = [
        sample if sample.r3 is None else msgspec.structs.replace(sample, r3=np.array(sample.r3[:]))
        for sample in group.samples
    ]
    return Group(group.task_id, group.prompt, tuple(samples))
