"""The HTTP face of the embedded engine: SGLang's routes, fields, status codes and error shapes.

The rule: a client that works here works against SGLang 0.5.23 as recorded in `contracts/sglang`. Known differences:

- a token id outside the vocabulary is a 400 (SGLang's scheduler dies of it);
- a client that disconnects is noticed at once (SGLang looks every 4 s when it does not stream);
- `/health` answers as soon as the compute thread does (SGLang generates a token, about 1 s); paused, it answers 503
  after `health_timeout_s`, 20 s by default, as SGLang does;
- weights are a function of (seed, weight version): `/update_weights_from_disk` takes any `model_path` that is not an
  absolute path to nothing, and without `weight_version` changes nothing; `/update_weight_version` also loads what it
  declares;
- an update with `flush_cache` while requests are frozen in place is a 400;
- a request held by a pause can be aborted.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from strawq_workers.engine.engine_thread import EngineStopped, EngineThread
from strawq_workers.engine.generating import generate
from strawq_workers.engine.info import loads_answer, model_info, models_answer, server_info
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.refusals import BadBody, EngineRefusal
from strawq_workers.engine.scheduler import Scheduler, WeightUpdate
from strawq_workers.engine.vocabulary import encode_text

MAX_BODY_BYTES = 256 * 1024 * 1024
_POLL_S = 0.02
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
    "operation will not be performed.)\n"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Body = TypeVar("Body")


class AbortBody(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct, frozen=True):
    mode: Literal["abort", "in_place", "retract"] = "abort"


class ContinueBody(msgspec.Struct, frozen=True):
    pass


class UpdateFromDiskBody(msgspec.Struct, frozen=True):
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class UpdateVersionBody(msgspec.Struct, frozen=True):
    new_version: str
    abort_all_requests: bool = True


class TokenizeBody(msgspec.Struct, frozen=True):
    prompt: str


class EngineServer:
    """Handlers over one compute thread."""

    def __init__(self, options: EngineOptions, engine: EngineThread) -> None:
        self._options = options
        self._engine = engine

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_sglang, self._authorised])
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self._health)
        for path in ("/ready", "/ping"):
            app.router.add_get(path, _empty)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        for path in ("/weight_version", "/get_weight_version"):
            app.router.add_get(path, self._weight_version)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/tokenize", self._tokenize)
        for method in ("GET", "POST"):
            app.router.add_route(method, "/flush_cache", self._flush_cache)
        for method in ("POST", "PUT"):
            app.router.add_route(method, "/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update_from_disk)
        app.router.add_post("/update_weight_version", self._update_version)
        return app

    @property
    def _authorised(self) -> Any:
        key = self._options.api_key
        expected = f"Bearer {key}".encode()

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").encode("utf-8", errors="surrogateescape")
            # Health stays open, so that a prober needs no key.
            if key is None or request.path.startswith("/health") or hmac.compare_digest(given, expected):
                return await handler(request)
            return _json({"error": "Unauthorized"}, status=401)

        return check

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await generate(request, self._engine, self._options)

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, AbortBody)
        if body.abort_all:
            await self._engine.call(lambda scheduler: scheduler.abort(None))
        elif body.rid:
            rid = body.rid
            await self._engine.call(lambda scheduler: scheduler.abort(rid))
        return web.Response()

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, PauseBody)
        await self._engine.call(lambda scheduler: scheduler.pause(body.mode))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.StreamResponse:
        await _body(request, ContinueBody)
        await self._engine.call(lambda scheduler: scheduler.resume())
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, version: str | None, *, flush_cache: bool, abort_all: bool) -> str | None:
        """Change weights when their turn has come. None, or why not."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[str | None] = loop.create_future()

        def settle(refusal: str | None) -> None:
            if not outcome.done():
                outcome.set_result(refusal)

        update = WeightUpdate(version, flush_cache, lambda refusal: _call_loop(loop, lambda: settle(refusal)))
        await self._engine.call(lambda scheduler: scheduler.update(update, abort_all=abort_all))
        # The thread may end while the update still waits for its turn.
        either: list[asyncio.Future[Any]] = [outcome, self._engine.ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not outcome.done():
            raise EngineStopped("the engine stopped before the weights changed")
        return outcome.result()

    async def _update_from_disk(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, UpdateFromDiskBody)
        path = body.model_path
        if not path or (os.path.isabs(path) and not await asyncio.to_thread(os.path.exists, path)):
            refusal: str | None = f"Failed to get weights iterator: there is nothing at {path!r}."
        else:
            refusal = await self._update(
                body.weight_version, flush_cache=body.flush_cache, abort_all=body.abort_all_requests
            )
        if refusal is not None:
            return _json({"success": False, "message": refusal, "num_paused_requests": 0}, status=400)
        message = "Succeeded to update model weights."
        if body.weight_version is not None:
            message += f" Weight version updated to {body.weight_version}."
        return _json({"success": True, "message": message, "num_paused_requests": 0})

    async def _update_version(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, UpdateVersionBody)
        refusal = await self._update(body.new_version, flush_cache=False, abort_all=body.abort_all_requests)
        if refusal is not None:
            return _json({"success": False, "message": refusal, "new_version": body.new_version}, status=400)
        message = f"Weight version updated to {body.new_version}"
        return _json({"success": True, "message": message, "new_version": body.new_version})

    async def _flush_cache(self, request: web.Request) -> web.StreamResponse:
        if await self._engine.call(lambda scheduler: scheduler.flush()):
            return web.Response(text=_FLUSHED)
        return web.Response(text="Flush cache failed.\n", status=400)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.health_timeout_s
        while await self._engine.call(lambda scheduler: scheduler.paused is not None):
            if loop.time() >= deadline:
                return web.Response(status=503)
            await asyncio.sleep(_POLL_S)
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.StreamResponse:
        return _json(model_info(self._options, await self._version()))

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        loads = await self._engine.call(lambda scheduler: scheduler.loads())
        return _json(server_info(self._options, await self._version(), loads))

    async def _weight_version(self, request: web.Request) -> web.StreamResponse:
        return _json({"weight_version": await self._version()})

    async def _loads(self, request: web.Request) -> web.StreamResponse:
        loads = await self._engine.call(lambda scheduler: scheduler.loads())
        return _json(loads_answer(self._options, loads))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return _json(models_answer(self._options))

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        tokens = encode_text((await _body(request, TokenizeBody)).prompt)
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": self._options.context_length})

    async def _version(self) -> str:
        return await self._engine.call(_loaded_version)


def _loaded_version(scheduler: Scheduler) -> str:
    return scheduler.version


def _call_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)


async def _empty(_request: web.Request) -> web.StreamResponse:
    return web.Response()


async def _body(request: web.Request, kind: type[Body]) -> Body:
    """The JSON body of a request as `kind`. Raises BadBody; an absent body or `null` is a missing field."""
    raw = await request.read()
    if not raw.strip() or raw.strip() == b"null":
        raise BadBody("{'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}")
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise BadBody(f"{{'type': 'value_error', 'loc': ('body',), 'msg': '{error}'}}") from None


def _json(payload: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), status=status, content_type="application/json")


@web.middleware
async def _errors_as_sglang(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineRefusal as refusal:
        return _json(refusal.body(), status=400)
    except EngineStopped as stopped:
        return _json({"error": {"message": str(stopped)}}, status=503)
    except web.HTTPMethodNotAllowed as error:
        response = _json({"detail": "Method Not Allowed"}, status=405)
        response.headers["Allow"] = ",".join(sorted(error.allowed_methods))
        return response
    except web.HTTPException as error:
        return _json({"detail": error.reason}, status=error.status)
