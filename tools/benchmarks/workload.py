"""The work that both sides are given: the same bytes, counts and order. Needs NumPy and nothing of either queue.

A task's life: publish its input (4 KiB), lease it, read the input back verified, publish the result (4 KiB), have it
accepted. Tensors: what 4 samples of 8,192 tokens capture, 84 MB as given.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

PAYLOAD_BYTES = 4096
BATCH = 64
SAMPLES = 4
TOKENS = 8192
LAYERS, EXPERTS_PER_TOKEN, EXPERTS = 48, 8, 128
SC_HEAD, VOCABULARY = 128, 150_000
SLICE = (1000, 2000)

Array = npt.NDArray[Any]


def payloads() -> Iterator[bytes]:
    """Endless payloads of `PAYLOAD_BYTES`, no two alike, and none worth compressing."""
    body = os.urandom(PAYLOAD_BYTES - 8)
    return (number.to_bytes(8, "little") + body for number in itertools.count())


def captures(seed: int = 0, samples: int = SAMPLES, tokens: int = TOKENS) -> list[dict[str, Array]]:
    """Per sample: `r3` int32 [tokens, 48, 8] of expert ids below 128, `sc_ids` int32 and `sc_logprobs` float32
    [tokens, 128]."""
    random = np.random.default_rng(seed)
    return [
        {
            "r3": random.integers(0, EXPERTS, (tokens, LAYERS, EXPERTS_PER_TOKEN), np.int32),
            "sc_ids": random.integers(0, VOCABULARY, (tokens, SC_HEAD), np.int32),
            "sc_logprobs": random.standard_normal((tokens, SC_HEAD), np.float32),
        }
        for _ in range(samples)
    ]


def given_bytes(sets: list[dict[str, Array]]) -> int:
    return sum(array.nbytes for arrays in sets for array in arrays.values())
