"""Write the JSON Schemas of what other programs may rely on to contracts/schemas/, from the structs that define it.

    python -m tools.contracts [--check]

With `--check` nothing is written; the exit code is 1 if a schema is not current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from strawq.core.events import AnyEvent
from strawq.inspection import Inspection
from strawq.model import PoolHeader
from strawq.storage.entry import EntryLine
from strawq.storage.floors import FloorLine
from strawq.storage.mounts import StorageDeclaration
from strawq.storage.probe import ProbeReport
from strawq.storage.sessions import Beat
from strawq.storage.snapshots import SnapshotLine

SCHEMAS: dict[str, Any] = {
    "pool-header": PoolHeader,
    "log-entry": EntryLine,
    "log-event": AnyEvent,
    "snapshot-line": SnapshotLine,
    "floor-line": FloorLine,
    "session": Beat,
    "inspection": Inspection,
    "storage-declaration": StorageDeclaration,
    "probe-report": ProbeReport,
}
DIRECTORY = Path(__file__).resolve().parent.parent / "contracts" / "schemas"


def schema_text(kind: Any) -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(kind)}
    return msgspec.json.format(msgspec.json.encode(schema, order="deterministic"), indent=2).decode() + "\n"


def stale() -> list[str]:
    """Names of schemas whose file is missing or differs, and of files that no schema writes."""
    names = [name for name, kind in SCHEMAS.items() if _read(name) != schema_text(kind)]
    return names + sorted({path.stem for path in DIRECTORY.glob("*.json")} - SCHEMAS.keys())


def _read(name: str) -> str:
    path = DIRECTORY / f"{name}.json"
    return path.read_text() if path.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a schema is not current")
    if parser.parse_args().check:
        names = stale()
        if names:
            print(f"not current: {', '.join(names)}; run `python -m tools.contracts`", file=sys.stderr)
        return 1 if names else 0
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, kind in SCHEMAS.items():
        (DIRECTORY / f"{name}.json").write_text(schema_text(kind))
    return 0


if __name__ == "__main__":
    sys.exit(main())
