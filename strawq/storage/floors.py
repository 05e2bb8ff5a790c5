"""Floors: how a trim tells every committer, before the first entry goes, which entries may be gone.

A floor is written once, under the number of its trim, and never deleted. It is sealed: a wrong floor would make a
writer take a ghost for its commit, or a reader look for history that was never trimmed, so one that is not whole is
an error and never a guess.
"""

from __future__ import annotations

import msgspec

from strawq.errors import Damaged
from strawq.storage import layout
from strawq.storage.failure import storage_failed
from strawq.storage.files import Files
from strawq.storage.sealed import Unsealed, seal, unseal


class FloorLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of `floors/<number>`: entries below `floor` may be gone since trim `number`."""

    number: int
    floor: int


_decoder = msgspec.json.Decoder(FloorLine)


def encode_floor(number: int, floor: int) -> bytes:
    return seal(msgspec.json.encode(FloorLine(number, floor)))[0]


def decode_floor(number: int, data: bytes) -> int:
    path = layout.floor(number)
    try:
        first, _, rest = unseal(data)
        line = _decoder.decode(first)
    except (Unsealed, msgspec.MsgspecError) as error:
        raise _damaged(path, str(error)) from error
    if line.number != number or rest or line.floor < 0:
        raise _damaged(path, f"it is floor {line.floor} of trim {line.number}, with {len(rest)} bytes behind it")
    return line.floor


def read_floor(files: Files, number: int) -> int:
    """Entries below this number may be gone since trim `number`. `FileNotFoundError` if there was no such trim."""
    path = layout.floor(number)
    try:
        data = files.read(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_failed("read", path, error) from error
    return decode_floor(number, data)


def _damaged(path: str, why: str) -> Damaged:
    return Damaged(f"floor {path} is damaged: {why}; restore it from a copy, or run `strawq verify POOL --repair`")
