"""The content of a command, apart from who asks and where bytes happen to lie: what must be equal for a retry to be a
retry."""

from __future__ import annotations

from typing import Any

import blake3
import msgspec

from strawq.core.commands import AnyCommand, MoveObjects, Report, Submit

_encoder = msgspec.msgpack.Encoder()


def content_digest(command: AnyCommand) -> str:
    """16 hex characters. A retry after a restart has another session, and a republished object another epoch: neither
    is content."""
    changes: dict[str, Any] = {"request": ""}
    if isinstance(command, (Submit, Report, MoveObjects)):
        changes["objects"] = tuple(msgspec.structs.replace(ref, epoch=0) for ref in command.objects)
    if isinstance(command, Submit):
        changes["branch"] = ""
    elif isinstance(getattr(command, "session", None), str):
        changes["session"] = ""
    return blake3.blake3(_encoder.encode(msgspec.structs.replace(command, **changes))).hexdigest(8)
