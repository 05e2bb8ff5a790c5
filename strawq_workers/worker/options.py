"""What a worker may be told, in one struct, checked before the first lease is taken.

The rule: an option that could not be obeyed is refused at the start (`BadInput`), never ignored on some path. Names of
the engine's sampling options are SGLang's.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from strawq.errors import BadInput
from strawq.limits import LEASE_SECONDS
from strawq_workers.admission.staleness import STALE_DROPS_MAX, Policy
from strawq_workers.sglang.options import EngineOptions
from strawq_workers.sglang.wire import Sampling

PausePolicy = Literal["abort", "drain", "in_place"]
ChangedSampling = Literal["refuse", "mark"]


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one worker process.

    Engines and capacity. `engines`: URLs of engines or routers. `concurrency` (C): requests in flight per engine.
    `workers` (W) and `worker_index`: how many workers share these engines, and which of them this one is; each gets its
    share of ⌊C·E/G⌋ groups. With `workers` 0 they are the live sessions of the pool that have this worker's `role`, and
    shares follow them as they come and go. `max_groups` sets the share by hand (0: computed).
    `max_concurrent_samples`: sample-level admission, capacity of this worker in samples (0: group-level).

    Generation. `samples` (G): answers to a prompt that does not say. `max_new_tokens`: response tokens of a sample, all
    its requests together. `max_context_tokens`: prompt and response (0: the engine's context). `logprob_mode`: what the
    engine's log-probs are, stored with each segment (`original`: of the full distribution; `processed`). `top_logprobs`
    captures SC rows of k tokens, `routed_experts` R3 rows.

    Partial rollout. With `partial_rollout` false a sample comes from one request (of a generate function: from one
    call), or starts anew. `mask_offpolicy_in_partial_rollout`: response tokens that the policy of the sample's newest
    tokens did not surely make get loss mask 0. `changed_sampling`: a saved prefix that was sampled with other options
    is refused (the attempt fails), or continued and marked (its segments differ, and `metadata["mixed_sampling"]` is
    true). `save_tokens` ends each request after so many tokens, saves, and goes on with the next request;
    `save_seconds` aborts one that has run for so long, saves and goes on (0: off; a prefix is then saved only at an
    abort). Both need sampling without penalties, stop strings and `min_new_tokens`, which do not look across requests
    (with these, `save_seconds` is not obeyed), and `partial_rollout`.

    Staleness. `max_staleness`: how many policy versions older than the served one a group's oldest token may be (-1: no
    budget). `staleness_policy`: `admit` and `oldest_first` admit no more than `max_staleness` + 1 batches of
    `batch_groups` groups that are not trained yet; `drop` throws a group beyond the budget away, and its prompt starts
    anew, at most `stale_drops_max` times. `version_wait_s`: how long a worker waits, after a resume with a new version,
    for engines that still report an older one.

    Hooks are dotted paths, `module.function` or `module:function`. `generate`: `async (args, sample, sampling_params)`
    to the sample, in place of the worker's own request. `sample_hooks`: `(args, sample, *, rollout_id, evaluation)` to
    the sample or None, in order, before the reward. `reward`: `async (args, sample)` to a number or dict, or `(args,
    samples)` to a list with `group_reward`; `reward_key` picks the number out of a dict where one is needed.
    `evaluation` is what hooks that ask for it are told. `dynamic_filter`: `(args, samples)` to `DynamicFilterOutput`.
    `tokenize`: `(args, prompt)` to token ids, for prompts without. `detokenize`: `(args, tokens)` to text, where the
    engine has no `/v1/detokenize`. `hook_args` are further attributes of `args`. `response_text` stores the response
    in words even if no hook reads it; special tokens are left out of it with `skip_special_tokens`.

    Pause. `pause_policy`: `abort` ends requests and saves prefixes; `drain` finishes the groups in hand; `in_place`
    freezes the engines.

    Cleaning. `online_gc`: this worker also collects garbage, every `gc_seconds`.

    Limits. `engine_timeout_s`: how long no engine may answer before the worker gives up; `storage_timeout_s`: how long
    storage may refuse (a full disk, a mount that is gone) with everything in hand kept. `abort_timeout_s`: how long an
    abort may take. `refusals_max`: groups in a row that end in an engine's refusal, or in an answer that
    makes no sense, before the worker stops, since then the worker's options or the engine are wrong and not the
    prompts; and, where the worker may hold no more groups than that at once, groups in a row that fail for good for
    whatever reason (else as many as it may hold). `groups_max`: stop after so many groups (0: no bound)."""

    engines: tuple[str, ...]
    queue: str = "rollout"
    role: str = "worker"
    lease_seconds: float = LEASE_SECONDS
    io_concurrency: int = 4

    concurrency: int = 64
    workers: int = 1
    worker_index: int = 0
    max_groups: int = 0
    max_concurrent_samples: int = 0
    api_key: str | None = None

    samples: int = 8
    max_new_tokens: int = 1024
    max_context_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_extra: dict[str, Any] = {}
    logprobs: bool = True
    logprob_mode: str = "original"
    top_logprobs: int = 0
    routed_experts: bool = False

    partial_rollout: bool = True
    mask_offpolicy_in_partial_rollout: bool = False
    changed_sampling: ChangedSampling = "refuse"
    save_tokens: int = 0
    save_seconds: float = 60.0

    max_staleness: int = -1
    staleness_policy: Policy = "admit"
    batch_groups: int = 0
    stale_drops_max: int = STALE_DROPS_MAX
    version_wait_s: float = 60.0

    generate: str = ""
    sample_hooks: tuple[str, ...] = ()
    reward: str = ""
    group_reward: bool = False
    reward_key: str = ""
    dynamic_filter: str = ""
    tokenize: str = ""
    detokenize: str = ""
    hook_args: dict[str, Any] = {}
    response_text: bool = False
    evaluation: bool = False

    pause_policy: PausePolicy = "abort"

    online_gc: bool = False
    gc_seconds: float = 60.0

    engine_timeout_s: float = 120.0
    storage_timeout_s: float = 120.0
    abort_timeout_s: float = 30.0
    refusals_max: int = 8
    groups_max: int = 0
    log_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not self.engines:
            raise BadInput("a worker needs the URL of at least one engine (or router)")
        _check_numbers(self)
        if not 0 <= self.worker_index < max(1, self.workers):
            known = (
                f"of {self.workers} workers they are 0 to W - 1" if self.workers else "say how many workers there are"
            )
            raise BadInput(f"worker_index is {self.worker_index}; {known}")
        if self.max_concurrent_samples and self.max_concurrent_samples < self.samples:
            raise BadInput(
                f"max_concurrent_samples is {self.max_concurrent_samples}, less than one group of {self.samples}"
            )
        if not self.partial_rollout and self.pause_policy == "in_place":
            raise BadInput(
                "partial_rollout=False and pause_policy=in_place contradict each other: a frozen request goes on under "
                "other weights; use abort or drain"
            )
        if self.mask_offpolicy_in_partial_rollout and not self.partial_rollout:
            raise BadInput("mask_offpolicy_in_partial_rollout needs partial_rollout")
        if self.group_reward and not self.reward:
            raise BadInput("group_reward says how the reward hook is called; name the hook in reward")
        if self.max_staleness >= 0 and self.staleness_policy != "drop" and not self.batch_groups:
            raise BadInput(
                f"staleness_policy {self.staleness_policy} bounds the batches that are not trained yet: set "
                "batch_groups to the groups of one training batch"
            )
        if self.save_tokens and self.looks_back:
            raise BadInput(
                f"save_tokens divides a response into requests, and {self.looks_back} do not look across requests: "
                "set save_tokens to 0"
            )
        if self.save_tokens and not self.partial_rollout:
            raise BadInput("save_tokens saves prefixes, and partial_rollout=False keeps none: set save_tokens to 0")
        self.sampling(self.max_new_tokens)

    @property
    def looks_back(self) -> str:
        """Sampling options in use whose effect depends on the earlier output of the same request; empty if none."""
        named = [name for name in _LOOK_BACK if self.sampling_extra.get(name)]
        return ", ".join((["stop strings"] if self.stop else []) + named)

    def sampling(self, max_new_tokens: int) -> Sampling:
        """Sampling options of one request."""
        extra = dict(self.sampling_extra)
        fields = {name: extra.pop(name) for name in (*_LOOK_BACK, "seed") if name in extra}
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            extra=extra,
            **fields,
        )

    def engine_options(self) -> EngineOptions:
        """Limits of the engine client that follow from these."""
        return EngineOptions(
            concurrency=self.concurrency,
            api_key=self.api_key,
            start_timeout_s=self.engine_timeout_s,
            retry_s=self.engine_timeout_s,
            abort_deadline_s=self.abort_timeout_s,
            abort_poll_s=min(0.3, self.abort_timeout_s / 10),
            probe_interval_s=min(5.0, max(0.2, self.engine_timeout_s / 10)),
        )


_LOOK_BACK = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
_AT_LEAST_ONE = ("io_concurrency", "concurrency", "samples", "max_new_tokens", "refusals_max", "stale_drops_max")
_NOT_NEGATIVE = (
    "workers", "max_groups", "max_concurrent_samples", "max_context_tokens", "top_logprobs", "save_tokens",
    "save_seconds", "batch_groups", "version_wait_s", "groups_max", "storage_timeout_s",
)  # fmt: skip
_POSITIVE = ("lease_seconds", "engine_timeout_s", "abort_timeout_s", "log_seconds", "gc_seconds")


def _check_numbers(options: WorkerOptions) -> None:
    for name in _AT_LEAST_ONE:
        if getattr(options, name) < 1:
            raise BadInput(f"{name} is {getattr(options, name)}; it must be at least 1")
    for name in _NOT_NEGATIVE:
        if not getattr(options, name) >= 0:
            raise BadInput(f"{name} is {getattr(options, name)}; it must not be negative (0 switches it off)")
    for name in _POSITIVE:
        value = getattr(options, name)
        if not (value > 0 and math.isfinite(value)):
            raise BadInput(f"{name} is {value}; it must be positive")
    if options.max_staleness < -1:
        raise BadInput(f"max_staleness is {options.max_staleness}; it must be at least 0, or -1 for no budget")
    if options.top_logprobs and not options.logprobs:
        raise BadInput("top_logprobs needs logprobs")
