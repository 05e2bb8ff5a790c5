"""Who typed a flag is told of that flag, not of the field that it became."""

import argparse

import pytest

from strawq.cli import main
from strawq.errors import BadInput
from strawq.pool import Pool
from strawq_workers.slime.arguments import add_rollout_arguments, worker_options
from strawq_workers.worker.option_names import named_as, renamed

TYPED = {"samples": "--group-size", "max_samples": "--most", "partial_rollout": "--partial-rollout"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("samples is 0; it must be at least 1", "--group-size is 0; it must be at least 1"),
        ("max_samples is less than one group of 8 samples", "--most is less than one group of 8 samples"),
        ("x needs partial_rollout=False, max_samples", "x needs no --partial-rollout, --most"),
        ("own_max_samples and --max_samples stay", "own_max_samples and --max_samples stay"),
    ],
)
def test_fields_are_named_as_they_were_typed(text, said):
    assert renamed(text, TYPED) == said
    with pytest.raises(BadInput) as caught, named_as(TYPED):
        raise BadInput(text)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; it must be at least 1"),
        (["--group-size", "0"], "--group-size is 0; it must be at least 1"),
        (["--max-concurrent-samples", "2"], "--max-concurrent-samples is 2, less than one group of 8"),
        (["--save-tokens", "2", "--no-partial-rollout"], "and no --partial-rollout keeps none: set --save-tokens to 0"),
    ],
)
def test_work_names_its_options(tmp_path, capsys, words, says):
    Pool.init(tmp_path / "pool").close()
    assert main(["work", str(tmp_path / "pool"), "--engine", "http://127.0.0.1:9", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--max-concurrent-samples 1 --n-samples-per-prompt 2", "--max-concurrent-samples is 1, less than one group"),
        (
            "--partial-rollout --rollout-save-tokens 4 --rollout-stop x",
            "--rollout-save-tokens divides a response into requests",
        ),
        ("--eval-temperature -1", "--eval-temperature must not be negative"),
        ("--eval-top-p 2", "--eval-top-p must be above 0 and at most 1, not 2.0"),
        ("--eval-max-response-len 0", "--eval-max-response-len must be at least 1"),
        ("--rollout-stop-token-ids 3 -4", "--rollout-stop-token-ids are not negative: -4"),
    ],
)
def test_slimes_flags_are_named(words, says):
    args = add_rollout_arguments(argparse.ArgumentParser()).parse_args(["--rollout-batch-size", "2", *words.split()])
    with pytest.raises(BadInput) as caught:
        worker_options(args, ("http://127.0.0.1:9",))
    assert says in str(caught.value)
