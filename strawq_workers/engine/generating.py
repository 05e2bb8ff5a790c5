"""`/generate`: one answer, a list of answers, or a stream of server-sent events.

The rule: however the call ends (answered, refused, the client gone, the server stopping), its requests are out of the
engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from strawq_workers.engine.answers import AnswerWriter
from strawq_workers.engine.engine_thread import EngineThread
from strawq_workers.engine.generate import GenerateBody, RequestSpec, decode_body, specs_of
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.refusals import Refused
from strawq_workers.engine.request import Request

_DONE = b"data: [DONE]\n\n"


async def generate(http: web.Request, engine: EngineThread, options: EngineOptions) -> web.StreamResponse:
    """Answer one call of `/generate`. Raises EngineRefusal for what is not answered with 200."""
    body = decode_body(await http.read())
    if body.stream:
        return await _stream(http, body, engine, options)
    specs = specs_of(body, options)
    async with _running(specs, engine, streams=False) as (requests, news):
        while not all(request.closed for request in requests):
            news.clear()
            await news.wait()
        answers = [_writer(request, options, incremental=False).write(streaming=False) for request in requests]
    payload: Any = answers if specs[0].index is not None else answers[0]
    return web.Response(body=msgspec.json.encode(payload), content_type="application/json")


@asynccontextmanager
async def _running(
    specs: list[RequestSpec], engine: EngineThread, *, streams: bool
) -> AsyncIterator[tuple[list[Request], asyncio.Event]]:
    """Requests submitted to the engine, and an event that is set at their news; ends them on leaving."""
    news = asyncio.Event()
    started = time.monotonic()
    submitting = asyncio.ensure_future(engine.call(lambda scheduler: scheduler.submit(specs, started, streams=streams)))
    try:
        requests = await asyncio.shield(submitting)
        for request in requests:
            request.notify = news.set
        # News from before the line above went unheard.
        news.set()
        yield requests, news
    finally:
        submitting.add_done_callback(lambda done: _end_of(done, engine))


def _end_of(submitted: asyncio.Future[list[Request]], engine: EngineThread) -> None:
    """End what a call has submitted, unless it is finished."""
    if submitted.cancelled() or submitted.exception() is not None:
        return
    requests = submitted.result()
    if not all(request.closed for request in requests):
        engine.post(lambda scheduler: scheduler.end(requests))


def _writer(request: Request, options: EngineOptions, *, incremental: bool) -> AnswerWriter:
    return AnswerWriter(request, incremental=incremental, with_text=not options.skip_tokenizer_init)


async def _stream(
    http: web.Request, body: GenerateBody, engine: EngineThread, options: EngineOptions
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    try:
        specs = specs_of(body, options)
        async with _running(specs, engine, streams=True) as (requests, news):
            await response.prepare(http)
            await _send_chunks(response, requests, news, options)
    except Refused as refusal:
        # SGLang has promised 200 by the time that it validates a streaming request.
        if not response.prepared:
            await response.prepare(http)
        error = {"message": str(refusal), "type": "invalid_request_error", "code": 400, "retryable": False}
        await response.write(_frame({"error": error}))
    await response.write(_DONE)
    await response.write_eof()
    return response


async def _send_chunks(
    response: web.StreamResponse, requests: list[Request], news: asyncio.Event, options: EngineOptions
) -> None:
    open_ones = [
        (request, _writer(request, options, incremental=options.incremental_streaming_output)) for request in requests
    ]
    while open_ones:
        await news.wait()
        news.clear()
        still_open = []
        for request, writer in open_ones:
            closed = request.closed
            if writer.has_news():
                chunk = writer.write(streaming=True)
                closed = chunk["meta_info"]["finish_reason"] is not None
                await response.write(_frame(chunk))
            if not closed:
                still_open.append((request, writer))
        open_ones = still_open


def _frame(payload: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"
