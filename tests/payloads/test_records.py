"""Records are Arrow files that others can open, and nothing else passes for one."""

import io

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strawq.errors import BadInput, Damaged, FormatUnsupported, StrawqError
from strawq.samples import Prompt, Sample
from strawq.storage import records as rec
from strawq.storage.growth import Part, grow_group, load_group
from strawq.storage.records import decode_prompts, decode_segments, encode_prompts, encode_segments, open_records
from strawq.storage.tensors import PackReader
from tests.payloads.build import PackShelf, assert_same, group, sample, versions

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PROMPTS = st.builds(
    Prompt,
    group_id=st.text(max_size=20),
    tokens=st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=8),
    text=st.none() | st.text(max_size=20),
    messages=st.none() | st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=2), max_size=2),
    label=st.none() | st.text(max_size=5),
    metadata=st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    samples=st.integers(0, 2**31 - 1),
    payload=st.none() | st.binary(max_size=20),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=5))
def test_prompts_read_back_equal(prompts):
    published = encode_prompts(prompts)
    assert published.rows == len(prompts)
    assert published.slices == tuple((row, row + 1) for row in range(len(prompts)))
    records = open_records(published.records, "p.arrow", digest=published.digest)
    for row, prompt in enumerate(prompts):
        (got,) = decode_prompts(records, row, row + 1)
        for name in ("group_id", "text", "messages", "label", "metadata", "samples", "payload"):
            assert getattr(got, name) == getattr(prompt, name), name
        assert (got.tokens is None) == (prompt.tokens is None)
        assert prompt.tokens is None or (got.tokens.dtype == np.int32 and got.tokens.tolist() == prompt.tokens.tolist())


def test_many_groups_share_one_publication_of_two_files():
    rng = np.random.default_rng(0)
    groups = [group(*(sample(rng, index, 4, count) for index in range(3))) for count in range(1, 65)]
    published = encode_segments([grow_group(None, each) for each in groups])
    assert published.slices[:3] == ((0, 3), (3, 6), (6, 9)) and published.rows == 192
    shelf = PackShelf()
    path = shelf.put(published.pack)
    assert len(shelf.content) == 1
    prompts = open_records(encode_prompts([each.prompt for each in groups]).records, "p.arrow")
    segments = open_records(published.records, "s.arrow")
    reader = PackReader(shelf, again=())
    for at, (start, stop) in enumerate(published.slices):
        got = load_group("t", [Part(prompts, at, at + 1), Part(segments, start, stop, path)], reader)
        for expected, actual in zip(groups[at].samples, got.samples, strict=True):
            assert_same(expected, actual)


def publication():
    # Not the smallest, but small: every byte of it gets its turn.
    return encode_segments([grow_group(None, group(Sample(0, [7, 8], versions=versions(2), metadata={"a": 1})))])


def test_every_prefix_is_refused_by_name():
    for published in (publication(), encode_prompts([Prompt("g", [1, 2])])):
        data = bytes(published.records)
        for size in range(len(data)):
            with pytest.raises(Damaged, match=r"object objects/x\.arrow"):
                open_records(data[:size], "objects/x.arrow", digest=published.digest)


def test_every_flipped_byte_is_refused_by_name():
    published = encode_prompts([Prompt("g", [1, 2])])
    for at in range(published.records.nbytes):
        data = bytearray(published.records)
        data[at] ^= 0x20
        with pytest.raises(Damaged, match=r"object objects/x\.arrow"):
            open_records(bytes(data), "objects/x.arrow", digest=published.digest)
    with pytest.raises(Damaged):
        open_records(bytes(published.records.nbytes), "objects/x.arrow", digest=published.digest)


def test_bytes_that_nobody_checked_never_crash_the_reader():
    """Without the digest, a flipped byte is an error of ours or goes unnoticed; it never leaves a buffer or the
    process."""
    data = bytes(encode_prompts([Prompt("gé", [1, 2], "text", [{"a": 1}], "l", {"b": 2}, 8, b"xyz")]).records)
    outcomes = set()
    for at in range(len(data)):
        for bit in (0x01, 0x80):
            flipped = bytearray(data)
            flipped[at] ^= bit
            try:
                decode_prompts(open_records(bytes(flipped), "x"), 0, 1)
                outcomes.add("read")
            except (StrawqError, ValueError, TypeError, IndexError) as error:
                outcomes.add(type(error).__name__)
    assert "Damaged" in outcomes


def table(metadata, batches=1, **columns):
    data = pa.table(columns).replace_schema_metadata(metadata)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, data.schema) as writer:
        for _ in range(batches):
            writer.write_table(data)
    return sink.getvalue()


def test_foreign_arrow_files_are_refused():
    with pytest.raises(Damaged, match="not one of strawq's records"):
        open_records(table({}, a=[1]), "x")
    with pytest.raises(Damaged, match="not one of strawq's records"):
        open_records(table({"strawq.kind": "prompts", "strawq.version": "1"}, group_id=["g"]), "x")
    with pytest.raises(FormatUnsupported, match="records of version 2, this strawq reads 1"):
        open_records(table({"strawq.kind": "prompts", "strawq.version": "2"}, group_id=["g"]), "x")
    with pytest.raises(Damaged, match="not an Arrow file"):
        open_records(b"PK\3\4" * 100, "x")


def test_the_other_kind_and_rows_that_are_not_there_are_refused():
    prompts = open_records(encode_prompts([Prompt("g", [1])]).records, "objects/p.arrow")
    segments = open_records(publication().records, "objects/s.arrow")
    with pytest.raises(Damaged, match=r"objects/s\.arrow holds 1 segments, not prompts 0 to 1"):
        decode_prompts(segments, 0, 1)
    with pytest.raises(Damaged, match="not segments"):
        decode_segments(prompts, 0, 1)
    for start, stop in ((0, 2), (-1, 1), (1, 0)):
        with pytest.raises(Damaged, match=r"objects/p\.arrow holds 1 prompts"):
            decode_prompts(prompts, start, stop)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), b"bytes", {1: "integer key"}, {2.5}, object(), np.zeros(2), "\ud800"],
    ids=["nan", "inf", "bytes", "key", "set", "object", "array", "surrogate"],
)
def test_metadata_that_json_would_change_is_refused(value):
    with pytest.raises(BadInput, match="metadata"):
        encode_prompts([Prompt("g", metadata={"deep": [value]})])


def test_cyclic_metadata_is_refused_and_tuples_become_lists():
    cycle = {}
    cycle["self"] = cycle
    with pytest.raises(BadInput):
        encode_prompts([Prompt("g", metadata=cycle)])
    records = open_records(encode_prompts([Prompt("g", metadata={"a": (1, (2,))})]).records, "x")
    assert decode_prompts(records, 0, 1)[0].metadata == {"a": [1, [2]]}


def test_text_that_utf8_cannot_hold_is_refused():
    with pytest.raises(BadInput):
        encode_prompts([Prompt("g", text="\ud800")])
    with pytest.raises(BadInput):
        encode_prompts([Prompt("g", samples=2**31)])


def test_rewards_keep_their_value():
    for reward in (None, 0.0, -1.5, float("inf"), {"score": 0.25, "format": 1}, 3):
        published = encode_segments([grow_group(None, group(Sample(0, reward=reward)))])
        (row,) = decode_segments(open_records(published.records, "x"), 0, 1)
        assert row.reward == reward
    published = encode_segments([grow_group(None, group(Sample(0, reward=float("nan"))))])
    (row,) = decode_segments(open_records(published.records, "x"), 0, 1)
    assert np.isnan(row.reward)


def test_records_open_at_any_address():
    data = bytes(publication().records)
    for shift in range(1, 9):
        records = open_records(memoryview(b"_" * shift + data)[shift:], "x")
        (row,) = decode_segments(records, 0, 1)
        assert row.tokens.tolist() == [7, 8]


def test_arrow_readers_see_plain_columns(tmp_path):
    rng = np.random.default_rng(1)
    expected = [sample(rng, index, 4, 3, reward=index / 2) for index in range(3)]
    path = tmp_path / "x.arrow"
    path.write_bytes(encode_segments([grow_group(None, group(*expected))]).records)
    with pa.ipc.open_file(path) as opened:
        assert opened.schema.metadata[b"strawq.kind"] == b"segments"
        got = opened.read_all()
    assert got.schema.equals(rec.SEGMENTS)
    got.validate(full=True)
    assert got["tokens"].to_pylist() == [each.tokens.tolist() for each in expected]
    assert got["reward"].to_pylist() == [0.0, 0.5, 1.0]
    assert got["versions"][0].as_py() == [{"start": 0, "end": 3, "version": "3", "last": ""}]
    assert got["requests"][0].as_py()[0]["sampling"] == '{"temperature":0.7,"top_p":1.0}'
    (r3,) = [ref for ref in got["tensors"][2].as_py() if ref["name"] == "r3"]
    assert (r3["key"], r3["shape"], r3["dtype"], r3["start_row"]) == ("2/r3", [6, 3, 2], "int32", 0)


@pytest.fixture
def files(tmp_path):
    """A publication of prompts and one of segments, as they lie in a pool."""
    rng = np.random.default_rng(1)
    prompts, segments = tmp_path / "prompts.arrow", tmp_path / "segments.arrow"
    prompts.write_bytes(encode_prompts([Prompt("g1", [1, 2], samples=8), Prompt("g2", samples=4)]).records)
    segments.write_bytes(encode_segments([grow_group(None, group(sample(rng, 0, 4, 3, reward=0.5)))]).records)
    return prompts, segments


def test_polars_opens_both_kinds(files):
    polars = pytest.importorskip("polars")
    assert polars.read_ipc(files[0])["samples"].to_list() == [8, 4]
    segments = polars.read_ipc(files[1])
    assert segments["reward"].to_list() == [0.5] and len(segments["tensors"][0]) == 4


def test_pandas_opens_both_kinds(files):
    pytest.importorskip("pandas")
    from pyarrow.feather import read_feather

    assert read_feather(files[0])["group_id"].tolist() == ["g1", "g2"]
    assert read_feather(files[1])["versions"][0][0]["version"] == "3"


def test_duckdb_queries_both_kinds(files):
    duckdb = pytest.importorskip("duckdb")
    prompts, segments = (pa.ipc.open_file(path).read_all() for path in files)
    assert prompts.num_rows == 2 and segments.num_rows == 1  # found by name in the queries
    assert duckdb.sql("select sum(samples), max(len(tokens)) from prompts").fetchall() == [(12, 2)]
    query = "select sample, len(tokens), v.version from segments, unnest(versions) as u(v)"
    assert duckdb.sql(query).fetchall() == [(0, 3, "3")]
