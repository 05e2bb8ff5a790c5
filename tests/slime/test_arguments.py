import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from strawq.errors import BadInput
from strawq_workers.slime.arguments import (
    FULLY_ASYNC,
    add_rollout_arguments,
    rollout_function_path,
    validate_rollout_arguments,
    worker_options,
)
from strawq_workers.slime.flags import all_flags

DOCS = Path(__file__).resolve().parents[2] / "docs" / "slime.md"
ENGINES = ("http://127.0.0.1:30000",)


def parsed(*words: str) -> argparse.Namespace:
    parser = add_rollout_arguments(argparse.ArgumentParser())
    return parser.parse_args(["--rollout-batch-size", "8", *words])


def test_the_defaults_are_slimes() -> None:
    args = parsed()
    validate_rollout_arguments(args)
    assert (args.rollout_data_transport, args.rollout_queue_run_id, args.rollout_queue_lease_seconds) == (
        "object-store",
        "rollout",
        300.0,
    )
    assert (args.rollout_seed, args.input_key, args.metadata_key, args.tool_key) == (42, "input", "metadata", "tools")
    assert (args.rollout_temperature, args.rollout_top_p, args.rollout_top_k) == (1.0, 1.0, -1)
    assert (args.partial_rollout, args.n_samples_per_prompt, args.score_centering_top_k) == (False, 1, 128)
    assert (args.sglang_server_concurrency, args.rollout_io_concurrency, args.flush_cache_interval) == (512, 4, 1)


@pytest.mark.parametrize("handler", ["error", "resolve"])
def test_a_parser_that_has_a_flag_keeps_its_own(handler: str) -> None:
    parser = argparse.ArgumentParser(conflict_handler=handler)
    parser.add_argument("--rollout-batch-size", type=int, default=3, dest="own_name")
    parser.add_argument("--rollout-data-transport", choices=["nixl"], default="nixl")
    args = add_rollout_arguments(parser).parse_args([])
    assert (args.own_name, args.rollout_data_transport) == (3, "nixl")
    assert not hasattr(args, "rollout_batch_size")
    assert args.rollout_queue_run_id == "rollout"


def test_no_flag_is_defined_twice() -> None:
    names = [flag.name for flag in all_flags()]
    assert sorted(names) == sorted(set(names))


REFUSED = [
    (
        "--rollout-data-transport straw",
        "Straw rollout transport requires --rollout-data-dir or --save on shared storage",
    ),
    ("--rollout-queue-online-gc", "--rollout-queue-online-gc requires --rollout-data-transport straw"),
    ("--rollout-queue-lease-seconds 0", "--rollout-queue-lease-seconds must be positive"),
    ("--rollout-queue-lease-seconds nan", "--rollout-queue-lease-seconds is nan; it must be a number"),
    ("--rollout-io-concurrency 0", "--rollout-io-concurrency must be positive"),
    ("--rollout-queue-segment-mib -1", "--rollout-queue-segment-mib must be positive"),
    (
        "--rollout-data-transport straw --save s --buffer-filter-path a.b",
        "--buffer-filter-path is not supported by straw; scheduling is persisted in the queue and prioritizes older "
        "weight versions within ready and partial groups",
    ),
    (
        "--rollout-temperature 0",
        "--rollout-temperature must be > 0; temperature 0 is greedy decoding and is not a valid RL policy.",
    ),
    ("--rollout-top-p 0", "--rollout-top-p must be above 0"),
    ("--rollout-top-k 0", "--rollout-top-k must be at least 1"),
    ("--over-sampling-batch-size 7", "--over-sampling-batch-size 7 is less than --rollout-batch-size 8"),
    ("--num-steps-per-rollout 3", "8 samples of a rollout do not divide"),
    ("--num-steps-per-rollout 2 --global-batch-size 2", "are 4 samples, and a rollout has 8"),
    ("--n-samples-per-prompt 0", "--n-samples-per-prompt must be at least 1"),
    ("--ckpt-step -1", "--ckpt-step must not be negative"),
    ("--staleness-policy drop", "--staleness-policy says how --max-staleness is kept"),
    ("--use-score-centering --rollout-top-k 5", "--use-score-centering needs --rollout-top-k -1"),
    ("--use-score-centering --rollout-top-p 0.5", "--use-score-centering with --rollout-top-p below 1"),
    ("--debug-rollout-only --debug-train-only", "exclude each other"),
    ("--load-debug-rollout-data x --debug-rollout-only", "generates nothing"),
    ("--load-debug-rollout-data-subsample 0.5", "needs --load-debug-rollout-data"),
    ("--load-debug-rollout-data x --load-debug-rollout-data-subsample 1.5", "at most 1, not 1.5"),
    ("--flush-cache-interval 2 --debug-train-only", "--flush-cache-interval other than 1"),
    ("--rollout-save-tokens 8", "--rollout-save-tokens saves prefixes, which are only used with --partial-rollout"),
    ("--rollout-pause-policy in_place", "lets samples be of several policies: set --partial-rollout too"),
    ("--group-rm", "--group-rm says how --custom-rm-path is called"),
    ("--rollout-max-prompt-len 9 --rollout-max-context-len 9", "leaves no room for an answer"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_combination_that_cannot_be_obeyed_is_refused_by_its_flags(words: str, said: str) -> None:
    args = parsed(*words.split())
    before = dict(vars(args))
    with pytest.raises(BadInput) as caught:
        validate_rollout_arguments(args)
    assert said in str(caught.value)
    assert vars(args) == before


def test_the_batch_size_is_required_and_transports_of_others_are_refused() -> None:
    with pytest.raises(BadInput, match="--rollout-batch-size is required"):
        validate_rollout_arguments(SimpleNamespace())
    with pytest.raises(BadInput, match="nixl is not served by strawq"):
        validate_rollout_arguments(SimpleNamespace(rollout_batch_size=1, rollout_data_transport="nixl"))
    with pytest.raises(BadInput, match="--multimodal-keys"):
        validate_rollout_arguments(SimpleNamespace(rollout_batch_size=1, multimodal_keys={"image": "images"}))


def test_args_of_any_version_of_slime_are_enough(tmp_path: Path) -> None:
    args = SimpleNamespace(
        rollout_batch_size=4, n_samples_per_prompt=2, rollout_data_transport="straw", save=str(tmp_path)
    )
    before = dict(vars(args))
    validate_rollout_arguments(args)
    options = worker_options(args, ENGINES)
    assert (options.samples, options.lease_seconds, options.partial_rollout) == (2, 300.0, False)
    assert vars(args) == before


def test_the_worker_is_told_what_the_flags_say() -> None:
    args = parsed(
        *[
            "--n-samples-per-prompt",
            "4",
            "--partial-rollout",
            "--mask-offpolicy-in-partial-rollout",
            "--rollout-temperature",
            "0.7",
            "--rollout-stop",
            "END",
            "--rollout-stop-token-ids",
            "3",
            "4",
            "--rollout-max-response-len",
            "99",
            "--rollout-max-context-len",
            "200",
            "--use-rollout-routing-replay",
            "--use-score-centering",
            "--score-centering-top-k",
            "5",
            "--custom-rm-path",
            "a.b",
            "--group-rm",
            "--rollout-sample-hook-path",
            "c.d",
            "--rollout-sample-hook-path",
            "e.f",
            "--dynamic-sampling-filter-path",
            "g.h",
            "--max-staleness",
            "2",
            "--staleness-policy",
            "oldest_first",
            "--max-concurrent-samples",
            "16",
            "--rollout-data-transport",
            "straw",
            "--rollout-data-dir",
            "x",
            "--rollout-queue-online-gc",
            "--reward-key",
            "score",
            "--sglang-server-concurrency",
            "7",
        ]
    )
    args.anything = "theirs"
    args.handle = object()
    options = worker_options(args, ENGINES)
    assert (options.samples, options.partial_rollout, options.mask_offpolicy_in_partial_rollout) == (4, True, True)
    assert (options.temperature, options.stop, options.stop_token_ids) == (0.7, ("END",), (3, 4))
    assert (options.max_new_tokens, options.max_context_tokens) == (99, 200)
    assert (options.routed_experts, options.top_logprobs) == (True, 5)
    assert (options.reward, options.group_reward, options.dynamic_filter) == ("a.b", True, "g.h")
    assert (options.sample_hooks, options.reward_key) == (("c.d", "e.f"), "score")
    assert (options.max_staleness, options.staleness_policy, options.batch_groups) == (2, "oldest_first", 8)
    assert (options.max_concurrent_samples, options.concurrency, options.online_gc) == (16, 7, True)
    assert options.hook_args["anything"] == "theirs"
    assert "handle" not in options.hook_args
    assert options.pause_policy == "abort"


def test_slimes_own_rewards_are_not_there() -> None:
    args = parsed()
    args.rm_type = "math"
    with pytest.raises(BadInput, match="--rm-type math is slime's own reward"):
        worker_options(args, ENGINES)


def test_masking_without_partial_rollout_has_no_effect_as_in_slime() -> None:
    assert not worker_options(parsed("--mask-offpolicy-in-partial-rollout"), ENGINES).mask_offpolicy_in_partial_rollout


def test_engines_that_pause_in_place_choose_the_fully_asynchronous_rollout() -> None:
    args = parsed("--flush-cache-interval", "2")
    assert rollout_function_path(args) == FULLY_ASYNC
    assert rollout_function_path(args, evaluation=True) == "strawq_workers.slime.generate_rollout"
    options = worker_options(args, ENGINES)
    assert (options.pause_policy, options.partial_rollout) == ("in_place", True)
    args.rollout_function_path = "mine.rollout"
    assert rollout_function_path(args) == "mine.rollout"
    assert rollout_function_path(parsed()) == "strawq_workers.slime.generate_rollout"


def test_slimes_samples_have_their_response_in_words_whoever_reads_it() -> None:
    assert worker_options(parsed(), ENGINES).response_text
