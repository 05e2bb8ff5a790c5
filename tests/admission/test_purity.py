"""Admission decides from what it was told: a clock, a file or chance would make studies and workers differ."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import strawq_workers.admission

ALLOWED = {"__future__", "collections", "typing", "msgspec", "strawq", "strawq_workers"}
SOURCES = sorted(Path(strawq_workers.admission.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_admission_imports_nothing_that_looks_at_the_world(source: Path) -> None:
    roots, full = set(), set()
    for node in ast.walk(ast.parse(source.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        full.update(names)
        roots.update(name.split(".")[0] for name in names)
    assert roots <= ALLOWED
    inner = {name for name in full if name.startswith("strawq")}
    assert all(name == "strawq.errors" or name.startswith("strawq_workers.admission") for name in inner)


def test_every_module_was_looked_at() -> None:
    assert {"slots.py", "reservations.py", "refill.py", "staleness.py"} <= {source.name for source in SOURCES}
