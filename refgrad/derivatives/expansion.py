"""`refgrad.expand_gradients`: the operator Gradient of ai.onnx.preview.training becomes the graph that it stands for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TypeProto,
    helper,
)

from refgrad.errors import ExpansionError, choices, did_you_mean
from refgrad.links import Folders
from refgrad.model.checks.malformed import explained
from refgrad.model.graph import taken_names
from refgrad.model.inference.completion import infer_completely
from refgrad.model.inference.infer import infer
from refgrad.model.normalise import normalise
from refgrad.model.reading import read
from refgrad.notices import quiet
from refgrad.protos.domains import TRAINING
from refgrad.protos.traverse import (
    attribute_value,
    every_node,
    fresh,
    graphs,
    import_onnx,
    names_of,
    reads_of,
    rename_values,
    subgraphs,
)
from refgrad.protos.types import FLOATS
from refgrad.reverse.assembly import IR_VERSION, names_in
from refgrad.reverse.gradient import gradient
from refgrad.reverse.ranks import of_any_rank
from refgrad.rewrites.lower import assemble
from refgrad.worker import limited

Tensor: TypeAlias = "TensorProto | SparseTensorProto"


@limited
@explained
def expand_gradients(
    model: ModelProto | str | os.PathLike[str],
    *,
    max_memory: int | None = None,
    max_seconds: float | None = None,
    data_folders: Folders | None = None,
) -> ModelProto:
    """The model in which the graph of the derivative replaces every node Gradient of ai.onnx.preview.training.

    A node Gradient(xs, zs, y) has one output per name in `xs`, of the type and shape of that value: the derivative of `y`
    (of the sum of its elements if it has several) with respect to that value. `xs` and `zs` are independent of each other and
    determine `y` together with the constants, which include initializers. The node's inputs are the values of `xs` and `zs` at
    which the derivative is taken. If they are the named values themselves, nothing is computed twice. If one is another
    value, the values between it and `y` are computed anew.

    Nodes are expanded in topological order, so `y` may be the result of another Gradient, for derivatives of higher order; in
    the branches of If and the bodies of Loop and Scan, too. A model of an opset before 16 is converted to 16, local functions
    are inlined. Inputs, outputs and initializers keep names, order and types. A model without a node Gradient is returned as a
    copy. The caller's model is not modified. External data is referenced, not read: save the result in the folder of the
    model.

    :param model: a model, or the path of one.
    :param max_memory: and `max_seconds`, `data_folders`: as in `gradient`.
    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    :raises ExpansionError: a node Gradient with attributes, inputs or outputs that do not go together; a name that no value
        before the node has; an `x` that `y` does not depend on; an `x` or `y` that is not a float; `xs` and `zs` that do not
        determine `y`, or that are not independent.
    :raises NoGradientError: an operator between `xs` and `y` has no rule or no derivative.
    :raises WorkerError: that process met a limit, or crashed.

    >>> import onnx.parser, refgrad
    >>> slope = onnx.parser.parse_model('''
    ...     <ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]> slope (float[N] x) => (float[N] dy) {
    ...         y = Mul(x, x)
    ...         dy = ai.onnx.preview.training.Gradient <xs = ["x"], y = "y"> (x)
    ...     }
    ... ''')
    >>> [node.op_type for node in refgrad.expand_gradients(slope).graph.node]
    ['Mul', 'Shape', 'ConstantOfShape', 'Mul', 'Add']
    """
    source = read(model, lift=False)
    if not any(is_gradient(node) for node in every_node(source)):
        result = ModelProto()
        result.CopyFrom(source)
        return result
    return _Expansion(source).model()


def is_gradient(node: NodeProto) -> bool:
    """True if `node` is a Gradient of ai.onnx.preview.training."""
    return bool(node.op_type == "Gradient" and node.domain == TRAINING)


@dataclass
class _Scope:
    """The values that a graph sees: results of its nodes so far, and the values of the graphs around it."""

    graph: GraphProto
    outer: _Scope | None
    tensors: dict[str, Tensor]
    types: dict[str, TypeProto]
    nodes: list[NodeProto] = field(default_factory=list)
    producer: dict[str, NodeProto] = field(default_factory=dict)

    def around(self) -> Iterator[_Scope]:
        """The scope and those around it, from the inside out."""
        scope: _Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer

    def put(self, nodes: Sequence[NodeProto], before: NodeProto | None = None) -> None:
        """Add nodes, at the end or in front of another."""
        if before is None:
            self.nodes += nodes
        elif nodes:
            position = next(k for k, node in enumerate(self.nodes) if node is before)
            self.nodes[position:position] = nodes
        self.producer.update((name, node) for node in nodes for name in node.output if name)

    def made_by(self, name: str) -> NodeProto | None:
        """The node that makes a value, here or around; None where no node does."""
        return next((scope.producer[name] for scope in self.around() if name in scope.producer), None)

    def tensor(self, name: str) -> Tensor | None:
        """The initializer of that name, here or around."""
        return next((scope.tensors[name] for scope in self.around() if name in scope.tensors), None)

    def type(self, name: str) -> TypeProto | None:
        """The type of a value, where it is known."""
        kind = next((scope.types[name] for scope in self.around() if name in scope.types), None)
        tensor = self.tensor(name)
        if kind is None and isinstance(tensor, TensorProto):
            return helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        return kind


@dataclass
class _Network:
    """The nodes, in order, and the initializers that compute a value from `reached`, values of a cut, and `ends`, others."""

    nodes: list[NodeProto]
    tensors: list[str]
    reached: set[str]
    ends: list[str]


class _Expansion:
    """One expansion: the model that is being written, and the names that are taken."""

    def __init__(self, source: ModelProto) -> None:
        self.source = source
        named = ModelProto()
        named.CopyFrom(source)
        import_onnx(named)
        _name_inputs(named)
        self.graph = normalise(named, shapeless=True)
        self.taken = taken_names(self.graph) | {v.name for v in source.graph.output}
        self.labels = {node.name for graph in graphs(self.graph.model.graph) for node in graph.node}
        self.constants: list[TensorProto] = []
        self.depends: dict[str, list[str]] = {}  # results of nodes that are rewritten: what the original nodes read

    def model(self) -> ModelProto:
        """The expanded model."""
        graph = self.graph.model.graph
        self._expand(graph, infer_completely(_stand_ins(self.graph.model)), None)
        inputs = list(self.graph.inputs.values())
        return assemble(self.source, self.graph, graph, inputs, self.source.graph.output, self.constants)

    def _expand(self, graph: GraphProto, inferred: GraphProto, outer: _Scope | None) -> None:
        """Expand `graph` in place; `inferred` is the same graph with inferred types."""
        tensors: dict[str, Tensor] = {t.values.name: t for t in graph.sparse_initializer}
        tensors.update(self.graph.initializers if outer is None else {t.name: t for t in graph.initializer})
        known = (*inferred.value_info, *inferred.output, *inferred.input)
        scope = _Scope(graph, outer, tensors, {value.name: value.type for value in known})
        twins = {name: node for node in inferred.node for name in node.output}
        for node in graph.node:
            if _bodies(node):
                self.depends.update((name, reads_of(node)) for name in node.output if name)
            for attribute in node.attribute:
                for k, body in enumerate(subgraphs(attribute)):
                    twin = next(a for a in twins[next(filter(None, node.output))].attribute if a.name == attribute.name)
                    self._expand(body, subgraphs(twin)[k], scope)
            if is_gradient(node):
                self._replace(node, scope)
            else:
                scope.put([node])
        nodes = scope.nodes
        del graph.node[:]
        graph.node.extend(nodes)

    def _replace(self, node: NodeProto, scope: _Scope) -> None:
        """Add the nodes that compute what the node Gradient stands for."""
        values = list(node.input)
        count = len(values) // 2
        feeds, names, y = values[:count], values[count:-1], values[-1]
        xs = names[: len(_attributes(node)["xs"])]
        self._check(node, xs, names, y, scope)
        self.depends.update((name, feeds) for name in node.output if name)
        outputs = dict(zip(xs, node.output, strict=False))
        if feeds != names:
            moved = self._evaluate(names, feeds, y, scope)
            names, y = [moved.get(name, name) for name in names], moved.get(y, y)
            outputs = {moved.get(x, x): output for x, output in outputs.items()}
        outputs = {x: output for x, output in outputs.items() if output}
        if outputs:
            self._splice(node, names, y, outputs, scope)

    # What a node Gradient says

    def _check(self, node: NodeProto, xs: list[str], names: list[str], y: str, scope: _Scope) -> None:
        """Refuse names that do not define a derivative."""
        for name in (*xs, y):
            kind = scope.type(name)
            if kind is None or not kind.tensor_type.elem_type:
                continue  # `_known` asks for it where it is needed
            if kind.tensor_type.elem_type not in FLOATS:
                what = helper.tensor_dtype_to_string(kind.tensor_type.elem_type).removeprefix("TensorProto.").lower()
                raise _error(node, f"names {name!r} of type {what}: only float tensors have a derivative")
        network = self._trace(y, names, scope)
        if network.ends:
            raise _error(
                node,
                f"differentiates {y!r}, which depends on {choices(network.ends)} too, while xs and zs must determine it; "
                f"they are {choices(names)}. Add what is missing to zs, and to the inputs",
            )
        reached = self._trace(y, names, scope, through=self.depends).reached
        for x in xs:
            if x not in reached:
                raise _error(
                    node,
                    f"has {x!r} in xs, on which {y!r} does not depend except through the others. Take it out of xs",
                )
        for name in names:
            traced = self._trace(name, [other for other in names if other != name], scope)
            if traced.reached and not traced.ends:
                raise _error(
                    node,
                    f"has {name!r} in xs or zs, which is computed from {choices(sorted(traced.reached))}: the names there "
                    "have to be independent. Take one of them out",
                )

    def _trace(
        self, value: str, cut: Sequence[str], scope: _Scope, through: Mapping[str, list[str]] | None = None
    ) -> _Network:
        """The network that computes `value`, down to `cut`; `through` has dependencies besides the nodes' inputs."""
        positions: set[int] = set()
        network = _Network([], [], set(), [])
        pending, seen = [value], {""}
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            node = scope.made_by(name)
            if name in cut:
                network.reached.add(name)
            elif node is not None:
                positions.add(id(node))
                pending += reads_of(node)
            elif scope.tensor(name) is not None:
                network.tensors.append(name)
            else:
                network.ends.append(name)
            if through is not None and name not in cut:
                pending += through.get(name, ())
        scopes = list(scope.around())
        network.nodes = [node for home in reversed(scopes) for node in home.nodes if id(node) in positions]
        return network

    # What stands in its place

    def _evaluate(self, names: list[str], feeds: list[str], y: str, scope: _Scope) -> dict[str, str]:
        """Compute `y` again with the values `feeds` in place of `names`. Return the new name of every value that changes."""
        moved: dict[str, str] = {}
        network = self._trace(y, names, scope)
        for name, value in zip(names, feeds, strict=True):
            if name != value:
                moved[name] = fresh(f"{name}_given", self.taken)
                kind = scope.type(value)
                if kind is not None:
                    scope.types[moved[name]] = kind
                scope.put([helper.make_node("Identity", [value], [moved[name]], fresh(moved[name], self.labels))])
        for node in network.nodes:
            if moved.keys().isdisjoint(reads_of(node)):
                continue
            again = NodeProto()
            again.CopyFrom(node)
            own = {name: fresh(f"{name}_again", self.taken) for name in _made(node)}
            moved.update((name, own[name]) for name in node.output if name and name not in names)
            rename_values(again, moved | own)
            again.name = fresh(f"{node.name}_again", self.labels)
            for name in moved.keys() & self.depends.keys() & set(node.output):
                self.depends[moved[name]] = [moved.get(value, value) for value in self.depends[name]]
            scope.put([again])
        return moved

    def _splice(self, node: NodeProto, names: list[str], y: str, outputs: dict[str, str], scope: _Scope) -> None:
        """Differentiate `y` and add the nodes of the derivative; `outputs` maps each `x` to the name of its derivative."""
        network = self._trace(y, names, scope)
        # A node of the network may also make a value of the cut; in the part this result gets another name.
        aside = {name: fresh(name, self.taken) for inner in network.nodes for name in inner.output if name in names}
        part = self._part(node, network, list(outputs), aside, scope)
        y = self._declare(node, part, y, scope)
        with quiet(), of_any_rank():
            result = gradient(part, list(outputs), [y], cotangent="ones", keep_outputs=True)
        derivatives = names_in(result)[1]
        rename = {new: name for name, new in aside.items()} | {derivatives[x]: name for x, name in outputs.items()}
        new = sorted(names_of(result.graph) - names_of(part.graph) - rename.keys() - {""})
        rename |= {name: fresh(name, self.taken) for name in new}
        labels = {inner.name for inner in part.graph.node}
        for inner in result.graph.node:
            rename_values(inner, rename)
            if inner.name not in labels:
                inner.name = fresh(inner.name, self.labels)
        *_, outermost = scope.around()
        for tensor in result.graph.initializer:
            if tensor.name in new:
                tensor.name = rename[tensor.name]
                self.constants.append(tensor)
                outermost.tensors[tensor.name] = tensor
        for value in result.graph.value_info:
            if value.name in new:
                value.name = rename[value.name]
                scope.graph.value_info.append(value)
        self._merge(result.graph.node, {name: inner for inner in network.nodes for name in inner.output if name}, scope)

    def _part(
        self, node: NodeProto, network: _Network, xs: list[str], aside: Mapping[str, str], scope: _Scope
    ) -> ModelProto:
        """The network as a model. Large initializers and those that a caller may override are inputs."""
        part = ModelProto(ir_version=IR_VERSION, opset_import=self.graph.model.opset_import)
        graph = part.graph
        graph.name = "differentiated"
        inputs = [*xs, *sorted(network.reached.difference(xs))]
        for name in network.tensors:
            tensor = scope.tensor(name)
            if isinstance(tensor, SparseTensorProto):
                graph.sparse_initializer.append(tensor)
            elif tensor is None or name in self.graph.large:
                inputs.append(name)
            else:
                graph.initializer.append(tensor)
        for name in inputs:
            graph.input.add(name=name, type=_known(node, name, scope.type(name)))
        for inner in network.nodes:
            copied = graph.node.add()
            copied.CopyFrom(inner)
            copied.output[:] = [aside.get(name, name) for name in inner.output]
            for name in copied.output:
                known = scope.type(name)
                if known is not None:
                    graph.value_info.add(name=name, type=known)
        return part

    def _declare(self, node: NodeProto, part: ModelProto, y: str, scope: _Scope) -> str:
        """Let `part` return `y`, and all results of nodes with several, to keep them. Return the name of `y` there."""
        graph = part.graph
        kind = scope.type(y)
        if kind is None:
            kind = next((value.type for value in infer(part).value_info if value.name == y), None)
        added = ""
        if any(value.name == y for value in graph.input):  # it is one of xs
            added = "Identity"
        elif kind is not None and kind.tensor_type.elem_type and not kind.tensor_type.HasField("shape"):
            added = "ReduceSum"  # whatever the number of axes
            kind = helper.make_tensor_type_proto(kind.tensor_type.elem_type, [])
        if added:
            settings: dict[str, Any] = {"keepdims": 0} if added == "ReduceSum" else {}
            graph.node.append(helper.make_node(added, [y], [fresh(y, self.taken)], **settings))
            y = graph.node[-1].output[0]
        graph.output.add(name=y, type=_known(node, y, kind))
        beside = [
            name
            for producer in graph.node
            if len(producer.output) > 1
            for name in producer.output
            if name and name != y
        ]
        graph.output.extend(value for value in graph.value_info if value.name in beside and _is_known(value.type))
        return y

    def _merge(self, nodes: Iterable[NodeProto], originals: Mapping[str, NodeProto], scope: _Scope) -> None:
        """Add the nodes of a gradient. One that has more outputs or another body than its original replaces the original."""
        nodes = list(nodes)
        makes = {name for node in nodes for name in node.output}
        waiting: list[NodeProto] = []
        for node in nodes:
            original = next((originals[name] for name in node.output if name in originals), None)
            waiting.append(node)
            if original is None:
                continue
            due = {name for name in original.output if name}
            home = next(home for home in scope.around() if not due.isdisjoint(home.producer))
            if (node.domain, node.op_type) == (original.domain, original.op_type):
                home.put(waiting[:-1], original)
                original.CopyFrom(node)
                home.producer.update((name, original) for name in node.output if name)
                waiting = []
            elif not due <= makes:  # other nodes need its other results
                node.output[:] = [fresh(name, self.taken) if name in originals else name for name in node.output]
            elif due <= {name for other in waiting for name in other.output}:
                home.put(waiting, original)
                home.nodes = [other for other in home.nodes if other is not original]
                waiting = []
        scope.put(waiting)


# Names


def _name_inputs(model: ModelProto) -> None:
    """Let every node Gradient read the values that it names, in place, so that they are renamed with all others.

    If it names an input of a function, the function gets a copy of it, a value that the caller does not have.
    """
    graph = model.graph
    _name_inputs_of(graph.node, {v.name for v in graph.input} | _tensors(graph))
    for function in model.functions:
        named = _name_inputs_of(function.node, set(function.input))
        taken = set(function.input).union(*(_made(node) for node in function.node))
        own = {name: fresh(name, taken) for name in function.input if name in named}
        _separate(function, own)


def _name_inputs_of(nodes: Sequence[NodeProto], visible: set[str]) -> set[str]:
    """The same for a list of nodes; the values `visible` exist before it. Return the names in xs and zs."""
    read_names: set[str] = set()
    for position, node in enumerate(nodes):
        for graph in _bodies(node):
            read_names |= _name_inputs_of(graph.node, visible | {v.name for v in graph.input} | _tensors(graph))
        if is_gradient(node):
            settings = _attributes(node)
            names = [*settings["xs"], *settings["zs"]]
            if len(node.input) != len(names):
                raise _error(
                    node, f"has {len(node.input)} inputs. There is one for each name in xs and zs, {choices(names)}"
                )
            if len(node.output) > len(settings["xs"]):
                raise _error(node, f"has {len(node.output)} outputs for {len(settings['xs'])} names in xs")
            if len(set(names)) < len(names):
                raise _error(node, f"has a name twice in xs and zs, {choices(names)}")
            later = {name for later_node in nodes[position:] for name in later_node.output}
            for name in (*names, settings["y"]):
                if name in later - visible:
                    raise _error(
                        node, f"names {name!r}, which no node before it makes. Move it behind the node that does"
                    )
                if name not in visible:
                    raise _error(node, f"names {name!r}, which is not a value.{did_you_mean(name, visible)}")
            node.input.extend((*names, settings["y"]))
            read_names.update(names)
        visible.update(node.output)
    return read_names


def _attributes(node: NodeProto) -> dict[str, Any]:
    """`xs`, `zs` and `y` of a node Gradient."""
    kinds = {"xs": AttributeProto.STRINGS, "zs": AttributeProto.STRINGS, "y": AttributeProto.STRING}
    attributes = {a.name: attribute_value(a) for a in node.attribute if kinds.get(a.name) == a.type}
    if not attributes.get("xs") or not attributes.get("y"):
        raise _error(
            node, "lacks an attribute: xs is a list of names, y a name, and zs, which may be absent, a list of names"
        )
    return {"zs": []} | attributes


def _separate(function: FunctionProto, own: Mapping[str, str]) -> None:
    """Let the function use copies of some of its inputs, under the names in `own`."""
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in function.node]
    for node in nodes:
        rename_values(node, own)
    del function.node[:]
    function.node.extend(helper.make_node("Identity", [name], [copied]) for name, copied in own.items())
    function.node.extend(nodes)


def _bodies(node: NodeProto) -> list[GraphProto]:
    return [graph for attribute in node.attribute for graph in subgraphs(attribute)]


def _tensors(graph: GraphProto) -> set[str]:
    return {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}


def _made(node: NodeProto) -> set[str]:
    """The results of a node and of the nodes in its subgraphs."""
    computed = {name for name in node.output if name}
    for graph in _bodies(node):
        computed |= {v.name for v in graph.input} | _tensors(graph)
        computed = computed.union(*(_made(inner) for inner in graph.node))
    return computed


def _known(node: NodeProto, name: str, kind: TypeProto | None) -> TypeProto:
    """The type of a value at which differentiation begins or ends: it has to be known there."""
    if kind is None or not _is_known(kind):
        raise _error(node, f"needs the type and the rank of {name!r}, which are not known. Declare them in value_info")
    return kind


def _is_known(kind: TypeProto) -> bool:
    """True if a type is complete enough for a graph input."""
    tensor = kind.tensor_type
    return not kind.HasField("tensor_type") or bool(tensor.elem_type and tensor.HasField("shape"))


def _stand_ins(model: ModelProto) -> ModelProto:
    """The model with Identity in place of every Gradient: a derivative has the type and shape of its value."""
    typed = ModelProto()
    typed.CopyFrom(model)
    for graph in reversed(list(graphs(typed.graph))):  # from within: the nodes of a graph are replaced by copies
        nodes = []
        for node in graph.node:
            stand_ins = [node]
            if is_gradient(node):
                pairs = zip(node.input, node.output, strict=False)
                stand_ins = [helper.make_node("Identity", [value], [name]) for value, name in pairs if name]
            nodes += [NodeProto.FromString(stand_in.SerializeToString()) for stand_in in stand_ins]
        del graph.node[:]
        graph.node.extend(nodes)
    return typed


def _error(node: NodeProto, why: str) -> ExpansionError:
    name = node.name or next(filter(None, node.output), "")
    end = "" if why.endswith(("?", ".")) else "."
    return ExpansionError(f"Node {name!r} (Gradient) {why}{end}", node.name)
