"""From `strawq rollout`'s command line to a run: flags, engines, data source.

The rule: slime's flags mean what they mean to slime, and a combination that cannot be obeyed is refused before an
engine is started or a file is written. What was started here is ended here, whatever ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from strawq.errors import BadInput
from strawq_workers.processes import Children
from strawq_workers.rollout.debug_data import archive_path
from strawq_workers.rollout.effects import Run, without_effect
from strawq_workers.rollout.evaluation import datasets, evaluation_options
from strawq_workers.rollout.on_pool import WORKER_ROLE, live_workers
from strawq_workers.rollout.settings import engine_urls, local_workers, options_of, straw_source
from strawq_workers.rollout.trainer import ReferenceTrainer, Trained, TrainingSummary, replay
from strawq_workers.scratch import Scratch
from strawq_workers.slime import build_data_source
from strawq_workers.slime.arguments import (
    DEFAULTS,
    add_rollout_arguments,
    advice_on,
    rollout_function_path,
    uses_our_rollout,
    uses_straw,
    validate_rollout_arguments,
)
from strawq_workers.slime.flags import option_of
from strawq_workers.slime.places import anywhere, require_places
from strawq_workers.worker.hooks import Hooks, load_hook, look_in_working_directory, with_least_hook_args
from strawq_workers.worker.options import WorkerOptions

log = logging.getLogger("strawq.rollout")

SYNC, PARTIAL, FULLY_ASYNC = "sync", "partial", "fully-async"
ENGINE_START_S = 60.0
MAKE_PROMPTS = ("data_source_path", "custom_generate_function_path", "rollout_tokenize_path")
"""What can do without prompts: slime's data source gives empty ones where there are no data."""
NOT_YET = "http://127.0.0.1"  # the embedded engine, before it has an address
FUNCTIONS = {
    SYNC: "strawq_workers.slime.generate_rollout",
    PARTIAL: "strawq_workers.slime.generate_rollout",
    FULLY_ASYNC: "strawq_workers.slime.generate_rollout_fully_async",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see `strawq rollout --flags`")

    def read(self, flags: Sequence[str]) -> argparse.Namespace:
        """What they say. Those that are not known are refused all at once, with advice on each."""
        found, others = self.parse_known_args(list(flags))
        unknown = [word.partition("=")[0] for word in others if word.startswith("--")]
        if others:
            said = [f"{option} {advice_on(option)}".strip() for option in unknown] or others
            self.error(f"unrecognized arguments: {'; '.join(said)}")
        return found


def parser() -> _Parser:
    """A parser of slime's rollout flags; what it refuses is `BadInput`."""
    made = _Parser(prog="strawq rollout", add_help=False, allow_abbrev=False)
    add_rollout_arguments(made)
    return made


def read_flags(flags: Sequence[str], mode: str, *, engines: bool = False) -> tuple[Any, str]:
    """slime's flags as `args`, and the mode; `engines`: whether they are named beside slime's flags. `BadInput` for
    what cannot be obeyed; what has no effect is said."""
    args = parser().read(flags)
    usual = parser().get_default("rollout_function_path")
    given = args.rollout_function_path if args.rollout_function_path != usual else None
    if given and mode:
        raise BadInput("--mode and --rollout-function-path both say how to roll out: leave one of them out")
    if not mode:
        chosen = rollout_function_path(args)
        mode = FULLY_ASYNC if chosen == FUNCTIONS[FULLY_ASYNC] else PARTIAL if args.partial_rollout else SYNC
    run = Run(argparse.Namespace(**vars(args)), mode, engines)
    args.rollout_function_path = given or FUNCTIONS[mode]
    if mode == PARTIAL:
        args.partial_rollout = True
        if args.over_sampling_batch_size is None and args.rollout_batch_size:
            args.over_sampling_batch_size = 2 * args.rollout_batch_size
    validate_rollout_arguments(args)
    if args.debug_train_only and not args.load_debug_rollout_data:
        raise BadInput("--debug-train-only generates nothing: say what to train on with --load-debug-rollout-data")
    for path in filter(None, (args.save_debug_rollout_data, args.load_debug_rollout_data)):
        archive_path(path, 0)
    idle = without_effect(run)
    if idle:
        log.warning("without effect in this run: %s", "; ".join(idle))
    require_places(args, pool=uses_straw(args))
    return args, mode


def run_rollouts(
    flags: Sequence[str],
    mode: str = "",
    engines: Sequence[str] = (),
    embedded_engine: bool = False,
    told: Callable[[Trained], None] = lambda trained: None,
    say: Callable[[str], None] = lambda text: None,
    work_command: Callable[[str, WorkerOptions], str] = lambda pool, options: f"strawq work {pool} --engine URL",
) -> TrainingSummary:
    """Run the rollout side with the reference trainer. `told` gets each rollout as it ends, `say` lines on the way;
    `work_command` makes the command that starts a worker with such options. Raises what the rollouts raise; nothing is
    in flight then."""
    look_in_working_directory()
    args, mode = read_flags(flags, mode, engines=bool(engines) or embedded_engine)
    if args.load_debug_rollout_data:
        return replay(args, told)
    urls = list(engines) or list(args.rollout_engines or ())
    if embedded_engine and urls:
        raise BadInput("--embedded-engine starts an engine: leave out --engine, or use the engines that you name")
    if not args.prompt_data and uses_our_rollout(args) and not any(getattr(args, name) for name in MAKE_PROMPTS):
        raise BadInput("--prompt-data is required: the prompts (or a data source of your own, --data-source-path)")
    if not embedded_engine and not urls and not args.sglang_router_ip:
        raise BadInput("no engine: name one with --engine URL, or start one with --embedded-engine")
    _check_options(args, urls)
    with contextlib.ExitStack() as stack:
        if embedded_engine:
            urls = [_start_engine(args, stack)]
            if args.rollout_workers is None:
                args.rollout_workers = int(mode == FULLY_ASYNC and uses_straw(args))
        args.rollout_engines = urls or None
        data_source = build_data_source(args)
        close = getattr(data_source, "close", None)
        if close is not None:
            stack.callback(close)
        straw = straw_source(data_source)
        if straw is None and args.rollout_data_transport == "straw":
            raise BadInput("--data-source-path names a data source that is not on a pool; use object-store with it")
        where = "in memory" if straw is None else f"in the pool {straw.pool.path}"
        say(f"{mode} rollouts, groups {where}, engines {' '.join(engine_urls(args))}")
        if straw is not None and mode == FULLY_ASYNC and not local_workers(args) and not live_workers(straw.pool):
            options = msgspec.structs.replace(options_of(anywhere(args)), queue=straw.queue_name, role=WORKER_ROLE)
            options = with_least_hook_args(options)
            say(
                f"no worker is there yet: start one or more with `{work_command(straw.pool.path, options)}`, or let "
                "the rollout start them (--rollout-workers N)"
            )
        return ReferenceTrainer(args, data_source, mode, told).run()


def _check_options(args: Any, urls: Sequence[str]) -> None:
    """What the rollout functions would find wrong with their options, functions and data later is said now."""
    for name in DEFAULTS:
        if name.endswith("_path"):
            given = getattr(args, name)
            for path in given if isinstance(given, list) else filter(None, [given]):
                load_hook(path, option_of(name))
    asked = argparse.Namespace(**vars(args))
    asked.rollout_engines = list(urls) or ([NOT_YET] if not args.sglang_router_ip else None)
    if args.rollout_function_path.startswith("strawq_workers."):
        Hooks(options_of(asked))
    if args.eval_interval and rollout_function_path(args, evaluation=True).startswith("strawq_workers."):
        evaluation_options(asked)
        datasets(asked)


def _start_engine(args: Any, stack: contextlib.ExitStack) -> str:
    """Start the embedded engine for as long as the stack is open; its URL."""
    children = Children(stack.enter_context(Scratch("strawq-engine-")).path)
    stack.callback(children.close)
    arguments = ["-m", "strawq_workers.engine", "--port", "0", "--weight-version", "0"]
    if args.use_rollout_routing_replay:
        arguments.append("--enable-return-routed-experts")
    if args.use_score_centering:
        arguments.append("--output-topk")
    # Ctrl-C is for this process: the engine answers until everything has been given back.
    return children.start("engine", arguments, own_session=True).first_line(ENGINE_START_S)
