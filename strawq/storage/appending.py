"""One entry gets the next number, or learns that it did not. A publish has three outcomes, committed, lost and unknown,
and a reply that is lost never turns one of them into another."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Literal

from strawq.errors import Damaged, OutcomeUnknown, StorageFailed
from strawq.limits import UNKNOWN_TRIES
from strawq.storage import layout
from strawq.storage.clock import Clock
from strawq.storage.entry import Entry
from strawq.storage.files import Buffer
from strawq.storage.staging import Staging

Outcome = Literal["committed", "lost", "unsure"]

_PASSING = (errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EINTR, errno.EAGAIN)
"""After one of these a publish may have worked."""


class Appender:
    """Publishes entries of one process. Not safe for threads; the log serialises its use."""

    def __init__(self, staging: Staging, clock: Clock, read_entry: Callable[[int], Entry | None]) -> None:
        self._staging = staging
        self._clock = clock
        self._read_entry = read_entry
        self._segment_made = -1

    def make_segment(self, seq: int) -> None:
        number = layout.segment(seq)
        if number != self._segment_made:
            self._staging.files.make_directory(layout.segment_directory(number))
            self._segment_made = number

    def publish(self, seq: int, commit_id: str, buffers: Sequence[Buffer]) -> Outcome:
        """Give entry `seq` to us if nobody has it. A publish whose reply is lost is asked about until it is known:
        `committed`, `lost`, or `unsure` (another's entry stands there now; ours may have, before a trim). From the
        first doubt on, no error says that nothing happened."""
        path, staged = layout.entry(seq), ""
        doubt: Exception | None = None
        for turn in range(UNKNOWN_TRIES):
            taken = False
            try:
                staged = staged or self._staging.write(buffers)
                if self._staging.publish(staged, path):
                    return "committed"
                staged, taken = "", True
            except FileNotFoundError:
                # Our staged file was collected, a rename whose reply was lost has consumed it, or the segment was
                # trimmed away. Publishing again is safe in each case.
                staged, self._segment_made = "", -1
            except OSError as error:
                if doubt is None and (not staged or error.errno not in _PASSING):
                    self._staging.discard(staged)
                    raise
                doubt = error
            try:
                self.make_segment(seq)
                mine = self._is_ours(seq, commit_id) if taken or doubt is not None else None
            except (OSError, StorageFailed, Damaged) as error:
                if doubt is None and not taken:
                    raise
                # The name may be taken by ourselves: EEXIST is also what a server answers that has lost its first
                # reply.
                doubt = error
            else:
                if mine is not None:
                    self._staging.discard(staged)
                    return "committed" if mine else "lost" if doubt is None else "unsure"
            self._clock.sleep(0.005 * 2**turn * (0.5 + self._clock.jitter()))
        if doubt is None:
            raise StorageFailed(f"cannot write {path}: what is staged for it vanishes; look at the mount")
        raise OutcomeUnknown(
            f"the file system does not say whether {path} was written ({doubt}); ask again with the same request id"
        )

    def _is_ours(self, seq: int, commit_id: str) -> bool | None:
        """Whether the entry that stands at `seq` carries our commit id; None if none stands there."""
        entry = self._read_entry(seq)
        return None if entry is None else entry.line.id == commit_id
