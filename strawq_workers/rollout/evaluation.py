"""Evaluation: every prompt of the evaluation data, answered now, in the order of the data.

The rule: evaluation writes into no queue and takes nothing from the data source. It is generated in this process, on
the engines of the rollout, without filter, score centering and prefixes of others; a group that fails for good fails
the evaluation with its reason.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from typing import Any

import msgspec

from strawq.errors import BadInput
from strawq_workers.rollout.rewards import mean_reward, reward_values
from strawq_workers.rollout.settings import codec, options_of
from strawq_workers.rollout.station import Interrupted, RolloutFailed, Station
from strawq_workers.worker.hooks import Hooks
from strawq_workers.worker.loop import Worker, make_admission
from strawq_workers.worker.memory import MemorySource
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.place import Place
from strawq_workers.worker.process import run_until

EVAL_OPTIONS = {
    "eval_temperature": "temperature",
    "eval_top_p": "top_p",
    "eval_top_k": "top_k",
    "eval_max_response_len": "max_new_tokens",
    "eval_max_context_len": "max_context_tokens",
}
"""slime's flags for evaluation, and the worker's options that they replace where they are given."""


class _Fixed:
    """A data source of given groups."""

    def __init__(self, groups: list[list[Any]]) -> None:
        self._groups = groups

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        taken, self._groups = self._groups[:num_samples], self._groups[num_samples:]
        return taken

    def add_samples(self, samples: list[list[Any]]) -> None:
        self._groups += samples


def evaluate(args: Any, station: Station) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Answers to all evaluation data by data set: `rewards`, `truncated`, `samples`; and their means."""
    options = evaluation_options(args)
    data: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    for name, dataset in datasets(args):
        groups = _groups(dataset, options.samples)
        samples = station.loop.call(functools.partial(_answers, station, options, groups))
        rewards = reward_values(args, samples, evaluation=True)
        truncated = [_status(sample) == "truncated" for sample in samples]
        data[name] = {"rewards": rewards, "truncated": truncated, "samples": samples}
        metrics[f"eval/{name}/prompts"] = len(groups)
        if samples:
            metrics[f"eval/{name}/truncated_ratio"] = sum(truncated) / len(truncated)
        mean = mean_reward(rewards)
        if mean is not None:
            metrics[f"eval/{name}"] = mean
    return data, metrics


def evaluation_options(args: Any) -> WorkerOptions:
    """The worker's options of these args, with what slime's evaluation flags change."""
    options = options_of(args)
    if options.group_reward:
        raise BadInput("evaluation scores samples one by one: --group-rm is not supported for it")
    changes = {to: value for name, to in EVAL_OPTIONS.items() if (value := getattr(args, name, None)) is not None}
    return msgspec.structs.replace(
        options,
        samples=getattr(args, "n_samples_per_eval_prompt", None) or 1,
        evaluation=True,
        dynamic_filter="",
        top_logprobs=0,
        routed_experts=False,
        mask_offpolicy_in_partial_rollout=False,
        save_tokens=0,
        save_seconds=0.0,
        max_staleness=-1,
        staleness_policy="admit",
        batch_groups=0,
        **changes,
    )


def datasets(args: Any) -> list[tuple[str, Any]]:
    """Names of the evaluation data and a reader of each. `BadInput` if there are none."""
    from strawq_workers.slime.dataset import PromptDataset

    given = list(getattr(args, "eval_prompt_data", None) or ())
    if not given or len(given) % 2:
        raise BadInput("evaluation needs --eval-prompt-data NAME FILE [NAME FILE ...]")
    found = []
    for name, path in zip(given[::2], given[1::2], strict=True):
        own = copy.copy(args)
        own.prompt_data, own.rollout_shuffle, own.num_epoch = path, False, 1
        for key in ("input_key", "label_key", "metadata_key", "tool_key"):
            if getattr(args, f"eval_{key}", None):
                setattr(own, key, getattr(args, f"eval_{key}"))
        found.append((name, PromptDataset(own, "--eval-prompt-data")))
    return found


def _groups(dataset: Any, size: int) -> list[list[Any]]:
    prompts = dataset.prompts()
    return [[_member(prompt, row, row * size + at) for at in range(size)] for row, prompt in enumerate(prompts)]


def _member(prompt: Any, group_index: int, index: int) -> Any:
    sample = copy.deepcopy(prompt)
    sample.group_index, sample.index = group_index, index
    return sample


async def _answers(station: Station, options: WorkerOptions, groups: list[list[Any]], stop: asyncio.Event) -> list[Any]:
    if not groups:
        return []
    fleet = await station.fleet(options, stop)
    source = MemorySource(_Fixed(list(groups)), codec())
    place = Place(options, source, fleet, Hooks(options), make_admission(options, fleet))
    try:
        await run_until(Worker(place, _FirstFailure(place)), stop)
        entries = source.take(len(groups))
        if place.dead:
            task, reason = next(iter(place.dead.items()))
            raise RolloutFailed(f"evaluation of prompt {task}: {reason}")
        if len(entries) < len(groups):
            raise Interrupted(f"evaluation was told to stop with {len(entries)} of {len(groups)} prompts")
        return [sample for samples in await source.samples(entries) for sample in samples]
    finally:
        await source.close()


class _FirstFailure:
    """Leases whatever there is room for, until a prompt has failed for good."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def want(self, room: int) -> int:
        return room

    def none(self, answer: Any) -> None:
        pass

    def leased(self, lease: Any) -> None:
        pass

    def ended(self, run: Any) -> None:
        if run.lease.task in self._place.dead:
            self._place.stop("rollout")


def _status(sample: Any) -> str:
    return str(getattr(sample.status, "value", sample.status))
