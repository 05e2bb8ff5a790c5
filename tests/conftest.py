"""Fixtures that every area may use: a real JuiceFS volume with two clients, mounted once per test run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.juicefs.volume import Volume, why_not


@pytest.fixture(scope="session")
def juicefs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    """A JuiceFS volume with clients `a` and `b`. Tests may mount further clients; all are stopped at the end."""
    reason = why_not()
    if reason is not None:
        if os.environ.get("STRAWQ_REQUIRE_JUICEFS") == "1":
            pytest.fail(f"STRAWQ_REQUIRE_JUICEFS=1, but JuiceFS cannot be mounted: {reason}")
        pytest.skip(f"JuiceFS cannot be mounted: {reason}")
    volume = Volume(tmp_path_factory.mktemp("juicefs"))
    try:
        volume.mount("a")
        volume.mount("b")
        yield volume
    finally:
        volume.close()


@pytest.fixture
def juicefs_pair(juicefs: Volume, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """One fresh directory as two hosts see it: its path below client `a` and below client `b`."""
    name = f"{request.node.name}-{os.urandom(4).hex()}".replace("/", "_").replace("[", "-").replace("]", "")
    mine = juicefs.clients["a"].path / name
    mine.mkdir()
    return mine, juicefs.clients["b"].path / name
