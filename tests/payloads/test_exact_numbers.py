"""Whole numbers enter as they are, or are refused with the sample, the value and its place."""

import numpy as np
import pytest

from strawq import Prompt, Sample
from strawq.errors import BadInput

ODD = [
    ([1, 2**31], "2147483648 at 1"), ([1, 2**32 + 5], "4294967301 at 1"), ([2**70], "1180591620717411303424 at 0"),
    ([1, 5.7], "5.7 at 1"), ([1.0, 2.0], "1.0 at 0"), ([float("nan")], "nan at 0"), ([True, False], "True at 0"),
    ([1, True], "True at 1"), (["7"], "'7' at 0"), ([1, None], "None at 1"), ([[1, 2]], "one axis"), (7, "one axis"),
    ([1, -1], "-1 at 1"), (np.array([1, -1], np.int32), "-1 at 1"), (np.array([2**32], np.uint64), "4294967296 at 0"),
    (np.array([5.7]), "5.7 at 0"), (np.array([True]), "True at 0"), (np.array([-1], ">i4"), "-1 at 0"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "words"), ODD)
def test_what_is_no_token_id_is_refused(given, words):
    for make, what in (
        (lambda: Sample(3, tokens=given), "sample 3: tokens"),
        (lambda: Sample(3, prompt_tokens=given), "sample 3: prompt tokens"),
        (lambda: Prompt(tokens=given), "prompt tokens"),
    ):
        with pytest.raises(BadInput) as error:
            make()
        assert what in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64, ">i4", "list"])
def test_ids_of_any_integer_dtype_are_the_same_ids(kind):
    given = [1, 127] if kind == "list" else np.array([1, 127], kind)
    sample = Sample(0, tokens=given)
    assert sample.tokens.dtype == np.int32 and sample.tokens.tolist() == [1, 127]
    assert Sample(0, tokens=[]).tokens.dtype == np.int32


@pytest.mark.parametrize("mask", [[256, 0], [-1, 0], [0.5, 0], [None, 0], ["1", "0"]])
def test_a_loss_mask_does_not_wrap(mask):
    with pytest.raises(BadInput, match="sample 0: loss mask"):
        Sample(0, tokens=[1, 2], loss_mask=mask)
    assert Sample(0, tokens=[1, 2], loss_mask=[True, False]).loss_mask.tolist() == [1, 0]
