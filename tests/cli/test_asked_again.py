"""Verbs whose reply is lost ask again with one request id; if nobody can tell, the line says how the user does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strawq import Pool
from strawq.errors import OutcomeUnknown
from strawq.queue import Queue
from strawq.storage.clock import SystemClock
from tests.cli.conftest import Run

VERBS: dict[str, tuple[type, str, tuple[str, ...], tuple[str, ...]]] = {
    # What is called, and the words before and after the pool's.
    "checkpoint": (Pool, "checkpoint", ("checkpoint",), ("two",)),
    "drop a checkpoint": (Pool, "drop_checkpoint", ("checkpoint",), ("one", "--delete")),
    "drop a branch": (Pool, "drop_branch", ("branch",), ("--delete", "main")),
    "pause": (Pool, "pause", ("pause",), ("--reason", "weights")),
    "resume": (Pool, "resume", ("resume",), ("--policy-version", "7")),
    "publish a version": (Pool, "publish_version", ("publish-version",), ("7",)),
    "seal": (Queue, "seal", ("seal",), ()),
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemClock, "sleep", lambda _self, _seconds: None)


def _lose(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, times: int) -> list[str]:
    """The call does what it should, and `times` times nobody hears of it. Returns the request ids that were used."""
    real: Callable[..., Any] = getattr(owner, name)
    asked: list[str] = []

    def call(self: Any, *words: Any, request_id: str, **more: Any) -> Any:
        asked.append(request_id)
        answer = real(self, *words, request_id=request_id, **more)
        if len(asked) <= times:
            raise OutcomeUnknown("the mount does not say")
        return answer

    monkeypatch.setattr(owner, name, call)
    return asked


def _prepared(pool: Path) -> int:
    with Pool.open(pool) as opened:
        opened.checkpoint("one")
        opened.rollback("one")
        seq: int = opened.log.refresh(lambda machine: machine.seq)
    return seq


@pytest.mark.parametrize("name", VERBS)
def test_a_lost_reply_is_asked_for_again_and_the_verb_succeeds(
    pool: Path, run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = _prepared(pool)
    owner, call, words, more = VERBS[name]
    asked = _lose(monkeypatch, owner, call, 2)
    run(*words, pool, *more)
    assert len(asked) == 3 and len(set(asked)) == 1
    with Pool.open(pool) as opened:
        assert opened.log.refresh(lambda machine: machine.seq) == before + 1


@pytest.mark.parametrize("name", [name for name in VERBS if name != "seal"])
def test_where_nobody_can_tell_the_line_names_the_request_and_the_verb_takes_it(
    pool: Path, run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = _prepared(pool)
    owner, call, words, more = VERBS[name]
    with monkeypatch.context() as patch:
        asked = _lose(patch, owner, call, 1000)
        ran = run(*words, pool, *more, code=5)
    named = re.search(r"--request-id (\S+):", ran.err)
    assert named and named[1] == asked[0]
    run(*words, pool, *more, "--request-id", named[1])
    with Pool.open(pool) as opened:
        assert opened.log.refresh(lambda machine: machine.seq) == before + 1


def test_a_rollback_that_is_asked_for_again_is_one_rollback(pool: Path, run: Run) -> None:
    _prepared(pool)
    first = run("rollback", pool, "one", "--request-id", "mine", "--json").data
    again = run("rollback", pool, "one", "--request-id", "mine", "--json").data
    assert first == again and first["left"] == "branch-2"
    assert [branch["name"] for branch in run("branch", pool, "--json").data["branches"]] == [
        "branch-2", "branch-3", "main",
    ]  # fmt: skip
    assert "used before with other content" in run("rollback", pool, "main", "--request-id", "mine", code=2).err
