"""What does not line up, or cannot be, is refused with the counts before anything is written."""

import base64

import msgspec
import numpy as np
import pytest

from strawq.alignment import check_group, check_sample
from strawq.errors import BadInput, Misaligned
from strawq.model import VersionSpan
from strawq.rows import rows_from_base64
from strawq.samples import NO_POLICY, Group, Prompt, Sample, SegmentInfo, TopK, TopP, same_sampling
from tests.payloads.build import sample

replace = msgspec.structs.replace


def good(sc="topk"):
    return sample(np.random.default_rng(0), 3, 4, 5, sc=sc)


def test_aligned_samples_pass():
    for sc in ("topk", "topp", None):
        check_sample(good(sc), 4)
    check_sample(Sample(0), None)
    check_sample(Sample(0, r3=np.zeros((3, 2, 2), np.int32)), 4)
    tool = Sample(0, [1, 2, 3], versions=(VersionSpan(0, 2, "1"), VersionSpan(2, 3, NO_POLICY)))
    check_sample(tool, None)


@pytest.mark.parametrize("rows", [7, 9, 5, 4, 0], ids=["one short", "one over", "response only", "delta", "none"])
def test_r3_of_a_wrong_count_is_refused(rows):
    with pytest.raises(Misaligned, match=rf"sample 3: r3 has shape \[{rows}, 3, 2\]; expected 8 rows .*4 prompt \+ 5"):
        check_sample(replace(good(), r3=np.zeros((rows, 3, 2), np.int32)), 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [-0.1] * 4}, "logprobs cover 4 tokens, the response has 5"),
        ({"loss_mask": [1] * 6}, "loss_mask cover 6 tokens, the response has 5"),
        ({"versions": (VersionSpan(0, 4, "1"),)}, "version spans cover 4 tokens, the response has 5"),
        ({"versions": (VersionSpan(0, 2, "1"), VersionSpan(3, 5, "2"))}, r"\[3, 5\) follows token 2"),
        ({"versions": (VersionSpan(0, 3, "1"), VersionSpan(2, 5, "2"))}, r"\[2, 5\) follows token 3"),
        ({"segments": (SegmentInfo(0, 6),)}, r"segment \[0, 6\) after token 0 of 5"),
        ({"segments": (SegmentInfo(0, 3), SegmentInfo(2, 5))}, r"segment \[2, 5\) after token 3"),
        ({"token_tensors": {"t": np.zeros(4)}}, "tensor 't' cover 4 tokens"),
        ({"sc": TopK(np.zeros((4, 2), np.int32), np.zeros((4, 2)))}, "top-k rows cover 4 tokens"),
        ({"sc": TopK(np.zeros((5, 3), np.int32), np.zeros((5, 2)))}, r"\[5, 3\].*\[5, 2\]"),
        ({"sc": TopP(np.zeros(4, np.int32), np.zeros(4), [0, 1, 2, 3, 4])}, "offsets less one cover 4 tokens"),
        ({"sc": TopP(np.zeros(4, np.int32), np.zeros(4), [0, 1, 2, 3, 4, 5])}, "from 0 to 5 over ids"),
        ({"sc": TopP(np.zeros(4, np.int32), np.zeros(4), [0, 3, 2, 3, 4, 4])}, "from 0 to 4"),
        ({"r3": np.zeros((8, 6), np.int32)}, r"shape \[8, 6\]"),
    ],
)
def test_parts_that_cover_other_tokens_are_refused_with_the_counts(change, message):
    with pytest.raises(Misaligned, match=message):
        check_sample(replace(good(), **change), 4)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int8, np.int32, np.int64])
def test_routes_of_any_integer_dtype_pass(dtype):
    check_sample(Sample(0, [1, 2], versions=(VersionSpan(0, 2, "1"),), r3=np.full((4, 2, 2), 7, dtype)), 3)


def test_r3_without_prompt_tokens_is_refused():
    with pytest.raises(Misaligned, match="needs the prompt's token ids"):
        check_sample(good(), None)


def test_rows_that_no_token_produced_are_refused():
    routes = np.array(good().r3)
    routes[5] = -1
    with pytest.raises(Misaligned, match="r3 row 5 is -1 throughout"):
        check_sample(replace(good(), r3=routes), 4)
    routes[5, 0, 0] = 7
    check_sample(replace(good(), r3=routes), 4)
    routes[2] = -1
    check_sample(replace(good(), r3=routes), 4, since=1)  # saved rows are not looked at again


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_log_probs_of_sampled_tokens_are_finite(value):
    logprobs = good().logprobs.copy()
    logprobs[2] = value
    with pytest.raises(BadInput, match="must be finite"):
        check_sample(replace(good(), logprobs=logprobs), 4)


@pytest.mark.parametrize("sc", ["topk", "topp"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_sc_rows_hold_minus_infinity_but_never_nan_or_plus_infinity(sc, value):
    head = good(sc).sc
    logprobs = np.array(head.logprobs)
    logprobs[-1] = -np.inf
    check_sample(replace(good(sc), sc=replace(head, logprobs=logprobs)), 4)
    logprobs[-1] = value
    with pytest.raises(BadInput, match=r"SC log-probs hold NaN or \+inf"):
        check_sample(replace(good(sc), sc=replace(head, logprobs=logprobs)), 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": [1.5]},
        {"tokens": [2**31]},
        {"tokens": [[1]]},
        {"tokens": ["a"]},
        {"loss_mask": [256], "tokens": [1]},
        {"loss_mask": [-1], "tokens": [1]},
        {"logprobs": [None], "tokens": [1]},
    ],
)
def test_numbers_that_do_not_fit_are_refused_not_wrapped(fields):
    with pytest.raises(BadInput):
        Sample(0, **fields)


def test_float_ids_unknown_statuses_and_twins_are_refused():
    with pytest.raises(BadInput, match="whole numbers"):
        check_sample(replace(good(), r3=np.zeros((8, 3, 2), np.float32)), 4)
    with pytest.raises(BadInput, match="whole numbers"):
        check_sample(replace(good(), sc=TopK(np.zeros((5, 2)), np.zeros((5, 2)))), 4)
    with pytest.raises(BadInput, match="status 'done' is none of pending"):
        check_sample(replace(good(), status="done"), 4)
    with pytest.raises(BadInput, match=r"indices \[3, 3\] are not distinct"):
        check_group(Group("t", Prompt("g", [1, 2, 3, 4]), (good(), good())))


def test_a_resume_under_other_sampling_options_is_marked():
    segments = (
        SegmentInfo(0, 2, {"temperature": 1.0}, "original"),
        SegmentInfo(2, 5, {"temperature": 1.0}, "original"),
    )
    assert same_sampling(replace(good(), segments=segments))
    assert not same_sampling(
        replace(good(), segments=(segments[0], SegmentInfo(2, 5, {"temperature": 0.5}, "original")))
    )
    assert not same_sampling(
        replace(good(), segments=(segments[0], SegmentInfo(2, 5, {"temperature": 1.0}, "processed")))
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 40_000])
def test_base64_captures_decode_exactly(rows):
    expected = np.random.default_rng(0).integers(-(2**31), 2**31, (rows, 5, 3)).astype("<i4")
    text = base64.b64encode(expected.tobytes()).decode()
    np.testing.assert_array_equal(rows_from_base64(text, (5, 3)), expected)
    got = rows_from_base64(text.encode(), (5, 3), count=rows)
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == np.int32
    with pytest.raises(Misaligned, match=f"capture has {rows * 60} bytes; expected {rows + 1} rows, 60 bytes per row"):
        rows_from_base64(text, (5, 3), count=rows + 1)
    with pytest.raises(Misaligned):
        rows_from_base64(text, (5, 3, 7))
    for damaged in (text[:-1], "*" + text[1:], text[:-4] + "=" + text[-3:], text[:3] + "é" + text[4:]):
        with pytest.raises(BadInput):
            rows_from_base64(damaged, (5, 3))


def test_an_empty_capture_has_no_rows():
    assert rows_from_base64("", (5, 3)).shape == (0, 5, 3)
    floats = np.array([[-0.5, -np.inf]], "<f4")
    np.testing.assert_array_equal(rows_from_base64(base64.b64encode(floats), (2,), dtype="float32"), floats)


def test_padding_inside_a_long_capture_is_refused():
    text = base64.b64encode(bytes(3 << 17)).decode()
    pieces = range(4, len(text), 4)
    assert rows_from_base64(text, (), dtype="uint8").shape == (3 << 17,)
    for end in (1 << 18, 1 << 17, pieces[0], pieces[-1]):
        with pytest.raises(BadInput, match="not base64"):
            rows_from_base64(text[: end - 1] + "=" + text[end:], (), dtype="uint8")
