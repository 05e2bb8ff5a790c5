"""Workers on a Ray cluster: one on each alive node that has a CPU.

The rule: Ray starts processes and says which of them live; what is accepted, and whose work is taken over, is decided
by the pool alone. `ray` is imported only when it is asked for.
"""

from strawq_workers.on_ray.launch import run_on_ray

__all__ = ["run_on_ray"]
