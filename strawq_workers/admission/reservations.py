"""Reservations: one worker's capacity, held by attempt identity.

The rule: capacity is taken before work is submitted, belongs to one attempt, and comes back exactly once, when the work
is known to have stopped.

- Group-level admission (the default): an attempt holds one of `limits.groups` slots until it ends.
- Sample-level admission (`limits.samples`, the flag `max_concurrent_samples`): an attempt holds one slot for each
  sample that has not finished, so a straggler holds one slot and not G. A new group still starts whole: it needs a
  slot for each of its samples.
- Every report names (attempt, sample index) and is idempotent. A report that comes twice, or from an attempt that is no
  longer here, changes nothing and says so by returning False.
- A submission whose outcome is unknown (timeout, lost reply, abort not confirmed) keeps its capacity, past the end of
  its attempt if need be, until somebody reports the sample finished or its engine gone.
- Backpressure is a gate and not a full queue: while ready plus in-flight groups reach `limits.window_groups` nothing
  new is admitted. Nothing ever blocks or is thrown away here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from strawq.errors import BadInput, Fenced, RequestConflict

DenialReason = Literal["paused", "backpressure", "no_free_group", "no_free_samples"]
SampleState = Literal["reserved", "started", "uncertain", "finished"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one worker. `groups`: its share of K. `group_size`: G. `samples`: its share of
    `max_concurrent_samples`, or None for group-level admission. `window_groups`: most groups that are ready or in
    flight, None for no bound."""

    groups: int
    group_size: int
    samples: int | None = None
    window_groups: int | None = None


class Decision(msgspec.Struct, frozen=True):
    """Answer to `reserve`. `reason` is None when granted; a denial has changed nothing and may be asked again."""

    granted: bool
    reason: DenialReason | None = None


class _Hold:
    """What one attempt holds. `ended` means that the group is over and only uncertain samples keep it here."""

    __slots__ = ("ended", "engines", "samples")

    def __init__(self, indices: Collection[int]) -> None:
        self.samples: dict[int, SampleState] = dict.fromkeys(indices, "reserved")
        self.engines: dict[int, str] = {}
        self.ended = False


def _check(limits: Limits) -> None:
    if limits.groups < 1 or limits.group_size < 1:
        raise BadInput(
            f"a worker needs at least one group slot of one sample, not {limits.groups} of {limits.group_size}"
        )
    if limits.samples is not None and limits.samples < limits.group_size:
        raise BadInput(
            f"max_concurrent_samples gives this worker {limits.samples} slots, which is less than one group of "
            f"{limits.group_size}: raise it"
        )
    if limits.window_groups is not None and limits.window_groups < 1:
        raise BadInput(f"the window of ready and in-flight groups is {limits.window_groups}; it must be at least 1")


class Admission:
    """Capacity of one worker. Not thread-safe: it belongs to the event loop that drives the engines."""

    def __init__(self, limits: Limits) -> None:
        """Raises BadInput for limits under which no group could ever start."""
        _check(limits)
        self.limits = limits
        self._holds: dict[str, _Hold] = {}
        self._held_samples = 0
        self._ended = 0
        self._ready = 0
        self._elsewhere = 0
        self._begun = 0
        self._paused = False

    # What there is.

    @property
    def in_flight_groups(self) -> int:
        """Attempts that have not been released."""
        return len(self._holds) - self._ended

    @property
    def held_samples(self) -> int:
        """Samples that are reserved, started or uncertain."""
        return self._held_samples

    @property
    def paused(self) -> bool:
        return self._paused

    def lingering(self) -> list[tuple[str, int, str]]:
        """(attempt, sample index, engine) of every uncertain sample of an ended attempt: capacity that waits for
        news."""
        return [
            (attempt, index, hold.engines.get(index, ""))
            for attempt, hold in self._holds.items()
            if hold.ended
            for index, state in hold.samples.items()
            if state != "finished"
        ]

    def free_groups(self) -> int:
        """Whole groups that may be reserved now. After a shrink it is 0 until enough has ended, never negative."""
        if self._paused:
            return 0
        if self.limits.samples is None:
            room = self.limits.groups - len(self._holds)
        else:
            room = (self.limits.samples - self._held_samples) // self.limits.group_size
        return max(0, min(room, max(0, self._window_room(room)) + self._begun))

    def begun_only(self) -> int:
        """How many groups that were begun wait and are to be leased before any fresh one. The window has room for them:
        they are counted in it, and a trainer may wait for one of them while it is full."""
        return 0 if self.limits.window_groups is None else min(self._begun, self.free_groups())

    def free_samples(self) -> int:
        """Samples that may be reserved now; with group-level admission, those of the free groups."""
        if self.limits.samples is None:
            return self.free_groups() * self.limits.group_size
        if self._paused or max(0, self._window_room(1)) + self._begun < 1:
            return 0
        return max(0, self.limits.samples - self._held_samples)

    def _window_room(self, unbounded: int) -> int:
        if self.limits.window_groups is None:
            return unbounded
        return self.limits.window_groups - self._ready - self._elsewhere - self._begun - self.in_flight_groups

    # What changes the gate.

    def observe(self, ready_groups: int, in_flight_elsewhere: int = 0, begun_groups: int = 0) -> None:
        """Tell the gate how many groups are ready and not yet consumed, how many other workers have in flight, and how
        many were begun and wait for a worker.

        They are absolute counts from the pool, not increments: after a restart the gate is right again with the first
        call.
        """
        if min(ready_groups, in_flight_elsewhere, begun_groups) < 0:
            raise BadInput(
                f"counts of groups cannot be negative: ready {ready_groups}, elsewhere {in_flight_elsewhere}, "
                f"begun {begun_groups}"
            )
        self._begun = begun_groups
        self._ready = ready_groups
        self._elsewhere = in_flight_elsewhere

    def pause(self) -> None:
        """Admit nothing until `resume`. What runs keeps its capacity; no attempt is ended by a pause."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def resize(self, limits: Limits) -> None:
        """Take a new share. Nothing that is held is taken away: over a smaller limit, nothing starts until enough has
        ended.

        Raises BadInput (and keeps the old limits) for limits under which no group could ever start.
        """
        _check(limits)
        self.limits = limits

    # What attempts do.

    def reserve(self, attempt: str, samples: Collection[int], *, begun: bool = False) -> Decision:
        """Ask for capacity for the sample indices that still have to be generated, before anything is submitted.

        `attempt` names one lease of one group (task and attempt number); it is never used again. `begun`: it is one of
        those that wait, and the window counts it already. A repeated call with the same samples is granted and takes
        nothing more. Raises BadInput for no samples or more than could ever fit,
        RequestConflict for other samples under a live attempt, Fenced for an attempt that has ended.
        """
        wanted = set(samples)
        hold = self._holds.get(attempt)
        if hold is not None:
            if hold.ended:
                raise Fenced(
                    f"attempt {attempt} has ended, with uncertain samples still counted: lease the group again"
                )
            if wanted != set(hold.samples):
                raise RequestConflict(f"attempt {attempt} holds samples {sorted(hold.samples)}, not {sorted(wanted)}")
            return Decision(True)
        most = self.limits.group_size if self.limits.samples is None else self.limits.samples
        if not wanted or len(wanted) > most:
            raise BadInput(f"attempt {attempt} asks for {len(wanted)} samples: a reservation takes 1 to {most}")
        waited = begun and self._begun > 0
        reason = self._denial(len(wanted), waited)
        if reason is not None:
            return Decision(False, reason)
        self._begun -= waited
        self._holds[attempt] = _Hold(wanted)
        self._held_samples += len(wanted)
        return Decision(True)

    def _denial(self, wanted: int, waited: bool) -> DenialReason | None:
        if self._paused:
            return "paused"
        if not waited and self._window_room(1) < 1:
            return "backpressure"
        if self.limits.samples is None:
            return "no_free_group" if len(self._holds) >= self.limits.groups else None
        return "no_free_samples" if self._held_samples + wanted > self.limits.samples else None

    def started(self, attempt: str, index: int, engine: str = "") -> bool:
        """The engine has the sample. False when there is nothing to change (repeated, finished, or not held)."""
        hold = self._live(attempt, index)
        if hold is None or hold.ended or hold.samples[index] not in ("reserved", "uncertain"):
            return False
        hold.samples[index] = "started"
        hold.engines[index] = engine or hold.engines.get(index, "")
        return True

    def sample_finished(self, attempt: str, index: int) -> bool:
        """The sample is known to have stopped: answered, aborted and confirmed, or never submitted. Frees its slot
        once.

        Returns whether this report freed something; with group-level admission the group's slot is freed by `release`.
        """
        hold = self._live(attempt, index)
        if hold is None or hold.samples[index] == "finished":
            return False
        self._finish(attempt, hold, index)
        return True

    def uncertain(self, attempt: str, index: int, engine: str = "") -> bool:
        """Nobody knows whether the engine runs the sample. Its capacity stays until `sample_finished` or
        `engine_gone`."""
        hold = self._live(attempt, index)
        if hold is None or hold.ended or hold.samples[index] in ("finished", "uncertain"):
            return False
        hold.samples[index] = "uncertain"
        hold.engines[index] = engine or hold.engines.get(index, "")
        return True

    def release(self, attempt: str) -> bool:
        """The group is over for this attempt: accepted, returned or lost. False when it was not held any more.

        Samples that never started are freed. One that started and was not reported finished may still run, so it
        becomes uncertain and keeps its capacity (with group-level admission: the group's slot).
        """
        hold = self._holds.get(attempt)
        if hold is None or hold.ended:
            return False
        hold.ended = True
        self._ended += 1
        for index, state in list(hold.samples.items()):
            if state == "reserved":
                hold.samples[index] = "finished"
                self._held_samples -= 1
            elif state == "started":
                hold.samples[index] = "uncertain"
        self._forget_if_over(attempt, hold)
        return True

    def engine_gone(self, engine: str) -> int:
        """The engine process is known dead or replaced: its uncertain samples run nowhere. Returns how many were freed.

        Started samples of live attempts are left to the requests that drive them; those fail and report by themselves.
        """
        gone = [
            (attempt, hold, index)
            for attempt, hold in self._holds.items()
            for index, state in hold.samples.items()
            if state == "uncertain" and hold.engines.get(index, "") == engine
        ]
        for attempt, hold, index in gone:
            self._finish(attempt, hold, index)
        return len(gone)

    def _live(self, attempt: str, index: int) -> _Hold | None:
        hold = self._holds.get(attempt)
        return hold if hold is not None and index in hold.samples else None

    def _finish(self, attempt: str, hold: _Hold, index: int) -> None:
        hold.samples[index] = "finished"
        self._held_samples -= 1
        self._forget_if_over(attempt, hold)

    def _forget_if_over(self, attempt: str, hold: _Hold) -> None:
        if hold.ended and all(state == "finished" for state in hold.samples.values()):
            del self._holds[attempt]
            self._ended -= 1
