"""Rows out of packs are verified before anybody sees them, and only the chunks asked for are read."""

import errno
import threading

import numpy as np
import pytest

from strawq.errors import BadInput, Damaged, FormatUnsupported, Gone, StorageFailed
from strawq.limits import CHUNK_BYTES
from strawq.storage.packs import PACK_VERSION, plan_pack
from strawq.storage.records import TensorRef
from strawq.storage.tensors import PackReader
from tests.payloads.build import PackShelf


def shelve(array, key="0/r3", *, again=()):
    plan, shelf = plan_pack([("before", np.zeros(7, np.uint8)), (key, array)]), PackShelf()
    path = shelf.put(plan)
    ref = TensorRef("r3", plan.digest, key, array.shape, array.dtype.name, 0)
    return shelf, path, PackReader(shelf, again=again).rows(path, ref, "task 5-3, r3")


def flip(shelf, path, at):
    data = bytearray(shelf.content[path])
    data[at] ^= 0x40
    shelf.content[path] = bytes(data)


@pytest.mark.parametrize("high", [100, 60_000, 100_000], ids=["uint8", "uint16", "as given"])
def test_a_slice_reads_and_checks_only_the_chunks_it_touches(high):
    array = np.random.default_rng(0).integers(0, high, (20_000, 12, 8)).astype(np.int32)
    array[0, 0, 0] = high
    shelf, path, rows = shelve(array)
    tensor = rows.tensor
    chunk = tensor.chunk_rows
    assert CHUNK_BYTES // 2 < chunk * tensor.row_bytes <= CHUNK_BYTES
    # The chunks before and after those that are read are damaged, and nobody minds.
    flip(shelf, path, tensor.offset + 2 * chunk * tensor.row_bytes - 1)
    flip(shelf, path, tensor.offset + 4 * chunk * tensor.row_bytes)
    shelf.reads.clear()
    np.testing.assert_array_equal(rows[2 * chunk + 5 : 4 * chunk - 5], array[2 * chunk + 5 : 4 * chunk - 5])
    assert shelf.reads == [(path, tensor.offset + 2 * chunk * tensor.row_bytes, 2 * chunk * tensor.row_bytes)]
    for start, stop in ((2 * chunk - 1, 2 * chunk + 1), (4 * chunk, 4 * chunk + 1), (0, 20_000)):
        with pytest.raises(Damaged, match=r"tensor 0/r3 \(task 5-3, r3\), rows \d+ to \d+: not the bytes"):
            rows[start:stop]


def test_slices_behave_as_those_of_numpy():
    array = np.arange(300_000, dtype=np.int64).reshape(3000, 100)
    _, _, rows = shelve(array)
    for key in (slice(None), slice(5, 5), slice(9, 3), slice(-3, None), slice(2990, 9999), slice(None, -2900)):
        np.testing.assert_array_equal(rows[key], array[key])
    part = rows.part(100, 1100)
    np.testing.assert_array_equal(part[10:990], array[110:1090])
    np.testing.assert_array_equal(part.part(5, 20)[:], array[105:120])
    np.testing.assert_array_equal(np.asarray(rows), array)
    for key in (3, slice(None, None, 2), slice(None, None, -1), "a"):
        with pytest.raises(BadInput, match="slices of step 1"):
            rows[key]


def small():
    return shelve(np.arange(24, dtype=np.float32).reshape(6, 4))


def test_every_truncation_is_refused_by_name():
    shelf, path, _ = small()
    whole = shelf.content[path]
    for size in range(len(whole)):
        shelf, path, rows = small()
        shelf.content[path] = whole[:size]
        with pytest.raises(Damaged, match=path):
            rows[0:6]
        with pytest.raises(Damaged, match=path):
            rows._reader.verify(path, rows.digest)


def test_every_flipped_byte_is_refused_by_name():
    shelf, path, rows = small()
    whole = shelf.content[path]
    header = int.from_bytes(whole[:8], "little") + 8
    payload = set(range(rows.tensor.offset, rows.tensor.offset + 96))
    for at in range(len(whole)):
        shelf, path, rows = small()
        flip(shelf, path, at)
        if at < header or at in payload:
            with pytest.raises(Damaged, match=path):
                rows[0:6]
        # Bytes of other tensors and of padding are no business of this read, and of a full check.
        with pytest.raises(Damaged, match=path):
            PackReader(shelf, again=()).verify(path, rows.digest)


@pytest.mark.parametrize("page", [0, 1, 2, 3])
def test_a_zeroed_page_is_refused(page):
    shelf, path, rows = shelve(np.random.default_rng(0).random((64, 50)))
    data = bytearray(shelf.content[path])
    data[page * 4096 : (page + 1) * 4096] = bytes(4096)
    shelf.content[path] = bytes(data)
    with pytest.raises(Damaged, match=path):
        rows[:]


def test_bytes_behind_the_end_are_found_by_a_full_check():
    shelf, path, rows = small()
    shelf.content[path] += b"\0"
    np.testing.assert_array_equal(rows[:], np.arange(24, dtype=np.float32).reshape(6, 4))
    with pytest.raises(Damaged, match="its header says"):
        rows._reader.verify(path, rows.digest)


def test_a_foreign_file_under_the_name_is_refused():
    shelf, path, rows = small()
    other, other_path, _ = shelve(np.zeros((6, 4), np.float32))
    shelf.content[path] = other.content[other_path]
    with pytest.raises(Damaged, match="another file"):
        rows[:]


def header_of(text):
    import blake3

    data = len(text).to_bytes(8, "little") + text
    return data, blake3.blake3(data).hexdigest()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"{}", Damaged),
        (b"not json", Damaged),
        (b"[]", Damaged),
        (b'{"a":{"dtype":"F32"}}', Damaged),
        (b'{"a":3}', Damaged),
        (b'{"__metadata__":{"strawq.kind":"tensors","strawq.version":"2"}}', FormatUnsupported),
        (b'{"__metadata__":{"strawq.kind":"tensors","strawq.version":"1"}}', Damaged),
        (
            b'{"__metadata__":{"strawq.kind":"tensors","strawq.version":"1","k":"float32 1 "},'
            b'"k":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            Damaged,
        ),
        (
            b'{"__metadata__":{"strawq.kind":"tensors","strawq.version":"1","k":"float32"},'
            b'"k":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            Damaged,
        ),
    ],
)
def test_headers_that_are_true_to_their_name_but_not_ours_are_refused(text, error):
    assert PACK_VERSION == "1"
    shelf = PackShelf()
    shelf.content["x"], digest = header_of(text)
    with pytest.raises(error, match=r"^x"):
        PackReader(shelf, again=()).rows("x", TensorRef("k", digest, "k", (2,), "float32", 0))[:]


def test_a_record_that_contradicts_the_pack_is_refused():
    shelf, path, rows = small()
    for shape, dtype in (((5, 4), "float32"), ((6, 4), "int32")):
        wrong = TensorRef("r3", rows.digest, "0/r3", shape, dtype, 0)
        with pytest.raises(Damaged, match=r"the record says .*, the pack float32 \[6, 4\]"):
            PackReader(shelf, again=()).rows(path, wrong)[:]


def test_a_missing_pack_is_gone_and_a_broken_mount_is_not():
    shelf, path, rows = small()
    whole = shelf.content.pop(path)
    with pytest.raises(Gone, match=f"{path} is not there"):
        rows[:]
    with pytest.raises(Gone):
        rows._reader.verify(path, rows.digest)
    shelf.content[path] = whole
    shelf.failing = [OSError(errno.EIO, "I/O error")]
    with pytest.raises(StorageFailed, match=f"{path} cannot be read"):
        rows[:]
    np.testing.assert_array_equal(rows[:], np.arange(24, dtype=np.float32).reshape(6, 4))


@pytest.mark.parametrize("first", ["absent", "short", "zeros"])
def test_bytes_that_arrive_late_are_asked_for_again(first):
    shelf, path, rows = shelve(np.arange(24, dtype=np.float32).reshape(6, 4), again=(0.0, 0.0))
    whole = shelf.content[path]
    wrong = {"absent": FileNotFoundError(errno.ENOENT, "no"), "short": whole[:50], "zeros": bytes(len(whole))}[first]
    shelf.failing = [wrong, wrong, whole, wrong]  # the header twice, then the rows once
    np.testing.assert_array_equal(rows[:], np.arange(24, dtype=np.float32).reshape(6, 4))
    shelf.failing = [wrong, wrong, wrong]
    with pytest.raises((Damaged, Gone)):
        rows[:]
    # Nothing wrong is remembered: the same rows succeed once the bytes are there.
    np.testing.assert_array_equal(rows[:], np.arange(24, dtype=np.float32).reshape(6, 4))


def test_headers_are_kept_within_their_bound():
    shelf = PackShelf()
    plans = [plan_pack([("k", np.full(4, at, np.float32))]) for at in range(6)]
    paths = [shelf.put(plan) for plan in plans]
    two = 2 * 4 * len(plans[0].header)  # Parsed, a header takes four times its bytes.
    reader = PackReader(shelf, again=(), cache_bytes=two)

    def headers_read(at):
        shelf.reads.clear()
        reader.rows(paths[at], TensorRef("k", plans[at].digest, "k", (4,), "float32", 0))[:]
        return len(shelf.reads) - 1

    assert [headers_read(at) for at in range(6)] == [1] * 6
    assert [headers_read(at) for at in (5, 4, 5, 4)] == [0, 0, 0, 0]
    assert headers_read(0) == 1
    assert reader._held <= two


def test_many_threads_read_one_pack():
    array = np.random.default_rng(0).integers(0, 100, (20_000, 12, 8)).astype(np.int32)
    _, _, rows = shelve(array)
    start, failures = threading.Barrier(4), []

    def read(first):
        start.wait()
        for at in range(first, 20_000, 2000):
            if not np.array_equal(rows[at : at + 1500], array[at : at + 1500]):
                failures.append(at)

    threads = [threading.Thread(target=read, args=(100 * at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_row_larger_than_a_chunk_is_a_chunk():
    array = np.random.default_rng(0).random((3, CHUNK_BYTES // 4))
    _, _, rows = shelve(array)
    assert rows.tensor.chunk_rows == 1
    np.testing.assert_array_equal(rows[1:2], array[1:2])
    np.testing.assert_array_equal(rows[:], array)


def test_a_header_longer_than_the_first_read_is_read_whole():
    plan, shelf = plan_pack((f"tensor-{at}", np.array([at])) for at in range(1000)), PackShelf()
    path = shelf.put(plan)
    assert len(plan.header) > 64 << 10
    rows = PackReader(shelf, again=()).rows(path, TensorRef("t", plan.digest, "tensor-777", (1,), "int64", 0))
    assert rows[:].tolist() == [777]
    shelf.content[path] = shelf.content[path][: len(plan.header) - 1]
    with pytest.raises(Damaged, match="truncated"):
        PackReader(shelf, again=()).verify(path, plan.digest)
