"""What other programs rely on is written down, and is what the code does."""

from __future__ import annotations

import json

from tools.contracts import DIRECTORY, SCHEMAS, stale


def test_the_schemas_in_contracts_are_those_of_the_code() -> None:
    assert stale() == [], "run `python -m tools.contracts`"


def test_a_schema_that_differs_is_noticed(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    for name in SCHEMAS:
        (tmp_path / f"{name}.json").write_text((DIRECTORY / f"{name}.json").read_text())
    monkeypatch.setattr("tools.contracts.DIRECTORY", tmp_path)
    assert stale() == []
    changed = json.loads((tmp_path / "log-entry.json").read_text())
    changed["title"] = "Other"
    (tmp_path / "log-entry.json").write_text(json.dumps(changed))
    (tmp_path / "forgotten.json").write_text("{}")
    assert stale() == ["log-entry", "forgotten"]
