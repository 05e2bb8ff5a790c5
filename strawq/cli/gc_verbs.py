"""The verb that frees space: garbage, old log entries, superseded snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from strawq.cli.app import verb
from strawq.cli.options import PoolPath, opened, placed
from strawq.cli.output import Answer, plural, say, size, table
from strawq.limits import TRIM_ENTRIES

if TYPE_CHECKING:
    from strawq.garbage import Collected, Plan
    from strawq.merging import Merging
    from strawq.pool import Pool
    from strawq.retention import Reason
    from strawq.trimming import Trimmed


@verb("gc")
def gc(
    pool: PoolPath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show why each retained byte is retained.")] = False,
    keep_entries: Annotated[
        int, typer.Option("--keep-entries", min=0, help="Newest log entries that stay readable as history.")
    ] = TRIM_ENTRIES,
    no_merge: Annotated[bool, typer.Option("--no-merge", help="Leave small files as they are.")] = False,
) -> Answer:
    """Remove what nothing reaches, and merge small files.

    Log entries behind the snapshots and superseded snapshots go too. Files are merged when enough of them hold little
    live data; the old ones go with the next collection.

    It may run at any time, beside any number of workers, and be interrupted anywhere. Files that strawq did not write
    are left and reported.
    """
    from strawq.garbage import collect_garbage
    from strawq.retention import by_reason, retained

    with opened(pool) as open_pool:
        plan, done = collect_garbage(open_pool, dry_run=dry_run)
        trimmed, unfinished = _trim(open_pool, keep_entries, dry_run)
        merged, unmerged = (None, ()) if no_merge else _merge(open_pool, dry_run)
        told = (*done.unfinished, *unfinished, *(trimmed.unfinished if trimmed else ()), *unmerged)
        unfinished = tuple(placed(sentence, pool) for sentence in told)
        kept = retained(open_pool) if explain else ()
    files = len(plan.removals) if dry_run else done.files
    freed = sum(removal.bytes for removal in plan.removals) if dry_run else done.bytes
    data: dict[str, Any] = {
        "dry_run": dry_run,
        "files": files,
        "bytes": freed,
        "by_reason": _planned(plan) if dry_run else done.by_reason,
        "kept_files": done.kept_files,
        "kept_bytes": done.kept_bytes,
        "closed_epoch": done.closed_epoch,
        "log": trimmed,
        "merged": merged,
        "unknown": done.unknown,
        "unfinished": unfinished,
    }
    if dry_run:
        data["removals"] = plan.removals
    reasons = by_reason(kept)
    if explain:
        data["retained"] = kept
        data["retained_by"] = reasons
    for sentence in unfinished:
        say(sentence)
    return Answer(data, _text(data, plan, done, trimmed, merged, reasons), exit_code=6 if unfinished else 0)


def _trim(pool: Pool, keep_entries: int, dry_run: bool) -> tuple[Trimmed | None, tuple[str, ...]]:
    """What went wrong with the log is told, not raised: what was collected is reported, and files are merged."""
    from strawq.errors import StrawqError
    from strawq.trimming import trim_log

    try:
        return trim_log(pool, keep_entries=keep_entries, dry_run=dry_run), ()
    except StrawqError as error:
        return None, (f"the log is not trimmed: {error}",)


def _merge(pool: Pool, dry_run: bool) -> tuple[Merging | None, tuple[str, ...]]:
    """As for trimming."""
    from strawq.errors import StrawqError
    from strawq.merging import merge_objects

    try:
        return merge_objects(pool, dry_run=dry_run), ()
    except StrawqError as error:
        return None, (f"small files are not merged: {error}",)


def _planned(plan: Plan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for removal in plan.removals:
        counts[removal.why] = counts.get(removal.why, 0) + 1
    return counts


def _text(
    data: dict[str, Any],
    plan: Plan,
    done: Collected,
    trimmed: Trimmed | None,
    merged: Merging | None,
    reasons: tuple[Reason, ...],
) -> str:
    would = "would be " if data["dry_run"] else ""
    lines = [f"{plural(data['files'], 'file')} ({size(data['bytes'])}) {would}removed"]
    lines += [f"  {count} {why}" for why, count in sorted(data["by_reason"].items())]
    if data["dry_run"]:
        lines += [f"  {removal.path} ({size(removal.bytes)}): {removal.why}" for removal in plan.removals]
    if trimmed is not None:
        begins = f"history begins at entry {trimmed.floor}" if trimmed.floor else "history is whole"
        lines.append(
            f"{trimmed.entries} log entries and {plural(trimmed.snapshots, 'snapshot')} {would}removed; {begins}"
        )
    if merged is not None and merged.files:
        lines.append(
            f"{plural(merged.files, 'small file')} ({size(merged.bytes)} live) {would or 'were '}merged into "
            f"{'about ' if would else ''}{merged.into}; the next collection removes the old ones"
        )
    lines.append(f"{plural(done.kept_files, 'file')} ({size(done.kept_bytes)}) kept, epoch {done.closed_epoch} closed")
    lines += [f"left alone, not written by strawq: {path}" for path in done.unknown]
    if reasons:
        rows = [(r.reason, r.objects, size(r.bytes), size(r.only_bytes)) for r in reasons]
        lines += ["", table(("kept by", "objects", "bytes", "by this alone"), rows)]
    return "\n".join(lines)
