"""What an engine's refusal means for the caller.

The rule: a permanent refusal (the request itself is wrong) is `BadInput` and is never sent again; a passing one
(starting, paused, overloaded, shutting down, gone) is `EngineUnavailable` and may be retried. SGLang and its router
write the reason in five shapes and in plain text; the reader sees one sentence.
"""

from __future__ import annotations

from typing import Any

import msgspec

from strawq.errors import BadInput, EngineUnavailable, StrawqError

PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
TEXT_CHARS = 500


def reason_of(body: bytes) -> str:
    """The sentence inside an error body: `{"message"}`, `{"error": {"message"}}`, `{"error": "..."}`, `{"detail"}` or
    plain text."""
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = body.decode("utf-8", errors="replace")
    for _ in range(3):
        if not isinstance(found, dict):
            break
        found = next((found[key] for key in ("message", "error", "detail") if found.get(key)), "")
    # Validation messages go on with the server's own stack.
    text = " ".join(str(found).split("\n\n", 1)[0].split())
    return text[:TEXT_CHARS] or "no reason given"


def refusal(status: int, body: bytes, *, what: str) -> StrawqError:
    """The error to raise for an HTTP status of 400 or more."""
    text = f"{what}: status {status}: {reason_of(body)}"
    return EngineUnavailable(text) if status in PASSING_STATUS else BadInput(text)


def refusal_in_stream(error: bytes, *, what: str) -> StrawqError:
    """The error for a stream frame `{"error": {"message", "code", "retryable"}}`, which arrives under status 200."""
    try:
        found: Any = msgspec.json.decode(error)
    except msgspec.DecodeError:
        found = None
    code = found.get("code") if isinstance(found, dict) else None
    retryable = found.get("retryable") if isinstance(found, dict) else None
    text = f"{what}: refused in the stream: {reason_of(error)}"
    if retryable is True or (isinstance(code, int) and code in PASSING_STATUS):
        return EngineUnavailable(text)
    return BadInput(text)
