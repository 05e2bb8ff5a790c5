"""Making a pool on a mount that has been probed, and holding a pool's mount against what its job says it is.

The rule: a directory becomes a pool only if the mount does what the log needs, or somebody said that it shall be used
nevertheless, and then the pool remembers why it is unfit. What was made for a pool that did not come about is removed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from strawq.core.names import require_name
from strawq.errors import BadInput, UnfitMount
from strawq.model import QueueConfig
from strawq.pool import DEFAULT_QUEUE, Pool
from strawq.storage.failure import storage_failed
from strawq.storage.header import require_free
from strawq.storage.mounts import (
    check_declaration,
    measured_storage,
    mount_of,
    read_declaration,
    read_juicefs_settings,
)
from strawq.storage.probe import ProbeReport, probe

Declared = dict[str, "str | int | float | bool | None"]


def make_pool(
    path: str | os.PathLike[str],
    *,
    run_id: str = "rollout",
    queues: Mapping[str, QueueConfig] | Sequence[str] = (DEFAULT_QUEUE,),
    profile: str = "local",
    declaration: str = "",
    measure: Callable[[Path], ProbeReport] = probe,
    force: bool = False,
    way_out: str = "",
    **options: Any,
) -> tuple[Pool, ProbeReport]:
    """Probe the mount, make the pool, open it with `options`. `UnfitMount` if the mount is unfit and `force` is not
    given (`way_out` ends its message), `BadInput` if the directory is in use or the mount is not as declared."""
    require_name(run_id, "run")
    for name in queues:
        require_name(name, "queue")
    root = require_free(path)
    with _directory(root):
        report = measure(root)
        kept = _declared(report, profile, declaration)
        if report.exclusive_create == "none" or (report.verdict == "unfit" and not force):
            raise UnfitMount(
                f"{root} is unfit for a pool: {'; '.join(report.reasons)}"
                + ("" if report.exclusive_create == "none" else way_out)
            )
        made = Pool.init(
            root,
            run_id=run_id,
            storage_profile=profile,
            queues=queues,
            exclusive_create=report.exclusive_create,
            declaration=kept,
            forced=report.reasons,
            **options,
        )
    return made, report


def check_mount(path: str | os.PathLike[str], profile: str = "local", declaration: str = "") -> None:
    """Hold the settings of the mount that holds `path` against the profile and the declaration, as on making: another
    host may have mounted the volume otherwise. Reads settings only. `BadInput` names each difference."""
    mount = mount_of(os.fspath(path))
    _require_profile(os.fspath(path), profile, mount)
    if declaration:
        settings = read_juicefs_settings(mount.mount_point) if mount.is_juicefs else None
        check_declaration(read_declaration(declaration), measured_storage(mount, settings))


def _require_profile(directory: str, profile: str, mount: Any) -> None:
    if profile == "juicefs" and not mount.is_juicefs:
        raise BadInput(
            f"storage profile juicefs: {directory} lies on {mount.fs_type} ({mount.mount_point}), not on a JuiceFS "
            "mount; mount the volume, or use the profile local"
        )


def _declared(report: ProbeReport, profile: str, declaration: str) -> Declared | None:
    """What goes into the pool's header: the declaration beside what was measured."""
    _require_profile(report.directory, profile, report.mount)
    if not declaration:
        return None
    declared = read_declaration(declaration)
    check_declaration(declared, report.storage)
    measured = {f"measured_{name}": value for name, value in msgspec.structs.asdict(report.storage).items()}
    return {**msgspec.structs.asdict(declared), **measured}


class _directory:
    """The pool's directory exists while it is probed; what was made for it goes again if no pool comes of it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: list[Path] = []

    def __enter__(self) -> None:
        absent = [path for path in (self._root, *self._root.parents) if not path.exists()]
        try:
            for path in reversed(absent):
                path.mkdir(exist_ok=True)
                self._made.append(path)
        except OSError as error:
            self._remove()
            raise storage_failed("make a pool in", str(self._root), error) from error

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            self._remove()

    def _remove(self) -> None:
        for path in reversed(self._made):
            try:
                path.rmdir()
            except OSError:
                return  # somebody has put something there: theirs
