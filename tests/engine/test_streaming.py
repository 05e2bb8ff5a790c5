"""Streams: cumulative and incremental forms, text across chunks, stops, clients that go away; and other wire forms."""

from __future__ import annotations

import asyncio
import base64
import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from strawq_workers.engine.answers import AnswerWriter
from strawq_workers.engine.generate import GenerateBody, specs_of
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.scheduler import Scheduler
from strawq_workers.engine.vocabulary import EOS_ID, encode_text
from tests.engine.conftest import Client, StartEngine

PROMPT = encode_text("Tell me more. ")


async def stream(client: Client, **body: Any) -> list[dict[str, Any]]:
    status, text = await client.post("/generate", {"stream": True, **body})
    assert status == 200
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [msgspec.json.decode(event.removeprefix("data: ")) for event in events[:-2]]


BODY: dict[str, Any] = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": 40, "sampling_seed": 11, "ignore_eos": True},
    "return_logprob": True,
    "top_logprobs_num": 2,
    "return_routed_experts": True,
}


@pytest.mark.parametrize("incremental", [False, True])
async def test_both_forms_add_up_to_the_unstreamed_answer(start_engine: StartEngine, incremental: bool) -> None:
    # Paced, so that there is more than one chunk.
    client = await start_engine(
        incremental_streaming_output=incremental, enable_return_routed_experts=True, tokens_per_second=100.0
    )
    whole = await client.generate(**BODY)
    chunks = await stream(client, **BODY)
    assert len(chunks) > 3
    metas = [chunk["meta_info"] for chunk in chunks]
    if incremental:
        ids = [token for chunk in chunks for token in chunk["output_ids"]]
        text = "".join(chunk["text"] for chunk in chunks)
        logprobs = [triple for meta in metas for triple in meta["output_token_logprobs"]]
        top = [row for meta in metas for row in meta["output_top_logprobs"]]
    else:
        last = chunks[-1]
        ids, text = last["output_ids"], last["text"]
        logprobs, top = metas[-1]["output_token_logprobs"], metas[-1]["output_top_logprobs"]
        for chunk, after in itertools.pairwise(chunks):
            assert after["output_ids"][: len(chunk["output_ids"])] == chunk["output_ids"]
            assert after["text"].startswith(chunk["text"])
    assert ids == whole["output_ids"]
    assert text == whole["text"]
    assert logprobs == whole["meta_info"]["output_token_logprobs"]
    assert top == whole["meta_info"]["output_top_logprobs"]
    # Counts are cumulative in both forms; versions and routes come with the end only.
    counts = [meta["completion_tokens"] for meta in metas]
    assert counts == sorted(counts) and counts[-1] == 40
    assert [meta["output_token_logprobs_length"] for meta in metas] == counts
    assert [meta["finish_reason"] is None for meta in metas] == [True] * (len(metas) - 1) + [False]
    assert all(("routed_experts" in meta) == (meta is metas[-1]) for meta in metas)
    assert all(("weight_versions" in meta) == (meta is metas[-1]) for meta in metas)
    assert metas[-1]["routed_experts"] == whole["meta_info"]["routed_experts"]


@pytest.mark.parametrize("incremental", [False, True])
def test_a_character_is_not_cut_between_chunks(incremental: bool) -> None:
    scheduler = Scheduler(EngineOptions())
    # "€" is three bytes: a lead byte that nothing follows is one replacement character, and only once that is known.
    lead, middle, last = encode_text("€")
    forced = [lead, middle, last, lead, lead, lead]
    body = GenerateBody(input_ids=list(PROMPT), sampling_params={"max_new_tokens": len(forced), "ignore_eos": True})
    (request,) = scheduler.submit(specs_of(body, scheduler.options), 0.0, streams=True)
    writer = AnswerWriter(request, incremental=incremental, with_text=True)
    texts = []
    for token in forced:
        request.spec = msgspec.structs.replace(
            request.spec, params=msgspec.structs.replace(request.spec.params, logit_bias={str(token): 1000.0})
        )
        scheduler.step(0.0)
        assert writer.has_news()
        texts.append(writer.write(streaming=True)["text"])
    assert request.closed
    if incremental:
        assert texts == ["", "", "€", "", "\ufffd", "\ufffd\ufffd"]
    else:
        assert texts == ["", "", "€", "€", "€\ufffd", "€\ufffd\ufffd\ufffd"]


async def test_batch_streams_carry_the_index(start_engine: StartEngine) -> None:
    client = await start_engine(tokens_per_second=300.0)
    params = [{"max_new_tokens": 5, "ignore_eos": True}, {"max_new_tokens": 9, "ignore_eos": True}]
    chunks = await stream(client, input_ids=[PROMPT, [10, 11]], sampling_params=params, rid=["r-a", "r-b"])
    last = {chunk["index"]: chunk for chunk in chunks}
    assert [last[i]["meta_info"]["id"] for i in (0, 1)] == ["r-a", "r-b"]
    assert [last[i]["meta_info"]["finish_reason"]["length"] for i in (0, 1)] == [5, 9]


async def test_refusals_of_a_stream_come_as_a_frame_under_200(start_engine: StartEngine) -> None:
    client = await start_engine()
    for body in ({"input_ids": [5, 100000]}, {"input_ids": []}, {"input_ids": [5], "sampling_params": {"top_p": 0}}):
        (frame,) = await stream(client, **body)
        assert frame["error"]["code"] == 400 and frame["error"]["retryable"] is False


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_goes_away_ends_its_request(start_engine: StartEngine, streaming: bool) -> None:
    client = await start_engine(tokens_per_second=100.0)
    body = {
        "input_ids": [PROMPT, PROMPT],
        "stream": streaming,
        "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
    }
    call = asyncio.ensure_future(client.generate(**body))
    await client.until_decoding(2, len(PROMPT))
    call.cancel()
    await asyncio.wait([call])
    await client.until(lambda entry: entry["num_running_reqs"] == 0)  # by itself it would take 30 s
    assert (await client.post("/flush_cache"))[0] == 200


async def test_stop_token_stays_in_ids_and_leaves_the_text(start_engine: StartEngine) -> None:
    client = await start_engine()
    base = {"max_new_tokens": 30, "temperature": 0}
    plain = await client.generate(input_ids=PROMPT, sampling_params={**base, "ignore_eos": True})
    ids = plain["output_ids"]
    place = next(i for i in range(3, 30) if ids[i] not in ids[:i])
    stop = {**base, "stop_token_ids": [ids[place]]}
    stopped = await client.generate(input_ids=PROMPT, sampling_params=stop, return_logprob=True)
    assert stopped["output_ids"] == ids[: place + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[place]}
    assert stopped["meta_info"]["completion_tokens"] == len(stopped["meta_info"]["output_token_logprobs"]) == place + 1
    assert stopped["text"] == plain["text"][:place]
    kept = await client.generate(input_ids=PROMPT, sampling_params={**stop, "no_stop_trim": True})
    assert kept["text"] == plain["text"][: place + 1]
    # ignore_eos also switches stop_token_ids off.
    ignored = await client.generate(input_ids=PROMPT, sampling_params={**stop, "ignore_eos": True})
    assert ignored["output_ids"] == ids
    # A stop string matches on text, over token borders, and its tokens stay.
    word = plain["text"][5:8]
    end = plain["text"].index(word) + 3
    by_text = await client.generate(input_ids=PROMPT, sampling_params={**base, "stop": ["\u0000\u0000", word]})
    assert by_text["output_ids"] == ids[:end]
    assert by_text["text"] == plain["text"][: end - 3]
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    eos = await client.generate(input_ids=PROMPT, sampling_params={**base, "logit_bias": {str(EOS_ID): 100.0}})
    assert eos["output_ids"] == [EOS_ID] and eos["text"] == ""
    shown = {**base, "logit_bias": {str(EOS_ID): 100.0}, "no_stop_trim": True, "skip_special_tokens": False}
    assert (await client.generate(input_ids=PROMPT, sampling_params=shown))["text"] == "</s>"


async def test_the_forms_of_top_logprobs_hold_the_same_numbers(start_engine: StartEngine) -> None:
    client = await start_engine()
    body = {**BODY, "top_logprobs_num": 5, "logprob_start_len": 0}
    params = {**body["sampling_params"], "temperature": 0}
    body["sampling_params"] = params
    listed = (await client.generate(**body))["meta_info"]
    ids = np.array([[triple[1] for triple in row] for row in listed["output_top_logprobs"]])
    logprobs = np.array([[triple[0] for triple in row] for row in listed["output_top_logprobs"]], dtype=np.float32)
    assert "output_topk_token_ids" not in listed
    flat = (await client.generate(**body, return_flat_raw_top_logprobs=True))["meta_info"]
    assert flat["output_top_logprobs_idx_flat"] == ids.ravel().tolist()
    assert flat["output_top_logprobs_shape"] == [40, 5]
    assert flat["input_top_logprobs_shape"] == [len(PROMPT) - 1, 5]
    coded = (
        await client.generate(**body, return_flat_raw_output_top_logprobs=True, return_flat_raw_top_logprobs_b64=True)
    )["meta_info"]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(coded["output_top_logprobs_val_flat_b64"]), "<f4").reshape(40, 5), logprobs
    )
    centered = (await client.generate(**body, return_output_topk=True))["meta_info"]
    assert centered["output_topk_shape"] == [40, 5]
    topk_ids = np.frombuffer(base64.b64decode(centered["output_topk_token_ids"]), "<i4").reshape(40, 5)
    topk = np.frombuffer(base64.b64decode(centered["output_topk_log_probs"]), "<f4").reshape(40, 5)
    np.testing.assert_array_equal(topk_ids, ids)
    np.testing.assert_array_equal(topk, logprobs)
    assert np.all(topk <= 0) and np.all(np.exp(topk).sum(axis=1) <= 1.0001)
    always = await start_engine(output_topk=True)
    assert (await always.generate(**body))["meta_info"]["output_topk_shape"] == [40, 5]


async def test_n_answers_differ_and_a_numbered_rid_is_reached_by_its_prefix(start_engine: StartEngine) -> None:
    client = await start_engine(tokens_per_second=300.0)
    body = {"input_ids": PROMPT, "rid": "grp", "sampling_params": {"n": 3, "max_new_tokens": 3000, "ignore_eos": True}}
    call = asyncio.ensure_future(client.generate(**body))
    await client.until_decoding(3, len(PROMPT))
    await client.post("/abort_request", {"rid": "grp"})
    answers = await call
    assert [answer["meta_info"]["id"] for answer in answers] == ["grp_0", "grp_1", "grp_2"]
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
