"""What kind of mount a directory lies on, and which of its settings break a rule that strawq rests on.

The rule it keeps: settings are read from the mount itself, from /proc/mounts and JuiceFS's own `.config`, and what the
operator declares is held against them. Each finding names the setting, why it matters, and the option that mends it.

Unfit are: read-only; cached absence (a committer must see a floor at once: JuiceFS `--negative-entry-cache`, NFS
`lookupcache=all`); JuiceFS writeback, where fsync returns before the bytes have left the host, so that "accepted"
would not survive its disk. The last can be accepted by whoever runs the pool (`accept_writeback`), because it weakens
durability only, never exclusion.
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from strawq.errors import BadInput

STALE_POSITIVE_S_USUAL = 1.0  # JuiceFS's default attribute and entry caches
ATTRIBUTE_CACHE_S_MAX = 10.0

_NFS_ATTRIBUTE_CACHE_S = 60.0  # acregmax and acdirmax where /proc/mounts does not show them
_NOT_SHARED = {
    "tmpfs": "a tmpfs is gone after a reboot",
    "ramfs": "a ramfs is gone after a reboot",
    "overlay": "the layer of a container goes with it and is seen by no other host",
}
_KNOWN_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs"})


class Mount(msgspec.Struct, frozen=True):
    """One line of /proc/mounts. `options` without a value have an empty one."""

    source: str
    mount_point: str
    fs_type: str
    options: dict[str, str]

    @property
    def is_juicefs(self) -> bool:
        return self.fs_type == "fuse.juicefs" or (self.fs_type == "fuse" and self.source.startswith("JuiceFS:"))

    @property
    def is_nfs(self) -> bool:
        return self.fs_type in ("nfs", "nfs4")


class JuiceFSSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a JuiceFS client says of itself. Times in seconds."""

    version: str
    volume: str
    session: int
    read_only: bool
    writeback: bool
    kernel_writeback: bool
    open_cache_s: float
    attribute_cache_s: float
    entry_cache_s: float
    negative_entry_cache_s: float
    readdir_cache: bool
    locks: bool
    trash_days: int


class Finding(msgspec.Struct, frozen=True):
    """Something about a mount that the operator should know: `unfit` and `warning` weigh on the verdict, `note` does
    not."""

    weight: Literal["unfit", "warning", "note"]
    text: str


class StorageDeclaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator declares of a shared mount (the JSON file of `--rollout-storage-declaration`). `open_cache` in
    seconds."""

    direct_mount: bool
    writeback: bool
    open_cache: float
    readdir_cache: bool
    client_version: str
    durability_description: str


class MeasuredStorage(msgspec.Struct, frozen=True, kw_only=True):
    """The same fields as read from the mount; None where it does not tell. How durable the store behind it is, no
    mount tells."""

    direct_mount: bool | None = None
    writeback: bool | None = None
    open_cache: float | None = None
    readdir_cache: bool | None = None
    client_version: str | None = None


_SAFE: dict[str, object] = {"direct_mount": True, "writeback": False, "open_cache": 0.0, "readdir_cache": False}


def parse_mounts(text: str) -> list[Mount]:
    """Lines of /proc/mounts, where blanks and backslashes in names are octal escapes."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        options = dict(option.partition("=")[::2] for option in fields[3].split(","))
        mounts.append(Mount(_unescape(fields[0]), _unescape(fields[1]), fields[2], options))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def mount_of(path: str, mounts: list[Mount] | None = None) -> Mount:
    """The mount that holds `path` (whose links are resolved). Raises `BadInput` if /proc/mounts does not name it."""
    known = parse_mounts(Path("/proc/mounts").read_text()) if mounts is None else mounts
    real = os.path.realpath(path)
    holding = [mount for mount in known if os.path.commonpath([real, mount.mount_point]) == mount.mount_point]
    if not holding:
        raise BadInput(f"no line of /proc/mounts holds {path}; is /proc mounted?")
    # Of two mounts on one point the later hides the earlier.
    deepest = max(len(mount.mount_point) for mount in holding)
    return [mount for mount in holding if len(mount.mount_point) == deepest][-1]


def read_juicefs_settings(mount_point: str) -> JuiceFSSettings | None:
    """The client's settings from the virtual file at the root of its mount; None if it shows none."""
    for name in (".config", ".jfs.config"):  # the second with --prefix-internal
        try:
            text = Path(mount_point, name).read_bytes()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM):
                continue
            raise
        return parse_juicefs_config(json.loads(text))
    return None


def parse_juicefs_config(config: dict[str, Any]) -> JuiceFSSettings:
    """Settings out of the JSON of `.config`, whose times are in nanoseconds. What a release does not write is taken as
    off."""
    meta, chunk = config.get("Meta") or {}, config.get("Chunk") or {}
    volume, fuse = config.get("Format") or {}, config.get("FuseOpts") or {}

    def seconds(value: object) -> float:
        return value / 1e9 if isinstance(value, int | float) else 0.0

    return JuiceFSSettings(
        version=str(config.get("Version", "")),
        volume=str(volume.get("UUID", "")),
        session=int(meta.get("Sid", 0)),
        read_only=bool(meta.get("ReadOnly")),
        writeback=bool(chunk.get("Writeback")),
        kernel_writeback=bool(fuse.get("EnableWriteback")),
        open_cache_s=seconds(meta.get("OpenCache")),
        attribute_cache_s=seconds(config.get("AttrTimeout")),
        entry_cache_s=max(seconds(config.get("EntryTimeout")), seconds(config.get("DirEntryTimeout"))),
        negative_entry_cache_s=seconds(config.get("NegEntryTimeout")),
        readdir_cache=bool(config.get("ReaddirCache")),
        locks=bool(fuse.get("EnableLocks")),
        trash_days=int(volume.get("TrashDays", 0)),
    )


def judge_mount(
    mount: Mount, juicefs: JuiceFSSettings | None = None, *, accept_writeback: bool = False
) -> list[Finding]:
    """What the settings alone tell, before anything is written."""
    found = []
    if "ro" in mount.options:
        found.append(Finding("unfit", f"{mount.mount_point} is mounted read-only (ro); mount it rw"))
    if mount.is_juicefs:
        if juicefs is None:
            text = f"{mount.mount_point}/.config cannot be read, so the client's settings are not known; "
            found.append(Finding("warning", text + "run the probe as the user that mounted it"))
        else:
            found += _judge_juicefs(juicefs, accept_writeback)
    elif mount.is_nfs:
        found += _judge_nfs(mount)
    elif mount.fs_type in _NOT_SHARED:
        found.append(Finding("warning", f"{_NOT_SHARED[mount.fs_type]}; use it for trials only"))
    elif mount.fs_type in _KNOWN_LOCAL:
        if mount.options.get("barrier") == "0" or "nobarrier" in mount.options:
            text = "write barriers are off (nobarrier): what was acknowledged may be gone after a power cut; "
            found.append(Finding("warning", text + "mount with barriers"))
    else:
        text = f"file system {mount.fs_type} is not one that strawq has been tested on; "
        found.append(Finding("warning", text + "trust only what a probe with --peer measures"))
    return found


def _judge_juicefs(settings: JuiceFSSettings, accept_writeback: bool) -> list[Finding]:
    found = []

    def add(weight: Literal["unfit", "warning", "note"], text: str) -> None:
        found.append(Finding(weight, text))

    if settings.read_only:
        add("unfit", "the JuiceFS client is read-only; mount without --read-only")
    if settings.negative_entry_cache_s > 0:
        add(
            "unfit",
            f"absent names are cached for {settings.negative_entry_cache_s:g} s, so a stalled writer could miss a "
            "floor and commit twice; mount with --negative-entry-cache 0",
        )
    if settings.writeback:
        add(
            "warning" if accept_writeback else "unfit",
            "JuiceFS writeback is on: fsync returns before the bytes leave this host, so accepted results die with "
            "its disk; mount without --writeback",
        )
    if settings.kernel_writeback:
        add(
            "warning",
            "the kernel's FUSE writeback cache is on: sizes and times are this host's own; drop -o writeback_cache",
        )
    if settings.open_cache_s > 0:
        add(
            "warning",
            f"opened files are reused unchecked for {settings.open_cache_s:g} s: removed files and old heartbeats "
            "are seen longer; mount with --open-cache 0",
        )
    if settings.readdir_cache:
        add("warning", "listings are cached by the kernel: other hosts' files show late; mount without --readdir-cache")
    stale_s = max(settings.attribute_cache_s, settings.entry_cache_s)
    if stale_s > STALE_POSITIVE_S_USUAL:
        add(
            "warning",
            f"removed and replaced files are seen for up to {stale_s:g} s: leases must be much longer than that; "
            "mount with --attr-cache 1 --entry-cache 1 --dir-entry-cache 1",
        )
    if not settings.locks:
        add("warning", "file locks exclude nobody: commits stay right but contend more; mount with locks enabled")
    if settings.trash_days > 0:
        add(
            "note", f"removed files stay in JuiceFS's trash for {settings.trash_days} d: GC frees their space only then"
        )
    return found


def _judge_nfs(mount: Mount) -> list[Finding]:
    found = []
    options = mount.options
    if options.get("lookupcache", "all") not in ("none", "pos", "positive"):
        text = "NFS caches absent names (lookupcache=all): a stalled writer could miss a floor and commit twice; "
        found.append(Finding("unfit", text + "mount with lookupcache=positive"))
    local_locks = "nolock" in options or options.get("local_lock", "none") in ("all", "flock")
    if local_locks:
        text = "file locks are local to this host (nolock, local_lock): commits stay right but contend more; use "
        found.append(Finding("warning", text + "local_lock=none and a lock service"))
    if "soft" in options or "softerr" in options:
        text = "a soft NFS mount gives up on a slow server: more commits end with an unknown outcome; mount hard"
        found.append(Finding("warning", text))
    cache_s = attribute_cache_s(mount)
    if cache_s > ATTRIBUTE_CACHE_S_MAX:
        text = f"attributes are cached for up to {cache_s:g} s: removed files are seen that long; mount with actimeo=1"
        found.append(Finding("warning", text))
    found.append(Finding("note", "whether the NFS server syncs (export option sync) cannot be seen from here"))
    return found


def attribute_cache_s(mount: Mount) -> float:
    """How long this NFS client may answer from its attribute cache, in seconds."""
    if "noac" in mount.options:
        return 0.0
    if "actimeo" in mount.options:
        return float(mount.options["actimeo"])
    return max(float(mount.options.get(name, _NFS_ATTRIBUTE_CACHE_S)) for name in ("acregmax", "acdirmax"))


def measured_storage(mount: Mount, juicefs: JuiceFSSettings | None) -> MeasuredStorage:
    """What can be held against a declaration."""
    if not mount.is_juicefs:
        return MeasuredStorage(direct_mount=False)
    if juicefs is None:
        return MeasuredStorage(direct_mount=True)
    return MeasuredStorage(
        direct_mount=True,
        writeback=juicefs.writeback,
        open_cache=juicefs.open_cache_s,
        readdir_cache=juicefs.readdir_cache,
        client_version=juicefs.version or None,
    )


def read_declaration(path: str | os.PathLike[str]) -> StorageDeclaration:
    """Read a declaration. `BadInput` names the file and the field."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=StorageDeclaration)
    except OSError as error:
        raise BadInput(f"storage declaration {os.fspath(path)}: {error.strerror}; check the path") from error
    except msgspec.MsgspecError as error:
        raise BadInput(f"storage declaration {os.fspath(path)}: {error}; correct the file") from error


def check_declaration(declared: StorageDeclaration, measured: MeasuredStorage) -> None:
    """Hold a declaration against the mount. `BadInput` names each field that the mount contradicts, or that declares
    what strawq cannot work on; a field that the mount does not tell is believed."""
    faults = []
    for field, safe in _SAFE.items():
        said, found = getattr(declared, field), getattr(measured, field)
        if found is not None and said != found:
            faults.append(f"{field} is declared as {_json(said)}, but the mount has {_json(found)}")
        elif said != safe:
            faults.append(f"{field} is declared as {_json(said)}, and must be {_json(safe)}")
    version = measured.client_version
    if version is not None and not _same_version(declared.client_version, version):
        faults.append(f'client_version is declared as "{declared.client_version}", but the mount has "{version}"')
    if not declared.durability_description.strip():
        faults.append("durability_description is empty: say what keeps objects and metadata, and in how many copies")
    if faults:
        raise BadInput("storage declaration: " + "; ".join(faults) + "; mend the mount or the declaration")


def _json(value: object) -> str:
    return msgspec.json.encode(int(value) if isinstance(value, float) and value.is_integer() else value).decode()


def _same_version(declared: str, found: str) -> bool:
    """`1.4.2` stands for any build of it, such as `1.4.2+2026-10-26.pypi`."""
    return found == declared or (bool(declared) and found.startswith(declared) and found[len(declared)] in "+- (")
