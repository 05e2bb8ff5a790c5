"""A data source in memory, as the rollouts on it use it: what it does not take back is kept here and offered again.

The rule: a data source whose `add_samples` raises has taken none of those groups, and whoever asks for more groups, or
closes the rollouts, offers them again first. So groups survive a data source that fails for a while. It is entered by
one caller at a time.
"""

from __future__ import annotations

import threading
from typing import Any

Samples = list[list[Any]]


class Returns:
    """`get_samples` and `add_samples` of `data_source`. Safe from many threads."""

    def __init__(self, data_source: Any) -> None:
        self._data_source = data_source
        self._owed: Samples = []
        self._lock = threading.Lock()

    def get_samples(self, num_samples: int) -> Samples:
        with self._lock:
            self._settle()
            samples: Samples = self._data_source.get_samples(num_samples)
            return samples

    def add_samples(self, samples: Samples) -> None:
        """Raises what the data source raises; the groups are kept then."""
        with self._lock:
            self._owed += samples
            self._settle()

    def keep(self, samples: Samples) -> None:
        """To be offered with the next ones."""
        with self._lock:
            self._owed += samples

    def settle(self) -> None:
        """Offer what is kept. Raises what the data source raises."""
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        if self._owed:
            self._data_source.add_samples(list(self._owed))
            self._owed.clear()
