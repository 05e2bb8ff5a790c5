"""Any value that is accepted comes back equal and of the same type, through bytes; any bytes are read or refused."""

from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from shapes import Newer, answered
from test_codec import assert_same

from strawq.errors import StrawqError
from strawq.rows import Rows
from strawq.samples import Group, Prompt
from strawq_workers.slime.codec import group_of, prompt_of, samples_of
from strawq_workers.slime.payload import MAGIC
from strawq_workers.slime.tree import Tree, TreeReader

TEXT = st.text(st.characters(), max_size=20)  # half surrogate pairs too
SCALARS = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | TEXT | st.binary(max_size=20)
DTYPES = arrays.boolean_dtypes() | arrays.integer_dtypes() | arrays.unsigned_integer_dtypes() | arrays.floating_dtypes(
    sizes=(16, 32, 64)
)  # fmt: skip
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
KEYS = TEXT | st.integers(-5, 5) | st.booleans() | st.none() | st.tuples(st.integers(0, 3), TEXT)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_any_value_comes_back_from_its_bytes(value: Any) -> None:
    tensors: dict[str, Rows] = {}
    data = msgspec.msgpack.encode(Tree(tensors).encode(value, "it"))
    assert_same(TreeReader({}, tensors).decode(msgspec.msgpack.decode(data)), value)
    assert msgspec.msgpack.encode(Tree({}).encode(value, "it")) == data


@settings(max_examples=100, deadline=None)
@given(
    metadata=st.dictionaries(st.text(max_size=5), JSON | VALUES, max_size=4),
    own=st.dictionaries(st.text(max_size=5), JSON | VALUES, max_size=4),
    reward=st.none()
    | st.floats()
    | st.integers()
    | st.booleans()
    | st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    log_probs=st.lists(st.floats(-1e30, 0), min_size=4, max_size=4),
    custom=VALUES,
    label=st.none() | JSON,
)
def test_any_sample_comes_back_from_its_group(
    metadata: Any, own: Any, reward: Any, log_probs: Any, custom: Any, label: Any
) -> None:
    first = answered(Newer, 0, metadata=metadata, label=label)
    second = answered(Newer, 1, metadata={**metadata, **own}, label=label, reward=reward, rollout_log_probs=log_probs)
    second.custom = custom
    prompt = prompt_of(first, samples=2)
    assert_same(samples_of(group_of("t", prompt, [first, second]), Newer), [first, second])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200), st.integers(1, 255))
def test_any_bytes_of_a_payload_are_read_or_refused(noise: bytes, at: int, flip: int) -> None:
    given_sample = answered(Newer, 0, custom={"a": (1, b"x", np.arange(3))}, index=3)
    good = prompt_of(given_sample, samples=1)
    assert good.payload is not None
    place = len(MAGIC) + at % (len(good.payload) - len(MAGIC))
    flipped = good.payload[:place] + bytes([good.payload[place] ^ flip]) + good.payload[place + 1 :]
    for payload in (MAGIC + noise, flipped, good.payload[:place]):
        try:
            samples_of(Group("t", Prompt(text="x", samples=1, payload=payload)), Newer)
        except StrawqError:
            continue
