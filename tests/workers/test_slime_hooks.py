"""Hooks and generate functions of slime users, on samples that came from a slime data source."""

import asyncio
import sys
from importlib import import_module

import msgspec
import numpy as np
import pytest

from strawq import Prompt
from strawq import Sample as Stored
from strawq.samples import Group
from strawq_workers.agents import generate
from strawq_workers.slime import Sample, prompt_of, samples_of
from strawq_workers.slime.payload import MAGIC
from strawq_workers.worker.hooks import Hooks
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.views import HookFailed

HERE = "test_slime_hooks"


def reward(args, sample):
    assert sample.index in (40, 41) and sample.group_index == 7 and sample.label == "42"
    assert sample.train_metadata == {"lr": (1, 2)} and sample.flavour == "sour"
    assert sample.multimodal_inputs["pixels"].shape == (2, 3) and sample.metadata["seed"] == 3
    assert sample.status == sample.Status.TRUNCATED
    sample.metadata["judged"] = True
    return 1.0


def hook(args, sample):
    assert isinstance(sample.metadata["where"], np.ndarray) and sample.flavour == "sour"
    sample.metadata["hooked"] = sample.index
    return sample


async def turns(args, sample, sampling_params):
    assert sample.flavour == "sour" and sample.index in (40, 41)
    await generate(args, sample, sampling_params)
    return sample


async def test_functions_see_every_field_that_was_submitted_and_nothing_of_it_is_lost(stage_of):
    asked = Sample(
        index=40, group_index=7, prompt="what is it?", label="42", train_metadata={"lr": (1, 2)},
        multimodal_inputs={"pixels": np.ones((2, 3), np.float32)}, metadata={"seed": 3, "where": np.arange(3)},
    )  # fmt: skip
    asked.flavour = "sour"
    async with stage_of() as stage:
        stage.queue.submit([prompt_of(asked, samples=2)])
        stage.queue.seal()
        options = {"reward": f"{HERE}:reward", "sample_hooks": (f"{HERE}:hook",), "generate": f"{HERE}:turns"}
        summary = await stage.run(**options)
        assert summary.counters.groups_accepted == 1 and not summary.failures
        (group,) = stage.groups(stage="ready")
        assert [sample.metadata for sample in group.samples] == [
            {"hooked": 40, "judged": True}, {"hooked": 41, "judged": True},
        ]  # fmt: skip
        for at, sample in enumerate(samples_of(group, Sample)):
            assert (sample.index, sample.reward, sample.flavour) == (40 + at, 1.0, "sour")
            assert sample.metadata["hooked"] == 40 + at and sample.metadata["where"].tolist() == [0, 1, 2]
            assert sample.response_length == 24 and len(sample.loss_mask) == 24


_over: list[int] = []


async def reward_that_fails_first(args, sample):
    if sample.index == 0:
        raise ValueError("no idea")
    for _ in range(20):
        await asyncio.sleep(0)
    _over.append(sample.index)
    return 1.0


async def test_a_reward_that_fails_leaves_no_other_one_running():
    hooks = Hooks(WorkerOptions(engines=("http://localhost:1",), reward=f"{HERE}:reward_that_fails_first"))
    done = {"status": "completed", "finish_reason": "stop"}
    samples = tuple(Stored(at, np.arange(2), np.full(2, -0.5), **done) for at in range(2))
    with pytest.raises(HookFailed, match="no idea"):
        await hooks.score(Group("1-0", Prompt(tokens=[1]), samples))
    assert import_module(HERE)._over == [1]  # as the hook sees it


def scored(args, sample):
    return 1.0


NOT_READ = [
    ([99], "newer version"),
    ([6, "Status", "unheard of"], "cannot be read"),
    ([7, "Nobody"], "cannot be read"),
    ([5, "float32", [3], bytes(12)], "only torch reads: install it here"),
]
"""Fields that somebody else has written, or that need a library which only the trainer's host has."""


async def test_a_prompt_that_cannot_be_read_here_fails_alone(stage_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    payloads = [MAGIC + msgspec.msgpack.encode([{"flavour": node}, 0, {}]) for node, _ in NOT_READ]
    async with stage_of() as stage:
        stage.queue.submit([Prompt(group_id=f"{at}", text="?", payload=payload) for at, payload in enumerate(payloads)])
        stage.submit(1)
        summary = await stage.run(reward=f"{HERE}:scored", refusals_max=1000)
        assert summary.reason == "sealed" and summary.counters.groups_accepted == 1
        for (_, words), task in zip(NOT_READ, stage.queue.dead_letters(), strict=True):
            assert words in task.reason
