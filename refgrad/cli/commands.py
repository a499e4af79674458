"""How every command reads its options: a repeated one does not hide the first, and text is no number."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from refgrad.cli.numbers import refuse_text
from refgrad.errors import OptionError


class Command(TyperCommand):
    """A command that refuses a repeated option of which only the last value would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        :raises OptionError: an option that takes one value is repeated, or text is given for a number.
        """
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None:
                values, _, _ = self.make_parser(ctx).parse_args(args=given)
                refuse_text(error.param, values.get(error.param.name or ""))
            raise
        _, _, order = self.make_parser(ctx).parse_args(args=given)
        seen = set()
        for option in order:
            if option.param_type_name != "option" or option.multiple or option.is_flag:
                continue
            if option.name in seen:
                raise OptionError(
                    f"{max(option.opts, key=len)} is given more than once, and takes one value. Give one."
                )
            seen.add(option.name)
        return rest
