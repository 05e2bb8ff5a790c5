"""The verb that makes and configures queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from strawq.cli.app import verb
from strawq.cli.options import PoolPath, opened
from strawq.cli.output import Answer

if TYPE_CHECKING:
    from strawq.core.machine import Machine


@verb("queue")
def queue(
    pool: PoolPath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the queue.", show_default=False)],
    max_attempts: Annotated[
        int | None,
        typer.Option("--max-attempts", min=1, show_default=False, help="Reported failures until a dead letter."),
    ] = None,
    max_expirations: Annotated[
        int | None,
        typer.Option("--max-expirations", min=1, show_default=False, help="Lost leases until a dead letter."),
    ] = None,
    max_ready: Annotated[
        int | None,
        typer.Option(
            "--max-ready",
            min=0,
            show_default=False,
            help="Begun and not taken groups; then no fresh one (0: no bound).",
        ),
    ] = None,
    max_leased: Annotated[
        int | None,
        typer.Option(
            "--max-leased", min=0, show_default=False, help="Leased groups; then no unfinished one (0: no bound)."
        ),
    ] = None,
) -> Answer:
    """Create a queue, or change its settings. What is not named stays as it is."""
    import msgspec

    from strawq.model import QueueConfig

    given = {
        "max_attempts": max_attempts,
        "max_expirations": max_expirations,
        "max_ready": max_ready,
        "max_leased": max_leased,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    with opened(pool) as open_pool:

        def look(machine: Machine) -> QueueConfig | None:
            queues = machine.state.branch.queues
            return queues[name].row.config if name in queues else None

        before: QueueConfig | None = open_pool.log.refresh(look)
        config = msgspec.structs.replace(before or QueueConfig(), **changes)
        if config != before:
            open_pool.configure(name, config)
    settings = ", ".join(f"{key} {getattr(config, key)}" for key in QueueConfig.__struct_fields__)
    said = "is made" if before is None else "is changed" if config != before else "is as it was"
    return Answer(
        {"queue": name, "created": before is None, "config": msgspec.structs.asdict(config)},
        f"queue {name} {said}: {settings}",
    )
