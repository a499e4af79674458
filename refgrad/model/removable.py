"""Quotients with a removable singularity, written so that their derivatives can be computed where they are 0/0 or ∞.

Exporters write two smooth functions with quotients that are not smooth. A cotangent of 0 does not give their derivatives.

- atan2(a, b) as Atan(Div(a, b)) and corrections that are constant. At b = 0 the quotient is infinite and its derivatives are
  lost. It becomes atan(b/a) and a quarter turn where |a| > |b|: then no quotient is larger than 1.
- sinc as Where(Equal(x, 0), 1, Div(Sin(u), u)), where u is x or a multiple of it. At 0 it has the derivatives of the
  constant. It becomes a polynomial in u² for |u| ≤ 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from refgrad.builder.nodes import NodeBuilder
from refgrad.model.external import array_of
from refgrad.protos.traverse import graphs, names_of, refill, subgraphs

# The coefficients of sin u/u in u². For |u| ≤ 1 one more would not change a second derivative in double precision.
_SINC = [(-1) ** k / math.factorial(2 * k + 1) for k in range(11)]


def without_singularities(model: ModelProto) -> None:
    """Write the quotients of `model` anew, in place. A number that the caller may override is none that is known."""
    taken = names_of(model.graph) | {node.name for one in graphs(model.graph) for node in one.node}
    _Rewriting(taken).graph(model.graph, {}, {})


class _Rewriting:
    def __init__(self, taken: set[str]) -> None:
        self._taken = taken

    def graph(self, graph: GraphProto, constants: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]) -> None:
        """Rewrite the quotients of a graph and of its subgraphs.

        :param constants: and `makers`: what is known outside, by name.
        """
        fed = {value.name for value in graph.input}
        constants = {**constants, **{tensor.name: tensor for tensor in graph.initializer if tensor.name not in fed}}
        makers = {**makers, **{name: node for node in graph.node for name in node.output}}
        nodes: list[NodeProto] = []
        found = False
        for node in graph.node:
            for attribute in node.attribute:
                for inner in subgraphs(attribute):
                    self.graph(inner, constants, makers)
            made = self._atan2(node, makers) or self._sinc(node, constants, makers)
            found |= made is not None
            nodes += made or [node]
        if found:
            refill(graph.node, nodes)

    def _atan2(self, node: NodeProto, makers: Mapping[str, NodeProto]) -> list[NodeProto] | None:
        quotient = _made_by(makers, node.input[0], "Div") if _is(node, "Atan") else None
        if quotient is None:
            return None
        a, b = quotient.input
        new = _Replacement(node, self._taken)
        steep = new("Less", new("Abs", b), new("Abs", a))
        flat = new("Atan", new("Div", new("Where", steep, b, a), new("Where", steep, a, b)))
        quarter = new.constant(np.float64(math.pi / 2), quotient.output[0])
        turned = new("Sub", new("Mul", new("Sign", quotient.output[0]), quarter), flat)
        new("Where", steep, turned, flat, last=True)
        return new.nodes()

    def _sinc(
        self, node: NodeProto, constants: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]
    ) -> list[NodeProto] | None:
        if not _is(node, "Where"):
            return None
        condition, there, elsewhere = node.input
        inverted = _made_by(makers, condition, "Not")
        if inverted is not None:
            condition, there, elsewhere = inverted.input[0], elsewhere, there
        equal, quotient = _made_by(makers, condition, "Equal"), _made_by(makers, elsewhere, "Div")
        if equal is None or quotient is None or not _is_all(there, 1, constants, makers):
            return None
        sine, u = _made_by(makers, quotient.input[0], "Sin"), quotient.input[1]
        if sine is None or sine.input[0] != u or not _is_zero_at(equal, u, constants, makers):
            return None
        new = _Replacement(node, self._taken)
        small = new("LessOrEqual", new("Abs", u), new.constant(np.float64(1), u))
        near = new("Where", small, u, new.constant(np.float64(0), u))
        square = new("Mul", near, near)
        series = new.constant(np.float64(_SINC[-1]), u)
        for coefficient in reversed(_SINC[:-1]):
            series = new("Add", new("Mul", series, square), new.constant(np.float64(coefficient), u))
        far = new("Where", small, new.constant(np.float64(1), u), u)
        whole = new("Where", small, series, new("Div", new("Sin", far), far))
        # The value at 0 may be an input whose derivative is asked for.
        new("Mul", whole, new("Where", condition, there, new.constant(np.float64(1), u)), last=True)
        return new.nodes()


class _Replacement:
    """Nodes that take the place of `node`: called with an operator and its inputs, it adds one and returns its result."""

    def __init__(self, node: NodeProto, taken: set[str]) -> None:
        self._node, self._builder = node, NodeBuilder(taken)
        self._constants: dict[float, str] = {}

    def __call__(self, op_type: str, *inputs: str, last: bool = False, **attributes: Any) -> str:
        node, builder = self._node, self._builder
        if last:
            return builder.append(op_type, inputs, node.output[:1], node.name, attributes=attributes)[0]
        return builder.add(op_type, inputs, f"{node.name or node.output[0]}_{op_type}", **attributes)

    def nodes(self) -> list[NodeProto]:
        """The nodes."""
        return self._builder.take(metadata=self._node.metadata_props)

    def constant(self, number: np.float64, like: str) -> str:
        """A scalar of the element type of `like`."""
        if float(number) not in self._constants:
            whole = self("Constant", value=numpy_helper.from_array(np.asarray(number)))
            self._constants[float(number)] = self("CastLike", whole, like)
        return self._constants[float(number)]


def _is(node: NodeProto, op_type: str) -> bool:
    return node.op_type == op_type and node.domain in ("", "ai.onnx")


def _made_by(makers: Mapping[str, NodeProto], name: str, op_type: str) -> NodeProto | None:
    """The node that makes a value, if it is of this operator."""
    node = makers.get(name)
    return node if node is not None and _is(node, op_type) else None


def _is_zero_at(
    equal: NodeProto, u: str, constants: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]
) -> bool:
    """True if `equal` compares `u` with 0, or an x of which `u` is a multiple."""
    asked: Sequence[str] = [x for x, zero in (equal.input, equal.input[::-1]) if _is_all(zero, 0, constants, makers)]
    scaled = _made_by(makers, u, "Mul")
    pairs = () if scaled is None else (scaled.input, scaled.input[::-1])
    return u in asked or any(x in asked and _constant(factor, constants, makers) is not None for x, factor in pairs)


def _is_all(name: str, number: int, constants: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]) -> bool:
    """True if all elements of a value are known to be `number`."""
    array = _constant(name, constants, makers)
    return array is not None and array.size > 0 and bool((array == number).all())


def _constant(name: str, constants: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]) -> np.ndarray | None:
    """The numbers of an initializer or of a Constant, None of another value."""
    tensor = constants.get(name)
    node = _made_by(makers, name, "Constant")
    for attribute in node.attribute if node is not None else ():
        if attribute.name == "value":
            tensor = attribute.t
        elif attribute.name == "value_float":
            return np.float32(attribute.f) * np.ones(())
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL or tensor.data_type == TensorProto.STRING:
        return None
    return array_of(tensor)
