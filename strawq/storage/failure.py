"""The error of a file call, as a sentence that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from strawq.errors import StorageFailed


class Displaced(OSError):
    """The path of the pool does not lead to the directory that was opened. Nothing was done; `strerror` is the whole
    sentence. No `FileNotFoundError`, which would say that the names in it are free."""


def storage_failed(verb: str, what: str, error: OSError) -> StorageFailed:
    """The error of a file call, as a sentence that says what to do."""
    if isinstance(error, Displaced):
        return StorageFailed(f"cannot {verb} {what}: {error.strerror}")
    remedy = {
        errno.ENOSPC: "the disk is full: free some space (`strawq gc POOL` may help)",
        errno.EDQUOT: "the quota is used up: free some space (`strawq gc POOL` may help)",
        errno.EROFS: "the file system is mounted read-only",
        errno.EACCES: "look at owner and mode of it and of its directories",
        errno.EPERM: "look at owner, mode and attributes of it and of its directories",
    }.get(error.errno or 0, "look at the mount")
    return StorageFailed(f"cannot {verb} {what}: {error.strerror or error}; {remedy}")


@contextmanager
def file_calls(verb: str, what: str) -> Iterator[None]:
    """Around or as a decorator of code that calls files: no bare `OSError` reaches a caller of strawq."""
    try:
        yield
    except OSError as error:
        raise storage_failed(verb, what, error) from error
