"""Values that users give and that are stored as JSON: what goes in comes back equal, or is refused."""

from __future__ import annotations

from typing import Any

import msgspec

from strawq.errors import BadInput


def json_text(value: Any, what: str) -> str:
    """`value` as JSON that reads back equal (tuples as lists). `BadInput` for NaN, bytes, keys that are not strings,
    objects."""
    try:
        text = msgspec.json.encode(value)
        back = msgspec.json.decode(text)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"{what} is not JSON: {error}") from error
    if back != value and back != _as_lists(value):
        raise BadInput(f"{what} does not survive JSON (NaN, infinity, bytes or keys that are not strings?)")
    return text.decode()


def _as_lists(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_lists(item) for item in value]
    return {key: _as_lists(item) for key, item in value.items()} if isinstance(value, dict) else value
