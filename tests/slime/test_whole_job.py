"""SIGKILL of a whole job in the middle of a rollout: manager, generation and engine as real processes, all killed, and
new ones that go on. What was paid for is not made again."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in import write_prompts

from strawq import Pool
from strawq.handles import Held
from strawq.samples import Group
from strawq_workers.processes import Child, Children

HERE = Path(__file__).parent
WAIT_S = 60.0
LENGTH = 32


class Stage:
    def __init__(self, root: Path, children: Children) -> None:
        self.root, self.children, self.count = root, children, 0
        self.pool = root / "save" / "rollout_data"
        write_prompts(root / "prompts.jsonl", 5)
        Pool.init(self.pool).close()

    def engine(self, **options: str) -> tuple[Child, str]:
        self.count += 1
        words = ["-m", "strawq_workers.engine", "--enable-return-routed-experts", "--output-topk"]
        words += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        child = self.children.start(f"engine-{self.count}", words)
        return child, child.first_line(WAIT_S)

    def job(self, flags: dict[str, Any], **todo: Any) -> "Job":
        self.count += 1
        return Job(self, f"job-{self.count}", flags, todo)

    def held(self, **wanted: Any) -> list[Group]:
        """What is saved of the tasks whose fields are as wanted, in the order of their prompts."""

        def view(machine: Any) -> list[Held]:
            state = machine.state
            return [
                Held(task, {part.object: state.objects[part.object] for part in task.parts})
                for task in state.branch.queues["rollout"].tasks.values()
                if all(getattr(task, name) == value for name, value in wanted.items())
            ]

        with Pool.open(self.pool, background=False) as pool:
            groups = [pool.payloads.load(held) for held in pool.log.refresh(view)]
            return [_read(group) for group in sorted(groups, key=lambda group: int(group.prompt.group_id))]

    def until(self, what: str, probe: Callable[[Any], bool]) -> None:
        with Pool.open(self.pool, background=False) as pool:
            end = time.monotonic() + WAIT_S
            while not probe(pool.queue().counts()):
                assert time.monotonic() < end, f"not within {WAIT_S} s: {what}"
                self.children.require_alive()
                time.sleep(0.01)


class Job:
    def __init__(self, stage: Stage, name: str, flags: dict[str, Any], todo: dict[str, Any]) -> None:
        self.report = stage.root / f"{name}.json"
        given = {"root": str(stage.root), "flags": flags, "report": str(self.report), "after": -1, **todo}
        self.process = stage.children.start(name, [str(HERE / "job_process.py"), json.dumps(given)])

    def done(self) -> Any:
        assert self.process.first_line(WAIT_S) == "done"
        return json.loads(self.report.read_text())


def _read(group: Group) -> Group:
    """With its tensors in memory, so that it outlives the pool."""
    for sample in group.samples:
        for rows in (sample.r3, getattr(sample.sc, "ids", None), getattr(sample.sc, "logprobs", None)):
            if rows is not None:
                np.asarray(rows)
    return group


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    (tmp_path / "logs").mkdir()
    with Children(tmp_path / "logs") as children:
        yield Stage(tmp_path, children)


def same_start(saved: Group, delivered: list[dict[str, Any]], prompt: int) -> None:
    """The delivered samples begin with what was saved, to the bit: tokens, log-probs, R3 and SC rows."""
    for sample in saved.samples:
        count = len(sample.tokens)
        found = delivered[sample.index]
        assert found["tokens"][prompt : prompt + count] == sample.tokens.tolist()
        assert sample.logprobs is not None
        assert found["log_probs"][:count] == sample.logprobs.tolist()
        rows = prompt + count - 1
        assert found["routes"][:rows] == np.asarray(sample.r3)[:rows].tolist()
        assert sample.sc is not None
        assert found["ids"][:count] == np.asarray(sample.sc.ids).tolist()
        assert found["heads"][:count] == np.asarray(sample.sc.logprobs).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("mask", [True, False])
def test_workers_killed_with_their_job(stage: Stage, mask: bool) -> None:
    flags = {
        "rollout_function_path": "strawq_workers.slime.generate_rollout",
        "rollout_data_transport": "straw",
        "rollout_max_response_len": LENGTH,
        "sglang_server_concurrency": 2,  # one group at a time
        "rollout_save_tokens": 4,
        "partial_rollout": True,
        "mask_offpolicy_in_partial_rollout": mask,
        "use_rollout_routing_replay": True,
        "use_score_centering": True,
        "score_centering_top_k": 3,
    }
    engine, url = stage.engine(weight_version="1", tokens_per_second="20")
    job = stage.job({**flags, "rollout_engines": [url]}, rollouts=[0])
    stage.until("one group accepted, one in the middle", lambda now: now.ready == 1 and now.partial_leased == 1)
    job.process.kill()
    engine.kill()
    (accepted,) = stage.held(stage="ready")
    (partial,) = stage.held(stage="partial")
    tokens = [len(sample.tokens) for sample in partial.samples]
    assert all(0 < count < LENGTH for count in tokens), tokens

    engine, url = stage.engine(weight_version="2")
    job = stage.job({**flags, "rollout_engines": [url]}, rollouts=[0])
    (batch,) = job.done()["rollouts"]
    by_group = {group: [sample for sample in batch if sample["group"] == group] for group in (0, 1)}
    prompt = len(by_group[0][0]["tokens"]) - LENGTH
    same_start(accepted, by_group[0], prompt)
    same_start(partial, by_group[1], prompt)
    assert [sample["length"] for sample in batch] == [LENGTH] * 4
    for sample, count in zip(by_group[1], tokens, strict=True):
        assert sample["loss_mask"] == [int(not mask)] * count + [1] * (LENGTH - count)
        assert len(sample["routes"]) == prompt + LENGTH - 1
        assert len(sample["ids"]) == len(sample["heads"]) == LENGTH
    assert all(sample["loss_mask"] == [1] * LENGTH for sample in by_group[0])

    # Killed again while the batch is trained on: the same batch, though no engine is there to make one.
    job.process.kill()
    engine.kill()
    job = stage.job({**flags, "rollout_engines": [url]}, rollouts=[0], save=0)
    assert job.done()["rollouts"] == [batch]
    job.process.kill()
    engine, url = stage.engine(weight_version="2")
    job = stage.job({**flags, "rollout_engines": [url]}, after=0, rollouts=[1])
    (following,) = job.done()["rollouts"]
    assert {sample["group"] for sample in following} == {2, 3}


@pytest.mark.parametrize("mask", [True, False])
def test_a_stock_sampler_killed_with_its_job(stage: Stage, mask: bool) -> None:
    flags = {
        "rollout_batch_size": 1,
        "global_batch_size": 2,
        "over_sampling_batch_size": 2,
        "partial_rollout": True,
        "mask_offpolicy_in_partial_rollout": mask,
        "use_rollout_routing_replay": True,
        "use_score_centering": True,
    }
    job = stage.job(flags, rollouts=[0, 1], hang=1)
    assert job.process.first_line(WAIT_S) == "hanging"
    job.process.kill()
    (partial,) = stage.held(stage="partial")
    (accepted,) = stage.held(stage="ready")
    assert [len(sample.tokens) for sample in partial.samples] == [2, 2]

    job = stage.job(flags, rollouts=[0, 1], version="2")
    result = job.done()
    first, second = result["rollouts"]
    assert {sample["group"] for sample in first} == {0}
    assert {sample["group"] for sample in second} == {1}
    same_start(accepted, first, 2)
    same_start(partial, second, 2)
    assert [sample["loss_mask"] for sample in second] == ([[0, 0, 1, 1]] * 2 if mask else [None, None])
    # The accepted group was not generated again, and the other went on from its two tokens.
    assert [request for request in result["requests"] if request[0] < 4] == [[2, 2], [3, 2]]

    # The rollout that was delivered comes again as it was.
    job.process.kill()
    again = stage.job(flags, rollouts=[0, 1], version="3").done()
    assert again["rollouts"] == [first, second]
    assert [request for request in again["requests"] if request[0] < 4] == []
