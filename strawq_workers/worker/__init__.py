"""The rollout worker: leases groups, drives the engines, saves prefixes, hands complete groups in.

`run_worker` is a whole process; the modules beside it are its parts, from what one sample needs (`generation`) to the
loop over groups.
"""

from strawq_workers.worker.metrics import Counters, WorkerSummary
from strawq_workers.worker.options import WorkerOptions

__all__ = ["Counters", "WorkerOptions", "WorkerSummary"]
