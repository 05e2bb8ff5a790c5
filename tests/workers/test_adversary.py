"""An engine that answers garbage, hangs up, or stands still for much longer than a lease: the worker keeps its leases,
says what was wrong, and every group is accepted once, from answers that were whole."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from strawq.errors import BadInput
from strawq.pool import Pool
from strawq.samples import Prompt
from strawq_workers.worker import WorkerOptions, work
from tests.sglang.stub import Script, Stub, cut_body, drop, status

GROUPS, SAMPLES, TOKENS = 3, 2, 6
WAIT_S = 60.0


def _raw(body: bytes, kind: str = "application/json") -> Script:
    async def answer(stub: Stub, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=body, content_type=kind)

    return answer


def _but(**fields: object) -> Script:
    """What a sound engine would say, but for these fields."""

    async def answer(stub: Stub, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        count = asked["sampling_params"]["max_new_tokens"]
        return web.json_response(stub.answer(asked, count, {"type": "length", "length": count}) | fields)

    return answer


def _but_meta(**fields: object) -> Script:
    async def answer(stub: Stub, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        count = asked["sampling_params"]["max_new_tokens"]
        told = stub.answer(asked, count, {"type": "length", "length": count})
        return web.json_response(told | {"meta_info": told["meta_info"] | fields})

    return answer


GARBAGE: dict[str, tuple[Script, str]] = {
    # What comes, and what is said of it as the reason of a failed attempt; empty: it is tried again, no attempt fails.
    "bytes": (_raw(bytes(range(256)) * 8, "application/octet-stream"), ""),
    "a proxy's page": (_raw(b"<html><body>502 Bad Gateway</body></html>", "text/html"), ""),
    "nothing": (_raw(b""), ""),
    "half an answer": (cut_body, ""),
    "a closed connection": (drop, ""),
    "status 500": (status(500, "the scheduler hit an exception"), ""),
    "an empty object": (_raw(b"{}"), "meta_info is missing"),
    "a list": (_raw(b"[1, 2, 3]"), "wrong type"),
    "tokens that are words": (_but(output_ids=["a", "b"]), "output_ids"),
    "tokens outside the vocabulary": (_but(output_ids=[10**6] * TOKENS), "outside the vocabulary"),
    "negative tokens": (_but(output_ids=[-1] * TOKENS), "outside the vocabulary"),
    "more tokens than were asked for": (_but(output_ids=[1] * 50), "has 50 values"),
    "fewer log-probs than tokens": (_but_meta(output_token_logprobs=[[-1.0, 1, None]]), "logprobs 1,"),
    "a count of other tokens": (_but_meta(completion_tokens=2), "completion_tokens is 2"),
    "no end": (_but_meta(finish_reason=None), "no finish_reason"),
    "an answer to another": (_but_meta(id="b" * 32), "belongs to another request"),
}  # fmt: skip


class Watcher:
    """Another process that watches the worker's session, as others do, and says whom it took for dead."""

    def __init__(self, root: Path, lease_seconds: float) -> None:
        self.expired: list[str] = []
        self._rounds = threading.Semaphore(0)
        self._root, self._lease_seconds = root, lease_seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        with Pool.open(self._root, lease_seconds=self._lease_seconds, background=False) as pool:
            # As if on another host: only the heartbeat tells.
            pool.keeper._observer._known_dead = lambda _: False
            while not self._end.wait(pool.keeper.round_seconds):
                self.expired += pool.keeper.watch()
                self._rounds.release()

    def after(self, rounds: int) -> bool:
        """Whether it has looked so many times more."""
        while self._rounds.acquire(blocking=False):
            pass
        return all(self._rounds.acquire(timeout=WAIT_S) for _ in range(rounds))

    def close(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    engine = Stub()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    with Pool.init(path) as pool:
        pool.queue().submit([Prompt(f"g{i}", tokens=[1, 2, 3 + i]) for i in range(GROUPS)])
        pool.queue().seal()
    return path


def _options(url: str, lease_seconds: float) -> WorkerOptions:
    return WorkerOptions(
        engines=(url,), samples=SAMPLES, max_new_tokens=TOKENS, ignore_eos=True, concurrency=8, save_seconds=0.0,
        lease_seconds=lease_seconds, engine_timeout_s=20.0, abort_timeout_s=5.0,
    )  # fmt: skip


def _require_whole(root: Path, attempts_max: int) -> None:
    """Every group is there once, and made of whole answers only."""
    with Pool.open(root) as pool:
        counts = pool.queue().counts()
        assert (counts.ready, counts.failed, counts.total) == (GROUPS, 0, GROUPS), pool.queue().dead_letters()
        batch = pool.queue().take_batch(GROUPS).batch
        assert batch is not None
        for held, group in zip(batch.groups, pool.queue().read_batch(batch), strict=True):
            assert held.task.attempt <= attempts_max
            assert [sample.tokens.tolist() for sample in group.samples] == [[1, 2, 3, 4, 5, 6]] * SAMPLES
            for sample in group.samples:
                assert sample.logprobs is not None and sample.logprobs.tolist() == [-1.0] * TOKENS


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_is_named_and_no_group_is_lost_or_made_of_it(
    stub: Stub, root: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    script, words = GARBAGE[name]
    stub.script.extend([script] * 2)
    await asyncio.wait_for(work(root, _options(stub.url, 20.0)), WAIT_S)
    assert not stub.script, "the garbage was served"
    _require_whole(root, attempts_max=3)
    with Pool.open(root) as pool:
        reasons = [
            item.reason
            for seq in range(1, pool.log.refresh(lambda machine: machine.seq) + 1)
            for event in (pool.log.machine.decode(seq, pool.log.read_entry(seq).line.events))  # type: ignore[union-attr]
            for item in getattr(event, "items", ())
            if item.outcome == "fail"
        ]
    assert all(reason and "Traceback" not in reason and "\n" not in reason for reason in reasons)
    if words:
        assert any(words in reason and stub.url in reason for reason in reasons), reasons
    else:
        # A passing failure: tried again, and no attempt of a group is spent on it.
        assert reasons == [] and "is down" in caplog.text


async def test_an_engine_that_stands_still_for_many_leases_costs_no_lease(stub: Stub, root: Path) -> None:
    lease_seconds = 0.4
    stub.hold.clear()
    watcher = await asyncio.to_thread(Watcher, root, lease_seconds)
    worker = asyncio.ensure_future(work(root, _options(stub.url, lease_seconds)))
    try:
        await asyncio.wait_for(stub.arrived.wait(), WAIT_S)
        # A quarter of a lease each: the engine says nothing for ten leases.
        assert await asyncio.to_thread(watcher.after, 40)
        assert not worker.done() and watcher.expired == []
        stub.hold.set()
        await asyncio.wait_for(worker, WAIT_S)
        assert watcher.expired == []
    finally:
        stub.hold.set()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        await asyncio.to_thread(watcher.close)
    _require_whole(root, attempts_max=1)


class Endless(deque[Script]):
    """A script that never ends."""

    def popleft(self) -> Script:
        return self[0]


@pytest.mark.parametrize("name", ["an empty object", "tokens that are words", "no end"])
async def test_an_engine_that_only_talks_garbage_stops_the_worker_and_does_not_burn_the_queue(
    stub: Stub, root: Path, name: str
) -> None:
    more = 40
    with Pool.open(root) as pool:
        pool.queue().seal(False)
        pool.queue().submit([Prompt(f"m{i}", tokens=[1, 2, 3]) for i in range(more)])
        pool.queue().seal()
    stub.script = Endless([GARBAGE[name][0]])
    options = _options(stub.url, 20.0)
    with pytest.raises(BadInput, match=f"groups in a row.*{stub.url}.*{GARBAGE[name][1]}"):
        await asyncio.wait_for(work(root, options), WAIT_S)
    with Pool.open(root) as pool:
        counts = pool.queue().counts()
        assert (counts.failed, counts.total) == (0, GROUPS + more)
        assert counts.fresh_pending + counts.partial_pending == GROUPS + more
        tasks = pool.log.refresh(lambda machine: list(machine.state.branch.queues["rollout"].tasks.values()))
    assert sum(task.failures for task in tasks) <= 3 * options.refusals_max


async def test_one_engine_of_two_that_talks_garbage_costs_no_attempt(stub: Stub, root: Path) -> None:
    with Pool.open(root) as pool:
        pool.queue().seal(False)
        pool.queue().submit([Prompt(f"m{i}", tokens=[1, 2, 3]) for i in range(40)])
        pool.queue().seal()
    stub.script = Endless([GARBAGE["tokens that are words"][0]])
    sound = Stub()
    await sound.start()
    try:
        options = msgspec.structs.replace(_options(stub.url, 20.0), engines=(stub.url, sound.url))
        summary = await asyncio.wait_for(work(root, options), WAIT_S)
    finally:
        await sound.stop()
    assert (summary.counters.groups_accepted, summary.counters.groups_failed) == (GROUPS + 40, 0)
    assert stub.seen and len(stub.seen) <= options.concurrency
