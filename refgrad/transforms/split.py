"""`refgrad.split`: the gradient as two models, one that runs forward and keeps values, and one that runs backward from them.

A layer of another framework needs them apart: it gets the cotangents later than the inputs. What the second model reads of the
first is chosen by a minimum cut, as by Chen et al. (2016) for the memory of training, but without doing work twice: a value may
cross, or it may be computed in the backward model from what is there, where no node that costs anything is repeated for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Unpack

from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto

from refgrad import traits
from refgrad.forward.calls import Functions
from refgrad.protos.malformed import explained
from refgrad.protos.types import nbytes, type_of
from refgrad.protos.walk import reads_of, refill
from refgrad.reverse.assembly import names_in, note
from refgrad.reverse.bodies import is_random
from refgrad.reverse.gradient import gradient
from refgrad.tables.conventions import ConventionOptions
from refgrad.transforms.selection import inferred, select_model_inputs_outputs

# Operators that move no numbers, or only the numbers of a shape: repeating them costs next to nothing.
_FREE = traits.RESHAPES | traits.SIZES | {"Constant", "Expand", "Range"}
_SHAPES = 64  # as many numbers as a tensor of sizes or axes may have: whatever computes it costs nothing
_REPEATED = 2**12  # the bytes that may cross rather than one node is in both models
_CONTAINER = 2**40  # a sequence crosses where nothing else can


@dataclass(frozen=True)
class Split:
    """A gradient in two models.

    `forward` has the inputs of the model (and the weights, as `weights` says), and returns the outputs of the model and then
    the values that it keeps. `backward` has the inputs of `forward` that it reads, `saved`, and a cotangent for each output; it
    returns the gradients. `saved` are the names of the values that cross. Outputs of the model may be among them, inputs never
    are.
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
    """The gradient of `model` as a forward model, which also returns what the backward model reads, and that backward model.

    Run one after the other they do the work of `refgrad.gradient(model, wrt, outputs, keep_outputs=True)`: no costly node is in
    both. What crosses is chosen so that it takes the fewest bytes; a size that is not known counts as 64. Inputs, weights and
    constants do not cross: both models have them. Inputs, outputs, cotangents and gradients have the names, shapes and types
    that `refgrad.gradient` gives them; values that cross keep the names that they have within.

    :param model: and `wrt`, `outputs`, `weights`: as in `refgrad.gradient`. The model is not modified.
    :param recompute: as there: more of the forward model is computed again in the backward model, so that less crosses.
    :param memory: as there, for both models in one run.
    :param conventions: `kinks` and the other conventions of `refgrad.gradient`.
    :raises InvalidModelError: as there, or the type of a value that has to cross is not known.
    :raises UnknownNameError: and NoGradientError, OptionError: as there.

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
    read = crossing.read_beside(saved)
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
    """The values of a gradient that cross from its forward to its backward part.

    A node that depends on a cotangent is in the backward part, one that the outputs of the model need in the forward part,
    and any other may be in either. A node that costs nothing may be in both.
    """

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
        functions = Functions(joint.functions)
        fixed = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        self._there = fixed | set(inputs)  # in both models
        fixed -= set(inputs)
        late = {*cotangents, *gradients}
        self._late, self._drawn, self._free, self._folded = set[int](), set[int](), set[int](), set[int]()
        for k, node in enumerate(graph.node):
            if not late.isdisjoint(self._reads[k]) or not late.isdisjoint(node.output):
                self._late.add(k)
                late.update(node.output)
            elif is_random(node, functions):
                self._drawn.add(k)
            elif fixed.issuperset(self._reads[k]):
                self._free.add(k)
                self._folded.add(k)
                fixed.update(node.output)
            elif self._costs_nothing(k):
                self._free.add(k)
        self._early = self._needed(results, self._there)[1]

    def values(self) -> list[str]:
        """The values that cross, in the order in which they are computed: the values of a minimum cut.

        In the network a value is an edge of the capacity of its bytes. What can be computed in the backward part hangs on what
        it is computed from, and by a thin edge on the source where that repeats a node; everything else hangs on the source.
        What the backward part reads leads to the sink.
        """
        import networkx

        network: networkx.DiGraph[str | tuple[str, str]] = networkx.DiGraph()
        source, sink = "source", "sink"
        network.add_nodes_from((source, sink))
        made = [name for name, k in self._producer.items() if k not in self._late]
        for name in made:
            k = self._producer[name]
            network.add_edge((name, "in"), (name, "out"), capacity=self._nbytes(name))
            if k in self._drawn or (k in self._early and k not in self._free):
                network.add_edge(source, (name, "in"))
                continue
            network.add_edges_from(((read, "out"), (name, "in")) for read in self._reads[k] if read not in self._there)
            # A shape that is computed again may be a constant to a runtime, as it is in the joint graph.
            if k in self._early and k not in self._folded and not self._is_small(name, TensorProto.INT64):
                network.add_edge(source, (name, "in"), capacity=_REPEATED)
        for k in self._late:
            of_forward = (read for read in self._reads[k] if self._producer.get(read, k) not in self._late)
            network.add_edges_from(((read, "out"), sink) for read in of_forward if read not in self._there)
        # Of several the one nearest to the source: networkx gives the one nearest to where the flow ends.
        _, (_, before) = networkx.minimum_cut(network.reverse(copy=False), sink, source)
        return [name for name in made if (name, "in") in before and (name, "out") not in before]

    def read_beside(self, saved: Sequence[str]) -> set[str]:
        """The values that the backward part reads, down to inputs and constants, where it is given the values in `saved`."""
        return self._needed(self._gradients, self._there.union(saved))[0]

    def _needed(self, names: Sequence[str], given: Set[str]) -> tuple[set[str], set[int]]:
        """The values in `given` that `names` need, and the nodes that compute the others."""
        found, nodes, pending = set[str](), set[int](), list(names)
        while pending:
            name = pending.pop()
            k = self._producer.get(name)
            if name in given or k is None:
                found.add(name)
            elif k not in nodes:
                nodes.add(k)
                pending.extend(self._reads[k])
        return found, nodes

    def _costs_nothing(self, k: int) -> bool:
        node = self._nodes[k]
        if node.domain in ("", "ai.onnx") and node.op_type in _FREE:
            return True
        return all(self._is_small(name) for name in (*self._reads[k], *filter(None, node.output)))

    def _is_small(self, name: str, of: int = 0) -> bool:
        """True if a tensor has few elements, of the element type `of` where that is not 0."""
        if name in self._sizes:
            return self._sizes[name] <= _SHAPES
        kind, shape = type_of(ValueInfoProto(type=self._types.get(name)))
        sizes = [dim for dim in shape or () if isinstance(dim, int)]
        return (
            bool(kind)
            and of in (0, kind)
            and shape is not None
            and len(sizes) == len(shape)
            and math.prod(sizes) <= _SHAPES
        )

    def _nbytes(self, name: str) -> int:
        """The bytes of a value, and one more: of equal choices the one with fewer values is taken."""
        kind, shape = type_of(ValueInfoProto(type=self._types.get(name)))
        return nbytes(kind, shape) + 1 if kind else _CONTAINER
