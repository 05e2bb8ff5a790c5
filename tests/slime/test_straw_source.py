"""`StrawDataSource` by itself: what is handed out, what comes back, and what fails in between."""

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in import Engine, flat, job_args, status

from strawq import Pool, QueueConfig
from strawq.errors import BadInput, Damaged, Fenced, OutcomeUnknown, StorageFailed, TryAgain
from strawq.storage.mounts import mount_of, read_juicefs_settings
from strawq_workers.slime import StrawDataSource, batches, build_data_source, group_of, samples_of
from strawq_workers.slime.sample import Sample

Make = Callable[..., StrawDataSource]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Opens the job's data source; makes the pool first, so that the mount is not probed every time."""
    opened: list[StrawDataSource] = []

    def open_source(**changes: Any) -> StrawDataSource:
        args = job_args(tmp_path, **changes)
        pool = tmp_path / "save" / "rollout_data"
        if not pool.exists():
            Pool.init(pool).close()
        opened.append(StrawDataSource(args))
        return opened[-1]

    yield open_source
    for source in opened:
        source.close()


def counts(source: StrawDataSource) -> Any:
    return source.pool.queue().counts()


def finish(source: StrawDataSource, groups: Any, **engine: Any) -> None:
    """Every sample of the groups gets its answer and reward."""
    for sample in flat(groups):
        Engine(**engine).answer(source.args, sample, 4 - sample.response_length, "completed")
        sample.reward = float(sample.index % 2)


def cut(source: StrawDataSource, groups: Any, tokens: int = 2, **engine: Any) -> None:
    for sample in flat(groups):
        Engine(**engine).answer(source.args, sample, tokens, "aborted")


def deliver(source: StrawDataSource, rollout_id: int, groups: Any) -> None:
    source.accept(rollout_id, list(flat(groups)))


# -- making and refusing ----------------------------------------------------------------------------------------------


def test_the_pool_is_made_on_a_probed_mount_and_found_again(tmp_path: Path) -> None:
    args = job_args(tmp_path, rollout_queue_run_id="run-a")
    first = StrawDataSource(args)
    assert first.pool.path == str((tmp_path / "save" / "rollout_data").resolve())
    assert (first.pool.header.run_id, first.queue_name) == ("run-a", "rollout")
    made = first.pool.header.pool_id
    first.close()
    again = StrawDataSource(args)
    assert again.pool.header.pool_id == made
    again.close()
    with pytest.raises(BadInput, match=r"pool of run 'run-a'.*--rollout-queue-run-id"):
        StrawDataSource(job_args(tmp_path, rollout_queue_run_id="run-b"))
    again = StrawDataSource(args)  # the refusal let go of the locks
    again.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"save": None}, "requires --rollout-data-dir or --save on shared storage"),
        ({"buffer_filter_path": "x.y"}, "--buffer-filter-path is not supported by straw"),
        ({"rollout_queue_lease_seconds": 0}, "--rollout-queue-lease-seconds must be positive"),
        ({"rollout_io_concurrency": -1}, "--rollout-io-concurrency must be positive"),
        ({"rollout_storage_profile": "juicefs"}, "not on a JuiceFS mount"),
        ({"prompt_data": "/nowhere.jsonl"}, "/nowhere.jsonl"),
    ],
)
def test_flags_that_cannot_be_obeyed_are_refused_by_name(make: Make, changes: dict[str, Any], words: str) -> None:
    make().close()
    with pytest.raises(BadInput, match=words):
        make(**changes)
    make().close()


def test_args_get_names_and_no_handles(make: Make) -> None:
    source = make()
    before = vars(job_args(Path(source.args.save).parent))
    added = {name: value for name, value in vars(source.args).items() if before.get(name) != value}
    del added["engine"]
    assert added
    assert all(value is None or type(value) is str for value in added.values())
    source.close()
    assert source.args.custom_rollout_log_function_path is None


def test_the_transport_chooses_the_data_source(make: Make, tmp_path: Path) -> None:
    make().close()
    source = build_data_source(job_args(tmp_path, rollout_data_transport="straw", data_source_path=None))
    assert isinstance(source, StrawDataSource)
    source.close()
    with pytest.raises(BadInput, match="'nixl'"):
        build_data_source(job_args(tmp_path, rollout_data_transport="nixl", data_source_path=None))


def test_another_dataset_is_refused_by_what_differs(make: Make, tmp_path: Path) -> None:
    first = make()
    first.get_samples(1)
    first.close()
    with pytest.raises(BadInput, match=r"Data source checkpoint differs in seed: .*42.* 43"):
        make(rollout_seed=43)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"input": "other", "label": "x"}) + "\n")
    with pytest.raises(BadInput, match="differs in sha256"):
        make()


def test_a_second_job_on_the_same_directory_is_refused(make: Make, tmp_path: Path) -> None:
    first = make()
    with pytest.raises(BadInput, match="Another training job owns save directory"):
        make()
    with pytest.raises(BadInput, match="Another training job owns pool"):
        StrawDataSource(job_args(tmp_path, save=None, rollout_data_dir=first.pool.path))
    first.close()
    make().close()


# -- out --------------------------------------------------------------------------------------------------------------


def test_prompts_are_read_across_epochs_without_a_repeated_id(make: Make) -> None:
    source = make(rollout_shuffle=True)
    state = random.getstate()
    groups = source.get_samples(28)
    assert random.getstate() == state
    assert len(source) == len(source.dataset) == 7
    assert [[sample.index for sample in group] for group in groups] == [[2 * i, 2 * i + 1] for i in range(28)]
    assert [group[0].group_index for group in groups] == list(range(28))
    epochs = [sorted(group[0].prompt for group in groups[at : at + 7]) for at in range(0, 28, 7)]
    assert epochs == [[f"q{i}" for i in range(7)]] * 4
    assert [g[0].prompt for g in groups[:7]] != [g[0].prompt for g in groups[7:14]]


def test_a_failed_submission_moves_no_cursor(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()

    def full(*_: Any, **__: Any) -> Any:
        raise StorageFailed("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(source.pool.payloads, "publish", full)
        with pytest.raises(StorageFailed):
            source.get_samples(2)
    assert source.state_dict()["sample_offset"] == 0
    assert [group[0].prompt for group in source.get_samples(2)] == ["q0", "q1"]


def test_a_lost_reply_submits_leases_and_returns_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()
    commit, lost = source.pool.commit, []

    def lose_once(command: Any, *more: Any, **options: Any) -> Any:
        answer = commit(command, *more, **options)
        kind = type(command).__name__
        if kind not in lost and kind in ("Submit", "Acquire", "Report"):
            lost.append(kind)
            raise OutcomeUnknown(f"the reply to {kind} was lost")
        return answer

    monkeypatch.setattr(source.pool, "commit", lose_once)
    (group,) = source.get_samples(1)
    cut(source, [group])
    tokens = [list(sample.tokens) for sample in group]
    source.add_samples([group])
    assert sorted(lost) == ["Acquire", "Report", "Submit"]
    now = counts(source)
    assert (now.partial_pending, now.fresh_leased, now.partial_leased, now.total) == (1, 0, 0, 8)
    (again,) = source.get_samples(1)
    assert [sample.tokens for sample in again] == tokens


def test_a_reader_tries_again_when_another_takes_what_it_submitted(make: Make) -> None:
    source = make()
    fill = source._feeding.fill
    taken: list[Any] = []

    def filled_and_taken(count: int) -> int:
        found = fill(count)
        if not taken:
            taken.extend(source.pool.queue().acquire(64))
        return found

    source._feeding.fill = filled_and_taken  # type: ignore[method-assign]
    (group,) = source.get_samples(1)
    assert len(taken) == 8
    assert group[0].group_index == 8


def test_the_event_loop_goes_on_while_a_lease_is_slow(make: Make) -> None:
    source = make()
    go_on = threading.Event()
    fill = source._feeding.fill

    async def main() -> tuple[Any, Any]:
        loop, inside = asyncio.get_running_loop(), asyncio.Event()

        def slow(count: int) -> int:
            loop.call_soon_threadsafe(inside.set)
            assert go_on.wait(20)
            return fill(count)

        source._feeding.fill = slow  # type: ignore[method-assign]
        reading = asyncio.ensure_future(source.get_samples_async(1))
        await asyncio.wait_for(inside.wait(), 20)
        assert not reading.done()
        go_on.set()
        kept = await reading
        inside.clear()
        go_on.clear()
        late = asyncio.ensure_future(source.get_samples_async(8))
        await asyncio.wait_for(inside.wait(), 20)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        go_on.set()
        return kept, late

    kept, late = asyncio.run(main())
    assert len(kept) == 1
    assert late.cancelled()
    source._reader.submit(lambda: None).result()
    assert source._sampling.held == 1  # what came after the cancellation went back


def test_order_is_ready_then_partial_by_version_then_fresh(make: Make) -> None:
    source = make()
    groups = source.get_samples(4)
    cut(source, groups[:1], version="5")
    cut(source, groups[1:2], version="4")
    finish(source, groups[2:3])
    deliver(source, 0, groups[2:3])
    source.add_samples([*groups[:2], groups[3]])
    assert source.get_buffer_length() == 2
    source.close()
    again = make()
    order = [group[0].group_index for group in again.get_samples(5)]
    assert order == [2, 1, 0, 3, 4]


def test_admission_that_is_paused_is_waited_for(make: Make) -> None:
    source = make()
    source.fill(1)
    source.pool.pause("weights")
    refused, lease = threading.Event(), source._lease

    def look(count: int) -> Any:
        answer = lease(count)
        if answer.status == "paused":
            refused.set()
        return answer

    source._lease = look  # type: ignore[method-assign]
    found: list[Any] = []
    reading = threading.Thread(target=lambda: found.extend(source.get_samples(1)))
    reading.start()
    assert refused.wait(20)
    assert not found
    source.pool.resume()
    reading.join(20)
    assert len(found) == 1


@pytest.mark.parametrize("complete", [0, 1, 3])
def test_a_bound_that_workers_left_does_not_starve_a_sampler(make: Make, complete: int) -> None:
    source = make()
    worked(source, complete)
    source.pool.configure("rollout", QueueConfig(max_ready=2, max_attempts=7))
    assert [group[0].group_index for group in source.get_samples(4)] == [0, 1, 2, 3]
    config = source.pool.log.refresh(lambda machine: machine.state.branch.queues["rollout"].row.config)
    assert config == QueueConfig(max_attempts=7)


def test_more_than_may_ever_be_leased_at_once_is_refused(make: Make) -> None:
    source = make()
    source.pool.configure("rollout", QueueConfig(max_leased=2))
    with pytest.raises(BadInput, match=r"3 groups are asked for at once.*lets 2 be leased.*--max-leased 3"):
        source.get_samples(3)
    assert counts(source).fresh_leased == 0 and len(source.get_samples(2)) == 2


def test_the_end_of_the_input_gives_a_short_list(make: Make) -> None:
    source = make()
    source.fill(8)
    source.pool.queue().seal()
    groups = source.get_samples(8)
    assert len(groups) == 8
    finish(source, groups)
    deliver(source, 0, groups)
    assert source.get_samples(3) == []


def test_what_cannot_be_asked_for_is_refused(make: Make) -> None:
    source = make()
    with pytest.raises(BadInput, match="num_samples must be nonnegative"):
        source.get_samples(-1)
    assert source.get_samples(0) == []
    source.close()
    source.close()
    with pytest.raises(BadInput, match="Queue reader is closed"):
        source.get_samples(1)


# -- back -------------------------------------------------------------------------------------------------------------


def test_a_returned_prefix_is_there_for_another_reader_with_its_provenance(make: Make) -> None:
    source = make(use_rollout_routing_replay=True, use_score_centering=True)
    (group,) = source.get_samples(1)
    group[0].custom = {"turns": [1, 2], "image": b"png"}
    cut(source, [group], version="3")
    before = [(list(s.tokens), list(s.rollout_log_probs), s.rollout_routed_experts.copy()) for s in group]
    source.add_samples([group])
    source.close()
    again = make(use_rollout_routing_replay=True, use_score_centering=True)
    (group,) = again.get_samples(1)
    assert [(s.tokens, s.rollout_log_probs) for s in group] == [(t, p) for t, p, _ in before]
    for sample, (_, _, routes) in zip(group, before, strict=True):
        assert np.array_equal(np.asarray(sample.rollout_routed_experts), routes)
        assert np.asarray(sample.rollout_topk_token_ids).shape == (2, 3)
    assert group[0].custom == {"turns": [1, 2], "image": b"png"}
    finish(again, [group], version="4")
    deliver(again, 0, [group])
    (stored,) = [again.pool.payloads.load(held) for held in again._batches.collected(0).batch.groups]  # type: ignore[union-attr]
    spans = [(span.start, span.end, span.version, span.last) for span in stored.samples[0].versions]
    assert spans == [(0, 2, "3", ""), (2, 4, "4", "")]


def test_a_complete_group_that_comes_back_unfinished_is_work_again_and_no_batch(make: Make) -> None:
    """Code of the user's own may throw away an answer of a group that was complete, to have it made anew."""
    source = make()
    worked(source, 2)
    (group,) = source.get_samples(1)
    assert counts(source).ready == 2, "one of them is leased"
    sample = group[0]
    sample.tokens, sample.rollout_log_probs = sample.tokens[:-2], sample.rollout_log_probs[:-2]
    sample.response_length, sample.response, sample.reward = 2, sample.response[:2], None
    sample.loss_mask = sample.loss_mask[:2] if sample.loss_mask is not None else None
    sample.status = status(sample, "aborted")
    source.add_samples([group])
    assert (counts(source).ready, counts(source).partial_pending) == (1, 1)
    with pytest.raises(TryAgain):
        source.collect(0, 2, timeout=0)
    (lease,) = source.pool.queue().acquire(1)
    first, second = source.pool.queue().open(lease).group.samples
    assert (first.status, len(first.tokens)) == ("aborted", 2) and (second.status, len(second.tokens)) == (
        "completed",
        4,
    )


def test_a_complete_group_all_of_whose_answers_were_thrown_away_is_work_again(make: Make) -> None:
    source = make()
    worked(source, 1)
    (group,) = source.get_samples(1)
    for sample in group:
        sample.tokens, sample.rollout_log_probs = sample.tokens[:-4], []
        sample.response_length, sample.response, sample.reward, sample.loss_mask = 0, "", None, None
        sample.weight_versions, sample.status = [], status(sample, "pending")
    source.add_samples([group])
    assert (counts(source).ready, counts(source).partial_pending) == (0, 1)
    (lease,) = source.pool.queue().acquire(1)
    assert not any(len(sample.tokens) for sample in source.pool.queue().open(lease).group.samples)


@pytest.mark.parametrize("scored", [True, False])
def test_a_complete_group_that_comes_back_as_it_was_or_better_stays_ready_and_is_counted_once(
    make: Make, scored: bool
) -> None:
    source = make()
    source.fill(1)
    (lease,) = source.pool.queue().acquire(1)
    work = source.pool.queue().open(lease)
    samples = samples_of(work.group)
    finish(source, samples)
    for sample in samples:
        sample.reward = 1.0 if scored else None
    source.pool.queue().complete(work, group_of(work.task, work.group.prompt, samples, work.group))
    for better in (False, True):
        (group,) = source.get_samples(1)
        if better:
            for sample in group:
                sample.reward = 2.0
        source.add_samples([group])
        assert (counts(source).ready, counts(source).partial_pending) == (1, 0)
    queue = source.pool.log.refresh(lambda machine: machine.state.branch.queues["rollout"].row)
    assert queue.accepted == 1
    (batch,) = source.collect(0, 1, timeout=0)
    assert [sample.reward for sample in batch] == [2.0, 2.0]


def test_tokens_of_unknown_policies_are_a_mixed_span(make: Make) -> None:
    source = make()
    (group,) = source.get_samples(1)
    cut(source, [group], version="3")
    cut(source, [group], version="5")
    source.add_samples([group])
    (lease,) = source.pool.queue().acquire(1)
    spans = source.pool.queue().open(lease).group.samples[0].versions
    assert [(span.start, span.end, span.version, span.last) for span in spans] == [(0, 4, "3", "5")]


@pytest.mark.parametrize("capture", ["rollout_routed_experts", "rollout_topk_token_ids"])
@pytest.mark.parametrize("loss", ["missing", "short"])
def test_an_incomplete_capture_goes_back_to_the_last_good_prefix(
    make: Make, capture: str, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(use_rollout_routing_replay=True, use_score_centering=True)
    (group,) = source.get_samples(1)
    cut(source, [group], 1)
    source.add_samples([group])
    (group,) = source.get_samples(1)
    good = [list(sample.tokens) for sample in group]
    cut(source, [group], 2)
    value = getattr(group[1], capture)
    setattr(group[1], capture, None if loss == "missing" else value[:-1])
    if loss == "missing" and capture == "rollout_topk_token_ids":
        group[1].rollout_topk_log_probs = None
    source.add_samples([group])
    assert source._sampling.requeued == 1
    assert "Requeued 1 incomplete continuations" in caplog.text
    (again,) = source.get_samples(1)
    assert [sample.tokens for sample in again] == good
    (task,) = source.pool.log.refresh(lambda machine: list(machine.state.branch.queues["rollout"].tasks.values()))
    assert task.failures == 0


def test_a_failed_sample_costs_an_attempt_and_keeps_nothing_of_it(make: Make) -> None:
    source = make()
    source.pool.configure("rollout", QueueConfig(max_attempts=2))
    for attempt in range(2):
        (group,) = source.get_samples(1)
        assert (group[0].group_index, group[0].status.value) == (0, "pending"), attempt
        cut(source, [group])
        group[0].status = status(group[0], "failed")
        source.add_samples([group])
    assert counts(source).failed == 1


def test_samples_that_are_mixed_up_are_refused_and_nothing_moves(make: Make) -> None:
    source = make()
    first, second = source.get_samples(2)
    with pytest.raises(BadInput, match="preserve one task authorization"):
        source.add_samples([[first[0], second[0]]])
    with pytest.raises(BadInput, match="twice in one call"):
        source.add_samples([first, first])
    assert source._sampling.held == 2
    source.add_samples([first, second])
    cut(source, [first])
    with pytest.raises(BadInput, match="no durable task input"):
        source.add_samples([first])


def test_a_generator_that_makes_new_objects_keeps_its_group(make: Make) -> None:
    source = make()
    (group,) = source.get_samples(1)
    made = [Sample(group_index=s.group_index, index=s.index, prompt=s.prompt, label=s.label) for s in group]
    finish(source, [made])
    deliver(source, 0, [made])
    assert counts(source).in_batch == 1
    assert source._sampling.held == 0


def test_fan_out_is_stored_nested(make: Make) -> None:
    source = make()
    (group,) = source.get_samples(1)
    split = Sample(group_index=group[0].group_index, index=90, prompt=group[0].prompt, label=group[0].label)
    nested = [[group[0], split], [group[1]]]
    cut(source, nested)
    source.add_samples([nested])
    (again,) = source.get_samples(1)
    assert [[sample.index for sample in entry] for entry in again] == [[0, 90], [1]]


def test_prompts_of_ones_own_can_be_added(make: Make) -> None:
    source = make()
    source.add_samples([[Sample(prompt="mine", group_index=1 << 40, index=9) for _ in range(2)]])
    (group,) = source.get_samples(1)
    assert [sample.prompt for sample in group] == ["mine", "mine"]


# -- batches ----------------------------------------------------------------------------------------------------------


def worked(source: StrawDataSource, count: int, version: str = "1") -> None:
    """Complete that many groups, as a worker does."""
    source.fill(count)
    queue = source.pool.queue()
    for lease in queue.acquire(count) if count else ():
        work = queue.open(lease)
        samples = samples_of(work.group)
        finish(source, samples, version=version)
        queue.complete(work, group_of(work.task, work.group.prompt, samples, work.group))


def test_a_rollout_has_one_batch_until_it_is_finished(make: Make) -> None:
    source = make()
    with pytest.raises(TryAgain, match="rollout 0"):
        source.collect(0, 2, timeout=0)
    worked(source, 3)
    source.pool.publish_version("3")
    first = source.collect(0, 2)
    assert [[s.index for s in group] for group in source.collect(0, 2)] == [[s.index for s in g] for g in first]
    assert source.batch_metrics(0)["rollout/staleness/max"] == 2
    with pytest.raises(TryAgain):
        source.collect(1, 2, timeout=0)
    assert len(source.collect(1, 2, timeout=0, fewer=True)) == 1
    source.close()
    again = make()
    assert [[s.index for s in group] for group in again.collect(0, 2)] == [[s.index for s in g] for g in first]
    again.finish(0)
    again.finish(0)
    assert counts(again).trained == 2
    with pytest.raises(BadInput, match="rollout 0 has no batch"):
        again.batch_metrics(0)


def test_rollouts_before_the_last_two_are_finished_without_a_save(make: Make) -> None:
    source = make()
    worked(source, 3)
    for rollout_id in range(3):
        source.collect(rollout_id, 1)
        assert counts(source).trained == max(0, rollout_id - 1)


def test_a_batch_whose_reply_was_lost_is_not_taken_twice(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()
    worked(source, 4)
    commit, lost = source.pool.commit, []

    def lose(command: Any, *more: Any, **options: Any) -> Any:
        answer = commit(command, *more, **options)
        if type(command).__name__ == "TakeBatch" and len(lost) < 5:
            lost.append(command)
            raise OutcomeUnknown("lost")
        return answer

    monkeypatch.setattr(source.pool, "commit", lose)
    monkeypatch.setattr(source.pool.clock, "sleep", lambda _: None)
    with pytest.raises(OutcomeUnknown):
        source.collect(0, 2)
    assert len(source.collect(0, 2)) == 2
    assert (counts(source).in_batch, counts(source).ready) == (2, 2)


def _lose_session(source: StrawDataSource) -> Pool:
    """The process stood still for longer than its lease, and another one has said so."""
    other = Pool.open(source.pool.path)
    other.expire_session(source.pool.keeper.current, "in a test")
    return other


def test_a_rollout_is_finished_though_the_session_that_collected_it_was_lost(make: Make) -> None:
    source = make()
    worked(source, 4)
    source.collect(0, 2)
    _lose_session(source).close()
    source.finish(0)
    assert (counts(source).trained, counts(source).ready, counts(source).in_batch) == (2, 2, 0)


def _lose_session_before(source: StrawDataSource, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, in the moment before the next such command is committed."""
    commit, lost = source.pool.commit, []

    def lose(asked: Any, *more: Any, **options: Any) -> Any:
        if type(asked).__name__ == command and not lost:
            lost.append(asked)
            _lose_session(source).close()
        return commit(asked, *more, **options)

    monkeypatch.setattr(source.pool, "commit", lose)


def test_a_session_that_is_lost_in_the_moment_of_a_finish_costs_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make()
    worked(source, 4)
    source.collect(0, 2)
    _lose_session_before(source, "FinishBatch", monkeypatch)
    source.finish(0)
    assert (counts(source).trained, counts(source).ready, counts(source).in_batch) == (2, 2, 0)


def test_a_session_that_is_lost_while_batches_are_given_back_leaves_none_behind(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make()
    worked(source, 4)
    source.collect(0, 2)
    source.close()
    again = make()
    _lose_session_before(again, "ReturnBatch", monkeypatch)
    assert len(again.get_samples(4)) == 4
    assert counts(again).in_batch == 0


def test_a_batch_whose_reply_and_session_were_lost_is_taken_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()
    worked(source, 4)
    commit, lost = source.pool.commit, []

    def lose(command: Any, *more: Any, **options: Any) -> Any:
        answer = commit(command, *more, **options)
        if type(command).__name__ == "TakeBatch" and not lost:
            lost.append(command)
            _lose_session(source).close()
            raise OutcomeUnknown("lost")
        return answer

    monkeypatch.setattr(source.pool, "commit", lose)
    assert len(source.collect(0, 2, timeout=5)) == 2
    assert (counts(source).in_batch, counts(source).ready) == (2, 2)


def test_a_batch_that_ends_while_it_is_to_be_finished_is_not_replaced_by_another(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make()
    worked(source, 4)
    source.collect(0, 2)
    other = _lose_session(source)
    looked, look = [], source._batches._open

    def look_and_be_late(rollout_id: int) -> Any:
        found = look(rollout_id)
        if not looked:
            looked.append(found)
            other.queue().finish_batch(other.queue().take_batch(2, consumer="rollout-0").batch)
        return found

    monkeypatch.setattr(source._batches, "_open", look_and_be_late)
    source.finish(0)
    other.close()
    assert (counts(source).trained, counts(source).ready, counts(source).in_batch) == (2, 2, 0)


def test_a_batch_that_another_live_process_has_is_named_in_place_of_being_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make()
    worked(source, 4)
    with Pool.open(source.pool.path, lease_seconds=0.5) as other:
        batch = other.queue().take_batch(2, consumer="rollout-0").batch
        assert batch is not None
        with pytest.raises(TryAgain, match=f"batch {batch.id} is open in session {other.keeper.current}"):
            source.finish(0)
        # One that ends while it is waited for is no fault, and nothing is taken in its place.
        slept = []

        def sleep(_seconds: float) -> None:
            if not slept:
                slept.append(other.queue().finish_batch(batch))

        monkeypatch.setattr(batches.time, "sleep", sleep)
        source.finish(0)
    assert slept and (counts(source).trained, counts(source).ready, counts(source).in_batch) == (2, 2, 0)


def test_a_delivery_takes_its_own_groups_though_others_are_ready(make: Make) -> None:
    source = make()
    mine = source.get_samples(2)
    worked(source, 3, version="0")  # older: first in the order of work
    finish(source, mine)
    deliver(source, 5, mine)
    batch = source._batches.collected(5)
    assert batch is not None
    assert sorted(group.prompt.group_id for group in batch) == ["0", "1"]
    assert (counts(source).in_batch, counts(source).ready) == (2, 3)


@pytest.mark.parametrize("kind", ["TakeBatch", "Report"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_delivery_that_failed_is_told_again_and_has_the_same_batch(
    make: Make, monkeypatch: pytest.MonkeyPatch, kind: str, lost: bool
) -> None:
    """The mount fails before or after the commit, once the groups are to be handed in or taken."""
    source = make()
    mine = source.get_samples(3)
    worked(source, 2, version="0")
    finish(source, mine[:2])
    source._sampling.saw_verdict(mine[2], False, "easy")
    commit, failed = source.pool.commit, []

    def fail(command: Any, *more: Any, **options: Any) -> Any:
        if type(command).__name__ != kind or len(failed) >= (5 if lost else 1):
            return commit(command, *more, **options)
        failed.append(command)
        if not lost:
            raise StorageFailed("the mount is gone")
        commit(command, *more, **options)
        raise OutcomeUnknown("the reply is lost")

    monkeypatch.setattr(source.pool, "commit", fail)
    monkeypatch.setattr(source.pool.clock, "sleep", lambda _: None)
    with pytest.raises((StorageFailed, OutcomeUnknown)):
        deliver(source, 4, mine[:2])
    assert failed and source._sampling.held == 3
    deliver(source, 4, mine[:2])
    batch = source._batches.collected(4)
    assert batch is not None and sorted(group.prompt.group_id for group in batch) == ["0", "1"]
    assert source.get_samples(0) == [] and source._sampling.held == 0
    now = counts(source)
    assert (now.in_batch, now.ready, now.dropped, now.fresh_leased + now.partial_leased) == (2, 2, 1, 0)
    source.finish(4)
    assert counts(source).trained == 2


def test_a_filters_word_does_not_wait_for_a_commit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()
    back, dropped = source.get_samples(2)
    commit, committing, go_on = source.pool.commit, threading.Event(), threading.Event()

    def slow(command: Any, *more: Any, **options: Any) -> Any:
        committing.set()
        assert go_on.wait(30)
        return commit(command, *more, **options)

    monkeypatch.setattr(source.pool, "commit", slow)
    giving_back = threading.Thread(target=source.add_samples, args=([back],))
    giving_back.start()
    try:
        assert committing.wait(30)
        telling = threading.Thread(target=source._sampling.saw_verdict, args=(dropped, False, "easy"), daemon=True)
        telling.start()
        telling.join(10)
        assert not telling.is_alive(), "the event loop stands still during a commit"
    finally:
        go_on.set()
        giving_back.join(30)
    source._sampling.give_up()
    assert counts(source).dropped == 1


@pytest.mark.parametrize("new_objects", [False, True])
def test_a_delivery_of_a_group_that_was_taken_back_stops_the_rollout(make: Make, new_objects: bool) -> None:
    source = make()
    first, late = source.get_samples(2)
    finish(source, [first])
    deliver(source, 0, [first])
    assert source.get_samples(0) == []  # a synchronous sampler is in its next rollout: what it left goes back
    assert source._sampling.held == 0
    if new_objects:
        late = [Sample(group_index=s.group_index, index=s.index, prompt=s.prompt, label=s.label) for s in late]
    finish(source, [late])
    with pytest.raises(Fenced, match="fully_async"):
        deliver(source, 1, [late])
    (again,) = source.get_samples(1)
    assert again[0].group_index == late[0].group_index
    with pytest.raises(Fenced, match="fully_async") if not new_objects else contextlib.nullcontext():
        deliver(source, 1, [late])
    assert (counts(source).in_batch, counts(source).total) == (2 if new_objects else 1, 8)


def test_a_delivery_of_groups_that_went_to_somebody_else_stops_the_rollout(make: Make) -> None:
    source = make()
    groups = source.get_samples(2)
    finish(source, groups)
    with Pool.open(source.pool.path) as other:
        other.expire_session(source.pool.keeper.current)
        (lease,) = other.queue().acquire(1)
        with pytest.raises(Fenced, match=r"2 groups of rollout 0 .*do not train on this rollout"):
            deliver(source, 0, groups)
        other.queue().yield_(other.queue().open(lease))
    assert counts(source).in_batch == 0
    assert len(source.get_samples(2)) == 2  # with a session of its own again


def test_a_group_that_cannot_be_read_is_failed_and_the_others_come(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()
    load = source.pool.payloads.load

    def damaged(held: Any, *more: Any) -> Any:
        if held.task.id == "1-1":
            raise Damaged("object abc is not what its name says")
        return load(held, *more)

    with monkeypatch.context() as patch:
        patch.setattr(source.pool.payloads, "load", damaged)
        groups = source.get_samples(3)
    assert sorted(group[0].group_index for group in groups) == [0, 2, 3]
    (task,) = [task for task in source.pool.log.refresh(_tasks) if task.failures]
    assert (task.id, task.reason) == ("1-1", "object abc is not what its name says")


def _tasks(machine: Any) -> list[Any]:
    return list(machine.state.branch.queues["rollout"].tasks.values())


# -- notes ------------------------------------------------------------------------------------------------------------


def test_metadata_are_durable_and_merge(make: Make) -> None:
    source = make()
    assert source.get_metadata() == {}
    source.update_metadata({"stage": 1})
    source.update_metadata({"seen": ["a"]})
    state = source.state_dict()
    with pytest.raises(BadInput, match="JSON"):
        source.update_metadata({"x": object()})
    source.close()
    again = make()
    assert again.get_metadata() == {"stage": 1, "seen": ["a"]}
    again.update_metadata({"stage": 2, "more": True})
    again.load_state_dict(state)
    assert again.get_metadata() == {"stage": 1, "seen": ["a"]}
    with pytest.raises(BadInput, match="migration"):
        again.load_state_dict({"buffer": []})
    with pytest.raises(BadInput, match="pool"):
        again.load_state_dict({**state, "pool_id": "x"})


def test_closing_gives_back_leases_and_batches(make: Make) -> None:
    source = make(partial_rollout=True)
    groups = source.get_samples(2)
    cut(source, groups[:1])
    worked(source, 1)
    source.collect(0, 1)
    pool = source.pool.path
    source.close()
    with Pool.open(pool) as opened:
        now = opened.queue().counts()
        assert (now.partial_pending, now.fresh_leased, now.partial_leased, now.in_batch) == (1, 0, 0, 1)
        assert opened.inspect().sessions == []


@pytest.mark.juicefs
def test_a_job_on_a_shared_mount_and_a_second_one_through_another_client(juicefs_pair: tuple[Path, Path]) -> None:
    here, there = juicefs_pair
    settings = read_juicefs_settings(mount_of(str(here)).mount_point)
    assert settings is not None
    declared = {
        "direct_mount": True, "writeback": False, "open_cache": 0, "readdir_cache": False,
        "client_version": settings.version, "durability_description": "a test volume",
    }  # fmt: skip
    (here / "declaration.json").write_text(json.dumps(declared))
    flags = {
        "rollout_storage_profile": "juicefs",
        "rollout_storage_declaration": str(here / "declaration.json"),
        "rollout_queue_online_gc": True,
        "partial_rollout": True,
    }
    first = StrawDataSource(job_args(here, **flags))
    assert first.pool.header.storage_profile == "juicefs"
    assert (first.pool.header.declaration or {})["durability_description"] == "a test volume"
    first.load(-1)
    groups = first.get_samples(2)
    cut(first, groups[:1])
    finish(first, groups[1:])
    deliver(first, 0, groups[1:])
    with pytest.raises(BadInput, match="Another training job owns save directory"):
        StrawDataSource(job_args(there, **flags))
    first.save(0)
    first.close()
    second = StrawDataSource(job_args(there, **flags))
    assert second.load(0).mode == "same queue"
    (partial,) = second.get_samples(1)
    assert [sample.response_length for sample in partial] == [2, 2]
    second.close()
    (here / "declaration.json").write_text(json.dumps({**declared, "writeback": True}))
    with pytest.raises(BadInput, match="writeback is declared as true"):
        StrawDataSource(job_args(here, **flags))
