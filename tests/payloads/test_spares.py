"""Memory is used again only when nobody can see it any more."""

import gc

import numpy as np
import pytest

from strawq.storage.packs import plan_pack
from strawq.storage.records import TensorRef
from strawq.storage.spares import SMALLEST_BYTES, Spares
from strawq.storage.tensors import PackReader
from tests.payloads.build import PackShelf

SHAPE = (1 << 20, 2)


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_comes_back_when_the_last_view_is_gone_and_not_before():
    spares = Spares(64 << 20)
    array = spares.empty(SHAPE, np.int32)
    first, view = address(array), array[5:7, 1:].view(np.uint8)
    view[:] = 7
    del array
    gc.collect()
    other = spares.empty(SHAPE, np.int32)
    assert address(other) != first
    other[:] = 0
    assert (view == 7).all()
    del view
    assert address(spares.empty(SHAPE, np.int32)) == first


def test_a_torch_tensor_holds_its_memory():
    torch = pytest.importorskip("torch")
    spares = Spares(64 << 20)
    tensor = torch.from_numpy(spares.empty(SHAPE, np.int32))
    held = tensor.data_ptr()
    assert address(spares.empty(SHAPE, np.int32)) != held
    del tensor
    assert held in {address(array) for array in [spares.empty(SHAPE, np.int32) for _ in range(2)]}


def test_what_is_kept_is_bounded_and_follows_the_sizes_in_use():
    spares = Spares(20 << 20)
    arrays = [spares.empty((8 << 20,), np.uint8) for _ in range(4)]
    del arrays
    spares.empty((8 << 20,), np.uint8)
    assert spares._held <= 20 << 20
    for size in range(2 << 20, 19 << 20, 1 << 20):
        spares.empty((size,), np.uint8)
        assert spares._held <= 20 << 20
    big = spares.empty((40 << 20,), np.uint8)
    assert big.nbytes == 40 << 20
    del big
    spares.empty((SMALLEST_BYTES,), np.uint8)
    assert spares._held <= 20 << 20


def test_arrays_that_were_read_stay_as_they_are_while_others_are_read():
    arrays = [np.random.default_rng(at).integers(0, 100, (4000, 48, 8)).astype(np.int32) for at in range(3)]
    plan, shelf = plan_pack([(str(at), array) for at, array in enumerate(arrays)]), PackShelf()
    path, reader = shelf.put(plan), PackReader(shelf, again=())
    refs = [TensorRef("r3", plan.digest, str(at), (4000, 48, 8), "int32", 0) for at in range(3)]
    kept = [reader.rows(path, ref)[:] for ref in refs]
    for _ in range(3):
        for ref, array, whole in zip(refs, arrays, kept, strict=True):
            np.testing.assert_array_equal(reader.rows(path, ref)[100:3900], array[100:3900])
            np.testing.assert_array_equal(whole, array)
