import threading

import pytest
import rollout_hooks as hooks
from scene import SLOW, EngineThread, indices, once, text_of, tokens_of, until

from strawq import Pool
from strawq.errors import BadInput, BranchMoved, EngineUnavailable, StrawqError
from strawq.model import QueueConfig
from strawq_workers.rollout import RolloutFailed, close_rollouts, generate_rollout, generate_rollout_fully_async
from strawq_workers.rollout.station import station_of

HOOKS = "rollout_hooks"
BOTH = pytest.mark.parametrize("transport", ["object-store", "straw"])


def balanced(source):
    """The account of the newest rollout, which must add up."""
    account = station_of(source.data).account
    assert account.fetched == account.kept + account.dropped + account.returned
    return account


@BOTH
def test_three_rollouts_train_each_prompt_once_and_leave_nothing_running(source_of, engine, transport):
    source, trained = source_of(transport), []
    for rollout_id in range(3):
        out = generate_rollout(source.args(), rollout_id, source.data)
        assert len(out.samples) == 3 and engine.running() == 0 and source.leased() == 0
        assert balanced(source).kept == 3 and out.metrics["rollout/groups/kept"] == 3
        trained += indices(out.samples)
        for group in out.samples:
            assert [s.response_length for s in group] == [16, 16] and all(s.status.value == "truncated" for s in group)
            assert all(text_of(s.tokens[:-16]) == s.prompt and len(s.rollout_log_probs) == 16 for s in group)
        source.finish(rollout_id)
    assert trained == list(range(9)) and source.waiting() == []


def test_a_rollout_that_is_asked_for_again_gets_the_same_batch(source_of, engine):
    source = source_of("straw")
    first = generate_rollout(source.args(), 0, source.data)
    made = engine.generated()
    again = generate_rollout(source.args(), 0, source.data)
    assert indices(again.samples) == indices(first.samples) and tokens_of(again.samples) == tokens_of(first.samples)
    assert engine.generated() == made


def over(source, engine, **changes):
    """Flags under which six groups are started and three are needed; those three are scored once the others have
    tokens, and the engine runs them first. From then on it all but stands still: the others do not end by themselves,
    however busy the machine is."""
    others_have_tokens = engine.generated() + 6 * 100 + 6 * 4
    engine.pace_after(others_have_tokens, 0.01)
    hooks.gate["second"] = once(lambda: engine.running() == 6)
    hooks.gate["ready"] = lambda: engine.generated() > others_have_tokens
    return source.args(
        over_sampling_batch_size=6,
        rollout_max_response_len=100,
        custom_rm_path=f"{HOOKS}.when_ready",
        rollout_tokenize_path=f"{HOOKS}.first_three_first",
        **changes,
    )


@BOTH
@pytest.mark.parametrize("engine", [SLOW], indirect=True)
def test_with_partial_rollout_prefixes_are_kept_and_used_first_by_the_next_rollout(source_of, engine, transport):
    source = source_of(transport)
    out = generate_rollout(over(source, engine, partial_rollout=True), 0, source.data)
    assert indices(out.samples) == [0, 1, 2] and engine.running() == 0 and source.leased() == 0
    assert balanced(source).returned_partial == 3
    saved = source.waiting()
    assert [number for number, _ in saved] == [3, 4, 5] and all(tokens for _, tokens in saved)
    source.finish(0)
    hooks.gate["ready"] = lambda: True
    engine.pace(None)
    out = generate_rollout(source.args(partial_rollout=True, rollout_max_response_len=100), 1, source.data)
    assert indices(out.samples) == [3, 4, 5]
    for (_, prefixes), now in zip(saved, tokens_of(out.samples), strict=True):
        assert all(tokens[: len(prefix)] == prefix for prefix, tokens in zip(prefixes, now, strict=True))
    assert out.metrics["worker/tokens_resumed"] == sum(len(p) for _, prefixes in saved for p in prefixes) > 0


@BOTH
@pytest.mark.parametrize("engine", [SLOW], indirect=True)
def test_without_partial_rollout_unfinished_groups_go_back_as_they_came(source_of, engine, transport):
    source = source_of(transport)
    out = generate_rollout(over(source, engine), 0, source.data)
    assert indices(out.samples) == [0, 1, 2] and engine.running() == 0 and source.leased() == 0
    assert balanced(source).returned_fresh == 3
    assert source.waiting() == [(number, [[], []]) for number in (3, 4, 5)]
    source.finish(0)
    hooks.gate["ready"] = lambda: True
    engine.pace(None)
    out = generate_rollout(source.args(rollout_max_response_len=100), 1, source.data)
    assert indices(out.samples) == [3, 4, 5] and out.metrics["worker/tokens_resumed"] == 0
    assert all(len(set(sample.weight_versions)) == 1 for group in out.samples for sample in group)


@BOTH
def test_surplus_that_is_complete_is_the_next_batch_without_a_request(source_of, engine, transport):
    source = source_of(transport)
    args = source.args(over_sampling_batch_size=6, custom_rm_path=f"{HOOKS}.when_ready")
    hooks.gate["ready"] = lambda: engine.generated() == 6 * 2 * 16
    first = generate_rollout(args, 0, source.data)
    assert balanced(source).fetched == 6 and engine.running() == 0
    source.finish(0)
    second = generate_rollout(source.args(custom_rm_path=f"{HOOKS}.one"), 1, source.data)
    assert sorted(indices(first.samples) + indices(second.samples)) == list(range(6))
    assert engine.generated() == 6 * 2 * 16


@BOTH
def test_what_the_filter_drops_is_replaced_and_counted(source_of, engine, transport):
    source = source_of(transport)
    args = source.args(dynamic_sampling_filter_path=f"{HOOKS}.drop_every_third")
    out = generate_rollout(args, 0, source.data)
    assert indices(out.samples) == [0, 1, 3] and balanced(source).dropped == 1
    assert out.metrics["rollout/dynamic_filter/drop_third"] == 1


@BOTH
def test_a_hook_that_always_raises_fails_the_rollout_with_its_reason_and_loses_nothing(
    source_of, engine, transport, monkeypatch
):
    source = source_of(transport)
    hooks.bad = {1}
    hooks.scored.clear()
    # The others are complete by then, so that none is generated anew, and the order is that of their start.
    monkeypatch.setitem(hooks.gate, "bad", lambda: sorted(hooks.scored) == [0, 0, 2, 2])
    args = source.args(custom_rm_path=f"{HOOKS}.raises_for_bad")
    with pytest.raises(RolloutFailed, match="no score for prompt 1"):
        generate_rollout(args, 0, source.data)
    assert engine.running() == 0 and source.leased() == 0
    balanced(source)
    hooks.bad = set()
    source.revive()
    out = generate_rollout(args, 0, source.data)
    assert indices(out.samples) == [0, 1, 2] and engine.generated() == 3 * 2 * 16


@BOTH
def test_a_batch_hook_that_raises_gives_the_batch_back(source_of, engine, transport):
    source = source_of(transport)
    with pytest.raises(StrawqError, match="no filter"):
        generate_rollout(source.args(rollout_sample_filter_path=f"{HOOKS}.filter_raises"), 0, source.data)
    assert engine.running() == 0 and source.leased() == 0
    out = generate_rollout(source.args(rollout_sample_filter_path=f"{HOOKS}.pops_the_first"), 0, source.data)
    assert indices(out.samples) == [1, 2] and engine.generated() == 3 * 2 * 16


@BOTH
def test_an_interrupted_rollout_gives_everything_back_before_it_ends(source_of, engine, transport, monkeypatch):
    source = source_of(transport)
    hooks.reached.clear()
    hooks.release.clear()
    args = source.args(partial_rollout=True, custom_rm_path=f"{HOOKS}.blocks")
    failures = []

    def run():
        try:
            generate_rollout(args, 0, source.data)
        except BaseException as error:  # noqa: BLE001 (KeyboardInterrupt is what is expected)
            failures.append(error)

    station_of(source.data)  # what it waits for when it is made is not the rollout
    interrupt_waiting(monkeypatch)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    hooks.release.set()
    assert [type(error) for error in failures] == [KeyboardInterrupt]
    assert engine.running() == 0 and source.leased() == 0
    # In which order: prefixes come before what was not begun, and which of them had begun is the machine's business.
    assert balanced(source).kept == 0 and {0, 1, 2} <= {number for number, _ in source.waiting()}
    out = generate_rollout(source.args(partial_rollout=True, custom_rm_path=f"{HOOKS}.one"), 0, source.data)
    assert sorted(indices(out.samples)) == [0, 1, 2]


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
@pytest.mark.parametrize("partial", [True, False])
def test_a_rollback_in_the_middle_ends_the_rollout(source_of, engine, partial):
    """The trainer's model is of the branch that is left. Its worker takes nothing of the new one and does not wait."""
    source, failures = source_of("straw"), []
    source.data.pool.checkpoint("start")

    def run():
        try:
            generate_rollout(source.args(partial_rollout=partial, rollout_max_response_len=200), 0, source.data)
        except StrawqError as error:
            failures.append(error)

    engine.pace(10.0)  # none is over before the rollback
    thread = threading.Thread(target=run)
    thread.start()
    until("a request runs", lambda: engine.running() > 0)
    with Pool.open(source.data.pool.path) as operator:
        operator.rollback("start")
    thread.join(30)
    assert [type(error) for error in failures] == [BranchMoved] and "--load" in str(failures[0])
    assert engine.running() == 0 and source.leased() == 0
    assert balanced(source).kept == 0


def interrupt_waiting(monkeypatch):
    """Ctrl-C reaches whoever waits for the rollout, once a hook is at work."""
    from concurrent.futures import Future

    wait, done = Future.result, []

    def result(self, timeout=None):
        if not self.done() and not done:
            done.append(True)
            assert hooks.reached.wait(30)
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(Future, "result", result)


def test_a_rollout_is_short_when_the_data_have_ended(source_of, engine):
    source = source_of("object-store", prompts=2)
    out = generate_rollout(source.args(), 0, source.data)
    assert indices(out.samples) == [0, 1] and engine.running() == 0


def test_the_data_source_is_never_called_by_the_event_loop_or_two_threads_at_once(source_of, engine):
    source = source_of("object-store")
    generate_rollout(source.args(), 0, source.data)
    assert len(source.data.threads) == 1 and "strawq-data" in next(iter(source.data.threads))


@pytest.mark.parametrize("function", [generate_rollout, generate_rollout_fully_async])
def test_a_queue_that_holds_back_before_a_batch_is_complete_is_an_error(source_of, engine, function):
    source = source_of("straw")
    source.data.pool.configure("rollout", QueueConfig(max_ready=2))
    with pytest.raises(BadInput, match="holds back"):
        function(source.args(), 0, source.data)
    assert engine.running() == 0 and source.leased() == 0


@BOTH
def test_a_generate_function_makes_the_samples_of_every_transport(source_of, engine, transport):
    source = source_of(transport)
    args = source.args(partial_rollout=True, custom_generate_function_path=f"{HOOKS}.one_tool")
    out = generate_rollout(args, 0, source.data)
    assert indices(out.samples) == [0, 1, 2]
    for sample in (sample for group in out.samples for sample in group):
        assert sample.response_length == 10 and sample.loss_mask == [1] * 4 + [0] * 2 + [1] * 4
        assert sample.tokens[-6:-4] == [7, 8] and sample.metadata["evaluated"] is False
        assert text_of(sample.tokens[:-10]) == sample.prompt and sample.status.value == "completed"


def test_a_data_source_that_raises_loses_nothing_of_what_it_gave(source_of, engine):
    source = source_of("object-store")
    give, calls = source.data.get_samples, []

    def get_samples(count):
        calls.append(count)
        if len(calls) == 2:
            raise RuntimeError("the disk is gone")
        return give(2)

    source.data.get_samples = get_samples
    with pytest.raises(RuntimeError, match="the disk is gone"):
        generate_rollout(source.args(), 0, source.data)
    assert engine.running() == 0 and balanced(source).fetched == 2
    source.data.get_samples = give
    assert indices(generate_rollout(source.args(), 0, source.data).samples) == [0, 1, 2]


@BOTH
@pytest.mark.parametrize("engine", [SLOW], indirect=True)
def test_an_engine_that_dies_in_the_middle_costs_no_group(source_of, engine, transport):
    """Prefixes are kept, and a rollout on another engine goes on from them."""
    source = source_of(transport)
    args = source.args(partial_rollout=True, rollout_max_response_len=100, rollout_save_tokens=4)

    def dies():
        until("every answer has come some way", lambda: engine.generated() > 6 * 20)
        engine.close()

    engine.pace_after(6 * 20, 1.0)  # none is over before it dies
    killer = threading.Thread(target=dies)
    killer.start()
    with pytest.raises(EngineUnavailable):
        generate_rollout(args, 0, source.data)
    killer.join()
    saved = source.waiting()
    assert source.leased() == 0 and [number for number, _ in saved] == [0, 1, 2]
    assert all(prefix for _, prefixes in saved for prefix in prefixes)
    other = EngineThread()
    try:
        out = generate_rollout(source.args(**{**vars(args), "rollout_engines": [other.url]}), 0, source.data)
    finally:
        close_rollouts()
        other.close()
    assert indices(out.samples) == [0, 1, 2]
    for (_, prefixes), now in zip(saved, tokens_of(out.samples), strict=True):
        assert all(tokens[: len(prefix)] == prefix for prefix, tokens in zip(prefixes, now, strict=True))


def test_groups_that_come_back_complete_were_accepted_before(source_of, engine):
    source = source_of("object-store")
    args = source.args(custom_rm_path=f"{HOOKS}.one")
    for reward, accepted in ((1.0, 0), (None, 3)):  # without a reward they are scored, and accepted, now
        groups = generate_rollout(args, 0, source.data).samples
        for sample in [sample for group in groups for sample in group]:
            sample.reward = reward
        source.data.add_samples(groups)
        out = generate_rollout(args, 1, source.data)
        assert indices(out.samples) == indices(groups) and tokens_of(out.samples) == tokens_of(groups)
        assert out.metrics["rollout/accepted_groups"] == out.metrics["worker/groups_accepted"] == accepted
        assert out.metrics["rollout/generated_tokens"] == 0
