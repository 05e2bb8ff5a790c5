"""The joint checkpoint: which pair a job goes on from, what it says of the others, and what it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in import Engine, flat, job_args, save_model

from strawq import Pool
from strawq.errors import BadInput, BranchMoved, Fenced, FormatUnsupported, StorageFailed
from strawq_workers.rollout import weight_update
from strawq_workers.slime import StrawDataSource, group_of, samples_of
from strawq_workers.slime.commits import Commit, read_commit
from strawq_workers.slime.job_lock import JobLock
from strawq_workers.slime.model_files import BLOCK_BYTES, WHOLE_BYTES_MAX, read_model

HERE = Path(__file__).parent


class Job:
    """A job that starts, does rollouts with a trainer, and ends."""

    def __init__(self, root: Path) -> None:
        self.root = root
        Pool.init(root / "save" / "rollout_data").close()
        self.source: StrawDataSource = None  # type: ignore[assignment]

    def start(self, after: int | None = None, **changes: Any) -> Any:
        self.stop()
        self.source = StrawDataSource(job_args(self.root, **changes))
        try:
            return self.source.load(after)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        if self.source is not None:
            self.source.close()

    def work(self, count: int) -> list[int]:
        """Complete that many groups as a worker does; returns their group indices."""
        self.source.fill(count)
        queue = self.source.pool.queue()
        done = []
        for lease in queue.acquire(count):
            work = queue.open(lease)
            samples = samples_of(work.group)
            for sample in flat(samples):
                Engine().answer(self.source.args, sample, 2, "completed")
                sample.reward = 1.0
            queue.complete(work, group_of(work.task, work.group.prompt, samples, work.group))
            done.append(samples[0].group_index)
        return done

    def train(self, rollout_id: int, *, save: bool = False) -> list[int]:
        """One rollout of two groups, trained; returns their group indices."""
        if self.source.pool.queue().counts().ready < 2:
            self.work(2)
        batch = self.source.collect(rollout_id, 2, timeout=0)
        with weight_update(self.source, rollout_id + 1):
            pass
        if save:
            save_model(self.source.args, rollout_id)
            self.source.save(rollout_id)
        return [group[0].group_index for group in batch]

    def path(self, rollout_id: int, branch: str = "main") -> Path:
        return self.root / "save" / "strawq" / branch / f"committed_{rollout_id}.json"

    @property
    def pool(self) -> Pool:
        return self.source.pool

    def counts(self) -> Any:
        return self.pool.queue().counts()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.stop()


# -- the pair ---------------------------------------------------------------------------------------------------------


def test_a_commit_binds_the_queue_to_the_model_and_is_never_written_again(job: Job) -> None:
    job.start(-1)
    job.train(0, save=True)
    commit = read_commit(job.path(0))
    model = read_model(job.root / "save", 0)
    assert commit.model == model
    assert (commit.rollout_id, commit.branch, commit.run_id) == (0, "main", "rollout")
    (point,) = [point for point in job.pool.checkpoints() if point.name == commit.checkpoint]
    assert dict(point.bindings) == {"model": model.blake3 if model else ""}
    assert job.counts().trained == 2
    before = job.path(0).read_bytes()
    with pytest.raises(BadInput, match="is there already and is never overwritten"):
        job.source.save(0)
    assert job.path(0).read_bytes() == before


def test_a_model_that_is_not_there_is_recorded_as_absent(job: Job) -> None:
    job.start(-1)
    job.train(0)
    job.source.save(0)
    commit = read_commit(job.path(0))
    assert commit.model is None
    assert "was not there" in commit.model_note
    assert job.start(0).mode == "same queue"
    job.train(1)
    save_model(job.source.args, 1)
    job.source.args.async_save = True
    job.source.save(1)
    assert "--async-save" in read_commit(job.path(1)).model_note


def test_a_commit_of_a_newer_strawq_is_not_called_damaged(job: Job) -> None:
    job.start(-1)
    job.train(0, save=True)
    data = json.loads(job.path(0).read_bytes())
    job.path(0).write_text(json.dumps({**data, "version": 2, "more": "of it"}))
    with pytest.raises(FormatUnsupported, match=r"committed_0.json is of version 2.*use a newer one"):
        read_commit(job.path(0))
    with pytest.raises(BadInput, match=r"no complete pair of model and queue.*use a newer one"):
        job.start(None)


def test_a_save_without_a_directory_is_refused(job: Job) -> None:
    job.start(-1, save=None, rollout_data_dir=str(job.root / "save" / "rollout_data"))
    with pytest.raises(BadInput, match="needs --save"):
        job.source.save(0)


def test_a_save_that_died_before_its_commit_is_taken_anew(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.start(-1)

    def die(*_: Any) -> Any:
        raise StorageFailed("the process died here")

    with monkeypatch.context() as patch:
        patch.setattr("strawq_workers.slime.checkpoint.write_commit", die)
        with pytest.raises(StorageFailed):
            job.train(0, save=True)
    assert not job.path(0).exists()
    assert job.counts().in_batch == 2  # not finished: no model that was committed has seen them
    restored = job.start(-1)
    assert (restored.mode, job.counts().in_batch) == ("same queue", 2)
    groups = job.train(0, save=True)
    assert groups == [0, 1]
    assert read_commit(job.path(0)).checkpoint in {point.name for point in job.pool.checkpoints()}


def test_a_save_that_died_behind_its_commit_is_finished_by_the_restart(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.start(-1)

    def die(*_: Any) -> Any:
        raise StorageFailed("the process died here")

    with monkeypatch.context() as patch:
        patch.setattr(job.source._batches, "finish_up_to", lambda r: die() if r == 0 else None)
        with pytest.raises(StorageFailed):
            job.train(0, save=True)
    assert job.path(0).exists()
    assert job.counts().in_batch == 2
    assert job.start(0).mode == "same queue"
    assert (job.counts().trained, job.counts().in_batch) == (2, 0)
    assert job.start(0).mode == "same queue"


def before_a_checkpoint(job: Job, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """What happens once, in the moment before the pool takes its next checkpoint."""
    take, due = job.pool.checkpoint, [happens]

    def checkpoint(*words: Any, **named: Any) -> int:
        while due:
            due.pop()()
        return take(*words, **named)

    monkeypatch.setattr(job.pool, "checkpoint", checkpoint)


def test_a_rollback_in_the_moment_of_a_save_commits_nothing_under_the_branch_that_was_left(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.start(-1)
    job.train(0, save=True)
    job.train(1)
    before_a_checkpoint(job, monkeypatch, lambda: job.pool.rollback("rollout-0.main") and None)
    save_model(job.source.args, 1)
    with pytest.raises(BranchMoved, match="rolled back from branch main to branch-2"):
        job.source.save(1)
    assert not job.path(1).exists() and not job.path(1, "branch-2").exists()
    assert "rollout-1.main" not in {point.name for point in job.pool.checkpoints()}


def test_a_commit_counts_what_the_queue_had_at_its_checkpoint(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.start(-1)
    job.work(2)
    job.source.collect(0, 2, timeout=0)
    before_a_checkpoint(job, monkeypatch, lambda: job.pool.publish_version("7") and None)
    save_model(job.source.args, 0)
    job.source.save(0)
    commit = read_commit(job.path(0))
    (point,) = [point for point in job.pool.checkpoints() if point.name == commit.checkpoint]
    assert (commit.policy_version, commit.seq) == (point.policy_version, point.seq) == ("7", point.seq)
    assert (commit.trained, commit.open_batches) == (0, {"rollout-0": 2})


# -- going on ---------------------------------------------------------------------------------------------------------


def test_before_the_first_commit_a_restart_goes_on_with_the_same_queue(job: Job) -> None:
    assert job.start(-1).mode == "new"
    job.work(2)
    batch = [group[0].group_index for group in job.source.collect(0, 2, timeout=0)]
    job.work(1)
    restored = job.start(-1)
    assert (restored.mode, restored.branch) == ("same queue", "main")
    assert job.counts().ready == 1
    assert [group[0].group_index for group in job.source.collect(0, 2, timeout=0)] == batch


@pytest.mark.parametrize("named", [True, False])
def test_a_resume_keeps_what_was_generated_since_if_nothing_was_trained_since(job: Job, named: bool) -> None:
    job.start(-1)
    job.train(0, save=True)
    done = job.work(3)
    batch = [group[0].group_index for group in job.source.collect(1, 2, timeout=0)]
    restored = job.start(0 if named else None)
    assert (restored.mode, restored.rollout_id, restored.branch) == ("same queue", 0, "main")
    assert batch == done[:2]
    assert [group[0].group_index for group in job.source.collect(1, 2, timeout=0)] == batch
    assert (job.counts().ready, job.counts().trained) == (1, 2)


def test_a_resume_rolls_back_what_the_model_has_not_seen(job: Job) -> None:
    job.start(-1)
    job.train(0, save=True)
    later = [job.train(rollout_id) for rollout_id in range(1, 4)]
    assert job.counts().trained == 4  # rollout 1 was finished without a save
    restored = job.start(0)
    assert (restored.mode, restored.branch) == ("rolled back", "branch-2")
    assert job.counts().trained == 2
    assert [job.train(rollout_id) for rollout_id in range(1, 4)] == later


def test_a_resumed_trainer_may_use_the_version_numbers_of_a_lost_model(job: Job) -> None:
    """What was accepted is kept, however far the lost model's numbers, or those of new engines, have gone; the pool's
    number waits until the resumed one has reached it."""
    job.start(-1)
    job.train(0, save=True)
    job.work(2)
    batch = job.train(1)
    for version in ("3", "engine-b", "50000"):
        job.pool.publish_version(version)
    assert job.start(0).mode == "same queue"
    with weight_update(job.source, 1):
        pass
    assert job.source.collect(1, 2, timeout=0)[0][0].group_index == batch[0]
    assert job.pool.policy_version() == "50000"
    with weight_update(job.source, 50001):
        pass
    assert job.pool.policy_version() == "50001"


def test_a_model_that_was_lost_before_its_first_commit_keeps_its_batch_if_it_had_not_trained(job: Job) -> None:
    job.start(-1)
    batch = job.train(0)
    restored = job.start(-1)
    assert (restored.mode, job.pool.policy_version()) == ("same queue", "1")
    assert job.train(0) == batch


def test_a_model_that_was_lost_before_its_first_commit_begins_anew_if_it_had_trained(job: Job) -> None:
    job.start(-1)
    batches = [job.train(rollout_id) for rollout_id in range(2)]
    restored = job.start(-1)
    assert (restored.mode, job.pool.policy_version()) == ("same queue", "2"), "no batch is finished"
    assert [job.train(rollout_id) for rollout_id in range(3)][:2] == batches  # the third finishes the first
    restored = job.start(-1)
    assert (restored.mode, restored.branch) == ("rolled back", "branch-2")
    assert (job.counts().trained, job.pool.policy_version()) == (0, "")
    assert job.train(0) == batches[0]


def test_ckpt_step_rolls_back_and_fences_who_works_there(job: Job) -> None:
    job.start(-1)
    batches = [job.train(rollout_id, save=True) for rollout_id in range(3)]
    job.source.fill(1)
    job.source.close()
    with Pool.open(job.root / "save" / "rollout_data") as worker:
        (lease,) = worker.queue().acquire(1)
        work = worker.queue().open(lease)
        restored = job.start(ckpt_step=0)
        assert (restored.mode, restored.rollout_id, restored.branch) == ("rolled back", 0, "branch-2")
        with pytest.raises(Fenced):
            worker.queue().yield_(work)
    assert job.counts().trained == 2
    assert job.train(1) == batches[1]


CALLS: dict[str, Callable[[StrawDataSource], Any]] = {
    "fill": lambda source: source.fill(4),
    "get_samples": lambda source: source.get_samples(1),
    "add_samples": lambda source: source.add_samples([]),
    "collect what it has": lambda source: source.collect(1, 2, timeout=0),
    "collect": lambda source: source.collect(2, 2, timeout=0),
    "finish": lambda source: source.finish(1),
    "save": lambda source: source.save(1),
    "update_metadata": lambda source: source.update_metadata({"step": 1}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("known", [True, False], ids=["known", "not yet known"])
def test_a_trainer_under_which_the_pool_is_rolled_back_records_nothing_more(
    job: Job, call: Callable[[StrawDataSource], Any], known: bool
) -> None:
    """Its model has seen groups that are ready again: what it would train and commit is of no line of history."""

    def go_on() -> None:
        call(job.source)
        job.source.collect(3, 2, timeout=0)

    job.start(-1)
    job.train(0, save=True)
    job.train(1)
    save_model(job.source.args, 1)
    job.work(4)
    with Pool.open(job.root / "save" / "rollout_data", background=False) as operator:
        operator.rollback("rollout-0.main")
        before = operator.queue().counts(), operator.inspect().checkpoints
        if known:
            job.pool.log.refresh()
        with pytest.raises(BranchMoved, match=r"from branch main to branch-2.*--load"):
            go_on()
        counts = operator.queue().counts()
        assert (counts.trained, counts.in_batch) == (before[0].trained, before[0].in_batch)
        assert operator.inspect().checkpoints == before[1]
    assert not job.path(1, "branch-2").exists() and not job.path(1).exists()
    assert job.start(None).rollout_id == 0
    assert len(job.train(1)) == 2


def test_a_batch_of_a_branch_that_comes_up_while_it_is_asked_for_goes_back(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.start(-1)
    job.train(0, save=True)
    job.work(4)
    with Pool.open(job.root / "save" / "rollout_data", background=False) as operator:
        operator.checkpoint("filled")
        commit, due = job.pool.commit, [lambda: operator.rollback("filled")]

        def late(command: Any, *more: Any, **options: Any) -> Any:
            if type(command).__name__ == "TakeBatch" and due:
                due.pop()()
            return commit(command, *more, **options)

        monkeypatch.setattr(job.pool, "commit", late)
        with pytest.raises(BranchMoved, match="from branch main to branch-2"):
            job.source.collect(1, 2, timeout=0)
        counts = operator.queue().counts()
        assert not due and (operator.branch(), counts.ready, counts.in_batch) == ("branch-2", 4, 0)


def test_the_newest_complete_pair_is_found_and_the_others_are_named(job: Job) -> None:
    job.start(-1)
    for rollout_id in range(3):
        job.train(rollout_id, save=True)
    tracker = job.root / "save" / "latest_checkpointed_iteration.txt"
    shutil.rmtree(job.root / "save" / "iter_0000002")
    restored = job.start(None)
    assert (restored.rollout_id, restored.mode) == (1, "rolled back")
    assert "iter_0000002" in restored.skipped[0]
    tracker.write_text("0\n")
    assert job.start(None).rollout_id == 0
    tracker.write_text("9")
    restored = job.start(None)
    assert (restored.rollout_id, restored.skipped[0]) == (0, "the tracker names step 9, which has no commit")
    tracker.write_text("release")
    assert job.start(None).rollout_id == 0


def test_numbers_that_contradict_each_other_are_refused(job: Job) -> None:
    job.start(-1)
    for rollout_id in range(2):
        job.train(rollout_id, save=True)
    with pytest.raises(BadInput, match=r"after rollout 1, and --ckpt-step says 0: --start-rollout-id must be 1"):
        job.start(1, ckpt_step=0)


# -- parts that are missing or do not fit -----------------------------------------------------------------------------


def remove_commit(job: Job) -> None:
    job.path(1).unlink()


def edit_commit(job: Job) -> None:
    data = json.loads(job.path(1).read_bytes())
    job.path(1).write_text(json.dumps({**data, "trained": 0}))


def rename_commit(job: Job) -> None:
    os.replace(job.path(0), job.path(1))


def cut_commit(job: Job) -> None:
    job.path(1).write_bytes(job.path(1).read_bytes()[:100])


def remove_model(job: Job) -> None:
    shutil.rmtree(job.root / "save" / "iter_0000001")


def change_model(job: Job) -> None:
    (job.root / "save" / "iter_0000001" / "model.bin").write_bytes(b"weights0")


def delete_checkpoint(job: Job) -> None:
    with Pool.open(job.root / "save" / "rollout_data") as pool:
        pool.drop_checkpoint("rollout-1.main")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove_commit, r"committed_1\.json is missing .* complete pairs: 0 \(--ckpt-step\)"),
        (edit_commit, r"committed_1\.json was changed or moved"),
        (rename_commit, r"committed_1\.json was changed or moved"),
        (cut_commit, r"committed_1\.json is not a commit of strawq"),
        (remove_model, r"the model .*iter_0000001, which .*committed_1\.json names, is missing: restore it"),
        (change_model, r"the model .*iter_0000001 is not the one that .*committed_1\.json names"),
        (delete_checkpoint, r"checkpoint rollout-1\.main, which .*committed_1\.json names, is not in .*deleted"),
    ],
)
def test_a_pair_that_is_not_whole_is_an_error_that_names_the_file(
    job: Job, damage: Callable[[Job], None], words: str
) -> None:
    job.start(-1)
    for rollout_id in range(2):
        job.train(rollout_id, save=True)
    job.stop()
    damage(job)
    with pytest.raises(BadInput, match=words):
        job.start(1)
    assert job.source.pool.branch() == "main"  # nothing was rolled back
    if damage is not rename_commit:
        assert job.start(0).rollout_id == 0
        assert job.start(None).rollout_id == 0


def test_no_complete_pair_at_all_is_an_error(job: Job) -> None:
    job.start(-1)
    job.train(0, save=True)
    job.stop()
    shutil.rmtree(job.root / "save" / "iter_0000000")
    with pytest.raises(BadInput, match=r"no complete pair of model and queue: the model .*iter_0000000"):
        job.start(None)


def test_another_pool_is_refused_at_the_start_not_at_the_first_save(job: Job) -> None:
    job.start(-1)
    job.train(0, save=True)
    job.stop()
    Pool.init(job.root / "other").close()
    for after in (0, -1, None):
        with pytest.raises(BadInput, match=r"committed_0\.json belongs to pool .* --rollout-data-dir"):
            job.start(after, rollout_data_dir=str(job.root / "other"))


def test_a_model_from_a_job_without_a_queue_starts_an_empty_one(job: Job) -> None:
    restored = job.start(41)
    assert (restored.mode, restored.rollout_id) == ("new", 41)
    assert "without this queue" in restored.skipped[0]
    assert job.train(42) == [0, 1]
    assert job.start(41).mode == "same queue"  # it died before its first commit
    assert job.train(42, save=True) == [0, 1]
    assert job.start(42).mode == "same queue"
    assert job.start(41).checkpoint == "rollout-start"
    with pytest.raises(BadInput, match=r"committed_40\.json is missing"):
        job.start(40)


# -- lines ------------------------------------------------------------------------------------------------------------


def test_ancestry_is_followed_to_the_branch_point_and_no_further(job: Job) -> None:
    job.start(-1)
    for rollout_id in range(4):
        job.train(rollout_id, save=True)
    assert job.start(1).branch == "branch-2"
    # The same command line again, before the branch has a commit of its own: no third branch.
    again = job.start(1, ckpt_step=1)
    assert (again.mode, again.branch) == ("same queue", "branch-2")
    job.train(2, save=True)
    assert job.path(2).exists()
    assert job.path(2, "branch-2").exists()
    with pytest.raises(BadInput, match=r"committed_3\.json is of branch main, .*strawq rollback .* main"):
        job.start(3)
    assert (job.start(2).mode, job.start(2).branch) == ("same queue", "branch-2")
    assert job.start(0).branch == "branch-3"  # an ancestor's commit, below the branch point
    job.pool.rollback("branch-2")
    assert job.start(2).mode == "same queue"


def test_a_trainer_from_scratch_begins_a_line_of_its_own(job: Job) -> None:
    job.start(-1)
    first = [job.train(rollout_id, save=True) for rollout_id in range(2)]
    restored = job.start(-1)
    assert (restored.mode, restored.branch, restored.checkpoint) == ("rolled back", "branch-2", "rollout-start")
    assert [job.train(rollout_id, save=True) for rollout_id in range(2)] == first
    assert job.path(0, "branch-2").exists()


def test_a_job_that_loads_from_one_directory_saves_to_another(job: Job) -> None:
    pool = str(job.root / "save" / "rollout_data")
    job.start(-1)
    job.train(0, save=True)
    new = str(job.root / "new")
    restored = job.start(0, load=str(job.root / "save"), save=new, rollout_data_dir=pool)
    assert restored.mode == "same queue"
    job.train(1, save=True)
    assert (job.root / "new" / "strawq" / "main" / "committed_1.json").exists()
    assert job.start(0, load=str(job.root / "save"), save=new, rollout_data_dir=pool).mode == "rolled back"


# -- the lock ---------------------------------------------------------------------------------------------------------

HOLD = """
import sys, pathlib
from strawq_workers.slime.job_lock import JobLock
lock = JobLock(pathlib.Path(sys.argv[1]), "save directory x")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_job_lets_go_of_the_lock_and_a_live_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "strawq" / "session.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BadInput, match=f"owns save directory x .*held by pid {holder.pid} on "):
            JobLock(path, "save directory x")
        holder.send_signal(signal.SIGKILL)
        holder.wait(20)
        lock = JobLock(path, "save directory x")
        with pytest.raises(BadInput, match="held by this process"):
            JobLock(path, "save directory x")
        lock.close()
        lock.close()
        JobLock(path, "save directory x").close()
    finally:
        holder.kill()
        holder.wait(20)
        for stream in (holder.stdin, holder.stdout):
            if stream is not None:
                stream.close()


def test_a_forked_child_neither_holds_nor_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "session.lock"
    lock = JobLock(path, "x")
    child = os.fork()
    if child == 0:
        lock.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    done = subprocess.run([sys.executable, "-c", HOLD, str(path)], input="", capture_output=True, text=True, timeout=60)
    assert "Another training job owns" in done.stderr
    lock.close()


@pytest.mark.juicefs
def test_the_lock_excludes_across_two_clients_of_a_shared_mount(juicefs_pair: tuple[Path, Path]) -> None:
    here, there = juicefs_pair
    lock = JobLock(here / "session.lock", "save directory x")
    command = [sys.executable, "-c", HOLD, str(there / "session.lock")]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
    assert "Another training job owns save directory x" in done.stderr
    lock.close()
    assert subprocess.run(command, input="", capture_output=True, text=True, timeout=60).stdout == "held\n"


# -- the model's digest -----------------------------------------------------------------------------------------------


def test_the_digest_sees_names_sizes_and_blocks(tmp_path: Path) -> None:
    where = tmp_path / "iter_0000003"
    assert read_model(tmp_path, 3) is None
    where.mkdir()
    assert read_model(tmp_path, 3) is None
    large = bytearray(os.urandom(WHOLE_BYTES_MAX * 3))
    (where / "rank0").mkdir()
    (where / "rank0" / "weights").write_bytes(large)
    (where / "metadata.json").write_bytes(b"{}")
    digests = {_blake3(tmp_path)}
    for change in (
        lambda: (where / "metadata.json").write_bytes(b"[]"),
        lambda: (where / "rank0" / "weights").write_bytes(large[:-1]),
        lambda: (where / "rank0" / "weights").write_bytes(os.urandom(len(large))),
        lambda: os.rename(where / "rank0", where / "rank1"),
        lambda: (where / "extra").write_bytes(b""),
    ):
        change()
        digests.add(_blake3(tmp_path))
    assert len(digests) == 6
    assert BLOCK_BYTES < WHOLE_BYTES_MAX


def _blake3(root: Path) -> str:
    found = read_model(root, 3)
    assert found is not None
    return found.blake3


def test_a_commit_tells_every_edit(job: Job) -> None:
    job.start(-1)
    job.train(0, save=True)
    data = json.loads(job.path(0).read_bytes())
    assert set(data) <= set(Commit.__struct_fields__)
    for name, value in (("seq", 1), ("policy_version", "9"), ("open_batches", {}), ("model_note", "x")):
        job.path(0).write_text(json.dumps({**data, name: value}))
        with pytest.raises(BadInput, match="was changed"):
            job.start(0)
    job.path(0).write_text(json.dumps(data))
    assert job.start(0).rollout_id == 0
