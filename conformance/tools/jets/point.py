"""A special point of an operator.

A number is a scalar, a tuple an array; whole numbers are int64. A point lies where a formula divides by 0, takes a root or a
logarithm of 0, compares equal values, or multiplies by 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import helper

from refgrad.conformance.case import Case, node_case


@dataclass(frozen=True)
class SpecialPoint:
    """An operator at a point: the inputs in the order of the schema, None for one that is left out.

    `where` is the name of the point, and `row` the row of the table of kinks that says what was chosen there. `sampled`: its
    derivatives are interpolated, see `planes.Sampled`. `squared`: the model returns the square of the operator's output, which
    may have derivatives that the operator itself lacks.
    """

    operator: str
    where: str
    inputs: tuple[Any, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    row: str = ""
    sampled: bool = False
    squared: bool = False

    def case(self) -> Case:
        """The point as a case."""
        domain, _, op_type = self.operator.rpartition(".")
        inputs = [None if x is None else np.array(x) for x in self.inputs]
        name = f"{self.operator} at {self.where}"
        settings = {
            "name": name,
            "opset": 1 if domain else NEWEST.get(op_type, OPSET),
            "domain": domain,
            **self.settings,
        }
        if self.operator in NO_DOUBLE:
            inputs = [x if x is None or x.dtype.kind != "f" else x.astype(np.float32) for x in inputs]
        made = replace(node_case(op_type, *inputs, **settings), values="special")
        if self.squared:
            [output] = made.model.graph.output
            made.model.graph.node.append(helper.make_node("Mul", [output.name, output.name], ["square"]))
            output.name = "square"
        return made


OPSET = 22
NO_DOUBLE = ("Celu",)  # operators of float32 alone
NEWEST = {
    "RMSNormalization": 23,
    "Attention": 23,
    "RotaryEmbedding": 23,
    "Swish": 24,
    "TensorScatter": 24,
    "SwiGLU": 28,
}


def at(
    operator: str,
    where: str,
    *inputs: Any,
    row: str = "",
    sampled: bool = False,
    squared: bool = False,
    **settings: Any,
) -> SpecialPoint:
    """A row of the table."""
    return SpecialPoint(operator, where, inputs, settings, row or where, sampled, squared)


def single(*values: float) -> np.ndarray:
    """An array of float32, for inputs of that type alone."""
    return np.array(values, np.float32)


def each(operators: str, where: str, *inputs: Any, **settings: Any) -> tuple[SpecialPoint, ...]:
    """The same row for several operators."""
    return tuple(at(operator, where, *inputs, **settings) for operator in operators.split())
