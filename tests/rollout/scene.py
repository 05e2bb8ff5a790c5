"""An engine in a thread, and slime's in-memory data source in small."""

import asyncio
import json
import threading
import time
import urllib.request
from collections import deque

import msgspec

from strawq.handles import Held
from strawq_workers.engine.launch import running_engine
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.vocabulary import decode_tokens
from strawq_workers.slime.sample import Sample

WAIT_S = 30.0
SLOW = {"max_running_requests": 6, "tokens_per_second": 200.0}
"""Three groups of two run at once, for as long as their budget says."""


def until(what, probe):
    end = time.monotonic() + WAIT_S
    while not probe():
        assert time.monotonic() < end, f"not within {WAIT_S} s: {what}"
        time.sleep(0.005)


def once(probe):
    """True for good when `probe` has been true."""
    seen = []

    def probe_again():
        if not seen and probe():
            seen.append(True)
        return bool(seen)

    return probe_again


class EngineThread:
    """An embedded engine on an event loop of its own."""

    def __init__(self, **options) -> None:
        self._ready = threading.Event()
        self._end = None
        self._options = EngineOptions(**{"weight_version": "1", **options})
        self.url = ""
        self.engine = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    async def _serve(self):
        self._end, self._loop = asyncio.Event(), asyncio.get_running_loop()
        async with running_engine(self._options) as (url, engine):
            self.url, self.engine = url, engine
            self._ready.set()
            await self._end.wait()

    def running(self) -> int:
        """Requests that the engine works on."""
        call = asyncio.run_coroutine_threadsafe(self.engine.call(lambda scheduler: len(scheduler._all())), self._loop)
        return call.result(WAIT_S)

    def generated(self) -> int:
        """Tokens that it has made."""
        return self.engine._scheduler.generated_tokens

    def pace(self, tokens_per_second):
        """How fast each request goes from now on, those under way included."""
        scheduler = self.engine._scheduler
        scheduler.options = msgspec.structs.replace(scheduler.options, tokens_per_second=tokens_per_second)

    def pace_after(self, tokens, tokens_per_second):
        """From the step on that has made so many tokens in all."""
        scheduler = self.engine._scheduler
        usual = scheduler._apply_updates

        def apply_updates():
            if scheduler.generated_tokens > tokens:
                scheduler._apply_updates = usual
                self.pace(tokens_per_second)
            usual()

        scheduler._apply_updates = apply_updates

    def set_version(self, version):
        """New weights, told by nobody but the engine."""
        request = urllib.request.Request(
            f"{self.url}/update_weight_version",
            data=json.dumps({"new_version": version, "abort_all_requests": False}).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            assert json.load(answer)["success"]

    def close(self):
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(WAIT_S)


class ListSource:
    """slime's in-memory data source in small: a buffer, then prompts in order, each handed out once."""

    def __init__(self, prompts=1000, group_size=2):
        self.left = deque(range(prompts))
        self.group_size = group_size
        self.buffer = []
        self.handed_out = []
        self.threads = set()

    def get_samples(self, num_samples):
        self.threads.add(threading.current_thread().name)
        groups, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        while len(groups) < num_samples and self.left:
            row = self.left.popleft()
            groups.append(
                [
                    Sample(group_index=row, index=row * self.group_size + at, prompt=f"prompt {row}")
                    for at in range(self.group_size)
                ]
            )
        self.handed_out += [group[0].group_index for group in groups]
        return groups

    def add_samples(self, samples):
        self.buffer += samples


def indices(groups):
    return [group[0].group_index for group in groups]


def tokens_of(groups):
    """Response tokens, by group and sample."""
    return [[sample.tokens[len(sample.tokens) - sample.response_length :] for sample in group] for group in groups]


def text_of(tokens):
    return decode_tokens(tokens, skip_special=True, final=True)


class MemoryScene:
    """slime's way: everything in this process."""

    def __init__(self, args, prompts):
        self.args = args
        self.data = ListSource(prompts)

    def leased(self):
        return 0

    def state(self):
        return len(self.data.handed_out), len(self.data.buffer)

    def finish(self, rollout_id):
        pass

    def revive(self):
        pass

    def waiting(self):
        """Prompts that were begun or fetched and are not trained: number, response tokens so far."""
        return [(group[0].group_index, *tokens_of([group])) for group in self.data.buffer]


class StrawScene:
    """The data source on a pool."""

    def __init__(self, args, data):
        self.args = args
        self.data = data

    def leased(self):
        counts = self.data.pool.queue().counts()
        return counts.fresh_leased + counts.partial_leased

    def state(self):
        return self.data.pool.queue().counts()

    def finish(self, rollout_id):
        self.data.finish(rollout_id)

    def revive(self):
        queue = self.data.pool.queue()
        queue.retry_failed([task.id for task in queue.dead_letters()])

    def waiting(self):
        def view(machine):
            state = machine.state
            tasks = [task for task in state.branch.queues["rollout"].tasks.values() if task.pending]
            return [
                Held(task, {part.object: state.objects[part.object] for part in task.parts})
                for task in sorted(tasks, key=lambda task: task.order)
                if task.stage != "fresh" or task.attempt
            ]

        found = []
        for held in self.data.pool.log.refresh(view):
            group = self.data.pool.payloads.load(held)
            samples = {sample.index: sample.tokens.tolist() for sample in group.samples}
            found.append((int(group.prompt.group_id), [samples.get(at, []) for at in range(2)]))
        return found
