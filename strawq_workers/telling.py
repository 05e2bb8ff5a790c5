"""Saying what stays as it is. The rule: what is new is said at once, the same again at growing intervals, so that
waiting is visible and a log of hours is short. What is counted goes by `strawq.doubling` instead."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S = 10.0


class Telling:
    """Of one thing that may last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said = ""
        self._gap = FIRST_S
        self._next = 0.0

    def due(self, text: str) -> bool:
        """Whether to say `text` now; an empty one is never said, and ends what was."""
        now = self._clock()
        if text != self._said:
            self._said, self._gap = text, FIRST_S
        elif not text or now < self._next:
            return False
        else:
            self._gap *= 2
        self._next = now + self._gap
        return bool(text)
