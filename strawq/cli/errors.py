"""From exceptions to one line and an exit code.

The rule: every ending of a command has an exit code of the table in `app.EXIT_CODES`. An error of strawq says its own
line; a mistake on the command line points at the verb's help; anything else is a fault of strawq, and its traceback
goes to a file that the line names (STRAWQ_DEBUG=1 shows it as well).
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback
from typing import Any

import typer

from strawq.cli.app import hush, load
from strawq.cli.ending import Ending, Interrupted, Terminated, stopped_by
from strawq.cli.output import Answer, show
from strawq.errors import StorageFailed, StrawqError
from strawq.standard_output import forget_stdout

PIPE_CLOSED = 141

# Typer 0.15 builds on click, later ones carry a copy of it: the base of usage errors is found, not imported.
_USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_SIGNALLED = 128
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})


def guarded(arguments: list[str]) -> int:
    """Run the command that `arguments` say and print its answer; returns the exit code."""
    as_json = wants_json(arguments)
    ending = Ending(as_json)
    ending.handlers.install()
    try:
        try:
            return _run(arguments, as_json, ending)
        except Exception as error:  # noqa: BLE001 (the last frame: whatever it is, it becomes one line)
            return _explain(error, ending)
    except KeyboardInterrupt:
        return ending.stopped(Interrupted)
    except Terminated:
        return ending.stopped(Terminated)
    except BrokenPipeError:
        forget_stdout()
        return PIPE_CLOSED
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):
            forget_stdout()  # typer ends with 1 there, after it has wrapped the streams
            return PIPE_CLOSED
        if not isinstance(left.code, int) or left.code <= _SIGNALLED:
            raise
        ending.stopped(stopped_by(left.code - _SIGNALLED))  # by a handler of what the verb has started
        return left.code
    finally:
        ending.handlers.remove()
        hush()


def wants_json(arguments: list[str]) -> bool:
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in before or os.environ.get("STRAWQ_JSON", "").strip().lower() in _TRUE


def _run(arguments: list[str], as_json: bool, ending: Ending) -> int:
    answer = load()(args=arguments, prog_name="strawq", standalone_mode=False)
    if isinstance(answer, Answer):
        ending.claim()  # also of a verb that has printed for itself
        show(answer, as_json)
        return answer.exit_code
    if answer == Interrupted.exit_code:  # how typer hands on a Ctrl-C; older ones raise Abort
        raise KeyboardInterrupt
    sys.stdout.flush()
    return answer if isinstance(answer, int) else 0


def _explain(error: Exception, ending: Ending) -> int:
    """Print what went wrong; returns the exit code."""
    if isinstance(error, BrokenPipeError):
        raise error
    if isinstance(error, typer.Abort):
        raise KeyboardInterrupt from error
    if isinstance(error, StrawqError):
        kind, message, code = error.kind, str(error), error.exit_code
        if debugging():
            traceback.print_exc()
    elif isinstance(error, OSError) and error.errno in _FULL:  # whatever it was: a file of its own, or a help page
        forget_stdout()
        kind, message, code = StorageFailed.kind, f"the disk is full: {error}; make room", StorageFailed.exit_code
    elif isinstance(error, _USAGE):
        kind, message, code = "usage", _usage(error), 2
        if not message:  # no arguments at all: the help has been printed
            return 2
    else:
        kind, code = "fault", 1
        message = f"this is a fault of strawq: {type(error).__name__}: {error}; please report it with {_keep(error)}"
    ending.tell(kind, message)
    return code


def _usage(error: Any) -> str:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return ""
    path = context.command_path if context is not None else "strawq"
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    return f"{message}; see `{path} --help`"


def debugging() -> bool:
    return os.environ.get("STRAWQ_DEBUG", "").strip().lower() in _TRUE


def _keep(error: Exception) -> str:
    """Write the traceback to a file of its own; returns how to name it."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if debugging():
        print(text, file=sys.stderr, end="", flush=True)
    try:
        with tempfile.NamedTemporaryFile("w", prefix="strawq-fault-", suffix=".log", delete=False) as file:
            file.write(f"strawq {' '.join(sys.argv[1:])}\n{text}")
    except OSError as failure:
        return f"the output of STRAWQ_DEBUG=1 (its traceback could not be written: {failure.strerror})"
    return file.name
