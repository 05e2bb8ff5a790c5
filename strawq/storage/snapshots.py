"""Snapshots bound replay: the folded state at one entry. Same entry, same bytes, whoever writes it.

A snapshot is published only after the names of all entries up to it are durable, so that no machine crash leaves a
hole behind one.
"""

from __future__ import annotations

from collections.abc import Iterator

import blake3
import msgspec

from strawq.errors import Damaged
from strawq.limits import FORMAT_VERSION
from strawq.storage import layout
from strawq.storage.failure import storage_failed
from strawq.storage.files import Files
from strawq.storage.sealed import Unsealed, seal, unseal


class SnapshotLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a snapshot, which the second one seals; the state's bytes follow. `tip` is the digest of entry
    `seq`, on which the next entry is built, so it is covered like everything else."""

    format_version: int
    pool: str
    seq: int
    tip: str
    size: int
    blake3: str


class Snapshot(msgspec.Struct, frozen=True):
    line: SnapshotLine
    body: memoryview


_decoder = msgspec.json.Decoder(SnapshotLine)


def encode_snapshot(pool: str, seq: int, tip: str, body: bytes) -> bytes:
    line = SnapshotLine(FORMAT_VERSION, pool, seq, tip, len(body), blake3.blake3(body).hexdigest())
    return seal(msgspec.json.encode(line))[0] + body


def decode_snapshot(pool: str, seq: int, data: bytes) -> Snapshot:
    path = layout.snapshot(seq)
    try:
        first, _, body = unseal(data)
        line = _decoder.decode(first)
    except Unsealed as error:
        raise _damaged(path, str(error)) from error
    except msgspec.MsgspecError as error:
        raise _damaged(path, f"its first line is not one of this format ({error})") from error
    if (line.format_version, line.pool, line.seq, line.size) != (FORMAT_VERSION, pool, seq, len(body)):
        raise _damaged(path, f"it is snapshot {line.seq} of pool {line.pool}, {len(body)} of {line.size} bytes")
    if blake3.blake3(body).hexdigest() != line.blake3:
        raise _damaged(path, "its bytes do not match its digest")
    return Snapshot(line, body)


def snapshot_numbers(files: Files) -> list[int]:
    """Entry numbers of the snapshots that a listing shows, newest first."""
    numbers = (layout.snapshot_seq(name) for name in files.names(layout.SNAPSHOTS))
    return sorted((number for number in numbers if number), reverse=True)


def usable_snapshots(files: Files, pool: str, damage: dict[str, str]) -> Iterator[Snapshot]:
    """Whole snapshots, newest first. What is damaged or cannot be read is named in `damage` and passed over."""
    try:
        numbers = snapshot_numbers(files)
    except OSError as error:
        raise storage_failed("list", layout.SNAPSHOTS, error) from error
    for seq in numbers:
        path = layout.snapshot(seq)
        try:
            yield decode_snapshot(pool, seq, files.read(path))
        except FileNotFoundError:
            continue
        except Damaged as error:
            damage[path] = str(error)
        except OSError as error:
            damage[path] = str(storage_failed("read", path, error))


def _damaged(path: str, why: str) -> Damaged:
    return Damaged(f"snapshot {path} is damaged: {why}; remove it, an older snapshot and the log serve")
