"""From `strawq rollout`'s command line to a run: flags, engines, data source.

The rule: slime's flags mean what they mean to slime, and a combination that cannot be obeyed is refused before an
engine is started or a file is written. What was started here is ended here, whatever ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from strawq.errors import BadInput
from strawq_workers.processes import Children
from strawq_workers.rollout.debug_data import archive_path
from strawq_workers.rollout.settings import straw_source
from strawq_workers.rollout.trainer import ReferenceTrainer, Trained, TrainingSummary, replay
from strawq_workers.scratch import Scratch
from strawq_workers.slime import build_data_source
from strawq_workers.slime.arguments import (
    add_rollout_arguments,
    rollout_function_path,
    uses_straw,
    validate_rollout_arguments,
)
from strawq_workers.slime.places import require_places

SYNC, PARTIAL, FULLY_ASYNC = "sync", "partial", "fully-async"
ENGINE_START_S = 60.0
FUNCTIONS = {
    SYNC: "strawq_workers.slime.generate_rollout",
    PARTIAL: "strawq_workers.slime.generate_rollout",
    FULLY_ASYNC: "strawq_workers.slime.generate_rollout_fully_async",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see `strawq rollout --flags`")


def parser() -> argparse.ArgumentParser:
    """A parser of slime's rollout flags; what it refuses is `BadInput`."""
    made = _Parser(prog="strawq rollout", add_help=False, allow_abbrev=False)
    add_rollout_arguments(made)
    return made


def read_flags(flags: Sequence[str], mode: str) -> tuple[Any, str]:
    """slime's flags as `args`, and the mode. `BadInput` for what cannot be obeyed."""
    args = parser().parse_args(list(flags))
    usual = parser().get_default("rollout_function_path")
    given = args.rollout_function_path if args.rollout_function_path != usual else None
    if given and mode:
        raise BadInput("--mode and --rollout-function-path both say how to roll out: leave one of them out")
    if not mode:
        chosen = rollout_function_path(args)
        mode = FULLY_ASYNC if chosen == FUNCTIONS[FULLY_ASYNC] else PARTIAL if args.partial_rollout else SYNC
    args.rollout_function_path = given or FUNCTIONS[mode]
    if mode == PARTIAL:
        args.partial_rollout = True
        if args.over_sampling_batch_size is None and args.rollout_batch_size:
            args.over_sampling_batch_size = 2 * args.rollout_batch_size
    validate_rollout_arguments(args)
    require_places(args, pool=uses_straw(args))
    if args.debug_train_only and not args.load_debug_rollout_data:
        raise BadInput("--debug-train-only generates nothing: say what to train on with --load-debug-rollout-data")
    for path in filter(None, (args.save_debug_rollout_data, args.load_debug_rollout_data)):
        archive_path(path, 0)
    if args.eval_interval and mode == FULLY_ASYNC and args.rollout_data_transport == "straw":
        raise BadInput("distributed fully-async rollout doesn't support evaluation mode: leave out --eval-interval")
    return args, mode


def run_rollouts(
    flags: Sequence[str],
    mode: str = "",
    engines: Sequence[str] = (),
    embedded_engine: bool = False,
    told: Callable[[Trained], None] = lambda trained: None,
) -> TrainingSummary:
    """Run the rollout side with the reference trainer. `told` gets each rollout as it ends. Raises what the rollouts
    raise; nothing is in flight then."""
    args, mode = read_flags(flags, mode)
    if args.load_debug_rollout_data:
        return replay(args, told)
    urls = list(engines) or list(args.rollout_engines or ())
    if embedded_engine and urls:
        raise BadInput("--embedded-engine starts an engine: leave out --engine, or use the engines that you name")
    if not embedded_engine and not urls and not args.sglang_router_ip:
        raise BadInput("no engine: name one with --engine URL, or start one with --embedded-engine")
    with contextlib.ExitStack() as stack:
        if embedded_engine:
            children = Children(stack.enter_context(Scratch("strawq-engine-")).path)
            stack.callback(children.close)
            arguments = ["-m", "strawq_workers.engine", "--port", "0", "--weight-version", "0"]
            if args.use_rollout_routing_replay:
                arguments.append("--enable-return-routed-experts")
            if args.use_score_centering:
                arguments.append("--output-topk")
            # Ctrl-C is for this process: the engine answers until everything has been given back.
            urls = [children.start("engine", arguments, own_session=True).first_line(ENGINE_START_S)]
        args.rollout_engines = urls or None
        data_source = build_data_source(args)
        close = getattr(data_source, "close", None)
        if close is not None:
            stack.callback(close)
        if straw_source(data_source) is None and args.rollout_data_transport == "straw":
            raise BadInput("--data-source-path names a data source that is not on a pool; use object-store with it")
        return ReferenceTrainer(args, data_source, mode, told).run()
