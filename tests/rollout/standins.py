"""Stand-ins for the codec, the arguments and the pool data source, until theirs are there."""

import threading
from types import ModuleType

import numpy as np

from strawq import Pool, Prompt
from strawq.errors import TryAgain
from strawq.samples import Group
from strawq.samples import Sample as Kept
from strawq_workers.collector import Collector
from strawq_workers.slime.sample import Sample, Status
from strawq_workers.worker.options import WorkerOptions


def prompt_of(sample, group_index):
    return Prompt(group_id=str(group_index), text=sample.prompt, label=sample.label, payload=str(group_index).encode())


def group_of(task_id, prompt, samples):
    kept = []
    for at, sample in enumerate(samples):
        count = sample.response_length
        kept.append(
            Kept(
                at,
                tokens=np.asarray(sample.tokens[len(sample.tokens) - count :] if count else [], np.int32),
                logprobs=None if sample.rollout_log_probs is None else np.asarray(sample.rollout_log_probs, np.float32),
                versions=getattr(sample, "spans", ()),
                segments=getattr(sample, "segments", ()),
                prompt_tokens=np.asarray(sample.tokens[: len(sample.tokens) - count], np.int32) if count else None,
                status=sample.status.value,
                reward=sample.reward,
                payload=str(sample.index).encode(),
            )
        )
    return Group(task_id, prompt, tuple(kept))


def samples_of(group, cls):
    made = []
    for kept in group.samples:
        prompt_tokens = [] if kept.prompt_tokens is None else kept.prompt_tokens.tolist()
        sample = cls(
            group_index=int(group.prompt.payload),
            index=int(kept.payload) if kept.payload is not None else kept.index,
            prompt=group.prompt.text,
            tokens=prompt_tokens + kept.tokens.tolist() if len(kept.tokens) else [],
            response_length=len(kept.tokens),
            rollout_log_probs=None if kept.logprobs is None else kept.logprobs.tolist(),
            weight_versions=[span.version for span in kept.versions],
            status=Status(kept.status),
            reward=kept.reward,
        )
        sample.spans, sample.segments = kept.versions, kept.segments
        made.append(sample)
    return made


def worker_options(args, engines):
    return WorkerOptions(
        engines=tuple(engines),
        samples=args.n_samples_per_prompt,
        max_new_tokens=args.rollout_max_response_len,
        concurrency=args.sglang_server_concurrency,
        ignore_eos=True,
        partial_rollout=args.partial_rollout,
        reward=args.custom_rm_path or "",
        dynamic_filter=args.dynamic_sampling_filter_path or "",
        engine_timeout_s=5.0,
        abort_timeout_s=10.0,
        save_seconds=0.0,
    )


def module(name, *functions):
    made = ModuleType(name)
    for function in functions:
        setattr(made, function.__name__, function)
    return made


class StrawStandIn:
    """What the rollout functions use of `StrawDataSource`."""

    def __init__(self, pool: Pool, prompts: int, group_size: int) -> None:
        self.pool = pool
        self.queue_name = "rollout"
        self.left = list(range(prompts))
        self.group_size = group_size
        self.collector = Collector(pool)
        self.batches = {}
        self.lock = threading.Lock()

    def fill(self, count):
        with self.lock:
            counts = self.pool.queue().counts()
            wanted = max(0, count - counts.fresh_pending - counts.partial_pending)
            rows, self.left = self.left[:wanted], self.left[wanted:]
            if rows:
                self.pool.queue().submit(
                    [Prompt(text=f"prompt {row}", payload=str(row).encode(), samples=self.group_size) for row in rows]
                )
            return len(rows)

    def collect(self, rollout_id, count, *, timeout=None, fewer=False):
        if rollout_id not in self.batches:
            batch = self.collector.next_batch(count, timeout=timeout, fewer=fewer)
            if batch is None:
                raise TryAgain("sealed")
            self.batches[rollout_id] = batch
        return [samples_of(group, Sample) for group in self.batches[rollout_id]]

    def finish(self, rollout_id):
        self.collector.finish(self.batches.pop(rollout_id))

    def batch_metrics(self, rollout_id):
        return self.batches[rollout_id].metrics()

    def close(self):
        self.pool.close()
