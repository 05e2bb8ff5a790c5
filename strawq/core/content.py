"""The content of a command, apart from who asks and where bytes happen to lie: what must be equal for a retry to be a
retry."""

from __future__ import annotations

from typing import Any

import blake3
import msgspec

from strawq.core.commands import AnyCommand, KeepArchive, MoveObjects, QueueCommand, Report, Submit, TakeCheckpoint

_encoder = msgspec.msgpack.Encoder()


def content_digest(command: AnyCommand) -> str:
    """16 hex characters. A retry after a restart has another session, a republished object another epoch, and any retry
    comes later: none of these is content."""
    changes: dict[str, Any] = {"request": ""}
    if isinstance(command, (Submit, Report, MoveObjects)):
        changes["objects"] = tuple(msgspec.structs.replace(ref, epoch=0) for ref in command.objects)
    if isinstance(command, (QueueCommand, TakeCheckpoint)):
        # Where it was asked. On a branch that goes on from there its answer is remembered, and still true.
        changes["branch"] = ""
    if isinstance(command, (TakeCheckpoint, KeepArchive)):
        changes["time_ms"] = 0
    if isinstance(getattr(command, "session", None), str):
        changes["session"] = ""
    return blake3.blake3(_encoder.encode(msgspec.structs.replace(command, **changes))).hexdigest(8)
