"""The version of a task is that of the oldest token it has now, not of one it ever had."""

from __future__ import annotations

from strawq.core.machine import Machine
from strawq.model import VersionSpan
from strawq.queue import Change, Queue
from strawq.samples import Group, Prompt, Sample
from strawq.testing.worlds import World


def _sample(*versions: str) -> Sample:
    spans = tuple(VersionSpan(at, at + 1, version) for at, version in enumerate(versions))
    tokens = list(range(len(versions)))
    return Sample(0, tokens=tokens, logprobs=[-1.0] * len(versions), versions=spans, status="aborted")  # type: ignore[arg-type]


def test_a_group_that_was_generated_anew_is_as_young_as_its_tokens() -> None:
    queue = World().process().queue()
    queue.submit([Prompt(text="p")])
    work = queue.open(queue.acquire(1).leases[0])
    grown = [("3",), ("3", "5")]
    for versions in grown:
        queue.save(work, Group(work.task, work.group.prompt, (_sample(*versions),)))
        assert _version(queue, work.task) == 3
    anew = Group(work.task, work.group.prompt, (_sample("6"),))
    queue.report([Change(work, "save", anew, rewrite=True)])
    assert _version(queue, work.task) == 6
    queue.yield_(work)
    assert _version(queue, work.task) == 6, "a report that adds nothing changes nothing"


def _version(queue: Queue, task: str) -> int:
    def look(machine: Machine) -> int:
        rows = [row for row in machine.state.branch.queues["rollout"].tasks.values() if row.id == task]
        return rows[0].version

    version: int = queue.pool.log.refresh(look)
    return version
