"""Archives: groups kept beyond their consumption, within the pool by reference, or on their own at any fsspec URL.

An archive by reference costs no bytes: it is one more root, until it is deleted. A self-contained one is a directory
of the same Arrow files and packs, under their digests, and `manifest.json`, which is written last: a directory without
a whole manifest is no archive. Whoever loads it checks every byte against the manifest, and the manifest against
itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from blake3 import blake3

from strawq.core import commands as c
from strawq.core.machine import Machine
from strawq.core.names import quoted
from strawq.errors import BadInput, Damaged, FormatUnsupported, StorageFailed, StrawqError
from strawq.handles import Batch, Held
from strawq.inspection import by_position
from strawq.model import Archive, ObjectRef, StoredObject, Task
from strawq.pool import encode_metadata
from strawq.remote import exists, open_remote, read_remote, write_remote
from strawq.storage import layout

if TYPE_CHECKING:
    from strawq.pool import Pool
    from strawq.samples import Group

ARCHIVE_VERSION = 1
MANIFEST = "manifest.json"
_DIGEST_CHARACTERS = 64
_COPY_BYTES = 8 << 20


class Manifest(msgspec.Struct, frozen=True):
    """What a self-contained archive holds. `packs` gives the BLAKE3 of each whole tensor file; `blake3` is the digest
    of all the rest of the manifest."""

    strawq_archive: int
    name: str
    queue: str
    pool_id: str
    tasks: tuple[Task, ...]
    objects: tuple[ObjectRef, ...]
    packs: dict[str, str]
    metadata: str = ""
    time_ms: int = 0
    blake3: str = ""


def save_archive(
    pool: Pool,
    name: str,
    queue: str,
    tasks: Sequence[str],
    metadata: Mapping[str, Any] | None = None,
    *,
    request_id: str | None = None,
) -> Archive:
    """Keep the groups of these live tasks as they are now. `BadInput` if the name is taken or a task has ended, or if
    this request is a repeated one whose archive has been deleted since."""
    command = c.KeepArchive(
        request=pool.request(request_id),
        queue=queue,
        name=name,
        tasks=tuple(tasks),
        metadata=encode_metadata(metadata),
        time_ms=pool.clock.wall_ms(),
    )
    archive: Archive | None = pool.commit(command, view=lambda machine, _: machine.state.archives.get(name))
    if archive is None:
        raise BadInput(f"archive {name} was kept by this request and has been deleted since; take a new request id")
    return archive


class HeldBatch(Protocol):
    """What stands around a batch, as a collector's does."""

    @property
    def batch(self) -> Batch: ...


def save_batch(pool: Pool, name: str, batch: Batch | HeldBatch, metadata: Mapping[str, Any] | None = None) -> Archive:
    """Keep the groups of a batch that is in hand, a queue's or a collector's."""
    held = batch if isinstance(batch, Batch) else batch.batch
    return save_archive(pool, name, held.queue, held.tasks, metadata)


def list_archives(pool: Pool) -> list[Archive]:
    """Those of the pool, as they were made."""
    archives: list[Archive] = pool.log.refresh(lambda machine: by_position(machine.state.archives.values()))
    return archives


def delete_archive(pool: Pool, name: str, *, request_id: str | None = None) -> None:
    """Drop the archive; what only it kept is garbage from then on. `BadInput` if there is none of that name."""
    pool.commit(c.DropArchive(request=pool.request(request_id), name=name))


def held_by(pool: Pool, name: str) -> tuple[Archive, list[Held]]:
    """An archive and what its groups refer to. `BadInput` if there is none of that name."""

    def look(machine: Machine) -> tuple[Archive, list[Held]] | list[str]:
        archive = machine.state.archives.get(name)
        if archive is None:
            return list(machine.state.archives)
        objects = machine.state.objects
        return archive, [Held(task, {p.object: objects[p.object] for p in task.parts}) for task in archive.tasks]

    found: tuple[Archive, list[Held]] | list[str] = pool.log.refresh(look)
    if isinstance(found, list):
        there = f"archives: {', '.join(found) or 'none'}"
        if not name:
            raise BadInput(f"{pool.path} is a pool: name one of its archives ({there})")
        raise BadInput(f"there is no archive {quoted(name)} in {pool.path} ({there})")
    return found


def load_archive(pool: Pool, name: str) -> Iterator[Group]:
    """The groups of an archive within the pool, in its order. Tensors are read when they are touched."""
    return (pool.payloads.load(held) for held in held_by(pool, name)[1])


def require_no_archive(url: str) -> None:
    """`BadInput` if an archive is there, or if there is no driver for such a place."""
    if exists(url, MANIFEST):
        raise BadInput(f"{url} holds an archive already; choose another place")


def write_archive(pool: Pool, name: str, url: str) -> Manifest:
    """Write an archive of the pool to a directory at `url`, self-contained. `BadInput` if an archive is there.

    What is copied is pinned meanwhile: the archive may be deleted, and garbage collected, and the copy is whole."""
    require_no_archive(url)
    archive, groups = held_by(pool, name)
    with _pinned(pool, groups):
        return _write(pool, archive, groups, url)


@contextmanager
def _pinned(pool: Pool, groups: Sequence[Held]) -> Iterator[None]:
    """Where the pool cannot be written (full, read-only) it is left as it is: carrying groups away must work there too,
    and whoever deletes them meanwhile makes the copy fail with `Gone`."""
    name = f"copy-{pool.new_request()}"
    try:
        pool.pin(name, groups)
    except StorageFailed:
        yield
        return
    try:
        yield
    finally:
        # It ends with the session in any case.
        with suppress(StrawqError):
            pool.unpin(name)


def _write(pool: Pool, archive: Archive, groups: Sequence[Held], url: str) -> Manifest:
    stored = {digest: row for held in groups for digest, row in held.objects.items()}
    packs: dict[str, str] = {}
    refs = []
    for row in stored.values():
        ref = row.ref
        write_remote(url, f"objects/{ref.digest}.arrow", [pool.objects.read_checked(_now(pool, row))])
        if ref.pack and ref.pack not in packs:
            path = layout.pack_file(ref.epoch, ref.pack)
            pool.payloads.verify_pack(path, ref.pack)
            packs[ref.pack] = _copy_pack(pool, path, url, ref)
        refs.append(msgspec.structs.replace(ref, epoch=0, file="", offset=0))
    manifest = Manifest(
        strawq_archive=ARCHIVE_VERSION,
        name=archive.name,
        queue=archive.queue,
        pool_id=pool.header.pool_id,
        tasks=archive.tasks,
        objects=tuple(refs),
        packs=packs,
        metadata=archive.metadata,
        time_ms=archive.time_ms,
    )
    sealed = msgspec.structs.replace(manifest, blake3=_digest(manifest))
    write_remote(url, MANIFEST, [msgspec.json.encode(sealed)])
    return sealed


def _now(pool: Pool, row: StoredObject) -> StoredObject:
    """Where the object is by now: a trim may have moved it out of the log."""
    return pool.locate(row.ref.digest) or row


def _copy_pack(pool: Pool, path: str, url: str, ref: ObjectRef) -> str:
    """Copy in pieces; returns the BLAKE3 of the whole file."""
    whole = blake3()

    def pieces() -> Iterator[memoryview]:
        for offset in range(0, ref.pack_bytes, _COPY_BYTES):
            piece = memoryview(bytearray(min(_COPY_BYTES, ref.pack_bytes - offset)))
            if pool.files.read_into(path, offset, piece) != len(piece):
                raise Damaged(f"{path} is shorter than the {ref.pack_bytes} bytes that were published")
            whole.update(piece)
            yield piece

    write_remote(url, f"packs/{ref.pack}.safetensors", pieces())
    return whole.hexdigest()


def _digest(manifest: Manifest) -> str:
    return blake3(msgspec.json.encode(msgspec.structs.replace(manifest, blake3=""))).hexdigest()


def read_manifest(url: str) -> Manifest:
    """The manifest of the archive at `url`. `BadInput` if none is there, `Damaged` if it is not as it was written."""
    if not exists(url, MANIFEST):
        raise BadInput(
            f"{url} is no archive: it has no {MANIFEST} (an archive that was not written to its end has none)"
        )
    data = read_remote(url, MANIFEST)
    try:
        version = msgspec.json.decode(data, type=_Version).strawq_archive
        if version != ARCHIVE_VERSION:
            raise FormatUnsupported(f"{url} is an archive of version {version}; this strawq reads {ARCHIVE_VERSION}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(f"{url}/{MANIFEST} is damaged ({error}); restore it from a copy") from error
    names = [*(ref.digest for ref in manifest.objects), *(ref.pack for ref in manifest.objects if ref.pack)]
    if manifest.blake3 != _digest(manifest) or not all(_is_digest(name) for name in names):
        raise Damaged(f"{url}/{MANIFEST} is damaged (its bytes do not match its digest); restore it from a copy")
    return manifest


class _Version(msgspec.Struct):
    strawq_archive: int


def _is_digest(name: str) -> bool:
    """Digests become file names here: nothing else may."""
    return len(name) == _DIGEST_CHARACTERS and set(name) <= set("0123456789abcdef")


@contextmanager
def open_archive(url: str) -> Iterator[Iterator[Group]]:
    """The groups of the self-contained archive at `url`, in its order, for the time of the `with` block.

    Tensor files are fetched into a temporary directory when the first group needs them, and are checked whole."""
    manifest = read_manifest(url)
    with tempfile.TemporaryDirectory(prefix="strawq-archive-") as scratch:
        yield _groups(url, manifest, Path(scratch))


def _groups(url: str, manifest: Manifest, scratch: Path) -> Iterator[Group]:
    from strawq.storage.growth import Part, load_group
    from strawq.storage.posix import PosixFiles
    from strawq.storage.records import Records, open_records
    from strawq.storage.tensors import PackReader

    refs = {ref.digest: ref for ref in manifest.objects}
    packs = PackReader(PosixFiles(scratch))
    opened: dict[str, Records] = {}
    for task in manifest.tasks:
        parts = []
        for piece in task.parts:
            ref = refs.get(piece.object)
            if ref is None:
                raise Damaged(f"{url}/{MANIFEST} does not list object {piece.object[:12]} of task {task.id}")
            if ref.digest not in opened:
                data = read_remote(url, f"objects/{ref.digest}.arrow")
                opened[ref.digest] = open_records(data, f"{url}/objects/{ref.digest}.arrow", digest=ref.digest)
            if ref.pack:
                _fetch_pack(url, ref, manifest, scratch)
            parts.append(Part(opened[ref.digest], piece.start, piece.stop, ref.pack))
        yield load_group(task.id, parts, packs)


def _fetch_pack(url: str, ref: ObjectRef, manifest: Manifest, scratch: Path) -> None:
    local = scratch / ref.pack
    if local.exists():
        return
    name = f"packs/{ref.pack}.safetensors"
    whole = blake3()
    with open_remote(url, name) as source, open(local, "wb") as target:
        while piece := source.read(_COPY_BYTES):
            whole.update(piece)
            target.write(piece)
    if whole.hexdigest() != manifest.packs.get(ref.pack):
        local.unlink()
        raise Damaged(f"{url}/{name} is damaged (BLAKE3 differs); restore it from a copy")
