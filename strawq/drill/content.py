"""Groups whose every token says who made it, so that a mix-up, a gap or a repetition shows wherever they are read.

A sample is a row of chunks of eight tokens: submission, row, attempt, the life that made it, the chunk's number, and
three that follow from these. Each token has a row of bytes beside it that follows from the token.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from strawq.model import VersionSpan
from strawq.samples import Group, Prompt, Sample, extend

CHUNK = 8
SAMPLES = 2
WIDE = 10_240
"""Bytes beside each token of every fourth prompt: such groups do not ride inside log entries."""
NARROW = 16


def make_prompt(index: int) -> Prompt:
    return Prompt(group_id=str(index), tokens=np.array([index, index ^ 0x5A5A], np.int32), samples=SAMPLES)


def prompt_index(prompt: Prompt) -> int:
    """Its number; -1 if it is not what `make_prompt` gives."""
    if not prompt.group_id.isdigit() or prompt.tokens is None:
        return -1
    index = int(prompt.group_id)
    return index if list(prompt.tokens) == [index, index ^ 0x5A5A] else -1


def grown(group: Group, task: str, attempt: int, life: int) -> Group:
    """The group with one more chunk on each of its samples."""
    width = WIDE if prompt_index(group.prompt) % 4 == 0 else NARROW
    samples = group.samples or tuple(Sample(index=index) for index in range(SAMPLES))
    return Group(group.task_id, group.prompt, tuple(_longer(sample, task, attempt, life, width) for sample in samples))


def _longer(sample: Sample, task: str, attempt: int, life: int, width: int) -> Sample:
    tokens = _chunk(task, attempt, life, len(sample.tokens) // CHUNK, sample.index)
    more = Sample(
        index=sample.index,
        tokens=tokens,
        logprobs=-(tokens % 997).astype(np.float32),
        versions=(VersionSpan(0, CHUNK, str(attempt)),),
        token_tensors={"beside": _beside(tokens, width)},
    )
    return extend(sample, more)


def _chunk(task: str, attempt: int, life: int, number: int, sample: int) -> npt.NDArray[np.int32]:
    submission, _, row = task.partition("-")
    said = [int(submission), int(row), attempt, life, number]
    check = zlib.crc32(repr((said, sample)).encode()) & 0x7FFFFFFF
    return np.array([*said, check, check ^ 0x1234567, sample], np.int32)


def _beside(tokens: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.uint8]:
    columns = np.arange(width, dtype=np.int64)
    return ((tokens[:, None].astype(np.int64) * 31 + columns) & 0xFF).astype(np.uint8)


def chunk_count(group: Group) -> int:
    return len(group.samples[0].tokens) // CHUNK if group.samples else 0


def faults(group: Group, task: str, attempt: int) -> list[str]:
    """What is wrong with a group that was read under this attempt."""
    if prompt_index(group.prompt) < 0:
        return [f"task {task}: its prompt is another's"]
    found = []
    width = WIDE if prompt_index(group.prompt) % 4 == 0 else NARROW
    if len({len(sample.tokens) for sample in group.samples}) > 1:
        found.append(f"task {task}: its samples have different lengths")
    for sample in group.samples:
        what = f"task {task}, sample {sample.index}"
        before = 0
        for number in range(-(-len(sample.tokens) // CHUNK)):
            tokens = sample.tokens[number * CHUNK : (number + 1) * CHUNK]
            made_by, life = (int(tokens[2]), int(tokens[3])) if len(tokens) == CHUNK else (-1, 0)
            if not np.array_equal(tokens, _chunk(task, made_by, life, number, sample.index)):
                found.append(f"{what}: chunk {number} is not what any process made for it: {list(tokens)}")
            elif not before <= made_by <= attempt:
                found.append(f"{what}: chunk {number} is of attempt {made_by}, after one of {before}, under {attempt}")
            before = max(before, made_by)
        found += _faults_beside(sample, what, width)
    return found


def _faults_beside(sample: Sample, what: str, width: int) -> list[str]:
    if not len(sample.tokens):
        return []
    beside = np.asarray(sample.token_tensors["beside"]) if "beside" in sample.token_tensors else None
    if beside is None or not np.array_equal(beside, _beside(sample.tokens, width)):
        return [f"{what}: the rows beside its tokens are not theirs"]
    if sample.logprobs is None or not np.array_equal(sample.logprobs, -(sample.tokens % 997).astype(np.float32)):
        return [f"{what}: its log-probs are not those of its tokens"]
    return []
