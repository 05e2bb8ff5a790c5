"""`strawq.json`: what makes a directory a pool. Written once, as the last file of a new pool, and never changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import blake3
import msgspec

from strawq.errors import BadInput, Damaged, FormatUnsupported, NotAPool, StorageFailed
from strawq.limits import FORMAT_VERSION
from strawq.model import PoolHeader
from strawq.storage import layout
from strawq.storage.clock import Clock
from strawq.storage.failure import storage_failed
from strawq.storage.files import Files
from strawq.storage.staging import Staging, make_directories

_HEADER_WAITS_SECONDS = (0.02, 0.1, 0.4)


def create_pool(files: Files, header: PoolHeader) -> None:
    """Write the directories and, last, the header that makes them a pool. `FileExistsError` if somebody was first: not
    if the header there is this one, for a server that has lost its reply says that the name is taken, too."""
    make_directories(files)
    staging = Staging(files, header.pool_id)
    data = encode_header(header)
    if not staging.place([data], layout.HEADER) and files.read(layout.HEADER) != data:
        raise FileExistsError(layout.HEADER)
    files.sync_directory("")


def encode_header(header: PoolHeader) -> bytes:
    """The bytes of `strawq.json`: readable, and with a digest of everything in it. One header has one encoding."""
    digest = blake3.blake3(msgspec.json.encode(msgspec.structs.replace(header, blake3=""))).hexdigest()
    sealed = msgspec.structs.replace(header, blake3=digest)
    return msgspec.json.format(msgspec.json.encode(sealed), indent=2) + b"\n"


def read_header_patiently(files: Files, path: str, clock: Clock) -> PoolHeader:
    """A mount may show a fresh file late, or zeros for a while; damage is believed when it stays."""
    for wait in _HEADER_WAITS_SECONDS:
        try:
            return read_header(files, path)
        except (Damaged, StorageFailed):
            clock.sleep(wait)
    return read_header(files, path)


def read_header(files: Files, path: str) -> PoolHeader:
    """`strawq.json`. `NotAPool`, `FormatUnsupported` or `Damaged` say what is wrong with it."""
    where = path or "this directory"
    try:
        data = files.read(layout.HEADER)
    except FileNotFoundError as error:
        raise NotAPool(f"{where} is not a pool: it has no {layout.HEADER}; make one with `strawq init POOL`") from error
    except OSError as error:
        raise storage_failed("read", f"{where}/{layout.HEADER}", error) from error
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise FormatUnsupported(
                f"{where} has format version {version}; this strawq reads version {FORMAT_VERSION}: use a "
                f"{'newer' if version > FORMAT_VERSION else 'matching'} strawq"
            )
        header = msgspec.json.decode(data, type=PoolHeader)
        if encode_header(header) == data:
            return header
        problem = "its bytes do not match its digest"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = str(error)
    raise Damaged(
        f"{where}/{layout.HEADER} is damaged ({problem}); restore it from a copy: without it the pool is not opened"
    )


class _Version(msgspec.Struct):
    format_version: int


_MOUNT_NAMES = frozenset({".accesslog", ".config", ".stats", ".trash", "lost+found"})
"""What a mount's own root may hold."""


def require_free(path: str | os.PathLike[str]) -> Path:
    """Where a new pool may be made: the absolute path of a directory that is empty or not there. `BadInput` says why
    not."""
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise BadInput(f"{os.fspath(path)!r} is no directory; name one for the pool")
    root = Path(path).expanduser().absolute()
    try:
        if not root.is_dir():
            if root.exists():
                raise BadInput(f"{root} is not a directory; choose a new directory for the pool, or an empty one")
            above = next((path for path in root.parents if path.exists()), root)
            if not above.is_dir():
                raise BadInput(
                    f"{above} is not a directory: nothing can be made in it; choose another place for the pool"
                )
            return root
        there = {name for name in os.listdir(root) if not name.startswith(layout.PROBES)}
        foreign = sorted(there - set(layout.DIRECTORIES) - _MOUNT_NAMES)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise BadInput(
                f"the path {str(root)[:200]}... is too long for the file system; choose a shorter one"
            ) from error
        raise storage_failed("look into", str(root), error) from error
    if layout.HEADER in foreign:
        raise BadInput(f"{root} holds a pool already; open it, or choose another directory")
    if foreign:
        raise BadInput(f"{root} is not empty (it holds {foreign[0]!r}); choose a new directory for the pool")
    return root
