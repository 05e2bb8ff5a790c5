"""What the hooks on a whole batch may leave in it; a batch that they spoil is the next one again, as it was."""

import pytest
from scene import indices

from strawq_workers.rollout import generate_rollout, generate_rollout_fully_async
from strawq_workers.worker.views import HookFailed

HERE = "test_selection"


def a_none(args, groups):
    groups[0] = None


def a_none_inside(args, groups):
    groups[0][0] = None


def nothing_inside(args, groups):
    groups[0].clear()


def text(args, groups):
    groups[1] = "group"


class Mute(ValueError):
    def __str__(self):
        raise self


def pops_and_raises(args, groups):
    groups[0].pop()
    groups.pop()
    raise Mute


def spoils(args, groups, data_source):
    groups[0].clear()
    groups.clear()


def pops_one(args, groups):
    groups[0].pop()


@pytest.mark.parametrize("transport", ["object-store", "straw"])
@pytest.mark.parametrize(
    "hook", [a_none, a_none_inside, nothing_inside, text, pops_and_raises], ids=lambda h: h.__name__
)
def test_a_batch_that_the_filter_has_spoiled_is_refused_and_the_next_one_again(source_of, engine, transport, hook):
    source = source_of(transport)
    with pytest.raises(HookFailed, match="rollout_sample_filter hook"):
        generate_rollout(source.args(rollout_sample_filter_path=f"{HERE}.{hook.__name__}"), 0, source.data)
    out = generate_rollout(source.args(), 0, source.data)
    assert sorted(indices(out.samples)) == [0, 1, 2] and all(len(group) == 2 for group in out.samples)


@pytest.mark.parametrize("function", [generate_rollout, generate_rollout_fully_async], ids=["sync", "async"])
def test_who_only_looks_takes_nothing_out_of_the_batch(source_of, engine, function):
    source = source_of("object-store")
    out = function(source.args(rollout_all_samples_process_path=f"{HERE}.spoils"), 0, source.data)
    assert len(out.samples) == 3 and all(len(group) == 2 for group in out.samples)
    out = function(source.args(rollout_sample_filter_path=f"{HERE}.pops_one"), 1, source.data)
    assert [len(group) for group in out.samples] == [1, 2, 2]
