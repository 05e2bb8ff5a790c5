"""The Files port: everything that strawq asks of a file system, and the rules each implementation must keep.

Paths are relative POSIX strings below the pool's directory, made by `layout`, never by a user. The rules:

1. `stage` writes a *new* file and returns only when its bytes are durable. It never opens a file that is there.
2. `publish` makes a staged file appear under its final name, whole, only if nobody has that name: `FileExistsError`
   otherwise. It is the one atomic step that everything else rests on. The name is durable after `sync_directory`.
3. `replace` swaps a small file's content: a reader sees the old bytes or the new ones. Not durable, never a commit.
4. No call appends to or rewrites a file in place, and no call follows a symbolic link out of the pool.
5. A stale *positive* (`read`, `size`, `names` show a file that another host removed within the last second) is normal.
   The absence of a name that was never looked up before is always fresh. One listing proves nothing about completeness.
6. Errors are `OSError`s with their errno: `FileNotFoundError`, `FileExistsError`, ENOSPC, EDQUOT, EIO, ESTALE,
   ETIMEDOUT, EROFS. After EIO, ESTALE or ETIMEDOUT from `publish`, the caller does not know whether the name is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview


@runtime_checkable
class LateHead(Protocol):
    """Buffers for `stage` of which the first, of `late_bytes`, is known only when the others have been made. They may
    be asked for in any order; in order it just costs more."""

    @property
    def late_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Buffer: ...


@runtime_checkable
class Files(Protocol):
    """The port. All methods are synchronous and safe from many threads."""

    @property
    def keeps_staged(self) -> bool:
        """Whether the staged name is still there after `publish`, so that the caller has it to remove."""
        ...

    def stage(self, path: str, buffers: Sequence[Buffer]) -> int:
        """Create `path` exclusively with the buffers' bytes, fsync it, return its size in bytes. On error nothing is
        left behind that the caller must know of (a remainder under `path` may stay and is collected as staging)."""
        ...

    def publish(self, staged: str, path: str) -> None:
        """Give the staged file the name `path` if that name is free, else `FileExistsError`. `keeps_staged` tells
        whether the staged name is there afterwards (`link` keeps it until `remove`, `renameat2(RENAME_NOREPLACE)` does
        not)."""
        ...

    def replace(self, path: str, data: Buffer) -> None:
        """Set the whole content of `path`, atomically for readers, not durably."""
        ...

    def read(self, path: str) -> bytes:
        """The whole content of `path`. `FileNotFoundError` if it is not there."""
        ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill the writable `buffer` from `offset`; return the bytes read, fewer only at the end of the file."""
        ...

    def size(self, path: str) -> int:
        """Size of `path` in bytes. `FileNotFoundError` if it is not there."""
        ...

    def names(self, path: str) -> list[str]:
        """Sorted names in the directory `path`, without those that begin with a dot; empty if the directory is not
        there."""
        ...

    def remove(self, path: str) -> bool:
        """Unlink `path`; False if it was not there. Never removes a directory."""
        ...

    def make_directory(self, path: str) -> None:
        """Create the directory and its parents durably; no error if they are there."""
        ...

    def remove_directory(self, path: str) -> bool:
        """Remove the directory if it is empty; False if it is not empty (`.nfs*` leftovers count) or not there."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in the directory durable."""
        ...
