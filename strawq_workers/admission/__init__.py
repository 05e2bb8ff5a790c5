"""What a worker may start, when, and what becomes of what it started.

The rule of this package: every decision is a pure function of what it was told. Nothing here reads a clock, a file, a
socket or a random number, so the asyncio worker, the studies in `tools/studies` and the property tests all run the
same code.

- `slots`: how many groups (or samples) each worker may hold, from C, E, G and W.
- `reservations`: `Admission`, one worker's capacity, held by attempt identity and freed once.
- `refill`: `RolloutPlan`, how many groups one rollout leases next, and the account it must balance at its end.
- `staleness`: `StalenessBudget`, how old a group may be when it is trained on, and by which policy that is kept.
"""

from __future__ import annotations

from strawq_workers.admission.refill import Account, RolloutPlan, Step
from strawq_workers.admission.reservations import Admission, Decision, Limits
from strawq_workers.admission.slots import divide_samples, divide_slots, share_of, shares, total_slots
from strawq_workers.admission.staleness import Candidate, Selection, StalenessBudget, Verdict, staleness_of

__all__ = [
    "Account",
    "Admission",
    "Candidate",
    "Decision",
    "Limits",
    "RolloutPlan",
    "Selection",
    "StalenessBudget",
    "Step",
    "Verdict",
    "divide_samples",
    "divide_slots",
    "share_of",
    "shares",
    "staleness_of",
    "total_slots",
]
