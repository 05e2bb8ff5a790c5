"""No code path opens a shared file for append or writes into one in place: two mounts would overwrite each other."""

from __future__ import annotations

import ast
from pathlib import Path

import strawq

PACKAGE = Path(strawq.__file__).parent


def appends(source: str) -> list[int]:
    """Lines on which a file is opened to be appended to, or to be written in place."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "O_APPEND":
            found.append(node.lineno)
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "open":
            words = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
            modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            if any("a" in mode or "+" in mode for mode in modes):
                found.append(node.lineno)
    return found


def test_nothing_that_touches_a_pool_appends() -> None:
    # The CLI writes its own logs, and a drill its ledgers: on local disk, never in a pool.
    paths = [path for path in PACKAGE.rglob("*.py") if not {"cli", "drill"} & set(path.parts)]
    assert len(paths) > 30
    assert {str(path): lines for path in paths if (lines := appends(path.read_text()))} == {}


def test_an_append_would_be_noticed() -> None:
    assert appends("import os\nopen('x', 'ab')\nos.open('x', os.O_WRONLY | os.O_APPEND)\nopen('x', mode='r+')") == [
        2,
        4,
        3,
    ]
