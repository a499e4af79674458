"""`refgrad.split`: a gradient as two models. The forward model keeps values, and the backward model reads them.

A layer of another framework needs two models, because it gets the cotangents later than the inputs. A minimum cut chooses the
values that cross from one to the other, as Chen et al. (2016) choose the values that a training keeps. A value either crosses,
or the backward model computes it again. The backward model only repeats nodes that cost nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Unpack

from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto

from refgrad import traits
from refgrad.model.checks.malformed import explained
from refgrad.model.inlining.kept import Functions
from refgrad.protos.traverse import reads_of, refill
from refgrad.protos.types import nbytes, type_of
from refgrad.reverse.assembly import names_in, note
from refgrad.reverse.bodies import is_random
from refgrad.reverse.gradient import gradient
from refgrad.rewrites.selection import inferred, select_model_inputs_outputs
from refgrad.tables.conventions import ConventionOptions

# Operators that cost next to nothing: they move no elements, or only the elements of a shape.
_FREE = traits.RESHAPES | traits.SIZES | {"Constant", "Expand", "Range"}
_SMALL = 64  # elements. A node whose inputs and outputs are all as small, such as sizes or axes, costs nothing.
_REPEAT_BYTES = 2**12  # repeating a node that costs nothing counts as so many bytes that cross
_CONTAINER_BYTES = 2**40  # a sequence counts as so many bytes, so that it crosses only if nothing else can


class _Kind(Enum):
    """A kind of node, which decides the model that it can be in."""

    BACKWARD = auto()  # depends on a cotangent: in the backward model
    RANDOM = auto()  # draws random numbers, which the models have to share: in the forward model
    CONSTANT = auto()  # depends on constants alone: may be in both models
    FREE = auto()  # costs nothing: may be in both models
    COSTLY = auto()  # any other: in the forward model if an output of the model needs it, otherwise in one of both


@dataclass(frozen=True)
class Split:
    """A gradient in two models.

    :param forward: takes the inputs of the model (and weights that are inputs), and returns its outputs and then `saved`.
    :param backward: takes the inputs of `forward` that it reads, `saved`, and a cotangent per output. It returns the gradients.
    :param saved: the values that cross from `forward` to `backward`, by name. Outputs may be among them, inputs never are.
    """

    forward: ModelProto
    backward: ModelProto
    saved: tuple[str, ...]


@explained
def split(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    *,
    recompute: bool | Sequence[str] = False,
    memory: str | None = None,
    weights: str = "overridable",
    **conventions: Unpack[ConventionOptions],
) -> Split:
    """The gradient of `model` as a forward and a backward model. The forward model also returns values for the backward model.

    Run one after the other, the two models compute `refgrad.gradient(model, wrt, outputs, keep_outputs=True)`. No costly node
    is in both. The values that cross are chosen to take the fewest bytes, where an unknown size counts as 64. Inputs, weights
    and constants do not cross: both models have them. Inputs, outputs, cotangents and gradients have the same names, shapes and
    types as in `refgrad.gradient`. Values that cross keep their names.

    :param model: the model, as in `refgrad.gradient`. It is not modified.
    :param wrt: as in `refgrad.gradient`.
    :param outputs: as in `refgrad.gradient`.
    :param recompute: as in `refgrad.gradient`. The backward model repeats more forward nodes, so that fewer values cross.
    :param memory: as in `refgrad.gradient`: a budget for a run of both models.
    :param weights: as in `refgrad.gradient`.
    :param conventions: `kinks` and the other conventions of `refgrad.gradient`.
    :raises InvalidModelError: as in `refgrad.gradient`, or the type of a value that has to cross is not known.
    :raises UnknownNameError: as in `refgrad.gradient`.
    :raises NoGradientError: as in `refgrad.gradient`.
    :raises OptionError: as in `refgrad.gradient`.

    >>> import onnx.parser, refgrad
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    ... layer (float[N, 3] x, float[3, 4] w) => (float[N, 4] y) { p = MatMul(x, w)  y = Tanh(p) }''')
    >>> parts = refgrad.split(model)
    >>> parts.saved
    ('y',)
    >>> [v.name for v in parts.backward.graph.input], [v.name for v in parts.backward.graph.output]
    (['x', 'w', 'y', 'y_grad'], ['x_grad', 'w_grad'])
    """
    joint = gradient(
        model,
        wrt,
        outputs,
        keep_outputs=True,
        recompute=recompute,
        memory=memory,
        weights=weights,
        **conventions,
    )
    cotangents, gradients = (list(names.values()) for names in names_in(joint))
    results = [value.name for value in joint.graph.output if value.name not in gradients]
    inputs = [value.name for value in joint.graph.input if value.name not in cotangents]
    graph = joint.graph
    types = {value.name: value.type for value in inferred(joint)}
    types |= {value.name: value.type for value in (*graph.value_info, *graph.output)}
    crossing = _Crossing(joint, types, inputs, cotangents, gradients, results)
    saved = crossing.values()
    declared = {value.name for value in (*graph.value_info, *graph.output)}
    graph.value_info.extend(ValueInfoProto(name=n, type=types[n]) for n in saved if n in types and n not in declared)
    forward = select_model_inputs_outputs(joint, [*dict.fromkeys((*results, *saved))], inputs)
    read = crossing.read_by_backward(saved)
    backward = select_model_inputs_outputs(
        joint, gradients, [*(name for name in inputs if name in read), *saved, *cotangents]
    )
    of_outputs, of_names = names_in(joint)
    note(forward, joint, saved=saved)
    note(backward, joint, gradients=of_names, cotangents=of_outputs, saved=saved)
    for part in (forward, backward):
        refill(part.functions, Functions(joint.functions).called_by(part.graph.node))
    return Split(forward, backward, tuple(saved))


class _Crossing:
    """Chooses the values of a gradient that cross from the forward to the backward model."""

    def __init__(
        self,
        joint: ModelProto,
        types: Mapping[str, TypeProto],
        inputs: Sequence[str],
        cotangents: Sequence[str],
        gradients: Sequence[str],
        results: Sequence[str],
    ) -> None:
        graph = joint.graph
        self._types, self._gradients = types, gradients
        self._sizes = {t.name: math.prod(t.dims) for t in graph.initializer}
        self._reads = [dict.fromkeys(filter(None, reads_of(node))) for node in graph.node]
        self._nodes = list(graph.node)
        self._producer = {name: k for k, node in enumerate(graph.node) for name in node.output if name}
        constants = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        self._in_both = constants | set(inputs)
        constants -= set(inputs)  # a feed may override these
        self._kinds = self._kinds_of_nodes(Functions(joint.functions), constants, {*cotangents, *gradients})
        self._of_outputs = self._needed(results, self._in_both)[1]  # the nodes that the outputs of the model need

    def _kinds_of_nodes(self, functions: Functions, constants: set[str], backward: set[str]) -> list[_Kind]:
        """The kind of each node.

        :param constants: the constants. The outputs of constant nodes are added.
        :param backward: the cotangents and the gradients. The outputs of backward nodes are added.
        """
        kinds = []
        for k, node in enumerate(self._nodes):
            if not backward.isdisjoint(self._reads[k]) or not backward.isdisjoint(node.output):
                kinds.append(_Kind.BACKWARD)
                backward.update(node.output)
            elif is_random(node, functions):
                kinds.append(_Kind.RANDOM)
            elif constants.issuperset(self._reads[k]):
                kinds.append(_Kind.CONSTANT)
                constants.update(node.output)
            else:
                kinds.append(_Kind.FREE if self._costs_nothing(k) else _Kind.COSTLY)
        return kinds

    def values(self) -> list[str]:
        """The values that cross, in the order in which they are computed: the values of a minimum cut.

        In the network, a value is an edge, and its capacity is its bytes. The source feeds the values that the backward model
        cannot compute. The other values are fed by the values that they are computed from, and, if computing them again repeats
        a node, also by the source, with a small capacity. The values that backward nodes read lead to the sink.
        """
        import networkx

        network: networkx.DiGraph[str | tuple[str, str]] = networkx.DiGraph()
        source, sink = "source", "sink"
        network.add_nodes_from((source, sink))
        candidates = [name for name, k in self._producer.items() if self._kinds[k] is not _Kind.BACKWARD]
        for name in candidates:
            k = self._producer[name]
            kind, is_needed = self._kinds[k], k in self._of_outputs
            network.add_edge((name, "in"), (name, "out"), capacity=self._nbytes(name))
            if kind is _Kind.RANDOM or (is_needed and kind is _Kind.COSTLY):
                network.add_edge(source, (name, "in"))
                continue
            network.add_edges_from(
                ((read, "out"), (name, "in")) for read in self._reads[k] if read not in self._in_both
            )
            # Repeating a shape is better than passing it: a runtime may fold it to a constant, as in the joint graph.
            if is_needed and kind is _Kind.FREE and not self._is_small(name, TensorProto.INT64):
                network.add_edge(source, (name, "in"), capacity=_REPEAT_BYTES)
        for k, reads in enumerate(self._reads):
            if self._kinds[k] is _Kind.BACKWARD:
                of_forward = [name for name in reads if self._kinds[self._producer.get(name, k)] is not _Kind.BACKWARD]
                network.add_edges_from(((name, "out"), sink) for name in of_forward if name not in self._in_both)
        # networkx returns the minimum cut nearest to the end of the flow: in the reversed network, nearest to the source.
        _, (_, source_side) = networkx.minimum_cut(network.reverse(copy=False), sink, source)
        return [name for name in candidates if (name, "in") in source_side and (name, "out") not in source_side]

    def read_by_backward(self, saved: Sequence[str]) -> set[str]:
        """The inputs, constants and saved values that the backward model reads."""
        return self._needed(self._gradients, self._in_both.union(saved))[0]

    def _needed(self, names: Sequence[str], available: Set[str]) -> tuple[set[str], set[int]]:
        """The values in `available` from which `names` are computed, and the nodes that compute them."""
        read, nodes, pending = set[str](), set[int](), list(names)
        while pending:
            name = pending.pop()
            k = self._producer.get(name)
            if name in available or k is None:
                read.add(name)
            elif k not in nodes:
                nodes.add(k)
                pending.extend(self._reads[k])
        return read, nodes

    def _costs_nothing(self, k: int) -> bool:
        node = self._nodes[k]
        if node.domain in ("", "ai.onnx") and node.op_type in _FREE:
            return True
        return all(self._is_small(name) for name in (*self._reads[k], *filter(None, node.output)))

    def _is_small(self, name: str, element_type: int = 0) -> bool:
        """True if a tensor has few elements.

        :param element_type: the type that it must have, 0 for any.
        """
        if name in self._sizes:
            return self._sizes[name] <= _SMALL
        kind, shape = type_of(ValueInfoProto(type=self._types.get(name)))
        sizes = [dim for dim in shape or () if isinstance(dim, int)]
        return (
            bool(kind)
            and element_type in (0, kind)
            and shape is not None
            and len(sizes) == len(shape)
            and math.prod(sizes) <= _SMALL
        )

    def _nbytes(self, name: str) -> int:
        """The bytes of a value, plus one, so that among cuts of equal bytes the one with fewer values wins."""
        kind, shape = type_of(ValueInfoProto(type=self._types.get(name)))
        return nbytes(kind, shape) + 1 if kind else _CONTAINER_BYTES
