import json

import pytest
import rollout_hooks as hooks
from scene import text_of

from strawq.errors import BadInput
from strawq_workers.rollout import RolloutFailed, generate_rollout, generate_rollout_fully_async

HOOKS = "rollout_hooks"
FUNCTIONS = pytest.mark.parametrize(
    ("function", "transport"),
    [
        (generate_rollout, "object-store"),
        (generate_rollout, "straw"),
        (generate_rollout_fully_async, "object-store"),
    ],
)


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": f"prompt {row}"}) + "\n" for row in range(5)))
    return ["few", f"{file}@[0:2]", "all", str(file)]


def flags(questions, **changes):
    return {
        "eval_prompt_data": questions,
        "eval_input_key": "question",
        "n_samples_per_eval_prompt": 3,
        "eval_max_response_len": 8,
        "custom_rm_path": f"{HOOKS}.number_of",
        "dynamic_sampling_filter_path": f"{HOOKS}.drop_every_third",
        **changes,
    }


@FUNCTIONS
def test_every_prompt_is_answered_in_order_and_no_queue_is_touched(source_of, engine, questions, function, transport):
    source = source_of(transport)
    before = source.state()
    out = function(source.args(**flags(questions)), 0, source.data, evaluation=True)
    assert list(out.data) == ["few", "all"]
    for name, rows in (("few", 2), ("all", 5)):
        found = out.data[name]
        assert found["rewards"] == [float(row) for row in range(rows) for _ in range(3)]
        assert found["truncated"] == [True] * rows * 3 and len(found["samples"]) == rows * 3
        assert all(sample.response_length == 8 for sample in found["samples"])
        assert all(text_of(sample.tokens[:-8]) == sample.prompt for sample in found["samples"])
    assert out.metrics["eval/all"] == 2.0 and engine.running() == 0
    assert source.state() == before


def test_a_prompt_that_cannot_be_scored_fails_the_evaluation_with_its_reason(source_of, engine, questions):
    source = source_of("object-store")
    hooks.bad = {1}
    with pytest.raises(RolloutFailed, match="no score for prompt 1"):
        generate_rollout(
            source.args(**flags(questions, custom_rm_path=f"{HOOKS}.raises_for_bad")), 0, source.data, evaluation=True
        )
    assert engine.running() == 0
    hooks.bad = set()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"eval_prompt_data": None}, "--eval-prompt-data NAME FILE"), ({"group_rm": True}, "--group-rm is not supported")],
)
def test_evaluation_that_cannot_be_done_is_refused(source_of, questions, changes, words):
    source = source_of("object-store")
    with pytest.raises(BadInput, match=words):
        generate_rollout(source.args(**flags(questions, **changes)), 0, source.data, evaluation=True)


def test_evaluation_between_rollouts_leaves_the_background_worker_at_work(source_of, engine, questions):
    source = source_of("object-store")
    args = source.args(**flags(questions, dynamic_sampling_filter_path=None))
    first = generate_rollout_fully_async(args, 0, source.data)
    out = generate_rollout_fully_async(args, 0, source.data, evaluation=True)
    second = generate_rollout_fully_async(args, 1, source.data)
    assert len(out.data["all"]["samples"]) == 15
    numbers = [group[0].group_index for group in [*first.samples, *second.samples]]
    assert len(set(numbers)) == 6
