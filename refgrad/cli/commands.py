"""How every command reads its options: text for a number is refused by name."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from refgrad.cli.numbers import refuse_text


class Command(TyperCommand):
    """A command that says which number an option takes, where it is given text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        :raises OptionError: text is given for a number.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None:
                values, _, _ = self.make_parser(ctx).parse_args(args=given)
                refuse_text(error.param, values.get(error.param.name or ""))
            raise
