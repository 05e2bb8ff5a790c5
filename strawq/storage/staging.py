"""Staging files of one process: written whole and durable under a name of their own, then published under their real
one.

A staging name carries the process's instance, so that garbage collection can tell whose it is. Collecting one that is
still wanted is harmless: publishing it fails with `FileNotFoundError`, and it is written again.

A copy of a pool may come without its empty directories (an object store has none): whoever writes makes them again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from strawq.storage import layout
from strawq.storage.files import Buffer, Files

_NAME_TRIES = 8


def make_directories(files: Files) -> None:
    """The directories of a pool, durably; no error if they are there."""
    for directory in layout.DIRECTORIES:
        files.make_directory(directory)


class Staging:
    """Safe from many threads."""

    def __init__(self, files: Files, instance: str) -> None:
        self.files = files
        self.instance = instance
        self._numbers = itertools.count(1)

    def write(self, buffers: Sequence[Buffer]) -> str:
        """Write a staging file, durably; returns its path. Nothing is left behind when that fails."""
        for turn in range(_NAME_TRIES):
            staged = layout.staging(self.instance, next(self._numbers))
            try:
                self.files.stage(staged, buffers)
            except FileExistsError:
                # Nobody else makes this name: it is ours, from a call whose reply was lost. What it holds is not known.
                self.discard(staged)
                if turn == _NAME_TRIES - 1:
                    raise
            except FileNotFoundError:
                if turn == _NAME_TRIES - 1:
                    raise
                make_directories(self.files)
            except OSError:
                self.discard(staged)
                raise
            else:
                return staged
        raise AssertionError("the last turn returns or raises")

    def discard(self, staged: str) -> None:
        """Remove a staging file whose content has its name, or never will. It is garbage: failing to remove it is no
        failure."""
        with contextlib.suppress(OSError):
            self.files.remove(staged)

    def publish(self, staged: str, path: str) -> bool:
        """Give the file its real name, if that is free; either way the staging name is gone afterwards. False if the
        name was taken."""
        try:
            self.files.publish(staged, path)
        except FileExistsError:
            self.discard(staged)
            return False
        if self.files.keeps_staged:
            self.discard(staged)
        return True

    def place(self, buffers: Sequence[Buffer], path: str) -> bool:
        """Write a file, durably, and give it the name `path` if that is free. False if it was taken. Whatever happens,
        no staging file is left: a process that lives on would keep it for as long as it lives."""
        try:
            return self._place(buffers, path)
        except FileNotFoundError:
            self.files.make_directory(path.rpartition("/")[0])
            return self._place(buffers, path)

    def _place(self, buffers: Sequence[Buffer], path: str) -> bool:
        staged = self.write(buffers)
        try:
            return self.publish(staged, path)
        except OSError:
            self.discard(staged)
            raise
