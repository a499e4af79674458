"""The reverse sweep: from the cotangents of the outputs to the gradients, one rule per node."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from onnx import ModelProto, TypeProto, helper

from refgrad.errors import NoGradientError, OptionError, RuleError, choices
from refgrad.forward.graph import Graph
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.types import Shape, adjoint_of, is_container, unname
from refgrad.protos.walk import every_node, import_domain, names_of, nested, subgraphs
from refgrad.reverse.emit import IR_VERSION, Emitter, Writer, tensor_type
from refgrad.reverse.path import Path, Report, prepare, refuse
from refgrad.reverse.recompute import Repetition, segments, with_bodies
from refgrad.reverse.sweep import Sweep, live_forward, live_nodes, settle
from refgrad.tables.kinks import CONVENTIONS
from refgrad.tables.registry import DIALECTS

COTANGENTS = ("input", "ones", "yield")
QUANTIZATION = ("zero", "straight-through", "clipped")


def gradient(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    *,
    dialect: str = "onnx",
    cotangent: str = "input",
    keep_outputs: bool = False,
    kinks: str = "refgrad",
    quantization: str = "zero",
    recompute: bool | Sequence[str] = False,
) -> ModelProto:
    """The model that computes the gradient of `model` by reverse-mode differentiation.

    The result has the model's inputs, one input `<output>_grad` per differentiated output, and one output `<name>_grad` per
    name in `wrt`, in that order, each with the shape and type of `<name>`. The gradient of a sequence is the sequence of
    those of its elements, that of an optional is that of what it holds: empty where it holds nothing. A name that is taken
    becomes the next free one (`x_grad_1`); the metadata `refgrad.gradients` and `refgrad.cotangents` (JSON) say which is the
    gradient of what. Initializers in `wrt` become inputs that keep their value as default. The gradient of a name that no
    output depends on is 0.

    Models of an opset before 16 are converted to 16, those with sequences to 17. The caller's model is not modified.
    External data is referenced, not read: save the result in the folder of the model.

    A local function that is called more than once stays a function, and so does its derivative: `f` becomes `f_fwd` where it
    has to return what the derivative reads, `f_grad` returns the adjoints of its inputs. Each is written once for all calls
    whose inputs have the same types and sizes, and of which the same is asked. Others are inlined; so are all before
    opset 17, where a rule has to know more of a shape that is an argument, with `recompute`, in dialect "ort", and with
    another derivative of quantization than "zero".

    :param model: a model, or the path of one.
    :param wrt: inputs and initializers, float; by default every float input and every float initializer that an output
        depends on.
    :param outputs: the outputs to differentiate, float; by default all that are.
    :param dialect: "onnx" emits ai.onnx operators only. "ort" emits what ONNX Runtime's own builder does: its training
        operators wherever their kernels are right, and its names. There the adjoint of every tensor on the way is
        `<tensor>_grad`, the sum of the contributions `<tensor>_grad_0`, `<tensor>_grad_1`, ... (docs/parity.md).
    :param cotangent: "input": the cotangents are graph inputs; "ones": they are 1 everywhere, inside the graph; "yield":
        they come from com.microsoft.YieldOp (dialect "ort" only).
    :param keep_outputs: also return the outputs of the model, after the gradients.
    :param kinks: whose choice is taken where a derivative does not exist: "refgrad", "torch" or "onnxruntime" (docs/kinks.md).
    :param quantization: the derivative of quantization, by QuantizeLinear and its like or by Cast to a float of 8 bits or
        fewer: "zero", as it is; "straight-through", as if nothing were rounded or clipped; "clipped", the same, but zero
        where the value lay outside the range of the type. Round and Cast to an integer have the derivative zero in any case.
    :param recompute: which forward nodes the backward pass computes again instead of keeping their values: the gradient is
        the same, takes less memory and more time. True: all of them, in segments of about √n nodes that end where few bytes
        cross. A list: names of nodes or patterns of them ("/layers.3/*"), a segment per entry; a node belongs to the first
        entry that it matches. What nodes outside of a segment read of it is kept. Never repeated are nodes that draw random
        numbers and what depends on initializers alone. A chosen If, Loop or Scan on the way of the derivative stores its
        states alone, and its body is computed again step by step.
    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    :raises UnknownNameError: a name in `wrt` or `outputs` that does not exist, is there twice, or is no float, or an entry of
        `recompute` that no node matches.
    :raises NoGradientError: an operator between `wrt` and `outputs` has no rule or no derivative.
    :raises OptionError: an unknown dialect, cotangent, kinks or quantization, "yield" outside dialect "ort", or a `recompute`
        that is neither a bool nor a list of names.

    >>> import onnx.parser, refgrad
    >>> square = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> square (float[N] x) => (float[N] y) { y = Mul(x, x) }'
    ... )
    >>> grad = refgrad.gradient(square)
    >>> [value.name for value in grad.graph.input], [value.name for value in grad.graph.output]
    (['x', 'y_grad'], ['x_grad'])
    >>> [node.op_type for node in grad.graph.node]
    ['Mul', 'Sum']
    """
    _check_options(
        ("dialect", dialect, DIALECTS),
        ("cotangent", cotangent, COTANGENTS),
        ("choice of kinks", kinks, CONVENTIONS),
        ("quantization", quantization, QUANTIZATION),
    )
    if cotangent == "yield" and dialect != "ort":
        raise OptionError(
            "cotangent='yield' emits com.microsoft.YieldOp, which only dialect='ort' has: use dialect='ort'."
        )

    def differentiated(graph: Graph) -> ModelProto:
        sources, targets, path = prepare(graph, wrt, outputs, quantization)
        if path.blocked or path.blocked_within:
            raise refuse(path)
        chosen = segments(graph, recompute)
        op = Emitter(
            graph,
            dialect,
            taken_names(graph),
            kinks=kinks,
            quantization=quantization,
            needed=path.needed,
            repeated=with_bodies(path, chosen),
        )
        return _Gradient(path, sources, targets, op, cotangent, keep_outputs).model(chosen)

    with _no_collection():
        graph = Graph(model, keep=dialect == "onnx" and quantization == "zero" and not recompute)
        try:
            return differentiated(graph)
        except (NoGradientError, RuleError):
            if not graph.functions:
                raise
        return differentiated(Graph(model))  # at its calls more is known than in a function: a shape may be an argument


def preflight(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    *,
    quantization: str = "zero",
) -> Report:
    """Every operator that the derivative meets, at once: by a rule, zero, or refused and why. Nothing is emitted.

    The arguments are those of `gradient`.

    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    :raises UnknownNameError: a name in `wrt` or `outputs` that does not exist, is there twice, or is no float.
    :raises OptionError: an unknown quantization.
    """
    _check_options(("quantization", quantization, QUANTIZATION))
    graph = Graph(model, keep=quantization == "zero")
    sources, targets, path = prepare(graph, wrt, outputs, quantization)
    if graph.functions and (path.blocked or path.blocked_within):
        sources, targets, path = prepare(Graph(model), wrt, outputs, quantization)
    return Report(tuple(sources), tuple(targets), path.rows)


def _check_options(*options: tuple[str, str, Sequence[str]]) -> None:
    for option, value, known in options:
        if value not in known:
            raise OptionError(f"There is no {option} {value!r}; there are {choices(known)}.")


def names_in(gradient: ModelProto) -> tuple[dict[str, str], dict[str, str]]:
    """The cotangent of each output and the gradient of each input, as `gradient` wrote them down; of another model none."""
    return noted(gradient, "cotangents"), noted(gradient, "gradients")


def note(model: ModelProto, source: ModelProto, **entries: Mapping[str, Any]) -> None:
    """Give `model` the metadata of `source`, but `entries`, as JSON, in the place of what refgrad wrote there."""
    kept = [entry for entry in source.metadata_props if not entry.key.startswith("refgrad.")]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    for key, names in entries.items():
        model.metadata_props.add(key=f"refgrad.{key}", value=json.dumps(names))


def noted(model: ModelProto, key: str) -> dict[str, Any]:
    """What `note` wrote down under `key`; of another model nothing."""
    known = {entry.key: entry.value for entry in model.metadata_props}
    names: dict[str, Any] = json.loads(known.get(f"refgrad.{key}", "{}"))
    return names


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector: a sweep makes many objects, all of them live, and it would search them again and again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Gradient:
    """One differentiation, and the result that is built from it."""

    def __init__(
        self, path: Path, wrt: list[str], outputs: list[str], op: Emitter, cotangent: str, keep_outputs: bool
    ) -> None:
        self.path, self.graph = path, path.graph
        self.wrt, self.outputs = wrt, outputs
        self.keep_outputs = keep_outputs
        self.op = op
        self.sweep = Sweep(path, op)
        self._tensor_types: dict[tuple[int, Shape], TypeProto] = {}
        self.cotangents = self._seed(cotangent)
        self.sweep.run()
        self.gradients = {name: self.sweep.result(name) for name in wrt}

    def _seed(self, cotangent: str) -> dict[str, str]:
        """Give every differentiated output its cotangent; the graph inputs that were made, by output."""
        op = self.op
        names = {output: self.op.fresh(f"{output}_grad") for output in self.outputs}
        op.enter("cotangent", "cotangent")
        if cotangent == "yield":
            # It returns every output to the caller; a cotangent comes back for those that are differentiated.
            every = list(self.graph.outputs)
            others = [k for k, output in enumerate(every) if output not in names]
            made = op.com_microsoft(
                "YieldOp",
                *every,
                outputs=len(names),
                full_shape_outputs=list(range(len(every))),
                non_differentiable_outputs=others or None,
            )
            seeds = dict(zip((o for o in every if o in names), (made,) if isinstance(made, str) else made, strict=True))
        elif cotangent == "ones":
            seeds = {output: op.full_like(output, 1.0) for output in names}
        else:
            seeds = names
        for output, seed in seeds.items():
            if cotangent != "input" and seed not in self.sweep.rename:
                self.sweep.rename[seed] = names[output]
            self.sweep.seed(output, seed)
        return names if cotangent == "input" else {}

    # The result

    def model(self, chosen: Sequence[frozenset[str]]) -> ModelProto:
        """The gradient model: the nodes that an output needs, and nothing else; those in `chosen` are computed again."""
        source, graph = self.graph.source, self.graph
        live = set(self.gradients.values())
        kept = list(graph.outputs.values()) if self.keep_outputs else []
        live.update(value.name for value in kept)
        results = set(live)
        backward = live_nodes(self.op, live)
        settle(graph, self.op, live)
        for value, name in self.op.adjoint_of.items():
            self.sweep.call(value, f"{name}_grad", name)
        again = Repetition(graph, self.op, chosen, backward, live, results, self.sweep.rename)
        forward = [node.proto for node in live_forward(graph, live)]
        final = ModelProto(ir_version=max(source.ir_version, IR_VERSION), producer_name="refgrad")
        final.opset_import.extend(graph.model.opset_import)
        if "" not in graph.opsets:
            final.opset_import.append(helper.make_opsetid("", graph.opset))
        target = final.graph
        target.name = f"{graph.model.graph.name}_grad"
        target.node.extend(forward)
        writer = Writer(target, {**self.sweep.rename, **again.names})
        for position, emitted in enumerate(backward):
            target.node.extend(again.before(position))
            writer.add(emitted)
        final.functions.extend(graph.functions.called_by(target.node))
        if any(node.domain == MICROSOFT for node in (every_node(final) if self.path.passages else target.node)):
            import_domain(final, MICROSOFT)
        target.input.extend(graph.inputs.values())
        for name in self.wrt:
            if name not in graph.inputs:
                target.input.add(name=name, type=self._type(name))
        for output, name in self.cotangents.items():
            target.input.add(name=name, type=self._type(output))
        for name, value in self.gradients.items():
            target.output.add(name=self.sweep.rename[value], type=self._type(name))
        target.output.extend(kept)
        live.update(self.wrt)
        live.update(graph.inputs)
        target.initializer.extend(tensor for name, tensor in graph.initializers.items() if name in live)
        target.initializer.extend(tensor for name, tensor in self.op.constants.items() if name in live)
        target.sparse_initializer.extend(graph.model.graph.sparse_initializer)
        target.value_info.extend(value for name, value in graph.values.items() if name in live)
        target.value_info.extend(again.types)
        elsewhere = {*graph.inputs, *graph.initializers, *(value.name for value in kept)}
        target.value_info.extend(v for name, v in graph.outputs.items() if name in live and name not in elsewhere)
        for value, like in self.op.declared.items():
            if value in live and value not in self.gradients.values():
                kind = tensor_type(self.op.type(like), self.op.shape(like))
                target.value_info.append(helper.make_value_info(self.sweep.rename.get(value, value), kind))
        for declared in (*target.input, *target.output, *target.value_info):
            if is_container(declared.type):  # ONNX Runtime takes elements of one name for equally large
                declared.type.CopyFrom(unname(declared.type))
        gradients = {name: self.sweep.rename[value] for name, value in self.gradients.items()}
        note(final, source, gradients=gradients, cotangents=self.cotangents)
        return final

    def _type(self, name: str) -> TypeProto:
        """The type and declared shape of an input, an output or an initializer; of an optional, what it holds."""
        declared = self.graph.inputs.get(name) or self.graph.outputs.get(name)
        if declared is not None:
            return adjoint_of(declared.type)
        kind = self.graph.types[name], self.graph.shapes[name]
        if kind not in self._tensor_types:
            self._tensor_types[kind] = helper.make_tensor_type_proto(*kind)
        return self._tensor_types[kind]


def taken_names(graph: Graph) -> set[str]:
    """Every name that the model uses, of values and of nodes, subgraphs included."""
    taken = {*graph.inputs, *graph.initializers, *graph.outputs}
    taken.update(tensor.values.name for tensor in graph.model.graph.sparse_initializer)
    for node in graph.nodes:
        taken.add(node.name)
        taken.update(node.reads)
        taken.update(node.outputs)
        for inner in (sub for attribute in node.proto.attribute for sub in subgraphs(attribute)):
            taken |= names_of(inner)
            taken.update(proto.name for proto in nested(inner.node))
    return taken
