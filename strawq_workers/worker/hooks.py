"""The user's functions: reward, filter, tokeniser, named by dotted paths and called as slime calls them.

The rule: a hook that raises, or answers something else than it should, fails the attempt with its reason (`HookFailed`)
and nothing else. A plain function runs in a thread, so that a slow reward does not stop the event loop.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from strawq.errors import BadInput, StrawqError
from strawq.samples import Group, Int32, Prompt, Sample
from strawq_workers.filters import DynamicFilterOutput, apply_filter
from strawq_workers.worker.options import WorkerOptions

Hook = Callable[..., Any]


class HookFailed(StrawqError):
    """A hook raised, or answered what it may not. The attempt fails with this message."""

    kind = "hook_failed"


class HookSample(msgspec.Struct):
    """A sample as hooks see it, under slime's names. `tokens` are those of prompt and response; `response` is "" where
    nobody can decode them. Of changes that a hook makes, `metadata` is kept."""

    index: int
    group_index: str
    prompt: Any
    tokens: list[int]
    response: str
    response_length: int
    label: Any
    reward: Any
    status: str
    metadata: dict[str, Any]
    loss_mask: list[int]
    rollout_log_probs: list[float] | None
    weight_versions: list[str]
    remove_sample: bool = False


class Hooks:
    """The hooks of one worker, loaded once. `BadInput` if one cannot be loaded."""

    def __init__(self, options: WorkerOptions) -> None:
        self.args = hook_args(options)
        self.group_reward = options.group_reward
        self.reward = load_hook(options.reward, "reward") if options.reward else None
        self.filter = load_hook(options.dynamic_filter, "dynamic_filter") if options.dynamic_filter else None
        self.tokenizer = load_hook(options.tokenize, "tokenize") if options.tokenize else None
        self.detokenizer = load_hook(options.detokenize, "detokenize") if options.detokenize else None

    @property
    def need_text(self) -> bool:
        return self.reward is not None or self.filter is not None

    async def score(self, group: Group) -> Group:
        """The group with a reward for each sample that has none. Raises `HookFailed`."""
        if self.reward is None:
            return group
        if self.group_reward:
            return await self._score_group(self.reward, group)
        views = [hook_view(group, sample) for sample in group.samples]
        missing = [at for at, sample in enumerate(group.samples) if sample.reward is None]
        answers = await asyncio.gather(*(call(self.reward, "reward", self.args, views[at]) for at in missing))
        samples = list(group.samples)
        for at, answer in zip(missing, answers, strict=True):
            samples[at] = _rewarded(group, samples[at], answer, views[at])
        return msgspec.structs.replace(group, samples=tuple(samples))

    async def _score_group(self, reward: Hook, group: Group) -> Group:
        if all(sample.reward is not None for sample in group.samples):
            return group
        views = [hook_view(group, sample) for sample in group.samples]
        answers = await call(reward, "reward", self.args, views)
        if not isinstance(answers, (list, tuple)) or len(answers) != len(views):
            size = f"{len(answers)} values" if isinstance(answers, (list, tuple)) else repr(answers)[:100]
            raise HookFailed(f"reward hook answered {size} for a group of {len(views)}: return a list of one each")
        samples = [
            _rewarded(group, sample, answer, view)
            for sample, answer, view in zip(group.samples, answers, views, strict=True)
        ]
        return msgspec.structs.replace(group, samples=tuple(samples))

    async def judge(self, group: Group) -> DynamicFilterOutput:
        """The filter's verdict on a complete, scored group. Raises `HookFailed`."""
        if self.filter is None:
            return DynamicFilterOutput(True)
        views = [hook_view(group, sample) for sample in group.samples]
        verdict: DynamicFilterOutput = await call(apply_filter, "dynamic_filter", self.filter, self.args, views)
        return verdict

    async def tokenize(self, prompt: Prompt) -> Int32:
        """Token ids of a prompt without, by the hook. Raises `HookFailed`."""
        assert self.tokenizer is not None
        answer = await call(self.tokenizer, "tokenize", self.args, prompt)
        try:
            ids = np.asarray(answer)
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise ValueError(f"{ids.dtype} {list(ids.shape)} are not token ids")
            return ids.astype(np.int32)
        except (TypeError, ValueError) as error:
            raise HookFailed(f"tokenize hook answered {repr(answer)[:100]}: {error}") from error

    async def detokenize(self, tokens: Int32) -> str:
        """Text of response tokens, by the hook. Raises `HookFailed`."""
        assert self.detokenizer is not None
        answer = await call(self.detokenizer, "detokenize", self.args, tokens.tolist())
        if not isinstance(answer, str):
            raise HookFailed(f"detokenize hook answered {repr(answer)[:100]}: return text")
        return answer


def hook_args(options: WorkerOptions) -> SimpleNamespace:
    """What hooks get as `args`: the worker's options under slime's names, then `hook_args`."""
    named = {
        "n_samples_per_prompt": options.samples,
        "rollout_max_response_len": options.max_new_tokens,
        "rollout_max_context_len": options.max_context_tokens or None,
        "rollout_temperature": options.temperature,
        "rollout_top_p": options.top_p,
        "rollout_top_k": options.top_k,
        "rollout_stop": list(options.stop) or None,
        "rollout_stop_token_ids": list(options.stop_token_ids) or None,
        "partial_rollout": options.partial_rollout,
        "mask_offpolicy_in_partial_rollout": options.mask_offpolicy_in_partial_rollout,
        "group_rm": options.group_reward,
        "reward_key": None,
    }
    return SimpleNamespace(**{**named, **options.hook_args})


def hook_view(group: Group, sample: Sample) -> HookSample:
    prompt = group.prompt
    ids = sample.prompt_tokens if sample.prompt_tokens is not None else prompt.tokens
    said: Any = prompt.text if prompt.text is not None else prompt.messages
    return HookSample(
        index=sample.index,
        group_index=prompt.group_id or group.task_id,
        prompt=said if said is not None else "",
        tokens=([] if ids is None else ids.tolist()) + sample.tokens.tolist(),
        response=sample.text or "",
        response_length=len(sample.tokens),
        label=prompt.label,
        reward=sample.reward,
        status=sample.status,
        metadata={**prompt.metadata, **sample.metadata},
        loss_mask=sample.loss_mask.tolist(),
        rollout_log_probs=None if sample.logprobs is None else sample.logprobs.tolist(),
        weight_versions=[span.version for span in sample.versions],
    )


def _rewarded(group: Group, sample: Sample, answer: Any, view: HookSample) -> Sample:
    if hasattr(answer, "item") and not isinstance(answer, dict):
        answer = answer.item()  # a NumPy or torch scalar
    if not isinstance(answer, (bool, int, float, dict)):
        raise HookFailed(
            f"reward hook answered {repr(answer)[:100]} for sample {sample.index}: return a number or dict"
        )
    prompt = group.prompt.metadata
    added = {name: value for name, value in view.metadata.items() if name not in prompt or prompt[name] != value}
    reward = answer if isinstance(answer, dict) else float(answer)
    try:
        msgspec.json.encode((reward, added))
    except (TypeError, msgspec.MsgspecError) as error:
        raise HookFailed(f"reward or metadata of sample {sample.index} are not JSON values: {error}") from error
    return msgspec.structs.replace(sample, reward=reward, metadata=added)


async def call(function: Hook, name: str, *arguments: Any) -> Any:
    """The hook's answer, awaited where it is a coroutine. Whatever it raises becomes `HookFailed`."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        answer = await asyncio.to_thread(function, *arguments)
        return await answer if inspect.isawaitable(answer) else answer
    except asyncio.CancelledError as error:
        # Nobody cancels a worker's group from outside: something inside the hook was cancelled, and it leaked.
        raise HookFailed(f"{name} hook was cancelled from within") from error
    except (Exception, SystemExit) as error:
        # Others' code may raise anything; the reason goes into the queue, and the worker lives.
        raise HookFailed(f"{name} hook raised {type(error).__name__}: {error}") from error


def load_hook(path: str, name: str) -> Hook:
    """The function at `module:function` or `module.function`. `BadInput` names the option, the path and what is
    missing."""
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise BadInput(f"{name} hook {path!r} is not a dotted path: write module:function")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, ValueError) as error:
        why = f"cannot import {module_name!r}: {error}"
        raise BadInput(f"{name} hook {path!r}: {why}; install it, or put its directory on PYTHONPATH") from error
    except AttributeError as error:
        raise BadInput(f"{name} hook {path!r}: module {module_name!r} has no {attribute!r}") from error
    if not callable(found):
        raise BadInput(f"{name} hook {path!r} cannot be called")
    hook: Hook = found
    return hook
