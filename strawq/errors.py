"""Every error that strawq raises, divided by what the caller does next.

    StrawqError
    ├── BadInput            fix the input, then call again            (exit code 2)
    │   ├── NotAPool            the directory holds no pool, or not this one
    │   ├── FormatUnsupported   the pool was written by a newer format
    │   ├── Misaligned          tensors or captures that do not cover the same tokens
    │   └── RequestConflict     a request id that was used before with other content
    ├── Fenced              stop this piece of work: somebody else owns it now (exit code 3)
    │   └── BranchMoved         the pool was rolled back: drop what you hold, go on with the new branch
    ├── TryAgain            nothing happened: call again later         (exit code 4)
    │   ├── EngineUnavailable   no engine answers
    │   └── Contended           the log was busy for longer than the limit
    ├── OutcomeUnknown      it may have happened: ask again with the same request id (exit code 5)
    └── OperatorNeeded      storage or data are unwell                 (exit code 6)
        ├── Damaged             bytes are not what their name says
        ├── Gone                an object that GC has taken
        ├── StorageFailed       the file system refused (full, read-only, I/O error)
        └── UnfitMount          the mount does not do what strawq needs

`kind` is a stable word for programs; the list only ever grows. A message names the thing and the remedy, in one line.
"""

from __future__ import annotations

from typing import ClassVar


class StrawqError(Exception):
    """Base of all errors of strawq. `kind` is stable and goes into `--json` output; `exit_code` is what the CLI
    returns."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1


class BadInput(StrawqError):
    """The caller's input is wrong: nothing was changed. Fix it and call again."""

    kind = "bad_input"
    exit_code = 2


class NotAPool(BadInput):
    """The directory is not a pool, or not the one that was asked for."""

    kind = "not_a_pool"


class FormatUnsupported(BadInput):
    """The pool was written in a format that this version does not read."""

    kind = "format_unsupported"


class Misaligned(BadInput):
    """Per-token data of one sample cover different token ranges. The message carries the counts."""

    kind = "misaligned"


class RequestConflict(BadInput):
    """A request id was used before with other content."""

    kind = "request_conflict"


class Fenced(StrawqError):
    """The lease, batch or session named by the command is not current: somebody else owns the work now. Drop it."""

    kind = "fenced"
    exit_code = 3


class BranchMoved(Fenced):
    """The pool's active branch is another one. Drop what you hold and go on with the new branch."""

    kind = "branch_moved"


class TryAgain(StrawqError):
    """Nothing happened; the same call may succeed later."""

    kind = "try_again"
    exit_code = 4


class EngineUnavailable(TryAgain):
    """No inference engine answered within the limit."""

    kind = "engine_unavailable"


class Contended(TryAgain):
    """Other processes committed first, more often than the limit allows."""

    kind = "contended"


class OutcomeUnknown(StrawqError):
    """The command may or may not have been committed. Asking again with the same request id gives the answer."""

    kind = "outcome_unknown"
    exit_code = 5


class OperatorNeeded(StrawqError):
    """Storage or stored data are unwell; work that does not touch the named thing goes on."""

    kind = "operator_needed"
    exit_code = 6


class Damaged(OperatorNeeded):
    """Stored bytes are not what their name says: flipped, truncated, zeroed or foreign."""

    kind = "damaged"


class Gone(OperatorNeeded):
    """An object is not there: garbage collection has taken it, or it was removed by hand."""

    kind = "gone"


class StorageFailed(OperatorNeeded):
    """The file system refused a read or write (full, read-only, quota, I/O error)."""

    kind = "storage_failed"


class UnfitMount(OperatorNeeded):
    """The mount does not offer what the commit log needs."""

    kind = "unfit_mount"
