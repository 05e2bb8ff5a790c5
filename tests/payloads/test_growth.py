"""A group that grows in saves comes back whole, and a history that does not join is refused."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strawq.errors import BadInput, Damaged, Misaligned
from strawq.model import UNVERSIONED, VersionSpan
from strawq.samples import Prompt, Sample, SegmentInfo, TopP, cut, extend, oldest_version, token_count
from strawq.storage.growth import fold, grow_group, load_group
from strawq.storage.records import decode_segments
from tests.payloads.build import (
    Saves,
    assert_same,
    group,
    routes,
    sample,
    sampling_of_tokens,
    tokens,
    top_k,
    top_p,
    versions,
)

replace = msgspec.structs.replace


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sc=st.sampled_from(["topk", "topp", None]),
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.booleans()), min_size=2, max_size=2),
        min_size=1,
        max_size=5,
    ),
)
def test_any_history_of_saves_reads_back_as_what_was_saved(seed, sc, steps):
    rng = np.random.default_rng(seed)
    saves, saved, current = Saves(Prompt("g", [1, 2, 3, 4])), None, {}
    for turn, step in enumerate(steps):
        for index, (count, mask_old, annotate) in enumerate(step):
            before = current.get(index)
            new = sample(rng, index, 4, count, version=str(turn // 2), sc=sc, first=before is None)
            grown = new if before is None else extend(before, new)
            if mask_old:
                mask = grown.loss_mask.copy()
                mask[: len(grown.tokens) - count] = 0
                grown = replace(grown, loss_mask=mask)
            if annotate:
                grown = replace(grown, reward=float(turn), metadata={"turn": turn}, status="completed", payload=b"\0x")
            current[index] = grown
        saves.save(saved, group(*current.values()))
        saved = saves.load()
        assert [entry.index for entry in saved.samples] == [0, 1]
        for entry in saved.samples:
            assert_same(current[entry.index], entry)
            # Go on from what was loaded, as another worker would.
            current[entry.index] = entry
    assert grow_group(saved, saved) == []


def test_a_resume_writes_in_proportion_to_the_new_tokens():
    rng = np.random.default_rng(1)
    saves = Saves(Prompt("g", [1, 2, 3, 4]))
    first = group(sample(rng, 0, 4, 4000))
    saves.save(None, first)
    loaded = saves.load()
    saves.shelf.reads.clear()
    mask = np.concatenate([np.zeros(4000, np.uint8), np.ones(40, np.uint8)])
    more = extend(loaded.samples[0], sample(rng, 0, 4, 40, version="4", first=False))
    saves.save(loaded, group(replace(more, loss_mask=mask)))
    assert saves.written[2] < 14_000 < saves.written[1] // 10
    assert saves.shelf.reads == []  # nor is the prefix read
    again = saves.load()
    assert_same(replace(more, loss_mask=mask), again.samples[0])


def test_metadata_reward_and_masks_are_saved_without_tokens():
    rng = np.random.default_rng(2)
    saves = Saves(Prompt("g", [1, 2, 3, 4]))
    saves.save(None, group(sample(rng, 0, 4, 6), sample(rng, 1, 4, 3)))
    loaded = saves.load()
    mask = loaded.samples[0].loss_mask.copy()
    mask[1:3] = 1 - mask[1:3]
    final = replace(
        loaded.samples[0], loss_mask=mask, reward={"score": 0.5}, status="completed", finish_reason="stop", metadata={}
    )
    assert saves.save(loaded, group(final, loaded.samples[1])).rows == 1  # the other sample did not change
    again = saves.load()
    assert_same(final, again.samples[0])
    assert_same(loaded.samples[1], again.samples[1])


@pytest.mark.parametrize("order", [[0, 2], [0, 1, 1, 2], [0, 2, 1]], ids=["lost", "doubled", "swapped"])
def test_saves_that_do_not_join_are_damage_with_the_counts(order):
    rng = np.random.default_rng(3)
    saves = Saves(Prompt("g", [1, 2, 3, 4]))
    saves.save(None, group(sample(rng, 0, 4, 5)))
    loaded = saves.load()
    saves.save(loaded, group(extend(loaded.samples[0], sample(rng, 0, 4, 2, first=False))))
    saves.parts = [saves.parts[at] for at in order]
    with pytest.raises(Damaged, match=r"task 5-3: sample 0: .* follows \d tokens, \d are there"):
        saves.load()


def test_saved_tokens_do_not_vanish_unnoticed():
    rng = np.random.default_rng(4)
    saves = Saves(Prompt("g", [1, 2, 3, 4]))
    saves.save(None, group(sample(rng, 0, 4, 8)))
    loaded = saves.load()
    shorter = cut(loaded.samples[0], 5)
    with pytest.raises(BadInput, match="8 tokens are saved and only the first 5"):
        grow_group(loaded, group(shorter))
    changed = loaded.samples[0].tokens.copy()
    changed[2] += 1
    with pytest.raises(BadInput, match="only the first 2"):
        grow_group(loaded, group(replace(loaded.samples[0], tokens=changed)))
    with pytest.raises(BadInput, match=r"saved samples \[0\] are missing"):
        grow_group(loaded, group())


@pytest.mark.parametrize("sc", ["topk", "topp"])
@pytest.mark.parametrize("count", [0, 1, 5, 7])
def test_a_cut_on_purpose_reads_back_and_grows_again(sc, count):
    rng = np.random.default_rng(5)
    saves = Saves(Prompt("g", [1, 2, 3, 4]))
    saves.save(None, group(sample(rng, 0, 4, 5, sc=sc)))
    loaded = saves.load()
    saves.save(loaded, group(extend(loaded.samples[0], sample(rng, 0, 4, 3, version="4", sc=sc, first=False))))
    loaded = saves.load()
    short = cut(loaded.samples[0], count)
    assert len(short.r3) == 4 + count - 1
    saves.save(loaded, group(short), rewrite=True)
    again = saves.load()
    assert_same(short, again.samples[0])
    grown = extend(again.samples[0], sample(rng, 0, 4, 2, version="5", sc=sc, first=False))
    saves.save(again, group(grown))
    assert_same(grown, saves.load().samples[0])


def test_cut_takes_everything_with_it():
    rng = np.random.default_rng(6)
    whole = sample(rng, 0, 4, 9, sc="topp", reward=1.0, finish_reason="stop")
    short = cut(replace(whole, versions=(VersionSpan(0, 4, "1"), VersionSpan(4, 9, "2"))), 6)
    assert [len(x) for x in (short.tokens, short.logprobs, short.loss_mask)] == [6, 6, 6]
    assert short.versions == (VersionSpan(0, 4, "1"), VersionSpan(4, 6, "2"))
    assert (short.segments[0].start, short.segments[0].end) == (0, 6)
    assert short.r3.shape == (9, 3, 2)
    assert len(short.sc.offsets) == 7 and len(short.sc.ids) == len(short.sc.logprobs) == short.sc.offsets[-1]
    assert len(short.token_tensors["teacher"]) == 6
    assert (short.text, short.reward, short.finish_reason, short.status) == (None, None, "", "aborted")
    assert cut(whole, 9) is whole
    with pytest.raises(BadInput, match="cannot cut to 10 tokens, it has 9"):
        cut(whole, 10)


def test_a_capture_missing_from_the_resume_is_refused():
    rng = np.random.default_rng(7)
    saves = Saves(Prompt("g", [1, 2, 3, 4]))
    saves.save(None, group(sample(rng, 0, 4, 5)))
    loaded = saves.load()
    full = extend(loaded.samples[0], sample(rng, 0, 4, 2, first=False))
    with pytest.raises(Misaligned, match="r3 saved for 5 tokens, and missing now"):
        grow_group(loaded, group(replace(full, r3=None)))
    with pytest.raises(Misaligned, match=r"topk\.ids, topk\.logprobs saved"):
        grow_group(loaded, group(replace(full, sc=None)))
    with pytest.raises(Misaligned, match="r3 cover only one of its 5 saved and 2 new tokens"):
        extend(loaded.samples[0], replace(sample(rng, 0, 4, 2, first=False), r3=None))
    assert_same(loaded.samples[0], saves.load().samples[0])


def test_segments_of_another_dtype_or_shape_are_refused_at_the_door():
    rng = np.random.default_rng(8)
    saves = Saves(Prompt("g", [1, 2, 3, 4]))
    saves.save(None, group(sample(rng, 0, 4, 5)))
    loaded = saves.load()
    more = sample(rng, 0, 4, 2, first=False)
    with pytest.raises(Misaligned, match=r"int64 \[3, 2\] cannot follow rows of int32 \[3, 2\]"):
        extend(loaded.samples[0], replace(more, r3=more.r3.astype(np.int64)))
    grown = extend(loaded.samples[0], more)
    with pytest.raises(Misaligned, match="int64"):
        grow_group(loaded, group(replace(grown, r3=np.asarray(grown.r3).astype(np.int64))))


def test_segments_narrowed_differently_read_back_in_the_dtype_given():
    rng = np.random.default_rng(9)
    saves, loaded = Saves(Prompt("g", [1, 2, 3, 4])), None
    whole = []
    for turn, ids in enumerate([(0, 255), (256, 511), (65535, 70000), (-1, 3), (-300, 3)]):
        rows = 4 if turn else 7
        piece = np.resize(np.array(ids, np.int32), (rows, 3, 2))
        whole.append(piece)
        more = replace(sample(rng, 0, 4, 4, first=not turn, sc=None), r3=piece)
        saves.save(loaded, group(extend(loaded.samples[0], more) if loaded else more))
        loaded = saves.load()
    expected = np.concatenate(whole)
    assert {piece.tensor.stored for piece in loaded.samples[0].r3.pieces} == {
        "uint8",
        "uint16",
        "int32",
        "int8",
        "int16",
    }
    got = loaded.samples[0].r3
    assert got.dtype == "int32" and np.asarray(got).dtype == np.int32
    for start in range(len(expected)):
        for stop in range(start, len(expected) + 1):
            np.testing.assert_array_equal(got[start:stop], expected[start:stop])


def test_rows_that_were_saved_live_are_kept_when_the_engine_sends_them_again():
    rng = np.random.default_rng(10)
    saves = Saves(Prompt("g", [1, 2, 3, 4]))
    first = sample(rng, 0, 4, 5)
    saves.save(None, group(first))
    loaded = saves.load()
    full_again = routes(rng, 4 + 7 - 1)  # other rows for the old tokens too
    grown = replace(extend(loaded.samples[0], sample(rng, 0, 4, 2, first=False)), r3=full_again)
    saves.save(loaded, group(grown))
    got = np.asarray(saves.load().samples[0].r3)
    np.testing.assert_array_equal(got[:8], first.r3)
    np.testing.assert_array_equal(got[8:], full_again[8:])


def test_a_sample_aborted_before_its_first_token_goes_on():
    rng = np.random.default_rng(11)
    saves = Saves(Prompt("g", None, text="not tokenised yet"))
    saves.save(None, group(Sample(0, status="aborted"), prompt=Prompt("g", text="not tokenised yet")))
    loaded = saves.load()
    prompted = replace(sample(rng, 0, 4, 3), prompt_tokens=np.array([9, 8, 7, 6], np.int32))
    saves.save(loaded, group(prompted, prompt=loaded.prompt))
    loaded = saves.load()
    assert_same(prompted, loaded.samples[0])
    grown = extend(loaded.samples[0], sample(rng, 0, 4, 2, first=False))
    saves.save(loaded, group(grown, prompt=loaded.prompt))
    assert_same(grown, saves.load().samples[0])


def test_text_whose_last_characters_are_revised_is_saved_from_there():
    saves = Saves(Prompt("g", [1]))
    base = Sample(0, [1, 2], versions=versions(2), text="hello " * 1000 + "wor\ufffd")
    saves.save(None, group(base, prompt=Prompt("g", [1])))
    loaded = saves.load()
    grown = replace(base, tokens=[1, 2, 3], loss_mask=[1, 1, 1], versions=versions(3), text="hello " * 1000 + "world")
    published = saves.save(loaded, group(grown, prompt=loaded.prompt))
    assert published.records.nbytes < 9000 < saves.written[1]
    assert saves.load().samples[0].text == grown.text


def test_versions_and_sampling_say_what_made_each_token():
    rng = np.random.default_rng(12)
    saves = Saves(Prompt("g", [1, 2, 3, 4]))
    first = replace(sample(rng, 0, 4, 4), versions=(VersionSpan(0, 3, "default"), VersionSpan(3, 4, "7", "9")))
    saves.save(None, group(first))
    loaded = saves.load()
    assert oldest_version(loaded) == 7 and token_count(loaded) == 4
    more = replace(
        sample(rng, 0, 4, 2, version="5", first=False), segments=(SegmentInfo(0, 2, {"temperature": 1.0}, "processed"),)
    )
    saves.save(loaded, group(extend(loaded.samples[0], more)))
    got = saves.load().samples[0]
    assert got.versions == (VersionSpan(0, 3, "default"), VersionSpan(3, 4, "7", "9"), VersionSpan(4, 6, "5"))
    assert sampling_of_tokens(got)[3:5] == [
        ({"temperature": 0.7, "top_p": 1.0}, "original"),
        ({"temperature": 1.0}, "processed"),
    ]
    assert oldest_version(group(Sample(0, [1], versions=versions(1, "default")))) == UNVERSIONED


def test_whole_tensors_are_replaced_and_never_lost():
    saves = Saves(Prompt("g", [1]))
    image = np.arange(12, dtype=np.float16).reshape(3, 4)
    base = Sample(0, tensors={"image": image, "scale": np.array(2.5)})
    saves.save(None, group(base, prompt=Prompt("g", [1])))
    loaded = saves.load()
    assert np.asarray(loaded.samples[0].tensors["scale"]).shape == ()
    assert_same(base, loaded.samples[0])
    changed = replace(loaded.samples[0], tensors={**loaded.samples[0].tensors, "image": image + 1})
    saves.save(loaded, group(changed, prompt=loaded.prompt))
    assert_same(changed, saves.load().samples[0])
    with pytest.raises(BadInput, match="replace them"):
        grow_group(loaded, group(Sample(0), prompt=loaded.prompt))


def test_a_group_is_loaded_without_its_packs_and_the_missing_pack_is_named_when_it_is_read():
    rng = np.random.default_rng(13)
    saves = Saves(Prompt("g", [1, 2, 3, 4]))
    saves.save(None, group(sample(rng, 0, 4, 5)))
    saves.shelf.content.clear()
    loaded = saves.load()
    assert len(loaded.samples[0].tokens) == 5
    with pytest.raises(Exception, match=r"packs/.*\.safetensors is not there"):
        loaded.samples[0].r3[0:1]
    saves.parts[1] = saves.parts[1]._replace(pack="")
    with pytest.raises(Damaged, match="has none"):
        load_group("5-3", saves.parts, saves.reader)


def test_extend_refuses_to_mix_top_k_and_top_p():
    rng = np.random.default_rng(14)
    first = replace(sample(rng, 0, 4, 5), sc=top_k(rng, 5))
    with pytest.raises(Misaligned, match="top-k before and top-p now"):
        extend(first, replace(sample(rng, 0, 4, 2, first=False), sc=top_p(rng, 2)))
    assert isinstance(top_p(rng, 2), TopP)
    assert tokens(rng, 0)["segments"] == ()


@pytest.mark.parametrize("shift", [1, -1])
def test_tensor_rows_that_do_not_follow_are_damage(shift):
    rng = np.random.default_rng(15)
    saves = Saves(Prompt("g", [1, 2, 3, 4]))
    saves.save(None, group(sample(rng, 0, 4, 5)))
    loaded = saves.load()
    saves.save(loaded, group(extend(loaded.samples[0], sample(rng, 0, 4, 2, first=False))))
    rows = [row for saved in saves.parts[1:] for row in decode_segments(saved.records, saved.start, saved.stop)]
    paths = {ref.pack: saved.pack for row, saved in zip(rows, saves.parts[1:], strict=True) for ref in row.tensors}
    moved = [replace(ref, start_row=ref.start_row + shift) for ref in rows[1].tensors]

    def fold_rows(*history):
        return fold("5-3", loaded.prompt, history, lambda ref: saves.reader.rows(paths[ref.pack], ref))

    assert_same(saves.load().samples[0], fold_rows(*rows).samples[0])
    with pytest.raises(Damaged, match="task 5-3: sample 0"):
        fold_rows(rows[0], replace(rows[1], tensors=moved))
