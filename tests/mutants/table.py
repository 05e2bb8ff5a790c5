"""The table of mutants in docs/verification.md: `python -m tests.mutants.table` writes it anew."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.caught_by import CAUGHT_BY
from tests.mutants.mutants import MUTANTS

BEGIN, END = "<!-- mutants: written by tests/mutants/table.py -->", "<!-- end of mutants -->"


def table() -> str:
    rows = [f"| {m.name} | {m.breaks} | {CAUGHT_BY[m.name].__name__} |" for m in MUTANTS]
    return "\n".join([BEGIN, "| mutant | what it breaks | caught by |", "|---|---|---|", *rows, END])


def main() -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "verification.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: text.index(BEGIN)] + table() + text[text.index(END) + len(END) :], encoding="utf-8")


if __name__ == "__main__":
    main()
