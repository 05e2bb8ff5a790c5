"""Errors of a worker's options under the names that were typed.

The rule: `WorkerOptions` names its fields; whoever gives them by flags of other names has them named so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from strawq.errors import BadInput


@contextmanager
def named_as(typed: Mapping[str, str]) -> Iterator[None]:
    """`BadInput` that is raised inside names `typed[field]` in place of `field`. A field that is also a word of
    English (`samples`) is only meant where the message begins with it."""
    try:
        yield
    except BadInput as error:
        raise type(error)(renamed(str(error), typed)) from error


def renamed(text: str, typed: Mapping[str, str]) -> str:
    names = "|".join(name for name in sorted(typed, key=len, reverse=True) if "_" in name)
    first, _, rest = text.partition(" ")
    text = f"{typed.get(first, first)} {rest}"
    return re.sub(
        rf"(?<![\w-])({names})\b(=False)?",
        lambda found: f"{'no ' if found[2] else ''}{typed[found[1]]}",
        text,
    )
