"""What must never reach an engine, and what its body looks like when it may."""

from __future__ import annotations

import json

import numpy as np
import pytest

from strawq.errors import BadInput
from strawq_workers.sglang import EngineOptions, GenerateRequest, ModelShape, Sampling
from strawq_workers.sglang.info import shape_from
from strawq_workers.sglang.wire import check_request, encode_request

SHAPE = ModelShape(vocab_size=320, layers=2, topk=2, experts=8, context_tokens=512)
IDS = np.array([5, 6, 7], dtype=np.int32)


def make(ids: object = IDS, **fields: object) -> GenerateRequest:
    sampling = fields.pop("sampling", None) or Sampling(max_new_tokens=8)
    return GenerateRequest(input_ids=ids, sampling=sampling, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make(np.array([5, -1], dtype=np.int32)), r"input_ids\[1\] is -1"),
        (make(np.array([5, 320], dtype=np.int32)), r"input_ids\[1\] is 320, outside the vocabulary of 320"),
        (make(np.array([], dtype=np.int32)), "empty"),
        (make(np.array([1.5])), "integer"),
        (make(np.array([[5, 6]], dtype=np.int32)), "one-dimensional"),
        (make(sampling=Sampling(max_new_tokens=8, stop_token_ids=(320,))), r"stop_token_ids\[0\] is 320"),
        (make(sampling=Sampling(max_new_tokens=8, stop_token_ids=(2,), ignore_eos=True)), "ignore_eos"),
        (make(sampling=Sampling(max_new_tokens=-1)), "overspent"),
        (make(sampling=Sampling(max_new_tokens=8, temperature=float("nan"))), "temperature is nan"),
        (make(sampling=Sampling(max_new_tokens=8, extra={"top_p": 0.5})), "top_p"),
        (make(sampling=Sampling(max_new_tokens=8, extra={"n": 2})), "'n'"),
        (make(sampling=Sampling(max_new_tokens=510)), "exceed the context of 512"),
        (make(top_logprobs=4, logprobs=False), "top_logprobs"),
        (make(routed_experts=True, routed_start=4), r"routed_start is 4, outside \[0, 3\]"),
    ],
)
def test_what_would_harm_the_engine_or_be_ignored_is_refused_before_it_is_sent(
    request_: GenerateRequest, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        check_request(request_, SHAPE)


def test_routes_without_a_known_shape_are_refused() -> None:
    with pytest.raises(BadInput, match="layers and experts per token"):
        check_request(make(routed_experts=True), ModelShape(vocab_size=320))


def test_the_body_carries_what_was_asked_for_and_no_more() -> None:
    sampling = Sampling(max_new_tokens=8, stop=("x",), seed=3, min_p=0.1, extra={"regex": "a+"})
    body = json.loads(encode_request(make(sampling=sampling, routed_experts=True, routed_start=2), "r", stream=True))
    assert body["input_ids"] == [5, 6, 7] and body["rid"] == "r" and body["stream"] is True
    assert body["return_routed_experts"] is True and body["routed_experts_start_len"] == 2
    params = body["sampling_params"]
    assert (params["stop"], params["sampling_seed"], params["min_p"], params["regex"]) == (["x"], 3, 0.1, "a+")
    assert "stop_token_ids" not in params and "top_logprobs_num" not in body and "frequency_penalty" not in params
    plain = json.loads(encode_request(make(top_logprobs=4), "r", stream=False))
    assert plain["return_flat_raw_output_top_logprobs"] and "return_routed_experts" not in plain
    # SGLang refuses the flat form in streams.
    assert "return_flat_raw_output_top_logprobs" not in json.loads(
        encode_request(make(top_logprobs=4), "r", stream=True)
    )


def test_the_vocabulary_must_be_known_from_somewhere() -> None:
    found = shape_from([{"context_length": None}, {"text_config": {"vocab_size": 9, "num_hidden_layers": 3}}], url="u")
    assert (found.vocab_size, found.layers) == (9, 3)
    with pytest.raises(BadInput, match="ModelShape"):
        shape_from([{"vocab_size": None}], url="u")


@pytest.mark.parametrize("name", ["concurrency", "retry_s", "abort_deadline_s", "dead_after"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(BadInput, match=name):
        EngineOptions(**{name: 0})
