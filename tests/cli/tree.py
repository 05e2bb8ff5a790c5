"""The verbs as the application knows them."""

from __future__ import annotations

from typing import Any

import typer

from strawq.cli.app import load


def verbs() -> dict[str, Any]:
    """Every verb by its words, such as `sessions list`."""
    found: dict[str, Any] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        children = getattr(command, "commands", None)
        if children is None:
            found[" ".join(words)] = command
            return
        for name, child in children.items():
            walk(child, (*words, name))

    walk(typer.main.get_command(load()), ())
    return found


def options(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]
