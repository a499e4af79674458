"""A request for a gradient: the options of `refgrad.gradient`, checked."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from refgrad.errors import OptionError, choices
from refgrad.reverse.memory import Budget
from refgrad.tables.conventions import DEFAULT, Conventions
from refgrad.tables.dialects import DIALECTS, Dialect, get_dialect

COTANGENTS = ("input", "ones", "yield")
WEIGHTS = ("overridable", "constants", "inputs")


@dataclass(frozen=True)
class Request:
    """A gradient that is asked for. Its fields have the meaning of the arguments of `refgrad.gradient`.

    `wrt` and `outputs` are checked where the model is known. With a `budget`, `recompute` is False. Without `guarded` the
    gradient lacks the guards of `strong_zero`. With `needs_gradient` a gradient that is 0 by every name is an error.

    :raises OptionError: an option has no such value, or two exclude each other.
    """

    wrt: Sequence[str] | None = None
    outputs: Sequence[str] | None = None
    conventions: Conventions = DEFAULT
    dialect: str = "onnx"
    cotangent: str = "input"
    keep_outputs: bool = False
    recompute: bool | Sequence[str] = False
    budget: Budget | None = None
    weights: str = "overridable"
    guarded: bool = True
    needs_gradient: bool = False

    def __post_init__(self) -> None:
        for option, value, known in (
            ("cotangent", self.cotangent, COTANGENTS),
            ("choice of weights", self.weights, WEIGHTS),
        ):
            if value not in known:
                raise OptionError(f"There is no {option} {value!r}; there are {choices(known)}.")
        target = self.target
        if self.conventions.strong_zero and not target.plain:
            raise OptionError(
                f"strong_zero=True cannot guard the operators of dialect={self.dialect!r}, which multiply inside their "
                "kernels: use dialect='onnx'."
            )
        if self.cotangent == "yield" and not target.yields:
            others = " or ".join(f"dialect={one.name!r}" for one in DIALECTS.values() if one.yields)
            raise OptionError(f"cotangent='yield' needs {others}: it writes com.microsoft.YieldOp.")
        _check_recompute(self.recompute)

    @property
    def target(self) -> Dialect:
        """The dialect in which the gradient is written."""
        return get_dialect(self.dialect)

    @property
    def plain(self) -> Request:
        """The request in ai.onnx operators alone; itself if its dialect is "onnx"."""
        if self.target is DIALECTS["onnx"]:
            return self
        return replace(self, dialect="onnx", cotangent="input" if self.cotangent == "yield" else self.cotangent)

    @property
    def keeps_functions(self) -> bool:
        """True if the functions of a model can stay functions in the gradient."""
        conventions, repeats = self.conventions, bool(self.recompute) or self.budget is not None
        return self.target.plain and conventions.quantization == "zero" and not conventions.strong_zero and not repeats


def _check_recompute(recompute: object) -> None:
    """:raises OptionError: it is neither a bool nor a list of names."""
    if isinstance(recompute, bool):
        return
    names = recompute if isinstance(recompute, Sequence) and not isinstance(recompute, str) else [None]
    if not all(isinstance(entry, str) for entry in names):
        raise OptionError(
            f"recompute is True, False, or a list of names or patterns of nodes, not {reprlib.repr(recompute)}."
        )
