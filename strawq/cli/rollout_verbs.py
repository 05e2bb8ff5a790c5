"""The verb that runs the rollout side of a training with slime's flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from strawq.cli.app import verb
from strawq.cli.output import Answer, plural, say

if TYPE_CHECKING:
    from strawq_workers.rollout.trainer import Trained, TrainingSummary


@verb("rollout", takes_others=True)
def rollout(
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="FLAGS", help="slime's rollout flags (see --flags).", show_default=False),
    ] = None,
    mode: Annotated[
        Literal["sync", "partial", "fully-async"] | None,
        typer.Option("--mode", show_default="by the flags", help="How batches come about."),
    ] = None,
    engine: Annotated[
        list[str],
        typer.Option("--engine", "-e", metavar="URL", show_default=False, help="Engine or router; may be repeated."),
    ] = [],  # noqa: B006 (typer copies it)
    embedded_engine: Annotated[
        bool, typer.Option("--embedded-engine", help="Start strawq's stand-in engine for this run.")
    ] = False,
    show_flags: Annotated[bool, typer.Option("--flags", help="Print slime's flags that are understood.")] = False,
) -> Answer:
    """Roll out with a reference trainer: strawq without slime.

    FLAGS are slime's: --rollout-data-transport straw|object-store, --prompt-data, --rollout-batch-size,
    --n-samples-per-prompt, --num-rollout, --partial-rollout, --save, --load, --ckpt-step, and so on; `strawq rollout
    --flags` lists them. Under straw the pool is --rollout-data-dir, or SAVE/rollout_data. The trainer consumes batches,
    gives the engines a new policy version after each, and takes checkpoints every --save-interval rollouts; it changes
    no weight. Ctrl-C and SIGTERM give everything in hand back.
    Exit code 4 if no engine answers or no worker is left.
    """
    from strawq.cli.ending import reached
    from strawq.cli.work_command import work_command
    from strawq_workers.rollout.launch import parser, run_rollouts

    if show_flags:
        text = parser().format_help()
        return Answer({"flags": text}, text)
    rollouts: list[Trained] = []
    reached(rollouts=rollouts)

    def told(trained: Trained) -> None:
        rollouts.append(trained)
        say(_line(trained))

    summary = run_rollouts(
        flags or [],
        mode or "",
        engine,
        embedded_engine,
        told=told,
        say=say,
        work_command=work_command,
    )
    return Answer(summary, _text(summary))


def _line(trained: Trained) -> str:
    parts = [
        f"rollout {trained.rollout_id}: {plural(trained.groups, 'group')}",
        plural(trained.tokens, "token"),
        f"{trained.metrics.get('rollout/resumed_tokens', 0):.0f} resumed",
    ]
    if trained.reward_mean is not None:
        parts.append(f"reward {trained.reward_mean:.3g}")
    if "rollout/staleness/max" in trained.metrics:
        parts.append(f"staleness up to {trained.metrics['rollout/staleness/max']:.0f}")
    for name, value in (trained.evaluation or {}).items():
        if name.count("/") == 1:
            parts.append(f"{name} {value:.3g}")
    parts += ["saved"] if trained.saved else []
    parts += [f"then version {trained.version}"] if trained.version else []
    return f"{', '.join(parts)} ({trained.seconds:.1f} s)"


def _text(summary: TrainingSummary) -> str:
    groups = sum(trained.groups for trained in summary.rollouts)
    tokens = sum(trained.tokens for trained in summary.rollouts)
    text = (
        f"{plural(len(summary.rollouts), 'rollout')} ({summary.mode}, {summary.transport}), {plural(groups, 'group')}, "
        f"{plural(tokens, 'token')} in {summary.seconds:.1f} s"
    )
    if summary.start_rollout_id:
        text += f"; from rollout {summary.start_rollout_id} on ({summary.resumed})"
    return text + ("; the data have ended" if summary.data_ended else "")
