"""`refgrad.lower`: ONNX Runtime's training operators become ai.onnx operators, so that the model runs anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TypeProto, helper

from refgrad.builder.nodes import EmittedNode, NodeWriter
from refgrad.builder.op import Emitter
from refgrad.errors import InvalidModelError, LoweringError, RefgradError, RuleError, choices
from refgrad.links import Folders
from refgrad.model.checks.arity import refuse_mismatches
from refgrad.model.checks.malformed import explained, lost_reference
from refgrad.model.graph import MIN_OPSET, Graph, Node, read_nodes, taken_names
from refgrad.model.inference.completion import infer_completely
from refgrad.model.inlining.defined import make_function
from refgrad.model.normalise import normalise
from refgrad.model.reading import read
from refgrad.protos.domains import MICROSOFT, ML
from refgrad.protos.traverse import (
    attribute_value,
    captures_of,
    every_node,
    fresh,
    graphs,
    import_domain,
    import_onnx,
    names_of,
    op_types,
    rename_values,
    subgraphs,
    versions_of,
)
from refgrad.protos.types import type_of
from refgrad.reverse.assembly import IR_VERSION
from refgrad.rewrites.forms import FORMS, Form
from refgrad.rewrites.results import UNKNOWN_SHAPE
from refgrad.tables.definitions import DEFINITIONS, Definition, UnsupportedFormError
from refgrad.tables.once import raised_at
from refgrad.worker import limited

_YIELD = MICROSOFT, "YieldOp"
_PLAIN = ("", "ai.onnx", ML)


@limited
@explained
def lower(
    model: ModelProto | str | os.PathLike[str],
    *,
    max_memory: int | None = None,
    max_seconds: float | None = None,
    data_folders: Folders | None = None,
) -> ModelProto:
    """The model with the same results in ai.onnx operators only, which replace ONNX Runtime's own operators.

    These are the operators of com.microsoft that its gradient builder and its training artifacts use, MaxPoolGrad,
    AveragePoolGrad, SparseSoftmaxCrossEntropy and its gradient in the default domain, and the forward operators of
    com.microsoft that refgrad differentiates. If a kernel of ONNX Runtime is wrong, the result is the correct one.

    Inputs, outputs and initializers keep names, order and types. New ones follow them:

    - A value that an operator writes into a graph input is an output `<input>_updated`: `params_updated`,
      `first_order_moments_updated`, `w_grad.accumulation.buffer_updated`, `bn.running_mean_updated`. Where the model reads or
      returns the operator's own output for it, that output takes its place.
    - A value that a YieldOp reads becomes an output, unless it is one already. The cotangents that it returns become inputs;
      `non_differentiable_outputs` have none. Each has the type and shape of its output, also where `full_shape_outputs`
      does not ask for that.

    A model of an opset before 16 is converted to 16, or to a later one that an operator needs (17: LayerNormalization, 18 or
    19: some modes of Resize); local functions are inlined. A model that has nothing to lower is returned as a copy. The
    caller's model is not modified. External data is referenced, not read: save the result in the folder of the model.

    :param model: a model, or the path of one.
    :param max_memory: and `max_seconds`, `data_folders`: as in `gradient`.
    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    :raises LoweringError: an operator has no decomposition into ai.onnx here, or its attributes or inputs do not fit it.
    :raises WorkerError: that process met a limit, or crashed.

    >>> import onnx.parser, refgrad
    >>> squash = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> squash (float[N] x) => (float[N] y) { y = Tanh(x) }'
    ... )
    >>> gradient = refgrad.gradient(squash, dialect="ort")
    >>> [node.op_type for node in gradient.graph.node]
    ['Tanh', 'TanhGrad']
    >>> [node.op_type for node in refgrad.lower(gradient).graph.node]
    ['Tanh', 'Mul', 'Sub', 'Mul']
    """
    source = read(model, lift=False)
    result = ModelProto()
    opset = versions_of(source).get("", 1)
    refuse_mismatches(source, op_types(source.graph)[0])
    if lost := lost_reference(source):
        raise InvalidModelError(lost)
    foreign = {(n.domain, n.op_type) for n in every_node(source) if not _is_plain(n, opset)}
    calls = {(f.domain, f.name) for f in source.functions}
    if not foreign - calls:
        result.CopyFrom(source)
        return result
    return _Lowering(source).model()


def _is_plain(node: NodeProto, opset: int) -> bool:
    """True if onnx has the operator: ONNX Runtime puts some of its own into the domain of ai.onnx."""
    if node.domain in ("", "ai.onnx"):
        return bool(onnx.defs.has(node.op_type, opset, ""))
    return node.domain in _PLAIN


class _Lowering:
    """One lowering: the graph, and the names that are taken."""

    def __init__(self, source: ModelProto) -> None:
        self.source = source
        moved = ModelProto()
        moved.CopyFrom(source)
        for node in every_node(moved):
            if not node.domain and ("", node.op_type) in FORMS:  # onnx's checker refuses it in the default domain
                node.domain = MICROSOFT
        import_domain(moved, MICROSOFT)
        import_onnx(moved)
        written, self.in_bodies = _return_from_branches(moved)
        forms = ((FORMS.get((node.domain, node.op_type)), node) for node in every_node(moved))
        needed = (
            f.opset({a.name: attribute_value(a) for a in node.attribute if not a.ref_attr_name})
            for f, node in forms
            if f is not None
        )
        self.graph = normalise(moved, max(needed, default=MIN_OPSET), shapeless=True)
        self.taken = taken_names(self.graph) | {v.name for v in source.graph.output}
        self.inputs = list(self.graph.inputs.values())
        self.outputs = [_copied(value) for value in (*source.graph.output, *written)]
        self.known: dict[str, TypeProto] = {}
        self.read = {name for node in self.graph.nodes for name in node.reads} | {v.name for v in self.outputs}
        self.read.discard("")

    def model(self) -> ModelProto:
        """The lowered model."""
        graph = GraphProto()
        graph.CopyFrom(self.graph.model.graph)
        inferred = infer_completely(self._stand_ins())
        self.known = {value.name: value.type for value in (*inferred.value_info, *inferred.output, *inferred.input)}
        for node in self.graph.nodes:
            if node.key == _YIELD:
                self._open(node, graph)
        constants = self._rewrite(graph, inferred, self.graph, top=True)
        for value in self.outputs:
            self._complete(value)
        return assemble(self.source, self.graph, graph, self.inputs, self.outputs, constants)

    # Types and shapes of every value

    def _stand_ins(self) -> ModelProto:
        """The model in operators that onnx knows, for type and shape inference alone."""
        model = ModelProto()
        model.CopyFrom(self.graph.model)
        unknown = helper.make_tensor_value_info(UNKNOWN_SHAPE, onnx.TensorProto.INT64, [None])
        model.graph.input.append(unknown)
        for graph in reversed(list(graphs(model.graph))):  # from within: the nodes of a graph are replaced by copies
            nodes = [made for node in graph.node for made in _stand_in(node)]
            copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
            del graph.node[:]
            graph.node.extend(copies)
        return model

    def _rewrite(self, graph: GraphProto, inferred: GraphProto, known: Graph, top: bool) -> list[onnx.TensorProto]:
        """Lower `graph` in place. Return the constants that its nodes need."""
        nodes, types, shapes = read_nodes(graph), dict(known.types), dict(known.shapes)
        scope = replace(
            known,
            nodes=nodes,
            producer=({} if top else known.producer) | {name: node for node in nodes for name in node.outputs if name},
            initializers=known.initializers if top else known.initializers | {t.name: t for t in graph.initializer},
            types=types,
            shapes=shapes,
        )
        for value in (*inferred.value_info, *inferred.input, *inferred.output):
            kind, shape = type_of(value)
            if value.type.HasField("sequence_type"):
                kind = value.type.sequence_type.elem_type.tensor_type.elem_type
            if kind:
                types[value.name] = kind
            if shape is not None:
                shapes[value.name] = shape
        for tensor in graph.initializer:
            types[tensor.name], shapes[tensor.name] = tensor.data_type, tuple(tensor.dims)
        inner = {tuple(node.output): node for node in inferred.node}
        for proto in graph.node:
            for attribute in proto.attribute:
                for k, body in enumerate(subgraphs(attribute)):
                    # An operator that onnx does not know may have a body by mistake, which inference drops.
                    kept = inner.get(tuple(proto.output), proto)
                    twin = next((a for a in kept.attribute if a.name == attribute.name), attribute)
                    body.initializer.extend(self._rewrite(body, subgraphs(twin)[k], scope, top=False))
        op = Emitter.over(scope, self.taken)
        written = _Body(self, op, scope)
        for node in scope.nodes:
            written.visit(node)
        final = [v.name for v in (self.outputs if top else graph.output)]
        protos = written.nodes(final)
        del graph.node[:]
        graph.node.extend(protos)
        used = {name for node in graph.node for name in (*node.input, *captures_of(node))}.union(final)
        return [tensor for name, tensor in op.emission.constants.items() if name in used]

    # What goes in and out

    def _open(self, node: Node, graph: GraphProto) -> None:
        """Take a YieldOp out of the graph, as the training agent does: its inputs become outputs, its outputs become inputs."""
        differentiable = differentiable_inputs(node.inputs, node.attributes)
        if len(node.outputs) > len(differentiable):
            raise LoweringError(
                f"Node {node.name!r} (YieldOp) has {len(node.outputs)} outputs for {len(differentiable)} differentiable "
                "inputs. Give each of the others a place in non_differentiable_outputs.",
                node.name,
            )
        known = {v.name: v for v in (*self.inputs, *self.graph.node_results.values(), *self.graph.outputs.values())}
        present = {value.name for value in self.outputs}
        for name in node.inputs:
            if name not in present:
                self.outputs.append(self._value(name, known))
                present.add(name)
        for output, name in zip(differentiable, node.outputs, strict=False):
            if name:
                value = self._value(output, known)
                value.name = name
                self.inputs.append(value)
                graph.input.append(value)
        kept = [proto for proto in graph.node if proto.name != node.name]
        del graph.node[:]
        graph.node.extend(kept)

    def _value(self, name: str, known: Mapping[str, onnx.ValueInfoProto]) -> onnx.ValueInfoProto:
        value = onnx.ValueInfoProto(name=name)
        if name in known:
            value.type.CopyFrom(known[name].type)
        elif name in self.known:
            value.type.CopyFrom(self.known[name])
        elif name in self.graph.initializers:
            tensor = self.graph.initializers[name]
            value.type.CopyFrom(helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
        return value

    def with_updates(self, op: Emitter, node: Node, known: Form | Definition) -> Node:
        """`node` with names for the results that ONNX Runtime writes into a graph input: the graph returns them."""
        inputs, outputs = {v.name: v for v in self.inputs}, {v.name for v in self.outputs}
        read = dict(zip(known.signature.inputs, node.inputs, strict=False))
        proto = NodeProto()
        proto.CopyFrom(node.proto)
        for position, source in known.writes.items():
            given = read.get(source, "")
            if given not in inputs or set(proto.output[position : position + 1]) & self.in_bodies:
                continue
            proto.output.extend([""] * (position + 1 - len(proto.output)))
            own = proto.output[position]
            if own not in self.read:
                own = proto.output[position] = op.fresh(f"{given}_updated")
            if own not in outputs:
                value = onnx.ValueInfoProto(name=own)
                value.type.CopyFrom(inputs[given].type)
                self.outputs.append(value)
        return node._replace(proto=proto, outputs=tuple(proto.output))

    def _complete(self, value: onnx.ValueInfoProto) -> None:
        """Declare the type and the shape of an output where they are known and the model does not."""
        if value.name in self.known and not _has_shape(value.type):
            value.type.CopyFrom(self.known[value.name])


def assemble(
    source: ModelProto,
    known: Graph,
    graph: GraphProto,
    inputs: Iterable[onnx.ValueInfoProto],
    outputs: Iterable[onnx.ValueInfoProto],
    constants: Iterable[onnx.TensorProto],
) -> ModelProto:
    """`source` with the nodes of `graph`, their constants and their imports; `known` is the view of `source`."""
    result = ModelProto()
    for field, value in source.ListFields():
        if field.name in ("graph", "functions", "opset_import"):
            continue
        if field.is_repeated:
            getattr(result, field.name).extend(value)
        else:
            setattr(result, field.name, value)
    result.ir_version = max(source.ir_version, IR_VERSION)
    used = {"" if node.domain == "ai.onnx" else node.domain for g in graphs(graph) for node in g.node} | {""}
    result.opset_import.extend(o for o in known.model.opset_import if o.domain in used or o.domain == "ai.onnx")
    target = result.graph
    target.name, target.doc_string = source.graph.name or "graph", source.graph.doc_string
    target.metadata_props.extend(source.graph.metadata_props)
    target.node.extend(graph.node)
    target.input.extend(inputs)
    target.output.extend(outputs)
    kept = known.initializers
    order = [t.name for t in source.graph.initializer if t.name in kept]
    target.initializer.extend(kept[name] for name in dict.fromkeys((*order, *kept)))
    target.initializer.extend(constants)
    target.sparse_initializer.extend(graph.sparse_initializer)
    target.value_info.extend(graph.value_info)
    target.quantization_annotation.extend(source.graph.quantization_annotation)
    return result


class _Body:
    """One graph that is being lowered: nodes that stay, and the nodes that are emitted in place of others."""

    def __init__(self, lowering: _Lowering, op: Emitter, graph: Graph) -> None:
        self.lowering, self.op, self.graph = lowering, op, graph
        self.rename: dict[str, str] = {}  # emitted value: the result that it replaces
        self.order: list[NodeProto | EmittedNode] = []

    def visit(self, node: Node) -> None:
        """Keep the node, or emit nodes that compute the same."""
        form = FORMS.get(node.key)
        if form is not None:
            self._emit(node, form)
        elif node.key in DEFINITIONS and node.domain not in _PLAIN:
            if node.attributes.get("training_mode", 1):
                node = self.lowering.with_updates(self.op, node, DEFINITIONS[node.key])
            for inner in self._unfolded(node):
                self.visit(inner)
        elif node.domain in _PLAIN:
            self.order.append(node.proto)
        else:
            known = sorted({op_type for domain, op_type in (*FORMS, *DEFINITIONS) if domain in ("", MICROSOFT)})
            others = f" Those of {MICROSOFT} that have one are {choices(known, len(known))}." if known else ""
            raise LoweringError(
                f"Node {node.name!r} ({node.domain}.{node.op_type}) has no form in ai.onnx operators here.{others}",
                node.name,
            )

    def _emit(self, node: Node, form: Form) -> None:
        op = self.op
        if mismatch := form.mismatch(node):
            raise LoweringError(
                f"Node {node.name!r} is not a valid {node.op_type} of ONNX Runtime: {mismatch}.", node.name
            )
        node = self.lowering.with_updates(op, node, form)
        op.enter(node.op_type, node.name)
        start = len(op.emission.nodes)
        try:
            results = form.lower(op, node)
        except (UnsupportedFormError, RuleError) as error:
            raise _refuse(node, str(error)) from error
        except (RefgradError, MemoryError):
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error} (at {raised_at(error, form.function)})"
            raise _refuse(node, f"{said}; look whether what it reads fits the operator") from error
        for k, name in enumerate(node.outputs):
            value = results[k] if k < len(results) else None
            if not name:
                continue
            if value is None:
                raise LoweringError(f"Node {node.name!r} ({node.op_type}) has no output {name!r}.", node.name)
            made = any(value in emitted.outputs for emitted in op.emission.nodes[start:])
            if not made or value in self.rename:
                value = op.copy(value)
            self.rename[value] = name
        new = op.emission.nodes[start:]
        if any(name in emitted.inputs for emitted in new for name in node.outputs if name):
            raise _refuse(node, "the shape of its result is not known; add it to value_info")
        self.order += new

    def _unfolded(self, node: Node) -> list[Node]:
        """The nodes of the function body of a forward operator, with the names of the node."""
        types = {
            name: (self.op.graph.types[name], self.op.rank(name)) for name in node.inputs if name in self.op.graph.types
        }
        try:
            shapes = self.op.graph.shapes
            function = make_function(node.proto, self.graph.opsets, types, node.name, shapes, self.op.constant)
        except UnsupportedFormError as error:
            raise _refuse(node, str(error)) from error
        assert function is not None
        named = dict(zip(function.input, node.inputs, strict=True)) | dict(
            zip(function.output, node.outputs, strict=True)
        )
        inner = GraphProto()
        for k, proto in enumerate(function.node):
            bodies = [graph for attribute in proto.attribute for graph in subgraphs(attribute)]
            for name in (*proto.output, *sorted(set().union(*map(names_of, bodies)))):
                if name and name not in named:
                    named[name] = self.op.fresh(f"{node.name}/{name}")
            made = inner.node.add()
            made.CopyFrom(proto)
            made.name = self.op.fresh(f"{node.name}/{proto.op_type}_{k}")
            rename_values(made, named)
        return read_nodes(inner)

    def nodes(self, final: Iterable[str]) -> list[NodeProto]:
        """The nodes in order, without emitted nodes that nothing needs."""
        live, kept = set(final), GraphProto()
        needed: list[NodeProto | EmittedNode] = []
        for node in reversed(self.order):
            if isinstance(node, NodeProto):
                live.update((*node.input, *captures_of(node)))
            elif live.isdisjoint(name for value in node.outputs for name in (value, self.rename.get(value))):
                continue
            else:
                live.update((*node.inputs, *node.attribute_set.captured))
            needed.append(node)
        writer = NodeWriter(kept, self.rename)
        for node in reversed(needed):
            if isinstance(node, NodeProto):
                kept.node.append(node)
            else:
                writer.add(node)
        return list(kept.node)


def _return_from_branches(model: ModelProto) -> tuple[list[onnx.ValueInfoProto], set[str]]:
    """Let each If return what operators in its branches write into inputs of the model; in place.

    Return the new outputs of the model, and the names of the written values in the branches.

    :raises LoweringError: an operator in another body writes into an input of the model.
    """
    graph, inner = model.graph, set[str]()
    inputs = {value.name: value for value in graph.input}
    taken = {name for one in graphs(graph) for name in names_of(one)}
    outputs = []
    for node in graph.node:
        branches = [body for attribute in node.attribute for body in subgraphs(attribute)]
        writers = {k: dict(_writes(body.node, inputs)) for k, body in enumerate(branches)}
        deeper = [one for body in branches for n in body.node for a in n.attribute for one in subgraphs(a)]
        if node.op_type != "If":
            deeper, writers = [*branches, *deeper], {}
        for body in (every for one in deeper for every in graphs(one)):
            for name, (writer, _) in _writes(body.node, inputs):
                raise LoweringError(
                    f"Node {writer.name!r} ({writer.op_type}) writes into {name!r}, an input of the model, from the body of a "
                    "loop or of another body. Move it out of the body.",
                    writer.name,
                )
        for name in dict.fromkeys(name for writes in writers.values() for name in writes):
            own = fresh(f"{name}_updated", taken)
            for k, body in enumerate(branches):
                made = fresh(own, taken)
                if name in writers[k]:
                    writer, position = writers[k][name]
                    writer.output.extend([""] * (position + 1 - len(writer.output)))
                    made = writer.output[position] = writer.output[position] or made
                    inner.add(made)
                else:
                    body.node.append(helper.make_node("Identity", [name], [made], made))
                body.output.add(name=made, type=inputs[name].type)
            node.output.append(own)
            outputs.append(onnx.ValueInfoProto(name=own, type=inputs[name].type))
    graph.output.extend(outputs)
    return outputs, inner


def _writes(nodes: Iterable[NodeProto], inputs: Mapping[str, Any]) -> Iterator[tuple[str, tuple[NodeProto, int]]]:
    """The inputs of the model that operators write, and which output of which node is the new value."""
    for node in nodes:
        known = FORMS.get((node.domain, node.op_type)) or DEFINITIONS.get((node.domain, node.op_type))
        if known is None or node.domain in _PLAIN:
            continue
        read = dict(zip(known.signature.inputs, node.input, strict=False))
        for position, source in known.writes.items():
            if read.get(source, "") in inputs:
                yield read[source], (node, position)


def _refuse(node: Node, why: str) -> LoweringError:
    return LoweringError(f"Node {node.name!r} ({node.op_type}) cannot be lowered: {why.removesuffix('.')}.", node.name)


def _copied(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    made = onnx.ValueInfoProto()
    made.CopyFrom(value)
    return made


def _has_shape(kind: TypeProto) -> bool:
    return bool(kind.WhichOneof("value")) and (not kind.HasField("tensor_type") or kind.tensor_type.HasField("shape"))


def differentiable_inputs(inputs: Sequence[str], attributes: Mapping[str, Any]) -> list[str]:
    """The inputs of a YieldOp for which it returns a cotangent."""
    without = attributes.get("non_differentiable_outputs", ())
    return [name for k, name in enumerate(inputs) if k not in without]


def _stand_in(node: NodeProto) -> list[NodeProto]:
    """Nodes whose results have the types and shapes of the results of `node`; `node` itself where onnx knows it."""
    key = node.domain, node.op_type
    if key == _YIELD:  # a cotangent has the type of its output
        differentiable = differentiable_inputs(node.input, {a.name: attribute_value(a) for a in node.attribute})
        pairs = zip(differentiable, node.output, strict=False)
        return [helper.make_node("Identity", [x], [dx]) for x, dx in pairs if dx]
    form = FORMS.get(key)
    if form is None:
        return [node]
    inputs = dict(zip(form.signature.inputs, node.input, strict=False))
    made = []
    for k, output in enumerate(node.output):
        result = form.result(k)
        if output and result is not None:
            to = next((a.i for a in node.attribute if a.name == result.cast), 0)
            made += result.stand_ins(inputs, node.input[k] if k < len(node.input) else "", output, to)
    return made
