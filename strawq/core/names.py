"""What a command must name before anything else is looked at. Names from users become neither paths nor surprises."""

from __future__ import annotations

import re

from strawq.core.events import Refusal
from strawq.core.state import Queue, State
from strawq.errors import BadInput, BranchMoved, Fenced
from strawq.limits import NAME_BYTES, REQUEST_BYTES, TEXT_BYTES
from strawq.model import ObjectRef

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)


def require_name(name: str, what: str) -> None:
    """ASCII letters, digits, dot, dash and underscore, starting with a letter or digit: no path, no look-alike, no
    surprise."""
    if len(name) > NAME_BYTES or not _NAME.match(name):
        raise BadInput(
            f"{what} name {quoted(name)} is not allowed: use 1 to {NAME_BYTES} letters, digits, '.', '-' and "
            "'_', starting with a letter or digit"
        )


def quoted(name: str) -> str:
    """A name as messages show it: in quotes, and cut where it is longer than any name."""
    return repr(name) if len(name) <= NAME_BYTES else f"{name[:NAME_BYTES]!r}..."


def require_request(request: str) -> None:
    if len(request.encode("utf-8", "surrogatepass")) > REQUEST_BYTES or not (request.isprintable() or not request):
        raise BadInput(f"a request id is at most {REQUEST_BYTES} bytes of printable text")


def require_queue(state: State, name: str) -> Queue:
    queue = state.branch.queues.get(name)
    if queue is None:
        known = ", ".join(state.branch.queues) or "none"
        raise BadInput(f"there is no queue {quoted(name)} in this pool (queues: {known}); create it first")
    return queue


def require_branch(state: State, branch: str) -> None:
    """Identity is lineage: a command of another line of history never counts, whatever numbers it carries."""
    if branch != state.active.row:
        raise BranchMoved(
            f"branch {branch or '(none)'} is not active, {state.active.row} is: the pool was rolled back; drop what "
            "you hold and go on there"
        )


def require_named_branch(state: State, branch: str) -> None:
    """The same for a command that is meant for whichever branch is active unless it names one."""
    if branch:
        require_branch(state, branch)


def require_session(state: State, session: str) -> None:
    if session not in state.sessions:
        raise Fenced(
            f"session {session or '(none)'} is not live: it left or was taken for dead; join again with a fresh session"
        )


def require_objects(state: State, objects: tuple[ObjectRef, ...]) -> Refusal | None:
    """New references count only to young objects, or to ones that the state reaches: whatever is unreachable stays
    so."""
    require_digests(objects)
    for ref in objects:
        if ref.rows < 1 or ref.epoch < 0 or ref.epoch > state.meta.epoch:
            raise BadInput(
                f"object {ref.digest[:12]} has {ref.rows} rows in epoch {ref.epoch} (open epoch: {state.meta.epoch})"
            )
        if ref.file:
            raise BadInput(f"object {ref.digest[:12]} is said to lie in a merged file; only a move puts it there")
        if 0 < ref.epoch <= state.meta.closed_epoch and ref.digest not in state.objects:
            return Refusal("epoch_closed", f"object {ref.digest[:12]} was born in epoch {ref.epoch}, which is closed")
    return None


def require_digests(objects: tuple[ObjectRef, ...]) -> None:
    """These become names of files."""
    for ref in objects:
        if not all(_DIGEST.match(name) for name in (ref.digest, ref.pack, ref.file) if name or name is ref.digest):
            raise BadInput(f"object {ref.digest[:80]!r} is not named by a BLAKE3 digest")


def cut_text(text: str) -> str:
    """At most `TEXT_BYTES` of UTF-8, no lone surrogates."""
    data = text.encode("utf-8", "replace")
    return (
        text
        if len(data) <= TEXT_BYTES and data == text.encode("utf-8", "ignore")
        else data[:TEXT_BYTES].decode("utf-8", "ignore")
    )
