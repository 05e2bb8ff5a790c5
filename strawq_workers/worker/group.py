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

from strawq.errors import BadInput, EngineUnavailable, Misaligned, OperatorNeeded, OutcomeUnknown, StrawqError
from strawq.handles import Lease
from strawq.samples import Group, Int32, Sample, token_count
from strawq.work import Change, Work
from strawq_workers.admission.staleness import Verdict
from strawq_workers.filters import DynamicFilterOutput
from strawq_workers.sglang.flight import AbortUnconfirmed, AnyOf
from strawq_workers.sglang.segment import Segment
from strawq_workers.sglang.wire import GenerateRequest
from strawq_workers.stale_groups import begun_again, with_drops
from strawq_workers.worker.custom import generate_by_function
from strawq_workers.worker.failing import give_up
from strawq_workers.worker.freshness import start_anew, verdict_on
from strawq_workers.worker.generation import check_prefix, finished, generated_tokens, next_step, take_segment
from strawq_workers.worker.judging import judged_unless
from strawq_workers.worker.place import EngineGarbled, EngineRefused, Place, PrefixRefused, attempt_of, first_of
from strawq_workers.worker.reporting import Standing, words
from strawq_workers.worker.saving import save_as_it_grows

log = logging.getLogger("strawq.worker")

IN_THREAD_BYTES = 1 << 20
EMPTY_ABORT_S = 0.1
EMPTY_ABORT_MAX_S = 2.0


class GroupRun:
    """The work on one lease. `await run()` ends when it is reported, or lost."""

    def __init__(self, place: Place, lease: Lease) -> None:
        self.place = place
        self.lease = lease
        self.attempt = attempt_of(lease)
        self.work: Work | None = None
        self.samples: dict[int, Sample] = {}
        self._unbegun: dict[int, Sample] = {}
        """Samples as they were leased, where nothing had been generated."""
        self.stop = asyncio.Event()
        self.lost = ""
        self.end = ""
        """How it ended: accepted, dropped, failed, yielded, stale."""
        self.prompt: Int32 = np.empty(0, np.int32)
        self.cut = asyncio.Event()
        """Set when requests in flight are to end because what they brought is to be saved; a new one follows it."""
        self._flying: set[asyncio.Future[None]] = set()
        self.outside: set[asyncio.Future[Any]] = set()
        """Done when a generate function's requests are the worker's, which can end them, or when it has returned."""
        self._unconfirmed: set[int] = set()
        self.lock = asyncio.Lock()
        self.grown = asyncio.Event()
        self._changed = False
        self._rewrites = self._rewritten = 0  # new beginnings, and how many of them are saved
        self._counted = False
        self.saved_at = asyncio.get_running_loop().time()
        self._empty_abort_s = EMPTY_ABORT_S

    @property
    def task(self) -> str:
        return self.lease.task

    @property
    def group(self) -> Group:
        """As it is in the queue."""
        assert self.work is not None
        return self.work.group

    @property
    def keeps_prefixes(self) -> bool:
        return self.place.options.partial_rollout

    def start_over(self, index: int) -> None:
        """Throws away what the sample has: without partial rollout nothing is continued."""
        sample, anew = self.samples[index], self._anew(index)
        if len(sample.tokens) or sample.metadata != anew.metadata:
            self.place.counters.tokens_discarded += generated_tokens(sample)
            self._rewrites += 1
            self.put(anew)

    def _anew(self, index: int) -> Sample:
        """As it was leased, if nothing had been generated for it; else as much of that as can be told."""
        return begun_again(self.samples[index], self._unbegun.get(index))

    # -- from outside -------------------------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """The lease is not ours any more: end the requests, report nothing."""
        self.lost = self.lost or why
        self.stop.set()

    async def settle(self) -> None:
        """Wait until no request is in flight, then save. For a pause: the hold keeps new ones from starting."""
        while self._flying or self.outside:
            await asyncio.wait([*self._flying, *self.outside])
            await asyncio.sleep(0)  # lets each sample take its answer
            self.outside = {waiting for waiting in self.outside if not waiting.done()}
        await self.keep()

    async def save(self) -> None:
        """Make what is new durable under the lease. Raises what the report raises; the news is kept then."""
        async with self.lock:
            if not self._changed or self.end or self.lost or self.work is None:
                return
            self._changed = False
            try:
                standing = await self.report("save", self._snapshot())
            except BaseException:
                self._changed = True
                raise
            if standing != "stale":
                self.place.counters.saves += 1
                self.saved_at = asyncio.get_running_loop().time()

    async def keep(self) -> None:
        """Save between two requests. A failure is not the group's: it tries again at its end, or storage is unwell."""
        try:
            await self.save()
        except (OperatorNeeded, OutcomeUnknown) as error:
            self.place.stop("storage", error)
        except StrawqError as error:
            log.warning("task %s: its progress could not be saved: %s", self.lease.task, words(error))

    # -- the work -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        saver = asyncio.ensure_future(save_as_it_grows(self))
        try:
            trouble = await self._attempt()
            if trouble is not None and not self.lost:
                await give_up(self, trouble)
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
            queue = self.place.queue
            self.work = await self.place.patience.read(lambda: queue.open(self.lease), queue.look)
            await self._prepare(self.work.group)
            await self._generate_all()
            if self.lost:
                return None
            if self._complete():
                verdict = await self._judge()
                if verdict is not None:
                    await self._hand_in(verdict)
                    return None
            await self.give_back()
        except StrawqError as error:
            return error
        return None

    async def _prepare(self, group: Group) -> None:
        place, prompt = self.place, group.prompt
        saved = {sample.index: sample for sample in group.samples}
        known = [sample.prompt_tokens for sample in group.samples if sample.prompt_tokens is not None]
        self.prompt = known[0] if known else await place.texts.tokens_of(prompt)
        own_prompt = None if prompt.tokens is not None else self.prompt
        for index in sorted({*range(prompt.samples or place.options.samples), *saved}):
            sample = saved.get(index, Sample(index))
            if sample.prompt_tokens is None and not len(sample.tokens):
                # Also one that was saved before it had begun, by whoever gave the group back.
                sample = msgspec.structs.replace(sample, prompt_tokens=own_prompt)
            if not place.options.partial_rollout and not finished(sample) and len(sample.tokens):
                place.counters.tokens_discarded += len(sample.tokens)
                sample = msgspec.structs.replace(begun_again(sample), prompt_tokens=own_prompt)
                self._rewrites += 1
            self.samples[index] = sample
            if not len(sample.tokens):
                self._unbegun[index] = sample
            try:
                check_prefix(sample, len(self.prompt), place.plan)
            except BadInput as error:
                raise PrefixRefused(str(error)) from error
        if any(len(sample.tokens) for sample in self.samples.values()):
            self._drop_if_stale()
        # Surplus of an earlier rollout, which an in-memory queue leases anew, was counted when it was handed in.
        scored = place.hooks.reward is None or all(sample.reward is not None for sample in self.samples.values())
        self._counted = scored and self.lease.stage == "ready" and self._complete()
        if not self._counted:
            place.counters.tokens_resumed += sum(len(sample.tokens) for sample in self.samples.values())

    def _drop_if_stale(self) -> Verdict:
        """Throws everything away if the group is too old by the worker's policy; what is saved of it goes with the next
        save."""
        verdict = verdict_on(self.place, self.group, self.samples.values())
        if verdict == "drop":
            log.info("task %s is dropped as stale at policy version %s, and starts anew", self.task, self.place.served)
            for sample in start_anew(self.place.counters, self.samples, self._unbegun).values():
                self.put(sample)
            self._rewrites += 1
        return verdict

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
        try:
            if self.place.hooks.generate is None:
                await self._generate_by_requests(index)
            else:
                await generate_by_function(self, index)
            self.place.counters.samples_finished += finished(self.samples[index])
        except BaseException:
            self.stop.set()
            raise
        finally:
            if index not in self._unconfirmed:
                # The answer is here, or its connection is closed: either way the engine does not run it on.
                self.place.admission.sample_finished(self.attempt, index)

    async def _generate_by_requests(self, index: int) -> None:
        place = self.place
        while True:
            step = next_step(self.samples[index], self.prompt, place.plan)
            if isinstance(step, Sample):
                if step is not self.samples[index]:
                    self.put(step)
                return
            if self.stop.is_set():
                return
            if place.hold.stopped.is_set():
                await first_of(place.hold.released, self.stop)
                continue
            stopped_by = AnyOf(self.stop, place.hold.stopped, self.cut)
            segment = await self.request(index, step, stopped_by)
            await self._take(index, segment)
            if segment.tokens or segment.finish != "abort" or stopped_by.is_set():
                self._empty_abort_s = EMPTY_ABORT_S
            else:
                await self.pause_after_empty_abort()

    async def pause_after_empty_abort(self) -> None:
        """Somebody else aborts what we send, or the engine does: ask again, not at once."""
        self.place.counters.retries += 1
        await first_of(self.stop, timeout=self._empty_abort_s)
        self._empty_abort_s = min(2 * self._empty_abort_s, EMPTY_ABORT_MAX_S)

    async def request(self, index: int, request: GenerateRequest, stop: AnyOf) -> Segment:
        """One request for the sample, counted; `EngineRefused` if the engine does not take it as it is, `EngineGarbled`
        if its answer makes no sense."""
        place = self.place
        flight: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flying.add(flight)
        place.counters.requests += 1
        try:
            segment = await place.fleet.generate(request, stop)
        except Misaligned as error:
            raise EngineGarbled(str(error)) from error
        except AbortUnconfirmed as error:
            self._unconfirmed.add(index)
            place.unconfirmed.note(self.attempt, index, error.engine_url)
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
        taking: Any = (take_segment, sample, segment, len(self.prompt), place.plan)
        taken: Sample = await asyncio.to_thread(*taking) if size > IN_THREAD_BYTES else taking[0](*taking[1:])
        if segment.finish == "abort" and not place.options.partial_rollout:
            place.counters.tokens_discarded += len(taken.tokens)
            taken = self._anew(index)
        place.counters.tokens_masked += int(sample.loss_mask.sum()) - int(taken.loss_mask[: len(sample.tokens)].sum())
        if taken is not sample or self._rewrites > self._rewritten:
            self.put(taken)

    def put(self, sample: Sample) -> None:
        self.samples[sample.index] = sample
        self._changed = True
        self.grown.set()

    def _complete(self) -> bool:
        return all(finished(sample) for sample in self.samples.values())

    # -- saving -------------------------------------------------------------------------------------------------

    async def cut_requests(self) -> None:
        flying, cut = list(self._flying), self.cut
        self.cut = asyncio.Event()
        cut.set()
        if flying:
            await asyncio.wait(flying)
            await asyncio.sleep(0)  # lets each sample take its answer

    def unsaved(self) -> int:
        saved = token_count(self.work.group) if self.work is not None else 0
        return sum(len(sample.tokens) for sample in self.samples.values()) - saved

    def _snapshot(self) -> Group:
        """The group as it is now. Samples without a token are left out until there is something to say of them, and
        unfinished ones where prefixes are not kept."""
        saved = {sample.index for sample in self.group.samples} | with_drops(self.samples)
        samples = [
            sample
            for index, sample in sorted(self.samples.items())
            if finished(sample) or index in saved or (self.keeps_prefixes and (len(sample.tokens) or sample.metadata))
        ]
        return msgspec.structs.replace(self.group, samples=tuple(samples))

    # -- the end ------------------------------------------------------------------------------------------------

    async def _judge(self) -> DynamicFilterOutput | None:
        """Score and filter the complete group. None if the worker has to stop first: whoever goes on scores it."""
        found = await judged_unless(self.stop, self.place, self._snapshot())
        if found is None:
            return None
        group, verdict = found
        for sample in group.samples:
            self.put(sample)
        return verdict

    async def _hand_in(self, verdict: DynamicFilterOutput) -> None:
        async with self.lock:
            if self.lost:
                return
            reason = verdict.reason or ""
            if verdict.keep:
                age = self._drop_if_stale()
                if age == "drop":
                    await self._yield_now()
                    return
                self.place.counters.stale_late += age == "late"
                standing = await self.report("complete", self._snapshot())
            else:
                standing = await self.report("drop", None, reason)
            if standing == "stale":
                return
            self.end = "accepted" if verdict.keep else "dropped"
            if verdict.keep:
                self.place.accepted(not self._counted)
            else:
                self.place.dropped(reason)

    async def give_back(self) -> None:
        async with self.lock:
            if not self.lost and self.work is not None:
                await self._yield_now()

    async def _yield_now(self) -> None:
        group = self._snapshot() if self._changed else None
        if await self.report("yield", group) != "stale":
            self.end = "yielded"
            self.place.counters.groups_yielded += 1

    async def report(self, outcome: Any, group: Group | None, reason: str = "", *, retryable: bool = True) -> Standing:
        rewrites = self._rewrites  # more may come while this is under way
        rewrite = rewrites > self._rewritten and group is not None
        standing = await self.place.reporter.report(Change(self.work, outcome, group, reason, retryable, rewrite))
        if standing == "stale":
            self.lose("the report does not count")
        elif group is not None:
            self._rewritten = rewrites
        return standing

    def _drop_work(self) -> None:
        self.end = "stale"
        self.place.counters.groups_stale += 1
        self.place.counters.tokens_discarded += max(0, self.unsaved())
        log.info("task %s: lease %s is not ours any more (%s); dropped", self.lease.task, self.attempt, self.lost)
