"""Group admission against sample admission on groups with one long answer: a simulation of the published controlled
case.

    python tools/studies/refill.py [--json] [--engines-stop]

The case. 128 prompts, 16 a training batch, 8 samples a group, 128 sample slots on 8 engines, at most 48 groups
unconsumed (ready or in flight), 10 s of training after each batch. Uneven: seven answers of 1,024 tokens and one of
16,384 in every group. Control: eight of 4,096. A batch is the first 16 complete groups; taking it opens the window for
16 more.

The model. What is admitted, and when, is decided by the worker's own code (`strawq_workers.admission`), with the limits
above and nothing else. Engines are simulated token by token: a decode step gives each running sample one token and
takes

    step = weights + context · (tokens that the running samples have so far)

which is what reading the weights once and the KV cache once costs on memory-bound decoding. Samples join and leave
between steps; a sample goes to the engine with the fewest. Prompts have no tokens, prefill and scoring take no time.

The two speed parameters are the only thing fitted to published figures, and to the two of group admission alone: the
mean batch intervals before the change, 21.82 s (control) and 73.99 s (uneven). With group admission all 16 groups of a
wave run in step, so both follow from one linear equation each (`calibrate`), which takes the long answers as spread
evenly over the engines. Every figure of sample admission is a prediction, and so is what uneven spreading adds to
group admission.

What is not in the model. The published totals hold 141 s that the intervals of batches 2 to 6 do not (8 x 21.82 s
leaves 141.4 s of 315.95 s, 8 x 73.99 s leaves 141.2 s of 733.13 s): time outside the steady state that does not depend
on the lengths, such as start-up and warm-up. The study has none. It prints its own totals, and beside them the totals
with that constant added to both kinds of admission.

The training pause. By default the trainer is busy for 10 s after each batch and generation goes on. `--engines-stop`
is the other reading: engines stand still during it, and intervals are given in engine time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # a study runs from a plain checkout
    sys.path.insert(0, str(ROOT))

from strawq_workers.admission import Admission, Limits, divide_samples, divide_slots, total_slots  # noqa: E402

UNEVEN = (1024,) * 7 + (16_384,)
EQUAL = (4096,) * 8
SEEDS = range(8)


class Published(msgspec.Struct, frozen=True):
    """Published figures of one case: (group admission, sample admission), in seconds, and answer tokens."""

    interval_s: tuple[float, float]
    total_s: tuple[float, float]
    tokens: int


PUBLISHED = {
    "uneven": Published((73.99, 26.12), (733.13, 453.93), 3_014_656),
    "equal": Published((21.82, 21.86), (315.95, 316.22), 4_194_304),
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One case. `lengths`: answer tokens of each sample of every group. Times in seconds."""

    lengths: tuple[int, ...]
    prompts: int = 128
    batch_groups: int = 16
    engines: int = 8
    concurrency: int = 16
    window_groups: int = 48
    pause_s: float = 10.0
    engines_stop: bool = False
    places: tuple[int, ...] = ()

    def lengths_of(self, prompt: int) -> tuple[int, ...]:
        """Answer tokens by sample index, turned by one place from one prompt to the next, or as `places` says."""
        turn = (self.places[prompt] if self.places else prompt) % len(self.lengths)
        return self.lengths[turn:] + self.lengths[:turn]


class Decode(msgspec.Struct, frozen=True):
    """Decode speed of one engine, in seconds: per step, and per step and token of context."""

    weights_s: float
    context_s: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one simulated run. `intervals_s[i]`: from batch i + 1 to batch i + 2; tokens in answer tokens."""

    intervals_s: tuple[float, ...]
    total_s: float
    generated: int
    delivered: int
    expected: int
    mean_running: float
    groups_delivered: int

    @property
    def mean_interval_s(self) -> float:
        """Mean over batches 2 to 6, as published."""
        return sum(self.intervals_s[:5]) / len(self.intervals_s[:5])

    @property
    def lost(self) -> int:
        """Tokens that were generated, or due, and are in no delivered group."""
        return max(self.generated, self.expected) - self.delivered


def calibrate(case_equal: Case, interval_equal_s: float, case_uneven: Case, interval_uneven_s: float) -> Decode:
    """Solve the two speed parameters from the wave times of two cases under group admission.

    A wave of group admission holds the same samples on each engine, all started together: its steps are counted by the
    longest sample, and its context by the sum over steps of the running samples' tokens.
    """
    steps_e, context_e = _wave(case_equal)
    steps_u, context_u = _wave(case_uneven)
    determinant = steps_e * context_u - steps_u * context_e
    weights = (interval_equal_s * context_u - interval_uneven_s * context_e) / determinant
    context = (steps_e * interval_uneven_s - steps_u * interval_equal_s) / determinant
    return Decode(weights, context)


def _wave(case: Case) -> tuple[int, float]:
    groups = total_slots(case.concurrency, case.engines) // len(case.lengths)
    share = groups / case.engines
    return max(case.lengths), share * sum(length * (length - 1) / 2 for length in case.lengths)


class Engine:
    """One engine between two decode steps. `at_s` is the time of the last step boundary that was computed."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.at_s = 0.0
        self.steps = 0
        self.context = 0
        self.running: list[tuple[int, int, int, str]] = []  # (step of the last token, length, sample index, attempt)
        self.waiting: list[tuple[int, int, str]] = []  # (length, sample index, attempt)
        self.generated = 0
        self.sample_seconds = 0.0
        self.stamp = 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def span_s(self, steps: int) -> float:
        """Time of the next `steps` steps when nobody joins or leaves."""
        running = len(self.running)
        tokens = self.context * steps + running * steps * (steps - 1) / 2
        return self.decode.weights_s * steps + self.decode.context_s * tokens

    def next_event(self, now_s: float) -> tuple[float, int]:
        """Time and steps until a sample ends or, if some wait to join, until the step under way at `now_s` is over."""
        if not self.running:
            return max(now_s, self.at_s), 0
        steps = self.running[0][0] - self.steps
        if self.waiting:
            low, high = 0, steps
            while low < high:  # the first step boundary that is not before now
                middle = (low + high) // 2
                if self.at_s + self.span_s(middle) < now_s:
                    low = middle + 1
                else:
                    high = middle
            steps = low
        return self.at_s + self.span_s(steps), steps

    def advance(self, at_s: float, steps: int) -> list[tuple[str, int, int]]:
        """Run `steps` steps to `at_s`; returns (attempt, sample index, tokens) of samples that ended; then the waiting
        join."""
        running = len(self.running)
        self.generated += running * steps
        self.sample_seconds += running * (at_s - self.at_s)
        self.steps += steps
        self.context += running * steps
        self.at_s = at_s
        ended = []
        while self.running and self.running[0][0] == self.steps:
            _, length, index, attempt = heapq.heappop(self.running)
            self.context -= length
            ended.append((attempt, index, length))
        for length, index, attempt in self.waiting:
            heapq.heappush(self.running, (self.steps + length, length, index, attempt))
        self.waiting.clear()
        return ended


class Simulation:
    """One worker, its engines and a trainer, driven by the worker's own admission code."""

    def __init__(self, case: Case, decode: Decode, *, sample_level: bool) -> None:
        slots = total_slots(case.concurrency, case.engines)
        size = len(case.lengths)
        self.case = case
        self.admission = Admission(
            Limits(
                groups=divide_slots(slots, size, 1)[0],
                group_size=size,
                samples=divide_samples(slots, size, 1)[0] if sample_level else None,
                window_groups=case.window_groups,
            )
        )
        self.engines = [Engine(decode) for _ in range(case.engines)]
        self.events: list[tuple[float, int, int, int]] = []  # (time, engine or -1 for the trainer, stamp, steps)
        self.next_prompt = 0
        self.unfinished: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.ready: list[str] = []
        self.delivered: list[str] = []
        self.batch_times: list[float] = []
        self.trainer_free_s = 0.0
        self.last_group_s = 0.0

    def run(self) -> Run:
        self._admit(0.0)
        while self.events:
            now_s, which, stamp, steps = heapq.heappop(self.events)
            if which >= 0:
                engine = self.engines[which]
                if stamp != engine.stamp:
                    continue
                for attempt, index, tokens in engine.advance(now_s, steps):
                    self._sample_ended(now_s, attempt, index, tokens)
                self._schedule(which, now_s)
            self._take_batch(now_s)
            self._admit(now_s)
        return self._outcome()

    def _admit(self, now_s: float) -> None:
        touched = set()
        while self.next_prompt < self.case.prompts and self.admission.free_groups() > 0:
            attempt = f"prompt-{self.next_prompt}/1"
            decision = self.admission.reserve(attempt, range(len(self.case.lengths)))
            if not decision.granted:
                raise AssertionError(f"free_groups promised room, but {attempt} was denied: {decision.reason}")
            self.next_prompt += 1
            self.unfinished[attempt] = len(self.case.lengths)
            self.tokens[attempt] = 0
            for index, length in enumerate(self.case.lengths_of(self.next_prompt - 1)):
                which = min(range(len(self.engines)), key=lambda e: (self.engines[e].load, e))
                self.engines[which].waiting.append((length, index, attempt))
                self.admission.started(attempt, index, f"engine-{which}")
                touched.add(which)
        for which in sorted(touched):
            self._schedule(which, now_s)

    def _schedule(self, which: int, now_s: float) -> None:
        engine = self.engines[which]
        engine.stamp += 1
        if engine.load:
            at_s, steps = engine.next_event(now_s)
            heapq.heappush(self.events, (at_s, which, engine.stamp, steps))

    def _sample_ended(self, now_s: float, attempt: str, index: int, tokens: int) -> None:
        self.admission.sample_finished(attempt, index)
        self.tokens[attempt] += tokens
        self.unfinished[attempt] -= 1
        if self.unfinished[attempt] == 0:
            self.admission.release(attempt)
            self.ready.append(attempt)
            self.admission.observe(len(self.ready))
            self.last_group_s = now_s

    def _take_batch(self, now_s: float) -> None:
        while len(self.ready) >= self.case.batch_groups and now_s >= self.trainer_free_s:
            self.delivered += self.ready[: self.case.batch_groups]
            del self.ready[: self.case.batch_groups]
            self.admission.observe(len(self.ready))
            self.batch_times.append(now_s)
            if not self.case.engines_stop:  # else the pause is outside of engine time
                self.trainer_free_s = now_s + self.case.pause_s
                heapq.heappush(self.events, (self.trainer_free_s, -1, 0, 0))

    def _outcome(self) -> Run:
        pauses = sum(1 for at_s in self.batch_times if at_s < self.last_group_s) if self.case.engines_stop else 0
        pairs = zip(self.batch_times, self.batch_times[1:], strict=False)
        return Run(
            intervals_s=tuple(later - earlier for earlier, later in pairs),
            total_s=self.last_group_s + pauses * self.case.pause_s,
            generated=sum(engine.generated for engine in self.engines),
            delivered=sum(self.tokens[attempt] for attempt in self.delivered),
            expected=self.case.prompts * sum(self.case.lengths),
            mean_running=sum(engine.sample_seconds for engine in self.engines) / self.last_group_s,
            groups_delivered=len(set(self.delivered)),
        )


def compare(places: tuple[int, ...] = (), engines_stop: bool = False) -> dict[str, Any]:
    """Run the four simulations and compare. Changes are fractions: sample admission over group admission, minus 1."""
    uneven = Case(lengths=UNEVEN, engines_stop=engines_stop, places=places)
    equal = Case(lengths=EQUAL, engines_stop=engines_stop, places=places)
    decode = calibrate(equal, PUBLISHED["equal"].interval_s[0], uneven, PUBLISHED["uneven"].interval_s[0])
    runs = {
        name: [Simulation(case, decode, sample_level=level).run() for level in (False, True)]
        for name, case in (("uneven", uneven), ("equal", equal))
    }
    group, sample = runs["uneven"]
    control_group, control_sample = runs["equal"]
    outside_s = PUBLISHED["equal"].total_s[0] - control_group.total_s
    return {
        "mean_interval_change": sample.mean_interval_s / group.mean_interval_s - 1,
        "total_change": sample.total_s / group.total_s - 1,
        "total_change_with_constant": (sample.total_s + outside_s) / (group.total_s + outside_s) - 1,
        "control_change": control_sample.total_s / control_group.total_s - 1,
        "control_interval_change": control_sample.mean_interval_s / control_group.mean_interval_s - 1,
        "tokens_lost": sum(run.lost for pair in runs.values() for run in pair),
        "constant_s": outside_s,
        "decode_ms": {"step": decode.weights_s * 1e3, "per_1000_context_tokens": decode.context_s * 1e6},
        "runs": {name: dict(zip(("group", "sample"), map(_as_dict, pair), strict=True)) for name, pair in runs.items()},
    }


def study(engines_stop: bool = False) -> dict[str, Any]:
    """The comparison, with the range of its changes over random places of the long answers."""
    regular = compare((), engines_stop)
    drawn = [compare(_random_places(seed), engines_stop) for seed in SEEDS]
    changes = ("mean_interval_change", "total_change", "total_change_with_constant")
    return {
        **regular,
        "range_over_placements": {name: [min(r[name] for r in drawn), max(r[name] for r in drawn)] for name in changes},
        "tokens_lost": sum(result["tokens_lost"] for result in (regular, *drawn)),
        "engines_stop": engines_stop,
    }


def _random_places(seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(len(UNEVEN)) for _ in range(Case(lengths=UNEVEN).prompts))


def _as_dict(run: Run) -> dict[str, Any]:
    return {**msgspec.structs.asdict(run), "mean_interval_s": run.mean_interval_s, "lost": run.lost}


def _report(result: dict[str, Any]) -> Iterator[str]:
    decode = result["decode_ms"]
    yield f"decode step: {decode['step']:.3f} ms + {decode['per_1000_context_tokens']:.4f} ms per 1,000 context tokens"
    yield "             (the two fitted parameters, from the published figures of group admission)"
    yield f"{'':32}{'group':>10}{'sample':>10}{'change':>9}   published"
    for name, title in (("uneven", "seven of 1,024, one of 16,384"), ("equal", "eight of 4,096")):
        group, sample = result["runs"][name]["group"], result["runs"][name]["sample"]
        seen = PUBLISHED[name]
        yield title
        yield _line(
            "  mean interval, batches 2-6, s", group["mean_interval_s"], sample["mean_interval_s"], seen.interval_s
        )
        yield _line("  all groups done, s", group["total_s"], sample["total_s"], seen.total_s)
        added = result["constant_s"]
        yield _line(
            f"  the same, {added:.1f} s added", group["total_s"] + added, sample["total_s"] + added, seen.total_s
        )
        yield f"{'  samples running, mean of 128':32}{group['mean_running']:10.1f}{sample['mean_running']:10.1f}"
        for kind, run in (("group", group), ("sample", sample)):
            groups = f"{run['delivered']:,} delivered in {run['groups_delivered']} groups"
            lost = f"{run['lost']} lost ({seen.tokens:,} published)"
            yield f"  {kind:6} tokens: {run['generated']:,} generated, {groups}, {lost}"
    ranges = result["range_over_placements"]
    bounds = {name: f"{low:+.1%} to {high:+.1%}" for name, (low, high) in ranges.items()}
    yield f"places of the long answers at random: mean interval {bounds['mean_interval_change']},"
    yield f"    all groups {bounds['total_change']} ({bounds['total_change_with_constant']} with the constant)"
    yield f"({result['constant_s']:.1f} s: in the published totals, beside the steady state; see the head of this file)"


def _line(title: str, group: float, sample: float, published: tuple[float, float]) -> str:
    before, after = published
    ours, theirs = sample / group - 1, after / before - 1
    return f"{title:32}{group:10.2f}{sample:10.2f}{ours:+9.1%}   {before:.2f} -> {after:.2f} ({theirs:+.1%})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Group against sample admission on groups with one long answer.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--engines-stop", action="store_true", help="engines stand still during the training pause")
    options = parser.parse_args(arguments)
    result = study(options.engines_stop)
    print(json.dumps(result, indent=2) if options.json else "\n".join(_report(result)))


if __name__ == "__main__":
    main()
