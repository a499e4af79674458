"""Guards that change a derivative: a Where that replaces 0 by a number, in a product that is 0 there.

Many builders write them into the gradients of norms and powers. A product e·f(e) with f(0) = c in place of the limit has the
right value at 0, but its derivative there is c. The rewriting gives f its limit where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, numpy_helper

from refgrad.builder.nodes import NodeBuilder
from refgrad.model.external import array_of
from refgrad.model.factors import cofactor, written
from refgrad.model.reading import is_large
from refgrad.protos.traverse import attribute_value, names_of, nested, refill, subgraphs
from refgrad.protos.types import smallest_normal

_NORMS = ("ReduceL2",)


@dataclass(frozen=True)
class _Read:
    """A node as `refgrad.model.factors` looks at it."""

    proto: NodeProto

    @property
    def op_type(self) -> str:
        return "" if self.proto.domain else self.proto.op_type

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.proto.input)

    @property
    def attributes(self) -> dict[str, Any]:
        return {attribute.name: attribute_value(attribute) for attribute in self.proto.attribute}


def free_limits(model: ModelProto, used: Set[str]) -> None:
    """Rewrite guarded products in place so that their derivatives at 0 are right.

    :param used: the operators of the model.
    """
    if {"Where", "Equal", "Mul"} <= used and not used.isdisjoint(("Div", "Pow")):
        taken = names_of(model.graph) | {node.name for node in nested(model.graph.node)}
        _rewrite(model.graph, {}, {}, taken)


def _rewrite(
    graph: GraphProto, producers: Mapping[str, _Read], constants: Mapping[str, np.ndarray], taken: set[str]
) -> None:
    own = {name: _Read(node) for node in graph.node for name in node.output if name}
    overridden = {value.name for value in graph.input}
    known = {t.name: array_of(t) for t in graph.initializer if not is_large(t) and t.name not in overridden}
    for node in graph.node:
        if node.op_type == "Constant" and not node.domain and (array := _number(node)) is not None:
            known[node.output[0]] = array
    scope = _Scope({**producers, **own}, {**constants, **known}, taken)
    nodes: list[NodeProto] = []
    changed = False
    for node in graph.node:
        for inner in (g for attribute in node.attribute for g in subgraphs(attribute)):
            _rewrite(inner, scope.producers, scope.constants, taken)
        if node.op_type == "Mul" and not node.domain:
            freed = scope.product(node)
            changed |= freed is not node
            node = freed
            nodes += scope.builder.take()
        nodes.append(node)
    if changed:
        refill(graph.node, nodes)


def _number(constant: NodeProto) -> np.ndarray | None:
    [attribute] = constant.attribute
    if attribute.name == "value":
        return array_of(attribute.t)
    if attribute.name in ("value_float", "value_floats"):
        return np.array(attribute_value(attribute), np.float32)
    return np.array(attribute_value(attribute)) if attribute.name in ("value_int", "value_ints") else None


class _Scope:
    """The producers and constants that a graph may read, and the nodes that a rewriting adds before a product."""

    def __init__(self, producers: Mapping[str, _Read], constants: Mapping[str, np.ndarray], taken: set[str]) -> None:
        self.producers, self.constants = producers, constants
        self.builder = NodeBuilder(taken)

    def product(self, node: NodeProto) -> NodeProto:
        """The node, reading a factor that has its limit in place of a guarded one."""
        for one, other in (tuple(node.input), tuple(node.input)[::-1]):
            freed = self._power(one, other) or self._over_norm(one, other)
            if freed is not None:
                read = NodeProto()
                read.CopyFrom(node)
                read.input[:] = [freed if name == one else name for name in node.input]
                return read
        return node

    def _power(self, factor: str, exponent: str) -> str | None:
        """The factor b^(e' − 1) of a product with e, rewritten; None for another factor. e' is e, with another number for 0.

        The other number is needed only where 1/b is not finite in the type, as at b = 0.
        """
        base, lowered = self._operands(factor, "Pow")
        raised, one = self._operands(lowered, "Sub")
        guard = self._guard(raised)
        unit = self.constants.get(one)
        if guard is None or guard[0] != exponent or unit is None or unit.size != 1 or unit.item() != 1:
            return None
        _, zero, instead, is_zero = guard
        kind = self.constants[zero].dtype
        if kind.kind not in "fV":
            return None
        tiny = self._constant(np.array(smallest_normal(kind), kind), "smallest_normal")
        large = self._emit("GreaterOrEqual", self._emit("Abs", base), self._emit("CastLike", tiny, base))
        alone = self._emit("And", is_zero, self._emit("Not", large))  # of NaN too
        return self._emit("Pow", base, self._emit("Sub", self._emit("Where", alone, instead, exponent), one))

    def _over_norm(self, factor: str, data: str) -> str | None:
        """The factor q/l' of a product with x, rewritten; None for another factor.

        l' is the norm l of x, with another number for 0, and q is a product with l. Where l and x are 0, the factor becomes
        q/l without a division, if that is finite. The model keeps its values.
        """
        read = self.producers.get(factor)
        spread = read.inputs[1] if read is not None and read.op_type == "Unsqueeze" else ""
        quotient = read.inputs[0] if read is not None and spread else factor
        condition, zero, selected = self._operands(quotient, "Where", 3)
        numerator, length = self._operands(selected or quotient, "Div")
        if selected:  # 0 where the norm is 0, else q/l
            if not self._is_zero(zero) or self._asks_for_zero(condition)[0] != length:
                return None
        else:
            guard = self._guard(length)
            if guard is None:
                return None
            length, zero, _, condition = guard
        if not self._is_norm(length, data, spread):
            return None
        rest = cofactor(numerator, lambda name: name == length, self.producers.get, self.constants.get)
        if rest is None:
            return None
        limit = self._emit("Expand", written(rest, self._emit), self._emit("Shape", quotient))
        if selected:  # what is not selected must not be infinite: its derivative would be 0·∞
            one = self._constant(np.ones((), self.constants[zero].dtype), "one")
            safe = self._emit("Div", numerator, self._emit("Where", condition, one, length))
            quotient = factor = self._emit("Where", condition, zero, safe)
        if spread:
            limit, factor, condition = (self._emit("Unsqueeze", name, spread) for name in (limit, quotient, condition))
        finite = self._emit("Not", self._emit("IsNaN", self._emit("Sub", limit, limit)))
        at_zero = self._emit("And", condition, self._emit("Equal", data, self._emit("CastLike", zero, data)))
        return self._emit("Where", self._emit("And", at_zero, finite), limit, factor)

    def _is_norm(self, length: str, data: str, spread: str) -> bool:
        """True if `length`, with axes of size 1 inserted at `spread`, is the norm of the elements of `data` that face it."""
        made = self.producers.get(length)
        if made is None or made.op_type not in _NORMS or made.inputs[0] != data:
            return False
        attributes = made.attributes
        axes = self.constants.get(made.inputs[1]) if len(made.inputs) > 1 else attributes.get("axes")
        if len(made.inputs) > 1 and axes is None and made.inputs[1] != spread:
            return False
        every = axes is None and len(made.inputs) < 2 and not attributes.get("noop_with_empty_axes")
        if every or attributes.get("keepdims", 1):
            return every or not spread
        put = self.constants.get(spread)
        return bool(spread) and (
            made.inputs[1:] == (spread,) or (put is not None and axes is not None and list(put) == list(axes))
        )

    def _guard(self, value: str) -> tuple[str, str, str, str] | None:
        """x, 0, c and x = 0 of Where(x = 0, c, x)."""
        condition, instead, otherwise = self._operands(value, "Where", 3)
        asked = self._asks_for_zero(condition)
        return None if not otherwise or asked[0] != otherwise else (*asked, instead, condition)

    def _asks_for_zero(self, condition: str) -> tuple[str, str]:
        """x and 0 of Equal(x, 0); empty names of another condition."""
        one, other = self._operands(condition, "Equal")
        for value, zero in ((one, other), (other, one)):
            if value and self._is_zero(zero):
                return value, zero
        return "", ""

    def _is_zero(self, name: str) -> bool:
        known = self.constants.get(name)
        return known is not None and known.size == 1 and not known.any()

    def _operands(self, value: str, op_type: str, count: int = 2) -> tuple[str, ...]:
        """The inputs of the node that computes a value, if it has this operator; else empty names."""
        read = self.producers.get(value)
        return read.inputs if read is not None and read.op_type == op_type else ("",) * count

    def _emit(self, op_type: str, *inputs: str) -> str:
        return self.builder.add(op_type, inputs, f"{inputs[0]}_{op_type}")

    def _constant(self, array: np.ndarray, name: str) -> str:
        return self.builder.add("Constant", [], name, value=numpy_helper.from_array(array))
