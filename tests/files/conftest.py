"""Each implementation of the Files port, as two clients of one directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from strawq.storage.exclusive import Primitive
from strawq.storage.faulty import FaultyFiles
from strawq.storage.files import Files
from strawq.storage.memory import MemoryFiles
from strawq.storage.posix import PosixFiles


class Pair(NamedTuple):
    """Two clients of one directory. For memory and plain POSIX they share all caches; as faulty views and on JuiceFS
    they do not."""

    a: Files
    b: Files


def _memory(primitive: Primitive) -> Pair:
    tree = MemoryFiles(primitive)
    return Pair(tree, tree)


def _faulty(primitive: Primitive) -> Pair:
    tree = MemoryFiles(primitive)
    return Pair(FaultyFiles(tree), FaultyFiles(tree))


_IN_MEMORY: dict[str, Callable[[Primitive], Pair]] = {"memory": _memory, "faulty": _faulty}

KINDS = [
    pytest.param((kind, primitive), id=f"{kind}-{primitive}", marks=[pytest.mark.juicefs] if kind == "juicefs" else [])
    for kind in ("memory", "faulty", "posix", "juicefs")
    for primitive in ("link", "rename")
]


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    kind: str
    primitive: Primitive
    kind, primitive = request.param
    if kind in _IN_MEMORY:
        yield _IN_MEMORY[kind](primitive)
        return
    roots: tuple[Path, Path] = request.getfixturevalue("juicefs_pair") if kind == "juicefs" else (tmp_path, tmp_path)
    clients = [PosixFiles(root / "pool", primitive) for root in roots]
    yield Pair(*clients)
    for files in clients:
        files.close()


@pytest.fixture
def pool(pair: Pair) -> Pair:
    """The pair, with the directories `tmp` and `log` made."""
    for name in ("", "tmp", "log"):
        pair.a.make_directory(name)
    return pair


def refused(*codes: int) -> pytest.RaisesExc[OSError]:
    """Expect an `OSError` with one of these errno values."""
    return pytest.RaisesExc(OSError, check=lambda error: error.errno in codes)
