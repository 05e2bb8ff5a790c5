"""One leased group, from the prefix that is saved to the complete group that is handed in.

The rule: at every moment the group is either in the queue as far as it was saved, or in `samples` and not yet reported;
it is reported once. Whatever ends the work early (a stop, a pause, a failure) first ends the requests, then saves what
they brought. Once the lease is another's, nothing more is reported.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import numpy as np

from strawq.errors import BadInput, Damaged, EngineUnavailable, Gone, Misaligned, OperatorNeeded, StrawqError
from strawq.handles import Lease
from strawq.queue import Change, Work
from strawq.samples import Group, Int32, Prompt, Sample, token_count
from strawq_workers.filters import DynamicFilterOutput
from strawq_workers.sglang.flight import AnyOf
from strawq_workers.sglang.segment import Segment
from strawq_workers.sglang.wire import GenerateRequest
from strawq_workers.worker.generation import check_prefix, finished, next_step, take_segment
from strawq_workers.worker.place import Attempt, EngineRefused, Place, PrefixRefused, first_of
from strawq_workers.worker.reporting import Standing, words

log = logging.getLogger("strawq.worker")

SAVE_GAP_S = 0.05
"""Samples that end together are saved together."""
IN_THREAD_BYTES = 1 << 20
EMPTY_ABORT_S = 0.1
EMPTY_ABORT_MAX_S = 2.0


class GroupRun:
    """The work on one lease. `await run()` ends when it is reported, or lost."""

    def __init__(self, place: Place, lease: Lease) -> None:
        self.place = place
        self.lease = lease
        self.attempt = str(Attempt(lease.branch, lease.task, lease.attempt))
        self.work: Work | None = None
        self.samples: dict[int, Sample] = {}
        self.stop = asyncio.Event()
        self.lost = ""
        self.end = ""
        """How it ended: accepted, dropped, failed, yielded, stale."""
        self._prompt: Int32 = np.empty(0, np.int32)
        self._cut = asyncio.Event()
        self._flying: set[asyncio.Future[None]] = set()
        self._lock = asyncio.Lock()
        self._grown = asyncio.Event()
        self._changed = False
        self._rewrite = False
        self._saved_at = asyncio.get_running_loop().time()

    # -- from outside -------------------------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """The lease is not ours any more: end the requests, report nothing."""
        self.lost = self.lost or why
        self.stop.set()

    async def settle(self) -> None:
        """Wait until no request is in flight, then save. For a pause: the hold keeps new ones from starting."""
        while self._flying:
            await asyncio.wait(list(self._flying))
            await asyncio.sleep(0)  # lets each sample take its answer
        await self._keep()

    async def save(self) -> None:
        """Make what is new durable under the lease. Raises what the report raises; the news is kept then."""
        async with self._lock:
            if not self._changed or self.end or self.lost or self.work is None:
                return
            self._changed = False
            try:
                standing = await self._report("save", self._snapshot())
            except BaseException:
                self._changed = True
                raise
            if standing != "stale":
                self.place.counters.saves += 1
                self._saved_at = asyncio.get_running_loop().time()

    async def _keep(self) -> None:
        """Save between two requests. A failure is not the group's: it tries again at its end, or storage is unwell."""
        try:
            await self.save()
        except OperatorNeeded as error:
            self.place.stop("storage", error)
        except StrawqError as error:
            log.warning("task %s: its progress could not be saved: %s", self.lease.task, words(error))

    # -- the work -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        saver = asyncio.ensure_future(self._save_as_it_grows())
        try:
            trouble = await self._attempt()
            if trouble is not None and not self.lost:
                await self._give_up(trouble)
            if self.lost:
                self._drop_work()
        finally:
            saver.cancel()
            await asyncio.gather(saver, return_exceptions=True)
            self.place.admission.release(self.attempt)
            self.place.changed.set()

    async def _attempt(self) -> StrawqError | None:
        """Generate, score, hand in. Returns what went wrong."""
        try:
            self.work = await self.place.queue.open(self.lease)
            await self._prepare(self.work.group)
            await self._generate_all()
            if self.lost:
                return None
            if self._complete():
                verdict = await self._judge()
                if verdict is not None:
                    await self._hand_in(verdict)
                    return None
            await self._yield()
        except StrawqError as error:
            return error
        return None

    async def _prepare(self, group: Group) -> None:
        place, prompt = self.place, group.prompt
        saved = {sample.index: sample for sample in group.samples}
        known = [sample.prompt_tokens for sample in group.samples if sample.prompt_tokens is not None]
        self._prompt = known[0] if known else await place.texts.tokens_of(prompt)
        own_prompt = None if prompt.tokens is not None else self._prompt
        for index in sorted({*range(prompt.samples or place.options.samples), *saved}):
            sample = saved.get(index, Sample(index, prompt_tokens=own_prompt))
            if not place.options.partial_rollout and not finished(sample) and len(sample.tokens):
                place.counters.tokens_discarded += len(sample.tokens)
                sample, self._rewrite = Sample(index, prompt_tokens=own_prompt), True
            self.samples[index] = sample
            try:
                check_prefix(sample, len(self._prompt), place.plan)
            except BadInput as error:
                raise PrefixRefused(str(error)) from error
        place.counters.tokens_resumed += sum(len(sample.tokens) for sample in self.samples.values())

    async def _generate_all(self) -> None:
        """Generate all samples at once. The first failure ends the others, which are awaited; it is raised."""
        open_samples = [index for index, sample in self.samples.items() if not finished(sample)]
        for index in range(self.place.admission.limits.group_size):
            if index not in open_samples:
                self.place.admission.sample_finished(self.attempt, index)
        ends = await asyncio.gather(*(self._generate(index) for index in open_samples), return_exceptions=True)
        failures = [end for end in ends if isinstance(end, BaseException)]
        for kind in (BadInput, EngineUnavailable, BaseException):
            for failure in failures:
                if isinstance(failure, kind):
                    raise failure

    async def _generate(self, index: int) -> None:
        place, delay = self.place, EMPTY_ABORT_S
        try:
            while True:
                step = next_step(self.samples[index], self._prompt, place.plan)
                if isinstance(step, Sample):
                    if step is not self.samples[index]:
                        self._put(step)
                    place.counters.samples_finished += 1
                    return
                if self.stop.is_set():
                    return
                if place.hold.stopped.is_set():
                    await first_of(place.hold.released, self.stop)
                    continue
                stopped_by = AnyOf(self.stop, place.hold.stopped, self._cut)
                segment = await self._request(step, stopped_by)
                await self._take(index, segment)
                if segment.tokens or segment.finish != "abort" or stopped_by.is_set():
                    delay = EMPTY_ABORT_S
                    continue
                # Somebody else aborts what we send, or the engine does: ask again, not at once.
                place.counters.retries += 1
                await first_of(self.stop, timeout=delay)
                delay = min(2 * delay, EMPTY_ABORT_MAX_S)
        except BaseException:
            self.stop.set()
            raise
        finally:
            # The answer is here, or its connection is closed: either way the engine does not run it on.
            place.admission.sample_finished(self.attempt, index)

    async def _request(self, request: GenerateRequest, stop: AnyOf) -> Segment:
        place = self.place
        flight: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flying.add(flight)
        place.counters.requests += 1
        try:
            segment = await place.fleet.generate(request, stop)
        except Misaligned:
            raise
        except BadInput as error:
            raise EngineRefused(str(error)) from error
        finally:
            flight.set_result(None)
            self._flying.discard(flight)
        place.saw(segment)
        place.counters.aborts += segment.finish == "abort"
        place.counters.retries += segment.cut
        return segment

    async def _take(self, index: int, segment: Segment) -> None:
        place, sample = self.place, self.samples[index]
        size = 0 if segment.routed_experts is None else segment.routed_experts.nbytes
        taking: Any = (take_segment, sample, segment, len(self._prompt), place.plan)
        taken: Sample = await asyncio.to_thread(*taking) if size > IN_THREAD_BYTES else taking[0](*taking[1:])
        if segment.finish == "abort" and not place.options.partial_rollout:
            place.counters.tokens_discarded += len(taken.tokens)
            taken = Sample(index, prompt_tokens=sample.prompt_tokens)
        place.counters.tokens_masked += int(sample.loss_mask.sum()) - int(taken.loss_mask[: len(sample.tokens)].sum())
        if taken is not sample:
            self._put(taken)

    def _put(self, sample: Sample) -> None:
        self.samples[sample.index] = sample
        self._changed = True
        self._grown.set()

    def _complete(self) -> bool:
        return all(finished(sample) for sample in self.samples.values())

    # -- saving -------------------------------------------------------------------------------------------------

    async def _save_as_it_grows(self) -> None:
        """Saves after `save_tokens` new tokens, or after `save_seconds`: then requests in flight are cut first."""
        options = self.place.options
        if not options.partial_rollout or not (options.save_tokens or options.save_seconds):
            return
        seconds = options.save_seconds if not options.looks_back else 0.0
        clock = asyncio.get_running_loop().time
        while True:
            left = self._saved_at + seconds - clock() if seconds else None
            if left is None or left > 0:
                await first_of(self._grown, timeout=left)
            self._grown.clear()
            if seconds and clock() >= self._saved_at + seconds:
                self._saved_at = clock()
                await self._cut_requests()
                await self._keep()
            elif options.save_tokens and self._unsaved() >= options.save_tokens:
                await asyncio.sleep(SAVE_GAP_S)
                await self._keep()

    async def _cut_requests(self) -> None:
        flying, cut = list(self._flying), self._cut
        self._cut = asyncio.Event()
        cut.set()
        if flying:
            await asyncio.wait(flying)
            await asyncio.sleep(0)  # lets each sample take its answer

    def _unsaved(self) -> int:
        saved = token_count(self.work.group) if self.work is not None else 0
        return sum(len(sample.tokens) for sample in self.samples.values()) - saved

    def _snapshot(self) -> Group:
        """The group as it is now. Samples without a token are left out until they have ended."""
        assert self.work is not None
        saved = {sample.index for sample in self.work.group.samples}
        samples = [
            sample
            for index, sample in sorted(self.samples.items())
            if len(sample.tokens) or finished(sample) or index in saved
        ]
        return msgspec.structs.replace(self.work.group, samples=tuple(samples))

    # -- the end ------------------------------------------------------------------------------------------------

    async def _judge(self) -> DynamicFilterOutput | None:
        """Score and filter the complete group. None if the worker has to stop first: whoever goes on scores it."""
        judging = asyncio.ensure_future(self._score_and_filter())
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({judging, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if judging.done():
                return judging.result()
            judging.cancel()
            await asyncio.gather(judging, return_exceptions=True)
            return None
        finally:
            stopping.cancel()

    async def _score_and_filter(self) -> DynamicFilterOutput:
        hooks = self.place.hooks
        group = self._snapshot()
        if hooks.need_text:
            texts = [
                sample.text if sample.text is not None else await self.place.texts.text_of(sample.tokens)
                for sample in group.samples
            ]
            samples = [
                msgspec.structs.replace(sample, text=text) for sample, text in zip(group.samples, texts, strict=True)
            ]
            group = msgspec.structs.replace(group, samples=tuple(samples))
        group = await hooks.score(group)
        verdict = await hooks.judge(group)
        for sample in group.samples:
            self._put(sample)
        return verdict

    async def _hand_in(self, verdict: DynamicFilterOutput) -> None:
        async with self._lock:
            if self.lost:
                return
            reason = verdict.reason or ""
            if verdict.keep:
                standing = await self._report("complete", self._snapshot())
            else:
                standing = await self._report("drop", None, reason)
            if standing == "stale":
                return
            self.end = "accepted" if verdict.keep else "dropped"
            if verdict.keep:
                self.place.accepted()
            else:
                self.place.dropped(reason)

    async def _yield(self) -> None:
        async with self._lock:
            if self.lost or self.work is None:
                return
            group = self._snapshot() if self._changed else None
            if await self._report("yield", group) != "stale":
                self.end = "yielded"
                self.place.counters.groups_yielded += 1

    async def _give_up(self, error: StrawqError) -> None:
        """The attempt has failed: keep what is good of it, then say so."""
        if isinstance(error, OperatorNeeded) and not isinstance(error, (Damaged, Gone)):
            self.place.stop("storage", error)
            return
        if self.work is None:
            self.work = Work(self.lease, Group(self.lease.task, Prompt()))
        try:
            if isinstance(error, EngineUnavailable):
                log.warning("task %s goes back with its prefix: %s", self.lease.task, words(error))
                await self._yield()
                self.place.unavailable(error)
            else:
                await self._save_before_failing()
                await self._fail(error)
        except StrawqError as second:
            log.error("task %s: its report is refused as well: %s", self.lease.task, words(second))
            self.place.stop("storage", second)

    async def _save_before_failing(self) -> None:
        """A report of failure carries no data: the prefix goes first."""
        try:
            await self.save()
        except BadInput as error:
            self.place.counters.tokens_discarded += max(0, self._unsaved())
            log.warning("task %s: its tokens are not fit to be saved: %s", self.lease.task, words(error))

    async def _fail(self, error: StrawqError) -> None:
        # Another attempt at the same request would be refused again; everything else may pass.
        final = isinstance(error, BadInput) and not isinstance(error, (Misaligned, PrefixRefused))
        async with self._lock:
            if self.lost:
                return
            standing = await self._report("fail", None, words(error), retryable=not final)
            if standing == "stale":
                return
            self.end = "failed"
        self.place.failed(self.lease.task, words(error), standing == "dead")
        if isinstance(error, (EngineRefused, PrefixRefused)):
            self.place.refused(error)

    async def _report(self, outcome: Any, group: Group | None, reason: str = "", *, retryable: bool = True) -> Standing:
        standing = await self.place.reporter.report(
            Change(self.work, outcome, group, reason, retryable, self._rewrite and group is not None)
        )
        if standing == "stale":
            self.lose("the report does not count")
        elif group is not None:
            self._rewrite = False
        return standing

    def _drop_work(self) -> None:
        self.end = "stale"
        self.place.counters.groups_stale += 1
        self.place.counters.tokens_discarded += max(0, self._unsaved())
        log.info("task %s: lease %s is not ours any more (%s); dropped", self.lease.task, self.attempt, self.lost)
