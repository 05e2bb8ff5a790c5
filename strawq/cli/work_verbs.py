"""Verbs of the two ends of a running queue: workers that generate, and a trainer's end that takes batches."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from strawq.cli.app import verb
from strawq.cli.options import PoolPath, QueueName, opened, pick_queue
from strawq.cli.output import Answer, plural, say

if TYPE_CHECKING:
    from strawq.pool import Pool
    from strawq_workers.collected_lines import CollectSummary
    from strawq_workers.collector import Collector

STALE_DROPS_MAX = 3
MaxStaleness = Annotated[
    int,
    typer.Option("--max-staleness", min=-1, help="Policy versions that a group's oldest token may lag (-1: any)."),
]
StalenessPolicy = Annotated[
    Literal["admit", "oldest_first", "drop"],
    typer.Option("--staleness-policy", help="How that is kept; the trainer's is to be the workers'."),
]
StaleDropsMax = Annotated[
    int,
    typer.Option("--stale-drops-max", min=1, help="So often a prompt is dropped as stale, then it is delivered late."),
]


@verb("work")
def work(
    pool: PoolPath,
    engine: Annotated[
        list[str],
        typer.Option("--engine", "-e", metavar="URL", show_default=False, help="Engine or router; may be repeated."),
    ],
    queue: QueueName = "",
    processes: Annotated[int, typer.Option("--processes", min=1, help="Worker processes to start here.")] = 1,
    ray: Annotated[
        bool, typer.Option("--ray", help="One worker on each alive node of a Ray cluster that has a CPU.")
    ] = False,
    ray_address: Annotated[
        str,
        typer.Option("--ray-address", show_default="RAY_ADDRESS, or the one that runs here", help="Of the cluster."),
    ] = "",
    workers: Annotated[
        int,
        typer.Option(
            "--workers", min=0, show_default="live ones of this role", help="Workers that share these engines, in all."
        ),
    ] = 0,
    worker_index: Annotated[int, typer.Option("--worker-index", help="Which of them the first one here is.")] = 0,
    role: Annotated[str, typer.Option("--role", help="Shown by `inspect`.")] = "worker",
    lease_seconds: Annotated[
        float,
        typer.Option("--lease-seconds", help="How long this process may stand still before others take its work."),
    ] = 30.0,
    io_concurrency: Annotated[int, typer.Option("--io-concurrency", help="Threads for file work.")] = 4,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Requests in flight for each engine.")] = 64,
    max_groups: Annotated[int, typer.Option("--max-groups", help="Groups in hand (0: by the number of slots).")] = 0,
    max_concurrent_samples: Annotated[
        int, typer.Option("--max-concurrent-samples", help="Sample-level admission (0: group-level).")
    ] = 0,
    api_key: Annotated[str, typer.Option("--api-key", show_default=False, help="Bearer token of the engines.")] = "",
    samples: Annotated[int, typer.Option("--group-size", help="Answers to a prompt that does not say how many.")] = 8,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens of an answer, all its parts.")] = 1024,
    max_context_tokens: Annotated[
        int, typer.Option("--max-context-tokens", help="Of prompt and answer (0: the engine's).")
    ] = 0,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="As SGLang's.")] = 1.0,
    top_p: Annotated[float, typer.Option("--top-p", help="As SGLang's.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="As SGLang's (-1: off).")] = -1,
    min_p: Annotated[float, typer.Option("--min-p", help="As SGLang's.")] = 0.0,
    stop: Annotated[
        list[str], typer.Option("--stop", metavar="TEXT", show_default=False, help="Stop string; may be repeated.")
    ] = [],  # noqa: B006 (typer copies it)
    stop_token_ids: Annotated[
        list[int],
        typer.Option("--stop-token-id", metavar="ID", show_default=False, help="Stop token; may be repeated."),
    ] = [],  # noqa: B006 (typer copies it)
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the end of sequence.")] = False,
    skip_special_tokens: Annotated[
        bool,
        typer.Option("--skip-special-tokens/--no-skip-special-tokens", help="Leave them out of the response's text."),
    ] = True,
    sampling_extra: Annotated[
        str, typer.Option("--sampling-extra", metavar="JSON", show_default=False, help="Further sampling options.")
    ] = "",
    logprobs: Annotated[bool, typer.Option("--logprobs/--no-logprobs", help="Record log-probs.")] = True,
    logprob_mode: Annotated[
        Literal["original", "processed"], typer.Option("--logprob-mode", help="What the engine's log-probs are.")
    ] = "original",
    top_logprobs: Annotated[int, typer.Option("--top-logprobs", help="SC rows of so many tokens (0: none).")] = 0,
    routed_experts: Annotated[bool, typer.Option("--routed-experts", help="Capture R3 routes.")] = False,
    partial_rollout: Annotated[
        bool, typer.Option("--partial-rollout/--no-partial-rollout", help="Go on from saved prefixes.")
    ] = True,
    mask_offpolicy_in_partial_rollout: Annotated[
        bool,
        typer.Option(
            "--mask-offpolicy-in-partial-rollout", help="Loss mask 0 for tokens of an older policy than the newest."
        ),
    ] = False,
    changed_sampling: Annotated[
        Literal["refuse", "mark"],
        typer.Option("--changed-sampling", help="A prefix that was sampled with other options."),
    ] = "refuse",
    save_tokens: Annotated[int, typer.Option("--save-tokens", help="Save after so many tokens (0: off).")] = 0,
    save_seconds: Annotated[float, typer.Option("--save-seconds", help="Save after so long (0: off).")] = 60.0,
    max_staleness: MaxStaleness = -1,
    staleness_policy: StalenessPolicy = "admit",
    batch_groups: Annotated[int, typer.Option("--batch-groups", help="Groups of a training batch, for that.")] = 0,
    stale_drops_max: StaleDropsMax = STALE_DROPS_MAX,
    version_wait_s: Annotated[
        float, typer.Option("--version-wait-s", help="Wait so long for engines to report a new version.")
    ] = 60.0,
    generate: Annotated[
        str,
        typer.Option(
            "--generate", metavar="MODULE:FUNCTION", show_default=False, help="Function that makes a sample by turns."
        ),
    ] = "",
    sample_hooks: Annotated[
        list[str],
        typer.Option(
            "--sample-hook",
            metavar="MODULE:FUNCTION",
            show_default=False,
            help="Run before the reward; may be repeated.",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    reward: Annotated[
        str, typer.Option("--reward", metavar="MODULE:FUNCTION", show_default=False, help="Hook that scores answers.")
    ] = "",
    group_reward: Annotated[bool, typer.Option("--group-reward", help="It scores a group at once.")] = False,
    reward_key: Annotated[
        str, typer.Option("--reward-key", show_default=False, help="The number in rewards that are objects.")
    ] = "",
    dynamic_filter: Annotated[
        str,
        typer.Option("--dynamic-filter", metavar="MODULE:FUNCTION", show_default=False, help="Hook that drops groups."),
    ] = "",
    tokenize: Annotated[
        str,
        typer.Option("--tokenize", metavar="MODULE:FUNCTION", show_default=False, help="Hook from prompts to tokens."),
    ] = "",
    detokenize: Annotated[
        str,
        typer.Option("--detokenize", metavar="MODULE:FUNCTION", show_default=False, help="Hook from tokens to text."),
    ] = "",
    response_text: Annotated[
        bool, typer.Option("--response-text", help="Store the response in words even if no hook reads it.")
    ] = False,
    hook_args: Annotated[
        str, typer.Option("--hook-args", metavar="JSON", show_default=False, help="Attributes of the hooks' `args`.")
    ] = "",
    evaluation: Annotated[bool, typer.Option("--evaluation", help="What hooks are told that ask for it.")] = False,
    pause_policy: Annotated[
        Literal["abort", "drain", "in_place"], typer.Option("--pause-policy", help="What a pause does to requests.")
    ] = "abort",
    online_gc: Annotated[bool, typer.Option("--online-gc", help="Collect garbage while working.")] = False,
    gc_seconds: Annotated[float, typer.Option("--gc-seconds", help="Between two collections.")] = 60.0,
    engine_timeout_s: Annotated[
        float, typer.Option("--engine-timeout-s", help="Give up when no engine has answered for so long.")
    ] = 120.0,
    storage_timeout_s: Annotated[
        float, typer.Option("--storage-timeout-s", help="Give up when storage has refused for so long.")
    ] = 120.0,
    abort_timeout_s: Annotated[float, typer.Option("--abort-timeout-s", help="How long an abort may take.")] = 30.0,
    refusals_max: Annotated[
        int, typer.Option("--refusals-max", help="Give up after so many refused or failed groups in a row.")
    ] = 8,
    groups_max: Annotated[int, typer.Option("--groups-max", help="End after so many groups (0: no bound).")] = 0,
    log_seconds: Annotated[float, typer.Option("--log-seconds", help="Between lines of the log (see -v).")] = 10.0,
) -> Answer:
    """Lease groups, generate them with engines, hand them in.

    It ends when the queue is sealed and used up. SIGTERM or Ctrl-C ends it in good order: prefixes are saved, leases
    given back (exit code 0). A second one ends it at once; leases that are left expire, what was saved stays. Exit
    code 4 if no engine answers.
    """
    given = dict(locals())  # parameters are named as the fields of WorkerOptions, but for these
    for name in (
        "pool",
        "engine",
        "queue",
        "sample_hooks",
        "processes",
        "ray",
        "ray_address",
        "workers",
        "api_key",
        "sampling_extra",
        "hook_args",
    ):
        del given[name]
    _check_launch(ray, ray_address, processes, workers, worker_index)
    _require_budget(max_staleness, staleness_policy, stale_drops_max)
    with opened(pool, role=role) as open_pool:
        chosen = pick_queue(open_pool, queue).name
        _require_writable(open_pool)
    from strawq.cli.work_command import typed_names
    from strawq_workers.worker.option_names import named_as
    from strawq_workers.worker.options import WorkerOptions

    with named_as(typed_names()):
        options = WorkerOptions(
            **{**given, "stop": tuple(stop), "stop_token_ids": tuple(stop_token_ids)},
            sample_hooks=tuple(sample_hooks),
            engines=tuple(engine),
            queue=chosen,
            workers=workers,
            api_key=api_key or None,
            sampling_extra=_json_object(sampling_extra, "--sampling-extra"),
            hook_args=_json_object(hook_args, "--hook-args"),
        )
    if ray:
        from strawq.cli.work_processes import run_on_cluster

        return run_on_cluster(pool, options, ray_address)
    if processes > 1:
        from strawq.cli.work_processes import run_processes

        return run_processes(pool, options, processes)
    from strawq_workers.worker.hooks import look_in_working_directory
    from strawq_workers.worker.metrics import log_line
    from strawq_workers.worker.process import run_worker

    look_in_working_directory()
    summary = run_worker(pool, options)
    return Answer(summary, f"ended ({summary.reason}): {log_line(summary.counters, 0)}")


def _require_writable(pool: Pool) -> None:
    """Said before engines are waited for. A disk that is full now may have room again by then."""
    from strawq.storage.failure import storage_failed

    try:
        pool.staging.discard(pool.staging.write([b""]))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise storage_failed("write to", f"pool {pool.path}", error) from error


def _check_launch(ray: bool, ray_address: str, processes: int, workers: int, worker_index: int) -> None:
    from strawq.errors import BadInput

    if ray_address and not ray:
        raise BadInput("--ray-address says where --ray starts workers: give --ray too")
    if ray and (processes > 1 or workers or worker_index):
        raise BadInput(
            "--ray starts one worker on each node and counts them: leave --processes, --workers, --worker-index away"
        )
    if processes > 1 and workers and worker_index + processes > workers:
        raise BadInput(
            f"--processes {processes} from --worker-index {worker_index} on are more than --workers {workers}"
        )


def _require_budget(max_staleness: int, staleness_policy: str, stale_drops_max: int) -> None:
    """No option is ignored in silence."""
    from strawq.errors import BadInput

    if max_staleness < 0 and staleness_policy != "admit":
        raise BadInput(f"--staleness-policy {staleness_policy} says how --max-staleness is kept: give that too")
    if staleness_policy != "drop" and stale_drops_max != STALE_DROPS_MAX:
        raise BadInput("--stale-drops-max is of --staleness-policy drop: give that too, or leave it out")


def _json_object(text: str, option: str) -> dict[str, Any]:
    import msgspec

    from strawq.errors import BadInput

    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadInput(f"{option} is not a JSON object: {error}") from error


@verb("collect")
def collect(
    pool: PoolPath,
    count: Annotated[int, typer.Option("--count", "-n", min=1, show_default=False, help="Groups of a batch.")],
    batches: Annotated[
        int, typer.Option("--batches", min=0, help="Batches to take (0: until the queue is used up).")
    ] = 1,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", show_default="stdout", help="Where JSON lines of groups go.")
    ] = "",
    finish: Annotated[
        bool, typer.Option("--finish/--keep", help="The groups count as trained, or go back and are ready again.")
    ] = True,
    queue: QueueName = "",
    consumer: Annotated[str, typer.Option("--consumer", help="Name of the trainer.")] = "trainer",
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, show_default="no limit", help="Seconds to wait for a batch.")
    ] = None,
    fewer: Annotated[
        bool, typer.Option("--fewer", help="After the timeout, take what is ready if it is less than a batch.")
    ] = False,
    max_staleness: MaxStaleness = -1,
    staleness_policy: StalenessPolicy = "admit",
    stale_drops_max: StaleDropsMax = STALE_DROPS_MAX,
    as_json: bool = False,
) -> Answer:
    """Take batches of complete groups, as JSON lines.

    Each group is a line. A batch is finished when its lines are durable in the file (or written to stdout). A file
    that is there is continued: no batch is written twice. With --json and without --out the groups are in the object,
    as `records`. Exit code 4 if there are not enough groups before the timeout.
    """
    from strawq.errors import BadInput
    from strawq_workers.collector import Collector

    if not finish and out:
        raise BadInput("--keep only shows groups; leave --out away, or use --finish")
    _require_budget(max_staleness, staleness_policy, stale_drops_max)
    if not finish and staleness_policy == "drop":
        raise BadInput("--keep only shows groups; leave --staleness-policy drop away, or use --finish")
    with contextlib.ExitStack() as stack:
        open_pool = stack.enter_context(opened(pool, role=consumer))
        name = pick_queue(open_pool, queue).name
        limits: dict[str, Any] = {"count": count, "batches": batches, "timeout": timeout, "fewer": fewer}
        age: dict[str, Any] = {
            "max_staleness": max_staleness,
            "staleness_policy": staleness_policy,
            "stale_drops_max": stale_drops_max,
        }
        if out or (finish and not as_json):
            from strawq_workers.collected_lines import collect_to_jsonl

            with _named(out):
                summary = collect_to_jsonl(open_pool, out or "-", queue=name, consumer=consumer, **limits, **age)
            text = _collected(summary)
            if not out:
                say(text)
            return Answer(summary, text if out else "")
        return _shown(Collector(open_pool, name, consumer, **age), finish, limits, stack)


@contextlib.contextmanager
def _named(out: str) -> Iterator[None]:
    """That the file cannot be written is not a fault of the pool. What happens to stdout names itself."""
    from strawq.errors import BadInput, StorageFailed

    try:
        yield
    except BrokenPipeError:
        raise
    except (FileNotFoundError, IsADirectoryError, PermissionError, NotADirectoryError) as error:
        raise BadInput(f"{out} cannot be written: {error.strerror}; check the path") from error
    except OSError as error:
        raise StorageFailed(
            f"{out} cannot be written: {error.strerror}; run the command again, and the batch comes again"
        ) from error


def _collected(summary: CollectSummary) -> str:
    text = f"{plural(summary.groups, 'group')} in {plural(summary.batches, 'batch')}, {plural(summary.tokens, 'token')}"
    return text + ("; the queue is used up" if summary.sealed else "")


def _shown(collector: Collector, finish: bool, limits: dict[str, Any], stack: Any) -> Answer:
    """Groups as part of the answer: their batches are finished, or given back, once it is written."""
    import msgspec

    from strawq_workers.collected_lines import CollectSummary, group_record

    taken: list[Any] = []
    records: list[dict[str, Any]] = []
    wanted, sealed = limits.pop("batches"), False
    while not sealed and (not wanted or len(taken) < wanted):
        batch = collector.next_batch(**limits)
        if batch is None:
            sealed = True
        else:
            taken.append(batch)
            records += [group_record(group, batch.batch) for group in batch]
    tokens = sum(len(sample["tokens"]) for record in records for sample in record["samples"])
    metrics = taken[-1].metrics() if taken else {}
    summary = CollectSummary(len(taken), len(records), tokens, sealed, metrics)
    held = stack.pop_all()

    def settle(written: bool) -> None:
        with held:
            for batch in taken:
                if finish and written:
                    collector.finish(batch)
                else:
                    collector.give_back(batch)

    lines = "".join(msgspec.json.encode(record).decode() + "\n" for record in records)
    return Answer({**msgspec.structs.asdict(summary), "finished": finish, "records": records}, lines, settle=settle)
