"""The output of commands: JSON, tables, progress, and the names of written files."""

from __future__ import annotations

import enum
import inspect
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TextIO, get_type_hints

import typer
from onnx import ModelProto
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from typer.models import CommandFunctionType

from refgrad.cli.commands import Command, CommandGroup
from refgrad.cli.limits import limited
from refgrad.cli.numbers import require_ranges
from refgrad.errors import OptionError, abridged, choices, counted
from refgrad.escaping import lines, printable
from refgrad.interruption import CODE
from refgrad.model.checks.malformed import explained
from refgrad.model.writing import data_file_of, refuse_replacing, replacing, save_gradient, writable
from refgrad.show.tables import table
from refgrad.tables import plugins

AGREES, DISAGREES, REFUSED, INTERRUPTED = 0, 1, 2, CODE  # exit codes
_WIDTH = 160  # of a table outside a terminal
_ROWS = 20  # of a long table
_NAMES = 5  # of a long list
_REPORTS = (".html", ".md", ".json")
_QUIET = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing except errors.")]

_is_quiet = False


def stdout() -> Console:
    """Return a console on stdout. It is as wide as COLUMNS says, as the terminal, or wide enough for a table without one."""
    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if is_known else _WIDTH)


def say(*texts: object, file: TextIO | None = None) -> None:
    """Print `texts` on one line, one space between them. Control characters and line breaks in names are replaced."""
    say_lines(printable(" ".join(map(str, texts))), file)


def say_lines(text: object, file: TextIO | None = None) -> None:
    """Print lines of refgrad. Line breaks in names are already replaced or quoted."""
    print(lines(str(text)), file=file or sys.stdout)


def print_json(value: Any) -> None:
    """Print `value` as JSON. Infinities and NaN become text, since JSON has none."""
    print(json.dumps(_finite(value), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def require_reports(paths: Iterable[Path]) -> None:
    """Refuse a report that `check` and `compare` cannot write, before anything is computed.

    :raises OptionError: the suffix of a path is not .html, .md or .json.
    """
    for path in paths:
        if path.suffix not in _REPORTS:
            raise OptionError(f"{str(path)!r}: a report is a .html, a .md or a .json file.")


def write_reports(paths: Iterable[Path], writers: Mapping[str, Callable[..., str]], *result: Any) -> None:
    """Write each report, whole or not at all, with the writer of its suffix.

    :raises OutputFileError: a file cannot be written.
    """
    for path in paths:
        with replacing(path) as file:
            file.write_text(writers[path.suffix](*result), encoding="utf-8")


def print_table(rows: Iterable[Mapping[str, Any]], verbose: bool = True, least: int = 0) -> None:
    """Print rows that have the same keys, under a header of these keys.

    Without `verbose`, print the first of many rows, and the first `least` in any case.
    """
    listed = list(rows)
    shown = listed if verbose else listed[: max(_ROWS, least)]
    stdout().print(table(shown))
    if len(shown) < len(listed):
        say(f"and {len(listed) - len(shown)} more: --verbose or --json prints all")


def print_names(what: str, names: Iterable[str], verbose: bool = True) -> None:
    """Print `what` and the names on one line. Without `verbose`, print the first of many."""
    say(what, abridged(names, None if verbose else _NAMES))


@explained
def save(
    made: ModelProto,
    output: Path,
    model: Path,
    as_json: bool,
    verbose: bool,
    ends: Sequence[str] = ("inputs", "outputs"),
) -> None:
    """Write `made`, which was made from `model`, and print its inputs, its outputs or both, as `ends` says.

    A long list of names is abridged without `verbose`.
    """
    names = {"inputs": made.graph.input, "outputs": made.graph.output}
    listed = {end: [value.name for value in names[end]] for end in ends}
    shown = {
        end: abridged(values, None if verbose else _NAMES) for end, values in listed.items()
    }  # before anything is written: names that are no valid text raise here
    data = save_gradient(made, output, model)
    if as_json:
        data_file = None if data is None else str(data)
        print_json({"output": str(output), "nodes": len(made.graph.node), **listed, "data": data_file})
        return
    say(f"{output}: {counted(len(made.graph.node), 'node')}" + (f", its weights in {data}" if data else ""))
    for end, names_of_it in shown.items():
        say(f"{end:7}", names_of_it)


class Files(enum.Enum):
    """The use of the files that a parameter names. The annotation of a parameter has it."""

    READ = "read"
    MODEL = "read, with its external data; a folder with all that is in it"
    WRITTEN = "written"
    WRITTEN_MODEL = "written, with its external data"
    JOURNAL = "read and written"
    NEW_FOLDER = "a folder that is made"


_WRITTEN = (Files.WRITTEN, Files.WRITTEN_MODEL, Files.JOURNAL, Files.NEW_FOLDER)


class App(typer.Typer):
    """A group of commands. No command overwrites a file that it reads, or writes a file twice.

    Those that read a model, or results that name models, take the options of `limits`. All take `--quiet`.
    """

    def __init__(self, help: str = "", add_completion: bool = False, cls: type[CommandGroup] = CommandGroup) -> None:
        super().__init__(
            cls=cls,
            help=help,
            subcommand_metavar="COMMAND",
            no_args_is_help=True,
            add_completion=add_completion,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
        )

    def command(self, *arguments: Any, **options: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Register a command.

        :raises TypeError: a parameter is a path, and its annotation does not say how the file is used (`Files`); or it is a
            number, and its option was not made by `number`.
        """
        register = super().command(*arguments, **{"cls": Command, **options})

        def registered(command: CommandFunctionType) -> CommandFunctionType:
            require_ranges(command)
            roles = roles_of(command)

            @wraps(command)
            def guarded(**given: Any) -> Any:
                named = [(role, path) for name, role in roles.items() for path in _paths(given.get(name))]
                refuse_overwriting(named)
                with _saying_what_is_written([path for role, path in named if role in _WRITTEN]):
                    return command(**given)

            quietable = _quietable(guarded)
            register(limited(quietable) if {Files.MODEL, Files.READ} & set(roles.values()) else quietable)
            return command

        return registered


class ToldInterruption(KeyboardInterrupt):
    """An interruption after which the command has said what it keeps."""


@contextmanager
def saying_what_is_kept(kept: Callable[[], str]) -> Iterator[None]:
    """Say what `kept` returns if the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        say(f"refgrad: Interrupted. {kept()}", file=sys.stderr)
        raise ToldInterruption from interruption


@contextmanager
def _saying_what_is_written(paths: Sequence[Path]) -> Iterator[None]:
    """If the block is interrupted and says nothing itself, say which of these files it has written."""
    before = {path: _state_of(path) for path in paths}
    try:
        yield
    except ToldInterruption:
        raise
    except KeyboardInterrupt:
        written = [str(path) for path, state in before.items() if _state_of(path) != state]
        were = "were" if len(written) > 1 else "was"
        say(f"refgrad: Interrupted. {abridged(written) if written else 'Nothing'} {were} written.", file=sys.stderr)
        raise


def _state_of(path: Path) -> tuple[int, int] | None:
    """The file that is at a path, in its present state; None for none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def is_quiet() -> bool:
    """True while a command runs with `--quiet`."""
    return _is_quiet


def _quietable(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with the option `--quiet`, behind `--json`: it prints errors only."""

    @wraps(command)
    def call(*, quiet: bool = False, **given: Any) -> Any:
        global _is_quiet
        if quiet and given.get("as_json"):
            raise OptionError("--quiet and --json exclude each other: one prints nothing, the other everything.")
        if not quiet:
            return command(**given)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            try:
                _is_quiet = True
                return command(**given)
            finally:
                _is_quiet = False

    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    place = next((k for k, one in enumerate(parameters) if one.name == "as_json"), len(parameters))
    option = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_QUIET)
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    call.__signature__ = inspect.Signature([*parameters[:place], option, *parameters[place:]])  # type: ignore[attr-defined]
    return call


def roles_of(command: Callable[..., Any]) -> dict[str, Files]:
    """Return what `command` does with the files that its parameters name.

    :raises TypeError: a parameter does not say it.
    """
    found = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        roles = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Files)]
        if roles:
            found[name] = roles[0]
        elif "Path" in str(hint):
            raise TypeError(
                f"Parameter {name!r} of {command} is a path: annotate it with {choices(Files.__members__)}."
            )
    return found


def refuse_overwriting(named: Iterable[tuple[Files, Path]]) -> None:
    """Refuse outputs of a command that are its inputs, or one another, before anything is computed.

    :raises OutputFileError: the reason.
    """
    by_role: dict[Files, list[Path]] = {role: [] for role in Files}
    for role, path in named:
        by_role[role].append(path)
    written = [writable(path) for role in (Files.WRITTEN, Files.WRITTEN_MODEL) for path in by_role[role]]
    written += [data_file_of(path) for path in by_role[Files.WRITTEN_MODEL]]
    modules = (getattr(sys.modules.get(name), "__file__", None) for name in plugins.named())
    refuse_replacing(
        [*written, *by_role[Files.JOURNAL], *by_role[Files.NEW_FOLDER]],
        [*by_role[Files.READ], *(Path(file) for file in modules if file)],
        by_role[Files.MODEL],
    )


def _paths(given: Any) -> list[Path]:
    """The paths that a parameter names: one, several or none."""
    if given is None:
        return []
    return [Path(one) for one in (given if isinstance(given, list | tuple) else [given])]


class Bar:
    """A progress bar on stderr, only on a terminal: the parts done, the time used and the time left.

    :param what: what the command does, until it says more.
    :param after: seconds until the bar appears. A command that is done by then shows none.
    """

    def __init__(self, what: str = "", after: float = 1.0) -> None:
        self._start, self._after = time.monotonic(), after
        self._progress: Progress | None = None
        self._known: tuple[int, int | None, str] = (0, None, what)
        self._timer = threading.Timer(after, self._show)
        self._timer.daemon = True
        self._lock = threading.Lock()

    def __enter__(self) -> Bar:
        if sys.stderr.isatty() and not _is_quiet:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._after = math.inf
            if self._progress is not None:
                self._progress.stop()

    def __call__(self, done: int, total: int | None, label: str) -> None:
        """Show that `done` of `total` parts (None: unknown) are done, and `label`."""
        self._known = done, total, label
        if self._progress is None and time.monotonic() - self._start >= self._after:
            self._show()
        if self._progress is not None:
            self._update(self._progress)

    def _show(self) -> None:
        with self._lock:
            if self._progress is not None or _is_quiet or not sys.stderr.isatty() or math.isinf(self._after):
                return
            columns = (
                SpinnerColumn(),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[label]}", markup=False),
            )
            # What the command prints on stdout stays there.
            progress = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
            progress.add_task("", total=None, label="")
            self._update(progress)
            progress.start()
            self._progress = progress

    def _update(self, progress: Progress) -> None:
        done, total, label = self._known
        progress.update(progress.task_ids[0], completed=done, total=total, label=printable(label))
