"""slime's two hooks on a whole batch: `rollout_sample_filter_path` and `rollout_all_samples_process_path`.

The rule: they see the groups of the data source's own samples, after the batch is complete. The filter marks samples
(`remove_sample`) or takes groups out; the other one only looks. They get lists of their own, so a batch that they spoil
goes back as it was, and what they raise or leave in the batch goes to the caller as `HookFailed`.
"""

from __future__ import annotations

from typing import Any

from strawq.errors import BadInput
from strawq_workers.rollout.settings import hook_path
from strawq_workers.worker.hooks import load_hook, raised
from strawq_workers.worker.views import HookFailed, shown


def select(args: Any, groups: list[list[Any]], data_source: Any) -> list[list[Any]]:
    """The batch after the user's hooks."""
    chosen = groups
    path = hook_path(args, "rollout_sample_filter_path")
    if path:
        chosen = _lists(groups)
        _call(path, "rollout_sample_filter", args, chosen)
        for at, group in enumerate(chosen):
            _require_samples(group, f"rollout_sample_filter hook {path} left item {at} of the batch")
    path = hook_path(args, "rollout_all_samples_process_path")
    if path:
        _call(path, "rollout_all_samples_process", args, _lists(groups), data_source)
    return chosen


def _lists(items: list[Any]) -> list[Any]:
    """Lists in lists anew, with the same samples."""
    return [_lists(item) if isinstance(item, list) else item for item in items]


def _require_samples(group: Any, what: str) -> None:
    """A group is a list of samples, or of lists of them."""
    if not isinstance(group, (list, tuple)) or not group:
        raise HookFailed(f"{what} as {shown(group)}: mark samples (remove_sample), or take groups out of the list")
    for item in group:
        if isinstance(item, (list, tuple)):
            _require_samples(item, what)
        elif not hasattr(item, "response_length") or not hasattr(item, "tokens"):
            raise HookFailed(f"{what} with {shown(item)} in it, which is no sample: mark samples with remove_sample")


def _call(path: str, name: str, *arguments: Any) -> None:
    hook = load_hook(path, name)
    try:
        hook(*arguments)
    except Exception as error:
        raise raised(name, error) from error


def refuse_all_samples_hook(args: Any) -> None:
    """Nobody sees all samples where many processes generate."""
    if hook_path(args, "rollout_all_samples_process_path"):
        raise BadInput("distributed fully-async rollout doesn't support --rollout-all-samples-process-path")
