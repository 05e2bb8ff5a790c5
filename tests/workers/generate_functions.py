"""Generate functions and sample hooks that tests name by dotted path."""

import asyncio
import contextlib
import copy
import sys
from collections import Counter
from types import SimpleNamespace

from strawq.errors import EngineUnavailable, Misaligned
from strawq_workers.agents import GenerationStopped, generate

calls: Counter[str] = Counter()
seen: list[object] = []
TOOL = [7, 8, 9]
gate = SimpleNamespace(entered=None, release=None)


def reset():
    calls.clear()
    seen.clear()
    gate.entered, gate.release = asyncio.Event(), asyncio.Event()


async def two_tools(args, sample, sampling_params):
    """Three turns of six tokens, two tool answers of three tokens in between; looks only at its sample."""
    calls["two_tools"] += 1
    while True:
        turn = await generate(args, sample, {**sampling_params, "max_new_tokens": 6})
        if turn.finish == "abort":
            return sample
        tools = sum(1 for flag in sample.loss_mask if not flag) // len(TOOL)
        seen.append((sample.index, turn.tokens, tools))
        if tools == 2:
            sample.status = sample.Status.COMPLETED
            return sample
        sample.append_response_tokens(args, tokens=TOOL, trainable=False, text="<tool>")
        sample.metadata["tools"] = tools + 1


async def with_evaluation(args, sample, sampling_params, evaluation=False):
    seen.append(evaluation)
    await generate(args, sample, sampling_params)
    return [sample]


async def copies(args, sample, sampling_params):
    mine = copy.deepcopy(sample)
    await generate(args, mine, sampling_params)
    return mine


async def by_itself(args, sample, sampling_params):
    """As functions do that speak to an engine themselves: fields are changed directly."""
    sample.tokens = [*sample.tokens, 10, 11, 12, 13]
    sample.response_length += 4
    sample.rollout_log_probs = (sample.rollout_log_probs or []) + [-0.5, -0.5, 0.0, -0.25]
    sample.loss_mask = (sample.loss_mask or []) + [1, 1, 0, 1]
    sample.weight_versions.append("3")
    sample.response = "mine"
    sample.reward = 0.5
    sample.status = "completed"
    return sample


async def appends_with_meta(args, sample, sampling_params):
    meta = {"weight_version": "4", "finish_reason": {"type": "stop"}}
    sample.append_response_tokens(args, tokens=[5, 6], log_probs=[-1.0, -2.0], meta_info=meta, text="ab")
    sample.append_response_tokens(args, tokens=[7], trainable=False, text="c")
    return sample


async def short_mask(args, sample, sampling_params):
    await generate(args, sample, {**sampling_params, "max_new_tokens": 6})
    sample.loss_mask = sample.loss_mask[:-2]
    return sample


async def short_logprobs(args, sample, sampling_params):
    sample.append_response_tokens(args, tokens=[5, 6, 7], log_probs=[-1.0])
    return sample


async def swallows(args, sample, sampling_params):
    try:
        sample.append_response_tokens(args, tokens=[5, 6, 7], log_probs=[-1.0])
    except Misaligned:
        sample.status = "completed"
    return sample


async def changes_tokens(args, sample, sampling_params):
    await generate(args, sample, {**sampling_params, "max_new_tokens": 6})
    sample.tokens[-1] += 1
    return sample


async def fans_out(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return [sample, copy.deepcopy(sample)]


async def answers_none(args, sample, sampling_params):
    await generate(args, sample, sampling_params)


async def stays_pending(args, sample, sampling_params):
    return sample


async def raises(args, sample, sampling_params):
    raise ZeroDivisionError("no turn today")


async def exits(args, sample, sampling_params):
    sys.exit(3)


async def leaks_a_cancellation(args, sample, sampling_params):
    raise asyncio.CancelledError


async def swallows_engine_trouble(args, sample, sampling_params):
    with contextlib.suppress(EngineUnavailable):
        await generate(args, sample, sampling_params)
    sample.status = "completed"
    return sample


async def always_aborted(args, sample, sampling_params):
    sample.status = sample.Status.ABORTED
    return sample


async def ends_in_tool(args, sample, sampling_params):
    await generate(args, sample, {**sampling_params, "max_new_tokens": 6})
    sample.append_response_tokens(args, tokens=TOOL, trainable=False)
    sample.status = "completed"
    return sample


def plain(args, sample, sampling_params):
    return sample


async def waits_in_a_tool(args, sample, sampling_params):
    """A turn, then a tool that takes as long as the test wants, then a turn."""
    calls["waits_in_a_tool"] += 1
    if "first" not in sample.metadata:
        await generate(args, sample, {**sampling_params, "max_new_tokens": 6})
        sample.metadata["first"] = list(sample.tokens[-6:])
    gate.entered.set()
    await gate.release.wait()
    turn = await generate(args, sample, {**sampling_params, "max_new_tokens": 6})
    if turn.finish == "abort":
        try:
            await generate(args, sample, sampling_params)
        except GenerationStopped:
            calls["stopped"] += 1
    return sample


async def cancellable(args, sample, sampling_params):
    return await waits_in_a_tool(args, sample, sampling_params)


cancellable.abort_mode = "request"


async def outside(args, sample, sampling_params):
    """Speaks to nobody through the worker, and takes as long as the test wants."""
    calls["outside"] += 1
    gate.entered.set()
    await gate.release.wait()
    return await by_itself(args, sample, sampling_params)


# -- sample hooks ---------------------------------------------------------------------------------------------------


async def marks(args, sample, *, rollout_id=None, evaluation=False):
    seen.append((rollout_id, evaluation))
    sample.metadata["seen_by"] = "marks"
    sample.loss_mask = [0] * 4 + sample.loss_mask[4:]
    sample.response = sample.response[:3]


def scores(args, sample):
    assert sample.metadata["seen_by"] == "marks" and sample.loss_mask[:5] == [0, 0, 0, 0, 1]
    sample.reward = {"score": 2.0}
    return sample


def removes_odd(args, sample):
    sample.remove_sample = sample.index % 2 == 1


def hook_wrong_type(args, sample):
    return {"tokens": []}


def hook_short_mask(args, sample):
    sample.loss_mask = [1]


def hook_adds_tokens(args, sample):
    sample.tokens.append(1)
    return sample


def hook_raises(args, sample):
    raise LookupError("no such sample")
