"""Text to token ids and back, for prompts that bring no tokens and hooks that read text.

The rule: ids come from the prompt, from the `tokenize` hook, or from the engine itself (`/v1/tokenize`), never from a
guess. A prompt of chat messages needs tokens or the hook: the chat template is the user's choice. Text of a response
comes from the `detokenize` hook or the engine (`/v1/detokenize`); where there is neither, there is none. An engine that
does not answer is asked again, as with any request.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import numpy as np

from strawq.errors import BadInput, EngineUnavailable
from strawq.rows import whole_numbers
from strawq.samples import Int32, Prompt
from strawq_workers.engine.vocabulary import decode_tokens
from strawq_workers.sglang.client import EngineClient
from strawq_workers.sglang.fleet import Fleet
from strawq_workers.sglang.info import decode_info
from strawq_workers.sglang.refusal import PASSING_STATUS
from strawq_workers.sglang.trying import until_answered
from strawq_workers.worker.hooks import Hooks

log = logging.getLogger("strawq.worker")


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


class _Text(msgspec.Struct, frozen=True):
    text: str


class _Kind(msgspec.Struct, frozen=True):
    stand_in: bool = False


class Texts:
    """Tokenises and detokenises by hook or engine."""

    def __init__(self, fleet: Fleet, hooks: Hooks, stopping: asyncio.Event, *, skip_special: bool = True) -> None:
        self._fleet = fleet
        self._hooks = hooks
        self._stopping = stopping
        self._skip_special = skip_special
        self._no_text = False
        self._stand_in: bool | None = None

    async def tokens_of(self, prompt: Prompt) -> Int32:
        """Token ids of the prompt, int32 [P]. `BadInput` if they cannot be had, `EngineUnavailable` if no engine
        answers for as long as a request is retried, or until the worker stops."""
        if prompt.tokens is not None:
            return prompt.tokens
        if self._hooks.tokenizer is not None:
            return await self._hooks.tokenize(prompt)
        if prompt.text is None:
            raise BadInput(
                "the prompt has neither tokens nor text: submit token ids, or give the worker a tokenize hook "
                "(chat messages need a template)"
            )
        path = "/v1/tokenize"
        engine, status, body = await self._answer("POST", path, {"prompt": prompt.text})
        if status >= 400:
            raise BadInput(
                f"{engine.url} does not tokenise (POST {path}: status {status}): submit prompts with token ids, or "
                "give the worker a tokenize hook"
            )
        what = f"POST {engine.url}{path}"
        return whole_numbers(decode_info(body, _Tokens, what=what).tokens, np.int32, what, least=0)

    async def text_of(self, tokens: Int32) -> str | None:
        """Text of response tokens, or None if nobody can decode them (said once in the log)."""
        if self._hooks.detokenizer is not None:
            return await self._hooks.detokenize(tokens)
        if self._no_text or len(tokens) == 0:
            return None if self._no_text else ""
        if await self._is_stand_in():
            return decode_tokens(tokens.tolist(), skip_special=self._skip_special, final=True)
        path = "/v1/detokenize"
        asked = {"tokens": tokens.tolist(), "skip_special_tokens": self._skip_special}
        engine, status, body = await self._answer("POST", path, asked)
        if status < 400:
            return decode_info(body, _Text, what=f"POST {engine.url}{path}").text
        self._no_text = True
        log.warning(
            "%s has no %s (status %d): hooks get an empty response text; give the worker a detokenize hook",
            engine.url, path, status,
        )  # fmt: skip
        return None

    async def _is_stand_in(self) -> bool:
        """Whether this is strawq's embedded engine, whose tokens are bytes."""
        if self._stand_in is None:
            engine, status, body = await self._answer("GET", "/model_info")
            kind = decode_info(body, _Kind, what=f"GET {engine.url}/model_info") if status < 400 else _Kind()
            self._stand_in = kind.stand_in
        return self._stand_in

    async def _answer(self, method: str, path: str, body: Any = None) -> tuple[EngineClient, int, bytes]:
        """Of an engine that is up, with patience as for any request; its status is none that may pass."""

        async def ask() -> tuple[EngineClient, int, bytes]:
            engine = self._living()
            try:
                status, answer = await engine.transport.control_status(method, path, body)
            except EngineUnavailable as failed:
                engine.doubt(failed)
                raise
            if status in PASSING_STATUS:
                raise EngineUnavailable(f"{method} {engine.url}{path}: status {status}")
            return engine, status, answer

        options = self._fleet.options
        end = asyncio.get_running_loop().time() + options.retry_s
        return await until_answered(ask, options, self._stopping, end, lambda failed: log.info("again: %s", failed))

    def _living(self) -> EngineClient:
        for engine in self._fleet.engines:
            if engine.state in ("up", "held"):
                return engine
        raise EngineUnavailable("no engine is up")
