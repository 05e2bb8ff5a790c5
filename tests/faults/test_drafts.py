"""What a process leaves when it is killed while it replaces a file: a draft in staging, which is seen and collected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strawq.garbage import collect_garbage
from strawq.pool import Pool


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test runs."""


def test_a_draft_of_a_killed_heartbeat_lies_in_staging_and_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strawq.garbage.STAGING_LOOK_SECONDS", 0.01)
    root = tmp_path / "pool"
    Pool.init(root).close()
    victim = Pool.open(root, background=False)
    victim.keeper.require()

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(Killed):
            victim.keeper.beat()
    assert os.listdir(root / "sessions") == [f"{victim.keeper.current}.json"]
    assert len(os.listdir(root / "tmp")) == 1
    with Pool.open(root) as other:
        _, collected = collect_garbage(other, wait_seconds=0)
        assert collected.by_reason == {"staging of a process that is gone": 1}
    assert os.listdir(root / "tmp") == []
    victim.close()
