"""An audit that cannot fail proves nothing: each kind of wrong is shown to it once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from strawq.core import events as e
from strawq.core.commands import ReportItem
from strawq.drill.audit import Account, settle
from strawq.drill.content import chunk_count, faults, grown, make_prompt
from strawq.drill.ledger import Ledger, Line
from strawq.drill.life import Life, Stage
from strawq.model import ObjectRef, Session
from strawq.pool import Pool
from strawq.samples import Group

OBJECT = ObjectRef("0" * 64, 0, 10, 2)


def joined(name: str) -> e.Joined:
    return e.Joined(session=Session(id=name, host="h", pid=1))


def acquired(task: str, attempt: int, session: str = "s") -> e.Acquired:
    return e.Acquired(queue="q", session=session, leases=((task, attempt),))


def reported(task: str, attempt: int, outcome: str, session: str = "s") -> e.Reported:
    return e.Reported(queue="q", session=session, items=(ReportItem(task, attempt, outcome),))  # type: ignore[arg-type]


def taken(batch: str, delivery: int, *tasks: str) -> e.BatchTaken:
    return e.BatchTaken(queue="q", batch=batch, number=1, attempt=delivery, tasks=tasks, consumer="t", session="s")


def finished(batch: str, delivery: int) -> e.BatchFinished:
    return e.BatchFinished(queue="q", batch=batch, attempt=delivery)


SUBMITTED = e.Submitted(queue="q", numbers=(1,), objects=(OBJECT,), producer="drill", cursor="2")
GOOD: tuple[e.AnyEvent, ...] = (
    joined("s"),
    SUBMITTED,
    acquired("1-0", 1),
    reported("1-0", 1, "save"),
    reported("1-0", 1, "complete"),
    acquired("1-1", 1),
    reported("1-1", 1, "drop"),
    taken("b", 1, "1-0"),
    finished("b", 1),
)


def audited(tmp_path: Path, events: tuple[e.AnyEvent, ...], *lines: Line) -> Account:
    account = Account()
    for seq, event in enumerate(events, 1):
        account.fold(seq, event)
    ledger = Ledger(tmp_path / "x.ledger")
    ledger.write(Line("read", "1-0", 1, 2, 0, "b", 1), *lines)
    ledger.close()
    settle(account, tmp_path)
    return account


def found(account: Account) -> tuple[int, int, int, int]:
    return len(account.lost), len(account.duplicated), len(account.stale), len(account.other)


def test_a_good_history_has_no_findings(tmp_path: Path) -> None:
    lines = (
        Line("submitted", cursor=2),
        Line("saved", "1-0", 1, 1, 0),
        Line("completed", "1-0", 1, 2, 0),
        Line("dropped", "1-1", 1, 0, 1),
        Line("finished", batch="b", delivery=1),
    )
    assert found(audited(tmp_path, GOOD, *lines)) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (Line("completed", "1-1", 1, 1, 1), (1, 0, 0, 0)),
        (Line("submitted", cursor=3), (1, 0, 0, 0)),
        (Line("saved", "1-0", 1, 3, 0), (1, 0, 0, 0)),
        (Line("dropped", "1-0", 1, 1, 0), (1, 0, 0, 0)),
        (Line("finished", batch="c", delivery=1), (1, 0, 0, 0)),
        (Line("finished", batch="b", delivery=2), (1, 0, 0, 0)),
        (Line("saved", "1-0", 1, 1, 1), (0, 0, 0, 1)),
        (Line("read", "1-0", 1, 1, 0, "b", 1), (0, 0, 0, 1)),
        (Line("fault", text="died"), (0, 0, 0, 1)),
    ],
)
def test_what_was_acknowledged_and_is_not_so_is_found(
    tmp_path: Path, line: Line, expected: tuple[int, int, int, int]
) -> None:
    assert found(audited(tmp_path, GOOD, line)) == expected


def test_an_acknowledgement_under_two_attempts_is_found(tmp_path: Path) -> None:
    account = audited(tmp_path, GOOD, Line("completed", "1-0", 1, 2, 0), Line("completed", "1-0", 2, 2, 0))
    assert found(account) == (0, 1, 0, 0)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (GOOD[:-2], (1, 0, 0, 0)),
        ((*GOOD, msgspec.structs.replace(SUBMITTED, numbers=(2,), cursor="3")), (2, 1, 0, 0)),
        ((*GOOD[:7], acquired("1-0", 2), *GOOD[7:]), (0, 1, 0, 0)),
        ((*GOOD[:3], acquired("1-0", 2), reported("1-0", 2, "complete"), *GOOD[5:]), (0, 0, 1, 0)),
        ((*GOOD[:4], e.Expired(session="s"), *GOOD[4:5], joined("s"), *GOOD[5:]), (0, 0, 1, 0)),
        ((*GOOD[:5], reported("1-0", 1, "complete"), *GOOD[5:]), (0, 1, 1, 0)),
        ((*GOOD[:8], taken("b", 2, "1-0"), *GOOD[8:]), (0, 0, 1, 0)),
        ((*GOOD, finished("b", 1)), (0, 0, 1, 0)),
        ((*GOOD[:8], taken("c", 1, "1-0"), *GOOD[8:]), (0, 1, 0, 0)),
    ],
    ids=["a task never ends", "prompts twice", "leased after acceptance", "leased twice", "report after expiry",
         "accepted twice", "an old delivery finishes", "finished twice", "in two batches"],
)  # fmt: skip
def test_a_history_that_breaks_a_promise_is_found(
    tmp_path: Path, events: tuple[e.AnyEvent, ...], expected: tuple[int, int, int, int]
) -> None:
    assert found(audited(tmp_path, events)) == expected


def test_a_line_that_a_kill_has_cut_off_is_not_believed(tmp_path: Path) -> None:
    with open(tmp_path / "y.ledger", "wb") as cut:
        cut.write(b'{"op":"completed","task":"1-1","attempt":1}')
    assert found(audited(tmp_path, GOOD)) == (0, 0, 0, 0)


def test_content_that_is_anothers_or_has_a_gap_is_found() -> None:
    group = Group("1-4", make_prompt(4))
    for attempt in (1, 3):
        group = grown(group, "1-4", attempt, 7)
    assert chunk_count(group) == 2
    assert faults(group, "1-4", 3) == []
    assert len(faults(group, "1-5", 3)) == 4
    assert len(faults(group, "1-4", 2)) == 2
    sample = group.samples[0]
    for broken in (
        msgspec.structs.replace(sample, tokens=sample.tokens[8:]),
        msgspec.structs.replace(sample, tokens=np.concatenate([sample.tokens, sample.tokens[8:]])),
        msgspec.structs.replace(sample, token_tensors={"beside": np.asarray(sample.token_tensors["beside"]) ^ 1}),
        msgspec.structs.replace(sample, logprobs=None),
    ):
        assert faults(Group("1-4", group.prompt, (broken, group.samples[1])), "1-4", 3)


def test_a_role_asks_again_with_the_same_request(tmp_path: Path) -> None:
    from strawq.errors import OutcomeUnknown

    life = Life(1, "worker", str(tmp_path), 0, 1, 1.0, str(tmp_path))
    with Pool.init(tmp_path / "pool") as pool:
        stage = Stage(life, pool, Ledger(life.path("ledger")))
        asked: list[str] = []

        def call(request: str) -> str:
            asked.append(request)
            if len(asked) < 3:
                raise OutcomeUnknown("the reply is lost")
            return "told"

        assert stage.ask(call) == "told"
        assert asked == ["drill-1-1"] * 3
        assert stage.ask(lambda request: request) == "drill-1-2"
        stage.ledger.close()
