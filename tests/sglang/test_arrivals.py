"""The quick ways of reading a stream give what the careful ones do."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from hypothesis import given
from hypothesis import strategies as st

from strawq.errors import EngineUnavailable, Misaligned
from strawq_workers.sglang.arrivals import arriving
from strawq_workers.sglang.stream import SMALL_BYTES, Accumulator, FrameParser
from strawq_workers.sglang.versions import Mark
from strawq_workers.sglang.wire import Chunk, Finish, Meta, decode_chunk, decode_chunks

PIECES = [b"data: ", b"data:", b"x", b"{}", b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b": note", b"data: [DONE]\n\n"]


@given(
    body=st.lists(st.sampled_from(PIECES), max_size=25).map(b"".join), cuts=st.lists(st.integers(1, 40), max_size=12)
)
def test_frames_are_those_that_a_look_at_each_line_finds(body: bytes, cuts: list[int]) -> None:
    quick, careful = FrameParser(), FrameParser()
    found: list[bytes] = []
    expected: list[bytes] = []
    at = 0
    for cut in [*cuts, len(body) + 1]:
        found += quick.feed(body[at : at + cut])
        expected += careful._feed_lines(body[at : at + cut])
        at += cut
    assert (found, quick.done) == (expected, careful.done)


def test_a_frame_larger_than_what_is_copied_comes_whole() -> None:
    parser, payload = FrameParser(), b"7" * (3 * SMALL_BYTES)
    body = b"data: 1\n\ndata: " + payload + b"\n\ndata: 2\n\n"
    found: list[bytes] = []
    for at in range(0, len(body), SMALL_BYTES // 2):
        found += parser.feed(body[at : at + SMALL_BYTES // 2])
    assert found == [b"1", payload, b"2"]


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, "7", "8"])), min_size=1, max_size=10),
    logprobs=st.sampled_from(["whole", "part", "none"]),
)
def test_chunks_of_the_common_form_are_taken_as_the_others_are(steps: list[Any], logprobs: str) -> None:
    class Careful(Accumulator):
        def _plain(self, chunk: Chunk, meta: Meta) -> bool:
            return False

    answers = (Accumulator(what="x"), Careful(what="x"))
    total = 0
    for number, (step, version) in enumerate(steps):
        begin, total = total, total + step
        triples = [(-1.0, token, None) for token in range(0 if logprobs == "whole" else begin, total)]
        meta = Meta(
            completion_tokens=total,
            output_token_logprobs=None if logprobs == "none" else triples,
            weight_version=version,
            finish_reason=Finish("length") if number == len(steps) - 1 else None,
        )
        for answer in answers:
            answer.add(Chunk(output_ids=list(range(begin, total)), meta_info=meta))
    quick, careful = answers
    assert quick.ids.values == careful.ids.values == list(range(total))
    assert quick.logprobs.values == careful.logprobs.values
    assert (quick.total, quick.ended, quick.marks) == (careful.total, careful.ended, careful.marks)


def test_marks_of_one_version_are_two_however_long_the_stream_is() -> None:
    answer = Accumulator(what="x")
    for total in range(1, 100):
        meta = Meta(completion_tokens=total, weight_version="7" if total < 60 else "8")
        answer.add(Chunk(output_ids=[total], meta_info=meta))
    assert answer.marks == [Mark(1, "7"), Mark(59, "7"), Mark(60, "8"), Mark(99, "8")]


@pytest.mark.parametrize(("bad", "error"), [(b'{"output_ids": "no"}', Misaligned), (b'{"out', EngineUnavailable)])
def test_frames_before_a_bad_one_are_delivered_and_the_bad_one_is_named(bad: bytes, error: type[Exception]) -> None:
    good = b'{"output_ids": [1]}'
    chunks = iter(decode_chunks([good, good, bad, good], what="engine 7"))
    assert [next(chunks), next(chunks)] == [decode_chunk(good, what="x")] * 2
    with pytest.raises(error, match="engine 7"):
        next(chunks)
    assert len(list(decode_chunks([good] * 3, what="x"))) == 3


def _stream() -> aiohttp.StreamReader:
    loop = asyncio.get_running_loop()
    return aiohttp.StreamReader(BaseProtocol(loop), 1 << 16, loop=loop)


async def test_the_end_of_a_stream_wakes_its_reader_at_once() -> None:
    content = _stream()
    reading = asyncio.ensure_future(_all(content, 3600.0))
    await asyncio.sleep(0)
    content.feed_data(b"all of it")
    content.feed_eof()
    assert await asyncio.wait_for(reading, 10) == [b"all of it"]


async def test_what_had_arrived_before_a_connection_broke_is_delivered() -> None:
    content, got = _stream(), list[bytes]()
    content.feed_data(b"first, ")
    content.feed_data(b"second")
    content.set_exception(aiohttp.ClientPayloadError("broken"))
    with pytest.raises(aiohttp.ClientPayloadError, match="broken"):
        await _all(content, 0.001, got=got)
    assert got == [b"first, second"]


async def test_a_stream_that_never_ends_times_out() -> None:
    with pytest.raises(asyncio.TimeoutError):
        await _all(_stream(), 0.001, 0.0)


async def _all(
    content: aiohttp.StreamReader, every_s: float, seconds: float = 60.0, got: list[bytes] | None = None
) -> list[bytes]:
    taken = [] if got is None else got
    async for data in arriving(content, every_s, asyncio.get_running_loop().time() + seconds):
        taken.append(data)
    return taken
