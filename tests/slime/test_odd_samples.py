"""What a sampler leaves in its samples comes back equal, or is refused by its path, whatever it is."""

import numpy as np
import pytest
from shapes import Newer, answered

from strawq.errors import BadInput, Misaligned
from strawq_workers.slime.codec import group_of, prompt_of, samples_of


def trip(sample):
    return samples_of(group_of("t", prompt_of(answered(Newer, 0), samples=1), [sample]), Newer)[0]


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (5.7, r"sample 0.tokens: 5.7 at \d"), (5.0, r"sample 0.tokens: 5.0 at \d"), (True, r"sample 0.tokens: True at"),
        ("7", r"sample 0.tokens: '7' at \d"), (None, r"sample 0.tokens: None at \d"), (-1, r"sample 0.tokens: -1 at"),
        (2**31, r"sample 0.tokens: 2147483648 at \d"), (2**70, r"sample 0.tokens: 1180591620717411303424 at \d"),
        (float("nan"), r"sample 0.tokens: nan at \d"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, -1], ids=["prompt", "response"])
def test_a_token_that_is_no_id_is_refused_and_never_another_one(token, words, at):
    sample = answered(Newer, 0)
    sample.tokens[at] = token
    with pytest.raises(BadInput, match=words):
        trip(sample)
    if at == 0:
        with pytest.raises(BadInput, match=words.removeprefix("sample 0.")):
            prompt_of(sample)


def test_numbers_of_numpy_are_counts_and_ids_and_indices():
    sample = answered(Newer, 0)
    tokens, count = list(sample.tokens), sample.response_length
    sample.tokens, sample.response_length = np.array(tokens), np.int64(count)
    back = trip(sample)
    assert back.tokens == tokens and (type(back.response_length), back.response_length) == (int, count)
    sample.index = np.int64(4)
    back = samples_of(group_of("t", prompt_of(sample, samples=1), [sample]), Newer)[0]
    assert (type(back.index), back.index) == (np.int64, 4)
    assert samples_of(group_of("t", prompt_of(sample, samples=1), []), Newer)[0].index == 4


def test_an_index_that_cannot_be_stored_is_refused_by_its_name():
    for index in (10**30, "a", 1.5, True):
        with pytest.raises(BadInput, match=r"^index: "):
            prompt_of(answered(Newer, 0, index=index))
    assert trip(answered(Newer, 0, index=10**30)).index == 10**30


def test_a_field_that_cannot_be_looked_at_is_refused_with_the_sample():
    for fields in ({"loss_mask": 5}, {"rollout_log_probs": 5}, {"tokens": 5}, {"weight_versions": 5}):
        with pytest.raises((BadInput, Misaligned), match="sample 0"):
            trip(answered(Newer, 0, **fields))
    with pytest.raises(BadInput, match=r"sample 0\.weight_versions is '12'"):
        trip(answered(Newer, 0, weight_versions="12"))


def test_what_workers_note_of_a_sample_is_the_samples_own_and_outlives_a_sampler():
    """A data source in memory makes the prompt of the sample that comes back."""
    noted = answered(Newer, 0, metadata={"stale_drops": 2, "mixed_sampling": True, "seed": 3})
    group = group_of("t", prompt_of(noted, samples=1), [noted])
    assert group.samples[0].metadata == {"stale_drops": 2, "mixed_sampling": True}
    (back,) = samples_of(group, Newer)
    assert back.metadata == noted.metadata
    back.metadata = {}
    assert group_of("t", group.prompt, [back], group).samples[0].metadata["stale_drops"] == 2
