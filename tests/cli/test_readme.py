"""What the README tells a newcomer to type works as it stands, in another directory."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str, marker: str, directory: Path) -> str:
    (block,) = (text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if marker in text)
    return block.replace("/tmp/", f"{directory}/")


@pytest.mark.slow
def test_the_tour(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = blocks("sh", "strawq init", tmp_path).replace("30000", str(port))
    script = script.replace(". .venv/bin/activate\n", "set -e\n").replace("kill %1", "kill %1; wait || true;")
    script = script.replace("rm -rf", f"cp {tmp_path}/groups.jsonl {tmp_path}/collected\nrm -rf")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-mc", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "4 accepted" in done.stdout
    assert len((tmp_path / "collected").read_text().splitlines()) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["collected"], "the tour cleans up behind itself"
    assert "branch-2" in done.stdout


def test_the_python_example(tmp_path: Path) -> None:
    code = blocks("python", "Pool.init", tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pool-2"]
    subprocess.run(["sh", "-ec", blocks("sh", "/tmp/pool-2", tmp_path)], timeout=60, check=True)
    assert list(tmp_path.iterdir()) == [], "what it says to remove is all that it left"


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parents[2]
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    assert links
    assert [link for link in links if not (root / link).exists()] == []
