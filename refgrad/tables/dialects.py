"""The dialects in which a gradient is written: each is an object with the decisions in which they differ.

A folder of lowerings registers its dialect (`refgrad/lowering/onnx`, `refgrad/lowering/ort`), and so can another package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from refgrad.errors import OptionError, RuleError, choices
from refgrad.tables import plugins


@dataclass(frozen=True)
class Dialect:
    """A way to write gradients: `refgrad.gradient(dialect=name)`.

    :ivar name: its name, an identifier.
    :ivar plain: it writes operators of ai.onnx alone. If false, `strong_zero` is refused, as it cannot guard products within
        a kernel, and functions of the model are inlined.
    :ivar yields: `cotangent="yield"` may write com.microsoft.YieldOp.
    :ivar follows_onnxruntime: it writes a formula as ONNX Runtime's builder does, also where another form is faster or is
        right at more points: a Sum of two cotangents, cotangents of slices that are added, a Where in place of a product with a
        mask, a division by a norm, 0 where the result of Max or Min is NaN.
    :ivar lowerings: the function for each gradient primitive (`@lowering(primitive, name)`); "onnx" has one for the others.
    """

    name: str
    plain: bool = False
    yields: bool = False
    follows_onnxruntime: bool = False
    lowerings: dict[str, Callable[..., Any]] = field(default_factory=dict, compare=False, repr=False)


DIALECTS: dict[str, Dialect] = {}


def register_dialect(dialect: Dialect) -> Dialect:
    """Add a dialect, and return it.

    :raises RuleError: its name is no identifier, or another dialect has it.
    """
    if not isinstance(dialect, Dialect):
        raise RuleError(f"register_dialect takes a Dialect, not {dialect!r}: Dialect('mine').")
    name: object = dialect.name
    if not (isinstance(name, str) and name.isidentifier()):
        raise RuleError(f"The name of a dialect is an identifier, unlike {dialect.name!r}: Dialect('mine').")
    if dialect.name in DIALECTS:
        raise RuleError(f"There is a dialect {dialect.name!r} already: choose another name.")
    DIALECTS[dialect.name] = dialect
    return dialect


def get_dialect(name: str) -> Dialect:
    """The dialect of this name.

    :raises OptionError: there is none.
    """
    if name not in [*DIALECTS]:
        plugins.load()  # one of them may register it
    if name not in [*DIALECTS]:  # a list: `name` need not be hashable
        raise OptionError(f"There is no dialect {name!r}; there are {choices(DIALECTS)}.")
    return DIALECTS[name]
