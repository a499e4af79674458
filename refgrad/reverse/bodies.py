"""The graphs of If, Loop and Scan, each read as a model of its own, swept like one, and split in a forward and a backward part.

What the backward part reads of the forward one are the residuals. They are stored: the forward graph returns them as well.
Computed again are those that do not change from step to step, which would be stored once per step, and those that cannot be
stacked because their shape is not known to stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto, helper, numpy_helper

from refgrad.errors import NoGradientError
from refgrad.forward.calls import Functions
from refgrad.forward.graph import Graph, Node
from refgrad.protos.types import Dim, is_unnamed, type_of, unname
from refgrad.protos.walk import captured, fresh, graphs, names_of, nested, subgraphs
from refgrad.reverse.emit import Emitted, Emitter, Writer, tensor_type
from refgrad.reverse.path import Path, expand
from refgrad.reverse.sweep import Sweep, live_forward, live_nodes, settle
from refgrad.tables.randomness import may_draw


class BodyGraph(Graph):
    """The graph of a body; what it captures is an input of it."""

    def __init__(self, outer: Graph, model: ModelProto, captures: Set[str]) -> None:
        self._outer, self._captures = outer, captures
        super().__init__(model, shapeless=True, functions=outer.functions)

    @cached_property
    def names(self) -> set[str]:
        """Every name of a value, in the whole model."""
        return self._outer.names

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a small constant, of the body or outside, that no caller can override, else None."""
        return self._outer.constant(name) if name in self._captures else super().constant(name)


class Body:
    """A subgraph, and the paths and sweeps through it.

    `inputs` are its formal inputs, `outputs` its results, each computed by a node of its own, `captures` the outer values
    that it reads.
    """

    def __init__(self, outer: Graph, proto: GraphProto, inputs: Sequence[ValueInfoProto], quantization: str) -> None:
        self._take(proto, outer.names, quantization)
        known = known_integers(outer, {name: name for name in self.captures})
        types = (formal(ValueInfoProto(name=name), outer.type_of(name)) for name in self.captures)
        self.graph: Graph = BodyGraph(outer, self._model(outer, [*inputs, *types], known), frozenset(self.captures))
        self.graph.adjoint_types.update(
            (name, outer.adjoint_types[name]) for name in self.captures if name in outer.adjoint_types
        )

    def _take(self, proto: GraphProto, taken: set[str], quantization: str) -> None:
        """Copy the graph, and note its names."""
        self.proto = GraphProto()
        self.proto.CopyFrom(proto)
        self._name_outputs(taken)
        self.captures = list(dict.fromkeys(captured(self.proto)))
        self.inputs = [value.name for value in self.proto.input]
        self.outputs = [value.name for value in self.proto.output]
        self.quantization = quantization
        self._paths: dict[tuple[frozenset[str], frozenset[str]], Path] = {}
        self.steady: frozenset[str] = frozenset()  # inputs whose shape stays the same, whether it is known or not
        self._invariant: set[str] | None = None

    def _model(self, outer: Graph, inputs: Sequence[ValueInfoProto], known: Mapping[str, np.ndarray]) -> ModelProto:
        """The body as a model of its own; those of its inputs that are known are constants of it."""
        model = ModelProto(ir_version=max(outer.model.ir_version, 4), opset_import=outer.model.opset_import)
        model.graph.CopyFrom(self.proto)
        model.graph.name = self.proto.name or "body"
        del model.graph.input[:]
        model.graph.input.extend(value for value in inputs if value.name not in known)
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in known.items())
        return model

    def _name_outputs(self, taken: set[str]) -> None:
        """Let every output be the result of a node, under a name of its own."""
        made = {name for node in self.proto.node for name in node.output}
        for value in self.proto.output:
            if value.name in made:
                made.remove(value.name)
                continue
            name = fresh(f"{value.name}_out", taken)
            self.proto.node.append(helper.make_node("Identity", [value.name], [name], name=name))
            value.name = name

    def path(self, wrt: Iterable[str], outputs: Iterable[str]) -> Path:
        """The path between inputs or captures and outputs; operators without a rule are replaced by their bodies."""
        key = frozenset(wrt), frozenset(outputs)
        while key not in self._paths:
            path = Path(self.graph, *key, self.quantization)
            if path.blocked and expand(self.graph, path.blocked):
                self._paths.clear()  # the nodes are others now
                self._invariant = None
            else:
                self._paths[key] = path
        return self._paths[key]

    def swept(self, op: Emitter, path: Path, taken: set[str] | None = None) -> Swept:
        """The sweep over `path` that emits beside `op`: its seeds are still to be given.

        :param taken: the names that it cannot take, where they are not those of the model: of a function.
        """
        within = Emitter(
            self.graph,
            op.dialect,
            op.taken if taken is None else taken,
            kinks=op.kinks,
            quantization=op.quantization,
            needed=path.needed,
        )
        within.mapped = op.mapped
        within.enter(op.rule, op.node)
        return Swept(self, Sweep(path, within, f"{op.node}/" if taken is None else ""))

    def is_stackable(self, name: str) -> bool:
        """Whether a value is a tensor that has the same shape in every step."""
        if name in self.steady:
            return True
        shape = self.graph.shapes.get(name)
        return name in self.graph.types and shape is not None and not any(is_unnamed(dim) for dim in shape)

    def is_invariant(self, node: Node) -> bool:
        """Whether a node computes the same in every step: it reads captures and constants alone, and draws no numbers."""
        if self._invariant is None:
            self._invariant = {*self.captures, *self.graph.initializers} - set(self.inputs)
            for one in self.graph.nodes:
                if self._invariant.issuperset(filter(None, one.reads)) and not is_random(
                    one.proto, self.graph.functions
                ):
                    self._invariant.update(one.outputs)
        return self._invariant.issuperset(node.outputs)


class FunctionBody(Body):
    """The body of a function: it captures nothing, and its names are its own.

    `known` holds those of its inputs that are given the same array whenever it is called.
    """

    def __init__(
        self,
        outer: Graph,
        function: FunctionProto,
        inputs: Sequence[ValueInfoProto],
        known: Mapping[str, np.ndarray],
        quantization: str,
    ) -> None:
        proto = GraphProto(name=function.name, node=function.node)
        proto.input.extend(ValueInfoProto(name=name) for name in function.input)
        proto.output.extend(ValueInfoProto(name=name) for name in function.output)
        self._take(proto, names_of(proto), quantization)
        self.graph = Graph(self._model(outer, inputs, known), shapeless=True, functions=outer.functions)


class Swept:
    """A body and the sweep over it: what the backward part reads of the forward one, and both as graphs."""

    def __init__(self, body: Body, sweep: Sweep) -> None:
        self.body, self.sweep, self.op = body, sweep, sweep.op
        self.residuals: list[str] = []
        self._again: list[Node] = []
        self._results: list[str] = []
        self._backward: list[Emitted] = []
        self._read: set[str] = set()

    def result(self, value: str) -> str:
        """`value` as a result of the backward graph: computed by a node in it, and no other result."""
        if value in self._results or value not in self.op.made:
            value = self.op.copy(value)
        self._results.append(value)
        return value

    def plan(self, *, stacked: bool, listed: bool = False, mapped: bool = False, recompute: bool = False) -> None:
        """Choose which values the forward graph stores, and which nodes the backward graph repeats.

        :param stacked: the graph is run once per step, and what it stores is stacked.
        :param listed: what cannot be stacked and cannot be computed again is made a sequence.
        :param mapped: the graph is run once per element of a sequence, and what it stores is made one: tensors alone.
        :param recompute: store the states alone.
        :raises NoGradientError: a value that is needed changes its shape from step to step, or is random.
        """
        body, graph = self.body, self.body.graph
        live = set(self._results)
        self._backward = live_nodes(self.op, live)
        settle(graph, self.op, live)
        self._read = live
        inputs, again = set(body.inputs), set()
        stored: dict[str, None] = {}
        makers = {name: node for node in graph.nodes for name in node.outputs if name}
        pending = [name for name in live if name in inputs or name in makers]
        while pending:
            name = pending.pop()
            if name in stored or (name in makers and makers[name].name in again):
                continue
            node = makers.get(name)
            if node is None:
                if name in inputs:
                    if stacked and not (body.is_stackable(name) or (listed and name in graph.types)):
                        raise self._unstackable(name)
                    stored[name] = None
                continue
            random = is_random(node.proto, graph.functions)
            repeat = recompute and not random
            if stacked:
                from_list = listed and name in graph.types and not graph.containers.keys().isdisjoint(node.reads)
                repeat |= body.is_invariant(node) or not (body.is_stackable(name) or from_list)
            if mapped:
                repeat |= body.is_invariant(node) or name in graph.containers
            repeat |= node.key == ("", "Constant")
            if not repeat:
                stored[name] = None
            elif random:
                raise self._unstackable(name)
            else:
                again.add(node.name)
                pending += [read for read in node.reads if read]
        order = [*body.inputs, *(name for node in graph.nodes for name in node.outputs)]
        repeated = {name for node in graph.nodes if node.name in again for name in node.outputs}
        self.residuals = [name for name in order if name in stored and name not in repeated]
        self._again = [node for node in graph.nodes if node.name in again]

    def _unstackable(self, name: str) -> NoGradientError:
        node = self.op.node
        return NoGradientError(
            f"{name!r} in the body of node {node!r} is needed by the backward pass, and its shape is not the same in every "
            "step, or not known to be: declare the shapes of what the loop carries, or choose other names for wrt or outputs.",
            (node,),
        )

    def forward(self, results: Sequence[str | tuple[list[NodeProto], ValueInfoProto]]) -> GraphProto:
        """The body, which also returns `results`: values within, or what the nodes given with it compute.

        An Identity gives an input or an output a second name.
        """
        body, graph = self.body, self.body.graph
        made = GraphProto(name=body.proto.name or "body")
        outputs = list(body.proto.output)
        copies = []
        for name in results:
            if not isinstance(name, str):
                copies += name[0]
                outputs.append(name[1])
                continue
            kind = graph.type_of(name)
            value = ValueInfoProto(name=name)
            if name in body.inputs or name in body.outputs:
                value.name = self.op.fresh(f"{name}_stored")
                copies.append(helper.make_node("Identity", [name], [value.name], name=value.name))
            value.type.CopyFrom(unname(kind) if kind is not None else tensor_type(self.op.type(name), None))
            outputs.append(value)
        live = {*body.outputs, *(one if isinstance(one, str) else one[1].name for one in results)}
        live.update(name for one in results if not isinstance(one, str) for node in one[0] for name in node.input)
        nodes = [node.proto for node in live_forward(graph, live)]
        made.node.extend((*nodes, *copies))
        made.input.extend(body.proto.input)
        made.output.extend(outputs)
        self._add_initializers(made, live)
        return made

    def backward(
        self,
        inputs: Sequence[tuple[str, TypeProto]],
        results: Sequence[tuple[str, TypeProto]],
        first: Sequence[NodeProto] = (),
        rename: Mapping[str, str] | None = None,
    ) -> GraphProto:
        """The graph of the adjoints: `first`, the repeated nodes, and what the sweep emitted.

        :param inputs: its formal inputs.
        :param results: the values it returns, each one made by `result`.
        :param rename: what a residual is called outside, where the graph reads it there.
        """
        names = {**self.sweep.rename, **(rename or {})}
        made = GraphProto(name=self.op.fresh(f"{self.body.proto.name or 'body'}_grad"))
        made.input.extend(helper.make_value_info(name, kind) for name, kind in inputs)
        made.node.extend(first)
        live = set(self._read)
        for node in self._again:
            live.update(node.reads)
            made.node.append(node.proto)
            rename_reads(made.node[-1], names)
        writer = Writer(made, names)
        for emitted in self._backward:
            writer.add(emitted)
        made.output.extend(helper.make_value_info(names.get(name, name), kind) for name, kind in results)
        self._add_initializers(made, live)
        return made

    def _add_initializers(self, made: GraphProto, live: set[str]) -> None:
        given = {*self.body.captures, *self.body.inputs}
        graph = self.body.graph
        made.initializer.extend(t for n, t in graph.initializers.items() if n in live and n not in given)
        made.initializer.extend(t for n, t in self.op.constants.items() if n in live)
        made.sparse_initializer.extend(t for t in graph.model.graph.sparse_initializer if t.values.name in live)


def known_integers(outer: Graph, values: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Those of `values`, outer ones by their names in a body, that are constant integers: inference needs shapes and axes."""
    known = {name: outer.constant(value) for name, value in values.items()}
    return {name: array for name, array in known.items() if array is not None and array.dtype.kind in "iub"}


def is_random(node: NodeProto, functions: Functions | None = None) -> bool:
    """Whether a node, or one in its subgraphs or in a function, draws random numbers: another run of it gives others."""
    within = list(nested([node]))
    for function in functions.called_by(within) if functions else ():
        within += nested(function.node)
    return any(map(may_draw, within))


def rename_reads(node: NodeProto, names: Mapping[str, str]) -> None:
    """Let a node, and those in its subgraphs, read other values."""
    if names.keys().isdisjoint(node.input) and not node.attribute:
        return
    node.input[:] = [names.get(name, name) for name in node.input]
    for graph in (g for attribute in node.attribute for sub in subgraphs(attribute) for g in graphs(sub)):
        for inner in graph.node:
            inner.input[:] = [names.get(name, name) for name in inner.input]


def formal(declared: ValueInfoProto, given: TypeProto | None) -> ValueInfoProto:
    """An input of a body by what it declares of itself and what is known outside; a size that is not known gets a name."""
    if given is None or not given.HasField("tensor_type"):
        value = ValueInfoProto()
        value.CopyFrom(declared)
        if given is not None:
            value.type.CopyFrom(given)
        return value
    own_kind, own = type_of(declared)
    kind, shape = type_of(ValueInfoProto(type=given))
    if shape is None:
        shape = own
    elif own is not None and len(own) == len(shape):
        shape = tuple(b if is_unnamed(a) and isinstance(b, int) else a for a, b in zip(shape, own, strict=True))
    if shape is not None:
        shape = tuple(_named(dim, declared.name, axis) for axis, dim in enumerate(shape))
    return helper.make_tensor_value_info(declared.name, kind or own_kind, shape)


def _named(dim: Dim, name: str, axis: int) -> Dim:
    if dim is None:
        return f"size_{name}_{axis}"
    return f"size_{dim}" if is_unnamed(dim) else dim
