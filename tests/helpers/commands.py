"""Every command of refgrad, found in the command line itself, and how it is called on files."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from refgrad.cli import app
from refgrad.cli.output import Files, roles_of

# Other ways to call a command, besides its model and its outputs. Every way is an end of the code that reads the model.
VARIANTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "run": ((), ("--backend", "ort-cpu"), ("--precision", "float64")),
    "grad": ((), ("--of", "y"), ("--dialect", "ort"), ("--recompute",), ("--weights", "constants")),
    "show": ((), ("--dot",), ("--svg",), ("--cost", "--dim", "4")),
    "conformance cases": ((), ("--show",)),
}
# What a command does not go without, besides its model and its outputs.
NEEDED = {"train": {"data": "data.npz"}}
REQUIRED = {
    "compare": ("--a", "refgrad@numpy", "--b", "refgrad@numpy"),
    "reduce": ("--side", "refgrad@numpy", "--output", "reduced"),
    "record": ("os:getcwd", "--output", "recorded.npz"),
    "teach": ("1",),
}
# A file that goes with --case, and not with the model that tests give.
OF_CASES = {"compare": "source"}
WRITTEN = (Files.WRITTEN, Files.WRITTEN_MODEL, Files.JOURNAL)


@dataclass(frozen=True)
class Command:
    """A command: its words, and its parameters that name files, each with its role and its option, "" for an argument."""

    name: str
    roles: Mapping[str, Files]
    options: Mapping[str, str]
    parameters: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    @property
    def variants(self) -> tuple[tuple[str, ...], ...]:
        return VARIANTS.get(self.name, ((),))

    def of_role(self, *roles: Files) -> list[str]:
        return [name for name, role in self.roles.items() if role in roles]

    def words(self, files: Mapping[str, str | Path], more: Iterable[str] = ()) -> list[str]:
        """The command line with these files by parameter."""
        words = [(self.options[name], str(file)) for name, file in {**NEEDED.get(self.name, {}), **files}.items()]
        return [
            *self.name.split(),
            *REQUIRED.get(self.name, ()),
            *more,
            *(word for pair in words for word in pair if word),
        ]


def commands() -> list[Command]:
    """Every command."""
    return list(_commands(app, typer.main.get_command(app), ""))


def _commands(group: typer.Typer, built: typer.core.TyperGroup, prefix: str) -> Iterator[Command]:
    for one in group.registered_commands:
        name = one.name or one.callback.__name__
        parameters = {p.name: p for p in built.commands[name].params}
        roles = {key: role for key, role in roles_of(one.callback).items() if key != OF_CASES.get(name)}
        options = {
            key: "" if parameters[key].param_type_name == "argument" else parameters[key].opts[0] for key in roles
        }
        yield Command(f"{prefix}{name}", roles, options, frozenset(parameters))
    for one in group.registered_groups:
        yield from _commands(one.typer_instance, built.commands[one.name], f"{prefix}{one.name} ")
