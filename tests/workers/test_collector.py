import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from strawq import Pool, Prompt, QueueConfig, Sample, VersionSpan
from strawq.archives import load_archive, open_archive, save_batch, write_archive
from strawq.core.commands import Expire
from strawq.errors import BadInput, Damaged, Fenced, Gone, OutcomeUnknown, StorageFailed, TryAgain
from strawq.export import group_values
from strawq.samples import Group
from strawq_workers.collected_lines import collect_to_jsonl
from strawq_workers.collector import Collector, open_shared


def test_a_collected_batch_is_archived_as_it_is(pool, tmp_path):
    fill(pool, ["1", "2"])
    batch = Collector(pool).next_batch(2, timeout=5)
    save_batch(pool, "hard-ones", batch)
    save_batch(pool, "the-same", batch.batch)
    tasks = [group.task_id for group in batch]
    assert [[group.task_id for group in load_archive(pool, name)] for name in ("hard-ones", "the-same")] == [tasks] * 2
    write_archive(pool, "hard-ones", str(tmp_path / "hard-ones"))
    with open_archive(str(tmp_path / "hard-ones")) as groups:
        assert [group.task_id for group in groups] == tasks


@pytest.fixture
def pool(tmp_path):
    with Pool.init(tmp_path / "pool") as opened:
        yield opened


def fill(pool, versions, start=0):
    """One ready group for each version, of two samples of three tokens."""
    queue = pool.queue()
    queue.submit([Prompt(group_id=f"g{start + at}", tokens=[1, 2]) for at in range(len(versions))])
    for version, lease in zip(versions, queue.acquire(len(versions)), strict=True):
        work = queue.open(lease)
        samples = tuple(
            Sample(
                i, np.arange(3), np.full(3, -0.5), versions=(VersionSpan(0, 3, version),), status="completed", reward=i
            )
            for i in range(2)
        )
        queue.complete(work, Group(work.task, work.group.prompt, samples))


def names(batch):
    return [group.prompt.group_id for group in batch]


def test_what_is_gone_from_a_batch_that_went_to_another_is_fenced(pool, monkeypatch):
    """A trainer that stood still for longer than its lease reads on; the groups were trained, and collected."""
    fill(pool, ["1"] * 2)
    mine = Collector(pool).next_batch(2, timeout=0)

    def gone(_held, *_more):
        raise Gone("object abc is not there: it has ended, and garbage collection has taken it")

    with Pool.open(pool.path) as other:
        for each in (pool, other):
            monkeypatch.setattr(each.payloads, "load", gone)
        with pytest.raises(Gone):
            next(iter(mine))
        other.expire_session(pool.keeper.current)
        with pytest.raises(Fenced, match=r"delivered again, or has ended.*object abc"):
            next(iter(mine))
        again = Collector(other).next_batch(2, timeout=0)
        assert again.id == mine.id and again.delivery == 2
        with pytest.raises(Fenced):
            next(pool.queue().read_batch(mine.batch))
        with pytest.raises(Gone):
            next(iter(again))
        Collector(other).finish(again)
        with pytest.raises(Fenced):
            mine.groups()


def test_a_batch_whose_reply_was_lost_is_this_trainers_and_no_second_one_is_taken(pool, monkeypatch):
    fill(pool, ["1"] * 4)
    commit, lost = pool.commit, []

    def lose(command, *more, **options):
        answer = commit(command, *more, **options)
        if type(command).__name__ == "TakeBatch" and not lost:
            lost.append(command)
            raise OutcomeUnknown("lost")
        return answer

    monkeypatch.setattr(pool, "commit", lose)
    batch = Collector(pool).next_batch(2, timeout=0)
    assert names(batch) == ["g0", "g1"]
    counts = pool.queue().counts()
    assert (counts.in_batch, counts.ready) == (2, 2)


def test_an_unfinished_batch_comes_again_to_the_next_trainer_and_no_other_one(tmp_path, pool):
    fill(pool, ["1"] * 4)
    with Pool.open(pool.path) as first:
        taken = Collector(first).next_batch(2, timeout=5)
        assert names(taken) == ["g0", "g1"] and taken.delivery == 1
        second = Collector(pool)
        # The first trainer lives: the second one waits, and is told why.
        with pytest.raises(TryAgain, match=r"batch b1 of consumer trainer is open in session"):
            second.next_batch(2, timeout=0.05)
        assert names(Collector(pool, consumer="other").next_batch(2, timeout=5)) == ["g2", "g3"]
        pool.commit(Expire(request="e", session=first.keeper.current))
        again = second.next_batch(2, timeout=5)
        assert again.id == taken.id and names(again) == ["g0", "g1"] and again.delivery == 2
        with pytest.raises(Fenced):
            Collector(first).finish(taken)
        second.finish(again)
    assert pool.queue().counts().trained == 2


def test_waiting_ends_with_what_is_missing_and_whether_anybody_works(pool):
    fill(pool, ["1"])
    pool.configure("rollout", QueueConfig(max_attempts=1))
    with pytest.raises(TryAgain, match=r"1 of 2 groups are ready.*is a worker running"):
        Collector(pool).next_batch(2, timeout=0.05)
    batch = Collector(pool).next_batch(2, timeout=0.0, fewer=True)
    assert len(batch) == 1


def test_groups_that_become_ready_while_it_waits_are_taken(pool):
    fill(pool, ["1"])

    def wait(_seconds):
        if pool.queue().counts().ready == 1:
            fill(pool, ["1"], start=1)

    assert names(Collector(pool).next_batch(2, timeout=30, wait=wait)) == ["g0", "g1"]


def test_the_last_batch_is_smaller_and_then_there_is_none(pool):
    fill(pool, ["1"] * 3)
    pool.queue().seal()
    collector = Collector(pool)
    for size in (2, 1):
        batch = collector.next_batch(2, timeout=5)
        assert len(batch) == size
        collector.finish(batch)
    assert collector.next_batch(2, timeout=5) is None


def test_staleness_counts_from_the_oldest_token_and_unknown_apart(pool):
    fill(pool, ["3", "7", "default", "5"])
    pool.publish_version(7)
    batch = Collector(pool).next_batch(4, timeout=5)
    found = batch.metrics()
    assert {name: found[f"rollout/staleness/{name}"] for name in ("unknown_count", "mean", "max")} == {
        "unknown_count": 1,
        "mean": 2.0,
        "max": 4,
    }
    assert [group.samples[0].versions[0].version for group in batch] == ["3", "5", "7", "default"]


def leave_partial(pool, version):
    """An unfinished group with tokens of this version, that nobody works on."""
    queue = pool.queue()
    queue.submit([Prompt(group_id="slow", tokens=[1, 2])])
    (lease,) = queue.acquire(1, stages=("fresh",))
    work = queue.open(lease)
    sample = Sample(0, np.arange(3), np.full(3, -0.5), versions=(VersionSpan(0, 3, version),), status="aborted")
    queue.yield_(work, Group(work.task, work.group.prompt, (sample,)))


def test_with_oldest_first_a_batch_waits_for_the_older_group_that_it_would_make_too_old(pool):
    fill(pool, ["2", "2"])
    leave_partial(pool, "1")
    pool.publish_version(2)
    patient = Collector(pool, max_staleness=1, staleness_policy="oldest_first")
    with pytest.raises(TryAgain, match=r"older groups come first \(2-0\)"):
        patient.next_batch(2, timeout=0.05)
    (lease,) = pool.queue().acquire(1)
    work = pool.queue().open(lease)
    pool.queue().complete(work, work.group)
    batch = patient.next_batch(2, timeout=5)
    assert names(batch) == ["slow", "g0"] and batch.metrics()["rollout/staleness/max"] == 1


def test_other_policies_and_a_batch_that_comes_again_do_not_wait(tmp_path, pool):
    fill(pool, ["2"] * 4)
    leave_partial(pool, "1")
    pool.publish_version(2)
    with Pool.open(pool.path) as first:
        batch = Collector(first, max_staleness=1, staleness_policy="admit").next_batch(2, timeout=5)
        assert names(batch) == ["g0", "g1"]
    again = Collector(pool, max_staleness=1, staleness_policy="oldest_first").next_batch(2, timeout=5)
    assert names(again) == ["g0", "g1"] and again.delivery == 2


def test_ranks_divide_a_batch_and_read_only_their_own_rows(pool, monkeypatch):
    fill(pool, ["1"] * 5)
    batch = Collector(pool).next_batch(5, timeout=5)
    read = []
    load = pool.payloads.load
    monkeypatch.setattr(pool.payloads, "load", lambda held, *a: read.append(held.task.id) or load(held, *a))
    shard = batch.split(1, 2)
    assert names(shard) == ["g1", "g3"] and read == list(shard.tasks) and len(shard) == 2
    parts = [batch.split(rank, 3).tasks for rank in range(3)]
    assert sorted(sum(parts, ())) == sorted(batch.tasks)
    with pytest.raises(BadInput, match="rank 2"):
        batch.split(2, 2)


def test_another_process_reads_its_share_from_bytes(pool):
    fill(pool, ["1"] * 2)
    batch = Collector(pool).next_batch(2, timeout=5)
    with Pool.open(pool.path) as rank:
        assert names(open_shared(rank, batch.share()).split(1, 2)) == ["g1"]
        with pytest.raises(BadInput, match="not a shared batch"):
            open_shared(rank, b"nothing")


def test_a_batch_given_back_is_ready_for_anyone(pool):
    fill(pool, ["1"] * 2)
    collector = Collector(pool)
    collector.give_back(collector.next_batch(2, timeout=5))
    assert names(Collector(pool, consumer="other").next_batch(2, timeout=5)) == ["g0", "g1"]


# -- JSON lines -----------------------------------------------------------------------------------------------------


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_hold_what_was_generated_and_the_batches_are_finished(tmp_path, pool):
    fill(pool, ["1"] * 5)
    pool.queue().seal()
    out = tmp_path / "out.jsonl"
    summary = collect_to_jsonl(pool, out, count=2, timeout=5)
    assert (summary.batches, summary.groups, summary.tokens, summary.sealed) == (3, 5, 30, True)
    first = rows(out)[0]
    assert first["task"] == "1-0" and first["group_id"] == "g0" and first["prompt"]["tokens"] == [1, 2]
    sample = first["samples"][1]
    assert sample["tokens"] == [0, 1, 2] and sample["logprobs"] == [-0.5] * 3 and sample["reward"] == 1.0
    assert sample["versions"] == [{"start": 0, "end": 3, "version": "1"}] and sample["status"] == "completed"
    assert pool.queue().counts().trained == 5


def test_a_rollback_between_two_batches_is_said(pool, tmp_path, caplog):
    """Whoever collects has no model: it goes on with the new branch, and the lines say which they are of."""
    fill(pool, ["1"] * 4)
    pool.checkpoint("ready")

    def roll_back(_seconds):
        if pool.branch() == "main":
            pool.rollback("ready")

    with caplog.at_level(logging.WARNING):
        collect_to_jsonl(pool, tmp_path / "out.jsonl", count=4, batches=2, timeout=5, wait=roll_back)
    branches = [
        json.loads(line)["batch"].partition("/")[0] for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    assert branches == ["main"] * 4 + ["branch-2"] * 4
    assert "of branch branch-2, those before of main" in caplog.text


def test_a_group_whose_prompt_has_no_id_is_collected_and_exported_under_its_tasks(tmp_path, pool):
    queue = pool.queue()
    queue.submit([Prompt(tokens=[1, 2])])
    work = queue.open(queue.acquire(1).leases[0])
    sample = Sample(0, np.arange(3), np.full(3, -0.5), versions=(VersionSpan(0, 3, "1"),), status="completed")
    queue.complete(work, Group(work.task, work.group.prompt, (sample,)))
    assert group_values(Group(work.task, work.group.prompt, (sample,)))["group_id"] == work.task
    collect_to_jsonl(pool, tmp_path / "out.jsonl", count=1, batches=1, timeout=5)
    (row,) = rows(tmp_path / "out.jsonl")
    assert row["group_id"] == row["task"] == work.task


@pytest.fixture
def dies(monkeypatch):
    """A run that writes its first batch of two groups, and ends before it finishes it."""

    def run(pool, out, consumer="trainer"):
        with monkeypatch.context() as patch:
            patch.setattr(Collector, "finish", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                collect_to_jsonl(pool, out, count=2, consumer=consumer, timeout=5)

    return run


def written(out):
    return [(row["batch"].partition("/")[2], row["group_id"]) for row in rows(out)]


def test_a_run_that_died_before_it_finished_a_batch_does_not_write_it_twice(tmp_path, pool, dies):
    fill(pool, ["1"] * 4)
    out = tmp_path / "out.jsonl"
    with Pool.open(pool.path) as first:
        dies(first, out)
    assert len(rows(out)) == 2
    with out.open("ab") as torn:
        torn.write(b'{"batch":"main/b3","task"')
    collect_to_jsonl(pool, out, count=2, batches=2, timeout=5)
    assert written(out) == [("b1", "g0"), ("b1", "g1"), ("b2", "g2"), ("b2", "g3")]


def test_groups_of_a_batch_that_was_broken_up_before_it_was_finished_are_in_the_file_once(tmp_path, pool, dies, caplog):
    fill(pool, ["1"] * 6)
    out = tmp_path / "out.jsonl"
    collect_to_jsonl(pool, out, count=2, batches=1, timeout=5)
    with Pool.open(pool.path) as first:
        dies(first, out)
    with out.open("ab") as torn:
        torn.write(b'{"batch":"main/b3","task"')
    assert pool.queue().drop_tasks(["1-2"], "mine") == ("1-2",)
    pool.queue().seal()
    assert collect_to_jsonl(pool, out, count=2, batches=0, timeout=5).groups == 3
    assert written(out) == [("b1", "g0"), ("b1", "g1"), ("b3", "g3"), ("b3", "g4"), ("b4", "g5")]
    assert [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING] == [
        f"the lines of batch main/b2 were taken from the end of {out}: it was never finished, and the groups that are "
        "left of it come again"
    ]


def test_a_batch_that_is_broken_up_while_the_next_run_waits_is_not_left_in_front_of_others(tmp_path, pool, dies):
    fill(pool, ["1"] * 3)
    out = tmp_path / "out.jsonl"
    with Pool.open(pool.path) as first:
        dies(first, out)

        def wait(_seconds):
            if not pool.queue().counts().dropped:
                pool.commit(Expire(request="e", session=first.keeper.current))
                pool.queue().drop_tasks(["1-0"], "mine")

        collect_to_jsonl(pool, out, count=2, batches=1, timeout=30, wait=wait)
    assert written(out) == [("b2", "g1"), ("b2", "g2")]


def test_lines_of_a_batch_that_was_returned_go_before_another_one_comes(tmp_path, pool, dies):
    fill(pool, ["1"] * 2)
    out = tmp_path / "out.jsonl"
    with Pool.open(pool.path) as first:
        dies(first, out)
    collector = Collector(pool)
    collector.give_back(collector.next_batch(2, timeout=5))
    with pytest.raises(TryAgain):
        collect_to_jsonl(pool, out, count=4, timeout=0)
    assert written(out) == []


def test_another_consumer_writes_nothing_behind_a_batch_that_is_not_finished(tmp_path, pool, dies):
    fill(pool, ["1"] * 4)
    out = tmp_path / "out.jsonl"
    with Pool.open(pool.path) as first:
        dies(first, out)
        with (
            Pool.open(pool.path) as second,
            pytest.raises(TryAgain, match=r"ends with batch main/b1, which consumer trainer \(session .*\) has open"),
        ):
            collect_to_jsonl(second, out, count=2, batches=1, consumer="other", timeout=5)
        assert written(out) == [("b1", "g0"), ("b1", "g1")]
    collect_to_jsonl(pool, out, count=2, batches=1, consumer="other", timeout=5)
    assert written(out) == [("b2", "g2"), ("b2", "g3")]
    collect_to_jsonl(pool, out, count=2, batches=1, timeout=5)
    assert written(out) == [("b2", "g2"), ("b2", "g3"), ("b1", "g0"), ("b1", "g1")]
    assert pool.queue().counts().trained == 4


def test_a_run_that_goes_on_in_the_same_process_leaves_what_it_may_have_finished(tmp_path, pool, dies):
    """Whether the batch is finished nobody knows yet: its lines are not taken away."""
    fill(pool, ["1"] * 4)
    out = tmp_path / "out.jsonl"
    dies(pool, out)
    collect_to_jsonl(pool, out, count=2, batches=1, timeout=5)
    assert written(out) == [("b1", "g0"), ("b1", "g1"), ("b2", "g2"), ("b2", "g3")]


def test_lines_of_a_branch_that_was_left_stay(tmp_path, pool, dies):
    fill(pool, ["1"] * 2)
    pool.checkpoint("ready")
    out = tmp_path / "out.jsonl"
    with Pool.open(pool.path) as first:
        dies(first, out)
    pool.rollback("ready")
    collect_to_jsonl(pool, out, count=2, batches=1, timeout=5)
    assert [row["batch"] for row in rows(out)] == ["main/b1"] * 2 + ["branch-2/b2"] * 2


@pytest.mark.parametrize("state", ["ready", "in an open batch"])
def test_lines_of_another_pool_stay_whatever_its_groups_of_the_same_names_are(tmp_path, pool, dies, state):
    out, others = tmp_path / "out.jsonl", tmp_path / "others.jsonl"
    fill(pool, ["1"] * 2)
    collect_to_jsonl(pool, out, count=2, batches=1, timeout=5)
    before = out.read_bytes()
    with Pool.init(tmp_path / "other") as other:
        fill(other, ["2"] * 4)
        with Pool.open(other.path) as first:
            dies(first, others, consumer="other")
        if state == "ready":
            other.queue().drop_tasks(["1-0"], "mine")
        collect_to_jsonl(other, out, count=2, batches=1, timeout=5)
    assert out.read_bytes().startswith(before) and len(rows(out)) == 4


@pytest.mark.parametrize("torn", [1, 40, 700])
def test_a_batch_that_was_written_by_half_is_completed_where_it_stands(tmp_path, pool, torn):
    fill(pool, ["1"] * 4)
    out = tmp_path / "out.jsonl"
    collect_to_jsonl(pool, tmp_path / "whole.jsonl", count=2, batches=1, timeout=5)
    collect_to_jsonl(pool, tmp_path / "second.jsonl", count=2, batches=1, timeout=5)
    whole = (tmp_path / "second.jsonl").read_bytes()
    with Pool.init(tmp_path / "again") as again:
        fill(again, ["1"] * 4)
        collect_to_jsonl(again, out, count=2, batches=1, timeout=5)
        before = out.read_bytes()
        with out.open("ab") as file:
            file.write(whole[:torn])
        collect_to_jsonl(again, out, count=2, batches=1, timeout=5)
        assert out.read_bytes() == before + whole


def test_a_batch_of_another_pool_with_the_same_name_is_not_written_over(tmp_path, pool):
    out = tmp_path / "out.jsonl"
    fill(pool, ["1"] * 2)
    collect_to_jsonl(pool, out, count=2, batches=1, timeout=5)
    before = out.read_bytes()
    with Pool.init(tmp_path / "other") as other:
        fill(other, ["2"] * 2)
        with pytest.raises(BadInput, match="another batch main/b1"):
            collect_to_jsonl(other, out, count=2, batches=1, timeout=5)
        assert other.queue().counts().trained == 0
    assert out.read_bytes() == before


@pytest.mark.parametrize("text", ["my notes\n", "my notes", '{"batch": 1}', '["batch"]\n'])
def test_a_file_of_something_else_is_not_written_over(tmp_path, pool, text):
    fill(pool, ["1"])
    out = tmp_path / "notes.txt"
    out.write_text(text)
    with pytest.raises(BadInput, match="no collected group"):
        collect_to_jsonl(pool, out, count=1, batches=1, timeout=5)
    assert out.read_text() == text and pool.queue().counts().ready == 1


def meanwhile(pool, out, act, **options):
    """Collects two batches of two groups; `act` is called between them."""
    fill(pool, ["1"] * 2)
    called = []

    def wait(_seconds):
        if not called:
            called.append(True)
            act()
            fill(pool, ["1"] * 2, start=2)

    return collect_to_jsonl(pool, out, count=2, batches=2, timeout=30, wait=wait, **options)


@pytest.mark.parametrize("name", ["out.jsonl", "symlink", "hard link"])
def test_a_second_run_on_the_same_file_is_refused_before_it_takes_a_batch(tmp_path, pool, name):
    out, same = tmp_path / "out.jsonl", tmp_path / name
    out.touch()
    if name == "symlink":
        same.symlink_to(out)
    elif name == "hard link":
        same.hardlink_to(out)

    def second():
        with Pool.open(pool.path) as other:
            fill(other, ["1"] * 2, start=8)
            with pytest.raises(TryAgain, match=f"somebody else is writing to {same}: wait"):
                collect_to_jsonl(other, same, count=2, batches=1, consumer="other", timeout=5)
            assert (other.queue().counts().ready, other.queue().counts().in_batch) == (2, 0)

    assert meanwhile(pool, out, second).groups == len(rows(out)) == 4
    assert collect_to_jsonl(pool, same, count=2, batches=1, consumer="other", timeout=5).groups == 2
    assert len(rows(out)) == 6 == pool.queue().counts().trained


HOLD = """
import sys
from strawq_workers.collected_lines import collect_to_jsonl
from strawq import Pool
def wait(_):
    print("waits", flush=True)
    sys.stdin.read()
with Pool.open(sys.argv[1]) as pool:
    collect_to_jsonl(pool, sys.argv[2], count=1, batches=1, wait=wait)
"""


def test_a_killed_run_does_not_keep_the_file(tmp_path, pool):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", HOLD, str(pool.path), str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"waits\n"
        fill(pool, ["1"])
        with pytest.raises(TryAgain, match="somebody else is writing"):
            collect_to_jsonl(pool, out, count=1, batches=1, timeout=5)
        holder.kill()
        holder.wait(20)
    assert collect_to_jsonl(pool, out, count=1, batches=1, timeout=5).groups == 1


@pytest.mark.parametrize("answer", ["granted", "refused"])
def test_without_a_lock_that_excludes_no_run_writes_over_the_others_lines(tmp_path, pool, monkeypatch, answer):
    def flock(_fd, _how):
        if answer == "refused":
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    out = tmp_path / "out.jsonl"

    def second():
        fill(pool, ["1"] * 2, start=4)
        collect_to_jsonl(pool, out, count=2, batches=1, consumer="other", timeout=5)

    with Pool.open(pool.path) as first:
        with pytest.raises(StorageFailed, match="batch main/b3 is not finished"):
            meanwhile(first, out, second)
        pool.commit(Expire(request="e", session=first.keeper.current))
    counts = pool.queue().counts()
    assert (counts.trained, counts.in_batch, len(rows(out))) == (4, 2, 4)
    collect_to_jsonl(pool, out, count=2, batches=1, timeout=5)
    assert [row["group_id"] for row in rows(out)] == ["g0", "g1", "g4", "g5", "g2", "g3"]
    assert pool.queue().counts().trained == 6


CHANGES = {
    "removed": lambda out: out.unlink(),
    "replaced": lambda out: (out.with_name("new").write_bytes(out.read_bytes()), out.with_name("new").replace(out)),
    "emptied": lambda out: os.truncate(out, 0),
    "cut": lambda out: os.truncate(out, out.stat().st_size - 1),
    "added to": lambda out: os.truncate(out, out.stat().st_size + 1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["between two batches", "while one is written"])
def test_a_batch_is_not_finished_in_a_file_that_somebody_else_changed(tmp_path, pool, monkeypatch, change, when):
    out = tmp_path / "out.jsonl"
    between = when == "between two batches"
    fsync, synced = os.fsync, []

    def change_before_it_is_durable(fd):
        if out.exists() and os.path.samestat(os.fstat(fd), out.stat()):
            synced.append(fd)
            if len(synced) == 2:
                CHANGES[change](out)
        fsync(fd)

    if not between:
        monkeypatch.setattr(os, "fsync", change_before_it_is_durable)
    with pytest.raises(StorageFailed, match=r"somebody else .*: batch main/b2 is not finished"):
        meanwhile(pool, out, lambda: CHANGES[change](out) if between else None)
    counts = pool.queue().counts()
    assert (counts.trained, counts.in_batch) == (2, 2)


def test_lines_go_to_no_pipe_or_device_by_name(tmp_path, pool):
    fill(pool, ["1"])
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(BadInput, match="is no regular file; leave --out away"):
            collect_to_jsonl(pool, name, count=1, batches=1, timeout=5)
    assert pool.queue().counts().ready == 1


def test_a_damaged_group_is_named_and_the_batch_stays_open(tmp_path, pool):
    fill(pool, ["1"] * 2)
    batch = Collector(pool).next_batch(2, timeout=5)

    def broken(held, *_):
        raise Damaged(f"object of {held.task.id}")

    pool.payloads.load = broken
    with pytest.raises(Damaged, match="1-0"):
        batch.groups()
    assert pool.queue().counts().in_batch == 2
