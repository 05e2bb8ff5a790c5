"""A generate function's turns with the engines, and the end that it gives to its sample.

The rule: progress is saved when a turn ends. A turn that was cut off is gone on with, and one that ended and was not
followed by anything is given again, so that a function which only looks at its sample resumes by itself. While a pause
ends requests, a turn waits; when the worker stops, the turn ends in `abort`, and whoever asks again is ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from strawq.alignment import check_sample
from strawq.errors import Misaligned, StrawqError
from strawq.samples import Int32
from strawq_workers.sglang.flight import AnyOf
from strawq_workers.sglang.segment import Segment
from strawq_workers.sglang.wire import GenerateRequest, Sampling
from strawq_workers.worker.generation import budget_left, take_turn
from strawq_workers.worker.place import first_of
from strawq_workers.worker.response import FINISH, NAME, Response
from strawq_workers.worker.views import (
    TURN,
    UNREAD,
    HookFailed,
    HookSample,
    Status,
    hook_view,
    response_text,
    reward_value,
    shown,
    taking,
    word,
)

if TYPE_CHECKING:
    from strawq_workers.worker.group import GroupRun

log = logging.getLogger("strawq.worker")

_SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "min_new_tokens", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
}  # fmt: skip
_FIXED = ("no_stop_trim", "spaces_between_special_tokens")


class Turn(msgspec.Struct, frozen=True):
    """What the engines answered in one turn. `finish`: `stop`, `length` (of the turn or the sample), or `abort`: the
    worker has to stop, and the function returns its sample as it is."""

    tokens: list[int]
    log_probs: list[float] | None
    text: str
    finish: str


class GenerationStopped(StrawqError):
    """The worker has to stop, and the generate function was told so before."""

    kind = "generation_stopped"


class Turns:
    """One call of the generate function on one sample. Belongs to the worker's event loop."""

    def __init__(self, run: GroupRun, index: int) -> None:
        sample = run.samples[index]
        self.run = run
        self.response = Response(run, index, hook_view(msgspec.structs.replace(run.group, samples=(sample,)), sample))
        self.view.turns = self
        self.trouble: StrawqError | None = None
        """What went wrong with an engine or a turn, which the function may have swallowed."""
        self.through_worker = asyncio.Event()
        """The function sends its requests through the worker, which can hold and end them."""
        self.request: asyncio.Task[Segment] | None = None
        self._asked = False
        self._told = False
        self._text = ""
        """The response in words up to the turn under way."""

    @property
    def view(self) -> HookSample:
        """The sample as the function has it: the one it was given, or the copy of it that it went on with."""
        return self.response.view

    def __copy__(self) -> Turns:
        return self

    def __deepcopy__(self, _memo: Any) -> Turns:
        return self  # a function that copies its sample copies no worker

    @classmethod
    async def open(cls, run: GroupRun, index: int) -> Turns:
        """With a view of the sample as it is saved, in words too."""
        turns = cls(run, index)
        response = turns.response
        response.show()
        last = response.last_turn()
        tokens = response.sample.tokens
        before = np.concatenate([tokens, response.unread]) if last is None else tokens[: last[0]]
        turns._text = await turns._decode(before)
        turns.view.response = turns._text + ("" if last is None else await turns._decode(tokens[last[0] :]))
        return turns

    def append(
        self,
        view: HookSample,
        tokens: Any,
        log_probs: Any,
        *,
        trainable: bool,
        meta_info: Mapping[str, Any],
        text: str | None,
        terminal: bool,
    ) -> None:
        """See `HookSample.append_response_tokens`."""
        self.response.view = view
        try:
            with taking(NAME, tokens):
                self.response.append(tokens, log_probs, trainable=trainable, meta_info=meta_info)
                self.view.response = self._text = self.view.response + (text or "")
                finish = meta_info.get("finish_reason")
                if terminal and isinstance(finish, Mapping) and finish.get("type") in FINISH:
                    self.view.status = FINISH[finish["type"]]
        except StrawqError as error:
            self.trouble = self.trouble or error
            raise

    # -- turns --------------------------------------------------------------------------------------------------

    async def generate(self, view: HookSample, params: Mapping[str, Any] | None) -> Turn:
        """See `strawq_workers.agents.generate`."""
        self.response.view = view
        self.through_worker.set()
        try:
            with taking(NAME, params):
                sampling = self._sampling(params or {})
            return await self._turn(sampling)
        except StrawqError as error:
            if not isinstance(error, GenerationStopped):
                self.trouble = self.trouble or error
            raise

    async def _turn(self, sampling: Sampling) -> Turn:
        if self.trouble is not None:
            raise self.trouble
        run, response = self.run, self.response
        response.absorb()
        resumed = None if self._asked else response.last_turn()
        self._asked = True
        start, finish = resumed or (response.length, "abort")
        if not resumed:
            self._text = self.view.response
        place, free = run.place, not (sampling.stop or _looks_back(sampling))
        while finish == "abort":
            left = self._left(sampling, start)
            if left <= 0:
                finish = "length"
            elif run.stop.is_set() or (place.hold.stopped.is_set() and not run.keeps_prefixes):
                return await self._stopped(start)
            elif place.hold.stopped.is_set():
                await run.keep()
                await first_of(place.hold.released, run.stop)
            else:
                asked = min(left, place.options.save_tokens or left) if free else left
                stop = AnyOf(run.stop, place.hold.stopped, *([run.cut] if free else []))
                segment = await self._ask(msgspec.structs.replace(sampling, max_new_tokens=asked), stop, start)
                if segment.finish == "stop" or (segment.finish == "length" and self._left(sampling, start) <= 0):
                    finish = segment.finish
                elif not segment.tokens and not stop.is_set():
                    await run.pause_after_empty_abort()
        response.put(response.sample, **{TURN: [start, len(response.sample.tokens), finish]})
        if run.keeps_prefixes:
            await run.keep()
        return await self._answer(start, finish)

    def _left(self, sampling: Sampling, start: int) -> int:
        """Tokens that the turn may still get, of its own limit and the sample's budget."""
        response = self.response
        made = max(0, response.length - start)
        left = budget_left(response.sample, len(response.prompt), self.run.place.plan) - len(response.unread)
        return min(left, sampling.max_new_tokens - made)

    async def _ask(self, sampling: Sampling, stop: AnyOf, start: int) -> Segment:
        """One request. If the function is cancelled meanwhile, the request ends by `stop`, and its tokens are kept."""
        self.request = asyncio.ensure_future(self._exchange(sampling, stop, start))
        return await asyncio.shield(self.request)

    async def _exchange(self, sampling: Sampling, stop: AnyOf, start: int) -> Segment:
        options, response = self.run.place.options, self.response
        sample, prompt, unread = response.sample, response.prompt, response.unread
        count = len(sample.tokens)
        request = GenerateRequest(
            input_ids=np.concatenate([prompt, sample.tokens, unread]),
            sampling=sampling,
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            routed_experts=options.routed_experts,
            routed_start=len(prompt) + count - 1 if options.routed_experts and count else 0,
        )
        segment = await self.run.request(sample.index, request, stop)
        taken = take_turn(sample, segment, unread, len(prompt), self.run.place.plan, sampling)
        if segment.tokens:
            response.put(taken, **{UNREAD: None, TURN: [start, len(taken.tokens), "abort"]})
        response.show()
        return segment

    async def _answer(self, start: int, finish: str) -> Turn:
        sample = self.response.sample
        tokens = sample.tokens[start:]
        text = await self._decode(tokens)
        self.response.show()
        self.view.response = self._text + text
        self.view.status = FINISH[finish]
        logprobs = None if sample.logprobs is None else sample.logprobs[start:].tolist()
        return Turn(tokens.tolist(), logprobs, text, finish)

    async def _stopped(self, start: int) -> Turn:
        """The first turn after a stop says so; whoever asks again is ended."""
        if self._told:
            raise GenerationStopped("the worker has to stop: return the sample after a turn that ends in abort")
        self._told = True
        return await self._answer(start, "abort")

    def _sampling(self, params: Mapping[str, Any]) -> Sampling:
        """The worker's options, changed by what the function gives under SGLang's names."""
        usual = self.run.place.options.sampling(self.run.place.options.max_new_tokens)
        given = {name: value for name, value in params.items() if name not in _FIXED and value is not None}
        limit = given.pop("max_new_tokens", usual.max_new_tokens)
        known = {name: given.pop(name) for name in _SAMPLING & given.keys()}
        if "sampling_seed" in given:
            known["seed"] = given.pop("sampling_seed")
        for name in ("stop", "stop_token_ids"):
            if name in known:
                value = known[name]
                known[name] = (value,) if isinstance(value, (str, int)) else tuple(value)
        extra = {**usual.extra, **given}
        return msgspec.structs.replace(usual, **known, max_new_tokens=int(limit), extra=extra)

    async def _decode(self, tokens: Int32) -> str:
        if not len(tokens):
            return ""
        return await self.run.place.texts.text_of(tokens) or ""

    # -- the end ------------------------------------------------------------------------------------------------

    def finish(self, answer: Any) -> None:
        """Takes the function's answer: the sample has ended, or is `aborted` and can be gone on with."""
        with taking(NAME, answer):
            self._finish(answer)

    def _finish(self, answer: Any) -> None:
        view = self._answered(answer)
        response, index = self.response, self.response.index
        response.view = view
        response.absorb()
        status = word(view.status)
        if status == "pending" or status not in {state.value for state in Status}:
            raise HookFailed(
                f"generate function returned sample {index} with status {status!r}: set completed, truncated, "
                "failed, or aborted if it was told to stop"
            )
        if status == "aborted" or self._told:
            return  # after a turn that was cut off the response is unfinished, whatever the function calls it
        unread, sample = len(response.unread), response.sample
        if unread:
            rows, due = 0 if sample.r3 is None else len(sample.r3), len(response.prompt) + response.length - 1
            raise Misaligned(
                f"generate function: sample {index} ends in {unread} tokens that no engine has read, so "
                f"R3 has {rows} rows where {due} are due: end with a turn, or run the worker without routed_experts"
            )
        reason = {"completed": "stop", "truncated": "length"}.get(status, "")
        reward, text = reward_value(view.reward, index, NAME), response_text(view, NAME)
        sample = msgspec.structs.replace(sample, status=status, finish_reason=reason, reward=reward, text=text)
        check_sample(sample, len(response.prompt))
        response.put(sample, **{TURN: None, UNREAD: None})

    def _answered(self, answer: Any) -> HookSample:
        given = answer
        if isinstance(answer, (list, tuple)):
            if len(answer) != 1:
                raise HookFailed(
                    f"generate function returned {len(answer)} samples for sample {self.response.index}: a group "
                    "here has a "
                    "fixed number of samples, and one cannot become several; return one sample, with everything that "
                    "is not to be trained on behind loss mask 0"
                )
            given = answer[0]
        if not isinstance(given, HookSample):
            raise HookFailed(f"generate function returned {shown(answer)}: return the sample that it was given")
        if given.turns is not self:
            raise HookFailed(f"generate function returned a sample that is not sample {self.response.index}")
        return given


def _looks_back(sampling: Sampling) -> bool:
    plain = Sampling(max_new_tokens=0)
    names = ("min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty")
    return any(getattr(sampling, name) != getattr(plain, name) for name in names)
