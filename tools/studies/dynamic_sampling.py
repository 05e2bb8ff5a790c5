"""Dynamic sampling: what three ways of replacing dropped groups leave running, lose, and let idle.

    python tools/studies/dynamic_sampling.py [--json] [--rollouts N]

The published case. 8 groups a rollout, one prompt in four has equal rewards and is dropped, 3 rollouts. Here every
prompt whose number leaves 3 on division by 4 is dropped, and 8 engines generate one group each.

- whole batch: a drop fetches another whole batch, and the rollout returns when it has its groups, whatever still runs.
  This is the behaviour that was published as the fault; it is written out here, since no code of strawq does it.
- exact top-up: a drop fetches one group (`RolloutPlan` with `max_surplus=0`).
- strawq: free engines are filled while groups are missing (`RolloutPlan` as it is by default); what the batch does not
  need goes back to the queue as ready or partial, and the next rollout is served those first.

The tail. Exact top-up leaves engines idle while the last group runs. The case of four engines and four groups of one
time unit shows it purest; the others repeat it with 8 engines, and with uneven times (each group takes 0.5 to 1.5
units, one in eight takes 4).

The model. A group occupies one engine for its time. A partial group keeps what it has and later needs only the rest.
Complete groups are judged one by one in the order they were started. Rollouts follow each other at once; training
between them is not counted as idle time, and a resumed prefix costs nothing to read again. Idle time is counted from
the start of each rollout to its return. What may start, and the account at the end, are decided by
`strawq_workers.admission`.

On the number of groups generated. When one group in four is dropped, 24 kept need 24 / (3/4) = 32 in the long run, by
any policy. The published 31 is the count of three rollouts, which end on a kept group. So 31 is compared over three
rollouts, and the long run is compared with the floor of 32; surplus would show in either as an excess, and there is
none.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # a study runs from a plain checkout
    sys.path.insert(0, str(ROOT))

from strawq_workers.admission import Admission, Limits, RolloutPlan  # noqa: E402

PUBLISHED = {  # left running, groups generated for 24 kept, prompts skipped for ever
    "whole batch": "6, 3, 5; 48 for 24; 12 skipped",
    "exact top-up": "0, 0, 0; 31 for 24; 0 skipped",
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """`target`: groups a rollout keeps. `engines`: groups that run at once. `duration`: time units by prompt number."""

    target: int
    engines: int
    rollouts: int
    duration: Callable[[int], float]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy did, in groups and shares. `judged`: kept or dropped. `started`: distinct prompts ever started.
    `lost`: started, but neither judged nor in the queue (`lost_worth_keeping`: those that the filter would keep).
    `latest`: most rollouts a group waited for its verdict."""

    in_flight_after: tuple[int, ...]
    kept: int
    judged: int
    started: int
    surplus_at_end: int
    lost: int
    lost_worth_keeping: int
    idle_share: float
    latest: int
    time: float

    @property
    def generated_per_24_kept(self) -> float:
        """Groups started, without those that wait in the queue for a later rollout, for 24 that were kept."""
        return 24 * (self.started - self.surplus_at_end) / self.kept


class Running(msgspec.Struct, frozen=True):
    """A group on an engine, in time units."""

    attempt: str
    started: float
    ends: float


def is_dropped(prompt: int) -> bool:
    return prompt % 4 == 3


def unit_time(_prompt: int) -> float:
    return 1.0


def uneven_time(prompt: int) -> float:
    draw = random.Random(prompt)
    return 4.0 if draw.randrange(8) == 0 else draw.uniform(0.5, 1.5)


class Rollouts:
    """The engines and the queue, driven rollout after rollout by the worker's own plan and admission."""

    def __init__(self, case: Case, max_surplus: int | None) -> None:
        self.case = case
        self.max_surplus = max_surplus
        self.admission = Admission(Limits(groups=case.engines, group_size=1))
        self.now = 0.0
        self.busy = 0.0
        self.running: dict[int, Running] = {}  # by prompt
        self.ends: list[tuple[float, int]] = []
        self.ready: list[int] = []
        self.partial: dict[int, float] = {}  # prompt: time it still needs
        self.next_prompt = 0
        self.first_rollout: dict[int, int] = {}
        self.latest = 0
        self.judged: set[int] = set()
        self.kept = 0

    def run(self) -> Outcome:
        after = []
        for number in range(self.case.rollouts):
            self._rollout(number)
            after.append(len(self.running))
        queued = len(self.ready) + len(self.partial)
        gone = set(range(self.next_prompt)) - self.judged - set(self.ready) - set(self.partial) - set(self.running)
        return Outcome(
            in_flight_after=tuple(after),
            kept=self.kept,
            judged=len(self.judged),
            started=self.next_prompt,
            surplus_at_end=queued,
            lost=len(gone),
            lost_worth_keeping=sum(not is_dropped(prompt) for prompt in gone),
            idle_share=1 - self.busy / (self.now * self.case.engines),
            latest=self.latest,
            time=self.now,
        )

    def _rollout(self, number: int) -> None:
        plan = RolloutPlan(self.case.target, max_surplus=self.max_surplus)
        while True:
            step = plan.step(self.admission.free_groups(), ready_available=len(self.ready))
            if step.action == "done":
                break
            leased = [self.ready.pop(0) for _ in range(step.ready)]
            for prompt in leased:
                plan.fetched(str(prompt), "ready")
            for _ in range(step.generate):
                self._start(plan, number)
            for prompt in leased:
                self._judge(plan, prompt, number)
            if step.action == "wait":
                self._judge(plan, self._next_complete(), number)
        self._stop_all(plan)
        account = plan.close()
        if account.fetched != account.kept + account.dropped + account.returned:
            raise AssertionError(f"rollout {number}: {account} does not balance")

    def _start(self, plan: RolloutPlan, number: int) -> None:
        resumed = bool(self.partial)
        if resumed:
            prompt = min(self.partial)
            needs = self.partial.pop(prompt)
        else:
            prompt, self.next_prompt = self.next_prompt, self.next_prompt + 1
            needs = self.case.duration(prompt)
            self.first_rollout[prompt] = number
        running = Running(f"{prompt}/{number}", self.now, self.now + needs)
        if not self.admission.reserve(running.attempt, (0,)).granted:
            raise AssertionError(f"the plan started prompt {prompt}, but no engine is free")
        plan.fetched(str(prompt), "partial" if resumed else "fresh")
        self.running[prompt] = running
        heapq.heappush(self.ends, (running.ends, prompt))

    def _stop(self, prompt: int) -> float:
        running = self.running.pop(prompt)
        self.busy += self.now - running.started
        self.admission.release(running.attempt)
        return running.ends - self.now

    def _next_complete(self) -> int:
        self.now, prompt = heapq.heappop(self.ends)
        self._stop(prompt)
        return prompt

    def _judge(self, plan: RolloutPlan, prompt: int, number: int) -> None:
        self.judged.add(prompt)
        self.latest = max(self.latest, number - self.first_rollout[prompt])
        if is_dropped(prompt):
            plan.dropped(str(prompt), "zero_std")
        else:
            plan.kept(str(prompt))
            self.kept += 1

    def _stop_all(self, plan: RolloutPlan) -> None:
        for prompt in sorted(self.running):
            left = self._stop(prompt)
            plan.returned(str(prompt), "partial" if left > 0 else "ready")
            if left > 0:
                self.partial[prompt] = left
            else:
                self.ready.append(prompt)
        self.ready.sort()  # the queue serves the oldest first
        self.ends.clear()


def whole_batch(case: Case) -> Outcome:
    """The published fault: every drop that leaves a gap fetches `target` more groups; what still runs at the return is
    left running, and its result is thrown away."""
    now = busy = 0.0
    free, waiting, ends = case.engines, list[int](), list[tuple[float, int, int]]()
    next_prompt = kept = judged = 0
    after = []
    for number in range(case.rollouts):
        mine = kept_now = 0  # groups of this rollout that are fetched and not judged, and kept
        while kept_now < case.target:
            if mine + kept_now < case.target:
                waiting += range(next_prompt, next_prompt + case.target)
                next_prompt, mine = next_prompt + case.target, mine + case.target
            while waiting and free:
                prompt = waiting.pop(0)
                heapq.heappush(ends, (now + case.duration(prompt), prompt, number))
                busy, free = busy + case.duration(prompt), free - 1
            now, prompt, owner = heapq.heappop(ends)
            free += 1
            if owner != number:
                continue
            mine, judged = mine - 1, judged + 1
            kept_now += not is_dropped(prompt)
        kept += kept_now
        after.append(mine)
        waiting.clear()  # submitted, but its engine is never told to stop: lost like those that run
    busy -= sum(end - now for end, _, _ in ends)
    return Outcome(
        in_flight_after=tuple(after),
        kept=kept,
        judged=judged,
        started=next_prompt,
        surplus_at_end=0,
        lost=next_prompt - judged,
        lost_worth_keeping=sum(not is_dropped(prompt) for prompt in range(next_prompt)) - kept,
        idle_share=1 - busy / (now * case.engines),
        latest=0,
        time=now,
    )


def policies(case: Case) -> dict[str, Outcome]:
    return {
        "whole batch": whole_batch(case),
        "exact top-up": Rollouts(case, max_surplus=0).run(),
        "strawq": Rollouts(case, max_surplus=None).run(),
    }


def study(rollouts: int) -> dict[str, Any]:
    """The published case, the tail, and long runs of `rollouts` rollouts; shares and counts as in `Outcome`."""
    published = policies(Case(target=8, engines=8, rollouts=3, duration=unit_time))
    long_runs = {
        "4 engines, 4 groups, equal times": Case(target=4, engines=4, rollouts=rollouts, duration=unit_time),
        "8 engines, 8 groups, equal times": Case(target=8, engines=8, rollouts=rollouts, duration=unit_time),
        "8 engines, 8 groups, uneven times": Case(target=8, engines=8, rollouts=rollouts, duration=uneven_time),
    }
    tails = {name: policies(case) for name, case in long_runs.items()}
    four, eight = tails["4 engines, 4 groups, equal times"], tails["8 engines, 8 groups, uneven times"]
    ours = published["strawq"]
    return {
        "in_flight_after": list(ours.in_flight_after),
        "generated_per_24_kept": ours.generated_per_24_kept,
        "generated_per_24_kept_long_run": eight["strawq"].generated_per_24_kept,
        "generated_per_24_kept_floor": 32.0,
        "lost": ours.lost + sum(tail["strawq"].lost for tail in tails.values()),
        "idle_exact_topup": four["exact top-up"].idle_share,
        "idle_ours": four["strawq"].idle_share,
        "published_case": {name: _as_dict(outcome) for name, outcome in published.items()},
        "long_runs": {
            name: {policy: _as_dict(outcome) for policy, outcome in tail.items()} for name, tail in tails.items()
        },
    }


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    fields = msgspec.structs.asdict(outcome)
    after = fields.pop("in_flight_after")
    shown = {"in_flight_after": list(after)} if len(after) <= 3 else {"in_flight_after_max": max(after)}
    return {**shown, **fields, "generated_per_24_kept": outcome.generated_per_24_kept}


def _report(result: dict[str, Any], rollouts: int) -> Iterator[str]:
    yield "8 groups a rollout, one in four dropped, 3 rollouts, 8 engines, equal times"
    yield f"  {'':14}{'left running':>14}{'started':>9}{'kept':>6}{'judged':>8}{'queued':>8}{'lost, good':>12}"
    for name, outcome in result["published_case"].items():
        after = ", ".join(map(str, outcome["in_flight_after"]))
        counts = f"{outcome['started']:9}{outcome['kept']:6}{outcome['judged']:8}{outcome['surplus_at_end']:8}"
        lost = f"{outcome['lost']}, {outcome['lost_worth_keeping']}"
        yield f"  {name:14}{after:>14}{counts}{lost:>12}"
        if name in PUBLISHED:
            yield f"    published: {PUBLISHED[name]}"
    yield "  (how many a whole batch leaves running depends on the times of the groups, which were not published)"
    for name, tail in result["long_runs"].items():
        yield f"{name}, {rollouts} rollouts"
        yield f"  {'':14}{'engines idle':>14}{'time a rollout':>16}{'generated for 24':>18}{'lost':>6}{'queued':>8}"
        for policy, outcome in tail.items():
            rates = f"{outcome['idle_share']:14.1%}{outcome['time'] / rollouts:16.2f}"
            counts = f"{outcome['generated_per_24_kept']:18.2f}{outcome['lost']:6}{outcome['surplus_at_end']:8}"
            yield f"  {policy:14}{rates}{counts}"
    yield "(32 per 24 is the floor of any policy when one group in four is dropped; three rollouts end at 31)"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What three ways of replacing dropped groups leave running and idle.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    parser.add_argument("--rollouts", type=int, default=300, help="rollouts of the long runs (default 300)")
    options = parser.parse_args(arguments)
    if options.rollouts < 1:
        parser.error("--rollouts must be at least 1")
    result = study(options.rollouts)
    print(json.dumps(result, indent=2) if options.json else "\n".join(_report(result, options.rollouts)))


if __name__ == "__main__":
    main()
