"""The words of strawq as data: what lies in the log, in the state and in a pool's header.

Everything here is an immutable row. `core` says how rows may change, `storage` how a change becomes true.

A *group* is one prompt with its G samples. Its life in the queue is a *task*: `fresh` (a prompt), `partial` (some
tokens are saved), `ready` (accepted, waiting for a batch), in a batch, and one of three ends: `trained`, `dropped`,
`failed`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from strawq.limits import MAX_ATTEMPTS, MAX_EXPIRATIONS

Stage = Literal["fresh", "partial", "ready"]
End = Literal["trained", "dropped", "failed"]
STAGES: tuple[Stage, ...] = ("fresh", "partial", "ready")

UNVERSIONED = -1
"""`Task.version` of a group with no token of a numbered policy."""


class Row(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all persistent structs: a field that this version does not know is an error, never ignored."""


class VersionSpan(Row, frozen=True):
    """Response tokens `[start, end)` were made under policy `version`.

    `last` is set on a *mixed* span: the versions between `version` and `last` made these tokens, and nobody knows
    which made which. Versions are the engine's own strings; only decimal ones are ordered (`policy_number`)."""

    start: int
    end: int
    version: str
    last: str = ""


def policy_number(version: str) -> int:
    """The number of a policy version, or `UNVERSIONED` when the string is not a plain decimal (SGLang starts with
    `default`)."""
    return int(version) if version.isascii() and version.isdigit() and len(version) <= 18 else UNVERSIONED


class ObjectRef(Row, frozen=True):
    """One publication: an Arrow file of records and, if `pack` is set, the safetensors file beside it.

    `digest` is the BLAKE3 (hex, 64 characters) of the whole Arrow file; `pack` that of the tensor file's header.
    `epoch` 0 means that the bytes ride inside the log entry that carries this reference. With `file` set they stand
    at `offset` of a merged file, of which `file` is the BLAKE3."""

    digest: str
    epoch: int
    bytes: int
    rows: int
    pack: str = ""
    pack_bytes: int = 0
    file: str = ""
    offset: int = 0

    @property
    def name(self) -> str:
        """The digest in the name of the file that holds the records."""
        return self.file or self.digest


class StoredObject(Row, frozen=True):
    """An object that the state reaches, where its bytes are, and how many references count on it.

    In a file when `epoch` > 0; else inside log entry `seq` at `offset` of its payload."""

    ref: ObjectRef
    count: int
    seq: int = 0
    offset: int = 0


class Slice(Row, frozen=True):
    """Rows `[start, stop)` of the records in one object."""

    object: str
    start: int
    stop: int


class Task(Row, frozen=True):
    """One group in the queue. `id` is `<submission>-<row>`; `order` sorts as first in, first out.

    Pending if neither `session`, `batch` nor `failed` is set. `attempt` counts claims and is the fencing number of a
    lease. `parts[0]` is the prompt; further parts are what generation has saved, oldest first."""

    id: str
    order: int
    stage: Stage
    parts: tuple[Slice, ...]
    attempt: int = 0
    session: str = ""
    batch: str = ""
    failed: bool = False
    failures: int = 0
    expirations: int = 0
    version: int = UNVERSIONED
    tokens: int = 0
    reason: str = ""

    @property
    def pending(self) -> bool:
        return not (self.session or self.batch or self.failed)


class Submission(Row, frozen=True):
    """Rows `[next, end)` of an object are fresh prompts that nobody has leased yet."""

    number: int
    object: str
    next: int
    end: int


class Producer(Row, frozen=True):
    """A source of prompts and how far it has come. The cursor is the producer's own string, moved only with its
    tasks."""

    id: str
    cursor: str
    submissions: int


class Batch(Row, frozen=True):
    """Groups handed to a trainer. Redelivered with a higher `attempt` until it is finished."""

    id: str
    number: int
    tasks: tuple[str, ...]
    consumer: str
    session: str
    attempt: int


class Receipt(Row, frozen=True):
    """How a task ended, remembered for a while so that a late retry gets its first answer."""

    task: str
    attempt: int
    end: End
    reason: str = ""


class Session(Row, frozen=True):
    """A live process. The id is fresh on every start; `host`, `boot`, `pid_namespace`, `pid` and `pid_started`
    identify the process on one kernel, so that others there know at once when it is dead."""

    id: str
    host: str
    pid: int
    role: str = ""
    boot: str = ""
    pid_namespace: str = ""
    pid_started: str = ""
    lease_seconds: float = 0.0
    joined_seq: int = 0


class Pause(Row, frozen=True):
    """Admission is paused. `acknowledged` are the sessions that have stopped their engines' work."""

    reason: str
    session: str
    acknowledged: tuple[str, ...] = ()


class QueueConfig(Row, frozen=True):
    """`max_attempts` counts failures that were reported, `max_expirations` leases lost with their process; then the
    task is a dead letter. `max_ready` and `max_leased` hold admission back (0: no bound), and `acquire` answers
    `backpressured`. No fresh prompt is leased while the groups that are ready, leased or partial together reach
    `max_ready`, and nothing that is to be generated while `max_leased` groups are leased. Complete groups may always be
    leased, also while admission is paused."""

    max_attempts: int = MAX_ATTEMPTS
    max_expirations: int = MAX_EXPIRATIONS
    max_ready: int = 0
    max_leased: int = 0


class Checkpoint(Row, frozen=True):
    """One log position of one branch, complete. `image` is the branch's rows, encoded; `objects` what they reach.

    `bindings` are digests of files outside the pool (a model checkpoint's manifest) that a restore is checked
    against."""

    name: str
    branch: str
    seq: int
    policy_version: str
    image: bytes
    objects: tuple[str, ...]
    metadata: str = ""
    bindings: tuple[tuple[str, str], ...] = ()
    time_ms: int = 0


class BranchRow(Row, frozen=True):
    """A line of history. The active branch's rows live in the state; those of the others in `image`, as in a
    checkpoint."""

    id: str
    parent: str = ""
    source: str = ""
    base_seq: int = 0
    left_seq: int = 0
    policy_version: str = ""
    image: bytes = b""
    objects: tuple[str, ...] = ()


class Pin(Row, frozen=True):
    """Objects that a session reads from; they stay for as long as it lives or until it lets go."""

    session: str
    name: str
    objects: tuple[str, ...]


class Archive(Row, frozen=True):
    """Groups kept beyond their consumption, by reference: `tasks` as they were at entry `seq`, with all that they
    refer to."""

    name: str
    queue: str
    branch: str
    seq: int
    tasks: tuple[Task, ...]
    objects: tuple[str, ...]
    metadata: str = ""
    time_ms: int = 0


class PoolHeader(Row, frozen=True):
    """`strawq.json`: written once, never changed. `blake3` is the digest of all the rest."""

    format_version: int
    pool_id: str
    run_id: str
    storage_profile: str
    created: str
    exclusive_create: Literal["link", "rename"] = "link"
    declaration: dict[str, str | int | float | bool | None] | None = None
    forced: tuple[str, ...] = ()
    blake3: str = ""
