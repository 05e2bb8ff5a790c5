"""The user's functions: generate, sample hooks, reward, filter, tokeniser, named by dotted paths and called as slime
calls them.

The rule: a hook that raises, or answers something else than it should, fails the attempt with its reason (`HookFailed`)
and nothing else. A plain function runs in a thread, so that a slow reward does not stop the event loop.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from concurrent import futures
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from strawq.errors import BadInput, Misaligned
from strawq.rows import whole_numbers
from strawq.samples import Group, Int32, Prompt, Sample
from strawq_workers.filters import DynamicFilterOutput, apply_filter
from strawq_workers.slime.flags import all_flags
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.views import (
    HookFailed,
    HookSample,
    changed_by_hook,
    hook_view,
    reward_value,
    shown,
    taking,
    with_metadata,
)

Hook = Callable[..., Any]


class Hooks:
    """The hooks of one worker, loaded once. `BadInput` if one cannot be loaded."""

    def __init__(self, options: WorkerOptions) -> None:
        self.args = hook_args(options)
        self.response_text = options.response_text
        self.evaluation = options.evaluation
        self.group_reward = options.group_reward
        self.generate = load_hook(options.generate, "generate") if options.generate else None
        if self.generate is not None and not is_coroutine_function(self.generate):
            raise BadInput(f"generate hook {options.generate!r} must be a coroutine function: async def")
        self.sample_hooks = tuple((path, load_hook(path, "sample")) for path in options.sample_hooks)
        self.reward = load_hook(options.reward, "reward") if options.reward else None
        self.filter = load_hook(options.dynamic_filter, "dynamic_filter") if options.dynamic_filter else None
        self.tokenizer = load_hook(options.tokenize, "tokenize") if options.tokenize else None
        self.detokenizer = load_hook(options.detokenize, "detokenize") if options.detokenize else None

    @property
    def need_text(self) -> bool:
        asked = self.response_text or self.reward is not None or self.filter is not None
        return asked or bool(self.sample_hooks)

    @property
    def stops_by_cancel(self) -> bool:
        """Whether the generate function asks to be cancelled where it has to stop (`abort_mode = "request"`)."""
        return getattr(self.generate, "abort_mode", "") == "request"

    async def run_generate(self, sample: HookSample, sampling_params: dict[str, Any]) -> Any:
        """The generate function's answer. Raises `HookFailed`, and `CancelledError` if its task was cancelled."""
        assert self.generate is not None
        named = {"evaluation": self.evaluation} if "evaluation" in _keywords(self.generate) else {}
        try:
            return await self.generate(self.args, sample, sampling_params, **named)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # in a task of its own `SystemExit` would end the event loop
            raise raised("generate", error) from error

    async def change(self, group: Group) -> Group:
        """The group after the sample hooks, in order, on each sample without a reward. Raises `HookFailed`, or
        `Misaligned` if a loss mask does not cover the response."""
        if not self.sample_hooks:
            return group
        open_samples = [sample for sample in group.samples if sample.reward is None]
        changed = await asyncio.gather(
            *(self._change(group, sample) for sample in open_samples), return_exceptions=True
        )
        by_index: dict[int, Sample] = {}
        for sample in changed:
            if isinstance(sample, BaseException):
                raise sample
            by_index[sample.index] = sample
        samples = tuple(by_index.get(sample.index, sample) for sample in group.samples)
        return msgspec.structs.replace(group, samples=samples)

    async def _change(self, group: Group, sample: Sample) -> Sample:
        for path, hook in self.sample_hooks:
            name = f"sample hook {path}"
            view, before = hook_view(group, sample), hook_view(group, sample)
            accepted = _keywords(hook)
            known = {"rollout_id": None, "evaluation": self.evaluation}
            given = known if _ANY in accepted else {key: known[key] for key in known if key in accepted}
            answer = await call(hook, name, self.args, view, **given)
            if answer is not None and not isinstance(answer, HookSample):
                raise HookFailed(f"{name} answered {shown(answer)}: return the sample, or None")
            with taking(name, answer):
                sample = changed_by_hook(group.prompt, sample, view if answer is None else answer, before, name)
        return sample

    async def score(self, group: Group) -> Group:
        """The group with a reward for each sample that has none. Raises `HookFailed`."""
        if self.reward is None:
            return group
        if self.group_reward:
            return await self._score_group(self.reward, group)
        calls = (self._score(self.reward, group, sample) for sample in group.samples)
        samples = await asyncio.gather(*calls, return_exceptions=True)  # a failure waits for the others: none runs on
        scored: list[Sample] = []
        for sample in samples:
            if isinstance(sample, BaseException):
                raise sample
            scored.append(sample)
        return msgspec.structs.replace(group, samples=tuple(scored))

    async def _score(self, reward: Hook, group: Group, sample: Sample) -> Sample:
        if sample.reward is not None:
            return sample
        view = hook_view(group, sample)
        return _rewarded(group, sample, await call(reward, "reward", self.args, view), view)

    async def _score_group(self, reward: Hook, group: Group) -> Group:
        if all(sample.reward is not None for sample in group.samples):
            return group
        views = [hook_view(group, sample) for sample in group.samples]
        answers = await call(reward, "reward", self.args, views)
        if not isinstance(answers, (list, tuple)) or len(answers) != len(views):
            size = f"{len(answers)} values" if isinstance(answers, (list, tuple)) else shown(answers)
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
        # The reason goes into records, logs and the names of metrics.
        reason = None if verdict.reason is None else shown(verdict.reason, str)
        return msgspec.structs.replace(verdict, reason=reason)

    async def tokenize(self, prompt: Prompt) -> Int32:
        """Token ids of a prompt without, by the hook. Raises `HookFailed`."""
        assert self.tokenizer is not None
        answer = await call(self.tokenizer, "tokenize", self.args, prompt)
        with taking("tokenize hook", answer):
            ids = whole_numbers(answer, np.int32, "token ids", least=0)
            if ids.ndim != 1 or not len(ids):
                raise HookFailed(f"tokenize hook answered {shown(answer)}: return one list of token ids")
            return ids

    async def detokenize(self, tokens: Int32) -> str:
        """Text of response tokens, by the hook. Raises `HookFailed`."""
        assert self.detokenizer is not None
        answer = await call(self.detokenizer, "detokenize", self.args, tokens.tolist())
        if not isinstance(answer, str):
            raise HookFailed(f"detokenize hook answered {shown(answer)}: return text")
        return answer


def hook_args(options: WorkerOptions) -> SimpleNamespace:
    """What hooks get as `args`: slime's flags with their defaults, the worker's options under their names, then
    `hook_args`."""
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
        "custom_rm_path": options.reward or None,
        "group_rm": options.group_reward,
        "reward_key": options.reward_key or None,
        "custom_generate_function_path": options.generate or None,
        "rollout_sample_hook_path": list(options.sample_hooks) or None,
        "dynamic_sampling_filter_path": options.dynamic_filter or None,
        "use_rollout_routing_replay": options.routed_experts,
        "sglang_server_concurrency": options.concurrency,
        "rollout_engines": list(options.engines),
        **_address(options.engines[0]),
    }
    defaults = {flag.name: flag.default for flag in all_flags()}
    return SimpleNamespace(**{**defaults, **named, **options.hook_args})


def with_least_hook_args(options: WorkerOptions) -> WorkerOptions:
    """Options of the same meaning: `hook_args` has only what hooks would not find in `args` anyway."""
    known = vars(hook_args(msgspec.structs.replace(options, hook_args={})))
    unknown = {name: value for name, value in options.hook_args.items() if name not in known or known[name] != value}
    return msgspec.structs.replace(options, hook_args=unknown)


def _address(url: str) -> dict[str, Any]:
    """Where slime's functions look for the router: the first engine."""
    try:
        parts = urlsplit(url)
        return {"sglang_router_ip": parts.hostname, "sglang_router_port": parts.port}
    except ValueError as error:
        raise BadInput(f"engine URL {url!r}: {error}") from error


def _rewarded(group: Group, sample: Sample, answer: Any, view: HookSample) -> Sample:
    if answer is None:
        raise HookFailed(f"reward hook answered None for sample {sample.index}: return a number or dict")
    with taking("reward hook", answer):
        scored = msgspec.structs.replace(sample, reward=reward_value(answer, sample.index))
        return with_metadata(group.prompt, scored, view)


async def call(function: Hook, name: str, *arguments: Any, **named: Any) -> Any:
    """The hook's answer, awaited where it is a coroutine. Whatever it raises becomes `HookFailed`, but for
    `Misaligned`, which says more."""
    try:
        if is_coroutine_function(function):
            return await function(*arguments, **named)
        answer, error = await asyncio.to_thread(answered, function, *arguments, **named)
        if error is not None:
            raise error if isinstance(error, Misaligned) else raised(name, error) from error
        return await answer if inspect.isawaitable(answer) else answer
    except (Misaligned, HookFailed):
        raise
    except asyncio.CancelledError as error:
        # Nobody cancels a worker's group from outside: something inside the hook was cancelled, and it leaked.
        raise HookFailed(f"{name} hook was cancelled from within") from error
    except BaseException as error:
        # Others' code may raise anything (signals come in another way): it is the reason, and the worker lives.
        raise raised(name, error) from error


def answered(function: Hook, /, *arguments: Any, **named: Any) -> tuple[Any, BaseException | None]:
    """The answer or what was raised, as a value. So all code of the user's is called in an executor: a future takes no
    `StopIteration`, and what ends an interpreter or a task would take the event loop, and whoever waits, with it."""
    try:
        return function(*arguments, **named), None
    except BaseException as error:  # noqa: BLE001 (it is raised where it is waited for)
        return None, error


def as_raised(name: str, error: BaseException) -> BaseException:
    """What the user's `name` raised, as it may be raised in a coroutine: an exception as it is, but for those that say
    something else there (the end of an iterator or of the process, a cancellation), which are told in words."""
    if isinstance(error, StopIteration):
        return HookFailed(f"{name} raised StopIteration: answer with fewer, or none, where the data have ended")
    told = isinstance(error, (StopAsyncIteration, futures.CancelledError)) or not isinstance(error, Exception)
    return raised(name, error) if told else error


def raised(name: str, error: BaseException) -> HookFailed:
    """What a hook raised, as the reason of a failed attempt."""
    kind = name if " " in name else f"{name} hook"
    return HookFailed(f"{kind} raised {type(error).__name__}: {shown(error, str, 1000)}")


def is_coroutine_function(function: Hook) -> bool:
    """Also of an object with an `async def __call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


_ANY = "**"


def _keywords(function: Hook) -> set[str]:
    """Names that the hook takes by keyword; `_ANY` if it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except Exception:  # noqa: BLE001 (a `__signature__` is others' code)
        return set()
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return names | {_ANY} if any(p.kind is p.VAR_KEYWORD for p in parameters) else names


def look_in_working_directory() -> None:
    """A command that calls the user's functions finds their modules where it was started, as `python -m` and
    `python script.py` do, and so do the processes that it starts."""
    if not getattr(sys.flags, "safe_path", False) and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def load_hook(path: str, name: str) -> Hook:
    """The function at `module:function` or `module.function`. `BadInput` names the option, the path and what is
    missing. `name`: of the hook, or the flag that was typed."""
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    named = f"{name} {path}" if name.startswith("--") else f"{name} hook {path!r}"
    if not module_name or not attribute:
        raise BadInput(f"{named} is not a dotted path: write module:function")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # others' code may raise anything when it is imported
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise BadInput(
            f"{named}: cannot import {module_name!r}: {kind}{error}; install it, or put its directory on PYTHONPATH"
        ) from error
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise BadInput(f"{named}: module {module_name!r} has no {attribute!r}") from error
    if not callable(found):
        raise BadInput(f"{named} cannot be called")
    hook: Hook = found
    return hook
