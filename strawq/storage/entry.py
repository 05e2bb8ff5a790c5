"""One log entry as bytes, and back. A reader has a whole entry or an error that names it; never half of one.

line 1   JSON: sequence number, digest of the entry before, commit id, who, when, the events, the inline objects'
digests and sizes line 2   JSON: BLAKE3 of line 1 then     the inline objects' bytes, in order; each is named by its
own digest, which is checked when it is read
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from strawq.errors import Damaged
from strawq.storage.sealed import Unsealed, seal, unseal


class EntryLine(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Line 1. `inline` are pairs of digest and size in bytes; their offsets follow from the order. `voids` names the
    first of the entries right before this one that were never whole (mostly there is one), so that history goes on
    behind them; `prev` is then the one before those."""

    seq: int
    prev: str
    id: str
    session: str
    time_ms: int
    events: list[msgspec.Raw]
    inline: list[tuple[str, int]] = []
    voids: int = 0


class Entry(msgspec.Struct, frozen=True):
    line: EntryLine
    digest: str
    payload: memoryview
    size: int

    def where(self) -> dict[str, int]:
        """Offset of each inline object in the payload, by digest."""
        return offsets(self.line.inline)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(EntryLine)


def offsets(inline: Sequence[tuple[str, int]]) -> dict[str, int]:
    where, at = {}, 0
    for digest, size in inline:
        where[digest] = at
        at += size
    return where


def encode_entry(line: EntryLine) -> tuple[bytes, str]:
    """Lines 1 and 2, and the entry's digest (64 hex characters)."""
    return seal(_encoder.encode(line))


def decode_entry(seq: int, path: str, data: bytes) -> Entry:
    """Check and parse the bytes of entry `seq`. `Damaged` names the file."""
    try:
        first, digest, payload = unseal(data)
    except Unsealed as error:
        raise _damaged(path, str(error)) from error
    try:
        line = _decoder.decode(first)
    except msgspec.MsgspecError as error:
        raise Damaged(
            f"log entry {path} is not an entry of this format ({error}): a newer strawq may have written it; use "
            "that one"
        ) from error
    if line.seq != seq:
        raise _damaged(path, f"it is entry {line.seq}")
    if len(payload) != sum(size for _, size in line.inline):
        raise _damaged(path, f"its payload has {len(payload)} bytes")
    return Entry(line, digest, payload, len(data))


def is_torn(data: bytes) -> bool:
    """Whether these are the bytes of an entry that was never whole. One that is whole and not understood is none: a
    newer strawq may have written it, and told somebody that it happened."""
    try:
        first, _, payload = unseal(data)
    except Unsealed:
        return True
    try:
        line = _decoder.decode(first)
    except msgspec.MsgspecError:
        return False
    return len(payload) != sum(size for _, size in line.inline)


def _damaged(path: str, why: str) -> Damaged:
    return Damaged(
        f"log entry {path} is damaged: {why}; if it stays so, `strawq verify POOL --repair` lets history go on "
        "behind it"
    )
