"""Tables of immutable rows with an undo journal.

The state is a handful of tables. A change puts a row or drops one and leaves the old row in the journal; undoing puts
the old rows back in reverse. So a group commit may decide many commands on a tentative state and take all of it back
when another process was first. A table's `watch` keeps derived indexes; it sees every change, undone ones too, and
may touch nothing that is itself a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K", str, int)
V = TypeVar("V")

Watch = Callable[[V | None, V | None], None]


class Journal:
    """What has changed since the last `clear`, newest last."""

    __slots__ = ("_undo",)

    def __init__(self) -> None:
        self._undo: list[tuple[Callable[[Any, Any], None], Any, Any]] = []

    def add(self, restore: Callable[[Any, Any], None], key: Any, old: Any) -> None:
        self._undo.append((restore, key, old))

    def mark(self) -> int:
        return len(self._undo)

    def undo(self, mark: int = 0) -> None:
        while len(self._undo) > mark:
            restore, key, old = self._undo.pop()
            restore(key, old)

    def clear(self) -> None:
        self._undo.clear()


class Table(Generic[K, V]):
    """Rows by key. Iteration is in key order, so that no result depends on the history of insertions."""

    __slots__ = ("_journal", "_rows", "_watch")

    def __init__(self, journal: Journal, watch: Watch[V] | None = None) -> None:
        self._rows: dict[K, V] = {}
        self._journal = journal
        self._watch = watch

    def get(self, key: K) -> V | None:
        return self._rows.get(key)

    def __getitem__(self, key: K) -> V:
        return self._rows[key]

    def __contains__(self, key: K) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[K]:
        return iter(sorted(self._rows))

    def values(self) -> Iterator[V]:
        return (self._rows[key] for key in sorted(self._rows))

    def put(self, key: K, row: V) -> None:
        old = self._rows.get(key)
        self._journal.add(self._restore, key, old)
        self._rows[key] = row
        if self._watch is not None:
            self._watch(old, row)

    def drop(self, key: K) -> None:
        old = self._rows.pop(key)
        self._journal.add(self._restore, key, old)
        if self._watch is not None:
            self._watch(old, None)

    def _restore(self, key: K, row: V | None) -> None:
        old = self._rows.get(key)
        if row is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = row
        if self._watch is not None:
            self._watch(old, row)


class Cell(Generic[V]):
    """One row that is always there."""

    __slots__ = ("_journal", "_row")

    def __init__(self, journal: Journal, row: V) -> None:
        self._journal = journal
        self._row = row

    @property
    def row(self) -> V:
        return self._row

    def put(self, row: V) -> None:
        self._journal.add(self._restore, None, self._row)
        self._row = row

    def _restore(self, _key: None, row: V) -> None:
        self._row = row
