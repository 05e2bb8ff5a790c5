"""Recorded exchanges with a real SGLang, and what a test needs to replay one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from strawq_workers.sglang.segment import Segment, segment_of
from strawq_workers.sglang.stream import Accumulator, FrameParser
from strawq_workers.sglang.wire import GenerateRequest, ModelShape, Sampling, decode_chunk

FOLDER = Path(__file__).parents[2] / "contracts" / "sglang"
TINY = ModelShape(vocab_size=320, layers=2, topk=2, experts=8, context_tokens=512)


def exchange(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def body_of(name: str) -> bytes:
    """The recorded answer as bytes: JSON is encoded again, text (streams, refusals) is as it was."""
    response = exchange(name)["response"]
    return response.encode() if isinstance(response, str) else json.dumps(response).encode()


def request_of(name: str) -> GenerateRequest:
    sent = exchange(name)["request"]["body"]
    return GenerateRequest(
        input_ids=np.array(sent["input_ids"], dtype=np.int32),
        sampling=Sampling(max_new_tokens=sent["sampling_params"].get("max_new_tokens", 128)),
        logprobs=bool(sent.get("return_logprob")),
        top_logprobs=sent.get("top_logprobs_num", 0),
        routed_experts=bool(sent.get("return_routed_experts")),
        routed_start=sent.get("routed_experts_start_len", 0),
    )


def accumulate(body: bytes, cut: int = 1 << 30) -> Accumulator:
    """Folds a whole answer, or a stream that arrives in pieces of `cut` bytes."""
    answer = Accumulator(what="capture")
    if not body.startswith(b"data:"):
        answer.add(decode_chunk(body, what="capture"))
        return answer
    frames = FrameParser()
    for at in range(0, len(body), cut):
        for payload in frames.feed(body[at : at + cut]):
            answer.add(decode_chunk(payload, what="capture"))
    assert frames.done
    return answer


def segment(body: bytes, request: GenerateRequest, *, cut: int = 1 << 30, before: str = "", after: str = "") -> Segment:
    answer = accumulate(body, cut)
    rid = answer.last.id or ""
    return segment_of(answer, request, TINY, rid=rid, before=before, after=after, url="http://engine")
