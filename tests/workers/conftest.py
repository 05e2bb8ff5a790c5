import asyncio
import contextlib
import math
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Hooks are named by dotted path, so their module must be importable by name.
sys.path.insert(0, str(Path(__file__).parent))

from strawq import Pool, Prompt
from strawq.handles import Held
from strawq.samples import Group
from strawq_workers.engine.launch import running_engine
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.request import Request
from strawq_workers.worker import WorkerOptions, WorkerSummary, work
from strawq_workers.worker.loop import Worker

WAIT_S = 30.0


class Stage:
    """A pool, an embedded engine in this process, and workers on this event loop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pool = Pool.init(root, lease_seconds=20.0)
        self.queue = self.pool.queue()
        self.url = ""
        self.engine: Any = None
        self.worker: Worker | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    def submit(self, count: int, *, seal: bool = True, **fields: Any) -> None:
        self.queue.submit([Prompt(group_id=f"g{i}", text=f"prompt {i}", **fields) for i in range(count)])
        if seal:
            self.queue.seal()

    def options(self, **changes: Any) -> WorkerOptions:
        usual: dict[str, Any] = {
            "engines": (self.url,),
            "samples": 2,
            "max_new_tokens": 24,
            "ignore_eos": True,
            "concurrency": 16,
            "engine_timeout_s": 20.0,
            "abort_timeout_s": 10.0,
            "lease_seconds": 20.0,
            "save_seconds": 0.0,
        }
        return WorkerOptions(**{**usual, **changes})

    def start(self, stop: asyncio.Event | None = None, **changes: Any) -> "asyncio.Task[WorkerSummary]":
        def started(worker: Worker) -> None:
            self.worker = worker

        task = asyncio.ensure_future(work(self.root, self.options(**changes), stop=stop, started=started))
        self._tasks.append(task)
        return task

    async def run(self, **changes: Any) -> WorkerSummary:
        return await asyncio.wait_for(self.start(**changes), WAIT_S)

    async def until(self, what: str, probe: Callable[[], Any], task: "asyncio.Task[Any] | None" = None) -> Any:
        """What `probe` finds, looked for in a thread; fails the test if it does not come, or `task` ends before."""
        end = asyncio.get_running_loop().time() + WAIT_S
        while True:
            found = await asyncio.to_thread(probe)
            if found:
                return found
            if task is not None and task.done():
                task.result()
                pytest.fail(f"the worker ended before: {what}")
            if asyncio.get_running_loop().time() > end:
                pytest.fail(f"not within {WAIT_S} s: {what}")
            await asyncio.sleep(0.02)

    def held(self, **wanted: Any) -> list[Held]:
        """Live tasks whose fields are as wanted."""

        def view(machine: Any) -> list[Held]:
            state = machine.state
            return [
                Held(task, {part.object: state.objects[part.object] for part in task.parts})
                for task in state.branch.queues["rollout"].tasks.values()
                if all(getattr(task, name) == value for name, value in wanted.items())
            ]

        found: list[Held] = self.pool.log.refresh(view)
        return found

    def groups(self, **wanted: Any) -> list[Group]:
        return [self.pool.payloads.load(held) for held in self.held(**wanted)]

    def in_flight(self) -> int:
        worker = self.worker
        return 0 if worker is None else sum(len(run._flying) for run in worker.runs.values())

    def unsaved(self) -> int:
        """Response tokens that the worker's groups have in memory."""
        worker = self.worker
        return 0 if worker is None else worker.place.counters.tokens_generated

    def stand_at(self, tokens: int, where: Callable[[Request], bool] = lambda _: True) -> None:
        """Each request stands still when it has made so many tokens, if it is one of those `where`, until `go_on`: what
        a test does meanwhile happens in mid-generation, however slow the machine is. Call it before work begins."""
        scheduler = self.engine._scheduler
        record = type(scheduler)._record

        def record_and_stand(request: Request, *made: Any) -> None:
            record(scheduler, request, *made)
            if request.output_length >= tokens and where(request):
                request.due = math.inf

        scheduler._record = record_and_stand
        wait = type(scheduler).wait_seconds
        # Nothing to do now: a wait without an end is None.
        scheduler.wait_seconds = lambda now: None if (found := wait(scheduler, now)) == math.inf else found

    def stand_in_the_second_request(self) -> None:
        """Of each sample of one group the first request is over, and the next one stands in mid-generation."""
        prompts: list[int] = []

        def is_later(request: Request) -> bool:
            prompts.append(request.prompt_length)
            return request.prompt_length > min(prompts)

        self.stand_at(2, is_later)

    def standing(self) -> int:
        """Requests that stand still in mid-generation."""
        return sum(request.due == math.inf for request in self.engine._scheduler._all() if request.finish is None)

    async def go_on(self) -> None:
        """Requests that stand go on, and no other one will stand."""

        def release(scheduler: Any) -> None:
            del scheduler._record
            for request in scheduler._all():
                request.due = 0.0

        await self.engine.call(release)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.pool.close)


@pytest.fixture
def stage_of(tmp_path: Path) -> Callable[..., Any]:
    """`async with stage_of(**engine options) as stage`."""

    @contextlib.asynccontextmanager
    async def make(**engine: Any) -> AsyncIterator[Stage]:
        stage = await asyncio.to_thread(Stage, tmp_path / "pool")
        try:
            async with running_engine(EngineOptions(**{"weight_version": "1", **engine})) as (url, thread):
                stage.url, stage.engine = url, thread
                try:
                    yield stage
                finally:
                    await stage.close()
        finally:
            await asyncio.to_thread(stage.pool.close)

    return make
