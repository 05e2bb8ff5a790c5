"""Where things lie in a pool's directory. Paths are made here, from numbers and digests; a user's words never become
a path."""

from __future__ import annotations

from strawq.limits import ENTRIES_PER_SEGMENT

HEADER = "strawq.json"
LOG = "log"
FLOORS = "floors"
SNAPSHOTS = "snapshots"
OBJECTS = "objects"
SESSIONS = "sessions"
STAGING = "tmp"
LOCKS = "locks"
COMMIT_LOCK = "locks/commit.lock"
PROBES = ".strawq-probe-"
"""How the names of a probe's directories begin, which may lie beside these."""
DIRECTORIES = (LOG, FLOORS, SNAPSHOTS, OBJECTS, SESSIONS, STAGING, LOCKS)


def segment(seq: int) -> int:
    return seq // ENTRIES_PER_SEGMENT


def segment_directory(number: int) -> str:
    return f"{LOG}/{number:09d}"


def entry(seq: int) -> str:
    return f"{LOG}/{seq // ENTRIES_PER_SEGMENT:09d}/{seq:012d}.json"


def entry_seq(name: str) -> int:
    """The number in an entry's name, or 0 if it is not such a name."""
    stem, dot, suffix = name.partition(".")
    return int(stem) if dot and suffix == "json" and len(stem) == 12 and stem.isascii() and stem.isdigit() else 0


def floor(number: int) -> str:
    return f"{FLOORS}/{number:09d}"


def snapshot(seq: int) -> str:
    return f"{SNAPSHOTS}/{seq:012d}.snapshot"


def snapshot_seq(name: str) -> int:
    """The entry number in a snapshot's name, or 0 if it is not such a name."""
    stem, dot, suffix = name.partition(".")
    return int(stem) if dot and suffix == "snapshot" and stem.isascii() and stem.isdigit() else 0


def object_directory(epoch: int, digest: str) -> str:
    """One of sixteen: enough to keep each small, and few enough that a process soon knows them all to be durable."""
    return f"{OBJECTS}/{epoch:06d}/{digest[:1]}"


def record_file(epoch: int, digest: str) -> str:
    return f"{OBJECTS}/{epoch:06d}/{digest[:1]}/{digest}.arrow"


def pack_file(epoch: int, digest: str) -> str:
    return f"{OBJECTS}/{epoch:06d}/{digest[:1]}/{digest}.safetensors"


def session_file(session: str) -> str:
    return f"{SESSIONS}/{session}.json"


def staging(instance: str, number: int) -> str:
    return f"{STAGING}/{instance}-{number}"
