"""The one way in which a simulation says that a guarantee is broken."""

from __future__ import annotations


class Violation(AssertionError):
    """Something happened that must never happen. The message says what; the simulation adds seed and time."""


def require(true: bool, sentence: str) -> None:
    if not true:
        raise Violation(sentence)
