"""How verbs are found and what each of them has without saying so: `--json`, `--verbose`, an environment variable for
every option, and the exit codes at the end of its help.

To add a verb, put a function marked with `@verb` into a module of this package whose name ends in `_verbs`. Importing
such a module must stay cheap: whatever a verb works with is imported inside its function.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
import typer.core

from strawq.cli.output import Answer
from strawq.standard_output import write_stdout
from strawq.version import VERSION

EXIT_CODES = {
    0: "done",
    1: "findings, or a fault of strawq",
    2: "bad input or usage: fix it, nothing was changed",
    3: "fenced: somebody else owns the work now",
    4: "try again later: nothing happened",
    5: "unknown outcome: ask again, it is not done twice",
    6: "operator needed: storage or data are unwell",
    130: "interrupted (143: terminated; 141: nobody reads the output)",
}
EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())

JsonFlag = Annotated[
    bool, typer.Option("--json", envvar="STRAWQ_JSON", help="Print one JSON object on stdout, errors too.")
]
Verbosity = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, envvar="STRAWQ_VERBOSE", show_default=False, help="Say more (-vv: everything)."
    ),
]

ORDER = (
    "demo",
    "init",
    "submit",
    "engine",
    "work",
    "collect",
    "rollout",
    "inspect",
    "checkpoint",
    "rollback",
    "branch",
    "pause",
    "resume",
)
"""Of verbs in the help: as they are met. Those not named here follow."""

F = TypeVar("F", bound=Callable[..., Answer])

_GROUPS: dict[str, typer.Typer] = {}


def _typer(help_text: str, **options: Any) -> typer.Typer:
    return typer.Typer(
        help=help_text,
        epilog=EPILOG,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        **options,
    )


app = _typer(
    "A durable, lease-based rollout queue for RL training of language models, in one directory of immutable files.",
    name="strawq",
)


def group(name: str, help_text: str) -> None:
    """Declare that `name` is followed by a verb of its own (`strawq sessions list`)."""
    _GROUPS[name] = _typer(help_text)
    app.add_typer(_GROUPS[name], name=name)


class _Command(typer.core.TyperCommand):
    """What must be given is written as it is named: some versions of typer put it in braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [f"{p[1:].partition('}')[0].rstrip('.')}{'...' * ('...' in p)}" if p[:1] == "{" else p for p in pieces]


def verb(name: str, under: str = "", takes_others: bool = False) -> Callable[[F], F]:
    """Make a function a verb. Its parameters are the options; its docstring is the help. With `takes_others` options
    that it does not know go to its argument, in their order."""

    def register(function: F) -> F:
        owner = _GROUPS[under] if under else app
        settings = {"ignore_unknown_options": True} if takes_others else None
        owner.command(name, cls=_Command, epilog=EPILOG, context_settings=settings)(
            _command(function, f"{under} {name}".strip())
        )
        return function

    return register


def _command(function: Callable[..., Answer], words: str) -> Callable[..., Answer]:
    """The function with the options that every verb has. It is told of --json if it has a parameter `as_json`."""
    hints = get_type_hints(function, include_extras=True)
    given = inspect.signature(function).parameters
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        parameter.replace(kind=keyword, annotation=_with_variable(hints[name], words, name))
        for name, parameter in given.items()
        if name != "as_json"
    ]
    parameters.append(inspect.Parameter("as_json", keyword, default=False, annotation=JsonFlag))
    parameters.append(inspect.Parameter("verbosity", keyword, default=0, annotation=Verbosity))

    @functools.wraps(function)
    def run(*, as_json: bool, verbosity: int, **options: Any) -> Answer:
        # `errors.guarded` looks for --json itself: it must know even when the options cannot be parsed.
        if "as_json" in given:
            options["as_json"] = as_json
        if verbosity:
            listen(verbosity)
        return function(**options)

    del run.__wrapped__
    run.__signature__ = inspect.Signature(parameters, return_annotation=Answer)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _with_variable(annotation: Any, words: str, name: str) -> Any:
    """An option that names no environment variable gets STRAWQ_<VERB>_<OPTION>."""
    metadata = getattr(annotation, "__metadata__", ())
    info = metadata[0] if metadata else None
    if info is None or type(info).__name__ != "OptionInfo" or info.envvar:
        return annotation
    info = copy.copy(info)
    # Named after what is typed, not after the parameter; in an annotation typer keeps the first word as `default`.
    words_typed = (info.default, *(info.param_decls or ()))
    typed = [word for word in words_typed if isinstance(word, str) and word.startswith("--")]
    if typed:
        name = typed[0].partition("/")[0][2:]
    info.envvar = f"STRAWQ_{words}_{name}".upper().replace("-", "_").replace(" ", "_")
    return Annotated[annotation.__origin__, info]


def listen(verbosity: int) -> None:
    """Send log records of strawq to stderr: warnings, with 1 also what happens, with 2 everything."""
    hush()
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).addHandler(_TALK)


def hush() -> None:
    """Take that back, for programs that call `main` and go on."""
    for name in _LOGGERS:
        logging.getLogger(name).removeHandler(_TALK)
        logging.getLogger(name).setLevel(logging.NOTSET)


class _Talk(logging.Handler):
    """Writes to whatever stderr is at that moment. That nobody hears it ends nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            print(f"strawq: {self.format(record)}", file=sys.stderr, flush=True)


_TALK = _Talk()
_LOGGERS = ("strawq", "strawq_workers")


def _print_version(wanted: bool) -> None:
    if wanted:
        write_stdout(f"strawq {VERSION}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbosity: Verbosity = 0,
) -> None:
    del version
    listen(verbosity)


@functools.cache
def load() -> typer.Typer:
    """The application with every verb of this package."""
    import strawq.cli

    for module in pkgutil.iter_modules(strawq.cli.__path__):
        if module.name.endswith("_verbs"):
            import_module(f"strawq.cli.{module.name}")
    app.registered_commands.sort(key=lambda command: _rank(command.name or ""))
    return app


def _rank(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)
