"""A pool: one directory of immutable files, opened by any number of processes at once. No server, and none of them is
special.

`Pool.init` makes one, `Pool.open` opens it, `pool.queue(name)` is where the work is. Every call is safe from many
threads; a call that changes something returns when the change is durable.

Where such a call takes a `request_id`, asking again with the same id and content gives the first answer and changes
nothing, for as long as the pool remembers it (`limits.REQUESTS_KEPT`); with other content it is `RequestConflict`.
That is how to go on after `OutcomeUnknown`.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from strawq.core import commands as c
from strawq.core import events as e
from strawq.core.machine import Machine
from strawq.core.names import quoted, require_name
from strawq.core.state import highest_number
from strawq.errors import BadInput, NotAPool
from strawq.handles import Held
from strawq.inspection import Inspection, by_position, inspect_state
from strawq.limits import FORMAT_VERSION, LEASE_SECONDS
from strawq.model import Checkpoint, PoolHeader, QueueConfig, StoredObject
from strawq.payloads import Payloads
from strawq.queue import Queue
from strawq.session import SessionKeeper
from strawq.storage import layout
from strawq.storage.clock import Clock, SystemClock
from strawq.storage.contention import AdvisoryLock, CommitLock, NoLock
from strawq.storage.failure import storage_failed
from strawq.storage.files import Buffer, Files
from strawq.storage.header import create_pool, read_header, read_header_patiently, require_free
from strawq.storage.log import CommitLog
from strawq.storage.objects import ObjectStore
from strawq.storage.posix import PosixFiles
from strawq.storage.staging import Staging

if TYPE_CHECKING:
    from strawq.garbage import Collected

T = TypeVar("T")
DEFAULT_QUEUE = "rollout"


class Pool:
    """An open pool. Use as a context manager, or call `close()`: a clean stop gives leases back at once."""

    def __init__(
        self,
        files: Files,
        *,
        path: str = "",
        role: str = "",
        lease_seconds: float = LEASE_SECONDS,
        clock: Clock | None = None,
        lock: AdvisoryLock | None = None,
        background: bool = True,
        keeper: Callable[..., SessionKeeper] = SessionKeeper,
    ) -> None:
        self.files = files
        self.path = path
        self.clock = clock or SystemClock()
        self.header = read_header_patiently(files, path, self.clock)
        self.instance = self.clock.new_id()
        self.staging = Staging(files, self.instance)
        self.log: CommitLog[Machine] = CommitLog(
            self.staging, Machine(), self.header.pool_id, self.clock, lock or NoLock()
        )
        self.objects = ObjectStore(self.staging, self.clock, self.log.read_entry, self.locate)
        self.payloads = Payloads(files, self.objects, self.epoch, self.clock)
        self.keeper = keeper(self.log, self.clock, self.instance, role, lease_seconds, background)
        self._requests = 0
        self._counter = threading.Lock()
        self._queues: dict[str, Queue] = {}

    @classmethod
    def init(
        cls,
        path: str | os.PathLike[str],
        *,
        run_id: str = "rollout",
        storage_profile: str = "local",
        queues: Mapping[str, QueueConfig] | Sequence[str] = (DEFAULT_QUEUE,),
        exclusive_create: str = "link",
        declaration: Mapping[str, str | int | float | bool | None] | None = None,
        forced: Sequence[str] = (),
        **options: Any,
    ) -> Pool:
        """Make a pool in the directory `path` (new or empty) and open it. `options` as for `open`. `BadInput` if one
        is there."""
        require_name(run_id, "run")
        root = require_free(path)
        configs = dict(queues) if isinstance(queues, Mapping) else {name: QueueConfig() for name in queues}
        for name in configs:
            require_name(name, "queue")
        if exclusive_create not in ("link", "rename"):
            raise BadInput(f"exclusive_create is link or rename, not {exclusive_create!r}")
        header = PoolHeader(
            format_version=FORMAT_VERSION,
            pool_id=SystemClock().new_id(),
            run_id=run_id,
            storage_profile=storage_profile,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            exclusive_create="rename" if exclusive_create == "rename" else "link",
            declaration=dict(declaration) if declaration is not None else None,
            forced=tuple(forced),
        )
        try:
            root.mkdir(parents=True, exist_ok=True)
            create_pool(PosixFiles(root, header.exclusive_create, layout.STAGING), header)
        except FileExistsError as error:
            raise BadInput(f"{root} holds a pool already; open it, or choose another directory") from error
        except OSError as error:
            raise storage_failed("make a pool in", str(root), error) from error
        pool = cls.open(root, **options)
        for name, config in configs.items():
            pool.configure(name, config)
        return pool

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        role: str = "",
        lease_seconds: float = LEASE_SECONDS,
        background: bool = True,
    ) -> Pool:
        """Open the pool in directory `path`. Costs what is live, not what has happened.

        `role` is what `inspect` shows for this process; `lease_seconds` how long it may stand still before others
        take its work."""
        root = Path(path).expanduser().absolute()
        if not os.path.isdir(root):
            raise NotAPool(f"{root} is not a directory; make a pool with `strawq init {path}`")
        clock = SystemClock()
        header = read_header(PosixFiles(root), str(root))
        return cls(
            PosixFiles(root, header.exclusive_create, layout.STAGING),
            path=str(root),
            role=role,
            lease_seconds=lease_seconds,
            clock=clock,
            lock=CommitLock(str(root / layout.COMMIT_LOCK), clock),
            background=background,
        )

    # Queues.

    def queue(self, name: str = DEFAULT_QUEUE) -> Queue:
        """The queue `name`. `BadInput` if the pool has none of that name."""
        if name not in self._queues:
            self.log.refresh()
            known = self.log.peek(lambda machine: list(machine.state.branch.queues))
            if name not in known:
                raise BadInput(
                    f"there is no queue {quoted(name)} in {self.path or 'this pool'} (queues: "
                    f"{', '.join(known) or 'none'})"
                )
            self._queues[name] = Queue(self, name)
        return self._queues[name]

    def configure(self, name: str, config: QueueConfig | None = None) -> Queue:
        """Create the queue, or change its settings."""
        self.commit(c.Configure(request=self.new_request(), queue=name, config=config or QueueConfig()))
        self._queues.setdefault(name, Queue(self, name))
        return self._queues[name]

    def queues(self) -> list[str]:
        names: list[str] = self.log.refresh(lambda machine: list(machine.state.branch.queues))
        return names

    # The policy.

    def policy_version(self) -> str:
        version: str = self.log.refresh(lambda machine: machine.state.branch.meta.policy_version)
        return version

    def highest_version(self) -> int:
        """The highest policy version with a number on this branch's line, also behind a word; `UNVERSIONED` if none."""
        version: int = self.log.refresh(lambda machine: highest_number(machine.state.branch.meta))
        return version

    # `branch` in these three is for trainers: `BranchMoved`, and nothing happens, if the pool was rolled back since.

    def publish_version(self, version: str | int, *, branch: str = "", request_id: str | None = None) -> None:
        """Record that the engines serve `version` from now on. A number must be above `highest_version()`, or it is
        `BadInput`: a version goes back only by a rollback."""
        self.commit(c.PublishVersion(request=self.request(request_id), version=str(version), branch=branch))

    def pause(self, reason: str = "", *, branch: str = "", request_id: str | None = None) -> None:
        """Stop admission: `acquire` answers `paused` everywhere until `resume`, over rollbacks too. Leases are kept."""
        request, session = self.request(request_id), self.keeper.current
        self.commit(c.PauseAdmission(request=request, reason=reason, session=session, branch=branch))

    def acknowledge_pause(self) -> None:
        """Say that this process's engines have stopped."""
        self.commit(c.AcknowledgePause(request=self.new_request(), session=self.keeper.require()))

    def resume(self, version: str | int | None = None, *, branch: str = "", request_id: str | None = None) -> None:
        """Let admission go on, with a new policy version if one is given."""
        named = "" if version is None else str(version)
        self.commit(c.Resume(request=self.request(request_id), version=named, branch=branch))

    # Lifetime.

    def checkpoint(
        self,
        name: str,
        metadata: Mapping[str, Any] | None = None,
        bindings: Mapping[str, str] | None = None,
        *,
        request_id: str | None = None,
    ) -> int:
        """Root everything that is live at one log position under `name`; returns that position.

        `bindings` are digests of files outside (a model checkpoint's manifest) that a rollback can be checked
        against."""
        command = c.TakeCheckpoint(
            request=self.request(request_id),
            name=name,
            metadata=encode_metadata(metadata),
            bindings=tuple((bindings or {}).items()),
            time_ms=self.clock.wall_ms(),
        )
        event: e.Checkpointed = self.commit(command)
        return event.seq

    def drop_checkpoint(self, name: str, *, request_id: str | None = None) -> None:
        self.commit(c.DropCheckpoint(request=self.request(request_id), name=name))

    def rollback(
        self,
        target: str,
        bindings: Mapping[str, str] | None = None,
        branch: str = "",
        *,
        request_id: str | None = None,
    ) -> str:
        """Go on from a checkpoint, or from where a branch was left, on a new branch; returns its name. Every lease of
        the old one ends."""
        command = c.Rollback(
            request=self.request(request_id), target=target, branch=branch, bindings=tuple((bindings or {}).items())
        )
        event: e.RolledBack = self.commit(command)
        self._queues.clear()
        return event.branch

    def drop_branch(self, name: str, *, request_id: str | None = None) -> None:
        """`BadInput` if it is the active one, or none of that name is there."""
        self.commit(c.DropBranch(request=self.request(request_id), name=name))

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints with their metadata and bindings, as they were taken."""
        points: list[Checkpoint] = self.log.refresh(lambda machine: by_position(machine.state.checkpoints.values()))
        return points

    def expire_session(self, session: str, reason: str = "") -> None:
        """Take a session for dead before its lease says so. `BadInput` if none of that id is live."""
        command = c.Expire(request=self.new_request(), session=session, reason=reason)
        if isinstance(self.commit(command), e.Refusal):
            raise BadInput(
                f"there is no live session {quoted(session)}; `strawq sessions list POOL` shows those that there are"
            )

    def pin(self, name: str, groups: Sequence[Held]) -> None:
        """Keep what these groups refer to for as long as this process's session lives, or until `unpin`. `Gone` if
        some of it is not reachable any more."""
        digests = tuple(sorted({part.object for held in groups for part in held.task.parts}))
        session = self.keeper.require()
        self.commit(c.PinObjects(request=self.new_request(), session=session, name=name, objects=digests))

    def unpin(self, name: str) -> None:
        self.commit(c.Unpin(request=self.new_request(), session=self.keeper.require(), name=name))

    def gc(self, *, dry_run: bool = False) -> Collected:
        """Remove what nothing reaches any more; with `dry_run` only count what is kept. See `strawq.garbage`."""
        from strawq.garbage import collect_garbage

        return collect_garbage(self, dry_run=dry_run)[1]

    def snapshot(self) -> int:
        """Write a snapshot of the newest entry; returns its number."""
        return self.log.snapshot()

    def inspect(self) -> Inspection:
        """Counts of one log position; they always add up. Damage of the log is named, and what can be read is shown."""

        def look(machine: Machine) -> Inspection:
            return inspect_state(machine.state, self.header, tuple(self.log.damage.values()))

        counted: Inspection = self.log.refresh_leniently(look)
        return counted

    def branch(self) -> str:
        """The active branch as far as this process knows; a session's thread keeps it fresh to within a second."""
        name: str = self.log.peek(lambda machine: machine.state.active.row)
        return name

    # What the queues use.

    def standing(self) -> tuple[str, bool]:
        """The active branch, and whether this process's session is live; a session that is not is forgotten."""
        session = self.keeper.current

        def look(machine: Machine) -> tuple[str, bool]:
            return machine.state.active.row, session in machine.state.sessions

        branch, alive = self.log.refresh(look)
        if not alive:
            self.keeper.forget(session)
        return branch, alive

    def epoch(self) -> int:
        """The epoch in which new objects are born, as far as this process knows."""
        number: int = self.log.peek(lambda machine: machine.state.meta.epoch)
        return number

    def locate(self, digest: str) -> StoredObject | None:
        """Where an object's bytes are now; None if nothing reaches it any more."""
        row: StoredObject | None = self.log.refresh(lambda machine: machine.state.objects.get(digest))
        return row

    def request(self, given: str | None) -> str:
        """The caller's request id, or a new one."""
        if given is None:
            return self.new_request()
        if not given:
            raise BadInput("a request id is not empty")
        return given

    def new_request(self) -> str:
        with self._counter:
            self._requests += 1
            return f"{self.instance[:16]}.{self._requests}"

    def commit(
        self,
        command: c.AnyCommand,
        payloads: Mapping[str, Buffer] | None = None,
        view: Callable[[Machine, Any], T] | None = None,
    ) -> Any:
        """Commit a command of this process. Returns its event or refusal, or what `view` makes of an event."""
        self.keeper.require_same_process()
        machine = self.log.machine

        def look(answer: Any) -> Any:
            return answer if view is None or isinstance(answer, e.Refusal) else view(machine, answer)

        return self.log.commit(command, payloads, look)

    def close(self) -> None:
        self.keeper.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode_metadata(metadata: Mapping[str, Any] | None) -> str:
    """The user's own words as JSON. `BadInput` if they are not JSON values."""
    try:
        return msgspec.json.encode(metadata).decode() if metadata else ""
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise BadInput(f"metadata are JSON values with string keys: {error}") from error
