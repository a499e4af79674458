"""The option `strong_zero`: in a gradient, an element whose cotangent is exactly 0 contributes 0, whatever it is multiplied by.

A gradient is linear in its cotangents, so the option changes no rule. In a finished gradient it follows the values that carry
a cotangent, and guards their products with other values: 0·∞ and 0·NaN become 0. A product that is not NaN does not change.
Replacing every product with a cotangent of 0 would cut off the derivative by the cotangent, which a Hessian needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad import traits
from refgrad.builder.nodes import NodeBuilder
from refgrad.model.external import array_of
from refgrad.protos.metadata import CONSTANT, is_number
from refgrad.protos.traverse import attribute_value, names_of, refill
from refgrad.protos.types import FLOATS, element_type
from refgrad.reverse.finite import Finite

_CONTRACTIONS = traits.PRODUCTS | {"RotaryEmbedding"}  # they multiply elements and add up the products
_PRODUCTS = frozenset(("Mul", "Div"))
_SCALES = traits.CASTS | {"Neg", "Identity"}  # 0 where their operand is
# They return no cotangent: conditions, sizes and places.
_OBSERVERS = traits.BOOLEAN | traits.COUNTING | {"Sign"}


def with_strong_zeros(gradient: ModelProto, seeds: Mapping[str, int]) -> None:
    """Guard the products of a gradient in place. It has no local functions.

    :param seeds: the values that are its cotangents, and their element types.
    """
    guards = _Guards(gradient)
    carried = dict(seeds)
    refill(gradient.graph.node, guards.nodes(gradient.graph, carried))
    gradient.graph.initializer.extend(guards.added)


class _Guards:
    """One pass over a gradient. `added` are the initializers that the guards read and the gradient lacks."""

    def __init__(self, model: ModelProto) -> None:
        self.added: list[TensorProto] = []
        self._constants = {
            (repr(array_of(tensor).item()), tensor.data_type): tensor.name
            for tensor in model.graph.initializer
            if is_number(tensor) and not tensor.dims and tensor.data_type in FLOATS
        }
        self._builder = NodeBuilder(names_of(model.graph) | {node.name for node in model.graph.node})
        self._finite = Finite(model.graph)
        self._equal: dict[str, str] = {}  # by the name of a value: where it is 0
        # A value that is a product of a cotangent within one rule: the rule, and the cotangent with its element type.
        self._zeros: dict[str, tuple[str, str, int]] = {}

    def nodes(self, graph: GraphProto, carried: dict[str, int]) -> list[NodeProto]:
        """The nodes of `graph` with guards; its values that carry a cotangent are added to `carried`, with their types."""
        outer, self._equal = self._equal, dict(self._equal)
        made = self._guarded_nodes(graph, carried)
        self._equal = outer
        return made

    def _guarded_nodes(self, graph: GraphProto, carried: dict[str, int]) -> list[NodeProto]:
        self._finite.enter(graph)
        made: list[NodeProto] = []
        for node in graph.node:
            self._finite.see(node)
            bodies = [a.name for a in node.attribute if a.HasField("g")]
            if bodies:
                made.append(self._with_bodies(node, carried))
                continue
            places = [k for k, name in enumerate(node.input) if name in carried]
            if not places or node.op_type in _OBSERVERS:
                made.append(node)
                continue
            kind = _kind(node, carried)
            if kind not in FLOATS:  # whether there is an element, or how many
                made.append(node)
                continue
            carried.update((name, kind) for name in node.output if name)
            made += self._guarded(node, places, carried, kind)
        return made

    def _guarded(
        self, node: NodeProto, places: Sequence[int], carried: Mapping[str, int], kind: int
    ) -> Sequence[NodeProto]:
        """`node`, which reads a cotangent, or what stands for it."""
        op_type, others = node.op_type, [n for k, n in enumerate(node.input[: _factors(node)]) if k not in places]
        if node.domain:
            return [node]
        if op_type in _PRODUCTS and others and (op_type == "Mul" or not places[0]):
            cotangent = node.input[places[0]]
            return self._product(node, cotangent, carried[cotangent], others[0], kind)
        if op_type in _CONTRACTIONS and others and not all(map(self._finite, others)):
            return self._contraction(node, places[0], kind)
        if op_type in _SCALES and (known := self._zeros.get(node.input[0])) and known[0] == _rule(node):
            self._zeros[node.output[0]] = known
        return [node]

    def _product(self, node: NodeProto, zero: str, zero_kind: int, other: str, kind: int) -> Sequence[NodeProto]:
        """A product of a cotangent, element by element: 0 where it is NaN and the cotangent is 0.

        Within one rule the cotangent counts, and not a part of the product that is 0: d·0·∞ is NaN unless d is 0.
        """
        rule = _rule(node)
        if (known := self._zeros.get(zero)) and known[0] == rule:
            _, zero, zero_kind = known
        if not self._finite.is_mask(other):  # a mask selects: what it does not let pass is 0
            self._zeros[node.output[0]] = rule, zero, zero_kind
        if self._finite(other) and (node.op_type == "Mul" or self._finite.is_nonzero(other)):
            return [node]
        out = node.output[0]
        raw = self._like(node, node.op_type, list(node.input), f"{out}_product")
        made = [raw]
        if zero not in self._equal:
            made.append(self._like(node, "Equal", [zero, self._constant(0.0, zero_kind)]))
            self._equal[zero] = made[-1].output[0]
        is_nan = self._like(node, "IsNaN", [raw.output[0]])
        both = self._like(node, "And", [self._equal[zero], is_nan.output[0]])
        chosen = self._like(node, "Where", [both.output[0], self._constant(0.0, kind), raw.output[0]], out, node.name)
        return [*made, is_nan, both, chosen]

    def _contraction(self, node: NodeProto, place: int, kind: int) -> list[NodeProto]:
        """A sum of products: where it is NaN, the sum of those products whose cotangent is not 0.

        Nothing is computed twice unless the result has a NaN.
        """
        out = node.output[0]
        raw = self._like(node, node.op_type, list(node.input), f"{out}_product")
        refill(raw.attribute, node.attribute)
        total = self._like(node, "ReduceSum", [raw.output[0]], keepdims=0)
        is_nan = self._like(node, "IsNaN", [total.output[0]])
        then, same = (GraphProto(name=self._builder.fresh(f"{node.name}_{name}")) for name in ("zeros", "same"))
        same.node.append(self._like(node, "Identity", [raw.output[0]]))
        then.node.extend(self._sum_of_nonzero(node, place, kind, raw.output[0]))
        for graph in (then, same):
            graph.output.append(helper.make_tensor_value_info(graph.node[-1].output[0], kind, None))
        chosen = self._like(node, "If", [is_nan.output[0]], out, node.name, then_branch=then, else_branch=same)
        return [raw, total, is_nan, chosen]

    def _sum_of_nonzero(self, node: NodeProto, place: int, kind: int, raw: str) -> Iterator[NodeProto]:
        """`raw`, and where it is NaN the sum of the products whose cotangent is not 0.

        The factors that are infinite or NaN are left out of the sum. If a cotangent that is not 0 meets some of them, the sum
        is ±∞ where all these products are infinite and of one sign, and NaN elsewhere.
        """
        made: list[NodeProto] = []
        zero, one = self._constant(0.0, kind), self._constant(1.0, kind)

        def emit(op_type: str, *inputs: str, **attributes: Any) -> str:
            made.append(self._like(node, op_type, list(inputs), **attributes))
            return str(made[-1].output[0])

        def summed(change: Callable[[str], str], replaced: Callable[[str], str], scaled: bool) -> str:
            """The contraction of the changed cotangent and the other factors, which are replaced."""
            inputs = list(node.input) if scaled or node.op_type != "Gemm" else list(node.input[:2])
            inputs = [
                (change if k == place else replaced)(name) if k < _factors(node) else name
                for k, name in enumerate(inputs)
            ]
            made.append(self._like(node, node.op_type, inputs))
            refill(made[-1].attribute, [a for a in node.attribute if scaled or a.name not in ("alpha", "beta")])
            return str(made[-1].output[0])

        def bad(value: str) -> str:
            return emit("IsNaN", emit("Mul", value, zero))

        def finite_part(value: str) -> str:
            return emit("Where", bad(value), zero, value)

        def signs(value: str) -> str:
            infinite = emit("And", bad(value), emit("Not", emit("IsNaN", value)))
            return emit("Where", infinite, emit("Sign", value), zero)

        def is_bad(value: str) -> str:
            return emit("Cast", bad(value), to=kind)

        def is_nonzero(value: str) -> str:
            return emit("Cast", emit("Not", emit("Equal", value, zero)), to=kind)

        rest = summed(lambda value: value, finite_part, True)
        if _factors(node) > 2:
            # Counted are the products of factors that are finite, and all. The operands of a rotation weigh 1 and 2, so that a
            # difference of two counts is 0 where both are.
            weights = {name: self._constant(k, kind) for k, name in enumerate(node.input[1 : _factors(node)], 1)}
            weights[node.input[0]] = one
            clean = summed(is_nonzero, lambda value: emit("Where", bad(value), zero, weights[value]), False)
            every = summed(
                is_nonzero, lambda value: emit("Add", emit("Mul", finite_part(value), zero), weights[value]), False
            )
            exact = emit("Where", emit("Equal", clean, every), rest, raw)
        else:
            hits = summed(is_nonzero, is_bad, False)
            sides = summed(lambda value: emit("Sign", value), signs, False)
            none = emit("Equal", hits, zero)
            # Not times a constant ∞: ONNX Runtime would make it a factor of the contraction.
            beyond = emit("Div", summed(lambda value: value, signs, True), emit("Cast", none, to=kind))
            exact = emit("Where", emit("Equal", emit("Abs", sides), hits), beyond, raw)
            exact = emit("Where", none, rest, exact)
        emit("Where", emit("IsNaN", raw), exact, raw)
        return iter(made)

    def _with_bodies(self, node: NodeProto, carried: dict[str, int]) -> NodeProto:
        """A node with graphs: their products are guarded too, once it is known which of their inputs carry cotangents."""
        copy = NodeProto()
        copy.CopyFrom(node)
        bodies = {a.name: a.g for a in copy.attribute if a.HasField("g")}
        pairs = _pairs(node)
        states: set[int] = set()  # positions of the inputs that carry a cotangent after a step
        while True:
            found: dict[int, int] = {}
            results: dict[str, list[NodeProto]] = {}
            for name, graph in bodies.items():
                within = dict(carried)
                for outer, inner in pairs.read(graph):
                    kind = carried.get(node.input[outer])
                    if kind is None and outer in states:
                        kind = element_type(graph.input[inner].type)
                    if kind is not None:
                        within[graph.input[inner].name] = kind
                results[name] = self.nodes(graph, within)
                for inner, outer in pairs.returned(graph, len(node.output)):
                    if graph.output[inner].name in within:
                        found[outer] = within[graph.output[inner].name]
            more = {pairs.carried[outer] for outer in found if outer in pairs.carried} - states
            if not more:
                break
            states |= more
        for name, graph in bodies.items():
            refill(graph.node, results[name])
        carried.update((node.output[k], kind) for k, kind in found.items() if node.output[k])
        for outer, place in pairs.carried.items():  # no step may be taken
            if node.input[place] in carried and outer < len(node.output) and node.output[outer]:
                carried[node.output[outer]] = carried[node.input[place]]
        return copy

    def _like(
        self,
        node: NodeProto,
        op_type: str,
        inputs: Sequence[str],
        output: str = "",
        name: str = "",
        **attributes: Any,
    ) -> NodeProto:
        """A node that belongs to what `node` belongs to."""
        name = name or self._builder.fresh(f"{node.name}_{op_type}")
        if not output:
            output = name
        elif output != node.output[0]:
            output = self._builder.fresh(output)
        self._builder.append(op_type, inputs, [output], name, attributes=attributes)
        [made] = self._builder.take(metadata=node.metadata_props)
        return made

    def _constant(self, number: float, kind: int) -> str:
        """A scalar of an element type."""
        key = repr(number), kind
        if key not in self._constants:
            array = np.array(number, helper.tensor_dtype_to_np_dtype(kind))
            self._constants[key] = self._builder.fresh(f"{array.dtype.name}_{number}")
            self.added.append(numpy_helper.from_array(array, self._constants[key]))
            self.added[-1].metadata_props.add(key=CONSTANT)
        return self._constants[key]


class _Pairs:
    """The inputs and outputs of a node with graphs, matched with the inputs and outputs of its graphs.

    `first` is the position from which inputs match, `shift` the number of leading results that the node does not return.
    `carried` maps the position of an output to the position of the input that it becomes in the next step.
    """

    def __init__(self, inputs: int, first: int, shift: int, carried: Mapping[int, int]) -> None:
        self._inputs, self._first, self._shift, self.carried = inputs, first, shift, carried

    def read(self, graph: GraphProto) -> Iterator[tuple[int, int]]:
        """Positions among the node's inputs and among the graph's."""
        return ((k, k) for k in range(self._first, min(self._inputs, len(graph.input))))

    def returned(self, graph: GraphProto, outputs: int) -> Iterator[tuple[int, int]]:
        """Positions among the graph's results and among the node's."""
        return ((k, k - self._shift) for k in range(self._shift, min(len(graph.output), outputs + self._shift)))


def _pairs(node: NodeProto) -> _Pairs:
    inputs = len(node.input)
    if node.op_type == "Loop":  # M, cond, states; the body: step, cond, states -> cond, states, rows
        return _Pairs(inputs, 2, 1, {k: k + 2 for k in range(inputs - 2)})
    if node.op_type == "Scan":
        elements = next(a.i for a in node.attribute if a.name == "num_scan_inputs")
        return _Pairs(inputs, 0, 0, {k: k for k in range(inputs - elements)})
    if node.op_type == "SequenceMap":
        return _Pairs(inputs, 0, 0, {})
    return _Pairs(0, 0, 0, {})  # If reads what it captures


def _factors(node: NodeProto) -> int:
    """The number of leading inputs that are factors."""
    if node.op_type == "Einsum":
        return len(node.input)
    return 3 if node.op_type == "RotaryEmbedding" else 2


def _kind(node: NodeProto, carried: Mapping[str, int]) -> int:
    """The element type of the cotangent that a node returns, 0 if unknown."""
    if node.op_type == "Cast":
        return int(next(attribute_value(a) for a in node.attribute if a.name == "to"))
    if node.op_type == "CastLike":
        return carried.get(node.input[1], 0)
    return next(carried[name] for name in node.input if name in carried)


def _rule(node: NodeProto) -> str:
    """The path in front of the name of `node`. All nodes of one rule for one forward node share it."""
    return str(node.name.rpartition("/")[0] or node.name)
