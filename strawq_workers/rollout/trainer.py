"""A reference trainer: it consumes batches, publishes versions and takes checkpoints, and changes no weight.

The rule: the order is a real trainer's. A batch is trained; every `save_interval` rollouts the model's files are
written and then the data source is saved with them; then, while generation stands still, the engines get the next
version, which is the number of rollouts that were trained. A batch counts as trained by that save, or at once where
nothing is saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from strawq.errors import BadInput, StorageFailed
from strawq_workers.durable import replace_file, sync_directory
from strawq_workers.rollout import close_rollouts, generate_rollout, generate_rollout_fully_async
from strawq_workers.rollout.debug_data import archive_path, load_groups, require_absent, save_groups
from strawq_workers.rollout.engine_versions import set_engine_version
from strawq_workers.rollout.in_background import InBackground
from strawq_workers.rollout.rewards import mean_reward, reward_values
from strawq_workers.rollout.settings import batch_size, straw_source
from strawq_workers.rollout.station import station_of
from strawq_workers.rollout.updates import weight_update
from strawq_workers.slime.arguments import rollout_function_path
from strawq_workers.slime.buffer_file import in_words
from strawq_workers.slime.handed import flat
from strawq_workers.slime.lineage import TRACKER, read_tracker
from strawq_workers.slime.places import expanded
from strawq_workers.worker.hooks import load_hook

log = logging.getLogger("strawq.rollout")

RolloutFunction = Callable[..., Any]


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of the run. `version` is the policy that the engines serve after it; `prompts` the group indices of
    its batch, in order; `saved` whether a checkpoint was taken; `reward_mean` that of the rewards that are numbers,
    or of their entries `--reward-key`. Tokens are response tokens, `tokens_masked` those with loss mask 0."""

    rollout_id: int
    groups: int
    samples: int
    tokens: int
    tokens_masked: int
    reward_mean: float | None
    version: str
    prompts: tuple[Any, ...]
    saved: bool
    seconds: float
    metrics: dict[str, Any]
    evaluation: dict[str, Any] | None = None


class TrainingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `data_ended`: the data were used up before `num_rollout`. `resumed`: what the data source said of
    its load."""

    mode: str
    transport: str
    start_rollout_id: int
    rollouts: tuple[Trained, ...]
    data_ended: bool
    resumed: str
    seconds: float


class ReferenceTrainer:
    """One run over a data source. `told` gets each rollout as it ends."""

    def __init__(self, args: Any, data_source: Any, mode: str, told: Callable[[Trained], None]) -> None:
        self.args = args
        self.data_source = data_source
        self.mode = mode
        self.told = told
        self._generate = rollout_function(str(getattr(args, "rollout_function_path", None) or ""), mode)
        self._answer = rollout_function(rollout_function_path(args, evaluation=True), "sync", "--eval-function-path")
        self._trains = not getattr(args, "debug_rollout_only", False)
        self._warned = False

    def run(self) -> TrainingSummary:
        """Train from the checkpoint that the data source finds to `num_rollout`. Whatever it raises, generation has
        ended and everything in hand has been given back."""
        started = time.monotonic()
        total = num_rollout(self.args, len(self.data_source))
        try:
            first, resumed = self._load()
            self._spare(first, resumed)
            self._publish(first)
            done: list[Trained] = []
            for rollout_id in range(first, total):
                trained = self._rollout(rollout_id)
                if trained is None:
                    break
                done.append(trained)
                self.told(trained)
                if trained.groups < batch_size(self.args):
                    break
        finally:
            close_rollouts(self.data_source)
        return TrainingSummary(
            mode=self.mode,
            transport=str(getattr(self.args, "rollout_data_transport", "")),
            start_rollout_id=first,
            rollouts=tuple(done),
            data_ended=len(done) < max(0, total - first),
            resumed=resumed,
            seconds=round(time.monotonic() - started, 3),
        )

    def _load(self) -> tuple[int, str]:
        """The first rollout of this run, with the data source where the model is."""
        asked = getattr(self.args, "start_rollout_id", None)
        step = getattr(self.args, "ckpt_step", None)
        known = int(step) if step is not None else None if asked is None else int(asked) - 1
        if straw_source(self.data_source) is not None:
            restored = self.data_source.load(known)
            return int(restored.rollout_id) + 1, str(restored.mode)
        if step is not None:
            require_step(self.args, int(step))
        if known is None:
            known = newest_model(self.args)
        known = -1 if known is None else known
        # A data source of the user's own may not say whether it found anything.
        found = self.data_source.load(known) if known >= 0 or getattr(self.args, "load", None) else False
        return known + 1, "new" if found is False else "loaded"

    def _spare(self, first: int, resumed: str) -> None:
        """Nothing that was paid for is overwritten unless the run goes on from where it lies."""
        save = getattr(self.args, "save", None)
        if not (save and getattr(self.args, "save_interval", None) and self._trains):
            return
        base = expanded(save)
        later = [step for step in saved_steps(base) if step >= first]
        if not later:
            return
        steps = in_words(later)
        load = getattr(self.args, "load", None)
        straw = straw_source(self.data_source) is not None
        if resumed != "new" if straw else load and expanded(load).resolve() == base.resolve():
            log.warning("checkpoints %s of %s are not gone on from: this run writes them again", steps, base)
            return
        remedy = "" if straw else f"go on from them with --load {save}, or "
        raise BadInput(
            f"--save {save} holds checkpoints {steps} already, which this run would overwrite: {remedy}choose another "
            "--save"
        )

    def _rollout(self, rollout_id: int) -> Trained | None:
        started = time.monotonic()
        kept = getattr(self.args, "save_debug_rollout_data", None)
        if kept:
            require_absent(archive_path(kept, rollout_id))
        output = self._generate(self.args, rollout_id, self.data_source)
        groups = output.samples
        if not groups:
            return None
        reward_mean = mean_reward(reward_values(self.args, samples_in(groups)))  # before anything counts as trained
        if kept:
            save_groups(archive_path(kept, rollout_id), groups)
        saved = self._due("save_interval", rollout_id) and self._save(rollout_id, samples_in(groups))
        # Before the batch is finished: its room is for groups of the new version.
        self._publish(rollout_id + 1)
        if not saved and straw_source(self.data_source) is not None and not getattr(self.args, "save_interval", None):
            self.data_source.finish(rollout_id)
        return trained_on(
            groups,
            rollout_id=rollout_id,
            reward_mean=reward_mean,
            version=str(rollout_id + 1) if self._trains else "",
            saved=saved,
            metrics=dict(output.metrics or {}),
            evaluation=self._evaluate(rollout_id) if self._due("eval_interval", rollout_id) else None,
            started=started,
        )

    def _due(self, interval: str, rollout_id: int) -> bool:
        every = int(getattr(self.args, interval, None) or 0)
        return every > 0 and (rollout_id + 1) % every == 0

    def _save(self, rollout_id: int, samples: list[Any]) -> bool:
        """The model's files, then the data source's, then the tracker, as Megatron's trainer has them."""
        base = getattr(self.args, "save", None)
        if not base or not self._trains:
            return False
        root = expanded(base)
        station = station_of(self.data_source)
        if isinstance(station.running, InBackground):
            # What is in its hands is in no state of an in-memory data source: it goes back first.
            station.stop_running()
        with _written(root):
            write_model(root, rollout_id, samples)
        self.data_source.save(rollout_id)
        with _written(root):
            replace_file(root / TRACKER, str(rollout_id).encode())
        return True

    def _evaluate(self, rollout_id: int) -> dict[str, Any]:
        output = self._answer(self.args, rollout_id, self.data_source, evaluation=True)
        return dict(output.metrics or {})

    def _publish(self, version: int) -> None:
        if not self._trains:
            return
        with weight_update(self.data_source, version):
            set_engine_version(self.args, self.data_source, str(version), self._warn)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s", text)


def replay(args: Any, told: Callable[[Trained], None]) -> TrainingSummary:
    """Train on archives of an earlier run (`--load-debug-rollout-data`) in place of generating: no engine, no data
    source, no version."""
    started, done = time.monotonic(), []
    first = int(getattr(args, "start_rollout_id", None) or 0)
    for rollout_id in range(first, num_rollout(args, 0)):
        path = archive_path(args.load_debug_rollout_data, rollout_id)
        began = time.monotonic()
        groups = load_groups(path, args.load_debug_rollout_data_subsample)
        reward_mean = mean_reward(reward_values(args, samples_in(groups)))
        trained = trained_on(
            groups, rollout_id=rollout_id, reward_mean=reward_mean, version="", saved=False, metrics={},
            evaluation=None, started=began,
        )  # fmt: skip
        done.append(trained)
        told(trained)
    return TrainingSummary(
        mode="replay",
        transport="archives",
        start_rollout_id=first,
        rollouts=tuple(done),
        data_ended=False,
        resumed="",
        seconds=round(time.monotonic() - started, 3),
    )


def trained_on(groups: list[list[Any]], *, started: float, **fields: Any) -> Trained:
    """What the run says of a batch."""
    samples = samples_in(groups)
    return Trained(
        groups=len(groups),
        samples=len(samples),
        tokens=sum(sample.response_length for sample in samples),
        tokens_masked=sum((sample.loss_mask or []).count(0) for sample in samples),
        prompts=tuple(next(flat(group)).group_index for group in groups),
        seconds=round(time.monotonic() - started, 3),
        **fields,
    )


def samples_in(groups: list[list[Any]]) -> list[Any]:
    """The samples of a batch, one after the other."""
    return [sample for group in groups for sample in flat(group)]


def rollout_function(path: str, mode: str, option: str = "--rollout-function-path") -> RolloutFunction:
    """The user's rollout function at this path, which `option` names, else that of the mode."""
    if path and not path.startswith("strawq_workers."):
        return load_hook(path, option)
    return generate_rollout_fully_async if mode == "fully-async" else generate_rollout


def num_rollout(args: Any, prompts: int) -> int:
    """How many rollouts the run has. `BadInput` if neither --num-rollout nor --num-epoch says."""
    if getattr(args, "num_rollout", None):
        return int(args.num_rollout)
    if getattr(args, "num_epoch", None) and prompts:
        return int(args.num_epoch) * (prompts // batch_size(args))
    raise BadInput("one of --num-rollout and --num-epoch (with --prompt-data) is required")


def newest_model(args: Any) -> int | None:
    """The rollout that the tracker file of --load names; None if there is none."""
    base = getattr(args, "load", None)
    return read_tracker([expanded(base)]) if base else None


def saved_steps(base: Path) -> list[int]:
    """Rollouts after which a model was saved there, in order."""
    names = (path.name for path in base.glob("iter_*"))
    return sorted(int(name[5:]) for name in names if name[5:].isascii() and name[5:].isdigit())


def require_step(args: Any, step: int) -> None:
    """`BadInput` if no model of that step was saved in --load."""
    base = getattr(args, "load", None)
    if not base:
        raise BadInput(f"--ckpt-step {step} needs --load, the directory of the checkpoints")
    steps = saved_steps(expanded(base))
    if step not in steps:
        raise BadInput(f"--ckpt-step {step}: {base} has no checkpoint of that step (there are: {in_words(steps)})")


@contextlib.contextmanager
def _written(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"--save {root} cannot be written: {error.strerror or error}") from error


def write_model(root: Path, rollout_id: int, samples: list[Any]) -> None:
    """A stand-in for a model checkpoint: what it was trained on last, as a digest."""
    digest = hashlib.sha256(msgspec.json.encode([list(sample.tokens) for sample in samples])).hexdigest()
    directory = root / f"iter_{rollout_id:07d}"
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / "reference.json", json.dumps({"rollout_id": rollout_id, "trained_on": digest}).encode())
    sync_directory(root)
