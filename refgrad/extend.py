"""The names that the author of an operator imports. One module is enough for an operator of your own (docs/add_an_operator.md).

>>> from refgrad.extend import rule
>>> @rule("Square", domain="my.domain")
... def square(op, d_y, x):
...     "dx = 2·x·dy"
...     return op.Mul(op.Mul(x, 2.0), d_y)

An operator of a domain of your own needs no schema: the signature of its rule says that Square has an input x and an output
y. Where there is one (`onnx.defs.register_schema`), the parameters are bound to its names.

A rule gives the adjoints of inputs. Values that the subgraphs of a node capture, as in If, need a structure. Structures are not
registered from here: they read, split and sweep graphs with refgrad's own parts (`refgrad.reverse.bodies`), which change
freely. Give the operator the captured value as an input, or write it as a function of the model around If, Loop or Scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refgrad.reverse.emit import Emitter
from refgrad.tables.dialects import Dialect, register_dialect
from refgrad.tables.extensions import case, forward, no_derivative, strategy, zero
from refgrad.tables.registry import lowering, rule

__all__ = [
    "Dialect",
    "Emitter",
    "case",
    "forward",
    "kernel",
    "lowering",
    "no_derivative",
    "register_dialect",
    "rule",
    "strategy",
    "zero",
]


def kernel(*op_types: str, domain: str = "", **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function, which computes an operator in NumPy on refgrad's interpreter.

    Its positional parameters are the inputs (None where absent), its keyword-only ones the attributes. It returns an array,
    or a tuple of them. The options go to `refgrad.backends.numpy.registry.kernel`: `since`, `in_float32`,
    `fresh`, `replace`.

    :raises RuleError: an operator has a kernel already, and `replace` is not given.
    """
    from refgrad.backends.numpy import registry  # here, since a rule alone does not need the interpreter

    if not domain or domain.startswith(("ai.onnx", "com.microsoft")):
        registry.kernels()  # so that what is replaced is there
    return registry.kernel(*op_types, domain=domain, **options)
