"""Which flags of `strawq rollout` have an effect in which run, as one table.

The rule: every flag that was given is obeyed, refused, or named once as having no effect, with what it would need. A
row is refused where obeying half of it would lose something or where the flags contradict each other. A flag stands in
`ALWAYS` or in rows of the table; a test holds that none is forgotten.

User code finds every flag in `args`: a rollout function of the user's own decides itself what it obeys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from strawq.errors import BadInput
from strawq_workers.slime.arguments import DEFAULTS, uses_straw
from strawq_workers.slime.flags import all_flags, option_of


class Run(NamedTuple):
    """What the table asks: the flags as they were given, the mode that was named or follows (`sync`, `partial`,
    `fully-async`), and whether engines were named beside slime's flags (`--engine`, `--embedded-engine`)."""

    args: Any
    mode: str
    engines: bool

    def given(self, *names: str) -> bool:
        """Whether one of these flags was given something else than its default."""
        return any(getattr(self.args, name, None) not in (None, DEFAULTS[name]) for name in names)

    @property
    def straw(self) -> bool:
        return uses_straw(self.args)

    @property
    def own(self) -> bool:
        """Whether the user's own rollout function generates."""
        return not str(self.args.rollout_function_path).startswith("strawq_workers.")

    @property
    def in_background(self) -> bool:
        return self.mode == "fully-async" or self.own

    @property
    def on_pool(self) -> bool:
        """Whether worker processes generate, and no worker of this process."""
        return self.mode == "fully-async" and self.straw and not self.own

    @property
    def reads_data(self) -> bool:
        return self.given("prompt_data", "data_source_path")


class Row(NamedTuple):
    """`flags` have an effect when `when` says so; `why` says what they need, or why they have none."""

    flags: tuple[str, ...]
    when: Callable[[Run], bool]
    why: str
    refused: bool = False


EVALUATION = tuple(
    flag.name
    for flag in all_flags()
    if flag.name.startswith(("eval_", "n_samples_per_eval")) and flag.name != "eval_interval"
)
REPLAYED = frozenset(
    {"load_debug_rollout_data", "load_debug_rollout_data_subsample", "start_rollout_id", "num_rollout",
     "rollout_batch_size", "n_samples_per_prompt", "reward_key", "debug_train_only"}
)  # fmt: skip
"""What a run on archives looks at."""

REPLAY = Row(
    tuple(flag.name for flag in all_flags() if flag.name not in REPLAYED),
    lambda run: not run.given("load_debug_rollout_data"),
    "--load-debug-rollout-data generates and saves nothing",
)

ROWS = (
    Row(("rollout_data_dir", "rollout_storage_profile", "rollout_storage_declaration", "rollout_queue_run_id",
         "rollout_queue_lease_seconds", "rollout_io_concurrency"),
        lambda run: run.straw, "needs --rollout-data-transport straw"),
    Row(("rollout_workers", "rollout_worker_wait_seconds"), lambda run: run.on_pool,
        "needs --mode fully-async with --rollout-data-transport straw"),
    Row(("buffer_sort_by_staleness",), lambda run: not run.given("buffer_filter_path"),
        "--buffer-filter-path sorts as it likes"),
    Row(("rollout_shuffle",), lambda run: run.reads_data, "needs --prompt-data"),
    Row(("rollout_seed",), lambda run: run.given("rollout_shuffle"), "needs --rollout-shuffle"),
    Row(("input_key", "label_key", "metadata_key", "tool_key", "apply_chat_template", "rollout_max_prompt_len"),
        lambda run: run.reads_data or run.given("eval_prompt_data"), "needs --prompt-data"),
    Row(("apply_chat_template_kwargs",), lambda run: run.given("apply_chat_template"), "needs --apply-chat-template"),
    Row(("hf_checkpoint",), lambda run: run.given("apply_chat_template", "rollout_max_prompt_len"),
        "only its tokenizer is used, with --apply-chat-template or --rollout-max-prompt-len"),
    Row(("num_epoch",), lambda run: not run.given("num_rollout"), "--num-rollout says how many"),
    Row(("global_batch_size", "num_steps_per_rollout"), lambda run: False,
        "checked only: the reference trainer takes no steps"),
    Row(("partial_rollout",), lambda run: run.mode != "sync",
        "--mode sync is without it: say --mode partial, or leave one of them out", refused=True),
    Row(("flush_cache_interval",), lambda run: run.in_background,
        "other than 1 keeps requests in the engines over weight updates, and needs --mode fully-async", refused=True),
    Row(("over_sampling_batch_size",), lambda run: run.mode != "fully-async" or run.own,
        "a fully async rollout goes on by itself"),
    Row(("mask_offpolicy_in_partial_rollout",), lambda run: run.mode == "partial" or run.given("partial_rollout"),
        "needs --partial-rollout"),
    Row(("rollout_save_seconds",),
        lambda run: run.mode == "partial" or run.given("partial_rollout", "flush_cache_interval"),
        "needs --partial-rollout"),
    Row(("max_staleness",), lambda run: run.in_background or run.args.staleness_policy == "drop",
        "a synchronous rollout trains what it has just generated"),
    Row(("staleness_policy",), lambda run: run.given("max_staleness"), "needs --max-staleness"),
    Row(("stale_drops_max",),
        lambda run: run.args.staleness_policy == "drop" and run.given("max_staleness"),
        "needs --max-staleness N --staleness-policy drop"),
    Row(("rollout_pause_policy",), lambda run: run.in_background,
        "nothing is in flight at the weight updates of a synchronous rollout"),
    Row(("score_centering_top_k",), lambda run: run.given("use_score_centering"), "needs --use-score-centering"),
    Row(("reward_key",), lambda run: run.given("custom_rm_path", "custom_generate_function_path"),
        "needs --custom-rm-path"),
    Row(("rollout_all_samples_process_path",), lambda run: not run.on_pool,
        "distributed fully-async rollout doesn't support it: leave it out", refused=True),
    Row(("eval_interval",), lambda run: not run.on_pool,
        "distributed fully-async rollout doesn't support evaluation mode: leave it out", refused=True),
    Row(("eval_interval",), lambda run: run.given("eval_prompt_data", "eval_function_path"),
        "needs --eval-prompt-data NAME FILE [NAME FILE ...]", refused=True),
    Row(EVALUATION, lambda run: run.given("eval_interval"), "needs --eval-interval"),
    Row(("save_interval",), lambda run: run.given("save"), "needs --save, the directory of the checkpoints",
        refused=True),
    Row(("save_interval",), lambda run: not run.given("debug_rollout_only"), "--debug-rollout-only saves nothing"),
    Row(("save",), lambda run: run.straw or (run.given("save_interval") and not run.given("debug_rollout_only")),
        "nothing is saved without --save-interval"),
    Row(("ckpt_step",), lambda run: run.given("load") or (run.straw and run.given("save")),
        "needs --load, the directory of the checkpoints", refused=True),
    Row(("rollout_engines",), lambda run: not run.engines, "--engine or --embedded-engine says which"),
    Row(("sglang_router_ip",), lambda run: run.given("sglang_router_port"), "needs --sglang-router-port", refused=True),
    Row(("sglang_router_port",), lambda run: run.given("sglang_router_ip"), "needs --sglang-router-ip", refused=True),
    Row(("sglang_router_ip", "sglang_router_port"), lambda run: not (run.engines or run.given("rollout_engines")),
        "the engines are named otherwise"),
)  # fmt: skip

ALWAYS = frozenset(
    {"rollout_data_transport", "rollout_queue_online_gc", "rollout_queue_segment_mib", "data_source_path",
     "buffer_filter_path", "prompt_data", "start_rollout_id", "num_rollout", "rollout_batch_size",
     "n_samples_per_prompt", "rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_max_response_len",
     "rollout_max_context_len", "rollout_stop", "rollout_stop_token_ids", "rollout_skip_special_tokens",
     "use_rollout_routing_replay", "use_score_centering", "rollout_function_path", "custom_generate_function_path",
     "custom_rm_path", "group_rm", "dynamic_sampling_filter_path", "rollout_sample_filter_path",
     "rollout_sample_hook_path", "load", "save_debug_rollout_data", "load_debug_rollout_data",
     "load_debug_rollout_data_subsample", "debug_rollout_only", "debug_train_only", "sglang_server_concurrency",
     "max_concurrent_samples", "rollout_refusals_max", "rollout_save_tokens", "rollout_tokenize_path",
     "rollout_detokenize_path"}
)  # fmt: skip
"""Flags that are obeyed in every run that generates, or that `validate_rollout_arguments` refuses where they are not
(`--rollout-queue-segment-mib` has no effect anywhere, which it says)."""


def without_effect(run: Run) -> Sequence[str]:
    """Flags that were given and are not obeyed, each with its reason; those of one row together. `BadInput` for what
    is refused."""
    rows = ROWS if REPLAY.when(run) else (REPLAY,)
    said: set[str] = set()
    found = []
    for row in rows:
        names = [name for name in row.flags if name not in said and run.given(name)]
        if not names or row.when(run):
            continue
        said.update(names)
        text = f"{', '.join(map(option_of, names))}: {row.why}"
        if row.refused:
            raise BadInput(text)
        found.append(text)
    return found
