"""What slime's manager and stock sampler tell by the hooks that they call anyway: which groups a filter dropped, and
which samples a rollout delivered.

The rule: a hook of the user's is called as it would have been, with its own answer; we only look. slime passes no data
source to these hooks, so `args` names it. Without a hook that is called nothing is assumed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from strawq.errors import BadInput
from strawq_workers.slime.flags import option_of

NAME = "strawq_source"
"""Attribute of `args`: the name of its data source in this process."""
HERE = __name__
HOOKS = {
    "dynamic_sampling_filter_path": "dynamic_filter",
    "rollout_sample_filter_path": "sample_filter",
    "custom_rollout_log_function_path": "rollout_log",
}
ONLY_IF_SET = ("dynamic_sampling_filter_path", "rollout_sample_filter_path")


class Listener(Protocol):
    def saw_verdict(self, group: Sequence[Any], keep: bool, reason: str) -> None: ...

    def saw_delivery(self, rollout_id: int, samples: Sequence[Any]) -> None: ...


_listeners: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def install(args: Any, name: str, listener: Listener) -> None:
    """Put these hooks in front of the user's. Again on the same `args`: the new listener takes over."""
    _listeners[name] = listener
    setattr(args, NAME, name)
    for option, function in HOOKS.items():
        theirs = getattr(args, option, None)
        if theirs == f"{HERE}.{function}":
            continue
        if theirs or option not in ONLY_IF_SET:
            setattr(args, f"strawq_{option}", theirs)
            setattr(args, option, f"{HERE}.{function}")


def uninstall(args: Any, name: str) -> None:
    """Put the user's hooks back."""
    if getattr(args, NAME, None) != name:
        return
    for option, function in HOOKS.items():
        if getattr(args, option, None) == f"{HERE}.{function}":
            setattr(args, option, getattr(args, f"strawq_{option}", None))


def _listener(args: Any) -> Any:
    return _listeners.get(getattr(args, NAME, ""))


def _theirs(args: Any, option: str) -> Any:
    """The user's function behind one of ours."""
    path = getattr(args, f"strawq_{option}", None)
    if not path:
        return None
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"{option_of(option)} {path!r} cannot be loaded: {error}") from error


def dynamic_filter(args: Any, samples: Any, **options: Any) -> Any:
    """In front of `--dynamic-sampling-filter-path`."""
    answer = _theirs(args, "dynamic_sampling_filter_path")(args, samples, **options)
    keep = answer if isinstance(answer, bool) else bool(getattr(answer, "keep", False))
    listener = _listener(args)
    if listener is not None:
        listener.saw_verdict(samples, keep, str(getattr(answer, "reason", None) or "unspecified"))
    return answer


def sample_filter(args: Any, groups: list[Any]) -> Any:
    """In front of `--rollout-sample-filter-path`, which may take whole groups out of the batch."""
    before = list(groups)
    answer = _theirs(args, "rollout_sample_filter_path")(args, groups)
    listener = _listener(args)
    if listener is not None:
        kept = {id(group) for group in groups}
        for group in before:
            if id(group) not in kept:
                listener.saw_verdict(group, False, "rollout_sample_filter")
    return answer


def rollout_log(rollout_id: int, args: Any, samples: Any, *more: Any, **options: Any) -> Any:
    """In front of `--custom-rollout-log-function-path`: slime calls it with what the rollout delivered."""
    listener = _listener(args)
    if listener is not None:
        listener.saw_delivery(int(rollout_id), samples)
    theirs = _theirs(args, "custom_rollout_log_function_path")
    return False if theirs is None else theirs(rollout_id, args, samples, *more, **options)
