import numpy as np
import pytest

from strawq.errors import BadInput, Misaligned
from strawq.model import VersionSpan
from strawq.samples import Sample, SegmentInfo
from strawq_workers.sglang.segment import Segment
from strawq_workers.sglang.wire import GenerateRequest, ModelShape, check_request
from strawq_workers.worker.generation import Plan, budget_left, check_prefix, mask_older, next_step, take_segment
from strawq_workers.worker.options import WorkerOptions

SHAPE = ModelShape(vocab_size=320, layers=2, topk=2, experts=8, context_tokens=40)


def plan(context: int = 40, **changes) -> Plan:
    usual = {"engines": ("http://127.0.0.1:1",), "max_new_tokens": 20, "samples": 1}
    return Plan.of(WorkerOptions(**{**usual, **changes}), context)


def answer(request: GenerateRequest, tokens: int, finish: str, version: str = "1", last: str = "") -> Segment:
    prompt = int(request.input_ids.size)
    rows = prompt + tokens - 1 - request.routed_start
    return Segment(
        output_ids=np.arange(100, 100 + tokens, dtype=np.int32),
        logprobs=np.full(tokens, -1.0, np.float32) if request.logprobs else None,
        versions=(VersionSpan(0, tokens, version, last),) if tokens else (),
        finish=finish,
        prompt_tokens=prompt,
        sampling=request.sampling,
        routed_experts=np.ones((rows, 2, 2), np.int32) if request.routed_experts and tokens else None,
        routed_start=request.routed_start,
        top_ids=np.ones((tokens, 3), np.int32) if request.top_logprobs else None,
        top_logprobs=np.full((tokens, 3), -1.0, np.float32) if request.top_logprobs else None,
    )


def run(cuts: list[int], prompt: int, use: Plan) -> tuple[Sample, list[int]]:
    """Continue a sample whose requests are aborted after so many tokens each, then run to their end."""
    ids = np.arange(3, 3 + prompt, dtype=np.int32)
    sample, asked = Sample(0), []
    while True:
        step = next_step(sample, ids, use)
        if isinstance(step, Sample):
            return step, asked
        check_request(step, SHAPE)
        budget = step.sampling.max_new_tokens
        asked.append(budget)
        cut = cuts.pop(0) if cuts else budget
        made = min(cut, budget)
        sample = take_segment(sample, answer(step, made, "length" if made == budget else "abort"), prompt, use)


@pytest.mark.parametrize("cuts", [[], [15], [8], [7, 7], [15, 0, 3], [1] * 25])
def test_a_resumed_prefix_does_not_get_the_whole_budget_again(cuts):
    sample, asked = run(list(cuts), 10, plan())
    assert len(sample.tokens) == 20 and sample.status == "truncated"
    assert all(budget + done <= 20 for budget, done in zip(asked, np.cumsum([0, *cuts]), strict=False))
    assert len(sample.logprobs) == len(sample.loss_mask) == 20 and sample.versions == (VersionSpan(0, 20, "1"),)


@pytest.mark.parametrize("cuts", [[], [8], [7, 7]])
def test_the_context_bounds_prompt_prefix_and_budget_together(cuts):
    sample, _ = run(list(cuts), 27, plan())
    assert len(sample.tokens) == 13 and sample.status == "truncated"


def test_a_prefix_exactly_at_the_limit_is_truncated_without_a_request():
    full = Sample(0, np.full(20, 7), np.full(20, -1.0), versions=(VersionSpan(0, 20, "1"),), status="aborted")
    step = next_step(full, np.arange(3, 13, dtype=np.int32), plan())
    assert isinstance(step, Sample) and step.status == "truncated" and step.finish_reason == "length"


def test_a_prefix_that_has_stopped_is_complete_and_gets_no_request():
    done = Sample(0, np.array([5, 2]), status="completed", versions=(VersionSpan(0, 2, "1"),))
    assert next_step(done, np.arange(3, 13, dtype=np.int32), plan()) is done
    cut_at_stop = Sample(0, np.array([5, 42]), status="aborted", versions=(VersionSpan(0, 2, "1"),))
    ended = next_step(cut_at_stop, np.arange(3, 13, dtype=np.int32), plan(stop_token_ids=(42,)))
    assert isinstance(ended, Sample) and ended.status == "completed"


def test_a_prompt_that_fills_the_context_is_refused_and_not_truncated_to_nothing():
    with pytest.raises(BadInput, match="leaves no room"):
        next_step(Sample(0), np.arange(40, dtype=np.int32), plan())


def test_a_request_for_a_part_of_the_budget_is_not_the_end_of_the_answer():
    use = plan(save_tokens=8)
    sample, asked = run([], 10, use)
    assert asked == [8, 8, 4] and len(sample.tokens) == 20 and len(sample.segments) == 3


def test_routes_and_top_k_of_a_resume_cover_every_token_once():
    use = plan(routed_experts=True, top_logprobs=3)
    ids = np.arange(3, 13, dtype=np.int32)
    first = next_step(Sample(0), ids, use)
    assert first.routed_start == 0
    sample = take_segment(Sample(0), answer(first, 5, "abort"), 10, use)
    second = next_step(sample, ids, use)
    assert second.routed_start == 10 + 5 - 1 and second.input_ids.size == 15
    sample = take_segment(sample, answer(second, 15, "length"), 10, use)
    assert len(sample.r3) == 10 + 20 - 1 and sample.sc.ids.shape == (20, 3) and sample.status == "truncated"


def test_a_capture_that_does_not_line_up_is_refused_and_the_prefix_stays():
    use = plan(routed_experts=True)
    ids = np.arange(3, 13, dtype=np.int32)
    sample = take_segment(Sample(0), answer(next_step(Sample(0), ids, use), 5, "abort"), 10, use)
    wrong = answer(next_step(sample, ids, use), 4, "abort")
    short = type(wrong)(
        **{f: getattr(wrong, f) for f in wrong.__struct_fields__} | {"routed_experts": wrong.routed_experts[1:]}
    )
    with pytest.raises(Misaligned, match="r3"):
        take_segment(sample, short, 10, use)
    assert len(sample.tokens) == 5 and len(sample.r3) == 14


def test_an_abort_before_the_first_token_changes_nothing():
    sample = Sample(0)
    step = next_step(sample, np.arange(3, 13, dtype=np.int32), plan())
    assert take_segment(sample, answer(step, 0, "abort"), 10, plan()) is sample


# -- masks ----------------------------------------------------------------------------------------------------------


def aged(*versions: tuple[int, int, str, str]) -> Sample:
    count = versions[-1][1]
    spans = tuple(VersionSpan(*span) for span in versions)
    return Sample(0, np.full(count, 7), versions=spans, segments=(SegmentInfo(0, 2), SegmentInfo(2, count)))


@pytest.mark.parametrize(
    ("sample", "masked"),
    [
        (aged((0, 6, "1", "")), 0),
        (aged((0, 4, "1", ""), (4, 6, "2", "")), 4),
        (aged((0, 4, "", ""), (4, 6, "2", "")), 4),
        (aged((0, 4, "1", ""), (4, 6, "1", "2")), 2),
        (aged((0, 6, "", "")), 2),
    ],
)
def test_tokens_of_an_older_policy_are_masked_and_only_these(sample, masked):
    assert mask_older(sample).loss_mask.tolist() == [0] * masked + [1] * (6 - masked)


def test_masking_happens_only_where_it_was_asked_for():
    ids = np.arange(3, 13, dtype=np.int32)
    for wanted in (True, False):
        use = plan(mask_offpolicy_in_partial_rollout=wanted)
        sample = take_segment(Sample(0), answer(next_step(Sample(0), ids, use), 5, "abort"), 10, use)
        assert sample.loss_mask.all()
        sample = take_segment(sample, answer(next_step(sample, ids, use), 15, "length", "2"), 10, use)
        assert sample.loss_mask.sum() == (15 if wanted else 20) and len(sample.loss_mask) == 20


# -- other sampling options -----------------------------------------------------------------------------------------


def prefix_of(use: Plan) -> Sample:
    step = next_step(Sample(0), np.arange(3, 13, dtype=np.int32), use)
    return take_segment(Sample(0), answer(step, 5, "abort"), 10, use)


def test_a_prefix_sampled_with_other_options_is_refused_by_name():
    cold = prefix_of(plan(temperature=0.5))
    check_prefix(cold, 10, plan(temperature=0.5, max_new_tokens=30))
    with pytest.raises(BadInput, match=r"temperature 0\.5 there, 1\.0 here"):
        check_prefix(cold, 10, plan())
    with pytest.raises(BadInput, match="processed there"):
        check_prefix(prefix_of(plan(logprob_mode="processed")), 10, plan())


def test_a_prefix_sampled_with_other_options_is_marked_where_it_is_continued():
    use = plan(changed_sampling="mark")
    cold = prefix_of(plan(temperature=0.5))
    check_prefix(cold, 10, use)
    step = next_step(cold, np.arange(3, 13, dtype=np.int32), use)
    joined = take_segment(cold, answer(step, 15, "length"), 10, use)
    assert joined.metadata["mixed_sampling"] is True
    assert [info.sampling["temperature"] for info in joined.segments] == [0.5, 1.0]
    assert "mixed_sampling" not in prefix_of(use).metadata


def test_a_prefix_with_other_captures_is_refused_before_a_request():
    with pytest.raises(Misaligned, match="lack R3 rows"):
        check_prefix(prefix_of(plan()), 10, plan(routed_experts=True))
    with pytest.raises(Misaligned, match="have log-probs"):
        check_prefix(prefix_of(plan()), 10, plan(logprobs=False))


def test_the_option_that_a_prefix_was_made_with_is_named():
    routed = prefix_of(plan(routed_experts=True))
    bare = prefix_of(plan(logprobs=False))
    for sample, use, option in (
        (routed, plan(), "run it with --routed-experts"),
        (prefix_of(plan()), plan(routed_experts=True), "run it without --routed-experts"),
        (bare, plan(), "run it with --no-logprobs"),
        (prefix_of(plan()), plan(logprobs=False), "run it without --no-logprobs"),
        (prefix_of(plan()), plan(top_logprobs=3), "run it with --top-logprobs 0"),
        (prefix_of(plan(top_logprobs=3)), plan(), "run it with --top-logprobs 3"),
    ):
        with pytest.raises(Misaligned, match=option):
            check_prefix(sample, 10, use)


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engines": ()}, "at least one engine"),
        ({"samples": 0}, "samples is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"worker_index": 1}, "worker_index"),
        ({"partial_rollout": False, "pause_policy": "in_place"}, "contradict"),
        ({"partial_rollout": False, "save_tokens": 8}, "keeps none"),
        ({"save_tokens": 8, "stop": ("\n",)}, "stop strings"),
        ({"save_tokens": 8, "sampling_extra": {"frequency_penalty": 0.5}}, "frequency_penalty"),
        ({"top_logprobs": 2, "logprobs": False}, "needs logprobs"),
        ({"lease_seconds": float("nan")}, "lease_seconds"),
        ({"max_concurrent_samples": 1, "samples": 2}, "max_concurrent_samples"),
    ],
)
def test_options_that_could_not_be_obeyed_are_refused(changes, words):
    with pytest.raises(BadInput, match=words):
        WorkerOptions(**{"engines": ("http://127.0.0.1:1",), **changes})


def test_budget_left_is_never_negative():
    over = Sample(0, np.full(30, 7), versions=(VersionSpan(0, 30, "1"),))
    assert budget_left(over, 10, plan()) == 0
