"""Verbs about what a pool keeps: checkpoints, rollbacks, branches."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strawq.cli.app import verb
from strawq.cli.options import Bindings, PoolPath, RequestId, once, opened, read_bindings
from strawq.cli.output import Answer, plural, table

if TYPE_CHECKING:
    from strawq.core.events import RolledBack
    from strawq.rollback_plan import QueueChange, RollbackPlan


@verb("checkpoint")
def checkpoint(
    pool: PoolPath,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the checkpoint.", show_default=False)] = "",
    metadata: Annotated[
        str, typer.Option("--metadata", metavar="JSON", show_default=False, help="A JSON object kept with it.")
    ] = "",
    bind: Bindings = [],  # noqa: B006 (typer copies it)
    show: Annotated[bool, typer.Option("--list", help="Show the checkpoints instead.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Drop the checkpoint NAME instead.")] = False,
    request_id: RequestId = "",
) -> Answer:
    """Give all that is live at this log position a name.

    --bind ties it to files of the same training step (a model checkpoint's manifest), which `rollback --bind` checks.
    """
    from strawq.errors import BadInput

    if show + delete > 1 or (show and (name or request_id)) or ((show or delete) and (metadata or bind)):
        raise BadInput("--list stands alone, and --delete takes a name and nothing else")
    if not show and not name:
        raise BadInput("name the checkpoint (or use --list)")
    if show:
        return _list_checkpoints(pool)
    if delete:
        with opened(pool) as open_pool:
            once(open_pool, request_id, lambda request: open_pool.drop_checkpoint(name, request_id=request))
        return Answer({"deleted": name}, f"checkpoint {name} is dropped; garbage collection frees what only it kept")
    extra, bindings = _metadata(metadata), read_bindings(bind)
    with opened(pool) as open_pool:
        seq = once(
            open_pool, request_id, lambda request: open_pool.checkpoint(name, extra, bindings, request_id=request)
        )
    return Answer({"checkpoint": name, "seq": seq, "bindings": bindings}, f"checkpoint {name} at log position {seq}")


def _metadata(text: str) -> dict[str, Any] | None:
    import msgspec

    from strawq.errors import BadInput

    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadInput(f"--metadata is not a JSON object: {error}") from error


def _list_checkpoints(pool: str) -> Answer:
    import msgspec

    with opened(pool) as open_pool:
        found = open_pool.checkpoints()
    data = [
        {
            "name": point.name,
            "branch": point.branch,
            "seq": point.seq,
            "policy_version": point.policy_version,
            "time_ms": point.time_ms,
            "metadata": msgspec.Raw(point.metadata.encode()) if point.metadata else None,
            "bindings": dict(point.bindings),
        }
        for point in found
    ]
    rows = [(p.name, p.branch, p.seq, p.policy_version, _when(p.time_ms)) for p in found]
    text = table(("checkpoint", "branch", "seq", "policy version", "taken"), rows) if rows else "no checkpoint"
    return Answer({"checkpoints": data}, text)


def _when(time_ms: int) -> str:
    moment = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.timezone.utc)
    return moment.isoformat(" ", "seconds")


@verb("rollback")
def rollback(
    pool: PoolPath,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A checkpoint, or a branch that was left.")],
    branch: Annotated[str, typer.Option("--branch", show_default=False, help="Name of the new branch.")] = "",
    bind: Bindings = [],  # noqa: B006 (typer copies it)
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    request_id: RequestId = "",
) -> Answer:
    """Go on from a checkpoint on a new branch. Every lease of the branch that is left ends; nothing is deleted.

    With --bind NAME=FILE it is refused unless the checkpoint was bound to files of the same content.
    """
    from strawq.core.commands import Rollback
    from strawq.errors import BadInput
    from strawq.rollback_plan import plan_rollback

    if dry_run and request_id:
        raise BadInput("--dry-run changes nothing: leave --request-id out")
    bindings = read_bindings(bind)
    with opened(pool) as open_pool:
        if dry_run:
            plan: RollbackPlan = open_pool.log.refresh(
                lambda machine: plan_rollback(machine.state, target, bindings, branch)
            )
            return Answer({**_rolled(True, plan.branch, target, plan.left, plan.paused), "plan": plan}, _describe(plan))

        def roll(request: str) -> RolledBack:
            pairs = tuple(bindings.items())
            made: RolledBack = open_pool.commit(Rollback(request=request, target=target, branch=branch, bindings=pairs))
            return made

        made = once(open_pool, request_id, roll)
    data = _rolled(False, made.branch, target, made.left, made.paused)
    text = f"branch {made.branch} goes on from {target}; {made.left} is left as it is"
    return Answer(data, text + f"; admission stays paused until `strawq resume {pool}`" * made.paused)


def _rolled(dry_run: bool, branch: str, target: str, left: str, paused: bool) -> dict[str, Any]:
    return {"dry_run": dry_run, "branch": branch, "target": target, "left": left, "paused": paused}


def _describe(plan: RollbackPlan) -> str:
    from strawq.inspection import TaskCounts

    rows = []
    for name, queue in plan.queues.items():
        for field in TaskCounts.__struct_fields__:
            now, then = (getattr(counts, field) if counts else None for counts in (queue.now, queue.then))
            if now != then:
                rows.append((name, field, now, then))
    head = (
        f"{plan.branch} would go on from {plan.target} (log position {plan.base_seq}); {plan.left} would be left at "
        f"{plan.head_seq}\npolicy version {plan.version_now or '-'} -> {plan.version_then or '-'}; leases and batches "
        f"that would end: {plan.leases_ended}"
    )
    lines = [_describe_change(name, queue, plan.version_then) for name, queue in plan.queues.items()]
    return (
        "\n".join((head, *lines))
        + "\n\n"
        + (table(("queue", "tasks", "now", "then"), rows) if rows else "no count would change")
    )


def _describe_change(name: str, queue: QueueChange, version: str) -> str:
    from strawq.model import UNVERSIONED, policy_number

    text = (
        f"queue {name}: {plural(queue.brought_back, 'group')} brought back, {queue.set_aside} set aside with what they "
        f"have now, {plural(queue.prefixes, 'prefix')} kept ({plural(queue.prefix_tokens, 'token')})"
    )
    served = policy_number(version)
    if queue.oldest_version is not None and served != UNVERSIONED:
        text += f"; the oldest token would be {plural(served - queue.oldest_version, 'version')} behind"
    return text


@verb("branch")
def branch(
    pool: PoolPath,
    show: Annotated[bool, typer.Option("--list", help="Show the branches (as without any option).")] = False,
    delete: Annotated[
        str, typer.Option("--delete", metavar="NAME", show_default=False, help="Drop a branch that was left.")
    ] = "",
    request_id: RequestId = "",
) -> Answer:
    """Show the branches of a pool, or drop one that was left."""
    from strawq.errors import BadInput

    if show and (delete or request_id):
        raise BadInput("--list stands alone")
    if request_id and not delete:
        raise BadInput("--request-id goes with --delete: a look changes nothing")
    with opened(pool) as open_pool:
        if delete:
            once(open_pool, request_id, lambda request: open_pool.drop_branch(delete, request_id=request))
            return Answer(
                {"deleted": delete}, f"branch {delete} is dropped; garbage collection frees what only it kept"
            )
        branches = open_pool.inspect().branches
    rows = [(b.name, b.active, b.parent, b.source, b.base_seq, b.left_seq) for b in branches]
    return Answer({"branches": branches}, table(("branch", "active", "parent", "from", "base seq", "left at"), rows))
