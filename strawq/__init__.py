"""A durable, lease-based rollout queue for RL training of language models, in one directory of immutable files."""

from strawq.version import VERSION as __version__

__all__ = ["__version__"]
