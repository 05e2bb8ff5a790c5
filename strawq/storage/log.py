"""The commit log: how a decision becomes true. One immutable file for each entry, and the name is its number.

Commit: decide on the state at the newest entry that we know; write the next entry under a staging name, durably; give
it the next number, which only one process can; make the name durable; only then acknowledge. If the number is taken,
read that entry: it is ours if the commit id is ours (a reply can be lost), else fold it and decide again. The
commands of all threads that wait go into one entry.

Trimming breaks "only one process can": a writer that slept finds its old number free again. So trim g writes floor F
to `floors/<g>` before the first entry below F goes. Whoever knows of g trims looks for `floors/<g+1>` after its
publish, and a reader after its catch-up: if F is above the entry, we are below the floor and cannot know whether our
entry was a commit or a ghost. We remove the ghost, reload, and ask the state by the command's identity.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal
from zlib import crc32

import msgspec

from strawq.errors import Contended, Damaged, OutcomeUnknown, StrawqError
from strawq.limits import COMMANDS_PER_ENTRY, COMMIT_TRIES, ENTRY_INLINE_BYTES, SNAPSHOT_AT_STOP, SNAPSHOT_ENTRIES
from strawq.storage import layout
from strawq.storage.appending import Appender, Outcome
from strawq.storage.clock import Clock
from strawq.storage.contention import AdvisoryLock
from strawq.storage.entry import EntryLine, encode_entry
from strawq.storage.failure import storage_failed
from strawq.storage.files import Buffer
from strawq.storage.replay import M, Replay
from strawq.storage.snapshots import encode_snapshot, snapshot_numbers
from strawq.storage.staging import Staging

Published = Outcome | Literal["ghost"]


class _Ticket:
    """One waiting command and, once `done`, its answer or error."""

    __slots__ = ("answer", "command", "done", "error", "payloads", "since", "view")

    def __init__(self, command: Any, payloads: Mapping[str, Buffer], view: Callable[[Any], Any] | None) -> None:
        self.command = command
        self.payloads = payloads
        self.view = view
        self.since = -1
        self.done = False
        self.answer: Any = None
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done = True


class CommitLog(Replay[M]):
    """The log of one pool, opened by one process. Safe from many threads."""

    def __init__(self, staging: Staging, machine: M, pool: str, clock: Clock, lock: AdvisoryLock) -> None:
        super().__init__(staging.files, machine, pool, clock)
        self.staging = staging
        self.commits = 0
        self.races_lost = 0
        self._advisory = lock
        self._lead = threading.Lock()
        self._line = threading.Lock()
        self._waiting: list[_Ticket] = []
        self._durable_seq = 0
        self._append = Appender(staging, clock, self.read_entry)

    # Reading.

    def refresh(self, view: Callable[[M], Any] | None = None, *, durable: bool = False) -> Any:
        """Fold everything that is committed by now; `view` reads the state while nothing can change it. With
        `durable`, no power cut takes what it reads: for acts that cannot be taken back."""
        with self._lead:
            self._catch_up()
            if durable:
                self._make_durable(self.machine.seq)
            return view(self.machine) if view is not None else None

    def refresh_leniently(self, view: Callable[[M], Any]) -> Any:
        """Like `refresh`, but where an entry is damaged the state before it is shown and the damage is named in
        `damage["log"]`. For looking at a pool, never for deciding."""
        with self._lead:
            try:
                self._catch_up()
            except Damaged as error:
                self.damage["log"] = str(error)
            else:
                self.damage.pop("log", None)
            return view(self.machine)

    def peek(self, view: Callable[[M], Any]) -> Any:
        """Read the state as far as this process has folded it."""
        with self._lead:
            if not self._loaded:
                self._catch_up()
            return view(self.machine)

    # Writing.

    def commit(
        self, command: Any, payloads: Mapping[str, Buffer] | None = None, view: Callable[[Any], Any] | None = None
    ) -> Any:
        """Make `command` true, or learn why not. Returns its event (durable) or its refusal; with `view`, what that
        makes of the answer while the state is just after it.

        `payloads` are inline objects by digest. Raises what `decide` raises; `StorageFailed` (nothing happened),
        `Contended` (nothing happened), `OutcomeUnknown` (ask again)."""
        ticket = _Ticket(command, payloads or {}, view)
        with self._line:
            self._waiting.append(ticket)
        with self._lead:
            while not ticket.done:
                self._commit_waiting()
        if ticket.error is not None:
            raise ticket.error
        return ticket.answer

    def _commit_waiting(self) -> None:
        with self._line:
            tickets = self._next_group()
        try:
            # Whoever waits folds what others commit: under the lock, only the newest entry is left to look at.
            with self._advisory.held(self._catch_up):
                fresh = not self._at_end or self._advisory.contended
                if fresh:
                    self._catch_up()
                self._commit_group(tickets, fresh)
        except StrawqError as error:
            self._abandon(tickets, error)
        except OSError as error:
            self._abandon(tickets, storage_failed("commit to", "the log", error))
        except BaseException:
            self._abandon(
                tickets, OutcomeUnknown("the committing thread was interrupted; ask again with the same request id")
            )
            raise
        self._snapshot_if_due()

    def _next_group(self) -> list[_Ticket]:
        """The waiting commands that fit into one entry, oldest first."""
        size = taken = 0
        for ticket in self._waiting[:COMMANDS_PER_ENTRY]:
            size += sum(len(data) for data in ticket.payloads.values())
            if taken and size > ENTRY_INLINE_BYTES:
                break
            taken += 1
        tickets, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return tickets

    def _abandon(self, tickets: list[_Ticket], error: BaseException) -> None:
        self.machine.undo()
        for ticket in tickets:
            if not ticket.done:
                ticket.fail(error)

    def _commit_group(self, tickets: list[_Ticket], fresh: bool) -> None:
        """Decide, publish, acknowledge; again while others are first. `fresh`: the log's end has just been looked
        at."""
        for turn in range(COMMIT_TRIES):
            waiting = [ticket for ticket in tickets if not ticket.done]
            events, inline, settled = self._decide(waiting, fresh)
            if not settled and not fresh:
                # A refusal is only as good as the state it was decided on.
                self._catch_up()
                fresh = True
                continue
            if not waiting:
                return
            if not events:
                self._settle(waiting)
                return
            outcome = self._publish(events, inline)
            if outcome == "committed":
                self._settle(waiting)
                return
            if outcome == "ghost":
                self._loaded = False
            else:
                self.races_lost += 1
                self._advisory.lost_race()
                if turn > 2:
                    self._clock.sleep(0.002 * min(turn, 50) * self._clock.jitter())
            trims = self.machine.trims
            self._catch_up_in_doubt(outcome)
            fresh = True
            if outcome != "lost" or self.machine.trims != trims:
                for ticket in waiting:
                    self._ask_by_identity(ticket)
        raise Contended(
            f"other processes committed first {COMMIT_TRIES} times in a row; nothing was changed, try again"
        )

    def _decide(self, tickets: list[_Ticket], fresh: bool) -> tuple[list[Any], dict[str, Buffer], bool]:
        """Apply the waiting commands tentatively. False at the end if an answer needs the newest state and we may not
        have it."""
        machine, seq = self.machine, self.machine.seq + 1
        events: list[Any] = []
        inline: dict[str, Buffer] = {}
        where: dict[str, int] = {}
        at = 0
        for ticket in tickets:
            if ticket.since < 0:
                ticket.since = machine.seq
            ticket.error = None
            mark = machine.mark()
            try:
                answer = machine.decide(ticket.command)
                if machine.is_new(answer, ticket.command):
                    for digest, data in ticket.payloads.items():
                        if digest not in inline:
                            inline[digest], where[digest] = data, at
                            at += len(data)
                    machine.apply(answer, seq, where)
                    events.append(answer)
                elif not fresh:
                    machine.undo()
                    return [], {}, False
                ticket.answer = ticket.view(answer) if ticket.view is not None else answer
            except StrawqError as error:
                machine.undo(mark)
                if not fresh:
                    machine.undo()
                    return [], {}, False
                ticket.error = error
        return events, inline, True

    def _settle(self, tickets: list[_Ticket]) -> None:
        """Acknowledge. Answers that rest on entries of others rest on durable ones."""
        self._make_durable(self.machine.seq)
        for ticket in tickets:
            ticket.done = True

    def _catch_up_in_doubt(self, outcome: Published) -> None:
        """Catch up after a publish. Where it may have been ours, no failure says that nothing happened."""
        try:
            self._catch_up()
        except StrawqError as error:
            if outcome == "lost":
                raise
            raise OutcomeUnknown(
                f"whether the commit counts is not known ({error}); ask again with the same request id"
            ) from error

    def _ask_by_identity(self, ticket: _Ticket) -> None:
        """After a trim that we slept through: was our command committed, folded and trimmed meanwhile? If the state
        no longer remembers that far back, say so instead of guessing."""
        if self.machine.answered(ticket.command) is not None:
            return
        if self.machine.forgotten_seq > ticket.since:
            ticket.fail(
                OutcomeUnknown(
                    "this process slept through more history than the pool remembers; whether the command was "
                    "committed is not known: "
                    "look at the state, then decide"
                )
            )

    def _publish(self, events: list[Any], inline: dict[str, Buffer]) -> Published:
        """Give the next number to an entry of ours: `committed`, `lost` (another has it), `unsure`, or `ghost` (the
        number is below a floor). It is published only behind a durable entry, so that no power cut leaves a hole."""
        machine, seq = self.machine, self.machine.seq + 1
        sizes = [(digest, len(data)) for digest, data in inline.items()]
        line = EntryLine(
            seq=seq,
            prev=self.tip,
            id=self._clock.new_id(),
            session=self.staging.instance,
            time_ms=self._clock.wall_ms(),
            events=[msgspec.Raw(machine.encode(event)) for event in events],
            inline=sizes,
        )
        head, digest = encode_entry(line)
        buffers = [head, *inline.values()]
        self._sync_name(machine.seq)
        self._append.make_segment(seq)
        outcome = self._append.publish(seq, line.id, buffers)
        if outcome != "committed":
            machine.undo()
            return outcome
        try:
            below = self._below_floor(seq)
        except StrawqError as error:
            raise OutcomeUnknown(
                f"entry {seq} is written, but whether it is above the floor is not known ({error}); ask again with "
                "the same request id"
            ) from error
        if below:
            machine.undo()
            # It may be a commit: as in any trim, the floor is durable first. If it stays, the next trim finds it.
            with contextlib.suppress(OSError):
                self.files.sync_directory(layout.FLOORS)
                self.files.remove(layout.entry(seq))
            return "ghost"
        self._advance(seq, digest, sum(len(part) for part in buffers))
        self.commits += 1
        return "committed"

    def void_tip(self) -> int:
        """Let history go on behind a damaged entry that is the newest: nobody can have built on it, and with a
        truthful fsync nobody was told that it was committed. Returns its number, or 0 if the newest entry is whole.

        The void is itself an entry, so of two repairs, or a repair and a commit, one wins. One that is torn in its turn
        is passed over by the next repair."""
        with self._lead:
            try:
                self._catch_up()
                return 0
            except Damaged:
                # Only torn bytes are void. One that does not follow from ours, or that a newer version wrote, is whole,
                # and somebody was told that it happened.
                seq = self.machine.seq + 1
                following = self._behind_torn(seq)
                if following == seq:
                    raise
            if self.read_entry(following) is not None:
                path = layout.entry(seq)
                raise Damaged(f"log entry {path} is damaged and others follow it: restore the file to read past it")
            who, now_ms = self.staging.instance, self._clock.wall_ms()
            line = EntryLine(following, self.tip, self._clock.new_id(), who, now_ms, [], voids=seq)
            try:
                for number in range(seq, following):
                    self._sync_name(number)
                self._append.make_segment(following)
                self._append.publish(following, line.id, [encode_entry(line)[0]])
            except OSError as error:
                raise storage_failed("write", layout.entry(following), error) from error
            self._catch_up()
            self._make_durable(self.machine.seq)
            return seq

    def _make_durable(self, seq: int) -> None:
        """Make the names of all entries up to `seq` durable: those before it were, before it was published."""
        try:
            self._sync_name(seq)
        except OSError as error:
            raise OutcomeUnknown(
                f"entry {seq} is written, but its name is not known to be durable ({error}); ask again with the "
                "same request id"
            ) from error

    def _sync_name(self, seq: int) -> None:
        if seq <= self._durable_seq:
            return
        # A segment that is gone was trimmed, behind a snapshot that was written when all of it was durable.
        with contextlib.suppress(FileNotFoundError):
            self.files.sync_directory(layout.segment_directory(layout.segment(seq)))
        self._durable_seq = seq

    # Snapshots.

    def _snapshot_if_due(self) -> None:
        # Processes that work together would all be due at the same entry: each waits a little longer, by its identity.
        patience = crc32(self.staging.instance.encode()) % (SNAPSHOT_ENTRIES // 4 + 1)
        if self._bytes_since >= self._snapshot_bytes:
            self._snapshot_if_behind(SNAPSHOT_ENTRIES + patience)

    def snapshot_for_next(self) -> None:
        """At a clean stop: spare whoever opens the pool next the entries since the last snapshot, if they are many."""
        with self._lead:
            if self.commits:
                self._snapshot_if_behind(SNAPSHOT_AT_STOP)

    def _snapshot_if_behind(self, entries: int) -> None:
        if self.machine.seq - self.snapshot_seq < entries:
            return
        try:
            # Another process may have written one meanwhile.
            self.snapshot_seq = max(self.snapshot_seq, next(iter(snapshot_numbers(self.files)), 0))
            if self.machine.seq - self.snapshot_seq >= entries:
                self._write_snapshot()
        except (OSError, StrawqError):
            # Work goes on without it; the next commit tries again after as many entries.
            self.snapshot_seq = self.machine.seq

    def snapshot(self) -> int:
        """Write the snapshot of the newest entry, durably; return its number."""
        with self._lead:
            self._catch_up()
            if self.machine.seq:
                try:
                    self._write_snapshot()
                except OSError as error:
                    raise storage_failed("write", layout.snapshot(self.machine.seq), error) from error
            return self.machine.seq

    def _write_snapshot(self) -> None:
        seq = self.machine.seq
        self._make_durable(seq)
        data = encode_snapshot(self.pool, seq, self.tip, self.machine.dump())
        # If the name is taken: same entry, same bytes.
        self.staging.place([data], layout.snapshot(seq))
        self.files.sync_directory(layout.SNAPSHOTS)
        self.snapshot_seq, self._snapshot_bytes, self._bytes_since = seq, len(data), 0
