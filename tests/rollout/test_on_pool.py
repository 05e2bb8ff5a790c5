import os
import signal

import pytest
from scene import SLOW, indices, tokens_of, until

from strawq import Pool
from strawq.errors import BadInput, StorageFailed
from strawq_workers.rollout import close_rollouts, generate_rollout_fully_async, local_workers, weight_update
from strawq_workers.rollout.on_pool import COLLECT_S, OnPool, WorkersLost, live_workers
from strawq_workers.rollout.station import RolloutFailed, station_of


def workers(source):
    return station_of(source.data).running.workers


def test_three_rollouts_by_two_processes_train_each_prompt_once(source_of, engine):
    source, trained = source_of("straw"), []
    args = source.args(rollout_workers=2)
    for rollout_id in range(3):
        out = generate_rollout_fully_async(args, rollout_id, source.data)
        assert len(out.samples) == 3 and out.metrics["rollout/workers/live"] == 2
        trained += indices(out.samples)
        source.finish(rollout_id)
    assert len(set(trained)) == 9
    close_rollouts(source.data)
    assert engine.running() == 0 and source.leased() == 0 and live_workers(source.data.pool) == []
    counts = source.data.pool.queue().counts()
    assert counts.trained == 9 and counts.total == counts.trained + counts.ready + counts.fresh_pending + (
        counts.partial_pending
    )


def test_what_is_ready_and_in_hand_stays_within_its_bound(source_of, engine):
    source = source_of("straw")
    args = source.args(rollout_workers=1, sglang_server_concurrency=8)
    generate_rollout_fully_async(args, 0, source.data)
    bound = 2 * 3 + 4  # two batches ahead, and four groups of two in hand

    def still():
        counts = source.data.pool.queue().counts()
        assert counts.ready + counts.fresh_leased + counts.partial_leased <= bound
        return counts.ready == bound

    until("as much as may wait is ready", still)
    made = engine.generated()
    out = generate_rollout_fully_async(args, 1, source.data)
    assert len(out.samples) == 3 and engine.generated() - made <= 3 * 32


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
def test_a_worker_that_is_killed_is_started_again_and_what_it_had_handed_in_is_trained(source_of, engine):
    source = source_of("straw")
    args = source.args(rollout_workers=1, rollout_max_response_len=60, rollout_batch_size=2, partial_rollout=True)
    first = generate_rollout_fully_async(args, 0, source.data)
    (pid,) = workers(source).pids
    engine.pace(1.0)
    until("the first were replaced", lambda: source.leased() >= 2)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    engine.pace(None)
    more = source.data.pool.queue().counts().ready + 2
    second = generate_rollout_fully_async(source.args(**{**vars(args), "rollout_batch_size": more}), 1, source.data)
    assert second.metrics["rollout/workers/restarts"] == 1
    assert not set(indices(first.samples)) & set(indices(second.samples))


def test_prompts_that_are_judged_between_two_looks_are_no_end_of_the_data(source_of, engine, monkeypatch, caplog):
    """A filter may drop all that was pending while the trainer looks: more prompts come, the data have not ended."""
    source, calls = source_of("straw"), []
    fill, queue = source.data.fill, source.data.pool.queue()

    def judged_meanwhile(count):
        calls.append(fill(count))
        if len(calls) == 2:
            assert calls[1] == 0, "enough was pending"
            for lease in queue.acquire(1000):
                queue.drop(queue.open(lease), "all the same")
        return calls[-1]

    monkeypatch.setattr(source.data, "fill", judged_meanwhile)
    with pytest.raises(WorkersLost):
        generate_rollout_fully_async(source.args(rollout_worker_wait_seconds=4 * COLLECT_S), 0, source.data)
    assert len(calls) > 2 and calls[2] > 0 and "data have ended" not in caplog.text


def test_workers_that_are_all_gone_are_one_error_that_says_what_to_do(source_of, engine, monkeypatch, tmp_path):
    monkeypatch.setattr(local_workers, "DEATHS_MAX", 2)
    source = source_of("straw")
    with pytest.raises(WorkersLost, match=r"no worker has been alive for .*strawq work .* --engine URL") as lost:
        generate_rollout_fully_async(source.args(rollout_worker_wait_seconds=0.1), 0, source.data)
    assert lost.value.exit_code == 4
    close_rollouts(source.data)
    # Those that are started here and die at once are given up, with the end of their log.
    (tmp_path / "ends_its_process.py").write_text("import os\nos.write(2, b'out of luck')\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    args = source.args(rollout_workers=1, custom_rm_path="ends_its_process.reward")
    with pytest.raises(WorkersLost, match=r"died 2 times in a row.*exit code 3: out of luck"):
        generate_rollout_fully_async(args, 0, source.data)
    close_rollouts(source.data)
    # What they would say again and again is said once.
    args = source.args(rollout_workers=1, custom_rm_path="no_such_module.reward")
    with pytest.raises(RolloutFailed, match=r"worker 0 has ended: reward hook 'no_such_module.reward': cannot import"):
        generate_rollout_fully_async(args, 0, source.data)
    assert source.leased() == 0


def test_evaluation_and_the_hook_on_all_samples_are_refused(source_of, engine):
    source = source_of("straw")
    with pytest.raises(BadInput, match="distributed fully-async rollout doesn't support evaluation mode"):
        generate_rollout_fully_async(source.args(), 0, source.data, evaluation=True)
    with pytest.raises(BadInput, match="rollout-all-samples-process-path"):
        generate_rollout_fully_async(
            source.args(rollout_all_samples_process_path="rollout_hooks.all_samples"), 0, source.data
        )


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
def test_weights_change_while_every_process_stands_still(source_of, engine):
    source = source_of("straw")
    args = source.args(rollout_workers=1, rollout_max_response_len=60, partial_rollout=True)
    generate_rollout_fully_async(args, 0, source.data)
    with weight_update(source.data, 2):
        assert engine.running() == 0 and source.data.pool.inspect().paused is not None
        engine.set_version("2")
        made = engine.generated()
    assert source.data.pool.policy_version() == "2"
    out = generate_rollout_fully_async(args, 1, source.data)
    assert all(tokens_of(out.samples))
    until("new tokens", lambda: engine.generated() > made)
    source.finish(0)


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
def test_a_slow_worker_holds_nobody_up(source_of, engine):
    """A process that stands still keeps its groups; the batch is of those that the other one makes."""
    source = source_of("straw")
    args = source.args(rollout_workers=2, rollout_batch_size=2)
    generate_rollout_fully_async(args, 0, source.data)
    frozen = workers(source).pids[0]
    os.kill(frozen, signal.SIGSTOP)
    try:
        for rollout_id in (1, 2, 3):
            source.finish(rollout_id - 1)
            assert len(generate_rollout_fully_async(args, rollout_id, source.data).samples) == 2
    finally:
        os.kill(frozen, signal.SIGCONT)


def test_a_pause_of_a_trainer_that_died_is_ended_by_the_next_one_and_an_operators_is_not(source_of, engine):
    source = source_of("straw")
    with Pool.open(source.data.pool.path, role="trainer") as trainer:
        trainer.keeper.require()
        trainer.pause("weights 1")
    with weight_update(source.data, 2):
        pass
    assert source.data.pool.inspect().paused is None and source.data.pool.policy_version() == "2"
    with Pool.open(source.data.pool.path, role="cli") as operator:
        operator.pause("by hand")
    with weight_update(source.data, 3):
        pass
    assert source.data.pool.inspect().paused is not None and source.data.pool.policy_version() == "3"
    station_of(source.data).running = OnPool(source.args(), station_of(source.data), source.data)
    with weight_update(source.data, 4):
        pass
    assert source.data.pool.inspect().paused is not None and source.data.pool.policy_version() == "4"
    source.data.pool.resume()
    with weight_update(source.data, 5):
        assert source.data.pool.inspect().paused is not None
    assert source.data.pool.inspect().paused is None and source.data.pool.policy_version() == "5"


def test_a_pause_that_fails_when_it_is_there_already_is_ended(source_of, engine, monkeypatch):
    source = source_of("straw")
    pool = source.data.pool
    station_of(source.data).running = OnPool(source.args(), station_of(source.data), source.data)
    pause = pool.pause

    def pause_and_fail(*given, **options):
        pause(*given, **options)
        raise StorageFailed("the mount is gone")

    monkeypatch.setattr(pool, "pause", pause_and_fail)
    with pytest.raises(StorageFailed, match="the mount is gone"), weight_update(source.data, 2):
        raise AssertionError("generation did not stand still")
    assert pool.inspect().paused is None and pool.policy_version() != "2"
