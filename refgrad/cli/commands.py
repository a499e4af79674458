"""How every command reads its options and shows its help: choices, numbers, defaults, groups of commands, completion."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from refgrad.cli.numbers import refuse_text
from refgrad.cli.spelling import in_the_shell
from refgrad.errors import OptionError, RefgradError, choices, did_you_mean
from refgrad.notices import notice
from refgrad.tables import plugins

OLD = frozenset({"--recompute-within", "--backends"})  # old names of options: still read, not shown
_KNOWN = "choices_of"  # the attribute of a callback that checks
_COLUMN = 24  # characters of the options in a help page; a longer one has a line of its own
_UNBROKEN = "\u2011"  # a hyphen at which no line is broken
_LONGEST = 48  # characters of the choices beside an option; more of them are listed in its help


def choice(
    known: Iterable[str] | Callable[[], Iterable[str]],
    *flags: str,
    several: bool = False,
    others: str = "",
    hint: str = "",
    **settings: Any,
) -> Any:
    """A Typer option whose value is one of a few names, which its help lists and the shell completes.

    :param known: the names, or a function that returns them. They are read when they are needed: plug-ins add to them.
    :param several: the option takes several names, separated by commas or repeated.
    :param others: what else the option takes, such as "package.module:Class". The command then checks the value itself.
    :param hint: how to add a name, for the message about an unknown one.
    """

    def check(param: typer.CallbackParam, value: Any) -> Any:
        for one in value if isinstance(value, list | tuple) else () if value is None else (value,):
            for name in (part.strip() for part in one.split(",")) if several else (one,):
                if others or not name or name in _listed(known):
                    continue
                plugins.load()  # a plug-in may bring it
                if name not in (listed := _listed(known)):
                    meant = did_you_mean(name, listed)
                    told = f"{flag_of(param)} {name!r} is not known.{meant} There are {choices(listed)}. {hint}"
                    raise OptionError(told.rstrip())
        return value

    def complete(incomplete: str) -> list[str]:
        plugins.load()
        before, comma, _ = incomplete.rpartition(",") if several else ("", "", "")
        return [f"{before}{comma}{name}" for name in _listed(known)]

    setattr(check, _KNOWN, (known, several, others))
    return typer.Option(*flags, callback=check, autocompletion=complete, **settings)


def _listed(known: Iterable[str] | Callable[[], Iterable[str]]) -> list[str]:
    """The names that `choice` was given, or the function returns."""
    return list(known() if callable(known) else known)


def choices_in(param: Any) -> list[str]:
    """The names that an option made by `choice` takes; none for another option."""
    known = getattr(param.callback, _KNOWN, None)
    return [] if known is None else _listed(known[0])


def flag_of(param: Any) -> str:
    """The name of an option on the command line; of an argument, its name."""
    shown = [flag for flag in param.opts if flag not in OLD]
    return str(next((flag for flag in shown if flag.startswith("--")), shown[0]))


class _Formatter(typer.Context.formatter_class):  # type: ignore[valid-type, misc]
    """A help page without a break at the hyphen of a name, such as ort-cuda."""

    def write_dl(self, rows: Any, col_max: int = _COLUMN, col_spacing: int = 2) -> None:
        """Write names and their texts in two columns."""
        super().write_dl([(name, text.replace("-", _UNBROKEN)) for name, text in rows], col_max, col_spacing)

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        super().write_text(text.replace("-", _UNBROKEN))

    def getvalue(self) -> str:
        """The page, with the hyphens that a shell reads."""
        return str(super().getvalue()).replace(_UNBROKEN, "-")


class _Context(typer.Context):
    formatter_class = _Formatter


class Command(TyperCommand):
    """A command that says which number an option takes, where it is given text, and names options as the shell does."""

    context_class = _Context

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        :raises OptionError: text is given for a number.
        """
        given = list(args)
        try:
            left = super().parse_args(ctx, args)
            self._notice_repeated(ctx, given)
            return left
        except typer.BadParameter as error:
            if error.param is not None:
                values, _, _ = self.make_parser(ctx).parse_args(args=given)
                refuse_text(error.param, values.get(error.param.name or ""))
            raise

    def _notice_repeated(self, ctx: Any, args: list[str]) -> None:
        """Notice options that take one value and are given several times."""
        values, _, order = self.make_parser(ctx).parse_args(args=args)
        for param, times in Counter(order).items():
            if times > 1 and not getattr(param, "is_flag", True) and not param.multiple:
                notice(
                    f"{flag_of(param)} takes one value, and is given {times} times: {values[param.name]!r} is taken."
                )

    def invoke(self, ctx: Any) -> Any:
        """Run the command. An error or a warning names the command's options, not the parameters of functions."""
        flags = {param.name: flag_of(param) for param in self.params if param.opts}
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            shown(in_the_shell(str(message), flags), category, *place, **more)

        try:
            warnings.showwarning = show
            return super().invoke(ctx)
        except RefgradError as error:
            error.args = (in_the_shell(str(error), flags), *error.args[1:])
            raise
        finally:
            warnings.showwarning = shown

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options: choices beside each, and every default in brackets."""
        _format_options(self, ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the line "Usage": MODEL is required, [MODEL] is not."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The words that the shell proposes. Old names of options are left out."""
        return [item for item in super().shell_complete(ctx, incomplete) if item.value not in OLD]


class CommandGroup(TyperGroup):
    """A group of commands, whose help lists them under headings, in the order in which they are registered."""

    context_class = _Context

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, and then the options."""
        self.format_commands(ctx, formatter)
        _format_options(self, ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each heading with its commands and what they do, uncut."""
        commands = {name: self.commands[name] for name in self.list_commands(ctx)}
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in commands.items():
            if not command.hidden:
                heading = getattr(command, "rich_help_panel", None)
                title = heading if isinstance(heading, str) else "Commands"
                sections.setdefault(title, []).append((name, summary_of(command)))
        width = max(map(len, commands), default=0)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])


def summary_of(command: Any) -> str:
    """The first sentence of a command's help, without its full stop."""
    sentence, _, _ = " ".join((command.help or "").split("\n\n")[0].split()).partition(". ")
    return sentence.removesuffix(".")


def _format_options(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        title = "Arguments" if param.param_type_name == "argument" else "Options"
        record = _record(param, ctx)
        if record is not None:
            sections[title].append(record)
    for title, rows in ((title, rows) for title, rows in sections.items() if rows):
        with formatter.section(title):
            formatter.write_dl(rows)


def _record(param: Any, ctx: Any) -> tuple[str, str] | None:
    """An option, or an argument, and its help; None if it is hidden."""
    shown = copy.copy(param)
    shown.opts = [flag for flag in param.opts if flag not in OLD]
    known, several, others = getattr(param.callback, _KNOWN, (None, False, ""))
    if known is not None:
        plugins.load()
        names = [*_listed(known), *filter(None, [others])]
        joined = "|".join(names)
        if len(joined) <= _LONGEST:
            shown.metavar = f"<{joined}>"
        else:
            shown.metavar = shown.metavar or "NAME"
            shown.help = f"{param.help} [{'any of' if several else 'one of'}: {', '.join(names)}]"
    record = shown.get_help_record(ctx)
    if record is None:
        return None
    name, text = record
    if param.param_type_name == "argument":
        name = str(param.metavar or name)
    if isinstance(param.show_default, str):  # which Typer puts in parentheses
        text = text.replace(f"[default: ({param.show_default})", f"[default: {param.show_default}")
    return name, " ".join(text.split())
