"""Every command that a message names in backticks works as it is typed, with the pool for POOL."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from tests.cli.conftest import Run
from tests.cli.tree import verbs

ROOT = Path(__file__).parents[2]


def _docstrings(tree: ast.AST) -> set[int]:
    """Those that are no command's help: nobody is told them."""
    return {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }


def _texts(source: str) -> Iterator[str]:
    """The texts of a source; what an f-string fills in is a 1."""
    tree = ast.parse(source)
    docstrings = _docstrings(tree)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | docstrings:
            yield node.value


def commands() -> list[str]:
    found = set()
    for package in ("strawq", "strawq_workers"):
        for path in (ROOT / package).rglob("*.py"):
            for text in _texts(path.read_text(encoding="utf-8")):
                found.update(re.findall(r"`strawq ([^`]+)`", text))
    return sorted(found)


def _complaint(words: str) -> str:
    """What the command line says of the command; empty if it takes it."""
    # `rollout` reads what follows as flags of its own: only the verb itself is looked at.
    given = shlex.split(re.sub(r"\b[A-Z]+\b|%s|…", "1", words))
    name = next((name for name in (" ".join(given[:2]), given[0]) if name in verbs()), "")
    if not name:
        return "there is no such verb"
    try:
        verbs()[name].make_context(name, given[len(name.split()) :])
    except typer.Exit:
        return ""
    except Exception as error:  # noqa: BLE001 (whichever kind of usage error typer has)
        return str(getattr(error, "message", error)) or type(error).__name__
    return ""


def test_there_are_such_messages_and_a_wrong_one_is_noticed() -> None:
    assert len(commands()) > 10
    assert _complaint("verify --repair") and _complaint("verify POOL --mend") and _complaint("varify POOL")
    assert not _complaint("verify POOL --repair")


@pytest.mark.parametrize("words", commands())
def test_a_command_in_a_message_works_as_typed(words: str) -> None:
    if words not in ("work", "submit", "rollout"):  # the program by its name
        assert _complaint(words) == ""


def test_usage_lines_name_arguments_without_braces(run: Run) -> None:
    for words in verbs():
        usage = run(*words.split(), "--help").out.partition("\n\n")[0]
        assert "{" not in usage and "......" not in usage, usage
    assert run("drop", "--help").out.split("\n")[0].endswith("[OPTIONS] POOL TASK...")
