"""Merged files: many small record files as one, in which each of them stands byte for byte.

An Arrow file is read from its end: a footer lists where its record batches are, and readers skip what lies between. So
the files stand one behind the other, each at a multiple of 64 bytes, and behind them one more footer lists the record
batches of all. The whole is an Arrow file that any reader opens as one table, and every file inside is still what its
own digest says. This works for files of one schema, written by one version of Arrow: those of one `layout_of`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import blake3
import msgspec

from strawq.storage.files import Buffer

_MAGIC = b"ARROW1"
_HEAD = _MAGIC + b"\0\0"
_TAIL = struct.Struct("<i6s")
"""Size of the footer in bytes, and the magic."""
_BLOCK = struct.Struct("<qi4xq")
"""Where one record batch begins, the size of its metadata, that of its body."""
_ALIGN = 64
_BATCHES_FIELD = 3
"""Of the flatbuffers table `Footer`, after version, schema and dictionaries."""


class Merged(msgspec.Struct, frozen=True, eq=False):
    """A file that holds others: its bytes, its BLAKE3 (hex), and where each of them begins."""

    buffers: tuple[Buffer, ...]
    digest: str
    bytes: int
    offsets: tuple[int, ...]


class _Footer(msgspec.Struct, frozen=True, eq=False):
    """An Arrow file's footer: its bytes, where the reference to the list of batches is, and where the only one is."""

    data: bytearray
    field: int
    block: int


def layout_of(data: Buffer) -> bytes | None:
    """What files that go into one merged file have in common; None for a file that goes into none."""
    footer = _footer(memoryview(data))
    if footer is None:
        return None
    footer.data[footer.block : footer.block + _BLOCK.size] = bytes(_BLOCK.size)
    return bytes(footer.data)


def _footer(data: memoryview) -> _Footer | None:
    """The footer of a file with one record batch. None if it is another kind of file."""
    if len(data) < len(_HEAD) + _TAIL.size or bytes(data[: len(_HEAD)]) != _HEAD:
        return None
    size, magic = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    start = len(data) - _TAIL.size - size
    if magic != _MAGIC or size <= 0 or start < len(_HEAD):
        return None
    footer = bytearray(data[start : start + size])
    try:
        (table,) = struct.unpack_from("<I", footer)
        (back,) = struct.unpack_from("<i", footer, table)
        (known,) = struct.unpack_from("<H", footer, table - back)
        if known < 4 + 2 * (_BATCHES_FIELD + 1):
            return None
        (offset,) = struct.unpack_from("<H", footer, table - back + 4 + 2 * _BATCHES_FIELD)
        field = table + offset
        (forward,) = struct.unpack_from("<I", footer, field)
        (count,) = struct.unpack_from("<I", footer, field + forward)
    except struct.error:
        return None
    block = field + forward + 4
    if not offset or count != 1 or block + _BLOCK.size > len(footer):
        return None
    return _Footer(footer, field, block)


def merge(files: Sequence[Buffer]) -> Merged:
    """Put files of one layout into one. `ValueError` if they are not."""
    buffers: list[Buffer] = []
    offsets: list[int] = []
    blocks = bytearray()
    at, first, layout = 0, None, None
    for data in files:
        footer, shape = _footer(memoryview(data)), layout_of(data)
        if footer is None or shape is None or layout not in (None, shape):
            raise ValueError("these are not Arrow files of one schema with one record batch each")
        first, layout = first or footer, shape
        begin, metadata, body = _BLOCK.unpack_from(footer.data, footer.block)
        blocks += _BLOCK.pack(at + begin, metadata, body)
        offsets.append(at)
        size = memoryview(data).nbytes
        gap = -size % _ALIGN
        buffers += [data, bytes(gap)]
        at += size + gap
    if first is None:
        raise ValueError("there is nothing to merge")
    end = _listing(first, len(files), blocks)
    buffers.append(end)
    digest = blake3.blake3()
    for part in buffers:
        digest.update(part)
    return Merged(tuple(buffers), digest.hexdigest(), at + len(end), tuple(offsets))


def _listing(footer: _Footer, count: int, blocks: bytes | bytearray) -> bytes:
    """The footer with a new list of batches behind its other parts: the reference to it may point anywhere forward."""
    data = bytearray(footer.data)
    data[footer.block : footer.block + _BLOCK.size] = bytes(_BLOCK.size)
    data += bytes((4 - len(data)) % 8)  # the count takes 4 bytes, and what it counts stands at a multiple of 8
    struct.pack_into("<I", data, footer.field, len(data) - footer.field)
    data += struct.pack("<I", count) + blocks
    return bytes(data) + _TAIL.pack(len(data), _MAGIC)
