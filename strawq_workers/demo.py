"""`strawq demo`: a small rollout, with everything real and one worker killed in the middle of it.

A pool on this machine's disk, the embedded engine behind HTTP in a process of its own, two worker processes, and a
trainer (this process) that takes batches. While tokens are being generated, one worker is killed with SIGKILL; later
the weights change under a running group. Then the pool is audited: every prompt must be accounted for exactly once,
and what the killed worker had saved must be the beginning of what was handed in.

The rule: what is reported is counted, not assumed, and every process that was started is ended, whatever happens.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from strawq.errors import BadInput, StrawqError, TryAgain
from strawq.handles import Held
from strawq.model import Task
from strawq.pool import Pool
from strawq.samples import Group, Prompt, token_count
from strawq_workers.collector import CollectedBatch, Collector
from strawq_workers.narration import Narrator, describe, kept_to_look_at, narrator
from strawq_workers.processes import Child, Children
from strawq_workers.worker.options import WorkerOptions

T = TypeVar("T")

LEASE_SECONDS = 1.5
SAMPLES = 4
MAX_NEW_TOKENS = 48
SAVE_TOKENS = 8
TOKENS_PER_SECOND = 40.0
CONCURRENCY = 24
GROUPS_IN_HAND = CONCURRENCY // SAMPLES
TOKENS_AT_STAKE = 2 * SAVE_TOKENS * SAMPLES
LIMIT_SECONDS = 120.0
LOOK_SECONDS = 0.02
QUEUE = "rollout"


class DemoSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What happened. `tokens_generated` is the engine's own count; `tokens_resumed` were loaded from the pool and not
    generated again; `tokens_again` are those that the killed worker had not saved yet. `prefixes_kept` of
    `prefixes_saved` samples of the killed worker begin, in the end, with the tokens that it had saved."""

    groups_accepted: int
    batches: int
    tokens_accepted: int
    tokens_generated: int
    tokens_resumed: int
    tokens_again: int
    leases_expired: int
    duplicates: int
    lost: int
    prefixes_saved: int
    prefixes_kept: int
    policy_versions_seen: list[str]
    groups_of_two_versions: int
    staleness: list[dict[str, float]]
    pool: str
    logs: str
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether the audit found nothing wrong."""
        return self.lost == 0 and self.duplicates == 0 and self.prefixes_kept == self.prefixes_saved


def demo_prompts(count: int) -> list[Prompt]:
    """The first `count` prompts of the file that comes with the package."""
    text = (resources.files("strawq_workers") / "data" / "demo_prompts.jsonl").read_text(encoding="utf-8")
    rows = [jsonlib.loads(line) for line in text.splitlines() if line]
    if not 0 < count <= len(rows):
        raise BadInput(f"the demo has prompts for 1 to {len(rows)} groups, not {count}")
    return [Prompt(group_id=row["group_id"], text=row["text"], label=row["label"]) for row in rows[:count]]


def short_answer_reward(_args: Any, sample: Any) -> float:
    """A reward that needs the text: 1 for the label in the answer, else a little for each of its characters."""
    label = str(sample.label)
    found = sum(character in sample.response for character in set(label)) / max(1, len(set(label)))
    return 1.0 if label in sample.response else round(found / 2, 3)


def run_demo(
    root: str | os.PathLike[str] | None = None,
    json: bool = False,
    *,
    batches: int = 3,
    groups: int = 8,
    say: Callable[[str], None] | None = None,
) -> DemoSummary:
    """Run it. `root` is a directory for the pool, new or empty (None: a temporary one, which is kept). With `json`
    nothing is said on the way; else `say` gets lines, or a terminal shows bars on stderr.

    `batches` of `groups` groups each are taken, in any size that there are prompts for. Raises `TryAgain` if it does
    not get there within two minutes."""
    prompts = demo_prompts(batches * groups)
    where = Path(root).absolute() if root is not None else Path(tempfile.mkdtemp(prefix="strawq-demo-"))
    logs = where.with_name(where.name + "-logs")
    logs.mkdir(parents=True, exist_ok=True)
    with (
        kept_to_look_at(where, logs),
        narrator(len(prompts), batches, json, say) as tell,
        Children(logs) as children,
        Pool.init(where, role="demo trainer", lease_seconds=LEASE_SECONDS) as pool,
    ):
        return _Demo(pool, children, tell, prompts, batches, groups).run()


class _Demo:
    def __init__(
        self, pool: Pool, children: Children, tell: Narrator, prompts: list[Prompt], batches: int, groups: int
    ) -> None:
        self.pool = pool
        self.children = children
        self.tell = tell
        self.prompts = prompts
        self.batches = batches
        self.groups = groups
        self.queue = pool.queue(QUEUE)
        self.started = time.monotonic()
        # With what is left for later batches all in hand already, no group would be running when the first is taken.
        self.small = (batches - 1) * groups <= GROUPS_IN_HAND
        self.engine_url = ""
        self.delivered: list[Group] = []
        self.staleness: list[dict[str, float]] = []
        self.saved: dict[str, dict[int, list[int]]] = {}

    def run(self) -> DemoSummary:
        self.pool.publish_version(1)
        self.queue.submit(self.prompts, producer="demo", cursor=str(len(self.prompts)))
        self.queue.seal()
        self.tell.say(f"pool {self.pool.path}: {len(self.prompts)} prompts, {SAMPLES} answers wanted for each")
        self._start_engine()
        victim = self._start_worker(0)
        if self.small:  # a second one beside it might take all that there is
            self._kill_in_mid_lease(victim)
            survivor = self._start_worker(1)
            self._change_weights(survivor)
        else:
            survivor = self._start_worker(1)
            self._kill_in_mid_lease(victim)
        self._until("the killed worker's leases expire", lambda: not self._leases(victim.pid))
        self.tell.say("its leases have expired; the other worker goes on from the saved tokens")
        collector = Collector(self.pool, QUEUE)
        for number in range(1, self.batches + 1):
            self._train(collector, number)
            if number == 1 and not self.small:
                self._change_weights(survivor)
        worker = survivor.answer(self._left())
        return self._audit(worker)

    # -- the cast -----------------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        engine = self.children.start(
            "engine",
            [
                "-m", "strawq_workers.engine", "--port", "0", "--weight-version", "1",
                "--tokens-per-second", str(TOKENS_PER_SECOND), "--enable-return-routed-experts",
            ],
        )  # fmt: skip
        self.engine_url = engine.first_line(self._left())
        self.tell.say(f"engine {self.engine_url} (pid {engine.pid}), {TOKENS_PER_SECOND:g} tokens/s for each answer")

    def _start_worker(self, index: int) -> Child:
        options = WorkerOptions(
            engines=(self.engine_url,),
            role=f"demo worker {index + 1}",
            lease_seconds=LEASE_SECONDS,
            concurrency=CONCURRENCY,
            workers=2,
            worker_index=index,
            samples=SAMPLES,
            max_new_tokens=MAX_NEW_TOKENS,
            routed_experts=True,
            save_tokens=SAVE_TOKENS,
            reward="strawq_workers.demo:short_answer_reward",
            log_seconds=2.0,
        )
        arguments = ["-m", "strawq_workers.worker", self.pool.path, "-"]
        worker = self.children.start(f"worker-{index + 1}", arguments, stdin=msgspec.json.encode(options))
        self.tell.say(f"worker {worker.pid} leases groups and generates")
        return worker

    # -- the plot -----------------------------------------------------------------------------------------------

    def _kill_in_mid_lease(self, victim: Child) -> None:
        """Freeze the worker when the log shows saved progress under its leases, look once more, and kill it."""
        held: list[Held] = []
        while not held:
            self._until("a worker has saved progress", lambda: self._at_stake(victim.pid) or self._all_handed_in())
            if self._all_handed_in():
                break
            victim.freeze()
            held = self._at_stake(victim.pid)
            if not held:  # it has handed a group in since
                victim.thaw()
        groups = [self.pool.payloads.load(part) for part in held]
        victim.kill()
        self.saved = {group.task_id: {s.index: s.tokens.tolist() for s in group.samples} for group in groups}
        tokens = sum(token_count(group) for group in groups)
        self.tell.say(f"worker {victim.pid} is killed; it had saved {tokens} tokens of unfinished groups")

    def _train(self, collector: Collector, number: int) -> None:
        batch = collector.next_batch(self.groups, timeout=self._left(), wait=self._wait)
        if batch is None:
            raise TryAgain(f"the queue was used up before batch {number} of {self.batches}")
        self._read(batch)
        collector.finish(batch)
        self.staleness.append(batch.metrics())
        self.tell.say(f"batch {number}: {len(batch)} groups at policy version {batch.served}, read and verified")
        self.tell.show(self.queue.counts().trained, number, self._accepted())

    def _read(self, batch: CollectedBatch) -> None:
        for group in batch:
            for sample in group.samples:
                _require_whole(group, sample)
            self.delivered.append(group)

    def _change_weights(self, survivor: Child) -> None:
        """As a trainer does: pause, wait until the worker has stopped and saved, load, resume."""
        self._until("a group is in the middle of its answers", lambda: self._partial() or self._all_handed_in())
        self.pool.pause("weights for policy version 2")
        self._until("the pause is acknowledged", lambda: self._acknowledged(survivor.pid) or self._all_handed_in())
        body = jsonlib.dumps({"model_path": "demo-weights-2", "weight_version": "2"}).encode()
        self._ask("/update_weights_from_disk", body)
        running = self._partial()
        self.pool.resume(2)
        self.tell.say(f"weights changed to policy version 2, unfinished groups go on from their prefixes: {running}")

    def _audit(self, worker: dict[str, Any]) -> DemoSummary:
        """Counts from a pool that is opened anew, the delivered groups, and the engine's own counter."""
        generated = int(self._ask("/server_info")["generated_tokens"])
        with Pool.open(self.pool.path, role="demo audit") as fresh:
            queue = fresh.queue(QUEUE)
            counts, view = queue.counts(), fresh.inspect().queues[QUEUE]
            alive = _alive(fresh)
        names = [group.prompt.group_id for group in self.delivered]
        submitted = {prompt.group_id for prompt in self.prompts}
        missing = submitted - set(names) - alive
        kept = sum(
            _begins(group, index, tokens)
            for group in self.delivered
            for index, tokens in self.saved.get(group.task_id, {}).items()
        )
        versions = [sorted({span.version for s in group.samples for span in s.versions}) for group in self.delivered]
        accepted = sum(token_count(group) for group in self.delivered)
        return DemoSummary(
            groups_accepted=view.accepted,
            batches=len(self.staleness),
            tokens_accepted=accepted,
            tokens_generated=generated,
            tokens_resumed=worker["counters"]["tokens_resumed"],
            tokens_again=generated - accepted,
            leases_expired=view.expirations,
            duplicates=len(names) - len(set(names)) + max(0, view.accepted - counts.trained - counts.ready),
            lost=len(missing) + max(0, len(submitted) - counts.total),
            prefixes_saved=sum(len(samples) for samples in self.saved.values()),
            prefixes_kept=kept,
            policy_versions_seen=sorted({version for each in versions for version in each}),
            groups_of_two_versions=sum(len(each) > 1 for each in versions),
            staleness=self.staleness,
            pool=self.pool.path,
            logs=str(self.children.logs),
            seconds=round(time.monotonic() - self.started, 1),
        )

    # -- looking ------------------------------------------------------------------------------------------------

    def _partial(self) -> int:
        """How many unfinished groups have saved tokens, whoever holds them."""
        count: int = self.pool.log.refresh(lambda machine: sum(map(_unfinished, _tasks(machine.state))))
        return count

    def _at_stake(self, pid: int) -> list[Held]:
        """The groups with saved tokens that a process holds leases of, once it has saved something of each answer."""
        leases = self._leases(pid)
        held = [lease for lease in leases if _unfinished(lease.task)]
        return held if sum(part.task.tokens for part in held) >= TOKENS_AT_STAKE * max(1, len(leases)) else []

    def _leases(self, pid: int) -> list[Held]:
        def view(machine: Any) -> list[Held]:
            state = machine.state
            own = {session.id for session in state.sessions.values() if session.pid == pid}
            return [_held(state, task) for task in _tasks(state) if task.session in own]

        found: list[Held] = self.pool.log.refresh(view)
        return found

    def _acknowledged(self, pid: int) -> bool:
        def view(machine: Any) -> bool:
            pause = machine.state.branch.meta.pause
            own = {session.id for session in machine.state.sessions.values() if session.pid == pid}
            return pause is not None and bool(own) and own <= set(pause.acknowledged)

        answer: bool = self.pool.log.refresh(view)
        return answer

    def _all_handed_in(self) -> bool:
        """Then nothing is left to be killed in, or to change weights under."""
        return self._accepted() >= len(self.prompts)

    def _accepted(self) -> int:
        counts = self.queue.counts()
        return counts.ready + counts.in_batch + counts.trained

    def _until(self, what: str, probe: Callable[[], T]) -> T:
        while True:
            found = probe()
            if found:
                return found
            if self._left() <= 0:
                raise TryAgain(f"not within {LIMIT_SECONDS:g} s: {what}; logs are in {self.children.logs}")
            self._wait(LOOK_SECONDS)

    def _wait(self, seconds: float) -> None:
        self.children.require_alive()
        counts = self.queue.counts()
        self.tell.show(counts.trained, len(self.staleness), counts.ready + counts.in_batch + counts.trained)
        time.sleep(min(seconds, 0.1))

    def _left(self) -> float:
        return self.started + LIMIT_SECONDS - time.monotonic()

    def _ask(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self.engine_url + path, data=body, headers={"Content-Type": "application/json"} if body else {}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = jsonlib.load(answer)
        return found


def _alive(pool: Pool) -> set[str]:
    """Group ids of what has not ended in the pool: waiting, leased, ready, in a batch, or failed."""
    held = pool.log.refresh(lambda machine: [_held(machine.state, task) for task in _tasks(machine.state)])
    return {pool.payloads.prompt(part).group_id for part in held}


def _tasks(state: Any) -> list[Task]:
    return list(state.branch.queues[QUEUE].tasks.values())


def _unfinished(task: Task) -> bool:
    return task.stage == "partial" and task.tokens > 0


def _held(state: Any, task: Task) -> Held:
    return Held(task, {part.object: state.objects[part.object] for part in task.parts})


def _require_whole(group: Group, sample: Any) -> None:
    """A trainer's own check of what it was given."""
    count = len(sample.tokens)
    whole = (
        sample.status in ("completed", "truncated")
        and count > 0
        and sample.logprobs is not None
        and len(sample.logprobs) == len(sample.loss_mask) == count
        and sum(span.end - span.start for span in sample.versions) == count
        and len(sample.r3[:]) == len(sample.prompt_tokens) + count - 1
        and sample.reward is not None
    )
    if not whole:
        raise StrawqError(f"group {group.task_id}, sample {sample.index}: handed in, but not whole")


def _begins(group: Group, index: int, tokens: list[int]) -> bool:
    return any(s.index == index and s.tokens[: len(tokens)].tolist() == tokens for s in group.samples)


def main() -> int:
    """`python -m strawq_workers.demo [--json] [POOL]`."""
    words = sys.argv[1:]
    as_json = "--json" in words
    paths = [word for word in words if word != "--json"]
    try:
        summary = run_demo(paths[0] if paths else None, as_json)
    except StrawqError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(msgspec.json.encode(summary).decode() if as_json else describe(summary), flush=True)
    return 0 if summary.sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
