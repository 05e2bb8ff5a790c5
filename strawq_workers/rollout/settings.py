"""What the rollout functions read from `args`, slime's or `strawq rollout`'s.

The rule: an attribute that is not there has its default here; one that cannot be obeyed is refused by name.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from strawq.errors import BadInput
from strawq.model import QueueConfig
from strawq.pool import Pool
from strawq_workers.stale_groups import AgeLimit
from strawq_workers.worker.memory import Codec
from strawq_workers.worker.options import WorkerOptions

WORKER_WAIT_S = 120.0


class StrawSource(Protocol):
    """What is used of `StrawDataSource`."""

    pool: Pool
    queue_name: str

    @property
    def branch(self) -> str: ...

    def fill(self, count: int) -> int: ...

    def collect(
        self,
        rollout_id: int,
        count: int,
        *,
        timeout: float | None = None,
        fewer: bool = False,
        limit: AgeLimit | None = None,
    ) -> list[list[Any]]: ...

    def finish(self, rollout_id: int) -> None: ...

    def batch_metrics(self, rollout_id: int, max_staleness: int = -1) -> dict[str, float]: ...


def straw_source(data_source: Any) -> StrawSource | None:
    """The data source, if it is one on a pool."""
    on_pool = all(hasattr(data_source, name) for name in ("pool", "queue_name", "fill", "collect"))
    return cast(StrawSource, data_source) if on_pool else None


def config_of(pool: Pool, queue: str) -> QueueConfig:
    """The queue's settings. Reads files."""
    config: QueueConfig = pool.log.refresh(lambda machine: machine.state.branch.queues[queue].row.config)
    return config


def engine_urls(args: Any) -> tuple[str, ...]:
    """`args.rollout_engines` (URLs), else slime's router. `BadInput` if there is neither."""
    given = getattr(args, "rollout_engines", None)
    if given:
        return tuple(given)
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if host and port:
        return (f"http://{host}:{port}",)
    raise BadInput("no engine is named: set sglang_router_ip and sglang_router_port, or args.rollout_engines to URLs")


def options_of(args: Any) -> WorkerOptions:
    """The worker's options of these args. `BadInput` names what does not fit."""
    from strawq_workers.slime.arguments import worker_options

    return worker_options(args, engine_urls(args))


def codec() -> Codec:
    from strawq_workers.slime import codec as found

    return cast(Codec, found)


def batch_size(args: Any) -> int:
    """Groups of a batch."""
    count = getattr(args, "rollout_batch_size", None)
    if not isinstance(count, int) or count < 1:
        raise BadInput(f"--rollout-batch-size is {count}; a batch has at least one prompt")
    return count


def surplus(args: Any) -> int:
    """Groups that may be in flight beyond what is missing."""
    return max(0, int(getattr(args, "over_sampling_batch_size", None) or 0) - batch_size(args))


def hook_path(args: Any, name: str) -> str:
    return str(getattr(args, name, None) or "")


def local_workers(args: Any) -> int:
    """Worker processes that a distributed rollout starts on this host."""
    return max(0, int(getattr(args, "rollout_workers", None) or 0))


def worker_wait_s(args: Any) -> float:
    """How long a distributed rollout waits for a worker to be there."""
    given = getattr(args, "rollout_worker_wait_seconds", None)
    return WORKER_WAIT_S if given is None else float(given)
