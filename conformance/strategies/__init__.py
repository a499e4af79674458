"""Cases that hypothesis draws. Every operator has a strategy for attributes, shapes, optional inputs and values.

    from hypothesis import given
    from refgrad.conformance import strategies

    @given(strategies.node("Conv"))
    def test_conv(case):
        ...

A counterexample shrinks to the plainest attributes, the smallest shapes and whole numbers.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.errors import OptionError, choices, did_you_mean
from refgrad.installing import install
from refgrad.tables import extensions, plugins

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from refgrad.conformance.strategies.drawing import StrategyEntry

__all__ = ["node", "operators"]

VALUES = ("smooth", "kink")


def node(
    operator: str,
    *,
    opset: int | None = None,
    dtype: Any = np.float32,
    shapes: str | None = "static",
    values: str = "smooth",
) -> SearchStrategy[Case]:
    """Cases of one node.

    :param operator: a name from `operators()`: with its domain in front, unless that is ai.onnx.
    :param opset: the version of the operator's domain; None draws any version that most runtimes know.
    :param dtype: of the float inputs: float16, bfloat16, float32 or float64, where the operator takes it.
    :param shapes: how the inputs are declared, "static", "symbolic" or "unknown" as in `node_case`; None for any of them.
    :param values: "smooth": away from the points that have no derivative. "kink": at one of these.
    :raises OptionError: there is no such operator, its strategy lacks one of the other options, or hypothesis is not installed.
    """
    known = _registry()
    if operator not in known:
        raise OptionError(
            f"There is no strategy for {operator!r}.{did_you_mean(operator, known)} There are {choices(known)}; "
            "refgrad.conformance.strategies.operators() lists all."
        )
    if shapes is not None and shapes not in SHAPES:
        raise OptionError(f"There are no shapes {shapes!r}. There are {choices(SHAPES)}, and None for any of them.")
    if values not in VALUES:
        raise OptionError(f"There are no values {values!r}. There are {choices(VALUES)}.")
    return known[operator].cases(opset, np.dtype(dtype), shapes, values)


def operators() -> tuple[str, ...]:
    """The names of the operators that have a strategy, each with its domain in front unless that is ai.onnx.

    :raises OptionError: hypothesis is not installed.
    """
    return tuple(sorted(_registry()))


def entries() -> list[StrategyEntry]:
    """The strategies of all operators, by the operators' names.

    :raises OptionError: hypothesis is not installed.
    """
    known = _registry()
    return [known[operator] for operator in sorted(known)]


def _registry() -> dict[str, StrategyEntry]:
    plugins.load()
    try:
        _import_families()
        from refgrad.conformance.strategies.drawing import REGISTRY, of_packages
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise OptionError(
            f"The strategies need hypothesis, which is not installed: {install('conformance')}."
        ) from error
    return REGISTRY | of_packages()


@cache
def _import_families() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    for _, file in extensions.modules("strategies"):
        importlib.import_module(file)
