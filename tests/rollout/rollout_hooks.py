"""Hooks that tests name by dotted path."""

import threading
import time
from types import SimpleNamespace

gate = {"ready": lambda: True}
reached = threading.Event()
release = threading.Event()
bad: set = set()


def one(args, sample):
    return 1.0


def when_ready(args, sample):
    """Scores once the test says so."""
    end = time.monotonic() + 30
    while not gate["ready"]() and time.monotonic() < end:
        time.sleep(0.001)
    return 1.0


def raises_for_bad(args, sample):
    if number(sample) in bad:
        raise ValueError(f"no score for prompt {number(sample)}")
    return 1.0


def blocks(args, sample):
    reached.set()
    assert release.wait(30)
    return 1.0


def drop_every_third(args, samples, **kwargs):
    keep = number(samples[0]) % 3 != 2
    return SimpleNamespace(keep=keep, reason=None if keep else "third")


def number(sample):
    return int(sample.prompt.split()[1])


def number_of(args, sample):
    return float(number(sample))


def pops_the_first(args, groups):
    groups.pop(0)


def filter_raises(args, groups):
    raise KeyError("no filter")
