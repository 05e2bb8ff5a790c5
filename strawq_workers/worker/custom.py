"""A generate function in the place of the worker's own requests: called, stopped, and called again.

The rule: the function may do what it likes, and the worker stays in command. When the worker has to stop, a function
with `abort_mode = "request"` is cancelled; any other is told so by its next turn and awaited, for `abort_timeout_s` at
most. A pause is acknowledged when no request of the function's can be running: one that asks through the worker waits
inside its turn, one with `abort_mode = "request"` is cancelled and called again, one that speaks to engines by itself
is awaited. Without `partial_rollout` a pause stops functions as the worker's own stop does, and the sample starts anew.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from strawq.errors import BadInput, Misaligned, StrawqError
from strawq_workers.worker.generation import finished, next_step
from strawq_workers.worker.hooks import raised
from strawq_workers.worker.place import EngineRefused, first_of
from strawq_workers.worker.turns import GenerationStopped, Turns
from strawq_workers.worker.views import HookFailed, shown

if TYPE_CHECKING:
    from strawq_workers.worker.group import GroupRun

log = logging.getLogger("strawq.worker")

EMPTY_CALLS_MAX = 5
"""Calls in a row that end in `aborted` with nothing new, although nobody asked for a stop, before the attempt fails."""


async def generate_by_function(run: GroupRun, index: int) -> None:
    """Call the function on the sample until it has ended or the worker has to stop. Raises what the function raises, as
    `HookFailed`, and what went wrong with its turns."""
    place, empty = run.place, 0
    while True:
        if run.stop.is_set():
            return
        if place.hold.stopped.is_set():
            await first_of(place.hold.released, run.stop)
            continue
        sample = run.samples[index]
        if finished(sample):
            return
        if not len(sample.tokens):
            next_step(sample, run.prompt, place.plan)  # refuses a prompt that leaves no room
        before, held = len(sample.tokens), place.hold.stopped
        await _call(run, index)
        if not finished(run.samples[index]) and not run.keeps_prefixes:
            run.start_over(index)
        sample = run.samples[index]
        if finished(sample):
            return
        if run.stop.is_set() or held.is_set() or len(sample.tokens) > before:
            empty = 0
            continue
        empty += 1
        if empty >= EMPTY_CALLS_MAX:
            raise HookFailed(
                f"generate function returned sample {index} as aborted {empty} times with nothing new, and nobody has "
                "told it to stop"
            )
        await run.pause_after_empty_abort()


async def _call(run: GroupRun, index: int) -> None:
    """One call. Afterwards the sample holds all that it brought, finished or not."""
    place = run.place
    turns = await Turns.open(run, index)
    params = sampling_params(run)
    function = asyncio.ensure_future(place.hooks.run_generate(turns.view, params))
    function.add_done_callback(_looked_at)
    outside = asyncio.ensure_future(turns.through_worker.wait())
    run.outside.add(outside)
    try:
        cancelled = await _until_over(run, function)
        if turns.request is not None and not turns.request.done():
            await asyncio.wait({turns.request})
    finally:
        outside.cancel()
        run.outside.discard(outside)
    if turns.trouble is not None:
        raise _of_the_function(turns.trouble)
    if cancelled:
        _keep_what_is_whole(turns)
    elif function.cancelled():
        raise HookFailed("generate hook was cancelled from within")
    else:
        _end(turns, function)


def _looked_at(function: asyncio.Future[Any]) -> None:
    """What it raised may not be the reason: a turn that went wrong is, or the stop. Nobody is to miss it then."""
    if not function.cancelled():
        function.exception()


def _of_the_function(error: StrawqError) -> StrawqError:
    """What the function has done wrong may go well in another attempt; what an engine refuses may not."""
    if isinstance(error, BadInput) and not isinstance(error, (Misaligned, EngineRefused)):
        return raised("generate", error)
    return error


def _end(turns: Turns, function: asyncio.Future[Any]) -> None:
    error = function.exception()
    if isinstance(error, GenerationStopped):
        _keep_what_is_whole(turns)
    elif isinstance(error, HookFailed):
        raise error
    elif isinstance(error, (Exception, SystemExit)):
        raise raised("generate", error) from error
    elif error is not None:
        raise error
    else:
        turns.finish(function.result())


def _keep_what_is_whole(turns: Turns) -> None:
    """The function was ended between two of its steps: what it has changed by then counts if it lines up."""
    try:
        turns.response.absorb()
    except StrawqError as error:
        log.warning("sample %d goes back without the last changes of its function: %s", turns.response.index, error)


async def _until_over(run: GroupRun, function: asyncio.Future[Any]) -> bool:
    """Waits for the function, and ends it when it has to stop. Returns whether it was cancelled."""
    place = run.place
    by_cancel = place.hooks.stops_by_cancel
    signals = [run.stop, *([place.hold.stopped] if by_cancel or not run.keeps_prefixes else [])]
    stopping = [asyncio.ensure_future(signal.wait()) for signal in signals]
    try:
        await asyncio.wait({function, *stopping}, return_when=asyncio.FIRST_COMPLETED)
        if function.done():
            return False
        limit_s = place.options.abort_timeout_s
        if not by_cancel:
            await asyncio.wait({function}, timeout=limit_s)
            if function.done():
                return False
            log.warning("task %s: its generate function goes on %.0f s after the stop; cancelled", run.task, limit_s)
        function.cancel()
        await asyncio.wait({function}, timeout=limit_s)
        if not function.done():
            raise HookFailed(
                f"the generate function did not end within {limit_s:g} s of being cancelled: let CancelledError through"
            )
        if not function.cancelled() and function.exception() is not None:
            said = shown(function.exception(), str)
            log.warning("task %s: its generate function raised as it was cancelled: %s", run.task, said)
        return True
    finally:
        for waiting in stopping:
            waiting.cancel()


def sampling_params(run: GroupRun) -> dict[str, Any]:
    """What the function gets as `sampling_params`, under SGLang's names."""
    options = run.place.options
    sampling = options.sampling(options.max_new_tokens)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
