"""Recorded exchanges with SGLang that need no second request, sent to the engine: same status, keys and messages."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.conftest import Client, StartEngine

CAPTURES = Path(__file__).parents[2] / "contracts" / "sglang"

# What SGLang was started with, by the first part of a capture's name.
DENSE: dict[str, Any] = {"context_length": 512}
MOE: dict[str, Any] = {"context_length": 512, "enable_return_routed_experts": True}
NO_TOKENIZER: dict[str, Any] = {"skip_tokenizer_init": True, "api_key": "k", "weight_version": "w0"}
# Only sent by an SGLang that was started with request tracing.
TRACING = {
    "storage_prefetch_wait",
    "storage_staging_wait",
    "forward_entry_time",
    "prefill_finished_time",
    "queue_time",
    "request_received_ts",
    "first_token_latency",
    "api_server_dispatch_finish_ts",
    "request_finished_ts",
    "decode_throughput",
}
# The stop token or string of the recording is what another model said: fields are compared, not how it ended.
OTHER_END = {"q2_gen_stop_token", "q2_gen_stop_token_notrim", "q2_gen_stop_str"}


def load(name: str) -> dict[str, Any]:
    capture: dict[str, Any] = msgspec.json.decode((CAPTURES / f"{name}.json").read_bytes())
    return capture


def names(*patterns: str, without: tuple[str, ...] = ()) -> list[str]:
    found = sorted({path.stem for pattern in patterns for path in CAPTURES.glob(f"{pattern}.json")} - set(without))
    assert found, patterns
    return found


def kind(value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return type(value).__name__
    return "number" if isinstance(value, int | float) else type(value).__name__


def assert_alike(path: str, ours: Any, theirs: Any) -> None:
    """Same type and keys, in the same order; lists alike in their first entries. Cached prefixes may differ."""
    if path.endswith("cached_tokens_details"):
        assert ours is None or list(ours) == ["device", "host"], path
        return
    assert kind(ours) == kind(theirs), (path, ours, theirs)
    if isinstance(theirs, dict):
        assert list(ours) == [key for key in theirs if key not in TRACING], path
        for key, value in ours.items():
            assert_alike(f"{path}.{key}", value, theirs[key])
    elif isinstance(theirs, list):
        assert bool(ours) == bool(theirs), path
        for place, (one, other) in enumerate(zip(ours[:2], theirs[:2], strict=False)):
            assert_alike(f"{path}[{place}]", one, other)


def assert_same_answer(name: str, ours: Any, theirs: Any) -> None:
    meta, their_meta = ours["meta_info"], theirs["meta_info"]
    if name in OTHER_END:
        assert meta["finish_reason"]["type"] in ("stop", "length")
        meta = {**meta, "finish_reason": their_meta["finish_reason"]}
        ours = {**ours, "meta_info": meta}
    assert_alike(name, ours, theirs)
    assert meta["finish_reason"]["type"] == their_meta["finish_reason"]["type"]
    assert [span["version"] for span in meta["weight_versions"]] == [meta["weight_version"]]
    assert meta["weight_versions"][-1]["end"] == meta["completion_tokens"] == len(ours["output_ids"])
    if name not in OTHER_END and meta["finish_reason"]["type"] == "length":
        assert meta["finish_reason"] == their_meta["finish_reason"]
        assert len(ours["output_ids"]) == len(theirs["output_ids"])
    if "routed_experts" in their_meta:
        # Both models have 2 layers and choose 2 of 8.
        assert len(meta["routed_experts"]) == len(their_meta["routed_experts"])


def frames(text: str) -> list[Any]:
    """The JSON of a stream's events. Asserts that it ends with the end mark."""
    events = [event for event in text.split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    return [msgspec.json.decode(event.removeprefix("data: ")) for event in events[:-1]]


async def replay(client: Client, name: str, **headers: str) -> tuple[dict[str, Any], int, Any]:
    capture = load(name)
    request = capture["request"]
    status, answer = await client.call(request["method"], request["path"], request.get("body"), **headers)
    return capture, status, answer


@pytest.mark.parametrize(
    "name",
    names("q2_gen_*", "moe_r3_*", "q2_err_*", without=("moe_r3_ab", "moe_r3_abort", "moe_r3_openai_completions")),
)
async def test_generate(start_engine: StartEngine, name: str) -> None:
    options = MOE if name.startswith("moe") else DENSE
    # Streams are paced, so that first and last chunk are two.
    client = await start_engine(**options, tokens_per_second=8.0 if "stream" in name else None)
    capture, status, ours = await replay(client, name)
    theirs = capture["response"]
    if capture["status"] is None:
        # SGLang died of these: token ids outside the vocabulary.
        assert status == 400 and "outside the vocabulary" in ours["error"]["message"]
        assert await client.get("/health") == (200, "")
        return
    assert status == capture["status"], ours
    if status != 200 or not isinstance(theirs, str):
        for one, other in zip(
            ours if isinstance(theirs, list) else [ours], theirs if isinstance(theirs, list) else [theirs], strict=True
        ):
            if status == 200:
                assert_same_answer(name, one, other)
            elif "object" in other:
                assert_alike(name, one, other)
                assert {**one, "message": ""} == {**other, "message": ""}
            else:
                assert one == other
        return
    mine, recorded = frames(ours), frames(theirs)
    if "error" in recorded[0]:
        assert mine == recorded
        return
    assert_same_answer(name, mine[-1], recorded[-1])
    if len(mine) > 1:
        assert_alike(name, mine[0], recorded[0])


@pytest.mark.parametrize("name", names("skiptok_*"))
async def test_without_tokenizer_and_with_a_key(start_engine: StartEngine, name: str) -> None:
    client = await start_engine(**NO_TOKENIZER, tokens_per_second=8.0)
    headers = {} if "noauth" in name else {"Authorization": "Bearer " + ("x" if "badauth" in name else "k")}
    capture, status, ours = await replay(client, name, **headers)
    assert status == capture["status"]
    theirs = capture["response"]
    if status != 200:
        assert ours == theirs
    elif isinstance(theirs, dict):
        assert_same_answer(name, ours, theirs)
    elif name == "skiptok_stream":
        assert_same_answer(name, frames(ours)[-1], frames(theirs)[-1])
    else:
        assert ours == theirs


@pytest.mark.parametrize(
    "name",
    [
        "q2_abort_all",
        "q2_abort_one",
        "q2_abort_prefix_try",
        "q2_abort_unknown",
        "q2_continue_empty",
        "q2_continue_nobody",
        "q2_flush_get",
        "q2_flush_idle",
        "q2_get_health",
        "q2_get_health_generate",
        "q2_get_ping",
        "q2_get_ready",
        "q2_get_v1_models",
        "q2_pause_abort",
        "q2_pause_bad_mode",
        "q2_pause_in_place",
        "q2_pause_nobody",
        "q2_pause_retract",
        "q2_tokenize",
        "q2_uwd_bad",
        "q2_uwd_ok",
        "q2_uwv",
    ],
)
async def test_controls(start_engine: StartEngine, name: str) -> None:
    client = await start_engine(**DENSE)
    capture, status, ours = await replay(client, name)
    assert status == capture["status"]
    assert_alike(name, ours, capture["response"])
    if isinstance(ours, str) or name in ("q2_uwd_ok", "q2_uwv", "q2_continue_empty", "q2_pause_in_place"):
        assert ours == capture["response"]


@pytest.mark.parametrize("name", ["q2_get_model_info", "q2_get_get_model_info", "q2_get_v1_loads"])
async def test_info_has_true_values_under_the_recorded_keys(start_engine: StartEngine, name: str) -> None:
    client = await start_engine(weight_version="17")
    capture, status, ours = await replay(client, name)
    theirs = capture["response"]
    assert status == 200
    if name == "q2_get_v1_loads":
        ours, theirs = ours["loads"][0], theirs["loads"][0]
        assert set(theirs["queues"]) <= set(ours["queues"])
        ours["queues"] = {key: value for key, value in ours["queues"].items() if key in theirs["queues"]}
    else:
        assert ours["weight_version"] == "17"
    shared = [key for key in theirs if key in ours]
    assert len(shared) >= 10
    for key in shared:
        if key != "disaggregation":
            assert_alike(f"{name}.{key}", ours[key], theirs[key])


async def test_server_info_tells_what_a_client_has_to_know(start_engine: StartEngine) -> None:
    client = await start_engine(num_experts=16, num_layers=3, experts_per_token=4, **MOE)
    _, info = await client.get("/get_server_info")
    assert info["enable_return_routed_experts"] is True
    assert (info["num_experts"], info["num_hidden_layers"], info["num_experts_per_tok"]) == (16, 3, 4)
    assert info["max_req_input_len"] == 506
    assert info["stand_in"] is True
    answer = await client.generate(
        input_ids=[10, 11, 12], sampling_params={"max_new_tokens": 5, "ignore_eos": True}, return_routed_experts=True
    )
    routes = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype="<i4").reshape(7, 3, 4)
    assert routes.min() >= 0 and routes.max() < 16
    assert all(len(set(row)) == 4 for layer in routes for row in layer)
