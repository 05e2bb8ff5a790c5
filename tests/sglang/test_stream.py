"""Frames cut anywhere, and fields that are cumulative or incremental each in their own way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strawq.errors import Misaligned
from strawq.model import VersionSpan
from strawq_workers.sglang.stream import Accumulator, FrameParser
from strawq_workers.sglang.versions import Mark, ReportedSpan, spans_of_marks, spans_reported
from strawq_workers.sglang.wire import Chunk, Finish, Meta


@settings(deadline=None)
@given(
    payloads=st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1), max_size=6),
    ending=st.sampled_from(["\n", "\r\n"]),
    data=st.data(),
)
def test_frames_are_the_same_however_the_bytes_are_cut(payloads: list[str], ending: str, data: Any) -> None:
    payloads = [p for p in payloads if p != "[DONE]" and not p.startswith(" ")]
    whole = "".join(f": note{ending}data: {p}{ending}{ending}" for p in payloads) + f"data: [DONE]{ending}{ending}late"
    body, parser, got = whole.encode(), FrameParser(), []
    at = 0
    while at < len(body):
        step = data.draw(st.integers(1, len(body)))
        got += parser.feed(body[at : at + step])
        at += step
    assert [p.decode() for p in got] == payloads and parser.done


def test_a_frame_without_its_end_is_not_delivered() -> None:
    parser = FrameParser()
    assert parser.feed(b'data: {"completion_tokens": 12') == []
    assert parser.feed(b"3}\n") == [] and not parser.done
    assert parser.feed(b"\n") == [b'{"completion_tokens": 123}']


def _chunk(
    total: int, ids: list[int], logprobs: list[int] | None, *, last: bool = False, finish: str = "length"
) -> Chunk:
    triples = None if logprobs is None else [(-1.0, token, None) for token in logprobs]
    return Chunk(
        output_ids=ids,
        meta_info=Meta(
            completion_tokens=total,
            output_token_logprobs=triples,
            output_token_logprobs_length=total,
            finish_reason=Finish(finish) if last else None,
        ),
    )


@settings(max_examples=200, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    ids_whole=st.booleans(),
    logprobs_whole=st.booleans(),
    same=st.booleans(),
)
def test_each_field_is_read_in_its_own_form(cuts: list[int], ids_whole: bool, logprobs_whole: bool, same: bool) -> None:
    tokens = [7 if same else at for at in range(sum(cuts))]
    answer, at = Accumulator(what="x"), 0
    for number, step in enumerate(cuts):
        end = at + step
        ids = tokens[:end] if ids_whole else tokens[at:end]
        logprobs = tokens[:end] if logprobs_whole else tokens[at:end]
        answer.add(_chunk(end, ids, logprobs, last=number == len(cuts) - 1))
        at = end
    assert answer.complete() == len(tokens)
    assert answer.ids.values == tokens and [token for _, token, _ in answer.logprobs.values] == tokens


def test_log_probs_that_lag_behind_must_catch_up() -> None:
    answer = Accumulator(what="x")
    answer.add(_chunk(2, [1, 2], [1]))
    answer.add(_chunk(4, [3, 4], [2, 3, 4], last=True))
    assert answer.complete() == 4
    behind = Accumulator(what="x")
    behind.add(_chunk(2, [1, 2], [1]))
    behind.add(_chunk(4, [3, 4], [2, 3], last=True))
    with pytest.raises(Misaligned, match="output_token_logprobs 3"):
        behind.complete()


def test_a_chunk_that_is_neither_whole_nor_part_is_refused() -> None:
    answer = Accumulator(what="x")
    answer.add(_chunk(2, [1, 2], [1, 2]))
    with pytest.raises(Misaligned, match="neither a whole nor a part"):
        answer.add(_chunk(4, [3, 4, 5], [3, 4]))


def test_counts_that_fall_and_tokens_after_the_end_are_refused() -> None:
    answer = Accumulator(what="x")
    answer.add(_chunk(2, [1, 2], [1, 2]))
    with pytest.raises(Misaligned, match="fell from 2 to 1"):
        answer.add(_chunk(1, [1], [1]))
    answer.add(_chunk(3, [3], [3], last=True))
    with pytest.raises(Misaligned, match="after the finish reason"):
        answer.add(_chunk(4, [4], [4]))


def test_an_abort_in_the_queue_that_repeats_the_last_chunk_adds_nothing() -> None:
    """SGLang 0.5.23 after a retract: ids of the last chunk again, all log-probs at once."""
    answer = Accumulator(what="x")
    for total, token in ((1, 293), (2, 25), (3, 254), (4, 264)):
        answer.add(_chunk(total, [token], [token]))
    answer.add(_chunk(4, [264], [293, 25, 254, 264], last=True, finish="abort"))
    assert answer.complete() == 4 and answer.ids.values == [293, 25, 254, 264] and not answer.withdrawn


@pytest.mark.parametrize(("total", "ids"), [(0, []), (4, [264, 264])])
def test_an_abort_frame_that_does_not_fit_leaves_the_streamed_tokens(total: int, ids: list[int]) -> None:
    answer = Accumulator(what="x")
    answer.add(_chunk(3, [293, 25, 254], [293, 25, 254]))
    answer.add(_chunk(total, ids, None, last=True, finish="abort"))
    assert answer.withdrawn and answer.ended and answer.ids.values == [293, 25, 254]


def test_spans_must_cover_every_token_once_and_neighbours_of_one_version_are_one() -> None:
    reported = [ReportedSpan("7", 0, 2), ReportedSpan("7", 2, 3), ReportedSpan("8", 3, 5)]
    assert spans_reported(reported, 5, what="x") == (VersionSpan(0, 3, "7"), VersionSpan(3, 5, "8"))
    for tokens in (4, 6):
        with pytest.raises(Misaligned):
            spans_reported(reported, tokens, what="x")


def test_tokens_between_marks_of_two_versions_are_mixed_and_after_the_last_unknown() -> None:
    marks = [Mark(2, "7"), Mark(4, "8"), Mark(5, "8")]
    assert spans_of_marks("7", marks, 6) == (
        VersionSpan(0, 2, "7"),
        VersionSpan(2, 4, "7", "8"),
        VersionSpan(4, 5, "8"),
        VersionSpan(5, 6, ""),
    )
