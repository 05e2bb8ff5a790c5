"""The verb that fills a queue from files, exactly once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from strawq.cli.app import verb
from strawq.cli.options import PoolPath, QueueName, opened, pick_queue
from strawq.cli.output import Answer, plural, progress, say

if TYPE_CHECKING:
    from strawq.cli.input import Source
    from strawq.cli.submit_cursor import Cursor
    from strawq.queue import Queue
    from strawq.samples import Prompt

BATCH_BYTES = 8 << 20


@verb("submit")
def submit(
    pool: PoolPath,
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="JSONL or Parquet: paths, URLs, or - for stdin.")
    ],
    queue: QueueName = "",
    kind: Annotated[
        Literal["auto", "jsonl", "parquet"], typer.Option("--format", help="Format of the files.")
    ] = "auto",
    input_key: Annotated[
        str,
        typer.Option(
            "--input-key",
            metavar="KEY",
            show_default="prompt, text, messages, input_ids or tokens",
            help="Field of the prompt: text, chat messages or token ids.",
        ),
    ] = "",
    label_key: Annotated[
        str, typer.Option("--label-key", metavar="KEY", show_default=False, help="Field of the label.")
    ] = "",
    metadata_key: Annotated[
        str,
        typer.Option("--metadata-key", metavar="KEY", show_default=False, help="Field of an object to carry along."),
    ] = "",
    id_key: Annotated[
        str, typer.Option("--id-key", metavar="KEY", show_default=False, help="Field of your own group id.")
    ] = "",
    group_size: Annotated[
        int, typer.Option("--group-size", min=0, help="Answers wanted for each prompt (0: the worker's default).")
    ] = 0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out rows that are no prompts instead of refusing the file.")
    ] = False,
    producer: Annotated[
        str, typer.Option("--producer", metavar="NAME", show_default="one for each file", help="Whose cursor moves.")
    ] = "",
    again: Annotated[bool, typer.Option("--again", help="Submit files that are in the queue already.")] = False,
    seal: Annotated[bool, typer.Option("--seal", help="Seal the queue at the end.")] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, max=100_000, help="Prompts in one commit.")] = 2048,
) -> Answer:
    """Add the prompts of files to a queue, in order.

    All files are checked before the first prompt is submitted: a bad row is named by file and line, and refuses the
    whole command. Run again after a crash, the same command goes on where it stopped; run again after it was done, it
    adds nothing.
    """
    from strawq.cli.input import Keys, opened_source

    keys = Keys(input_key, label_key, metadata_key, id_key)
    with opened(pool) as open_pool, contextlib.ExitStack() as stack:
        chosen = pick_queue(open_pool, queue)
        sources = [stack.enter_context(opened_source(url, None if kind == "auto" else kind, keys)) for url in files]
        _require_good(sources, skip_bad)
        starts = _starts(chosen, sources, producer, again)
        reports = []
        for source, (name, _) in zip(sources, starts, strict=True):
            reports.append(_submit(chosen, source, name, bool(producer), again, group_size, batch))
        if seal:
            chosen.seal()
    data = {
        "queue": chosen.name,
        "submitted": sum(report["submitted"] for report in reports),
        "already": sum(report["already"] for report in reports),
        "skipped": sum(report["skipped"] for report in reports),
        "sealed": seal,
        "files": reports,
    }
    text = f"{plural(data['submitted'], 'prompt')} submitted to queue {chosen.name}"
    text += f", {plural(data['already'], 'row')} in already (--again submits them once more)" if data["already"] else ""
    text += f", {plural(data['skipped'], 'bad row')} skipped" if data["skipped"] else ""
    return Answer(data, text)


def _require_good(sources: list[Source], skip_bad: bool) -> None:
    from strawq.errors import BadInput

    for source in sources:
        if source.bad and not skip_bad:
            first, others = source.bad[0], source.bad_count - 1
            more = f" ({plural(others, 'further bad row')})" if others else ""
            raise BadInput(
                f"{first.place}: {first.reason}{more}; nothing was submitted: mend the file, or leave bad rows out "
                "with --skip-bad"
            )
        if source.bad_count == source.rows:
            raise BadInput(f"{source.url} has no row that is a prompt ({source.bad[0].place}: {source.bad[0].reason})")
        for row in source.bad:
            say(f"skipped {row.place}: {row.reason}")
        if source.bad_count > len(source.bad):
            say(f"skipped {source.bad_count - len(source.bad)} further rows of {source.url}")


def _starts(queue: Queue, sources: list[Source], producer: str, again: bool) -> list[tuple[str, str]]:
    """Each file's producer and its digest. Everything that can be refused is refused here, before the first
    commit."""
    from strawq.cli import submit_cursor as sc
    from strawq.core.names import require_name
    from strawq.errors import BadInput

    if producer:
        require_name(producer, "producer")
    producers = queue.pool.inspect().queues[queue.name].producers
    starts = [(producer or sc.default_producer(source.url, source.digest), source.digest) for source in sources]
    for source, (name, digest) in zip(sources, starts, strict=True):
        cursor = sc.decode(producers.get(name, ""))
        if producers.get(name) and cursor is None:
            raise BadInput(f"producer {name} keeps a cursor that `strawq submit` did not write; choose another name")
        if again and cursor is not None and not cursor.complete and (name, cursor.file) in starts:
            raise BadInput(
                f"producer {name} has {cursor.row} of {cursor.rows} rows of this file in the queue; finish it first, "
                "by the same command without --again"
            )
        if len([start for start in starts if start == (name, digest)]) > 1 or (
            not producer and [start[1] for start in starts].count(digest) > 1
        ):
            raise BadInput(f"{source.url} is named twice, or its content is; one submission takes it once")
        if not again:
            sc.require_new(digest, source.url, name, producers)
            if not producer:
                sc.begin(cursor, source.url, digest, source.rows, producer=name, own=True, again=False)
    return starts


def _submit(
    queue: Queue, source: Source, producer: str, shared: bool, again: bool, group_size: int, batch: int
) -> dict[str, Any]:
    """Submit what of the file is not in yet; returns what to tell of it."""
    from strawq.cli import submit_cursor as sc

    before = queue.cursor(producer)
    start = sc.begin(
        sc.decode(before), source.url, source.digest, source.rows, producer=producer, own=not shared, again=again
    )
    report = {"file": source.url, "producer": producer, "rows": source.rows, "skipped": source.bad_count}
    if start is None:
        return {**report, "submitted": 0, "already": source.rows}
    submitted = 0
    parts = _parts(source, start.row, group_size, batch)
    for prompts, row in _with_progress(parts, source, start):
        source.require_unchanged()
        cursor = sc.encode(sc.Cursor(start.file, row, start.rows, start.done))
        queue.submit(prompts, producer=producer, cursor=cursor, expect=before)
        before = cursor
        submitted += len(prompts)
    return {**report, "submitted": submitted, "already": start.row}


def _with_progress(
    parts: Iterator[tuple[list[Prompt], int]], source: Source, start: Cursor
) -> Iterator[tuple[list[Prompt], int]]:
    rows: list[int] = []

    def prompts() -> Iterator[list[Prompt]]:
        for part, row in parts:
            rows.append(row)
            yield part

    for part in progress(prompts(), source.rows, source.url, start.row):
        yield part, rows.pop()


def _parts(source: Source, first: int, samples: int, batch: int) -> Iterator[tuple[list[Prompt], int]]:
    """Batches of prompts from row `first` on, each with the rows of the file that are in after it. The last one takes
    the bad rows behind it along."""
    from strawq.cli.input import BadRow, to_prompt
    from strawq.errors import BadInput

    part: list[Prompt] = []
    held = 0
    for number, (place, row) in enumerate(source.read()):
        if number < first or isinstance(row, BadRow):
            continue
        try:
            prompt = to_prompt(row, source.keys, samples, place)
        except BadInput:
            continue  # counted and named when the file was checked
        if part and (len(part) >= batch or held >= BATCH_BYTES):
            yield part, number
            part, held = [], 0
        part.append(prompt)
        held += len(prompt.text or "") + (0 if prompt.tokens is None else prompt.tokens.nbytes) + _size(prompt)
    if part:
        yield part, source.rows


def _size(prompt: Prompt) -> int:
    """About how many bytes the free-form values take."""
    return 200 + sum(len(str(message)) for message in prompt.messages or ()) + 20 * len(prompt.metadata)
