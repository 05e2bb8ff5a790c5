import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import rollout_hooks as hooks
from scene import SLOW, indices, tokens_of, until

from strawq import Pool
from strawq.errors import BadInput, StrawqError
from strawq_workers.rollout import (
    RolloutFailed,
    close_rollouts,
    generate_rollout,
    generate_rollout_fully_async,
    in_background,
    weight_update,
)
from strawq_workers.rollout.station import station_of
from strawq_workers.slime import ObjectStoreDataSource
from strawq_workers.worker import group

HOOKS = "rollout_hooks"


def running(source):
    return station_of(source.data).running


def calls_of(source, name, count, hurry):
    """What the worker got of its next `count` calls of a method of the in-memory queue. `hurry` is set meanwhile."""
    memory, loop = running(source).source, station_of(source.data).loop._loop
    call, answers = getattr(memory, name), []

    async def told(*given, **named):
        answer = await call(*given, **named)
        answers.append(answer)
        return answer

    setattr(memory, name, told)

    def enough():
        loop.call_soon_threadsafe(hurry.set)
        return len(answers) >= count

    until(f"{count} calls of {name}", enough)
    setattr(memory, name, call)
    return answers


def test_three_rollouts_train_each_prompt_once_while_generation_goes_on(source_of, engine):
    source, trained = source_of("object-store"), []
    for rollout_id in range(3):
        out = generate_rollout_fully_async(source.args(), rollout_id, source.data)
        assert len(out.samples) == 3 and out.metrics["rollout/staleness/unknown_count"] == 0
        trained += indices(out.samples)
    assert len(set(trained)) == 9
    close_rollouts(source.data)
    assert engine.running() == 0
    given_back = [number for number, _ in source.waiting()]
    assert sorted(trained + given_back) == sorted(set(source.data.handed_out))


def test_a_call_takes_what_it_asked_for_and_the_rest_waits_in_the_order_it_was_started(source_of, engine):
    source = source_of("object-store", prompts=8)
    first = generate_rollout_fully_async(source.args(), 0, source.data)
    until("all are complete", lambda: running(source).source.ready == 5)
    made = engine.generated()
    second = generate_rollout_fully_async(source.args(rollout_batch_size=4), 1, source.data)
    rest = [number for number in range(8) if number not in indices(first.samples)]
    assert indices(second.samples) == rest[:4] and engine.generated() == made
    last = generate_rollout_fully_async(source.args(), 2, source.data)
    assert indices(last.samples) == rest[4:]


def test_nothing_new_is_started_while_enough_complete_groups_wait(source_of, engine):
    source = source_of("object-store")
    args = source.args(sglang_server_concurrency=8)  # four groups at once
    generate_rollout_fully_async(args, 0, source.data)
    until("it stands still", lambda: running(source).source.ready >= 4 and not running(source).worker.runs)
    assert running(source).source.ready <= 2 * 4 and engine.running() == 0
    made = engine.generated()
    asked = calls_of(source, "acquire", 5, running(source).worker.place.changed)
    assert {leases.status for leases in asked} == {"backpressured"} and engine.generated() == made
    # A batch above what may wait is not waited for in vain.
    assert len(generate_rollout_fully_async(source.args(rollout_batch_size=20), 1, source.data).samples) == 20


def in_mid_generation(engine):
    """Groups behind a first batch have tokens, and are far from their end: they go on at one token each second."""
    start = engine.generated()
    engine.pace_after(start + 20, 1.0)
    until("others have tokens", lambda: engine.generated() > start + 20)


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
@pytest.mark.parametrize("partial", [False, True])
def test_what_is_in_hand_goes_back_when_the_rollouts_are_closed(source_of, engine, partial):
    source = source_of("object-store")
    args = source.args(partial_rollout=partial, rollout_batch_size=1, rollout_max_response_len=100)
    generate_rollout_fully_async(args, 0, source.data)
    in_mid_generation(engine)
    close_rollouts(source.data)
    assert engine.running() == 0
    engine.pace(None)
    saved = dict(source.waiting())
    lengths = {len(tokens) for samples in saved.values() for tokens in samples}
    assert (lengths - {0, 100} != set()) == partial
    again = generate_rollout_fully_async(source.args(**{**vars(args), "rollout_batch_size": 6}), 1, source.data)
    for number, now in zip(indices(again.samples), tokens_of(again.samples), strict=True):
        for prefix, tokens in zip(saved.get(number, [[], []]), now, strict=True):
            assert tokens[: len(prefix)] == prefix


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
def test_what_a_rollout_has_in_hand_is_saved_with_the_data_source(args_of, engine, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"prompt {row}"}) + "\n" for row in range(1000)))
    args = args_of(
        prompt_data=str(prompts), save=str(tmp_path / "run"), load=str(tmp_path / "run"), partial_rollout=True,
        rollout_batch_size=1, rollout_max_response_len=100,
    )  # fmt: skip
    data = ObjectStoreDataSource(args)
    trained = indices(generate_rollout_fully_async(args, 0, data).samples)
    in_mid_generation(engine)
    data.save(0)
    engine.pace(None)
    again = ObjectStoreDataSource(args)
    again.load(0)
    waiting = {group[0].group_index for group in again.buffer}
    assert sorted([*trained, *waiting]) == list(range(again.sample_group_index)), "each prompt that was handed out"
    assert any(sample.response_length for group in again.buffer for sample in group)
    assert set(indices(generate_rollout_fully_async(args, 1, data).samples)) <= waiting, "and it goes on after that"


def test_a_group_that_fails_for_good_is_told_once_and_the_others_go_on(source_of, engine):
    source = source_of("object-store")
    hooks.bad = {1}
    args = source.args(custom_rm_path=f"{HOOKS}.raises_for_bad", rollout_batch_size=40)
    with pytest.raises(RolloutFailed, match="no score for prompt 1"):
        generate_rollout_fully_async(args, 0, source.data)
    out = generate_rollout_fully_async(args, 0, source.data)
    assert len(out.samples) == 40 and 1 not in indices(out.samples)
    close_rollouts(source.data)
    assert 1 in [number for number, _ in source.waiting()]
    hooks.bad = set()


def test_a_batch_hook_that_raises_loses_no_group(source_of, engine):
    source = source_of("object-store")
    with pytest.raises(StrawqError, match="no filter"):
        generate_rollout_fully_async(source.args(rollout_sample_filter_path=f"{HOOKS}.filter_raises"), 0, source.data)
    assert 0 in indices(generate_rollout_fully_async(source.args(), 0, source.data).samples)


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
def test_weights_change_while_generation_stands_still_and_prefixes_go_on_under_the_new_ones(source_of, engine):
    source = source_of("object-store")
    args = source.args(partial_rollout=True, rollout_batch_size=3, rollout_max_response_len=60)
    generate_rollout_fully_async(args, 0, source.data)
    in_mid_generation(engine)
    with weight_update(source.data, 2):
        assert engine.running() == 0
        made = engine.generated()
        engine.set_version("2")
        looks = calls_of(source, "look", 5, running(source).worker.watcher.look_now)
        assert all(around.pause is not None for around in looks) and engine.generated() == made
        engine.pace(None)
    versions = []
    for rollout_id in range(1, 6):  # groups that were complete before come first, and are at most eight
        out = generate_rollout_fully_async(args, rollout_id, source.data)
        assert out.metrics["rollout/staleness/max"] <= 1
        versions += [set(sample.weight_versions) for group in out.samples for sample in group]
    assert {"1", "2"} in versions


def test_an_engine_that_is_gone_is_an_error_of_the_call_and_the_next_call_begins_anew(source_of, engine):
    source = source_of("object-store")
    hooks.reached.clear()
    hooks.release.clear()
    failures = []

    def call():
        try:
            generate_rollout_fully_async(source.args(rollout_engines=["http://127.0.0.1:9"]), 0, source.data)
        except StrawqError as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    assert [error.exit_code for error in failures] == [4]
    assert len(generate_rollout_fully_async(source.args(), 0, source.data).samples) == 3


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_no_group_is_older_than_its_budget_where_the_policy_is_strict(source_of, engine, budget):
    """Versions change after each batch, as fast as batches come. How much of the budget is used is a matter of
    pace."""
    source, ages = source_of("object-store"), []
    args = source.args(max_staleness=budget, staleness_policy="oldest_first")
    for rollout_id in range(6):
        out = generate_rollout_fully_async(args, rollout_id, source.data)
        assert len(out.samples) == 3 and out.metrics["rollout/staleness/late_groups"] == 0
        ages.append(out.metrics["rollout/staleness/max"])
        with weight_update(source.data, rollout_id + 2):
            engine.set_version(str(rollout_id + 2))
    assert max(ages) <= budget


@pytest.mark.parametrize("budget", [0, 1, 2])
@pytest.mark.parametrize("policy", ["admit", "oldest_first", "drop"])
def test_no_more_is_begun_than_the_budget_allows_and_that_is_used_to_the_full(source_of, engine, budget, policy):
    source = source_of("object-store")
    args = source.args(max_staleness=budget, staleness_policy=policy)
    for rollout_id in range(3):
        out = generate_rollout_fully_async(args, rollout_id, source.data)
        assert len(out.samples) == 3
        # A batch that is trained on counts; with a budget of 0 nothing is begun meanwhile.
        room = budget * 3
        until("what may be begun is complete", lambda room=room: running(source).source.ready == room)
        looks = calls_of(source, "acquire", 2, running(source).worker.place.changed)
        assert {answer.status for answer in looks} == {"backpressured"}
        assert running(source).source.ready == room and not running(source).worker.runs


def test_a_straggler_that_was_overtaken_is_delivered_late_under_admit_and_counted(source_of, engine):
    source = source_of("object-store")
    args = source.args(max_staleness=2, rollout_batch_size=2, custom_rm_path=f"{HOOKS}.slow_first")
    held = hooks.gate["first"] = threading.Event()
    for rollout_id in range(3):
        out = generate_rollout_fully_async(args, rollout_id, source.data)
        assert 0 not in indices(out.samples) and out.metrics["rollout/staleness/late_groups"] == 0
        with weight_update(source.data, rollout_id + 2):
            engine.set_version(str(rollout_id + 2))
    held.set()
    until("the straggler is complete", lambda: "0" in running(source).source._done)
    late = generate_rollout_fully_async(args, 3, source.data)
    assert indices(late.samples)[0] == 0
    assert late.metrics["rollout/staleness/max"] == 3 and late.metrics["rollout/staleness/late_groups"] == 1


def test_a_batch_waits_for_the_older_group_that_would_miss_its_budget(source_of, engine, monkeypatch):
    source, later = source_of("object-store"), threading.Event()
    args = source.args(
        max_staleness=2, staleness_policy="oldest_first", partial_rollout=True, rollout_batch_size=2,
        custom_rm_path=f"{HOOKS}.slow_first", rollout_tokenize_path=f"{HOOKS}.first_three_first",
    )  # fmt: skip
    held = hooks.gate["first"] = threading.Event()
    monkeypatch.setitem(hooks.gate, "second", later.is_set)
    first = generate_rollout_fully_async(args, 0, source.data)
    assert indices(first.samples) == [1, 2]
    for version in (2, 3):
        with weight_update(source.data, version):
            engine.set_version(str(version))
    later.set()
    until("a batch of the newest policy is complete behind it", lambda: running(source).source.ready >= 2)
    waits = in_background.waits_for_older

    def waits_for_older(*given):
        waiting = waits(*given)
        if waiting:
            held.set()
        return waiting

    monkeypatch.setattr(in_background, "waits_for_older", waits_for_older)
    second = generate_rollout_fully_async(args, 1, source.data)
    assert held.is_set() and indices(second.samples)[0] == 0 and second.metrics["rollout/staleness/max"] == 2


def test_the_end_of_the_interpreter_gives_everything_back(args_of, engine, tmp_path):
    """A script that forgets to close: its data source has every group again before the process ends."""
    script = tmp_path / "forgets.py"
    script.write_text(FORGETS)
    said = subprocess.run(
        [sys.executable, str(script), engine.url],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode == 0 and "Traceback" not in said.stderr, said
    fetched, trained, back = json.loads(said.stdout.splitlines()[-1])
    assert fetched == sorted(trained + back) and len(trained) == 3 and engine.running() == 0


FORGETS = """
import argparse, json, sys
from types import SimpleNamespace
from scene import ListSource, indices
from strawq_workers.rollout import generate_rollout_fully_async
from strawq_workers.slime.arguments import add_rollout_arguments

class Source(ListSource):
    def add_samples(self, samples):
        super().add_samples(samples)
        print(json.dumps([sorted(self.handed_out), indices(out.samples), indices(self.buffer)]), flush=True)

args = add_rollout_arguments(argparse.ArgumentParser()).parse_args(
    ["--rollout-engines", sys.argv[1], "--rollout-batch-size", "3", "--n-samples-per-prompt", "2",
     "--rollout-max-response-len", "200", "--sglang-server-concurrency", "16"]
)
out = generate_rollout_fully_async(args, 0, Source())
"""


def test_work_is_counted_once_over_workers_that_are_ended_and_begun_anew(source_of, engine):
    source, told = source_of("object-store", prompts=12), []
    flags = {"custom_rm_path": f"{HOOKS}.one", "dynamic_sampling_filter_path": f"{HOOKS}.drop_every_third"}
    for rollout_id in range(4):  # the last one finds that the data have ended
        out = generate_rollout_fully_async(source.args(**flags), rollout_id, source.data)
        told.append({name: value for name, value in out.metrics.items() if name.startswith("rollout/")})
        station_of(source.data).stop_running()  # as before a checkpoint
    sums = {name: sum(batch.get(name, 0) for batch in told) for name in told[0]}
    assert sums["rollout/accepted_groups"] == 8 and sums["rollout/dynamic_filter/dropped_groups"] == 4
    answers = sums["rollout/generated_tokens"] - sums["rollout/regenerated_tokens"]
    assert sums["rollout/generated_tokens"] == engine.generated() and answers == 12 * 2 * 16


def test_a_hook_that_always_raises_is_told_a_few_times_and_makes_no_dead_letters(source_of, engine, caplog):
    source = source_of("object-store")
    args = source.args(custom_rm_path=f"{HOOKS}.no_judge", rollout_batch_size=8, sglang_server_concurrency=64)
    with caplog.at_level("INFO"):
        source_is_worked_on = True
        while source_is_worked_on:  # each call tells one of them, until there were too many
            with pytest.raises(BadInput, match="no judge at all"):
                generate_rollout_fully_async(args, 0, source.data)
            source_is_worked_on = running(source) is not None
    close_rollouts(source.data)
    lines = [record for record in caplog.records if "no judge at all" in record.message]
    counted = [record.message for record in lines if "attempts have failed by now" in record.message]
    assert len(lines) > 20 and f"{len(lines)} attempts have failed by now, the last one: task " in counted[-1]
    # On a busy machine it lasts longer than the 10 s after which it is told again.
    assert sum(record.levelname == "WARNING" for record in lines) < 3 + 4
    assert any(", it goes back to the data source: reward hook raised" in record.message for record in lines)
    assert "dead letter" not in caplog.text


@pytest.mark.parametrize("transport", ["object-store", "straw"])
def test_under_drop_a_group_that_got_too_old_while_it_was_ready_starts_anew(source_of, engine, transport):
    source = source_of(transport)
    args = source.args(
        max_staleness=1, staleness_policy="drop",
        rollout_workers=1 if transport == "straw" else 0,
    )  # fmt: skip
    first = generate_rollout_fully_async(args, 0, source.data)

    def ready():
        return running(source).source.ready if transport == "object-store" else source.data.pool.queue().counts().ready

    until("a batch waits", lambda: ready() >= 3)
    with weight_update(source.data, 4):
        engine.set_version("4")
    second = generate_rollout_fully_async(args, 1, source.data)
    assert second.metrics["rollout/staleness/max"] <= 1 and second.metrics["rollout/staleness/late_groups"] == 0
    assert second.metrics["rollout/staleness/dropped_groups"] >= 3
    assert second.metrics["rollout/regenerated_tokens"] >= 3 * 2 * 16
    assert all(set(sample.weight_versions) == {"4"} for group in second.samples for sample in group)
    assert not set(indices(first.samples)) & set(indices(second.samples))


@pytest.mark.parametrize("transport", ["object-store", "straw"])
def test_a_synchronous_rollout_under_drop_takes_nothing_older_of_what_was_left_over(source_of, engine, transport):
    source = source_of(transport)
    args = source.args(over_sampling_batch_size=6, max_staleness=0, staleness_policy="drop")
    first = generate_rollout(args, 0, source.data)
    left = first.metrics["rollout/groups/returned_ready"]
    with weight_update(source.data, 2):
        engine.set_version("2")
    second = generate_rollout(args, 1, source.data)
    assert len(second.samples) == 3 and second.metrics["rollout/staleness/max"] == 0
    assert second.metrics["rollout/staleness/dropped_groups"] >= left
    assert not set(indices(first.samples)) & set(indices(second.samples))


@pytest.mark.parametrize("transport", ["object-store", "straw"])
@pytest.mark.parametrize("policy", ["drop", "oldest_first"])
def test_a_trainer_that_updates_engines_itself_keeps_its_budget_too(source_of, engine, transport, policy):
    """As slime's does: nobody tells the pool, and ages count from what the engines say."""
    source = source_of(transport)
    args = source.args(max_staleness=1, staleness_policy=policy, rollout_workers=1 if transport == "straw" else 0)
    for rollout_id in range(5):
        out = generate_rollout_fully_async(args, rollout_id, source.data)
        oldest = min(int(version) for group in out.samples for sample in group for version in sample.weight_versions)
        assert rollout_id + 1 - oldest <= 1 and out.metrics["rollout/staleness/unknown_count"] == 0
        assert out.metrics["rollout/staleness/max"] == rollout_id + 1 - oldest
        engine.set_version(str(rollout_id + 2))


def test_what_is_handed_in_while_a_batch_is_waited_for_is_no_way_in(source_of, engine, monkeypatch):
    source, scoring, taken = source_of("object-store"), threading.Event(), []
    monkeypatch.setitem(hooks.gate, "ready", scoring.is_set)
    scoring.set()
    args = source.args(max_staleness=1, staleness_policy="drop", custom_rm_path=f"{HOOKS}.when_ready")
    generate_rollout_fully_async(args, 0, source.data)
    scoring.clear()
    engine.set_version("5")
    # The worker has not heard of that version when it hands its groups in.
    monkeypatch.setattr(group, "verdict_on", lambda *_: "take")
    caller = threading.Thread(target=lambda: taken.append(generate_rollout_fully_async(args, 1, source.data)))
    caller.start()
    until("the call has begun", lambda: running(source).source.policy_version == "5")
    scoring.set()
    caller.join(30)
    assert taken[0].metrics["rollout/staleness/max"] <= 1 and taken[0].metrics["rollout/staleness/late_groups"] == 0


@pytest.mark.parametrize("budget", [0, 1])
@pytest.mark.parametrize("policy", ["admit", "oldest_first"])
def test_a_trainer_that_saves_before_it_updates_the_weights_keeps_its_budget(
    source_of, tmp_path, engine, policy, budget
):
    """slime's order. What is begun in between would be of the old weights, so that room comes with the new ones."""
    source = source_of("straw", save=str(tmp_path / "save"), max_staleness=budget, staleness_policy=policy)
    args, counts = source.args(rollout_workers=1), lambda: source.data.pool.queue().counts()
    for rollout_id in range(4):
        out = generate_rollout_fully_async(args, rollout_id, source.data)
        assert out.metrics["rollout/staleness/late_groups"] == 0
        source.data.save(rollout_id)
        until("all that may be begun is complete", lambda: counts().ready >= 3 * budget)
        assert counts().in_batch == 3
        with weight_update(source.data, rollout_id + 2):
            engine.set_version(str(rollout_id + 2))
    pool = source.data.pool.path
    close_rollouts(source.data)
    source.data.close()
    with Pool.open(pool) as left:
        assert left.queue().counts().trained == 12, "what was saved is trained, whoever comes next"
