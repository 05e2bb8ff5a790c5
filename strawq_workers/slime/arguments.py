"""slime's flags for a rollout: a parser gets them, combinations are checked, a worker is told of them.

The rule: a combination that cannot be obeyed is refused by the names of its flags, before anything is leased. What is
not set, or not known to the version of slime that made `args`, has its default from `strawq_workers.slime.flags`.
Nothing is ever written into `args`.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from strawq.errors import BadInput
from strawq_workers.slime.exactness import json_exact
from strawq_workers.slime.flags import GROUPS, IMAGES, NOT_TAKEN, REWARD, Flag, all_flags, option_of
from strawq_workers.worker.option_names import named_as
from strawq_workers.worker.options import WorkerOptions

log = logging.getLogger("strawq.slime")

DEFAULTS = {flag.name: flag.default for flag in all_flags()}
FULLY_ASYNC = "strawq_workers.slime.generate_rollout_fully_async"
MAX_NEW_TOKENS = 1024

_AT_LEAST_ONE = (
    "rollout_batch_size", "n_samples_per_prompt", "over_sampling_batch_size", "global_batch_size",
    "num_steps_per_rollout", "num_rollout", "num_epoch", "rollout_max_response_len", "rollout_max_context_len",
    "rollout_max_prompt_len", "score_centering_top_k", "n_samples_per_eval_prompt", "eval_interval", "save_interval",
    "eval_max_response_len", "eval_max_context_len", "sglang_server_concurrency", "max_concurrent_samples",
    "stale_drops_max", "rollout_refusals_max",
)  # fmt: skip
_POSITIVE = ("rollout_queue_lease_seconds", "rollout_queue_segment_mib", "rollout_io_concurrency")
_NOT_NEGATIVE = ("start_rollout_id", "ckpt_step", "max_staleness", "rollout_save_tokens", "rollout_save_seconds",
                 "rollout_workers", "rollout_worker_wait_seconds", "eval_temperature")  # fmt: skip

_RENAMED = {
    "samples": "n_samples_per_prompt", "concurrency": "sglang_server_concurrency",
    "max_new_tokens": "rollout_max_response_len", "max_context_tokens": "rollout_max_context_len",
    "temperature": "rollout_temperature", "top_p": "rollout_top_p", "top_k": "rollout_top_k", "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids", "skip_special_tokens": "rollout_skip_special_tokens",
    "top_logprobs": "score_centering_top_k", "routed_experts": "use_rollout_routing_replay",
    "save_tokens": "rollout_save_tokens", "save_seconds": "rollout_save_seconds", "batch_groups": "rollout_batch_size",
    "generate": "custom_generate_function_path", "sample_hooks": "rollout_sample_hook_path",
    "reward": "custom_rm_path", "group_reward": "group_rm", "dynamic_filter": "dynamic_sampling_filter_path",
    "tokenize": "rollout_tokenize_path", "detokenize": "rollout_detokenize_path",
    "pause_policy": "rollout_pause_policy", "online_gc": "rollout_queue_online_gc",
    "lease_seconds": "rollout_queue_lease_seconds", "io_concurrency": "rollout_io_concurrency",
    "refusals_max": "rollout_refusals_max",
}  # fmt: skip
TYPED = {
    field: option_of(_RENAMED.get(field, field))
    for field in WorkerOptions.__struct_fields__
    if _RENAMED.get(field, field) in DEFAULTS
}
"""Fields of a worker's options -> the flags that they come from."""


def add_rollout_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that the parser does not have yet: those that slime's own parser has stay as they are."""
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(f"rollout: {title}")
        for flag in flags:
            # The only way to ask; `add_argument` would replace the flag under conflict_handler="resolve".
            if flag.option not in parser._option_string_actions:
                _add(group, flag)
    return parser


def _add(group: Any, flag: Flag) -> None:
    text = flag.help.replace("%", "%%")
    if flag.kind is bool:
        group.add_argument(flag.option, action="store_true", default=flag.default, help=text)
        return
    how: dict[str, Any] = {"type": flag.kind, "default": flag.default, "help": text}
    if flag.choices:
        how["choices"] = flag.choices
    if flag.many:
        how["nargs"] = "+"
    if flag.append:
        how["action"] = "append"
    group.add_argument(flag.option, **how)


def value_of(args: Any, name: str) -> Any:
    """What `args` says, or the flag's default where it says nothing."""
    found = getattr(args, name, None)
    return DEFAULTS[name] if found is None else found


def uses_straw(args: Any) -> bool:
    return bool(value_of(args, "rollout_data_transport") == "straw")


def rollout_function_path(args: Any, *, evaluation: bool = False) -> str:
    """The function of a rollout. With engines that pause in place (`flush_cache_interval` other than 1) ours is the
    fully asynchronous one, and evaluates with the synchronous one; a path that was given is obeyed."""
    usual = str(DEFAULTS["rollout_function_path"])
    given = str(value_of(args, "rollout_function_path"))
    if evaluation:
        chosen = getattr(args, "eval_function_path", None)
        return str(chosen or (usual if given == FULLY_ASYNC else given))
    return FULLY_ASYNC if given == usual and value_of(args, "flush_cache_interval") != 1 else given


def validate_rollout_arguments(args: Any) -> None:
    """Raise `BadInput` for the first value or combination of flags that cannot be obeyed. Data sources call it too."""
    _check_numbers(args)
    _check_transport(args)
    _check_batches(args)
    _check_sampling(args)
    _check_captures(args)
    _check_debug(args)
    if value_of(args, "flush_cache_interval") != 1:
        _check_in_place(args)
    if not _goes_on(args) and value_of(args, "rollout_save_tokens"):
        raise BadInput("--rollout-save-tokens saves prefixes, which are only used with --partial-rollout: set both")
    if not _goes_on(args) and value_of(args, "rollout_pause_policy") == "in_place":
        raise BadInput("--rollout-pause-policy in_place lets samples be of several policies: set --partial-rollout too")
    if value_of(args, "group_rm") and not value_of(args, "custom_rm_path") and not getattr(args, "rm_type", None):
        raise BadInput("--group-rm says how --custom-rm-path is called: name the function")
    if getattr(args, "multimodal_keys", None):
        raise BadInput(f"--multimodal-keys {IMAGES}")


def advice_on(option: str) -> str:
    """What to do instead of a flag that strawq does not take; empty if nothing is known of it."""
    found = next((advice for pattern, advice in NOT_TAKEN if fnmatchcase(option, pattern)), "")
    if found:
        return found
    near = get_close_matches(option, [flag.option for flag in all_flags()], 1, 0.8)
    return f"did you mean {near[0]}?" if near else ""


def _goes_on(args: Any) -> bool:
    """Whether a sample may be continued under another policy. Engines that pause in place do nothing else."""
    return bool(value_of(args, "partial_rollout")) or value_of(args, "flush_cache_interval") != 1


def _check_numbers(args: Any) -> None:
    for name in (*_AT_LEAST_ONE, *_POSITIVE, *_NOT_NEGATIVE):
        value = value_of(args, name)
        option = option_of(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise BadInput(f"{option} is {value!r}; it must be a number")
        if name in _AT_LEAST_ONE and value < 1:
            raise BadInput(f"{option} must be at least 1, not {value}")
        if name in _POSITIVE and not value > 0:
            raise BadInput(f"{option} must be positive")
        if value < 0:
            raise BadInput(f"{option} must not be negative: {value}")


def _check_transport(args: Any) -> None:
    transport = value_of(args, "rollout_data_transport")
    if transport not in ("object-store", "straw"):
        raise BadInput(f"--rollout-data-transport {transport} is not served by strawq: choose object-store or straw")
    if transport != "straw":
        if value_of(args, "rollout_queue_online_gc"):
            raise BadInput("--rollout-queue-online-gc requires --rollout-data-transport straw")
        return
    if not getattr(args, "rollout_data_dir", None) and not getattr(args, "save", None):
        raise BadInput("Straw rollout transport requires --rollout-data-dir or --save on shared storage")
    if getattr(args, "buffer_filter_path", None):
        raise BadInput(
            "--buffer-filter-path is not supported by straw; scheduling is persisted in the queue and prioritizes "
            "older weight versions within ready and partial groups"
        )
    if value_of(args, "rollout_queue_segment_mib") is not None:
        _say_once("--rollout-queue-segment-mib has no effect: each publication is a file of its own")


@cache
def _say_once(text: str) -> None:
    """Flags are checked by everyone who uses them, and said once in a process."""
    log.warning("%s", text)


def _check_batches(args: Any) -> None:
    size = getattr(args, "rollout_batch_size", None)
    if size is None:
        raise BadInput("--rollout-batch-size is required: the prompts of a rollout")
    over = value_of(args, "over_sampling_batch_size")
    if over is not None and over < size:
        raise BadInput(f"--over-sampling-batch-size {over} is less than --rollout-batch-size {size}")
    samples = size * value_of(args, "n_samples_per_prompt")
    steps, each = value_of(args, "num_steps_per_rollout"), value_of(args, "global_batch_size")
    if steps and samples % steps:
        raise BadInput(f"{samples} samples of a rollout do not divide into --num-steps-per-rollout {steps}")
    if steps and each and each * steps != samples:
        raise BadInput(
            f"--global-batch-size {each} times --num-steps-per-rollout {steps} are {each * steps} samples, and a "
            f"rollout has {samples} (--rollout-batch-size {size} times --n-samples-per-prompt)"
        )
    if value_of(args, "max_staleness") is None and getattr(args, "staleness_policy", None) not in (None, "admit"):
        raise BadInput("--staleness-policy says how --max-staleness is kept: set that too")


def _check_sampling(args: Any) -> None:
    if not value_of(args, "rollout_temperature") > 0:
        raise BadInput(
            "--rollout-temperature must be > 0; temperature 0 is greedy decoding and is not a valid RL policy."
        )
    for kind in ("rollout", "eval"):
        top_p, top_k = value_of(args, f"{kind}_top_p"), value_of(args, f"{kind}_top_k")
        if top_p is not None and not 0 < top_p <= 1:
            raise BadInput(f"--{kind}-top-p must be above 0 and at most 1, not {top_p}")
        if top_k is not None and (top_k == 0 or top_k < -1):
            raise BadInput(f"--{kind}-top-k must be at least 1, or -1 for all tokens, not {top_k}")
    for token in value_of(args, "rollout_stop_token_ids") or ():
        if token < 0:
            raise BadInput(f"--rollout-stop-token-ids are not negative: {token}")
    context, prompt = value_of(args, "rollout_max_context_len"), value_of(args, "rollout_max_prompt_len")
    if context and prompt and prompt >= context:
        raise BadInput(
            f"--rollout-max-prompt-len {prompt} leaves no room for an answer in --rollout-max-context-len {context}"
        )


def _check_captures(args: Any) -> None:
    if not value_of(args, "use_score_centering"):
        return
    if value_of(args, "rollout_top_k") != -1:
        raise BadInput("--use-score-centering needs --rollout-top-k -1: its log-probs are those of all tokens")
    if value_of(args, "rollout_top_p") != 1 and uses_our_rollout(args):
        raise BadInput(
            "--use-score-centering with --rollout-top-p below 1 needs heads that SGLang does not send: strawq's "
            "rollout "
            "functions capture the --score-centering-top-k best; set --rollout-top-p 1"
        )


def uses_our_rollout(args: Any) -> bool:
    return rollout_function_path(args).startswith("strawq_workers.")


def _check_debug(args: Any) -> None:
    if value_of(args, "debug_rollout_only") and value_of(args, "debug_train_only"):
        raise BadInput("--debug-rollout-only and --debug-train-only exclude each other")
    load, part = value_of(args, "load_debug_rollout_data"), value_of(args, "load_debug_rollout_data_subsample")
    if load and value_of(args, "debug_rollout_only"):
        raise BadInput("--load-debug-rollout-data generates nothing: leave out --debug-rollout-only")
    if part is not None and not load:
        raise BadInput("--load-debug-rollout-data-subsample needs --load-debug-rollout-data")
    if part is not None and not 0 < part <= 1:
        raise BadInput(f"--load-debug-rollout-data-subsample must be above 0 and at most 1, not {part}")


def _check_in_place(args: Any) -> None:
    """What engines that keep their requests over a weight update cannot be."""
    for name in ("colocate", "offload_rollout", "release_train", "debug_rollout_only", "debug_train_only",
                 "load_debug_rollout_data"):  # fmt: skip
        if getattr(args, name, None):
            raise BadInput(
                f"--flush-cache-interval other than 1 keeps requests in the engines over weight updates, which "
                f"{option_of(name)} does not allow: leave one of them out"
            )


def worker_options(args: Any, engines: Sequence[str]) -> WorkerOptions:
    """What these flags mean to a worker on `engines` (URLs). Raises `BadInput` as `validate_rollout_arguments` does."""
    validate_rollout_arguments(args)
    if getattr(args, "rm_type", None) and not value_of(args, "custom_rm_path"):
        raise BadInput(f"--rm-type {args.rm_type} {REWARD}")
    with named_as(TYPED):
        return _worker_options(args, engines)


def _worker_options(args: Any, engines: Sequence[str]) -> WorkerOptions:
    partial = _goes_on(args)
    staleness = value_of(args, "max_staleness")
    in_place = value_of(args, "flush_cache_interval") != 1
    centering = bool(value_of(args, "use_score_centering"))
    return WorkerOptions(
        engines=tuple(engines),
        lease_seconds=float(value_of(args, "rollout_queue_lease_seconds")),
        io_concurrency=value_of(args, "rollout_io_concurrency"),
        concurrency=value_of(args, "sglang_server_concurrency"),
        max_concurrent_samples=value_of(args, "max_concurrent_samples") or 0,
        samples=value_of(args, "n_samples_per_prompt"),
        max_new_tokens=value_of(args, "rollout_max_response_len") or MAX_NEW_TOKENS,
        max_context_tokens=value_of(args, "rollout_max_context_len") or 0,
        temperature=float(value_of(args, "rollout_temperature")),
        top_p=float(value_of(args, "rollout_top_p")),
        top_k=value_of(args, "rollout_top_k"),
        stop=_texts(value_of(args, "rollout_stop")),
        stop_token_ids=tuple(value_of(args, "rollout_stop_token_ids") or ()),
        skip_special_tokens=bool(value_of(args, "rollout_skip_special_tokens")),
        top_logprobs=value_of(args, "score_centering_top_k") if centering else 0,
        routed_experts=bool(value_of(args, "use_rollout_routing_replay")),
        partial_rollout=partial,
        mask_offpolicy_in_partial_rollout=bool(
            value_of(args, "partial_rollout") and value_of(args, "mask_offpolicy_in_partial_rollout")
        ),
        save_tokens=value_of(args, "rollout_save_tokens"),
        save_seconds=float(value_of(args, "rollout_save_seconds")),
        max_staleness=-1 if staleness is None else staleness,
        staleness_policy=value_of(args, "staleness_policy"),
        stale_drops_max=value_of(args, "stale_drops_max"),
        refusals_max=value_of(args, "rollout_refusals_max"),
        batch_groups=args.rollout_batch_size if staleness is not None else 0,
        generate=value_of(args, "custom_generate_function_path") or "",
        # slime's samples have their response in words, whoever reads it.
        response_text=True,
        sample_hooks=_texts(value_of(args, "rollout_sample_hook_path")),
        reward=value_of(args, "custom_rm_path") or "",
        group_reward=bool(value_of(args, "group_rm")),
        reward_key=value_of(args, "reward_key") or "",
        dynamic_filter=value_of(args, "dynamic_sampling_filter_path") or "",
        tokenize=value_of(args, "rollout_tokenize_path") or "",
        detokenize=value_of(args, "rollout_detokenize_path") or "",
        hook_args=_hook_args(args),
        pause_policy=value_of(args, "rollout_pause_policy") or ("in_place" if in_place else "abort"),
        online_gc=uses_straw(args) and bool(value_of(args, "rollout_queue_online_gc")),
    )


def _texts(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def _hook_args(args: Any) -> dict[str, Any]:
    """What the user's functions find in `args` besides the worker's options: all that goes into a file."""
    return {name: value for name, value in vars(args).items() if value is not None and json_exact(value)}
