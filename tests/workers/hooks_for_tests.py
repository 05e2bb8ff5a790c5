"""Hooks that tests name by dotted path."""

import asyncio
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

calls: Counter[str] = Counter()
threads: set[str] = set()
release = threading.Event()
seen: list[object] = []


async def length(args, sample):
    assert args.n_samples_per_prompt > 0 and sample.tokens and sample.response_length
    return sample.response_length


def in_a_thread(args, sample):
    threads.add(threading.current_thread().name)
    return {"score": 1.0, "length": sample.response_length}


def whole_group(args, samples):
    return [float(at) for at, _ in enumerate(samples)]


def too_few(args, samples):
    return [1.0]


def raises(args, sample):
    calls["raises"] += 1
    raise ValueError(f"no score for {sample.group_index}")


def raises_once(args, sample):
    calls[sample.group_index] += 1
    if calls[sample.group_index] == 1:
        raise RuntimeError("once")
    return 1.0


async def cancelled(args, sample):
    raise asyncio.CancelledError


def exits(args, sample):
    sys.exit(3)


def wrong(args, sample):
    return "good"


def annotates(args, sample):
    sample.metadata["judge"] = sample.response[:3]
    return 1.0


def waits(args, sample):
    calls["waits"] += 1
    assert release.wait(30)
    return 1.0


def slow(args, sample):
    time.sleep(0.3)
    return 1.0


def drop_even(args, samples):
    number = int(samples[0].group_index[1:])
    return SimpleNamespace(keep=number % 2 == 1, reason=None if number % 2 else "even")


def filter_raises(args, samples):
    raise KeyError("gone")


def three_tokens(args, prompt):
    return [5, 6, 7]


# What no hook should answer or raise, and some will.


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def huge(args, sample):
    return 10**400


def not_a_number(args, sample):
    return float("nan")


def cycle(args, sample):
    score = {}
    score["self"] = score
    return score


def half_a_character(args, sample):
    return {"why": "\ud800"}


def notes_itself(args, sample):
    sample.metadata["self"] = sample.metadata
    return 1.0


def shows_nothing(args, sample):
    raise Unspeakable


def raises_half_a_character(args, sample):
    raise ValueError("\ud800")


def stops_iteration(args, sample):
    return next(iter([]))


def interrupts(args, sample):
    raise KeyboardInterrupt


async def interrupts_the_loop(args, sample):
    raise KeyboardInterrupt


def leaves_a_generator(args, sample):
    raise GeneratorExit


def always_raises(args, samples):
    raise ValueError("never")


async def never_generates(args, sample, sampling_params):
    raise ValueError("never")


def raises_for_odd(args, sample):
    if int(sample.prompt.split()[1]) % 2:
        raise ValueError("odd")
    return 1.0


tries: Counter = Counter()


def third_time(args, samples):
    """Scores each group at its third attempt."""
    tries[samples[0].prompt] += 1
    if tries[samples[0].prompt] % 3:
        raise ValueError("not yet")
    return [1.0] * len(samples)
