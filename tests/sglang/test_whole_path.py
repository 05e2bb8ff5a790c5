"""The whole path, worker and pool against two engines that serve the same MoE model: embedded ones always, two real
SGLang servers when `make test-sglang` gives them (`STRAWQ_SGLANG_PAIR`, as `url@pid url@pid`).

Sampling is greedy, so a response that was interrupted and resumed elsewhere must be the uninterrupted one. A resume
computes the same positions in one prefill instead of one by one, and a near tie may then fall the other way: a
difference counts as explained only where the uninterrupted run itself had the two tokens within `NEAR_TIE` of each
other."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strawq import Pool, Prompt
from strawq.samples import Group, Sample
from strawq_workers.sglang import EngineClient, GenerateRequest, Sampling, Segment
from strawq_workers.worker import WorkerOptions, WorkerSummary, work
from strawq_workers.worker.loop import Worker
from tests.sglang.conftest import quick

PAIR_VARIABLE = "STRAWQ_SGLANG_PAIR"
IDS = np.arange(10, 18, dtype=np.int32)
TOKENS = 300
NEAR_TIE = 0.05
WAIT_S = 150.0
VERSIONS = itertools.count(int(time.time()))
EMBEDDED = [
    "--enable-return-routed-experts", "--incremental-streaming-output", "--host", "127.0.0.1", "--port", "0",
    "--tokens-per-second", "100", "--context-length", "512", "--weight-version", "1",
]  # fmt: skip


class Pair:
    """Two engines of one model, by URL, and the process of each, leader of its group."""

    def __init__(self, engines: dict[str, int], real: bool) -> None:
        self.engines, self.real = engines, real
        self.first, self.second = engines
        self.reference: Segment | None = None

    def kill(self, url: str) -> None:
        os.killpg(self.engines[url], signal.SIGKILL)


@pytest.fixture(scope="module")
def embedded_pair() -> Iterator[Pair]:
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            command = [sys.executable, "-m", "strawq_workers.engine", *EMBEDDED]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        engines = {}
        for process in processes:
            assert process.stdout is not None
            engines[process.stdout.readline().split()[-1]] = process.pid
        yield Pair(engines, real=False)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def real_pair() -> Pair | None:
    given = [word.rpartition("@") for word in os.environ.get(PAIR_VARIABLE, "").split()]
    return Pair({url: int(pid) for url, _, pid in given}, real=True) if given else None


REAL = real_pair()


@pytest.fixture(params=["embedded", *(["sglang"] if REAL else [])])
async def pair(request: pytest.FixtureRequest) -> Pair:
    """Both engines idle and unpaused, and the uninterrupted response that the tests compare with."""
    chosen: Pair = REAL if request.param == "sglang" and REAL else request.getfixturevalue("embedded_pair")
    for url in chosen.engines:
        client = await connect(url)
        await client.resume()
        await client.abort_all()
        await client.flush_cache()
        await client.close()
    if chosen.reference is None:
        client = await connect(chosen.first)
        sampling = Sampling(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        asked = GenerateRequest(input_ids=IDS, sampling=sampling, top_logprobs=2, routed_experts=True)
        chosen.reference = await client.attempt(asked)
        await client.flush_cache()
        await client.close()
    return chosen


async def connect(url: str) -> EngineClient:
    client = EngineClient(url, quick(abort_deadline_s=60.0, control_timeout_s=60.0))
    await client.connect()
    return client


class Stage:
    """A pool with prompts that are all the same, and workers on this event loop."""

    def __init__(self, root: Path, pair: Pair) -> None:
        self.pair = pair
        self.pool = Pool.init(root, lease_seconds=60.0)
        self.queue = self.pool.queue()
        self.worker: Worker | None = None
        self.stop = asyncio.Event()
        self._tasks: list[asyncio.Task[WorkerSummary]] = []

    def submit(self, count: int) -> None:
        self.queue.submit([Prompt(group_id=f"g{i}", tokens=IDS, samples=1) for i in range(count)])
        self.queue.seal()

    def start(self, *engines: str, **changes: Any) -> asyncio.Task[WorkerSummary]:
        usual: dict[str, Any] = {
            "engines": engines, "samples": 1, "max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True,
            "concurrency": 1, "routed_experts": True, "save_seconds": 0.0, "lease_seconds": 60.0,
            "engine_timeout_s": 120.0, "abort_timeout_s": 60.0,
        }  # fmt: skip

        def started(worker: Worker) -> None:
            self.worker = worker

        self.stop = asyncio.Event()
        options = WorkerOptions(**(usual | changes))
        self._tasks.append(asyncio.ensure_future(work(self.pool.path, options, stop=self.stop, started=started)))
        return self._tasks[-1]

    def streamed(self, url: str) -> int:
        """Tokens that the running requests of one engine have brought so far."""
        if self.worker is None:
            return 0
        clients = [engine for engine in self.worker.place.fleet.engines if engine.url == url]
        return sum(flight.answer.total for client in clients for flight in client._flights.values())

    async def until(self, what: str, probe: Callable[[], Any], task: asyncio.Task[Any]) -> None:
        end = asyncio.get_running_loop().time() + WAIT_S
        while not probe():
            if task.done():
                pytest.fail(f"the worker ended before: {what}: {task.result()}")
            assert asyncio.get_running_loop().time() < end, f"not within {WAIT_S} s: {what}"
            await asyncio.sleep(0.02)

    async def ready(self) -> list[Group]:
        def take() -> list[Group]:
            batch = self.queue.take_batch(100, consumer="audit", fewer=True).batch
            return list(self.queue.read_batch(batch)) if batch else []

        return await asyncio.to_thread(take)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.pool.close)


@pytest.fixture
async def stage(pair: Pair, tmp_path: Path) -> AsyncIterator[Stage]:
    made = await asyncio.to_thread(Stage, tmp_path / "pool", pair)
    yield made
    await made.close()


def check(sample: Sample, pair: Pair, *, same_weights_until: int = TOKENS) -> int:
    """Everything lines up, and the tokens are the reference's up to a near tie. Returns how many are."""
    reference = pair.reference
    assert reference is not None and reference.top_logprobs is not None and reference.routed_experts is not None
    assert sample.status == "truncated" and len(sample.tokens) == TOKENS
    assert sample.logprobs is not None and sample.logprobs.shape == (TOKENS,)
    r3 = np.asarray(sample.r3)
    assert r3.shape == reference.routed_experts.shape and r3.shape[0] == IDS.size + TOKENS - 1
    assert [span.start for span in sample.versions] + [TOKENS] == [0] + [span.end for span in sample.versions]
    differ = np.flatnonzero(sample.tokens != reference.output_ids)
    same = int(differ[0]) if differ.size else TOKENS
    if same < min(TOKENS, same_weights_until):
        gap = float(reference.top_logprobs[same, 0] - reference.top_logprobs[same, 1])
        assert gap < NEAR_TIE, f"token {same} differs, and the two best were {gap:.3f} apart"
        print(f"token {same} differs: a near tie, {gap:.4f} apart")
    same = min(same, same_weights_until)
    np.testing.assert_allclose(sample.logprobs[:same], reference.logprobs[:same], atol=0.1)  # type: ignore[index]
    rows = IDS.size + same - 1
    assert (r3[:rows] == reference.routed_experts[:rows]).mean() > 0.9  # an expert may tie as well
    return same


async def test_a_worker_generates_what_the_engine_does(stage: Stage) -> None:
    stage.submit(2)
    summary = await stage.start(stage.pair.first, stage.pair.second)
    groups = await stage.ready()
    assert summary.reason == "sealed" and len(groups) == 2
    for group in groups:
        check(group.samples[0], stage.pair)
        assert len(group.samples[0].segments) == 1


async def test_an_abort_in_mid_stream_is_resumed_on_the_other_server(stage: Stage) -> None:
    stage.submit(1)
    first, second = stage.pair.first, stage.pair.second
    working = stage.start(first)
    await stage.until("tokens flow", lambda: stage.streamed(first) > 20, working)
    stage.stop.set()
    summary = await working
    counts = stage.queue.counts()
    saved = summary.counters.tokens_generated
    assert summary.reason == "signal" and counts.partial_pending == 1 and 20 < saved < TOKENS
    summary = await stage.start(second)
    assert summary.counters.tokens_resumed == saved
    assert summary.counters.tokens_generated == TOKENS - saved
    (group,) = await stage.ready()
    (sample,) = group.samples
    assert [info.end - info.start for info in sample.segments] == [saved, TOKENS - saved]
    check(sample, stage.pair)


@pytest.mark.parametrize("policy", ["abort", "in_place"])
async def test_a_weight_version_that_changes_in_mid_flight_is_on_each_token(stage: Stage, policy: str) -> None:
    stage.submit(1)
    url, version = stage.pair.first, str(next(VERSIONS))
    control = await connect(url)
    before = await control.weight_version()
    working = stage.start(url, pause_policy=policy)
    await stage.until("tokens flow", lambda: stage.streamed(url) > 20, working)
    await asyncio.to_thread(stage.pool.pause, "weights")
    worker = stage.worker
    assert worker is not None
    session = worker.place.queue.session
    await stage.until(
        "the pause is acknowledged",
        lambda: (paused := stage.pool.inspect().paused) is not None and session in paused.acknowledged,
        working,
    )
    await control.update_weights_from_disk(control.model.model_path, version, flush_cache=policy == "abort")
    await asyncio.to_thread(stage.pool.resume, version)
    summary = await working
    await control.close()
    (group,) = await stage.ready()
    (sample,) = group.samples
    assert [span.version for span in sample.versions] == [before, version]
    changed = sample.versions[0].end
    assert 20 < changed < TOKENS and summary.policy_versions == (before, version)
    assert len(sample.segments) == (2 if policy == "abort" else 1)
    # The embedded engine's numbers follow the version; SGLang loads the same weights again.
    same = check(sample, stage.pair, same_weights_until=TOKENS if stage.pair.real else changed)
    assert same >= changed or stage.pair.real
    stage.pair.reference = stage.pair.reference if stage.pair.real else None


async def test_an_engine_that_is_killed_in_mid_request_costs_no_prompt(stage: Stage) -> None:
    """Last of this file: the second engine is gone afterwards."""
    stage.submit(2)
    first, second = stage.pair.first, stage.pair.second
    working = stage.start(first, second)
    await stage.until("both engines work", lambda: min(stage.streamed(first), stage.streamed(second)) > 5, working)
    stage.pair.kill(second)
    summary = await working
    groups = await stage.ready()
    assert summary.reason == "sealed" and len(groups) == 2
    assert summary.counters.groups_failed == 0
    for group in groups:
        check(group.samples[0], stage.pair)
    assert stage.queue.counts().failed == 0
