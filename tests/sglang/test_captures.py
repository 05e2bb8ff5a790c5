"""What a real SGLang answered, read by the pure parsers."""

from __future__ import annotations

import base64
import json
import tracemalloc

import msgspec
import numpy as np
import pytest

from strawq.errors import BadInput, EngineUnavailable, Misaligned
from strawq.model import VersionSpan
from strawq_workers.sglang.info import Loads, ModelInfo, ServerInfo, decode_info
from strawq_workers.sglang.refusal import reason_of, refusal, refusal_in_stream
from strawq_workers.sglang.segment import segment_of, segment_of_cut
from strawq_workers.sglang.stream import Accumulator, FrameParser
from strawq_workers.sglang.wire import GenerateRequest, ModelShape, Sampling, decode_chunk, routes_of
from tests.sglang.captures import FOLDER, TINY, accumulate, body_of, exchange, request_of, segment


def _generates() -> list[str]:
    """Every recorded `/generate` of one sequence that was answered with tokens."""
    names = []
    for path in sorted(FOLDER.glob("*.json")):
        found = json.loads(path.read_text())
        body, response = found["request"]["body"], found["response"]
        if found["request"]["path"] != "/generate" or found["status"] != 200 or not isinstance(body, dict):
            continue
        single = body.get("input_ids") and isinstance(body["input_ids"][0], int)
        if single and (isinstance(response, dict) or '"meta_info"' in str(response)) and not isinstance(response, list):
            names.append(path.stem)
    return names


GENERATES = _generates()
NOT_ASKED_FOR = {"q2_gen_flat_top"}  # top-k as flat lists of numbers: this client asks for base64
WITHOUT_ROUTES = {"router_generate", "q2_err_routed_off", "router_generate_unknown", "router_generate_unknown2"}


def test_the_captures_are_there() -> None:
    assert len(GENERATES) > 50


@pytest.mark.parametrize("name", sorted(set(GENERATES) - WITHOUT_ROUTES - NOT_ASKED_FOR))
def test_every_recorded_answer_lines_up(name: str) -> None:
    request, body = request_of(name), body_of(name)
    made = segment(body, request)
    n = made.tokens
    assert n == (made.logprobs.size if made.logprobs is not None else n)
    assert [span.start for span in made.versions] + [n] == [0] + [span.end for span in made.versions]
    if request.routed_experts and n:
        assert made.routed_experts is not None
        assert made.routed_experts.shape == (request.input_ids.size + n - 1 - request.routed_start, 2, 2)
    if request.top_logprobs:
        assert made.top_ids is not None and made.top_ids.shape == (n, request.top_logprobs)
    if body.startswith(b"data:"):
        for cut in (1, 7, 4096):
            again = segment(body, request, cut=cut)
            assert np.array_equal(again.output_ids, made.output_ids) and again.versions == made.versions


@pytest.mark.parametrize("name", sorted(WITHOUT_ROUTES & set(GENERATES)))
def test_routes_that_were_asked_for_and_dropped_name_the_flag(name: str) -> None:
    with pytest.raises(BadInput, match="--enable-return-routed-experts"):
        segment(body_of(name), request_of(name))


def test_cumulative_and_incremental_streams_say_the_same_as_their_chunks() -> None:
    made = segment(body_of("moe_incr_stream_incremental"), request_of("moe_incr_stream_incremental"))
    assert made.output_ids.tolist() == [191, 165, 22, 177] and made.finish == "length"
    made = segment(body_of("moe_r3_stream"), request_of("moe_r3_stream"))
    whole = segment(body_of("moe_r3_full"), request_of("moe_r3_full"))
    assert made.output_ids.tolist() == whole.output_ids.tolist() == [243, 32, 288, 244]
    assert np.array_equal(made.routed_experts, whole.routed_experts)  # type: ignore[arg-type]


def test_routes_of_a_later_start_are_the_tail_of_the_full_ones() -> None:
    full = segment(body_of("moe_r3_full"), request_of("moe_r3_full")).routed_experts
    assert full is not None
    for name, start in (("moe_r3_start_len5", 5), ("moe_r3_start_len6", 6)):
        tail = segment(body_of(name), request_of(name)).routed_experts
        assert tail is not None and np.array_equal(tail, full[start:])


def test_a_weight_update_in_mid_request_gives_two_spans() -> None:
    made = segment(body_of("q2_pause_in_place_result"), request_of("q2_pause_in_place_result"))
    assert [span.version for span in made.versions] == ["v-abort", "v-in_place"]
    assert made.versions[-1].end == made.tokens == 450


def test_an_abort_keeps_its_tokens_and_a_queued_one_has_none() -> None:
    made = segment(body_of("moe_r3_abort"), request_of("moe_r3_abort"))
    assert made.finish == "abort" and made.tokens == 71 and made.routed_experts is not None
    empty = segment(body_of("moe_incr_queued_abort_r2"), request_of("moe_incr_queued_abort_r2"))
    assert empty.finish == "abort" and empty.tokens == 0 and empty.versions == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("q2_err_bad_json", "JSON"),
        ("q2_err_bad_type", "elements must be int or list"),
        ("q2_err_bad_param", "temperature must be a non-negative"),
        ("q2_err_unknown_param", "unknown field `foo`"),
        ("q2_err_404", "Not Found"),
        ("skiptok_noauth", "Unauthorized"),
        ("router_badjson", "Failed to parse the request body"),
        ("q2_uwd_bad", "Failed to get weights iterator"),
        ("moe_incr_dup_b", "Duplicate request ID"),
    ],
)
def test_each_shape_of_refusal_is_permanent_and_one_sentence(name: str, words: str) -> None:
    error = refusal(exchange(name)["status"], body_of(name), what="POST http://engine/generate")
    assert isinstance(error, BadInput) and words in str(error) and "\n" not in str(error)


def test_a_refusal_inside_a_stream_is_permanent_unless_it_says_retryable() -> None:
    frames = FrameParser().feed(body_of("q2_err_too_long_stream"))
    chunk = decode_chunk(frames[0], what="x")
    assert chunk.refused
    error = refusal_in_stream(bytes(chunk.error), what="x")
    assert isinstance(error, BadInput) and "longer than the model's context length" in str(error)
    passing = b'{"message": "busy", "code": 400, "retryable": true}'
    assert isinstance(refusal_in_stream(passing, what="x"), EngineUnavailable)
    assert isinstance(refusal_in_stream(b'{"message": "x", "code": 503}', what="x"), EngineUnavailable)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_passing_status_may_be_tried_again(status: int) -> None:
    assert isinstance(refusal(status, b"", what="x"), EngineUnavailable)
    assert reason_of(b"") == "no reason given"


def test_info_and_load_are_read() -> None:
    model = decode_info(body_of("q2_model_info_after"), ModelInfo, what="x")
    assert model.version == "step-10"
    server = decode_info(body_of("moe_incr_get_server_info"), ServerInfo, what="x")
    assert server.incremental_streaming_output is True and server.enable_return_routed_experts is False
    busy = decode_info(body_of("moe_incr_loads_busy"), Loads, what="x")
    assert (busy.running, busy.waiting, busy.idle) == (2, 2, False)
    assert decode_info(body_of("q2_get_v1_loads"), Loads, what="x").idle
    with pytest.raises(Misaligned, match="num_running_reqs"):
        decode_info(b'{"loads": [{"num_waiting_reqs": 0}]}', Loads, what="x")
    with pytest.raises(EngineUnavailable, match="not JSON"):
        decode_info(b"<html>", Loads, what="x")


def _broken(change: object) -> bytes:
    """`moe_r3_full` (log-probs and routes) with `change` merged into its meta_info; `...` removes a field."""
    answer = exchange("moe_r3_full")["response"]
    assert isinstance(change, dict)
    for key, value in change.items():
        where = answer if key in answer else answer["meta_info"]
        if value is ...:
            del where[key]
        else:
            where[key] = value
    return json.dumps(answer).encode()


FIELDS = (
    "output_ids",
    "completion_tokens",
    "prompt_tokens",
    "finish_reason",
    "output_token_logprobs",
    "routed_experts",
    "id",
    "meta_info",
)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [..., None], ids=["missing", "null"])
def test_a_missing_or_null_field_is_a_typed_error_that_names_it(field: str, value: object) -> None:
    said = {"output_token_logprobs": "output_token_logprobs has 0", "routed_experts": "--enable-return-routed-experts"}
    with pytest.raises(BadInput, match=said.get(field, field)):
        segment_with_id(_broken({field: value}))


@pytest.mark.parametrize("field", [*FIELDS, "weight_versions", "weight_version", "output_token_logprobs_length"])
def test_a_field_of_a_wrong_type_is_a_typed_error_that_names_it(field: str) -> None:
    wrong = 5 if field not in ("completion_tokens", "prompt_tokens", "output_token_logprobs_length") else "5"
    with pytest.raises(Misaligned, match=rf"\$\.(meta_info\.)?{field}|{field}"):
        segment_with_id(_broken({field: wrong}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"completion_tokens": 5}, "completion_tokens is 5, but output_ids 4"),
        ({"completion_tokens": 3}, "output_ids has 4 values"),
        ({"output_ids": [243, 32, 288]}, "output_ids 3"),
        ({"output_ids": [243, 32, 288, 320]}, "outside the vocabulary"),
        ({"output_ids": [243, 32, 288, -1]}, "outside the vocabulary"),
        ({"output_ids": [243, 32, 288, 245]}, "log-prob 3 belongs to token 244"),
        ({"output_token_logprobs_length": 3}, "output_token_logprobs_length 3"),
        ({"output_token_logprobs": [[-1.0, 243, None]] * 3}, "output_token_logprobs 3"),
        (
            {"output_token_logprobs": [[-1.0, 243, None], [None, 32, None], [-1.0, 288, None], [-1.0, 244, None]]},
            "is None",
        ),
        (
            {"output_token_logprobs": [[-1.0, 243, None], [0.5, 32, None], [-1.0, 288, None], [-1.0, 244, None]]},
            "is 0.5",
        ),
        ({"prompt_tokens": 7}, "prompt_tokens is 7"),
        ({"finish_reason": {"type": "tired"}}, "tired"),
        ({"id": "another"}, "another request"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 3}]}, "covers 3 of 4"),
        ({"weight_versions": [{"version": "1", "start": 1, "end": 4}]}, "from 0 was due"),
        (
            {"weight_versions": [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 2, "end": 4}]},
            "from 3 was due",
        ),
        ({"routed_experts": "AAAA"}, "3 bytes of routed experts"),
        ({"routed_experts": "////" * 48}, "holds an id outside"),
        ({"routed_experts": "?"}, "wrong type"),
        ({"routed_experts_start_len": 2}, "routes start at 2"),
    ],
)
def test_a_contradictory_answer_is_refused_with_its_counts(change: object, words: str) -> None:
    with pytest.raises(Misaligned, match=words):
        segment_with_id(_broken(change))


def segment_with_id(body: bytes) -> None:
    """As the client does it: the answer must carry the id that was sent."""
    rid = exchange("moe_r3_full")["response"]["meta_info"]["id"]
    segment_of(accumulate(body), request_of("moe_r3_full"), TINY, rid=rid, before="", after="", url="http://engine")


@pytest.mark.parametrize("rows", [-1, 1])
def test_routes_one_row_off_are_refused(rows: int) -> None:
    raw = np.zeros((9 + rows, 2, 2), dtype="<i4").tobytes()
    with pytest.raises(Misaligned, match="9 rows × 2 layers × 2 experts need 144"):
        routes_of(raw, 9, TINY, what="x")


def test_minus_one_rows_are_refused_and_large_ids_kept_exact() -> None:
    routes = np.array([0, 127, 128, 255, 256, 511, 65535, 3], dtype="<i4").reshape(2, 2, 2)
    open_shape = ModelShape(vocab_size=320, layers=2, topk=2)
    assert np.array_equal(routes_of(routes.tobytes(), 2, open_shape, what="x"), routes)
    routes[1] = -1
    with pytest.raises(Misaligned, match="row 1"):
        routes_of(routes.tobytes(), 2, open_shape, what="x")


def test_versions_read_around_a_request_are_one_version_or_mixed() -> None:
    body = _broken({"weight_versions": ..., "weight_version": ...})
    request = request_of("moe_r3_full")
    assert segment(body, request, before="7", after="7").versions == (VersionSpan(0, 4, "7"),)
    assert segment(body, request, before="7", after="8").versions == (VersionSpan(0, 4, "7", "8"),)
    assert segment(body, request, before="", after="8").versions == (VersionSpan(0, 4, ""),)
    scalar = _broken({"weight_versions": ..., "weight_version": "9"})
    assert segment(scalar, request, before="8", after="8").versions == (VersionSpan(0, 4, "8", "9"),)


def test_a_broken_stream_keeps_whole_tokens_with_the_versions_seen() -> None:
    request, body = request_of("moe_incr_stream_incremental"), body_of("moe_incr_stream_incremental")
    answer, frames = Accumulator(what="x"), FrameParser()
    third = [at for at in range(len(body)) if body.startswith(b"data: ", at)][3]
    for payload in frames.feed(body[: third + 40]):  # three frames and a part of the fourth
        answer.add(decode_chunk(payload, what="x"))
    assert not answer.ended
    kept = segment_of_cut(answer, request, TINY, before="default", url="http://engine")
    assert kept.output_ids.tolist() == [191, 165, 22] and kept.cut and kept.finish == "abort"
    assert kept.logprobs is not None and kept.logprobs.size == 3
    assert kept.versions == (VersionSpan(0, 3, "default"),)
    assert segment_of_cut(answer, request, TINY, before="0", url="x").versions[0] == VersionSpan(0, 1, "0", "default")
    routed = msgspec.structs.replace(request, routed_experts=True)
    assert segment_of_cut(answer, routed, TINY, before="default", url="x").tokens == 0


def test_peak_memory_of_an_answer_with_routes_stays_below_three_times_the_array() -> None:
    rows, layers, topk = 4000, 48, 8
    array = np.random.default_rng(0).integers(0, 128, size=(rows, layers, topk), dtype=np.int32)
    answer = exchange("moe_r3_full")["response"]
    answer["meta_info"]["routed_experts"] = base64.b64encode(array.tobytes()).decode()
    request = GenerateRequest(
        input_ids=np.zeros(rows - 3, dtype=np.int32), sampling=Sampling(max_new_tokens=4), routed_experts=True
    )
    answer["meta_info"]["prompt_tokens"] = rows - 3
    body = bytearray(json.dumps(answer).encode())
    del answer
    shape = ModelShape(vocab_size=320, layers=layers, topk=topk, experts=128)
    tracemalloc.start()
    folded = Accumulator(what="x")
    folded.add(decode_chunk(body, what="x"))
    made = segment_of(folded, request, shape, rid=folded.last.id or "", before="", after="", url="x")
    peak = tracemalloc.get_traced_memory()[1] + len(body)  # the body itself was there before tracing began
    tracemalloc.stop()
    assert np.array_equal(made.routed_experts, array)  # type: ignore[arg-type]
    assert peak < 3 * array.nbytes, f"{peak / array.nbytes:.2f} × the array"
