"""Verbs that keep groups beyond their consumption, or take them elsewhere: archives and exports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strawq.cli.app import group, verb
from strawq.cli.options import PoolPath, QueueName, once, opened, pick_queue
from strawq.cli.output import Answer, plural, progress, table

if TYPE_CHECKING:
    from strawq.samples import Group

group("archive", "Keep groups beyond their consumption.")

ArchiveName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the archive.", show_default=False)]


@verb("save", under="archive")
def save(
    pool: PoolPath,
    name: ArchiveName,
    queue: QueueName = "",
    task: Annotated[
        list[str], typer.Option("--task", metavar="ID", show_default=False, help="A live task (else: all ready ones).")
    ] = [],  # noqa: B006 (typer copies it)
    to: Annotated[
        str, typer.Option("--to", metavar="URL", show_default=False, help="Also write it there, self-contained.")
    ] = "",
) -> Answer:
    """Keep groups as they are now, within the pool.

    They are kept by reference; with --to also as files at any fsspec URL. With --to, an archive of that name that is
    there already is written as it is, and one that cannot be written there is not kept in the pool either.
    """
    from strawq.archives import delete_archive, list_archives, require_no_archive, save_archive, write_archive
    from strawq.export import live_groups

    with opened(pool) as open_pool, ExitStack() as undo:
        if to:
            require_no_archive(to)
        found = [archive for archive in list_archives(open_pool) if archive.name == name]
        if found and to and not task:
            archive = found[0]
        else:
            picked = pick_queue(open_pool, queue).name
            tasks = task or [held.task.id for held in live_groups(open_pool, picked, ready=True)]
            archive = once(
                open_pool, None, lambda request: save_archive(open_pool, name, picked, tasks, request_id=request)
            )
            undo.callback(once, open_pool, None, lambda request: delete_archive(open_pool, name, request_id=request))
        if to:
            write_archive(open_pool, name, to)
        undo.pop_all()
    count = len(archive.tasks)
    data = {"archive": name, "queue": archive.queue, "groups": count, "seq": archive.seq, "url": to}
    return Answer(
        data, f"archive {name} keeps {plural(count, 'group')} of {archive.queue}{f', also at {to}' if to else ''}"
    )


@verb("ls", under="archive")
def ls(pool: PoolPath) -> Answer:
    """Show the archives of a pool."""
    from strawq.archives import list_archives

    with opened(pool) as open_pool:
        archives = list_archives(open_pool)
    data = [
        {
            "name": a.name,
            "queue": a.queue,
            "branch": a.branch,
            "seq": a.seq,
            "groups": len(a.tasks),
            "time_ms": a.time_ms,
        }
        for a in archives
    ]
    rows = [(a.name, a.queue, a.branch, a.seq, len(a.tasks)) for a in archives]
    text = table(("archive", "queue", "branch", "seq", "groups"), rows) if rows else "no archive"
    return Answer({"archives": data}, text)


@verb("rm", under="archive")
def rm(pool: PoolPath, name: ArchiveName) -> Answer:
    """Delete an archive of a pool."""
    from strawq.archives import delete_archive

    with opened(pool) as open_pool:
        once(open_pool, None, lambda request: delete_archive(open_pool, name, request_id=request))
    return Answer({"deleted": name}, f"archive {name} is deleted; garbage collection frees what only it kept")


@verb("load", under="archive")
def load(
    source: Annotated[str, typer.Argument(metavar="POOL|URL", help="A pool, or a self-contained archive.")],
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Archive of that pool.", show_default=False)] = "",
    out: Annotated[str, typer.Option("--out", metavar="FILE", show_default=False, help="Write JSON lines here.")] = "",
) -> Answer:
    """Read an archive, checking every digest, as one JSON line per group."""
    import msgspec

    from strawq.archives import MANIFEST, load_archive, open_archive
    from strawq.errors import BadInput
    from strawq.export import group_values
    from strawq.remote import exists
    from strawq.storage import layout

    if name and exists(source, MANIFEST):
        raise BadInput(f"{source} is one archive, self-contained: leave {name!r} out")
    with ExitStack() as stack:
        groups: Iterator[Group]
        if name or exists(source, layout.HEADER):
            groups = load_archive(stack.enter_context(opened(source)), name)
        else:
            groups = stack.enter_context(open_archive(source))
        records = (group_values(item) for item in progress(groups, 0, "groups"))
        if not out:
            kept: list[dict[str, Any]] = list(records)
            lines = "".join(msgspec.json.encode(record).decode() + "\n" for record in kept)
            return Answer({"groups": len(kept), "records": kept}, lines)
        count = _write(out, records)
    return Answer({"groups": count, "out": out}, f"{plural(count, 'group')} written to {out}")


def _write(out: str, records: Iterator[dict[str, Any]]) -> int:
    """JSON lines to a path or URL; it appears whole or not at all."""
    import msgspec

    from strawq.remote import create_remote

    count = 0
    with create_remote(out) as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")
            count += 1
    return count


@verb("export")
def export(
    pool: PoolPath,
    url: Annotated[str, typer.Argument(metavar="URL.parquet", help="A path, or any fsspec URL.")],
    queue: QueueName = "",
    what: Annotated[
        str, typer.Option("--what", metavar="ready|all", help="Groups ready for a batch, or all live ones.")
    ] = "ready",
    archive: Annotated[
        str, typer.Option("--archive", metavar="NAME", show_default=False, help="The groups of an archive instead.")
    ] = "",
) -> Answer:
    """Write groups as a Parquet file. Each sample is a row; nothing is consumed."""
    from strawq.archives import load_archive
    from strawq.errors import BadInput
    from strawq.export import export_queue, write_parquet

    if what not in ("ready", "all"):
        raise BadInput(f"--what is ready or all, not {what!r}")
    if archive and queue:
        raise BadInput("an archive is of one queue: leave --queue out")
    with opened(pool) as open_pool:
        if archive:
            done = write_parquet(load_archive(open_pool, archive), url)
        else:
            done = export_queue(open_pool, pick_queue(open_pool, queue).name, url, ready=what == "ready")
    return Answer(done, f"{plural(done.groups, 'group')}, {plural(done.rows, 'row')} written to {url}")
