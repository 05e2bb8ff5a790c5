"""docs/architecture.md names the modules that there are: none that is gone, and each of those that a pool rests on."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPLETE = ("strawq/", "strawq/core/", "strawq/storage/")


def listed() -> dict[str, set[str]]:
    """Modules by package, as the table has them."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("\n## Modules\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([a-z_/]+/)` \| (.*) \|$", section, re.MULTILINE)
    return {package: set(re.findall(r"`([a-z_]+)`", names)) for package, names in rows}


def modules(package: str) -> set[str]:
    return {path.stem for path in (ROOT / package).glob("*.py") if not path.stem.startswith("__")}


def test_no_module_is_named_that_is_gone() -> None:
    assert {package: names - modules(package) for package, names in listed().items() if names - modules(package)} == {}


def test_every_package_is_named_and_each_module_of_the_pool() -> None:
    roots = [path.parent for name in ("strawq", "strawq_workers") for path in (ROOT / name).rglob("__init__.py")]
    assert {f"{path.relative_to(ROOT).as_posix()}/" for path in roots} == set(listed())
    assert {package: modules(package) - listed()[package] for package in COMPLETE} == {name: set() for name in COMPLETE}
