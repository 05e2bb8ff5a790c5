"""The rollout worker: leases groups, drives the engines, saves prefixes, hands complete groups in.

`run_worker` is a whole process; the modules beside it are its parts, from what one sample needs (`generation`) over one
group (`group`) to the loop over groups (`loop`) and what it minds around it (`watching`, `reporting`).
"""

from strawq_workers.worker.metrics import Counters, WorkerSummary
from strawq_workers.worker.options import WorkerOptions
from strawq_workers.worker.process import run_worker, work

__all__ = ["Counters", "WorkerOptions", "WorkerSummary", "run_worker", "work"]
