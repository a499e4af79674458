"""The names that the author of an operator imports. One module is enough for an operator of your own (docs/add_an_operator.md).

>>> from refgrad.extend import rule
>>> @rule("Square", domain="my.domain")
... def square(op, d_y, x):
...     "dx = 2·x·dy"
...     return op.Mul(op.Mul(x, 2.0), d_y)

An operator of a domain of your own needs no schema: the signature of its rule says that Square has an input x and an output
y. Where there is one (`onnx.defs.register_schema`), the parameters are bound to its names.

A rule gives the cotangents of inputs. Values that the subgraphs of a node capture, as in If, need a control-flow rule. Those
are not registered from here: they read, split and sweep graphs with refgrad's own parts (`refgrad.reverse.bodies`), which
change freely. Give the operator the captured value as an input, or write it as a function of the model around If, Loop or Scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refgrad.builder.op import Emitter
from refgrad.rewrites.forms import form
from refgrad.tables import plugins
from refgrad.tables.definitions import Arguments, UnsupportedFormError, body
from refgrad.tables.dialects import Dialect, register_dialect
from refgrad.tables.extensions import PACKAGES, case, families, forward, no_derivative, rounds, strategy, zero
from refgrad.tables.registry import lowering, rule

Function = Callable[..., Any]

__all__ = [
    "Arguments",
    "Dialect",
    "Emitter",
    "UnsupportedFormError",
    "body",
    "case",
    "families",
    "form",
    "forward",
    "kernel",
    "kernel_of_body",
    "lowering",
    "no_derivative",
    "register_dialect",
    "rounds",
    "rule",
    "strategy",
    "zero",
]


def kernel(*op_types: str, domain: str = "", **options: Any) -> Callable[[Function], Function]:
    """Register the decorated function, which computes an operator in NumPy on refgrad's interpreter.

    Its positional parameters are the inputs (None where absent), its keyword-only ones the attributes. It returns an array,
    or a tuple of them. The options go to `refgrad.backends.numpy.registry.kernel`: `since`, `in_float32`,
    `fresh`, `replace`.

    :raises RuleError: an operator has a kernel already, and `replace` is not given.
    """
    from refgrad.backends.numpy import registry  # here, since a rule alone does not need the interpreter

    replaces = not domain or domain.startswith(("ai.onnx", "com.microsoft"))
    register = registry.kernel(*op_types, domain=domain, **options)
    return _behind_the_others(register) if replaces else register


def _behind_the_others(register: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Register a kernel when the kernels are there that it may replace; a module in a folder `kernels` is one of them."""
    from refgrad.backends.numpy import registry

    def behind(function: Function) -> Function:
        if not any(function.__module__.startswith(f"{package}.kernels.") for package in PACKAGES):
            registry.kernels()
        return register(function)

    return behind


def kernel_of_body(*op_types: str, domain: str = "", **options: Any) -> Callable[[Function], Function]:
    """Register the decorated function as the kernel of operators that have a body, whose signature it shares.

    It takes the `Arguments` of a node: every input and attribute under the name of the body's parameter, with its default
    where the node has none. The decorator returns a function of the inputs and the attributes, as other kernels are. It takes
    the options of `kernel`.

    :raises RuleError: an operator has no body, or has a kernel already, and `replace` is not given.
    """
    from refgrad.backends.numpy import registry

    return _behind_the_others(registry.kernel_of_body(*op_types, domain=domain, **options))


plugins.load_own()  # so that what is replaced is there
