"""docs/cli.md and the command line say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strawq import errors
from strawq.cli.app import EXIT_CODES
from tests.cli.tree import options, verbs

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def section(words: str) -> str:
    found = re.search(rf"^### strawq {words}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/cli.md has no section '### strawq {words}'"
    return found[1]


@pytest.mark.parametrize("words", sorted(verbs()))
def test_every_verb_and_option_is_documented(words: str) -> None:
    text = section(words)
    for option in options(verbs()[words]):
        if option.name in ("as_json", "verbosity", "help"):
            continue
        for name in (*option.opts, *option.secondary_opts, str(option.envvar)):
            assert f"`{name}`" in text, f"{name} of `strawq {words}` is not in docs/cli.md"


@pytest.mark.parametrize("words", sorted(verbs()))
def test_no_option_is_documented_that_is_gone(words: str) -> None:
    named = set(re.findall(r"^\| `(-[^`]*)`", section(words), re.MULTILINE))
    assert named <= {name for option in options(verbs()[words]) for name in option.opts}


def test_no_verb_is_documented_that_is_gone() -> None:
    assert set(re.findall(r"^### strawq (.+)$", PAGE, re.MULTILINE)) == set(verbs())


def test_every_exit_code_and_error_kind_is_documented() -> None:
    for code in EXIT_CODES:
        assert f"| {code} |" in PAGE
    kinds = {
        kind.kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.StrawqError)
    }
    for kind in kinds - {"error"}:
        assert f"`{kind}`" in PAGE
