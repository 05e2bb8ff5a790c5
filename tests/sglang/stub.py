"""An engine that misbehaves on request.

Without a script it answers `/generate` as SGLang does: `max_new_tokens` tokens 1, 2, 3, ... once `hold` is set (it is,
by default). Each entry of `script` takes the next `/generate` instead. Nothing sleeps for the sake of an order: events
decide.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Script = Callable[["Stub", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class Stub:
    def __init__(self) -> None:
        self.script: deque[Script] = deque()
        self.seen: list[dict[str, Any]] = []
        self.aborted: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.arrived = asyncio.Event()
        self.abort_seen = asyncio.Event()
        self.obeys_aborts = True
        self.version = "1"
        self.reports_spans = True
        self.ready_status = 200
        self.ready_tells = True
        self.incremental = False
        self.captures_routes: bool | None = None
        self.running = 0
        self.max_running = 0
        self.workers: list[str] | None = None
        self.url = ""
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def load(self) -> dict[str, Any]:
        return {"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0, "queues": {"waiting": 0}}]}

    def answer(self, body: dict[str, Any], tokens: int, finish: dict[str, Any] | None, **meta: Any) -> dict[str, Any]:
        ids = [1 + at % 9 for at in range(tokens)]
        found: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "weight_version": self.version,
        }
        if self.reports_spans and finish is not None:
            found["weight_versions"] = [{"version": self.version, "start": 0, "end": tokens}]
        if body.get("return_logprob"):
            found["output_token_logprobs"] = [[-1.0, token, None] for token in ids]
            found["output_token_logprobs_length"] = tokens
        return {"output_ids": ids, "meta_info": found | meta}

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = "/" + request.match_info["path"]
        self.calls.append(path)
        body = await request.json() if request.can_read_body else {}
        if path == "/generate":
            return await self._generate(request, body)
        if path == "/workers" and self.workers is not None:
            return web.json_response({"workers": [{"url": url, "is_healthy": True} for url in self.workers]})
        if path in ("/ready", "/readiness"):
            return web.Response(status=self.ready_status)
        if path == "/model_info":
            return web.json_response({"model_path": "stub", "weight_version": self.version, "vocab_size": 320})
        if path == "/server_info":
            info: dict[str, Any] = {"incremental_streaming_output": self.incremental}
            if self.captures_routes is not None:
                info["enable_return_routed_experts"] = self.captures_routes
            return web.json_response(info)
        if path == "/v1/loads":
            return web.json_response(self.load())
        if path == "/abort_request":
            self.aborted.append(body)
            self.abort_seen.set()
            return web.Response()
        if path in ("/pause_generation", "/continue_generation"):
            self.ready_status = 503 if path == "/pause_generation" and self.ready_tells else 200
            return web.json_response({"status": "ok"})
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.seen.append(body)
        self.running += 1
        self.max_running = max(self.running, self.max_running)
        self.arrived.set()
        try:
            if self.script:
                return await self.script.popleft()(self, request, body)
            tokens = body["sampling_params"]["max_new_tokens"]
            waits = {asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(self._aborted(body["rid"]))}
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if not self.hold.is_set():
                return web.json_response(self.answer(body, tokens // 2, {"type": "abort", "message": "Aborted"}))
            return web.json_response(self.answer(body, tokens, {"type": "length", "length": tokens}))
        finally:
            self.running -= 1

    async def _aborted(self, rid: str) -> None:
        """Returns once `rid` is aborted, by prefix as SGLang does it."""
        while not (self.obeys_aborts and any(self._hits(abort, rid) for abort in self.aborted)):
            self.abort_seen.clear()
            await self.abort_seen.wait()

    @staticmethod
    def _hits(abort: dict[str, Any], rid: str) -> bool:
        return bool(abort.get("abort_all")) or (bool(abort.get("rid")) and rid.startswith(abort["rid"]))


async def sse(request: web.Request, frames: list[dict[str, Any]], *, done: bool = True) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for frame in frames:
        await response.write(b"data: " + json.dumps(frame).encode() + b"\n\n")
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


def status(code: int, text: str = "no") -> Script:
    async def answer(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": text}}, status=code)

    return answer


async def drop(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection is closed without an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def cut_body(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Half a JSON answer under its full length, then the connection is gone."""
    whole = json.dumps(stub.answer(body, 4, {"type": "length"})).encode()
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(whole))})
    await response.prepare(request)
    await response.write(whole[: len(whole) // 2])
    assert request.transport is not None
    request.transport.close()
    return response


async def cut_stream(stub: Stub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Two increments, then the connection is gone."""
    first, second = stub.answer(body, 1, None), stub.answer(body, 2, None)
    second["output_ids"] = second["output_ids"][1:]
    second["meta_info"]["output_token_logprobs"] = second["meta_info"]["output_token_logprobs"][1:]
    response = await sse(request, [first, second], done=False)
    assert request.transport is not None
    request.transport.close()
    return response
