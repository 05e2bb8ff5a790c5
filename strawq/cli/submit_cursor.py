"""Where a submission of files stands, and what may happen next: nothing twice by accident, nothing left out.

The rule: a producer's cursor names the file by its digest and the rows of it that are in, and moves in the same commit
as the prompts. So the same command run again goes on where a crash stopped it, and finds nothing to do when all is
in. Submitting the same content once more must be said (`--again`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import msgspec

from strawq.errors import BadInput
from strawq.limits import NAME_BYTES

FILES_REMEMBERED = 32


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """`row` of the `rows` rows of `file` (a digest) are in. `done` are files before it, newest last."""

    file: str
    row: int
    rows: int
    done: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return self.row >= self.rows


def encode(cursor: Cursor) -> str:
    return msgspec.json.encode(cursor).decode()


def decode(text: str) -> Cursor | None:
    """None if nothing was submitted yet, or by something that keeps another kind of cursor."""
    try:
        return msgspec.json.decode(text, type=Cursor) if text else None
    except msgspec.MsgspecError:
        return None


def default_producer(url: str, digest: str) -> str:
    """A producer for one file: the same path or URL is the same producer."""
    from blake3 import blake3

    if url == "-":
        return f"stdin-{digest[:16]}"
    where = os.path.realpath(os.path.expanduser(url)) if "://" not in url else url
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(where.rstrip("/"))).strip("-.")[: NAME_BYTES - 18]
    return f"{stem or 'file'}-{blake3(where.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"


def begin(
    cursor: Cursor | None, url: str, digest: str, rows: int, *, producer: str, own: bool, again: bool
) -> Cursor | None:
    """From where to submit this file, or None if all of it is in. `own`: the producer stands for this URL alone.

    `BadInput` if the same URL has other content now, or the producer is in the middle of another file."""
    if cursor is None:
        return Cursor(digest, 0, rows)
    if cursor.file == digest and not cursor.complete:
        return cursor
    known = digest in (cursor.file, *cursor.done)
    if known and not again:
        return None
    if not again and own:
        raise BadInput(
            f"{url} was submitted before with other content ({cursor.row} of {cursor.rows} rows of it are in the "
            "queue); use --again to submit all of what it holds now, or another --producer"
        )
    if not again and not cursor.complete:
        raise BadInput(
            f"producer {producer} is in the middle of another file ({cursor.row} of {cursor.rows} rows are in); submit "
            f"that one first, or give up its rest with --again"
        )
    done = (*(name for name in cursor.done if name != digest), cursor.file)
    return Cursor(digest, 0, rows, tuple(name for name in done if name != digest)[-FILES_REMEMBERED:])


def require_new(digest: str, url: str, producer: str, producers: Mapping[str, str]) -> None:
    """`BadInput` if another producer has submitted the same content to this queue."""
    for other, text in producers.items():
        cursor = decode(text) if other != producer else None
        if cursor is not None and digest in (cursor.file, *cursor.done):
            raise BadInput(
                f"the content of {url} was submitted by producer {other} already; use --again to submit it once more"
            )
