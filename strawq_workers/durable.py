"""Files beside the pool that must survive a power cut: whole, under their names, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` where `path` is, durably; what stood there is replaced. Its directory must be there. `OSError` leaves
    nothing."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(staged, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except OSError:
        staged.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in it durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
