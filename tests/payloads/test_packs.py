"""A pack is a safetensors file: anyone opens it, and it holds exactly what was given, narrow and aligned."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.numpy import load, load_file

from strawq.errors import BadInput
from strawq.limits import CHUNK_BYTES
from strawq.rows import RowList, append_rows
from strawq.storage import packs
from strawq.storage.packs import plan_pack
from strawq.storage.records import TensorRef
from strawq.storage.tensors import PackReader
from tests.payloads.build import PackShelf

DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]


def stored(**arrays):
    """The arrays as lazy rows out of one pack."""
    plan, shelf = plan_pack(arrays.items()), PackShelf()
    path = shelf.put(plan)
    reader = PackReader(shelf, again=())
    assert len(shelf.content[path]) == plan.bytes
    reader.verify(path, plan.digest)
    refs = {key: TensorRef(key, plan.digest, key, a.shape, np.dtype(a.dtype).name, 0) for key, a in arrays.items()}
    return {key: reader.rows(path, ref) for key, ref in refs.items()}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_arrays_read_back_bit_for_bit(arrays):
    got = stored(**{f"t{at}": array for at, array in enumerate(arrays)})
    for rows, expected in zip(got.values(), arrays, strict=True):
        actual = rows[:]
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()  # NaN payloads and -0.0 too


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 127], "uint8"),
        ([0, 128], "uint8"),
        ([255], "uint8"),
        ([256], "uint16"),
        ([511], "uint16"),
        ([65535], "uint16"),
        ([65536], "int32"),
        ([-1, 127], "int8"),
        ([-1, 128], "int16"),
        ([-1, 255], "int16"),
        ([-1, 511], "int16"),
        ([-129], "int16"),
        ([-1, 32767], "int16"),
        ([-1, 32768], "int32"),
        ([-1, 65535], "int32"),
        ([-(2**31), 2**31 - 1], "int32"),
    ],
)
@pytest.mark.parametrize("given_dtype", [np.int32, np.int64])
def test_expert_ids_take_the_narrowest_type_that_holds_them_all(values, expected, given_dtype):
    ids = np.resize(np.array(values, given_dtype), (50, 3, 2))
    rows = stored(r3=ids)["r3"]
    if expected == "int32" and min(values) >= 0 and given_dtype is np.int64:
        expected = "uint32"
    assert rows.tensor.stored == expected
    assert rows[:].dtype == given_dtype
    np.testing.assert_array_equal(rows[:], ids)
    np.testing.assert_array_equal(rows[7:31], ids[7:31])


def test_a_single_wide_id_deep_in_a_tensor_decides():
    for position in (0, 77_777, 199_999):
        for value in (256, -1, 70_000):
            ids = np.full((200_000, 2, 2), 255, np.int32)
            ids[position, 1, 1] = value
            np.testing.assert_array_equal(stored(r3=ids)["r3"][:], ids)


def test_any_safetensors_reader_opens_a_pack(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "0/r3": rng.integers(0, 128, (33, 3, 2)).astype(np.int32),
        "0/topk.logprobs": rng.random((33, 5)).astype(np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "scalar": np.array(3.5),
        "flags": np.array([True, False, True]),
    }
    path = tmp_path / "x.safetensors"
    plan = plan_pack(arrays.items())
    path.write_bytes(b"".join(plan.buffers))
    got = load_file(path)
    assert {key for key in got if not key.startswith("pad/")} == arrays.keys()
    for key, expected in arrays.items():
        np.testing.assert_array_equal(got[key], expected)
        assert got[key].shape == expected.shape
    assert got["0/r3"].dtype == np.uint8
    assert all(not rows.any() for key, rows in got.items() if key.startswith("pad/"))


def test_every_tensor_starts_at_a_multiple_of_64_bytes_of_the_file():
    plan = plan_pack((f"t{size}", np.arange(size, dtype=np.uint8)) for size in range(1, 200))
    length = int.from_bytes(plan.header[:8], "little")
    entries = json.loads(plan.header[8:])
    assert len(plan.header) == 8 + length and len(plan.header) % 64 == 0
    starts = [8 + length + entry["data_offsets"][0] for key, entry in entries.items() if key.startswith("t")]
    assert len(starts) == 199 and all(start % 64 == 0 for start in starts)
    assert load(b"".join(plan.buffers))["t150"].tolist() == list(range(150))


def test_the_header_names_the_file_and_holds_a_digest_per_chunk_of_rows():
    array = np.random.default_rng(0).random((3000, 100)).astype(np.float32)
    plan = plan_pack([("a", array)])
    assert plan.digest == blake3(plan.header).hexdigest()
    given_dtype, chunk_rows, digests = json.loads(plan.header[8:])["__metadata__"]["a"].split(" ")
    rows = int(chunk_rows)
    assert given_dtype == "float32" and rows == CHUNK_BYTES // 400
    expected = [blake3(array[at : at + rows].tobytes()).hexdigest() for at in range(0, 3000, rows)]
    assert digests == "".join(expected)


def test_a_pack_is_a_function_of_its_content():
    array = np.arange(1000, dtype=np.int32).reshape(100, 10)
    apart = append_rows(append_rows(None, array[:33]), array[33:])
    strided = np.asfortranarray(array)
    swapped = array.astype(">i4")
    plans = [plan_pack([("a", rows)]) for rows in (array, apart, strided, swapped)]
    assert isinstance(apart, RowList)
    assert len({plan.digest for plan in plans}) == 1
    assert len({b"".join(plan.buffers) for plan in plans}) == 1


def test_rows_in_memory_are_written_without_a_copy():
    array = np.random.default_rng(0).random((3000, 100)).astype(np.float32)
    buffers = plan_pack([("a", array)]).buffers
    assert all(np.shares_memory(array, np.frombuffer(piece, np.uint8)) for piece in list(buffers)[1:])
    assert buffers[-1] == buffers[len(buffers) - 1] and buffers[0][:8] == buffers[0:1][0][:8]
    with pytest.raises(IndexError):
        buffers[len(buffers)]


def test_lazy_rows_go_into_another_pack_unchanged():
    ids = np.random.default_rng(0).integers(-1, 300, (5000, 3, 40)).astype(np.int32)
    first = stored(r3=ids)["r3"]
    second = stored(r3=ids[:4000])["r3"]
    joined = append_rows(first, second)
    plan, shelf = plan_pack([("x", joined)]), PackShelf()
    path = shelf.put(plan)
    got = PackReader(shelf, again=()).rows(path, TensorRef("x", plan.digest, "x", joined.shape, "int32", 0))
    np.testing.assert_array_equal(got[:], np.concatenate([ids, ids[:4000]]))


@pytest.mark.parametrize("key", ["", "pad/1", "__metadata__", "strawq.kind"])
def test_reserved_keys_are_refused(key):
    with pytest.raises(BadInput, match="reserved"):
        plan_pack([(key, np.zeros(1))])


def test_twins_and_dtypes_without_a_name_are_refused():
    with pytest.raises(BadInput, match="given twice"):
        plan_pack([("a", np.zeros(1)), ("a", np.zeros(2))])
    for array in (np.zeros(1, np.complex64), np.array([object()]), np.array(["text"]), np.zeros(1, "M8[s]")):
        with pytest.raises(BadInput, match="cannot be stored"):
            plan_pack([("a", array)])


def test_a_header_over_the_limit_is_refused_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(packs, "PACK_HEADER_BYTES", 10_000)
    plan_pack((f"t{at}", np.zeros(16)) for at in range(20))
    with pytest.raises(BadInput, match=r"100 tensors .* over 10000: hand in fewer"):
        plan_pack((f"t{at}", np.zeros(16)) for at in range(100))


PEAK = """
import resource, numpy as np
from strawq.storage.packs import plan_pack
ids, logprobs = np.random.randint(0, 300, (1 << 16, 48, 8), np.int32), np.random.rand(1 << 16, 128).astype("f4")
arrays = [("ids", ids), ("logprobs", logprobs)]
size = sum(array.nbytes for _, array in arrays)
written = open("/dev/null", "wb", buffering=0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
plan = plan_pack(arrays)
for piece in plan.buffers:
    written.write(piece)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / size, size, plan.bytes)
"""


def test_a_publish_holds_no_second_copy_of_its_tensors():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, cwd=root)
    extra, size, written = done.stdout.split()
    assert int(written) < int(size)  # the ids were narrowed
    assert float(extra) < 0.3
