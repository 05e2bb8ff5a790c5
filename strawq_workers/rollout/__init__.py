"""Rollout functions under slime's signature, for every mode.

`generate_rollout` is the synchronous one (with `--partial-rollout` it keeps prefixes), `generate_rollout_fully_async`
goes on between calls. Both take `(args, rollout_id, data_source, evaluation=False)`, with a data source on a pool
(`StrawDataSource`) or any of slime's in memory. `weight_update` holds generation still around an update of the engines'
weights, and `close_rollouts` ends what the functions keep between calls.
"""

from __future__ import annotations

from typing import Any

from strawq.errors import BadInput
from strawq_workers.rollout.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput, eval_output, train_output
from strawq_workers.rollout.settings import straw_source
from strawq_workers.rollout.station import Interrupted, RolloutFailed, Station, close_rollouts, station_of
from strawq_workers.rollout.updates import weight_update

__all__ = [
    "Interrupted",
    "RolloutFailed",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "close_rollouts",
    "generate_rollout",
    "generate_rollout_fully_async",
    "weight_update",
]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """One synchronous rollout: `RolloutFnTrainOutput` with `rollout_batch_size` groups (fewer when the data have
    ended). When it returns or raises, nothing is in flight.

    With `evaluation`, `RolloutFnEvalOutput` of the evaluation data; the queue is not touched."""
    from strawq_workers.rollout.synchronous import from_memory, from_pool

    station = station_of(data_source)
    if evaluation:
        return _evaluate(args, station)
    station.stop_running()
    straw = straw_source(data_source)
    if straw is None:
        return train_output(*from_memory(args, rollout_id, station))
    return train_output(*from_pool(args, rollout_id, station, straw))


def generate_rollout_fully_async(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The next `rollout_batch_size` complete groups, while generation goes on: in this process for a data source in
    memory, in worker processes for one on a pool. `RolloutFnTrainOutput`.

    Only the one in memory evaluates; on a pool `evaluation` is refused (`BadInput`)."""
    from strawq_workers.rollout.in_background import InBackground
    from strawq_workers.rollout.on_pool import OnPool

    station = station_of(data_source)
    straw = straw_source(data_source)
    if straw is not None:
        if evaluation:
            raise BadInput("distributed fully-async rollout doesn't support evaluation mode")
        if not isinstance(station.running, OnPool):
            station.stop_running()
            station.running = OnPool(args, station, straw)
        return train_output(*station.running.take(args, rollout_id))
    if evaluation:
        return _evaluate(args, station)
    if not isinstance(station.running, InBackground):
        station.stop_running()
        station.running = InBackground(args, station)
    return train_output(*station.running.take_samples(args, rollout_id))


def _evaluate(args: Any, station: Station) -> Any:
    from strawq_workers.rollout.evaluation import evaluate

    return eval_output(*evaluate(args, station))
