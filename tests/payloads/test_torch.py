"""Torch tensors go in and come out in their dtype, without a copy where memory allows."""

import numpy as np
import pytest

from strawq.alignment import check_sample
from strawq.errors import BadInput
from strawq.rows import torch_rows
from strawq.samples import Prompt, Sample, TopK, extend
from strawq.storage.packs import plan_pack
from strawq.storage.records import TensorRef
from strawq.storage.tensors import PackReader
from tests.payloads.build import PackShelf, Saves, group, versions

torch = pytest.importorskip("torch")

DTYPES = ["bfloat16", "float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"]


def stored(tensor):
    plan, shelf = plan_pack([("t", tensor)]), PackShelf()
    path = shelf.put(plan)
    ref = TensorRef("t", plan.digest, "t", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), 0)
    return PackReader(shelf, again=()).rows(path, ref)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_reads_back_bit_for_bit(name):
    tensor = (torch.randn(50, 7) * 100).to(getattr(torch, name))
    rows = stored(tensor)
    got = rows.torch()
    assert got.dtype == tensor.dtype and torch.equal(got, tensor)
    assert torch.equal(rows.torch(10, 20), tensor[10:20])
    expected = tensor.float() if name == "bfloat16" else tensor
    np.testing.assert_array_equal(rows[:], expected.numpy())
    # Again through a pack, unread on the way.
    assert torch.equal(stored(rows).torch(), tensor)


def test_what_is_read_shares_memory_with_the_tensor():
    rows = stored(torch.arange(4000, dtype=torch.int64).reshape(40, 100) * 10**9)
    whole = rows.torch()
    whole[0, 0] = 5  # its own memory, writable
    assert rows.torch()[0, 0] == 0


def test_a_torch_tensor_in_memory_is_hashed_and_written_in_place():
    tensor = torch.randn(1000, 100).to(torch.bfloat16)
    plan = plan_pack([("t", tensor)])
    bits = tensor.view(torch.int16).numpy()
    assert all(np.shares_memory(bits, np.frombuffer(piece, np.uint8)) for piece in list(plan.buffers)[1:])


def test_safetensors_reads_a_bfloat16_pack(tmp_path):
    from safetensors.torch import load_file

    tensor = torch.randn(9, 3).to(torch.bfloat16)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(plan_pack([("t", tensor)]).buffers))
    assert torch.equal(load_file(path)["t"], tensor)


def of_torch(count, rows, **fields):
    return Sample(
        0,
        torch.arange(count),
        -torch.rand(count),
        versions=versions(count),
        r3=torch.randint(0, 300, (rows, 2, 2)).to(torch.int16),
        sc=TopK(torch.randint(0, 10**5, (count, 3)), -torch.rand(count, 3).to(torch.bfloat16)),
        **fields,
    )


def test_a_sample_of_torch_tensors_is_saved_grown_and_loaded():
    prompt = Prompt("g", torch.tensor([1, 2, 3]))
    saves, first, more = Saves(prompt), of_torch(5, 7), of_torch(2, 2)
    saves.save(None, group(first, prompt=prompt))
    loaded = saves.load()
    saves.save(loaded, group(extend(loaded.samples[0], more), prompt=prompt))
    got = saves.load().samples[0]
    np.testing.assert_array_equal(np.asarray(got.r3), torch.cat([first.r3, more.r3]).numpy())
    assert (got.r3.dtype, got.sc.logprobs.dtype, got.sc.ids.dtype) == ("int16", "bfloat16", "int64")
    expected = torch.cat([first.sc.logprobs, more.sc.logprobs])
    assert torch.equal(torch_rows(got.sc.logprobs), expected)
    np.testing.assert_array_equal(got.sc.logprobs[4:6], expected[4:6].float().numpy())


def test_masks_of_whole_numbers_are_taken_and_those_of_floats_refused():
    assert of_torch(5, 7, loss_mask=torch.tensor([0, 1, 0, 1, 1])).loss_mask.tolist() == [0, 1, 0, 1, 1]
    with pytest.raises(BadInput, match="float32 where uint8 is needed"):
        of_torch(5, 7, loss_mask=torch.ones(5))


def test_a_bfloat16_nan_is_found():
    sample = of_torch(5, 7)
    check_sample(sample, 3)
    sample.sc.logprobs[3, 1] = float("nan")
    with pytest.raises(BadInput, match="NaN"):
        check_sample(sample, 3)
