"""Abort, pause, weight updates and flushing, while requests run, wait and are held."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

from strawq_workers.engine.vocabulary import encode_text
from tests.engine.conftest import Client, StartEngine
from tests.engine.test_captures import assert_alike, load

PROMPT = encode_text("Go on for long. ")


def start(client: Client, rid: str, tokens: int = 3000, **body: Any) -> asyncio.Future[Any]:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return asyncio.ensure_future(
        client.generate(input_ids=PROMPT, rid=rid, sampling_params=params, return_logprob=True, **body)
    )


def assert_partial(answer: Any, rid: str) -> None:
    meta = answer["meta_info"]
    assert meta["id"] == rid
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    count = len(answer["output_ids"])
    assert 0 < count < 3000
    assert meta["completion_tokens"] == count == meta["output_token_logprobs_length"]
    assert [triple[1] for triple in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["weight_versions"][-1]["end"] == count


async def test_abort_matches_by_prefix_and_partials_are_whole(start_engine: StartEngine) -> None:
    client = await start_engine(enable_return_routed_experts=True, tokens_per_second=300.0)
    calls = {rid: start(client, rid, return_routed_experts=True) for rid in ("px-1", "px-10", "px-2")}
    await client.until_decoding(3, len(PROMPT))
    for body in ({"rid": ""}, {"rid": "nobody"}, {}):
        assert await client.post("/abort_request", body) == (200, "")
    assert (await client.load())["num_running_reqs"] == 3
    assert await client.post("/abort_request", {"rid": "px-1"}) == (200, "")
    assert (await client.load())["num_running_reqs"] == 1
    for rid in ("px-1", "px-10"):
        answer = await calls[rid]
        assert_partial(answer, rid)
        routes = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4")
        assert routes.size == (len(PROMPT) + len(answer["output_ids"]) - 1) * 2 * 2
        meta = {key: value for key, value in answer["meta_info"].items() if key != "routed_experts"}
        assert_alike(rid, {**answer, "meta_info": meta}, load("moe_incr_prefix_abort_r1")["response"])
    assert not calls["px-2"].done()
    await client.post("/abort_request", {"abort_all": True})
    assert_partial(await calls["px-2"], "px-2")


async def test_an_abort_in_the_queue_has_its_own_shape(start_engine: StartEngine) -> None:
    client = await start_engine(max_running_requests=2, tokens_per_second=300.0)
    calls = [start(client, "q-0"), start(client, "q-1")]
    await client.until_decoding(2, len(PROMPT))
    calls += [start(client, "q-2"), start(client, "q-3", stream=False)]
    await client.until(lambda entry: entry["num_waiting_reqs"] == 2)
    await client.post("/abort_request", {"rid": "q-3"})
    assert_alike("q-3", await calls[3], load("moe_incr_queued_abort_r3")["response"])
    assert (await calls[3])["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    await client.post("/abort_request", {"rid": "q-0"})
    assert_partial(await calls[0], "q-0")
    await client.until_decoding(2, len(PROMPT))
    assert (await client.load())["num_waiting_reqs"] == 0
    await client.post("/abort_request", {"abort_all": True})
    assert_partial(await calls[2], "q-2")


async def test_a_rid_in_flight_is_refused_and_free_afterwards(start_engine: StartEngine) -> None:
    client = await start_engine(tokens_per_second=300.0)
    first = start(client, "dup")
    await client.until_decoding(1, len(PROMPT))
    status, answer = await client.post("/generate", {"input_ids": PROMPT, "rid": "dup"})
    assert (status, answer) == (400, load("moe_incr_dup_b")["response"])
    status, _ = await client.post("/generate", {"input_ids": [[5], [6]], "rid": ["new", "new"]})
    assert status == 400
    assert (await client.load())["num_running_reqs"] == 1
    await client.post("/abort_request", {"rid": "dup"})
    assert_partial(await first, "dup")
    assert (await client.generate(input_ids=PROMPT, rid="dup"))["meta_info"]["id"] == "dup"


@pytest.mark.parametrize(
    ("mode", "flush_status", "update_flushes"), [("abort", 200, True), ("in_place", 400, False), ("retract", 200, True)]
)
async def test_the_table_of_pauses(
    start_engine: StartEngine, mode: str, flush_status: int, update_flushes: bool
) -> None:
    client = await start_engine(tokens_per_second=50.0, health_timeout_s=0.1)
    running = start(client, "running", tokens=500)
    await client.until_decoding(1, len(PROMPT))
    status, answer = await client.post("/pause_generation", {"mode": mode})
    assert (status, answer["status"]) == (200, "ok")
    if mode == "abort":
        assert_partial(await running, "running")
    held = start(client, "held", tokens=4)
    aborted = start(client, "unwanted")
    await client.until(lambda entry: entry["queues"]["held"] == 2)
    before = await client.load()
    assert before["num_running_reqs"] == (1 if mode == "in_place" else 0)
    assert before["num_waiting_reqs"] == (1 if mode == "retract" else 0)
    assert await client.get("/health") == (503, "")
    assert (await client.get("/ready"))[0] == 200
    await client.post("/abort_request", {"rid": "unwanted"})
    assert (await aborted)["output_ids"] == []
    assert (await client.post("/flush_cache"))[0] == flush_status
    if mode == "in_place":
        status, answer = await client.post("/update_weights_from_disk", {"model_path": "m", "weight_version": "2"})
        assert (status, answer["success"]) == (400, False)
    status, answer = await client.post(
        "/update_weights_from_disk", {"model_path": "m", "weight_version": "2", "flush_cache": update_flushes}
    )
    assert (status, answer["success"]) == (200, True)
    assert not held.done() and (mode == "abort" or not running.done())
    await client.hurry()
    assert (await client.post("/continue_generation", {}))[0] == 200
    fresh = await held
    assert fresh["meta_info"]["weight_versions"] == [{"version": "2", "start": 0, "end": 4}]
    if mode != "abort":
        answer = await running
        spans = answer["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["default", "2"]
        assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] > 0 and spans[1]["end"] == 500
        assert answer["meta_info"]["weight_version"] == "2"
        assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
    assert await client.get("/health") == (200, "")


async def test_an_update_waits_for_those_before_it_and_holds_those_after(start_engine: StartEngine) -> None:
    client = await start_engine(tokens_per_second=50.0)
    before = start(client, "before", tokens=500)
    await client.until_decoding(1, len(PROMPT))
    assert (await client.post("/flush_cache"))[0] == 400
    update = asyncio.ensure_future(client.post("/update_weights_from_disk", {"model_path": "m", "weight_version": "8"}))
    await client.until(lambda entry: entry["queues"]["weight_updates"] == 1)
    after = start(client, "after", tokens=3)
    await client.until(lambda entry: entry["queues"]["held"] == 1)
    assert not update.done()
    await client.hurry()
    assert (await before)["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 500}]
    assert (await update)[1]["message"].endswith("Weight version updated to 8.")
    assert (await after)["meta_info"]["weight_versions"] == [{"version": "8", "start": 0, "end": 3}]
    assert (await client.get("/get_weight_version"))[1] == {"weight_version": "8"}


async def test_an_update_may_abort_what_runs(start_engine: StartEngine) -> None:
    client = await start_engine(tokens_per_second=400.0)
    for path, body in (
        ("/update_weights_from_disk", {"model_path": "m", "weight_version": "v9", "abort_all_requests": True}),
        ("/update_weight_version", {"new_version": "v10"}),
    ):
        call = start(client, "w")
        await client.until_decoding(1, len(PROMPT))
        _, info = await client.get("/model_info")
        assert (await client.post(path, body))[0] == 200
        answer = await call
        assert_partial(answer, "w")
        # The aborted answer is the old policy's.
        assert answer["meta_info"]["weight_version"] == info["weight_version"]
    assert (await client.get("/model_info"))[1]["weight_version"] == "v10"


async def test_the_loop_answers_while_the_model_computes(start_engine: StartEngine) -> None:
    client = await start_engine()
    calls = [start(client, f"busy-{i}") for i in range(16)]
    await client.until_decoding(16, len(PROMPT))
    assert await client.get("/ping") == (200, "")
    assert await client.post("/abort_request", {"rid": "busy-"}) == (200, "")
    # Aborted when the abort has been answered: nothing runs on.
    assert (await client.load())["num_running_reqs"] == 0
    for i, call in enumerate(calls):
        assert_partial(await call, f"busy-{i}")
