"""Hooks that tests name by dotted path."""

import threading
import time
from types import SimpleNamespace

from strawq_workers.agents import generate
from strawq_workers.engine.vocabulary import encode_text
from strawq_workers.rollout import generate_rollout

gate = {"ready": lambda: True, "second": lambda: True}
reached = threading.Event()
release = threading.Event()
bad: set = set()
scored: list = []
"""Prompts whose samples `raises_for_bad` has scored."""


def one(args, sample):
    return 1.0


def two_numbers(args, sample):
    return {"right": 1.0, "brief": 0.25}


def two_ids(args, prompt):
    return [72, 105]


def when_ready(args, sample):
    """Scores once the test says so."""
    wait_for(gate["ready"])
    return 1.0


def slow_first(args, sample):
    """The first prompt is scored when the test says so."""
    if number(sample) == 0:
        assert gate["first"].wait(30)
    return 1.0


def first_three_first(args, prompt):
    """Token ids; those of the fourth prompt and later ones once the test says that the first are in the engine."""
    wait_for(gate["second"] if int(prompt.text.split()[1]) >= 3 else lambda: True)
    return encode_text(prompt.text)


def wait_for(probe):
    end = time.monotonic() + 30
    while not probe():
        assert time.monotonic() < end
        time.sleep(0.001)


def raises_for_bad(args, sample):
    """Once the test says so, if it does."""
    if number(sample) in bad:
        wait_for(gate.get("bad", lambda: True))
        raise ValueError(f"no score for prompt {number(sample)}")
    scored.append(number(sample))
    return 1.0


def blocks(args, sample):
    reached.set()
    assert release.wait(30)
    return 1.0


async def one_tool(args, sample, sampling_params, evaluation=False):
    """Four tokens, a tool's answer of two, four tokens."""
    while sample.response_length < 10:
        turn = await generate(args, sample, {**sampling_params, "max_new_tokens": 4})
        if turn.finish == "abort":
            return sample
        if sample.response_length < 10:
            sample.append_response_tokens(args, tokens=[7, 8], trainable=False)
    sample.metadata["evaluated"] = evaluation
    sample.status = sample.Status.COMPLETED
    return sample


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


def my_rollout(args, rollout_id, data_source, evaluation=False):
    out = generate_rollout(args, rollout_id, data_source, evaluation)
    out.metrics["mine"] = rollout_id
    return out


raised = set()


def raises_once(args, sample):
    """At the first try of each prompt."""
    if number(sample) not in raised:
        raised.add(number(sample))
        raise ValueError("not yet")
    return 1.0


def no_judge(args, samples, **kwargs):
    raise RuntimeError("no judge at all")


async def no_tool(args, sample, sampling_params):
    raise RuntimeError("no tool at all")


def raises_for_every_third(args, sample):
    if number(sample) % 3 == 0:
        raise ValueError(f"no score for prompt {number(sample)}")
    return 1.0


dropped: list = []


def drops_forty(args, samples, **kwargs):
    """The first forty groups that it sees."""
    dropped.append(number(samples[0]))
    return SimpleNamespace(keep=len(dropped) > 40, reason="too early")
