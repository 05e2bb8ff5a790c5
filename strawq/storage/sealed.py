"""A line and its digest: how every small file of a pool says that it is whole.

line 1   JSON, without a newline inside
line 2   JSON: BLAKE3 of line 1
then     whatever the file carries behind them

Whoever opens one has the line exactly as it was written, or a sentence about what is wrong with it.
"""

from __future__ import annotations

import blake3


class Unsealed(ValueError):
    """The bytes are not what was written; the message says how one can tell."""


def seal(line: bytes) -> tuple[bytes, str]:
    """Lines 1 and 2, and the digest (64 hex characters)."""
    digest = blake3.blake3(line).hexdigest()
    return line + b"\n" + _second_line(digest), digest


def unseal(data: bytes) -> tuple[memoryview, str, memoryview]:
    """Line 1, its digest, and what follows the two lines. `Unsealed` if they do not belong together."""
    end = data.find(b"\n")
    if end < 0:
        raise Unsealed("it is cut short or zeroed")
    line = memoryview(data)[:end]
    digest = blake3.blake3(line).hexdigest()
    second = _second_line(digest)
    if data[end + 1 : end + 1 + len(second)] != second:
        raise Unsealed("its bytes do not match its digest")
    return line, digest, memoryview(data)[end + 1 + len(second) :]


def _second_line(digest: str) -> bytes:
    return b'{"blake3":"' + digest.encode() + b'"}\n'
