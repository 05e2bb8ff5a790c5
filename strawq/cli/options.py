"""Parameters that several verbs share, so that a word means the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from strawq.pool import Pool
    from strawq.queue import Queue

PoolPath = Annotated[str, typer.Argument(metavar="POOL", help="Directory of the pool.", show_default=False)]
QueueName = Annotated[
    str,
    typer.Option(
        "--queue", "-q", envvar="STRAWQ_QUEUE", show_default=False, help="Queue (may be left out if there is only one)."
    ),
]
T = TypeVar("T")
RequestId = Annotated[
    str,
    typer.Option(
        "--request-id", metavar="ID", show_default=False, help="Asked again with the same id, it happens once."
    ),
]
Bindings = Annotated[
    list[str],
    typer.Option(
        "--bind", metavar="NAME=FILE", show_default=False, help="A file outside the pool, by its BLAKE3 digest."
    ),
]


@contextmanager
def opened(path: str, role: str = "cli") -> Iterator[Pool]:
    """The pool at `path`, closed at the end, also when the command is interrupted."""
    from strawq.errors import StorageFailed
    from strawq.pool import Pool

    if not path or "\0" in path:
        from strawq.errors import BadInput

        raise BadInput(f"{path!r} is no directory; name the directory of a pool")
    try:
        with Pool.open(path, role=role) as pool:
            yield pool
    except StorageFailed as error:
        raise StorageFailed(placed(str(error), path)) from error


def placed(text: str, path: str) -> str:
    """What storage says of a pool's log or garbage, with the pool."""
    return re.sub(r"\b(the log|garbage)(?=: )", lambda found: f"{found[1]} of {path}", text, count=1)


_ASK_AGAIN_SECONDS = (0.2, 1.0, 3.0)


def once(pool: Pool, given: str | None, call: Callable[[str], T]) -> T:
    """`call` with a request id, the user's or a new one; again with the same while nobody knows whether it happened.
    `OutcomeUnknown` says in the end how to ask again, unless the verb has no `--request-id` (`given` None)."""
    from strawq.errors import OutcomeUnknown

    request = pool.request(given or None)
    for seconds in _ASK_AGAIN_SECONDS:
        try:
            return call(request)
        except OutcomeUnknown:
            pool.clock.sleep(seconds)
    try:
        return call(request)
    except OutcomeUnknown as error:
        if given is None:
            raise
        raise OutcomeUnknown(f"{error}; repeat the command with --request-id {request}: it is done once") from error


def pick_queue(pool: Pool, name: str) -> Queue:
    """The queue of that name; without a name the only one. `BadInput` names those that there are."""
    from strawq.errors import BadInput

    if name:
        return pool.queue(name)
    names = pool.queues()
    if len(names) != 1:
        raise BadInput(f"{pool.path} has {len(names)} queues ({', '.join(names) or 'none'}); say which with --queue")
    return pool.queue(names[0])


def read_bindings(given: list[str]) -> dict[str, str]:
    """`NAME=FILE` to name and BLAKE3 digest (hex). `BadInput` names what cannot be read."""
    from strawq.errors import BadInput

    found: dict[str, str] = {}
    for binding in given:
        name, equals, file = binding.partition("=")
        if not (name and equals and file):
            raise BadInput(f"--bind takes NAME=FILE, not {binding!r}")
        if name in found:
            raise BadInput(f"--bind names {name} twice")
        try:
            with open(file, "rb") as opened_file:
                found[name] = digest_of(opened_file)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise BadInput(f"--bind {name}: {file} cannot be read ({why}); check the path") from error
    return found


def digest_of(file: IO[bytes]) -> str:
    """BLAKE3 (hex) of the rest of a file."""
    from blake3 import blake3

    digest = blake3()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()
