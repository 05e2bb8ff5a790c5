"""Whatever the user's functions answer, or leave in their samples, fails the attempt with what it was: the worker goes
on, and nothing is stored that is not what they said."""

import asyncio
import contextlib
import gc

import numpy as np
import pytest

from strawq_workers.agents import generate
from strawq_workers.worker.views import HookFailed, taking

HERE = "test_odd_answers"


class Own(BaseException):
    pass


class Says:
    """An object whose every question raises."""

    def __init__(self, error):
        self.error = error

    def __repr__(self):
        raise self.error

    def __len__(self):
        raise self.error

    def __bool__(self):
        raise self.error


class Lazy:
    @property
    def keep(self):
        raise Own("no")


def of(sample):
    return int(sample.group_index[1:])


# -- rewards ----------------------------------------------------------------------------------------------------------


def left(sample, **fields):
    for name, value in fields.items():
        setattr(sample, name, value)
    return 1.0


REWARDS = [
    (lambda s: np.array([1.0, 2.0]), "reward hook answered array([1., 2.]) for sample"),
    (lambda s: left(s, metadata=None), "the metadata of sample 0 are None now"),
    (lambda s: left(s, metadata=[1]), "the metadata of sample 0 are [1] now"),
    (lambda s: delattr(s, "metadata") or 1.0, "AttributeError"),
    (lambda s: left(s, metadata={"x": np.float32(1)}), "metadata of sample 0"),
    (lambda s: {"x": Says(Own("no"))}, "reward of sample 0 is not JSON"),
    (lambda s: Says(Own("no")), "reward hook"),
    (lambda s: 10**400, "cannot be trained on"),
    (lambda s: Own("no"), "reward hook answered Own('no')"),
]


def reward(args, sample):
    at = of(sample)
    return REWARDS[at][0](sample) if at < len(REWARDS) else 1.0


async def reward_raises(args, sample):
    if of(sample) == 0:
        raise Own("no")
    return 1.0


# -- sample hooks, filters, tokenizers --------------------------------------------------------------------------------

CHANGES = [
    (lambda s: left(s, remove_sample=np.array([1, 2])), "ValueError"),
    (lambda s: left(s, loss_mask=[[1], [0]] * 12), "loss mask holds something else than 0 and 1"),
    (lambda s: left(s, loss_mask=["1"] * 24), "loss mask holds something else than 0 and 1"),
    (lambda s: left(s, loss_mask=5), "TypeError"),
    (lambda s: left(s, response=b"x"), "left b'x' as the response of sample 0: it must be text"),
    (lambda s: delattr(s, "tokens"), "AttributeError"),
    (lambda s: left(s, status=Says(Own("no"))), "which cannot be taken: Own: no"),
    (lambda s: left(s, rollout_log_probs=7), "TypeError"),
]


def change(args, sample):
    if of(sample) < len(CHANGES):
        CHANGES[of(sample)][0](sample)


VERDICTS = [
    (Lazy, "dynamic_filter hook raised Own: no"),
    (lambda: np.bool_(True), "dynamic_filter hook raised"),
]


def judge(args, samples):
    return VERDICTS[of(samples[0])][0]() if of(samples[0]) < len(VERDICTS) else True


IDS = [
    ([2**32 + 72, 2**32 + 105], "4294967368 at 0 is no whole number from 0 to 2147483647"),
    (np.array([2**32 + 72], np.uint64), "4294967368 at 0"),
    ([2**31], "2147483648 at 0"),
    ([1, -1], "-1 at 1"),
    ([1, 5.7], "5.7 at 1"),
    ([1, True], "True at 1"),
    ([1, None], "None at 1"),
    ([2**70], "1180591620717411303424 at 0"),
    (np.array([[1, 2]]), "return one list of token ids"),
    ([], "return one list of token ids"),
    ("ab", "'ab' at 0"),
    (Own("no"), "no whole number"),
]


def tokenize(args, prompt):
    at = int(prompt.group_id[1:])
    return IDS[at][0] if at < len(IDS) else [72, 105]


# -- generate functions -----------------------------------------------------------------------------------------------


def put(sample, tokens, **fields):
    """As functions do that speak to an engine themselves."""
    count = sample.response_length + len(tokens)
    sample.tokens, sample.response_length = [*sample.tokens, *tokens], count
    sample.rollout_log_probs, sample.loss_mask = [-1.0] * count, [1] * count
    sample.status, sample.response = "completed", "x"
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def swallowed(sample, tokens, **fields):
    """What is refused fails the attempt even if the function swallows the exception."""
    with contextlib.suppress(Exception):
        sample.append_response_tokens(None, tokens=tokens, **{"trainable": False, **fields})
    return put(sample, [5, 6])


GENERATED = [
    (lambda s: put(s, [2**32 + 5, 6]), "4294967301 at "),
    (lambda s: put(s, [-5, 6]), "-5 at "),
    (lambda s: put(s, [5.7, 6]), "5.7 at "),
    (lambda s: put(s, [10**8, 6]), "token id 100000000 is outside the vocabulary of 320 tokens"),
    (lambda s: left(s, tokens=[10**8, 9]) and s, "outside the vocabulary"),
    (lambda s: put(s, [5, 6], loss_mask=[-1, 1]), "loss mask holds something else than 0 and 1 ([-1, 1])"),
    (lambda s: put(s, [5, 6], loss_mask=[256, 257]), "loss mask holds something else than 0 and 1"),
    (lambda s: put(s, [5, 6], loss_mask=[0.5, 1]), "loss mask holds something else than 0 and 1"),
    (lambda s: put(s, [5, 6], reward=np.array([1.0, 2.0])), "generate function answered array([1., 2.]) for sample"),
    (lambda s: put(s, [5, 6], metadata=None), "the metadata of sample 0 are None now"),
    (lambda s: put(s, [5, 6], weight_versions="12"), "left '12' as weight_versions"),
    (lambda s: put(s, [5, 6], response=b"x"), "it must be text"),
    (lambda s: put(s, [5, 6], rollout_log_probs=[None, -1.0]), "logprobs"),
    (lambda s: put(s, [5, 6], rollout_log_probs=["-1", "-1"]), "logprobs"),
    (lambda s: put(s, [5, 6], response_length=Says(Own("no"))), "Own: no"),
    (lambda s: delattr(s, "tokens") or s, "AttributeError"),
    (lambda s: swallowed(s, [2**32 + 72]), "4294967368 at 0"),
    (lambda s: swallowed(s, [-3]), "-3 at 0"),
    (lambda s: swallowed(s, [1.7]), "1.7 at 0"),
    (lambda s: swallowed(s, [10**8]), "outside the vocabulary"),
    (lambda s: swallowed(s, [5], text=b"x"), "TypeError"),
    (lambda s: swallowed(s, [5], meta_info=[1]), "AttributeError"),
]


async def function(args, sample, sampling_params):
    if of(sample) < len(GENERATED):
        return GENERATED[of(sample)][0](sample)
    if of(sample) == len(GENERATED):
        await generate(args, sample, {"max_new_tokens": "many"})
    if of(sample) == len(GENERATED) + 1:
        raise Own("no")
    # What an engine's client gives: NumPy's numbers are as good as Python's.
    numbers = {"loss_mask": np.ones(2, bool), "rollout_log_probs": np.array([-1.0, -2.0]), "weight_versions": [9]}
    return put(sample, [np.int64(5), np.int32(6)], **numbers, reward=np.float32(0.5))


async def refused_turn(args, sample, sampling_params):
    await generate(args, sample, {**sampling_params, "wings": 2})
    return sample


async def failed_as_expected(stage, table, **options):
    """Each of the table's groups fails for its reason, and the last group is accepted by the same worker."""
    stage.submit(len(table) + 1)
    summary = await stage.run(refusals_max=1000, max_new_tokens=24, **options)
    assert summary.reason == "sealed" and summary.counters.groups_accepted == 1
    reasons = {task.id: task.reason for task in stage.queue.dead_letters()}
    for at, (_, words) in enumerate(table):
        assert words in reasons[f"1-{at}"], at


async def test_no_reward_ends_the_worker(stage_of):
    async with stage_of() as stage:
        await failed_as_expected(stage, REWARDS, reward=f"{HERE}:reward")


async def test_no_exception_of_a_coroutine_ends_the_worker(stage_of):
    async with stage_of() as stage:
        await failed_as_expected(stage, [(0, "reward hook raised Own: no")], reward=f"{HERE}:reward_raises")


async def test_no_change_of_a_sample_hook_ends_the_worker(stage_of):
    async with stage_of() as stage:
        await failed_as_expected(stage, CHANGES, sample_hooks=(f"{HERE}:change",))


async def test_no_verdict_of_a_filter_ends_the_worker(stage_of):
    async with stage_of() as stage:
        await failed_as_expected(stage, VERDICTS, dynamic_filter=f"{HERE}:judge")


async def test_ids_of_a_tokenize_hook_are_taken_as_they_are_or_refused(stage_of):
    async with stage_of() as stage:
        await failed_as_expected(stage, IDS, tokenize=f"{HERE}:tokenize")


async def test_no_answer_of_a_generate_function_ends_the_worker_or_is_stored_as_something_else(stage_of):
    async with stage_of() as stage:
        table = [*GENERATED, (0, "ValueError"), (0, "generate hook raised Own: no")]
        await failed_as_expected(stage, table, generate=f"{HERE}:function")
        (group,) = stage.groups(stage="ready")
        for sample in group.samples:
            assert sample.tokens.tolist() == [5, 6] and sample.loss_mask.tolist() == [1, 1] and sample.reward == 0.5
            assert [span.version for span in sample.versions] == ["9"]


async def test_a_turn_that_an_engine_refuses_leaves_no_exception_that_nobody_has_seen(stage_of):
    unseen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    async with stage_of() as stage:
        stage.submit(2)
        summary = await stage.run(refusals_max=1000, generate=f"{HERE}:refused_turn")
        assert summary.reason == "sealed" and stage.queue.counts().failed == 2
        gc.collect()
        await asyncio.sleep(0)
        assert not unseen


ERRORS = (ValueError("no"), StopIteration(1), SystemExit(3), KeyboardInterrupt(), Own("no"), RecursionError())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_boundary_lets_nothing_through(error):
    words = f"reward hook answered 7, which cannot be taken: {type(error).__name__}"
    with pytest.raises(HookFailed, match=words) as failed, taking("reward hook", 7):
        raise error
    assert failed.value.exit_code == 2, "1 is a fault of strawq"
