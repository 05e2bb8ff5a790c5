"""How to go on without objects that cannot be read: commands that work as they stand, with the pool for POOL."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from strawq.core.state import State

TASKS_NAMED = 100
"""So many tasks of a queue fit into one command; a record has up to some thousands."""


def tasks_by_object(state: State) -> dict[str, dict[str, list[str]]]:
    """The groups of the active branch that need each object, by queue."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in state.branch.queues:
        for task in state.branch.queues[name].tasks.values():
            for digest in dict.fromkeys(part.object for part in task.parts):
                found.setdefault(digest, {}).setdefault(name, []).append(task.id)
    return found


def way_on(state: State, digests: Collection[str], tasks: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """How to go on without these objects: one command for each queue ends the groups of the active branch that need any
    of them, and others give up what else keeps them. `tasks`: those of `tasks_by_object`."""
    lost = set(digests)
    roots = [
        *(
            f"`strawq checkpoint POOL {point.name} --delete`"
            for point in state.checkpoints.values()
            if not lost.isdisjoint(point.objects)
        ),
        *(
            f"`strawq branch POOL --delete {row.id}`"
            for row in state.branches.values()
            if not lost.isdisjoint(row.objects)
        ),
        *(
            f"`strawq archive rm POOL {row.name}`"
            for row in state.archives.values()
            if not lost.isdisjoint(row.objects)
        ),
    ]
    by_queue: dict[str, dict[str, None]] = {}
    for digest in digests:
        for name, ids in tasks.get(digest, {}).items():
            by_queue.setdefault(name, {}).update(dict.fromkeys(ids))
    ends = [_drop(name, list(ids)) for name, ids in by_queue.items()]
    fresh = any(
        submission.object in lost
        for name in state.branch.queues
        for submission in state.branch.queues[name].submissions.values()
    )
    return (
        "restore the file from a copy"
        + (f", or end the groups that need it: {', '.join(ends)}" if ends else "")
        + (f"{', and' if ends else ', or'} give up what keeps it: {', '.join(roots)}" if roots else "")
        + (", or let workers try its fresh prompts: they become dead letters, which can be dropped" if fresh else "")
    )


def _drop(queue: str, tasks: Sequence[str]) -> str:
    tasks = sorted(tasks, key=lambda task: [int(part) for part in task.split("-")])
    command = f"`strawq drop POOL -q {queue} --reason damaged {' '.join(tasks[:TASKS_NAMED])}`"
    more = len(tasks) - TASKS_NAMED
    return f"{command} (asked again after that, it names {more} more)" if more > 0 else command
