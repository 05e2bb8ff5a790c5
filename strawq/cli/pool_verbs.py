"""Verbs about a pool as a whole: make one, look at one, qualify a mount, pause, resume, seal, sessions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from strawq.cli.app import group, verb
from strawq.cli.options import PoolPath, QueueName, RequestId, once, opened, pick_queue
from strawq.cli.output import Answer, one_line, plural, say, size, table

if TYPE_CHECKING:
    from strawq.inspection import Inspection
    from strawq.storage.probe import ProbeReport

AcceptWriteback = Annotated[
    bool,
    typer.Option(
        "--accept-writeback", help="Take JuiceFS writeback for granted: accepted results die with this host's disk."
    ),
]

group("sessions", "Show the processes of a pool, or take one for dead.")


@verb("init")
def init(
    pool: PoolPath,
    run_id: Annotated[str, typer.Option("--run-id", help="Name of the training run.")] = "rollout",
    queue: Annotated[
        list[str], typer.Option("--queue", "-q", metavar="NAME", show_default="rollout", help="Queue; may be repeated.")
    ] = [],  # noqa: B006 (typer copies it)
    profile: Annotated[
        Literal["local", "juicefs"], typer.Option("--profile", help="Storage: local, or a shared JuiceFS mount.")
    ] = "local",
    declaration: Annotated[
        str, typer.Option("--declaration", metavar="FILE", show_default=False, help="What the mount is meant to be.")
    ] = "",
    peer: Annotated[
        str, typer.Option("--peer", metavar="DIR", show_default=False, help="Same directory through a second client.")
    ] = "",
    accept_writeback: AcceptWriteback = False,
    force: Annotated[bool, typer.Option("--force", help="Use an unfit mount; the pool remembers why it is.")] = False,
) -> Answer:
    """Make a pool in a new directory, after probing its mount.

    A mount that is unfit for a commit log is refused (exit code 6). --declaration names a JSON file that says what the
    mount is meant to be; it is held against what the probe reads from the mount, and both are kept in the pool.
    """
    from strawq.errors import BadInput
    from strawq.making import make_pool
    from strawq.pool import DEFAULT_QUEUE

    names = queue or [DEFAULT_QUEUE]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"--queue names {', '.join(twice)} twice; name each queue once")
    made, report = make_pool(
        pool,
        run_id=run_id,
        queues=names,
        profile=profile,
        declaration=declaration,
        measure=lambda root: _probe(root, peer, accept_writeback),
        force=force,
        way_out=" (--force makes it nevertheless)",
    )
    for warning in report.warnings:
        say(f"warning: {warning}")
    with made:
        header = made.header
        data = {
            "pool": made.path,
            "pool_id": header.pool_id,
            "run_id": header.run_id,
            "queues": made.queues(),
            "storage_profile": header.storage_profile,
            "exclusive_create": header.exclusive_create,
            "verdict": report.verdict,
            "warnings": report.warnings,
            "forced": list(header.forced),
        }
    return Answer(data, f"pool {data['pool']} is ready: run {run_id}, {plural(len(names), 'queue')} {', '.join(names)}")


def _probe(directory: Path, peer: str, accept_writeback: bool) -> ProbeReport:
    from strawq.storage.probe import probe as measure

    return measure(directory, peer or None, accept_writeback=accept_writeback)


@verb("probe")
def probe(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="On the mount in question.")],
    peer: Annotated[
        str, typer.Option("--peer", metavar="DIR", show_default=False, help="Same directory through a second client.")
    ] = "",
    accept_writeback: AcceptWriteback = False,
) -> Answer:
    """Measure whether a mount does what a pool needs. Exit code 6 if it does not."""
    report = _probe(Path(directory), peer, accept_writeback)
    lines = [f"{report.directory} ({report.mount.fs_type}): {report.verdict.replace('_', ' ')}"]
    for label, texts in (("unfit", report.reasons), ("warning", report.warnings), ("note", report.notes)):
        lines += [f"  {label}: {text}" for text in texts]
    lines += [f"  {name} = {'not measured' if value is None else value}" for name, value in report.measured.items()]
    return Answer(report, "\n".join(lines), 6 if report.verdict == "unfit" else 0)


@verb("inspect")
def inspect(pool: PoolPath, queue: QueueName = "") -> Answer:
    """Show what a pool holds: tasks, sessions, objects.

    Counts are of one log position. Exit code 1 if an entry of the log is damaged: what is whole is shown, and the
    damage is named.
    """
    import msgspec

    with opened(pool) as open_pool:
        if queue:
            pick_queue(open_pool, queue)
        view = open_pool.inspect()
        path = open_pool.path
    if queue:
        view = msgspec.structs.replace(view, queues={queue: view.queues[queue]})
    return Answer(view, describe(view, path), 1 if view.damage else 0)


def describe(view: Inspection, path: str) -> str:
    """An inspection for people."""
    state = f"paused ({one_line(view.paused.reason) or 'no reason given'})" if view.paused else "open"
    parts = [
        f"{path}  run {view.run_id}  format {view.format_version}\n"
        f"branch {view.branch}  head {view.head_seq}  policy version {view.policy_version or '-'}  admission {state}"
    ]
    columns = (
        "queue",
        "fresh",
        "fresh leased",
        "partial",
        "partial leased",
        "ready",
        "in batch",
        "trained",
        "dropped",
        "failed",
        "total",
    )
    parts.append(
        table(
            columns,
            [
                (
                    name + (" (sealed)" if queue.sealed else ""),
                    queue.tasks.fresh_pending, queue.tasks.fresh_leased, queue.tasks.partial_pending,
                    queue.tasks.partial_leased, queue.tasks.ready, queue.tasks.in_batch, queue.tasks.trained,
                    queue.tasks.dropped, queue.tasks.failed, queue.tasks.total,
                )
                for name, queue in view.queues.items()
            ],
        )
    )  # fmt: skip
    if view.sessions:
        rows = [(s.id, s.host, s.pid, s.role, s.state, s.leases, s.batches) for s in view.sessions]
        parts.append(table(("session", "host", "pid", "role", "state", "leases", "batches"), rows))
    if view.checkpoints:
        points = [(p.name, p.branch, p.seq, p.policy_version) for p in view.checkpoints]
        parts.append(table(("checkpoint", "branch", "seq", "policy version"), points))
    if len(view.branches) > 1:
        branches = [(b.name, b.active, b.parent, b.source, b.base_seq) for b in view.branches]
        parts.append(table(("branch", "active", "parent", "from", "base seq"), branches))
    objects = view.objects
    parts.append(
        f"objects: {plural(objects.files, 'file')}, {size(objects.bytes)}; in the log: {objects.inline}, "
        f"{size(objects.inline_bytes)}"
    )
    parts += [f"damaged: {damage}" for damage in view.damage]
    return "\n\n".join(parts)


@verb("publish-version")
def publish_version(
    pool: PoolPath,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Policy version now served.")],
    request_id: RequestId = "",
) -> Answer:
    """Record the policy version that the engines serve now. It never goes back, except by a rollback."""
    with opened(pool) as open_pool:
        once(open_pool, request_id, lambda request: open_pool.publish_version(version, request_id=request))
        return _standing(open_pool.inspect())


@verb("pause")
def pause(
    pool: PoolPath,
    reason: Annotated[str, typer.Option("--reason", show_default=False, help="Shown to those that wait.")] = "",
    request_id: RequestId = "",
) -> Answer:
    """Stop admission everywhere until `resume`. Leases are kept."""
    with opened(pool) as open_pool:
        once(open_pool, request_id, lambda request: open_pool.pause(reason, request_id=request))
        return _standing(open_pool.inspect())


@verb("resume")
def resume(
    pool: PoolPath,
    version: Annotated[
        str, typer.Option("--policy-version", show_default=False, help="New policy version, in the same step.")
    ] = "",
    request_id: RequestId = "",
) -> Answer:
    """Let admission go on."""
    with opened(pool) as open_pool:
        once(open_pool, request_id, lambda request: open_pool.resume(version or None, request_id=request))
        return _standing(open_pool.inspect())


def _standing(view: Inspection) -> Answer:
    data = {"policy_version": view.policy_version, "paused": view.paused, "branch": view.branch}
    state = "paused" if view.paused else "open"
    return Answer(data, f"policy version {view.policy_version or '-'}, admission {state} (branch {view.branch})")


@verb("seal")
def seal(
    pool: PoolPath,
    queue: QueueName = "",
    unseal: Annotated[bool, typer.Option("--open", help="Take prompts again.")] = False,
) -> Answer:
    """Say that no further prompts will come. The last batch may be smaller, and workers end when work does."""
    with opened(pool) as open_pool:
        chosen = pick_queue(open_pool, queue)
        once(open_pool, None, lambda request: chosen.seal(not unseal, request_id=request))
    return Answer(
        {"queue": chosen.name, "sealed": not unseal}, f"queue {chosen.name} is {'open' if unseal else 'sealed'}"
    )


@verb("list", under="sessions")
def list_sessions(pool: PoolPath) -> Answer:
    """Show the live sessions of a pool and what they hold."""
    with opened(pool) as open_pool:
        sessions = open_pool.inspect().sessions
    rows = [(s.id, s.host, s.pid, s.role, s.state, s.leases, s.batches) for s in sessions]
    text = table(("session", "host", "pid", "role", "state", "leases", "batches"), rows) if rows else "no live session"
    return Answer({"sessions": sessions}, text)


@verb("expire", under="sessions")
def expire_session(
    pool: PoolPath,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="Its id, as `sessions list` shows it.")],
    reason: Annotated[str, typer.Option("--reason", help="Kept in the log.")] = "expired by an operator",
) -> Answer:
    """Take a session for dead: what it holds goes to others. Nothing of it will be accepted from then on."""
    with opened(pool) as open_pool:
        open_pool.expire_session(session, reason)
    return Answer({"expired": session}, f"session {session} is expired; its leases and batches are free")
