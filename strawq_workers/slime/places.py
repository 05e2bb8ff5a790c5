"""What flags name on disk, held against the disk before anything is started or made.

The rule: a path that cannot be what its flag says it is (a file in place of a directory, a link to nothing, a place
that may not be read or written) is bad input, named with its flag. Nothing is made here: a directory that can be made
is as good as one that is there.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from strawq.errors import BadInput
from strawq_workers.slime.flags import option_of


def require_places(args: Any, *, pool: bool) -> None:
    """`BadInput` for the first flag whose path cannot be used as it says; with `pool` those of a pool too. URLs are
    left to those who open them."""
    for name in ("save", "rollout_data_dir") if pool else ("save",):
        if given := getattr(args, name, None):
            require_writable(option_of(name), given)
    archives = str(getattr(args, "save_debug_rollout_data", None) or "")
    if archives and "://" not in archives:
        # What stands before the number: the rest may be new for each rollout.
        directory = os.path.dirname(archives.partition("{")[0])
        require_writable(option_of("save_debug_rollout_data"), directory or ".")
    if load := getattr(args, "load", None):
        require_readable(option_of("load"), load, directory=True)
    if pool and (declaration := getattr(args, "rollout_storage_declaration", None)):
        require_readable(option_of("rollout_storage_declaration"), declaration, directory=False)


def expanded(given: str | os.PathLike[str]) -> Path:
    """The path that a flag names, wherever the process goes later."""
    return Path(given).expanduser().absolute()


PATHS = ("prompt_data", "hf_checkpoint", "rollout_data_dir", "rollout_storage_declaration", "save", "load",
         "save_debug_rollout_data", "load_debug_rollout_data")  # fmt: skip


def anywhere(args: Any) -> Any:
    """The same flags for a process that is started in another directory: paths on this machine's disk are absolute."""
    found = copy.copy(args)
    for name in PATHS:
        given = getattr(args, name, None)
        # The name of a model on a hub looks like a path.
        if given and "://" not in given and (name != "hf_checkpoint" or os.path.lexists(expanded(given))):
            setattr(found, name, str(expanded(given)))
    return found


def require_writable(option: str, given: str | os.PathLike[str]) -> Path:
    """The directory, which is there or can be made. `BadInput` with the flag if it is not so."""
    path = expanded(given)
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    _require_directory(option, given, nearest)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise BadInput(f"{option} {given}: nothing may be written in {nearest}; change its permissions or the flag")
    return path


def require_readable(option: str, given: str | os.PathLike[str], *, directory: bool) -> Path:
    """The path, which may be read, or is a directory that is not there yet. `BadInput` with the flag if it is not."""
    path = expanded(given)
    if not os.path.lexists(path):
        if not directory:
            raise BadInput(f"{option} {given}: there is no such file")
        nearest = next(place for place in path.parents if os.path.lexists(place))
        _require_directory(option, given, nearest)
        return path
    if directory:
        _require_directory(option, given, path)
    elif not path.is_file():
        raise BadInput(f"{option} {given} is not a file")
    if not os.access(path, os.R_OK | (os.X_OK if directory else 0)):
        raise BadInput(f"{option} {given} may not be read: change its permissions or the flag")
    return path


def _require_directory(option: str, given: Any, path: Path) -> None:
    if not path.exists():
        raise BadInput(f"{option} {given}: {path} is a link to {os.readlink(path)}, which is not there")
    if not path.is_dir():
        raise BadInput(f"{option} {given}: {path} is not a directory")
