"""What a slime user turns on: data sources, flags and samples under slime's names.

Names are imported when they are first used, so that a flag parser does not load an engine client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strawq_workers.rollout import generate_rollout as generate_rollout
    from strawq_workers.rollout import generate_rollout_fully_async as generate_rollout_fully_async
    from strawq_workers.slime.arguments import add_rollout_arguments as add_rollout_arguments
    from strawq_workers.slime.arguments import validate_rollout_arguments as validate_rollout_arguments
    from strawq_workers.slime.arguments import worker_options as worker_options
    from strawq_workers.slime.codec import group_of as group_of
    from strawq_workers.slime.codec import prompt_of as prompt_of
    from strawq_workers.slime.codec import samples_of as samples_of
    from strawq_workers.slime.object_store import ObjectStoreDataSource as ObjectStoreDataSource
    from strawq_workers.slime.sample import Sample as Sample
    from strawq_workers.slime.sample import sample_class as sample_class
    from strawq_workers.slime.straw_source import StrawDataSource as StrawDataSource

_WHERE = {
    "ObjectStoreDataSource": "strawq_workers.slime.object_store",
    "Sample": "strawq_workers.slime.sample",
    "StrawDataSource": "strawq_workers.slime.straw_source",
    "add_rollout_arguments": "strawq_workers.slime.arguments",
    "generate_rollout": "strawq_workers.rollout",
    "generate_rollout_fully_async": "strawq_workers.rollout",
    "group_of": "strawq_workers.slime.codec",
    "prompt_of": "strawq_workers.slime.codec",
    "sample_class": "strawq_workers.slime.sample",
    "samples_of": "strawq_workers.slime.codec",
    "validate_rollout_arguments": "strawq_workers.slime.arguments",
    "worker_options": "strawq_workers.slime.arguments",
}

__all__ = sorted([*_WHERE, "build_data_source"])


def build_data_source(args: Any) -> Any:
    """The data source that the flags ask for: the class of `--data-source-path`, else by `--rollout-data-transport`
    `StrawDataSource` for `straw` and `ObjectStoreDataSource` for `object-store` (slime's default). `BadInput` for any
    other."""
    transport = getattr(args, "rollout_data_transport", None) or "object-store"
    sources = {"straw": "straw_source.StrawDataSource", "object-store": "object_store.ObjectStoreDataSource"}
    if transport not in sources:
        from strawq.errors import BadInput

        raise BadInput(f"--rollout-data-transport is straw or object-store, not {transport!r}")
    path = getattr(args, "data_source_path", None)
    if path:
        from strawq_workers.worker.hooks import load_hook

        return load_hook(path, "--data-source-path")(args)
    module, name = sources[transport].split(".")
    return getattr(import_module(f"{__name__}.{module}"), name)(args)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'strawq_workers.slime' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
