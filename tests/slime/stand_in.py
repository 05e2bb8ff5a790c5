"""What slime's manager, stock sampler and engine do with a data source, by their calls: no code of theirs."""

import asyncio
import importlib
import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, TOP_K, HEAD = 2, 2, 3


class Killed(Exception):
    """The process died here."""


def load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"input": f"q{i}", "label": str(i)}) + "\n" for i in range(count)))
    return path


def job_args(root: Path, **changes: Any) -> types.SimpleNamespace:
    """Flags of a job below `root`, as slime's parser would leave them."""
    usual: dict[str, Any] = {
        "save": str(root / "save"),
        "load": None,
        "ckpt_step": None,
        "prompt_data": str(root / "prompts.jsonl"),
        "input_key": "input",
        "label_key": "label",
        "metadata_key": "metadata",
        "rollout_shuffle": False,
        "rollout_seed": 42,
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "global_batch_size": 4,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "data_source_path": "strawq_workers.slime.StrawDataSource",
        "rollout_function_path": "stand_in.stock_rollout",
        "buffer_filter_path": None,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "custom_rollout_log_function_path": None,
        "use_rollout_routing_replay": False,
        "use_score_centering": False,
        "rollout_queue_lease_seconds": 20.0,
        "engine": Engine(),
    }
    if not (root / "prompts.jsonl").exists():
        root.mkdir(parents=True, exist_ok=True)
        write_prompts(root / "prompts.jsonl", 7)
    return types.SimpleNamespace(**{**usual, **changes})


def flat(entries: Any) -> Iterator[Any]:
    for entry in entries:
        if isinstance(entry, (list, tuple)):
            yield from flat(entry)
        else:
            yield entry


def status(sample: Any, word: str) -> Any:
    return type(sample.status)(word)


class Engine:
    """Answers by rule: `tokens_of(sample)` tokens in all; whoever `waits` for an abort has `cut_after` of them then."""

    def __init__(
        self,
        tokens_of: Callable[[Any], int] = lambda sample: 4,
        waits: Callable[[Any], bool] = lambda sample: False,
        cut_after: int = 2,
        version: str = "1",
    ) -> None:
        self.tokens_of, self.waits, self.cut_after, self.version = tokens_of, waits, cut_after, version
        self.requests: list[tuple[int, int]] = []
        """(index of the sample, tokens of its prefix) of each request."""

    def answer(self, args: Any, sample: Any, count: int, finish: str) -> None:
        """`count` further tokens, with everything that `args` captures of them."""
        if not sample.tokens:
            sample.tokens = [1000 + sample.group_index, 7]
        start = len(sample.tokens)
        new = [100 * (sample.index + 1) + at for at in range(sample.response_length, sample.response_length + count)]
        sample.tokens = sample.tokens + new
        sample.response_length += count
        sample.response += "w" * count
        sample.rollout_log_probs = (sample.rollout_log_probs or []) + [-float(token) / 1024 for token in new]
        if sample.loss_mask is not None:
            sample.loss_mask = sample.loss_mask + [1] * count
        if count:
            sample.weight_versions = [*sample.weight_versions, self.version]
        if args.use_rollout_routing_replay:
            rows = np.arange((len(sample.tokens) - 1) * LAYERS * TOP_K, dtype=np.int32).reshape(-1, LAYERS, TOP_K) % 60
            held = sample.rollout_routed_experts
            have = 0 if held is None else len(held)
            sample.rollout_routed_experts = rows if held is None else np.concatenate([held, rows[have:]])
        if args.use_score_centering:
            ids = np.asarray([[token, token + 1, token + 2] for token in new], np.int32).reshape(-1, HEAD)
            heads = np.full((count, HEAD), -1.5, np.float32)
            old = sample.rollout_topk_token_ids
            sample.rollout_topk_token_ids = ids if old is None else np.concatenate([old, ids])
            old = sample.rollout_topk_log_probs
            sample.rollout_topk_log_probs = heads if old is None else np.concatenate([old, heads])
        assert start + count == len(sample.tokens)
        sample.status = status(sample, finish)

    async def is_aborted(self, aborted: asyncio.Event) -> bool:
        """Whether the abort comes before a slow answer is there."""
        return await aborted.wait()

    async def generate(self, args: Any, sample: Any, aborted: asyncio.Event) -> None:
        if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
            sample.loss_mask = [0] * sample.response_length
        if sample.status.value in ("completed", "truncated") and sample.reward is not None:
            return
        assert sample.status.value in ("pending", "aborted"), sample.status
        if aborted.is_set():
            sample.status = status(sample, "aborted")
            return
        self.requests.append((sample.index, sample.response_length))
        left = self.tokens_of(sample) - sample.response_length
        if self.waits(sample) and await self.is_aborted(aborted):
            self.answer(args, sample, min(left, self.cut_after), "aborted")
            return
        await asyncio.sleep(0)
        self.answer(args, sample, left, "completed")
        sample.reward = float(sample.index % 2)


async def _sample(args: Any, get_samples: Callable[[int], Any]) -> tuple[list[Any], list[Any]]:
    """slime's synchronous sampler: over-sample, keep what the filter keeps, abort the rest."""
    verdict = load_function(args.dynamic_sampling_filter_path) if args.dynamic_sampling_filter_path else None
    aborted = asyncio.Event()
    pending: set[Any] = set()
    kept: list[Any] = []

    async def run(group: Any) -> Any:
        await asyncio.gather(*(args.engine.generate(args, sample, aborted) for sample in flat(group)))
        return group

    while len(kept) < args.rollout_batch_size:
        while len(pending) + len(kept) < args.rollout_batch_size:
            groups = get_samples(args.over_sampling_batch_size)
            assert groups, "the data ended"
            pending |= {asyncio.ensure_future(run(group)) for group in groups}
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=lambda task: task.result()[0].index):
            group = task.result()
            if verdict is not None and not verdict(args, group).keep:
                continue
            if len(kept) < args.rollout_batch_size:
                kept.append(group)
    aborted.set()
    unfinished = list(await asyncio.gather(*pending))
    kept.sort(key=lambda group: group[0].index)
    if args.rollout_sample_filter_path:
        load_function(args.rollout_sample_filter_path)(args, kept)
    returned = [
        group
        for group in unfinished
        if args.partial_rollout and any(s.status.value == "aborted" and s.response_length for s in group)
    ]
    return kept, returned


def stock_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    if evaluation:
        return {"held-out": {"rewards": [1.0], "truncated": [False], "samples": []}}
    kept, aborted = asyncio.run(_sample(args, data_source.get_samples))
    data_source.add_samples(aborted)
    return kept


class Manager:
    """slime's rollout manager, as far as a data source sees it. `tells`: whether this generation of it calls
    `--custom-rollout-log-function-path`."""

    def __init__(self, args: Any, tells: bool = True) -> None:
        self.args, self.tells = args, tells
        self.data_source = load_function(args.data_source_path)(args)
        self.rollout = load_function(args.rollout_function_path)

    def rollouts_per_epoch(self) -> int:
        return len(self.data_source) // int(self.args.rollout_batch_size)

    def generate(self, rollout_id: int) -> list[Any]:
        """The samples that are trained on."""
        output = self.rollout(self.args, rollout_id, self.data_source, evaluation=False)
        samples = list(flat(getattr(output, "samples", output)))
        trimmed = samples[: len(samples) // self.args.global_batch_size * self.args.global_batch_size]
        if self.tells and self.args.custom_rollout_log_function_path:
            load_function(self.args.custom_rollout_log_function_path)(rollout_id, self.args, trimmed, None, 1.0)
        return trimmed

    def eval(self, rollout_id: int) -> Any:
        return self.rollout(self.args, rollout_id, self.data_source, evaluation=True)

    def save(self, rollout_id: int) -> None:
        self.data_source.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        self.data_source.load(rollout_id)

    def dispose(self) -> None:
        close = getattr(self.data_source, "close", None)
        if close is not None:
            close()


def save_model(args: Any, rollout_id: int, content: bytes = b"weights") -> None:
    """What the trainer leaves in the save directory."""
    directory = Path(args.save) / f"iter_{rollout_id:07d}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.bin").write_bytes(content + str(rollout_id).encode())
    (Path(args.save) / "latest_checkpointed_iteration.txt").write_text(str(rollout_id))
