"""A worker's options as the `strawq work` command that has them.

The rule: the command is made from the verb's own options, so one that is added or renamed there is right here. What
has its default is left out; how many workers there are each worker finds out. A key is never shown.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from strawq.cli.work_verbs import work

if TYPE_CHECKING:
    from strawq_workers.worker.options import WorkerOptions

_ELSEWHERE = {"pool", "processes", "ray", "ray_address", "workers", "worker_index", "api_key"}
_HOOKS = ("generate", "sample_hooks", "reward", "dynamic_filter", "tokenize", "detokenize")


def work_command(pool: str, options: WorkerOptions) -> str:
    """For a shell. Attributes of the hooks' `args` are only in it if there is a hook."""
    hooked = any(getattr(options, name) for name in _HOOKS)
    hints = get_type_hints(work, include_extras=True)
    words = ["strawq", "work", pool]
    for name, parameter in inspect.signature(work).parameters.items():
        if name in _ELSEWHERE or (name == "hook_args" and not hooked):
            continue
        value = options.engines if name == "engine" else getattr(options, name)
        if _plain(value) != _plain(parameter.default):
            words += _words(_typed(hints[name].__metadata__[0]), value)
    return shlex.join(words)


def typed_names() -> dict[str, str]:
    """What is typed for each parameter of the verb: `--group-size` for `samples`."""
    hints = get_type_hints(work, include_extras=True)
    infos = {name: hints[name].__metadata__[0] for name in inspect.signature(work).parameters if name != "pool"}
    return {name: _typed(info).partition("/")[0] for name, info in infos.items()}


def _plain(value: Any) -> Any:
    """So that None, an empty text, list or object, 0 and False are all the same: nothing."""
    return (list(value) if isinstance(value, tuple) else value) or None


def _typed(info: Any) -> str:
    """What is typed: `--name`, or `--name/--no-name`. In an annotation typer keeps the first word as `default`."""
    words = (info.default, *(info.param_decls or ()))
    return next(word for word in words if isinstance(word, str) and word.startswith("--"))


def _words(typed: str, value: Any) -> Iterator[str]:
    yes, _, no = typed.partition("/")
    if isinstance(value, bool):
        yield yes if value else no
        return
    for one in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        yield from (yes, json.dumps(one) if isinstance(one, dict) else str(one))
