"""Weakenings of the protocol, one line each: every one must be caught by the suite, or a test is missing.

A mutant replaces a piece of one function's source and swaps the compiled code in place, so that every reference to the
function is weakened. A piece that is not in the source any more is an error: the mutant would prove nothing.
"""

from __future__ import annotations
import __future__ as future

import importlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple


class Edit(NamedTuple):
    """In `where` (`module:function` or `module:Class.method`) the text `old` becomes `new`."""

    where: str
    old: str
    new: str


class Mutant(NamedTuple):
    name: str
    edits: tuple[Edit, ...]
    breaks: str
    """What it breaks, for the table."""


def function_of(where: str) -> FunctionType:
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType), where
    return found


@contextmanager
def rewritten(where: str, edits: Sequence[Edit]) -> Iterator[None]:
    function = function_of(where)
    source = textwrap.dedent(inspect.getsource(function))
    for edit in edits:
        assert edit.old in source, f"{where} does not hold {edit.old!r} any more: bring the mutant up to date"
        source = source.replace(edit.old, edit.new)
    lines = source.splitlines()
    while lines[0].startswith("@"):
        lines.pop(0)
    space: dict[str, Any] = {}
    code = compile("\n".join(lines), f"<mutant of {where}>", "exec", future.annotations.compiler_flag)
    exec(code, dict(function.__globals__), space)
    before = function.__code__
    function.__code__ = space[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before


@contextmanager
def switched_on(mutant: Mutant) -> Iterator[None]:
    with ExitStack() as stack:
        for where in dict.fromkeys(edit.where for edit in mutant.edits):
            stack.enter_context(rewritten(where, [edit for edit in mutant.edits if edit.where == where]))
        yield


def _mutant(name: str, breaks: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(name, tuple(Edit(*edit) for edit in edits), breaks)


LOG, APPENDING, REPLAY = "strawq.storage.log:CommitLog.", "strawq.storage.appending:Appender.", "strawq.storage.replay:"
REPORTS, TRIM, GC = "strawq.core.reports:decide_report", "strawq.trimming:", "strawq.garbage:"
OBJECTS, OBSERVER = "strawq.storage.objects:ObjectStore.", "strawq.storage.sessions:Observer."

MUTANTS = (
    _mutant("no floor check after the link", "a ghost is taken for a commit",
        (LOG + "_publish", "below = self._below_floor(seq)", "below = False")),
    _mutant("no floor check by readers", "a trimmed log is taken for its end",
        (REPLAY + "Replay._reach_end", "if not self._below_floor(self.machine.seq):", "if True:")),
    _mutant("damage is believed below the floor", "a reader that stands on a ghost takes the true history for damage",
        (REPLAY + "Replay._fold_following", "return error", "raise error")),
    _mutant("floor written after the first deletion", "a number is free before anybody can know why",
        (TRIM + "trim_log", "floor = _announce(pool, floor)",
         "remove_entries(pool, floor); floor = _announce(pool, floor)")),
    _mutant("floor before the snapshot is durable", "a power cut leaves neither entries nor snapshot",
        (LOG + "_write_snapshot", "self.files.sync_directory(layout.SNAPSHOTS)", "pass")),
    _mutant("a pool is wherever its path leads", "work is acknowledged in a copy of the pool",
        ("strawq.storage.root:Root.open", "elif (found != known or self._held is None) and not (", "elif 0 and (")),
    _mutant("a pool that is gone has free names", "a directory that was moved away is an empty log",
        ("strawq.storage.root:Root.open", "raise self._displaced() from error", "raise")),
    _mutant("a gap in the log is its end", "a commit where an entry is missing leaves two histories",
        (REPLAY + "Replay._look_for_gap", "newest = self._newest_listed()", "newest = 0")),
    _mutant("empty directories stay away", "a pool that was copied through an object store takes nothing",
        ("strawq.storage.staging:Staging.write", "make_directories(self.files)", "raise")),
    _mutant("own-entry check left out", "a lost reply is taken for a lost race",
        (APPENDING + "_is_ours", "entry.line.id == commit_id", "False")),
    _mutant("our own staged name is taken for a failure", "a lost reply fails a call that could have worked",
        ("strawq.storage.staging:Staging.write", "except FileExistsError:", "except ZeroDivisionError:")),
    _mutant("what is not understood is void", "an older strawq declares a newer one's commit void",
        ("strawq.storage.entry:is_torn", "return False", "return True")),
    _mutant("a repair that is torn ends all repair", "a pool that no repair can open",
        (REPLAY + "Replay.read_past", "continue", "return None")),
    _mutant("whose log it is not looked at", "two pools grow on one log, each under its own header",
        (REPLAY + "Replay._fold", "line.prev != UNBOUND", "False")),
    _mutant("the answers about a pool stay on the branch that is left", "a repeated checkpoint is refused",
        ("strawq.core.apply_lifetime:_rolled_back", "_carry_answers(old, new)", "pass")),
    _mutant("the time of a checkpoint is content", "a retry is taken for another command",
        ("strawq.core.content:content_digest", 'changes["time_ms"] = 0', "pass")),
    _mutant("a ghost goes before its floor is durable", "a power cut brings the log back with a hole",
        (LOG + "_publish", "self.files.sync_directory(layout.FLOORS)", "pass")),
    _mutant("ask-by-identity left out", "a repeated command happens twice",
        ("strawq.core.decide:decide",
         "state.branch.answer_of.get(command.request) if command.request else None", "None")),
    _mutant("forgotten answers are guessed", "a command older than memory happens twice",
        (LOG + "_ask_by_identity", "self.machine.forgotten_seq > ticket.since", "False")),
    _mutant("expiry by wall clock", "a step of the clock takes a living process for dead",
        (OBSERVER + "stopped", "self._clock.monotonic()", "self._clock.wall_ms() / 1000"),
        (OBSERVER + "_seen", "min(now - before.seen_at, 2 * self._round_seconds)", "now - before.seen_at")),
    _mutant("a sleeping observer counts its own sleep", "a process that wakes takes the others for dead",
        (OBSERVER + "_seen", "min(now - before.seen_at, 2 * self._round_seconds)", "now - before.seen_at")),
    _mutant("an observer that is not heard counts", "a full disk takes every living process for dead",
        ("strawq.session:SessionKeeper._heard", "bool(self._beating)", "True or bool(self._beating)")),
    _mutant("an unreadable heartbeat counts as stillness", "a sick mount takes the others for dead",
        (OBSERVER + "stopped", "before.seen_at = now",
         "before.still_seconds += now - before.seen_at; before.seen_at = now; "
         "found += [(session, 'still')] * (before.still_seconds > session.lease_seconds)")),
    _mutant("a garbled heartbeat counts as stillness", "one wrong answer of a mount takes a living process for dead",
        (OBSERVER + "_seen", "before.still_seconds, before.dark_seconds + elapsed, now",
         "before.still_seconds + elapsed, before.still_seconds + elapsed, now")),
    _mutant("heartbeats wait for the log", "a slow commit takes its own process's leases",
        ("strawq.session:SessionKeeper.beat", "session = self._beating",
         "session = self._log.peek(lambda _: self._beating)")),
    _mutant("attempt not checked on commit", "a zombie of the same process commits with an old lease",
        (REPORTS, " or task.attempt != item.attempt", "")),
    _mutant("session not checked on commit", "a zombie commits with its successor's lease",
        (REPORTS, "task.session != command.session", "not task.session")),
    _mutant("branch not checked", "a worker of a branch that was left commits on the new one",
        ("strawq.core.names:require_branch", "branch != state.active.row", "False")),
    _mutant("completion accepted twice", "a second answer replaces the first",
        (REPORTS, "task.session != command.session or task.attempt != item.attempt",
         "(task.session != command.session and item.outcome != 'complete') or task.attempt != item.attempt")),
    _mutant("rows may follow anything", "a group with a missing part",
        (REPORTS, "item.after not in (0, len(task.parts))", "False")),
    _mutant("receipts forgotten", "a late retry is told that its work was lost",
        ("strawq.core.reports:_standing", "receipt = queue.receipt(item.task)", "receipt = None")),
    _mutant("batch redelivery without a new number", "a trainer that woke finishes its successor's batch",
        ("strawq.core.decide:_take_batch", "attempt=batch.attempt + 1", "attempt=batch.attempt")),
    _mutant("pause not looked at", "work is admitted during a weight update",
        ("strawq.core.decide:_acquire", "state.branch.meta.pause is not None", "False")),
    _mutant("a group that is taken back stays ready", "a trainer gets a group of which answers were thrown away",
        ("strawq.core.apply:_grown", 'stage: Stage = "partial"',
         'stage = "partial" if task.stage == "fresh" else task.stage')),
    _mutant("a full queue keeps complete groups", "what would make room may not be leased",
        ("strawq.core.decide:_acquire", '_next(queue, "ready", command.count)',
         '_next(queue, "ready", max(0, _fresh_room(queue, command.count)))')),
    _mutant("a full queue keeps what was begun", "a trainer waits for a group that nobody may go on with",
        ("strawq.core.decide:_acquire", "_next(queue, \"partial\", most - len(keys))", "[]")),
    _mutant("a word opens the way back", "a policy version goes back without a rollback",
        ("strawq.core.apply:_serve", "highest_number(branch.meta) if is_word else UNVERSIONED", "UNVERSIONED")),
    _mutant("a seal is not looked at", "prompts enter a queue that was said to be complete",
        ("strawq.core.decide:_submit", "queue.row.sealed", "False")),
    _mutant("a batch may be smaller at any time", "a trainer steps on less than it asked for",
        ("strawq.core.decide:_take_batch", "not (command.fewer or last)", "False")),
    _mutant("archives hold nothing", "what was kept is collected",
        ("strawq.core.apply_lifetime:_archived", "state.hold(digest, 1)", "pass")),
    _mutant("a rollback ends a pause", "work goes on with the weights of the line that was left",
        ("strawq.core.apply_lifetime:_rolled_back", "if event.paused else None", "if False else None")),
    _mutant("a consumer's batch may lose a group", "a trainer trains what was dropped",
        ("strawq.core.decide:_nobodys", "not queue.batches[batch_number(task.batch)].session", "True")),
    _mutant("a batch that lost a group comes again", "a batch is delivered twice with two contents",
        ("strawq.core.apply:_tasks_dropped", "_break_up(queue, batch_number(batch))", "pass")),
    _mutant("leases survive a rollback", "two lines of history hold one lease",
        ("strawq.core.apply_lifetime:_rolled_back",
         'queue.tasks.put(key, replace(queue.tasks[key], session=""))', "pass")),
    _mutant("epoch refusal left out", "a reference to what collection is deleting",
        ("strawq.core.names:require_objects",
         "0 < ref.epoch <= state.meta.closed_epoch and ref.digest not in state.objects", "False")),
    _mutant("roots from before the epoch closed", "collection deletes what was referred to meanwhile",
        (GC + "_close_if_possible", "close_epoch(pool, wait_seconds)",
         "pool.old_roots = pool.log.refresh(_reachable).files; close_epoch(pool, wait_seconds)"),
        (GC + "plan_collection", "pool.log.refresh(_reachable, durable=True)",
         "msgspec.structs.replace(pool.log.refresh(_reachable, durable=True), files=pool.old_roots)")),
    _mutant("collection on a position that is not durable", "a power cut brings a reference back, not its object",
        (GC + "plan_collection", "durable=True", "durable=False")),
    _mutant("collection does not look twice at heartbeats", "a process that joins loses its heartbeat",
        (GC + "_plan_leftovers", "if session not in joined.sessions:", "if True:")),
    _mutant("inline objects not moved before a trim", "prompts and answers go with the log",
        (TRIM + "trim_log", "moved, floor, unfinished = _move_inline(pool, floor, step, dry_run)", "pass")),
    _mutant("a move into a closed epoch counts", "collection has taken what the state refers to",
        ("strawq.core.lifetime:_move_objects", "ref.epoch <= state.meta.closed_epoch", "False")),
    _mutant("objects move back", "a place that collection may have cleared is used again",
        ("strawq.core.apply_lifetime:moves", "old.epoch < new.epoch", "True")),
    _mutant("records move away from their tensors", "a group whose tensors nobody finds",
        ("strawq.core.apply_lifetime:moves", " and not old.pack", "")),
    _mutant("an object that has ended is moved", "nobody refers to what the state keeps",
        ("strawq.core.lifetime:_move_objects", "row is None or not moves(row.ref, ref)",
         "row is not None and not moves(row.ref, ref)"),
        ("strawq.core.lifetime:_move_objects", "(ref.bytes, ref.rows) != (row.ref.bytes, row.ref.rows)", "False"),
        ("strawq.core.apply_lifetime:_objects_moved", "row is not None and moves(row.ref, ref)",
         "row is None or moves(row.ref, ref)"),
        ("strawq.core.apply_lifetime:_objects_moved", "row.count", "row.count if row else 1")),
    _mutant("a reader does not ask where an object is now", "a group that is there cannot be read",
        (OBJECTS + "read_checked", "moved = self._locate(stored.ref.digest)", "moved = None")),
    _mutant("fsync of data left out", "a name without its bytes after a power cut",
        ("strawq.storage.memory:MemoryFiles.stage", "_File(data, data)", "_File(data, None)")),
    _mutant("fsync of an object's directory left out", "an entry refers to a name that a power cut takes",
        (OBJECTS + "_store", "self._files.sync_directory(directory)", "pass")),
    _mutant("fsync of the log's directory left out", "an acknowledged commit is lost with the power",
        (LOG + "_sync_name", "self.files.sync_directory(layout.segment_directory(layout.segment(seq)))", "pass")),
    _mutant("published behind a name that is not durable", "a power cut leaves a hole in the log",
        (LOG + "_publish", "self._sync_name(machine.seq)", "pass")),
    _mutant("answers from entries that are not durable", "what was answered is undone by a power cut",
        (LOG + "_settle", "self._make_durable(self.machine.seq)", "pass")),
    _mutant("snapshot before its entries are durable", "a snapshot of a history that a power cut takes",
        (LOG + "_write_snapshot", "self._make_durable(seq)", "pass")),
    _mutant("not decided again after a lost race", "the loser overwrites what the winner did",
        (LOG + "_commit_group", "events, inline, settled = self._decide(waiting, fresh)",
         "events, inline, settled = "
         "self._decide(waiting, fresh) if turn == 0 or not fresh else (events, inline, True)")),
    _mutant("undo left out after a lost race", "a state that nobody else has",
        (LOG + "_publish", "machine.undo()\n        return outcome", "return outcome")),
    _mutant("a failed look at the floor says that nothing happened", "the caller does it again",
        (LOG + "_publish", "raise OutcomeUnknown(", "raise Contended(")),
    _mutant("a doubtful name says that nothing happened", "the caller does it again",
        (APPENDING + "publish", "if doubt is None and not taken:", "if True:")),
    _mutant("decided on a catch-up that failed", "a ghost is built upon",
        (REPLAY + "Replay._catch_up", "self._at_end = False", "pass")),
    _mutant("digest not checked on read", "a flipped bit reaches a batch",
        (OBJECTS + "_look", "blake3.blake3(data).hexdigest() == stored.ref.digest", "True")),
    _mutant("entry digest not checked", "a flipped bit reaches the state",
        ("strawq.storage.sealed:unseal", "data[end + 1 : end + 1 + len(second)] != second", "False")),
    _mutant("rename over the name instead of exclusive publish", "two processes win one number",
        ("strawq.storage.staging:Staging.publish", "self.files.publish(staged, path)",
         "self.files.replace(path, self.files.read(staged))")),
    _mutant("cursor committed apart from its tasks", "a crash between them loses or doubles prompts",
        ("strawq.queue:Queue.submit", "return self.pool.commit(command, inline)",
         "self.pool.commit(c.Submit(request=request + '.rows', queue=self.name, objects=objects), inline); "
         "return self.pool.commit(c.Submit(request=request, queue=self.name, objects=(), producer=producer, "
         "cursor=cursor, expect=expect))")),
)  # fmt: skip
