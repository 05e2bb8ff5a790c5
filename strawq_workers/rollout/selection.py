"""slime's two hooks on a whole batch: `rollout_sample_filter_path` and `rollout_all_samples_process_path`.

The rule: they see the groups of the data source's own samples, after the batch is complete. The filter marks samples
(`remove_sample`) or takes groups out; the other one only looks. What they raise goes to the caller as `HookFailed`.
"""

from __future__ import annotations

from typing import Any

from strawq.errors import BadInput
from strawq_workers.rollout.settings import hook_path
from strawq_workers.worker.hooks import load_hook
from strawq_workers.worker.views import HookFailed


def select(args: Any, groups: list[list[Any]], data_source: Any) -> list[list[Any]]:
    """The batch after the user's hooks."""
    chosen = groups
    path = hook_path(args, "rollout_sample_filter_path")
    if path:
        chosen = list(groups)
        _call(path, "rollout_sample_filter", args, chosen)
    path = hook_path(args, "rollout_all_samples_process_path")
    if path:
        _call(path, "rollout_all_samples_process", args, groups, data_source)
    return chosen


def _call(path: str, name: str, *arguments: Any) -> None:
    hook = load_hook(path, name)
    try:
        hook(*arguments)
    except Exception as error:
        raise HookFailed(f"{name} hook raised {type(error).__name__}: {error}") from error


def refuse_all_samples_hook(args: Any) -> None:
    """Nobody sees all samples where many processes generate."""
    if hook_path(args, "rollout_all_samples_process_path"):
        raise BadInput("distributed fully-async rollout doesn't support --rollout-all-samples-process-path")
