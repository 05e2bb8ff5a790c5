"""The flags of a rollout, as data: slime's, under their names, types and defaults, and a few of our own.

The rule: `relation` says how a flag stands to slime's: `same`; `stricter`, where something that slime accepts is
refused or has fewer meanings; `ours`, where slime has none or means something else by it. The table in `docs/slime.md`
is held against this one by a test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Relation = Literal["same", "stricter", "ours"]


class Flag(NamedTuple):
    """One flag. `kind` is `bool` for a switch. `many`: takes one value or more; `append`: may be given again."""

    name: str
    kind: Callable[[str], Any] = str
    default: Any = None
    help: str = ""
    relation: Relation = "same"
    choices: tuple[str, ...] = ()
    many: bool = False
    append: bool = False

    @property
    def option(self) -> str:
        return option_of(self.name)


def option_of(name: str) -> str:
    """What is typed for an attribute of `args`: `--rollout-seed` for `rollout_seed`."""
    return "--" + name.replace("_", "-")


def _group(title: str, *flags: Flag) -> tuple[str, tuple[Flag, ...]]:
    return title, flags


GROUPS = dict(
    (
        _group(
            "transport",
            Flag("rollout_data_transport", str, "object-store", "where rollout data live", "stricter",
                 choices=("object-store", "straw")),
            Flag("rollout_data_dir", str, None, "the pool; <save>/rollout_data if not given"),
            Flag("rollout_storage_profile", str, "local", "what the pool's mount is", choices=("local", "juicefs")),
            Flag("rollout_storage_declaration", str, None, "JSON file that says how JuiceFS is mounted"),
            Flag("rollout_queue_run_id", str, "rollout", "identity of the run in the pool"),
            Flag("rollout_queue_online_gc", bool, False, "collect garbage while the job runs"),
            Flag("rollout_queue_lease_seconds", float, 300.0, "how long a process that stood still keeps its groups"),
            Flag("rollout_queue_segment_mib", int, None, "checked, and without effect: a publication is one file",
                 "ours"),
            Flag("rollout_io_concurrency", int, 4, "storage calls at once, in each process"),
        ),
        _group(
            "data",
            Flag("data_source_path", str, None, "class of the data source, in place of the transport's"),
            Flag("buffer_filter_path", str, None, "function that chooses from the buffer; refused under straw"),
            Flag("buffer_sort_by_staleness", bool, False, "oldest weight version first; straw always does"),
            Flag("prompt_data", str, None, "JSONL or Parquet, path or fsspec URL, with @[start:stop] for some rows"),
            Flag("input_key", str, "input", "field of the prompt"),
            Flag("label_key", str, None, "field of the label"),
            Flag("metadata_key", str, "metadata", "field of the metadata"),
            Flag("tool_key", str, "tools", "field of the tools, which go into the metadata"),
            Flag("apply_chat_template", bool, False, "make text of chat messages, by the tokenizer of --hf-checkpoint"),
            Flag("apply_chat_template_kwargs", json.loads, None, "JSON object of further arguments of the template"),
            Flag("hf_checkpoint", str, None, "model whose tokenizer is used"),
            Flag("rollout_shuffle", bool, False, "shuffle each epoch"),
            Flag("rollout_seed", int, 42, "seed of the shuffles"),
            Flag("rollout_max_prompt_len", int, None, "longer prompts (tokens) are left out", "stricter"),
            Flag("start_rollout_id", int, None, "first rollout; after the loaded checkpoint if not given"),
            Flag("num_rollout", int, None, "rollouts in all"),
            Flag("num_epoch", int, None, "rollouts in all, as epochs of the dataset"),
        ),
        _group(
            "batch",
            Flag("rollout_batch_size", int, None, "prompts (groups) of a rollout; required"),
            Flag("n_samples_per_prompt", int, 1, "samples of a group"),
            Flag("global_batch_size", int, None, "samples of a training step"),
            Flag("num_steps_per_rollout", int, None, "training steps of a rollout"),
            Flag("over_sampling_batch_size", int, None, "groups in flight while a batch is filled"),
            Flag("partial_rollout", bool, False, "continue unfinished samples in a later rollout"),
            Flag("mask_offpolicy_in_partial_rollout", bool, False, "train only on tokens of the newest policy",
                 "ours"),
            Flag("flush_cache_interval", int, 1, "1: requests end at a weight update; else engines pause in place"),
        ),
        _group(
            "sampling",
            Flag("rollout_temperature", float, 1.0, "above 0"),
            Flag("rollout_top_p", float, 1.0, "above 0, at most 1"),
            Flag("rollout_top_k", int, -1, "-1: all tokens"),
            Flag("rollout_max_response_len", int, None, "response tokens of a sample; 1024 if not given"),
            Flag("rollout_max_context_len", int, None, "tokens of prompt and response"),
            Flag("rollout_stop", str, None, "strings that end a response", many=True),
            Flag("rollout_stop_token_ids", int, None, "token ids that end a response", many=True),
            Flag("rollout_skip_special_tokens", bool, False, "leave special tokens out of the response's text"),
            Flag("use_rollout_routing_replay", bool, False, "capture the experts of each token (R3)"),
            Flag("use_score_centering", bool, False, "capture the best log-probs of each token (SC)", "stricter"),
            Flag("score_centering_top_k", int, 128, "how many of them"),
        ),
        _group(
            "custom code",
            Flag("rollout_function_path", str, "strawq_workers.slime.generate_rollout", "function of a rollout",
                 "ours"),
            Flag("eval_function_path", str, None, "function of an evaluation; that of the rollout if not given"),
            Flag("custom_generate_function_path", str, None, "async (args, sample, sampling_params) -> sample"),
            Flag("custom_rm_path", str, None, "(args, sample) -> number or dict"),
            Flag("group_rm", bool, False, "custom_rm_path is (args, samples) -> list", "stricter"),
            Flag("reward_key", str, None, "the number in a reward that is a dict"),
            Flag("eval_reward_key", str, None, "the same, in evaluations"),
            Flag("dynamic_sampling_filter_path", str, None, "(args, samples) -> DynamicFilterOutput"),
            Flag("rollout_sample_filter_path", str, None, "(args, groups) -> None, may set remove_sample"),
            Flag("rollout_all_samples_process_path", str, None, "(args, groups, data_source) -> None"),
            Flag("rollout_sample_hook_path", str, None, "(args, sample) -> sample or None, before the reward",
                 append=True),
        ),
        _group(
            "evaluation",
            Flag("eval_interval", int, None, "rollouts between evaluations"),
            Flag("eval_prompt_data", str, None, "NAME FILE, again and again", many=True),
            Flag("n_samples_per_eval_prompt", int, 1, "samples of a prompt"),
            Flag("eval_input_key", str, None, "as input_key"),
            Flag("eval_label_key", str, None, "as label_key"),
            Flag("eval_tool_key", str, None, "as tool_key"),
            Flag("eval_temperature", float, None, "as rollout_temperature"),
            Flag("eval_top_p", float, None, "as rollout_top_p"),
            Flag("eval_top_k", int, None, "as rollout_top_k"),
            Flag("eval_max_response_len", int, None, "as rollout_max_response_len"),
            Flag("eval_max_context_len", int, None, "as rollout_max_context_len"),
        ),
        _group(
            "checkpoints and debugging",
            Flag("save", str, None, "directory of checkpoints"),
            Flag("load", str, None, "directory of checkpoints to go on from"),
            Flag("save_interval", int, None, "rollouts between checkpoints"),
            Flag("ckpt_step", int, None, "checkpoint to go back to"),
            Flag("save_debug_rollout_data", str, None, "archive of each rollout, a path with {rollout_id}", "ours"),
            Flag("load_debug_rollout_data", str, None, "train on such archives in place of generating", "stricter"),
            Flag("load_debug_rollout_data_subsample", float, None, "part of their groups, above 0, at most 1",
                 "stricter"),
            Flag("debug_rollout_only", bool, False, "no training"),
            Flag("debug_train_only", bool, False, "no generation"),
        ),
        _group(
            "engines",
            Flag("sglang_server_concurrency", int, 512, "requests in flight in each engine"),
            Flag("sglang_router_ip", str, None, "host of slime's router"),
            Flag("sglang_router_port", int, None, "its port"),
            Flag("rollout_engines", str, None, "URLs of engines", "ours", many=True),
        ),
        _group(
            "strawq",
            Flag("max_concurrent_samples", int, None, "samples that a worker has in flight, not whole groups", "ours"),
            Flag("max_staleness", int, None, "policy versions that a group may be behind", "ours"),
            Flag("staleness_policy", str, "admit", "how that is kept", "ours",
                 choices=("admit", "oldest_first", "drop")),
            Flag("stale_drops_max", int, 3, "so often a prompt is dropped as stale, then it is delivered late", "ours"),
            Flag("rollout_refusals_max", int, 8, "give up after so many refused or failed groups in a row", "ours"),
            Flag("rollout_save_tokens", int, 0, "save a sample after so many tokens; 0: not for their number", "ours"),
            Flag("rollout_save_seconds", float, 60.0, "save samples in flight after so long; 0: not for their age",
                 "ours"),
            Flag("rollout_pause_policy", str, None, "what a weight update does to requests; by flush_cache_interval if "
                 "not given", "ours", choices=("abort", "drain", "in_place")),
            Flag("rollout_tokenize_path", str, None, "(args, prompt) -> ids, for chat messages", "ours"),
            Flag("rollout_detokenize_path", str, None, "(args, ids) -> text", "ours"),
            Flag("rollout_workers", int, None, "worker processes that a fully async rollout on a pool starts here; 1 "
                 "with --embedded-engine if not given, else 0", "ours"),
            Flag("rollout_worker_wait_seconds", float, None, "how long it waits for a worker", "ours"),
        ),
    )
)  # fmt: skip
"""Title -> flags. No flag stands twice."""


def all_flags() -> tuple[Flag, ...]:
    return tuple(flag for flags in GROUPS.values() for flag in flags)


REWARD = "is slime's own reward: name a function with --custom-rm-path"
IMAGES = (
    "is not supported by strawq's data sources: name a data source of your own with --data-source-path, whose samples "
    "may hold images"
)
NOT_TAKEN = (
    ("--rm-type", REWARD),
    ("--multimodal-keys", IMAGES),
    ("--eval-config", "is not read: give --eval-prompt-data NAME FILE and the --eval-* flags"),
    ("--dump-details", "is not known: --save-debug-rollout-data 'DIR/{rollout_id}' keeps the batches"),
    ("--rollout-external*", "names engines that run already: give --engine URL, or --rollout-engines"),
    ("--*rollout-global-dataset", "is always so: the cursor of the dataset is part of every checkpoint"),
    ("--*fault-tolerance", "is always so: engines and workers are watched; leave it out"),
    ("--rollout-health-check*", "is slime's: strawq's workers watch the engines themselves; leave it out"),
    ("--sglang-*", "is an engine's option: give it where the engine is started, and name that with --engine URL"),
    ("--router-*", "is the router's option: give it where the router is started"),
    ("--*num-gpus*", "places engines and trainer: name engines that run already with --engine URL"),
    ("--*num-nodes", "places engines and trainer: name engines that run already with --engine URL"),
    ("--colocate", "places engines and trainer: name engines that run already with --engine URL"),
    ("--offload*", "places engines and trainer: name engines that run already with --engine URL"),
    ("--custom-*log-function-path", "is for slime's manager to call: the reference trainer has none"),
    ("--custom-reward-post-process-path", "is the trainer's: the reference trainer does not look at rewards"),
    ("--custom-convert-samples-to-train-data-path", "is the trainer's: the reference trainer converts nothing"),
)
"""Flags of slime that strawq does not take, by pattern, and what to do instead; the first that fits counts."""
