"""Files at any URL that fsspec knows (a plain path is one), for archives and exports. The commit log never goes here.

The rule: what fsspec raises reaches a caller as an error of strawq that names the URL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from strawq.errors import BadInput, Gone
from strawq.storage.failure import storage_failed
from strawq.storage.files import Buffer


def _place(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. `BadInput` if there is no driver for it."""
    import fsspec

    if not url or "\0" in url:
        raise BadInput(f"{url!r} is no place; name a path or a URL")
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise BadInput(f"{url} cannot be opened: {error}") from error
    return filesystem, path


def _is_local(filesystem: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(filesystem, LocalFileSystem)


@contextmanager
def _named(verb: str, url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and verb != "write":
            raise Gone(f"{url} is not there; restore it from a copy") from error
        raise storage_failed(verb, url, error) from error
    except NotImplementedError as error:
        raise BadInput(
            f"cannot {verb} {url}: the driver of such URLs does not do that; choose another place"
        ) from error


def exists(url: str, name: str) -> bool:
    filesystem, path = _place(url)
    with _named("look for", f"{url}/{name}"):
        return bool(filesystem.exists(f"{path}/{name}"))


def read_remote(url: str, name: str) -> bytes:
    with open_remote(url, name) as file:
        return bytes(file.read())


@contextmanager
def open_remote(url: str, name: str) -> Iterator[Any]:
    """The file `name` below `url`, open for reading."""
    filesystem, path = _place(url)
    with _named("read", f"{url}/{name}"), filesystem.open(f"{path}/{name}", "rb") as file:
        yield file


def write_remote(url: str, name: str, pieces: Iterable[Buffer]) -> None:
    """Write the file `name` below the directory `url`, which is made; it appears whole or not at all where the file
    system can do that."""
    with create_remote(f"{url.rstrip('/')}/{name}", make_directory=True) as file:
        for piece in pieces:
            file.write(piece)


@contextmanager
def create_remote(url: str, *, make_directory: bool = False) -> Iterator[Any]:
    """A new file at `url`, open for writing. If the block fails, nothing is there afterwards.

    On this machine the file's directory must be there (else `BadInput`): a path that was mistyped is not made true.
    Elsewhere a directory is mostly no more than a part of names, and is made."""
    filesystem, path = _place(url)
    with _named("write", url):
        parent = filesystem._parent(path)
        if not make_directory and _is_local(filesystem) and not filesystem.isdir(parent):
            raise BadInput(f"{url} cannot be written: there is no directory {parent}; make it, or correct the path")
        if parent:
            filesystem.makedirs(parent, exist_ok=True)
        file = filesystem.open(path, "wb", autocommit=False)
        try:
            yield file
            file.close()
        except BaseException:
            file.discard()
            raise
        file.commit()
