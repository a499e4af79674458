"""The option `memory`: a memory budget as text."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from refgrad.errors import OptionError
from refgrad.notices import notice
from refgrad.ranges import RANGES
from refgrad.sizes import in_bytes


@dataclass(frozen=True)
class Budget:
    """So many bytes, for models of these sizes."""

    limit: int
    sizes: Mapping[str, int]


def budget_of(recompute: bool | str | Sequence[str], memory: str | None) -> tuple[bool | Sequence[str], Budget | None]:
    """The options `recompute` and `memory` of `gradient`; a budget as `recompute`, the old spelling, is taken for `memory`.

    :raises OptionError: both are given, or `memory` is no budget.
    """
    if isinstance(recompute, str):
        try:
            old = budget(recompute)
        except OptionError as error:
            raise OptionError(
                f"recompute={reprlib.repr(recompute)} is neither a bool nor a list: write a list for names or patterns, "
                "and memory='2 GiB' for a memory budget."
            ) from error
        if memory is None:
            notice(FutureWarning(f"recompute={reprlib.repr(recompute)} is a memory budget: write memory= instead."))
            return False, old
    if memory is None:
        return recompute, None
    if not isinstance(memory, str):
        raise OptionError(f"memory={reprlib.repr(memory)} is no memory budget: write a string such as '2 GiB'.")
    if recompute is not False:
        raise OptionError("A memory budget chooses the nodes to compute again: give memory, or recompute.")
    return False, budget(memory)


def budget(text: str) -> Budget:
    """The budget in "2 GiB", "1.5GB" or "800 MiB for N=32, T=128".

    :raises OptionError: it says nothing of the kind.
    """
    amount, separator, rest = text.partition(" for ")
    size = in_bytes(amount)
    sizes: dict[str, int] = {}
    for part in rest.split(",") if separator else ():
        symbol, _, number = part.strip().rpartition("=")
        if not symbol or not number.isdecimal() or len(number) > 18:
            size = None
            break
        sizes[symbol.strip()] = int(number)
    if size is None or RANGES["max_memory"].why_not(size):
        raise OptionError(
            f"memory={reprlib.repr(text)} is no memory budget. Write a number and a unit, '2 GiB' or '800 MB', and the "
            "sizes of dimensions that the model does not know: '2 GiB for N=32, T=128'."
        )
    return Budget(size, sizes)
