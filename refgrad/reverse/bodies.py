"""The graphs of If, Loop and Scan, each read as a model of its own, swept like one, and split in a forward and a backward part.

What the backward part reads of the forward one are the residuals. They are stored: the forward graph returns them as well.
Computed again are those that do not change from step to step, which would be stored once per step, and those that cannot be
stacked because their shape is not known to stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto, helper, numpy_helper

from refgrad.builder.nodes import EmittedNode, NodeBuilder, needed_emitted, write
from refgrad.builder.op import Emitter
from refgrad.builder.values import Values, tensor_type
from refgrad.errors import NoGradientError
from refgrad.model.graph import Graph, Node, needed_nodes
from refgrad.model.inlining.kept import Functions
from refgrad.model.normalise import normalise
from refgrad.protos.traverse import captured, graphs, names_of, nested, subgraphs
from refgrad.protos.types import SIZE_OF, Dim, is_unnamed, type_of, unname
from refgrad.reverse.edits import edited
from refgrad.reverse.path import ControlFlowRules, Path, complete_path
from refgrad.reverse.sweep import Sweep
from refgrad.tables.randomness import may_draw
from refgrad.tables.registry import VaryingValues


class Body:
    """A subgraph, or the body of a function, and the paths through it.

    `inputs` are its formal inputs, `outputs` its results, each computed by a node of its own, `captures` the outer values
    that it reads. `steady` are the inputs whose shape stays the same, whether it is known or not.
    """

    def __init__(self, proto: GraphProto, structures: ControlFlowRules, steady: Iterable[str] = ()) -> None:
        self.proto = proto
        self.structures = structures
        self.graph = structures.graph
        self.captures = list(dict.fromkeys(captured(proto)))
        self.inputs = [value.name for value in proto.input]
        self.outputs = [value.name for value in proto.output]
        self.steady = frozenset(steady)
        self._paths: dict[tuple[frozenset[str], frozenset[str]], Path] = {}

    @classmethod
    def read(
        cls,
        outer: ControlFlowRules,
        proto: GraphProto,
        inputs: Sequence[ValueInfoProto],
        steady: Iterable[str] = (),
    ) -> Body:
        """The body `proto` of a node in the graph of `outer`; `inputs` are its formal inputs with their types."""
        copy, graph = _with_named_outputs(proto, outer.names), outer.graph
        captures = list(dict.fromkeys(captured(copy)))
        known = known_integers(graph, {name: name for name in captures})
        types = (formal(ValueInfoProto(name=name), graph.type_of(name)) for name in captures)
        model = _as_model(graph, copy, [*inputs, *types], known)
        view = normalise(model, shapeless=True, functions=graph.functions, outer=graph, captures=frozenset(captures))
        return cls(copy, outer.over(view), steady)

    @classmethod
    def of_function(
        cls,
        outer: ControlFlowRules,
        function: FunctionProto,
        inputs: Sequence[ValueInfoProto],
        known: Mapping[str, np.ndarray],
    ) -> Body:
        """The body of a function: it captures nothing, and its names are its own.

        :param known: the arrays of the inputs that get the same array in every call.
        """
        proto = GraphProto(name=function.name, node=function.node)
        proto.input.extend(ValueInfoProto(name=name) for name in function.input)
        proto.output.extend(ValueInfoProto(name=name) for name in function.output)
        copy, graph = _with_named_outputs(proto, names_of(proto)), outer.graph
        view = normalise(_as_model(graph, copy, inputs, known), shapeless=True, functions=graph.functions)
        return cls(copy, ControlFlowRules(view, outer.quantization))

    def path(self, flow: VaryingValues, wrt: Iterable[str], outputs: Iterable[str]) -> Path:
        """The path between inputs or captures and outputs; operators without a rule are replaced by their bodies.

        :param flow: what varies outside, of which the body captures some.
        """
        key = frozenset(wrt), frozenset(outputs)
        if key not in self._paths:
            carried = {name: flow.adjoint_types[name] for name in self.captures if name in flow.adjoint_types}
            self._paths[key] = complete_path(self.structures, [*key[0]], [*key[1]], carried)
        return self._paths[key]

    def swept(self, op: Emitter, path: Path, taken: set[str] | None = None) -> Swept:
        """The sweep over `path` that emits beside `op`: its seeds are still to be given.

        :param taken: the names that it cannot take, in a function; by default the names of the model.
        """
        names = op.emission.taken if taken is None else taken
        names.update(self.outputs)  # some got a name when the body was read
        within = Emitter(
            Values(path.graph, path.adjoint_types, op.values.inputs if taken is None else ()),
            op.dialect,
            names,
            conventions=op.conventions,
            needed=path.needed,
        )
        within.mapped = op.mapped
        within.enter(op.rule, op.node)
        return Swept(self, Sweep(path, within, f"{op.node}/" if taken is None else ""))


def _with_named_outputs(proto: GraphProto, taken: set[str]) -> GraphProto:
    """A copy in which every output is the result of a node, under a name of its own."""
    copy = GraphProto()
    copy.CopyFrom(proto)
    builder = NodeBuilder(taken)
    made = {name for node in copy.node for name in node.output}
    for value in copy.output:
        if value.name in made:
            made.remove(value.name)
            continue
        value.name = builder.add("Identity", [value.name], f"{value.name}_out")
    copy.node.extend(builder.take())
    return copy


def _as_model(
    outer: Graph, proto: GraphProto, inputs: Sequence[ValueInfoProto], known: Mapping[str, np.ndarray]
) -> ModelProto:
    """The body as a model of its own; the inputs in `known` become its constants."""
    model = ModelProto(ir_version=max(outer.model.ir_version, 4), opset_import=outer.model.opset_import)
    model.graph.CopyFrom(proto)
    model.graph.name = proto.name or "body"
    del model.graph.input[:]
    model.graph.input.extend(value for value in inputs if value.name not in known)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in known.items())
    return model


class Swept:
    """A body and the sweep over it: what the backward part reads of the forward one, and both as graphs."""

    def __init__(self, body: Body, sweep: Sweep) -> None:
        self.body, self.sweep, self.op, self.graph = body, sweep, sweep.op, sweep.graph
        self.residuals: list[str] = []
        self._forward: Sequence[Node] = ()
        self._again: list[Node] = []
        self._results: list[str] = []
        self._backward: list[EmittedNode] = []
        self._read: set[str] = set()

    def result(self, value: str) -> str:
        """`value` as a result of the backward graph: computed by a node in it, and no other result."""
        if value in self._results or not self.op.is_emitted(value):
            value = self.op.copy(value)
        self._results.append(value)
        return value

    def is_stackable(self, name: str) -> bool:
        """True if a value is a tensor that has the same shape in every step."""
        if name in self.body.steady:
            return True
        values = self.op.values
        shape = values.shapes.get(name)
        return values.is_tensor(name) and shape is not None and not any(is_unnamed(dim) for dim in shape)

    @cached_property
    def _invariant(self) -> set[str]:
        """The values that are the same in every step: they depend on captures and constants alone, and none is random."""
        found = {*self.body.captures, *self.graph.initializers} - set(self.body.inputs)
        for node in self._forward:
            if found.issuperset(filter(None, node.reads)) and not is_random(node.proto, self.graph.functions):
                found.update(node.outputs)
        return found

    def plan(self, *, stacked: bool, listed: bool = False, mapped: bool = False, recompute: bool = False) -> None:
        """Choose which values the forward graph stores, and which nodes the backward graph repeats.

        :param stacked: the graph is run once per step, and what it stores is stacked.
        :param listed: what cannot be stacked and cannot be computed again is made a sequence.
        :param mapped: the graph is run once per element of a sequence, and what it stores is made one: tensors alone.
        :param recompute: store the states alone.
        :raises NoGradientError: a value that is needed changes its shape from step to step, or is random.
        """
        body, graph, values = self.body, self.graph, self.op.values
        live = set(self._results)
        self._backward = needed_emitted(self.op.emission.nodes, live)
        self._forward = edited(graph.nodes, self.op.edits, live)
        self._read = live
        inputs, again = set(body.inputs), set()
        stored: dict[str, None] = {}
        known: dict[str, tuple[bool, bool]] = {}  # by node: is it random, is it the same in every step?
        makers = {name: node for node in self._forward for name in node.outputs if name}
        pending = [name for name in live if name in inputs or name in makers]
        while pending:
            name = pending.pop()
            if name in stored or (name in makers and makers[name].name in again):
                continue
            node = makers.get(name)
            if node is None:
                if name in inputs:
                    if stacked and not (self.is_stackable(name) or (listed and values.is_tensor(name))):
                        raise self._unstackable(name)
                    stored[name] = None
                continue
            if node.name not in known:  # a node of a body may return thousands of values
                known[node.name] = is_random(node.proto, graph.functions), self._invariant.issuperset(node.outputs)
            random, invariant = known[node.name]
            repeat = recompute and not random
            if stacked:
                from_list = listed and values.is_tensor(name) and not values.containers.keys().isdisjoint(node.reads)
                repeat |= invariant or not (self.is_stackable(name) or from_list)
            if mapped:
                repeat |= invariant or name in values.containers
            repeat |= node.key == ("", "Constant")
            if not repeat:
                stored[name] = None
            elif random:
                raise self._unstackable(name)
            else:
                again.add(node.name)
                pending += [read for read in node.reads if read]
        order = [*body.inputs, *(name for node in self._forward for name in node.outputs)]
        repeated = {name for node in self._forward if node.name in again for name in node.outputs}
        self.residuals = [name for name in order if name in stored and name not in repeated]
        self._again = [node for node in self._forward if node.name in again]

    def _unstackable(self, name: str) -> NoGradientError:
        node = self.op.node
        return NoGradientError(
            f"{name!r} in the body of node {node!r} is needed by the backward pass, and its shape is not the same in every "
            "step, or not known to be: declare the shapes of the values that the loop carries, or choose other inputs or "
            "outputs: wrt=[...] or outputs=[...].",
            (node,),
        )

    def forward(self, results: Sequence[str | tuple[list[NodeProto], ValueInfoProto]]) -> GraphProto:
        """The body, which also returns `results`: values within, or what the nodes given with it compute.

        An Identity gives an input or an output a second name.
        """
        body, values = self.body, self.op.values
        made = GraphProto(name=body.proto.name or "body")
        builder = NodeBuilder(self.op.emission.taken)
        outputs = list(body.proto.output)
        copies = []
        for name in results:
            if not isinstance(name, str):
                copies += name[0]
                outputs.append(name[1])
                continue
            kind = values.type_of(name)
            value = ValueInfoProto(name=name)
            if name in body.inputs or name in body.outputs:
                value.name = builder.add("Identity", [name], f"{name}_stored")
                copies += builder.take()
            value.type.CopyFrom(unname(kind) if kind is not None else tensor_type(values.type(name), None))
            outputs.append(value)
        live = {*body.outputs, *(one if isinstance(one, str) else one[1].name for one in results)}
        live.update(name for one in results if not isinstance(one, str) for node in one[0] for name in node.input)
        nodes = [node.proto for node in needed_nodes(self._forward, live)]
        made.node.extend((*nodes, *copies))
        made.input.extend(body.proto.input)
        made.output.extend(outputs)
        made.value_info.extend(self._declared(nodes, {value.name for value in outputs}))
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
        names = {**self.sweep.names, **(rename or {})}
        made = GraphProto(name=self.op.fresh(f"{self.body.proto.name or 'body'}_grad"))
        made.input.extend(helper.make_value_info(name, kind) for name, kind in inputs)
        made.node.extend(first)
        live = set(self._read)
        for node in self._again:
            live.update(node.reads)
            made.node.append(node.proto)
            rename_reads(made.node[-1], names)
        write(made, self._backward, names)
        made.output.extend(helper.make_value_info(names.get(name, name), kind) for name, kind in results)
        made.value_info.extend(self.op.declarations(live.difference(name for name, _ in results), names))
        made.value_info.extend(self._declared((node.proto for node in self._again), {name for name, _ in results}))
        self._add_initializers(made, live)
        return made

    def _declared(self, nodes: Iterable[NodeProto], results: set[str]) -> list[ValueInfoProto]:
        """The types that the body declares for outputs of `nodes`, except `results`: onnx infers none for some functions."""
        made = {name for node in nodes for name in node.output}.difference(results)
        declared = {value.name: value for value in (*self.body.proto.value_info, *self.body.proto.output)}
        return [value for name, value in declared.items() if name in made and value.HasField("type")]

    def _add_initializers(self, made: GraphProto, live: set[str]) -> None:
        given, graph = {*self.body.captures, *self.body.inputs}, self.graph
        made.initializer.extend(t for n, t in graph.initializers.items() if n in live and n not in given)
        made.initializer.extend(t for n, t in self.op.emission.constants.items() if n in live)
        made.sparse_initializer.extend(t for t in graph.model.graph.sparse_initializer if t.values.name in live)


def known_integers(outer: Graph, values: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The constant integers and bools among the outer `values`, by their names in a body: inference needs shapes and axes."""
    known = {name: outer.constant(value) for name, value in values.items()}
    return {name: array for name, array in known.items() if array is not None and array.dtype.kind in "iub"}


def is_random(node: NodeProto, functions: Functions | None = None) -> bool:
    """True if a node, or one in its subgraphs or in a function, draws random numbers: another run of it gives others."""
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
        return f"{SIZE_OF}{name}_{axis}"
    return f"{SIZE_OF}{dim}" if is_unnamed(dim) else dim
