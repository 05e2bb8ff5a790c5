"""What all crash tests share: logs of one entry per segment, so that a trim of a small log has something to trim,
and few files that are many to a merge."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strawq.trimming.ENTRIES_PER_SEGMENT", 1)
    monkeypatch.setattr("strawq.merging.MERGE_FILES", 2)
