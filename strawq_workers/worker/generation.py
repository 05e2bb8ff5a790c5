"""One sample, request by request: what to ask next, and what an answer adds.

The rule: the budget belongs to the sample and not to the request. A sample with n response tokens asks for
`max_new_tokens` - n more, and not beyond the context; exactly at the limit it is truncated without a request; one that
has stopped is complete. An answer is joined part by part and checked before it counts, and what was there is never
changed by it, except the loss mask where masking was asked for.

Pure: no clock, no network.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from strawq.alignment import check_sample
from strawq.errors import BadInput, Misaligned
from strawq.model import VersionSpan
from strawq.samples import NO_POLICY, Int32, Sample, SegmentInfo, TopK, extend
from strawq_workers.sglang.segment import Segment
from strawq_workers.sglang.wire import GenerateRequest, Sampling
from strawq_workers.worker.options import WorkerOptions

FINISHED = ("completed", "truncated", "failed")
MIXED_SAMPLING = "mixed_sampling"
"""Key of `Sample.metadata`: true where a prefix was continued under other sampling options."""


class Plan(msgspec.Struct, frozen=True):
    """What all samples of a worker share. `context_tokens` bounds prompt + response, 0 if nobody knows a bound;
    `record` is what is stored of the sampling options with each segment."""

    options: WorkerOptions
    context_tokens: int
    record: dict[str, Any]

    @classmethod
    def of(cls, options: WorkerOptions, engine_context: int) -> Plan:
        given = [bound for bound in (options.max_context_tokens, engine_context) if bound]
        return cls(options, min(given, default=0), sampling_record(options.sampling(options.max_new_tokens)))


def sampling_record(sampling: Sampling) -> dict[str, Any]:
    """The options that decide the distribution, as JSON values. The budget is no part of them: it shrinks."""
    record: dict[str, Any] = msgspec.to_builtins(sampling)
    del record["max_new_tokens"]
    always = ("temperature", "top_p", "top_k")
    return {name: value for name, value in record.items() if name in always or value != _PLAIN[name]}


_PLAIN: dict[str, Any] = msgspec.to_builtins(Sampling(max_new_tokens=0))


def finished(sample: Sample) -> bool:
    """Whether nothing more is to be generated for the sample."""
    return sample.status in FINISHED


def generated_tokens(sample: Sample) -> int:
    """Response tokens that came from engines: tool output and the like is not among them."""
    return sum(info.end - info.start for info in sample.segments)


def budget_left(sample: Sample, prompt_tokens: int, plan: Plan) -> int:
    """Response tokens that the sample may still get."""
    left = plan.options.max_new_tokens - len(sample.tokens)
    if plan.context_tokens:
        left = min(left, plan.context_tokens - prompt_tokens - len(sample.tokens))
    return max(0, left)


def next_step(sample: Sample, prompt: Int32, plan: Plan) -> GenerateRequest | Sample:
    """The request that continues the sample, or the sample as it has ended. `BadInput` if the prompt alone fills the
    context."""
    if finished(sample):
        return sample
    options, count = plan.options, len(sample.tokens)
    if count and not options.ignore_eos and int(sample.tokens[-1]) in options.stop_token_ids:
        return msgspec.structs.replace(sample, status="completed", finish_reason="stop")
    left = budget_left(sample, len(prompt), plan)
    if left == 0 and count == 0:
        raise BadInput(
            f"sample {sample.index}: the prompt of {len(prompt)} tokens leaves no room for an answer in a context of "
            f"{plan.context_tokens} tokens"
        )
    if left == 0:
        return msgspec.structs.replace(sample, status="truncated", finish_reason="length")
    asked = min(left, options.save_tokens) if options.save_tokens else left
    return GenerateRequest(
        input_ids=np.concatenate([prompt, sample.tokens]),
        sampling=options.sampling(asked),
        logprobs=options.logprobs,
        top_logprobs=options.top_logprobs,
        routed_experts=options.routed_experts,
        # The last token before this request was never fed back: its row comes with the new ones.
        routed_start=len(prompt) + count - 1 if options.routed_experts and count else 0,
    )


def take_segment(sample: Sample, segment: Segment, prompt_tokens: int, plan: Plan) -> Sample:
    """The sample with the answer's tokens after its own. `Misaligned` or `BadInput` if they do not join; the sample
    given is still good then."""
    if segment.tokens == 0 and segment.finish == "abort":
        return sample
    joined = extend(sample, _part(sample.index, segment, plan.record, plan))
    if changed_sampling(sample, plan):
        joined = msgspec.structs.replace(joined, metadata={**joined.metadata, MIXED_SAMPLING: True})
    joined = _with_status(joined, segment, prompt_tokens, plan)
    if plan.options.mask_offpolicy_in_partial_rollout:
        joined = mask_older(joined)
    check_sample(joined, prompt_tokens, since=len(sample.tokens))
    return joined


def take_turn(
    sample: Sample, segment: Segment, unread: Int32, prompt_tokens: int, plan: Plan, sampling: Sampling
) -> Sample:
    """As `take_segment`, for a turn of a generate function: the answer follows the `unread` tokens (int32 [k]), which
    no policy made and whose R3 rows came with it. The sample has not ended: that is the function's to say."""
    if segment.tokens == 0:
        return sample
    more = _part(sample.index, segment, sampling_record(sampling), plan)
    if len(unread):
        rows = more.r3
        more = extend(no_policy(sample.index, unread, plan), msgspec.structs.replace(more, r3=None))
        more = msgspec.structs.replace(more, r3=rows)
    joined = msgspec.structs.replace(extend(sample, more), status="aborted", finish_reason="")
    if plan.options.mask_offpolicy_in_partial_rollout:
        joined = mask_older(joined)
    check_sample(joined, prompt_tokens, since=len(sample.tokens))
    return joined


def no_policy(index: int, tokens: Int32, plan: Plan) -> Sample:
    """Tokens (int32 [k]) that no policy made, as a sample without R3 rows: loss mask 0, log-prob 0.0, SC rows that say
    nothing (ids 0 to w - 1, each with log-prob -log w)."""
    count, width = len(tokens), plan.options.top_logprobs
    rows = np.tile(np.arange(width, dtype=np.int32), (count, 1))
    return Sample(
        index=index,
        tokens=tokens,
        logprobs=np.zeros(count, np.float32) if plan.options.logprobs else None,
        loss_mask=np.zeros(count, np.uint8),
        versions=(VersionSpan(0, count, NO_POLICY),),
        sc=TopK(rows, np.full(rows.shape, -np.log(width), np.float32)) if width else None,
    )


def _part(index: int, segment: Segment, record: dict[str, Any], plan: Plan) -> Sample:
    """The answer to one request, as a sample of its own."""
    count = segment.tokens
    return Sample(
        index=index,
        tokens=segment.output_ids,
        logprobs=segment.logprobs,
        versions=segment.versions,
        segments=(SegmentInfo(0, count, record, plan.options.logprob_mode),) if count else (),
        r3=segment.routed_experts if count else None,
        sc=None
        if segment.top_ids is None or segment.top_logprobs is None
        else TopK(segment.top_ids, segment.top_logprobs),
    )


def _with_status(sample: Sample, segment: Segment, prompt_tokens: int, plan: Plan) -> Sample:
    if segment.finish == "stop":
        return msgspec.structs.replace(sample, status="completed", finish_reason="stop")
    if segment.finish == "length" and budget_left(sample, prompt_tokens, plan) == 0:
        return msgspec.structs.replace(sample, status="truncated", finish_reason="length")
    # Not the end: the engine was stopped, or the request was for a part of the budget.
    return msgspec.structs.replace(sample, status="aborted", finish_reason="")


def mask_older(sample: Sample) -> Sample:
    """The sample with loss mask 0 on every token that the policy of its newest tokens did not surely make."""
    start = newest_from(sample)
    if not sample.loss_mask[:start].any():
        return sample
    mask = sample.loss_mask.copy()
    mask[:start] = 0
    return msgspec.structs.replace(sample, loss_mask=mask)


def newest_from(sample: Sample) -> int:
    """The first response token of the newest policy: of the last version span and those before it that are of the same
    version or that no policy made, or of the last request where the version is not known or mixed."""
    if not sample.versions:
        return 0
    last: VersionSpan = sample.versions[-1]
    if last.version and not last.last:
        start = last.start
        for span in reversed(sample.versions[:-1]):
            if (span.version, span.last) == (last.version, ""):
                start = span.start
            elif span.version or span.last or sample.loss_mask[span.start : span.end].any():
                break
        return start
    return sample.segments[-1].start if sample.segments else last.start


def changed_sampling(sample: Sample, plan: Plan) -> str:
    """What differs between the options that sampled the prefix and this worker's; empty if nothing."""
    for info in sample.segments:
        if info.end <= info.start:
            continue
        names = sorted(
            name for name in {*info.sampling, *plan.record} if info.sampling.get(name) != plan.record.get(name)
        )
        if names:
            told = [f"{name} {info.sampling.get(name)} there, {plan.record.get(name)} here" for name in names]
            return "; ".join(told)
        if info.logprob_mode != plan.options.logprob_mode:
            return f"log-probs {info.logprob_mode or 'unknown'} there, {plan.options.logprob_mode or 'unknown'} here"
    return ""


def _option_of(name: str, sample: Sample) -> str:
    """How `strawq work` captures what the sample has of that name, or leaves it out."""
    if name == "log-probs":
        return f"{'with' if sample.logprobs is None else 'without'} --no-logprobs"
    if name == "R3 rows":
        return f"{'without' if sample.r3 is None else 'with'} --routed-experts"
    return f"with --top-logprobs {sample.sc.ids.shape[1] if isinstance(sample.sc, TopK) else 0}"


def check_prefix(sample: Sample, prompt_tokens: int, plan: Plan) -> None:
    """Refuse a saved prefix that this worker cannot continue. `BadInput` for other sampling options, `Misaligned` for
    captures that it has and the worker does not take, or the reverse."""
    count, options = len(sample.tokens), plan.options
    if finished(sample) or count == 0:
        return
    differs = changed_sampling(sample, plan)
    if differs and options.changed_sampling == "refuse" and not options.generate:
        raise BadInput(
            f"sample {sample.index}: its {count} saved tokens were sampled with other options ({differs}): run the "
            "worker with the options of the prefix, or with --changed-sampling mark"
        )
    wanted = {"log-probs": options.logprobs, "R3 rows": options.routed_experts, "SC rows": options.top_logprobs > 0}
    there = {"log-probs": sample.logprobs, "R3 rows": sample.r3, "SC rows": sample.sc}
    for name, want in wanted.items():
        if want != (there[name] is not None):
            raise Misaligned(
                f"sample {sample.index}: its {count} saved tokens {'lack' if want else 'have'} {name}, and this worker "
                f"is {'to' if want else 'not to'} capture them: run it {_option_of(name, sample)}, as "
                "the prefix was made"
            )
    if isinstance(sample.sc, TopK) and sample.sc.ids.shape[1] != options.top_logprobs:
        raise Misaligned(
            f"sample {sample.index}: SC rows are of {sample.sc.ids.shape[1]} tokens, and top_logprobs is "
            f"{options.top_logprobs}"
        )
    check_sample(sample, prompt_tokens, since=count)
