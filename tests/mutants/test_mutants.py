"""Every mutant is caught, by the check that the table names; unmutated, every check passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from strawq.errors import StrawqError
from tests.mutants.caught_by import CAUGHT_BY
from tests.mutants.checks import Check
from tests.mutants.mutants import MUTANTS, Mutant, switched_on
from tests.mutants.table import BEGIN, END, table

VERIFICATION = Path(__file__).resolve().parents[2] / "docs" / "verification.md"
CHECKS = {check.__name__: check for check in CAUGHT_BY.values()}


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_passes_without_a_mutant(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught(mutant: Mutant) -> None:
    check: Check = CAUGHT_BY[mutant.name]
    # The check must notice; a mutant that trips over its own feet would prove nothing.
    with switched_on(mutant), pytest.raises((AssertionError, StrawqError, pytest.fail.Exception)) as caught:
        check()
    assert not isinstance(caught.value.__cause__, (NameError, AttributeError, SyntaxError))


def test_a_mutant_is_gone_when_it_is_switched_off() -> None:
    from tests.mutants.mutants import function_of

    before = {edit.where: function_of(edit.where).__code__ for mutant in MUTANTS for edit in mutant.edits}
    for mutant in MUTANTS:
        with switched_on(mutant):
            assert any(function_of(edit.where).__code__ is not before[edit.where] for edit in mutant.edits)
        assert all(function_of(edit.where).__code__ is before[edit.where] for edit in mutant.edits)


def test_the_table_names_every_mutant_and_is_current() -> None:
    assert set(CAUGHT_BY) == {mutant.name for mutant in MUTANTS}
    text = VERIFICATION.read_text(encoding="utf-8")
    shown = text[text.index(BEGIN) : text.index(END) + len(END)]
    assert shown == table(), "run `python -m tests.mutants.table`"
