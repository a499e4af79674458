"""The `refgrad` command. Exit codes: 0 right or done, 1 a fault, 2 wrong use or refused."""

from __future__ import annotations

import io
import os
import reprlib
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from refgrad import interruption
from refgrad.cli import (
    conformance,
    debugging,
    derivatives,
    listings,
    own_code,
    recipe,
    running,
    teaching,
    training,
    walking,
)
from refgrad.cli.commands import CommandGroup
from refgrad.cli.containment import contain
from refgrad.cli.output import AGREES, INTERRUPTED, REFUSED, App, is_quiet, say, say_lines
from refgrad.errors import ModelWarning, RefgradError
from refgrad.tables import plugins


class _Main(CommandGroup):
    """All commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands, by their headings."""
        return [name for commands in _COMMANDS.values() for name in commands]


app = App(
    help="Differentiate ONNX models, and check, explain and train with the gradients.",
    add_completion=True,
    cls=_Main,
)
_COMMANDS: dict[str, dict[str, Callable[..., None] | App]] = {  # in the order in which --help lists them
    "Debug a gradient": {
        "check": running.check,
        "compare": debugging.compare,
        "nan": debugging.nan,
        "reduce": debugging.reduce,
        "record": debugging.record,
    },
    "Test a runtime": {
        "conformance": conformance.app,
        "backends": listings.list_backends,
    },
    "Teach": {
        "walk": walking.walk,
        "teach": teaching.teach,
        "demo": running.demo,
        "explain": listings.explain,
        "show": listings.show,
    },
    "Train and explain": {
        "train": training.train,
        "training-model": training.training_model,
        "recipe": recipe.app,
        "weights": listings.weights,
    },
    "Derivatives": {
        "grad": derivatives.grad,
        "jvp": derivatives.jvp,
        "hvp": derivatives.hvp,
        "jacobian": derivatives.jacobian,
        "hessian": derivatives.hessian,
        "cut": derivatives.cut,
        "lower": derivatives.lower,
        "expand": derivatives.expand,
        "run": running.run,
        "preflight": listings.preflight,
        "ops": listings.ops,
    },
}
for _heading, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, App):
            app.add_typer(_command, name=_name, rich_help_panel=_heading)
        else:
            app.command(_name, rich_help_panel=_heading)(_command)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib import metadata  # here, since no other command needs it

        say(f"refgrad {metadata.version('refgrad')}")
        raise typer.Exit


@app.callback()
def every_command(
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module that registers operators. "
            "It can also follow the command: refgrad grad MODEL --import MODULE. May be repeated.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Show the option in --help: `main` takes it off every command line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Every error is one message on stderr."""
    if arguments is None:
        # Output that nobody reads any more ends the process quietly.
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # Formulas are not ASCII; where the terminal's encoding has no such character, it shows a question mark.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
    if sys.stdout is None:  # the shell closed it: >&-
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (as long as the process)
    if arguments is not None:
        return _carry_out(arguments)
    contain(REFUSED, _complain, own_code.of_arguments(sys.argv[1:]))
    try:
        interruption.begin()
        return interruption.over(_carry_out(sys.argv[1:]))
    except KeyboardInterrupt:  # while an error was printed
        return interruption.over(INTERRUPTED)


def _carry_out(arguments: Sequence[str]) -> int:
    try:
        interruption.raise_again()
        modules, others = plugins.split_arguments(arguments)
        with warnings.catch_warnings(), plugins.importing(modules):
            warnings.simplefilter("once", ModelWarning)
            warnings.showwarning = _notice
            app(others, prog_name="refgrad")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else AGREES
    except interruption.OutOfTime as over:
        _complain(str(over))
    except KeyboardInterrupt:
        return INTERRUPTED
    except RefgradError as error:
        _complain(str(error))
    except OSError as error:  # a file that the system refuses, a full disk
        name = "" if error.filename is None else f"{reprlib.repr(str(error.filename))}: "
        _complain(f"{name}{error.strerror or error}.")
    except MemoryError as error:
        _complain(f"There is not enough memory. {error}")
    except Exception as error:  # a bug of ours or a failure of the system: no traceback, but all that is known
        said = f"unexpected {type(error).__name__}: {error}".rstrip(". ") + "."
        _complain(" ".join([said, *getattr(error, "__notes__", ())]))
    return REFUSED


def _notice(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Print a warning on stderr: a model's without the line of code."""
    if is_quiet():
        return
    if issubclass(category, ModelWarning):
        _complain(f"notice: {message}")
    else:
        _complain(f"{category.__name__}: {message}")


def _complain(message: str) -> None:
    """Print an error on stderr. A name in it cannot move the cursor, nor begin a line that looks like another error."""
    first, *others = message.split("\n")
    say_lines("\n".join([f"refgrad: {first}", *(f"  {line.strip()}" for line in others)]), sys.stderr)
