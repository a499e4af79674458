"""The reverse sweep: from the cotangents of the outputs to the gradients, one rule per node."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from onnx import ModelProto, TypeProto, helper

from refgrad.emit import Emitter, Writer
from refgrad.errors import OptionError, RuleError, choices
from refgrad.functions import MICROSOFT
from refgrad.graph import Graph, Node, Shape
from refgrad.kinks import CONVENTIONS
from refgrad.path import Path, Report, prepare, refuse
from refgrad.protos import import_domain, subgraphs
from refgrad.registry import DIALECTS, RULES, Read, Rule

COTANGENTS = ("input", "ones", "yield")
QUANTIZATION = ("zero", "straight-through", "clipped")
_VALUES = frozenset(("input", "cotangent", "output"))
_IR_VERSION = 10  # the first with metadata_props on nodes, and the last that onnxruntime-training 1.19.2 reads


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
) -> ModelProto:
    """The model that computes the gradient of `model` by reverse-mode differentiation.

    The result has the model's inputs, one input `<output>_grad` per differentiated output, and one output `<name>_grad` per
    name in `wrt`, in that order, each with the shape and type of `<name>`. A name that is taken becomes the next free one
    (`x_grad_1`); the metadata `refgrad.gradients` and `refgrad.cotangents` (JSON) say which is the gradient of what.
    Initializers in `wrt` become inputs that keep their value as default. The gradient of a name that no output depends on is 0.

    Models of an opset before 16 are converted to 16, local functions are inlined. The caller's model is not modified.
    External data is referenced, not read: save the result in the folder of the model.

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
    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    :raises UnknownNameError: a name in `wrt` or `outputs` that does not exist, is there twice, or is no float.
    :raises NoGradientError: an operator between `wrt` and `outputs` has no rule or no derivative.
    :raises OptionError: an unknown dialect, cotangent, kinks or quantization, or "yield" outside dialect "ort".

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
    with _no_collection():
        graph = Graph(model)
        sources, targets, path = prepare(graph, wrt, outputs, quantization)
        if path.blocked:
            raise refuse(path)
        taken = taken_names(graph)
        op = Emitter(graph, dialect, taken, kinks=kinks, quantization=quantization, needed=path.needed)
        return _Sweep(path, sources, targets, op, cotangent, keep_outputs).model()


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
    sources, targets, path = prepare(Graph(model), wrt, outputs, quantization)
    return Report(tuple(sources), tuple(targets), path.rows)


def _check_options(*options: tuple[str, str, Sequence[str]]) -> None:
    for option, value, known in options:
        if value not in known:
            raise OptionError(f"There is no {option} {value!r}; there are {choices(known)}.")


def names_in(gradient: ModelProto) -> tuple[dict[str, str], dict[str, str]]:
    """The cotangent of each output and the gradient of each input, as `gradient` wrote them down; of another model none."""
    known = {entry.key: entry.value for entry in gradient.metadata_props}
    cotangents, gradients = (json.loads(known.get(f"refgrad.{what}", "{}")) for what in ("cotangents", "gradients"))
    return cotangents, gradients


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


class _Sweep:
    """One differentiation: adjoints by the name of their primal, and the result that is built from them."""

    def __init__(
        self, path: Path, wrt: list[str], outputs: list[str], op: Emitter, cotangent: str, keep_outputs: bool
    ) -> None:
        self.path, self.graph = path, path.graph
        self.wrt, self.outputs = wrt, outputs
        self.keep_outputs = keep_outputs
        self.op = op
        self.rename: dict[str, str] = {}  # emitted value: its name in the result
        self.owner: dict[str, str] = {}  # emitted value: the primal whose adjoint it was first
        self.contributions: dict[str, list[list[str]]] = {}  # a list per node, the last node first
        self._tensor_types: dict[tuple[int, Shape], TypeProto] = {}
        self.cotangents = self._seed(cotangent)
        for node in reversed(path.active):
            self._visit(node)
        self.gradients = {name: self._result(name) for name in wrt}

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
            seeds = {output: op.full(op.Shape(output), 1.0, like=output) for output in names}
        else:
            seeds = names
        for output, seed in seeds.items():
            if cotangent != "input" and seed not in self.rename:
                self.rename[seed] = names[output]
            op.describe(seed, like=output)
            self.owner[seed] = output
            self.contributions[output] = [[seed]]
        return names if cotangent == "input" else {}

    def _visit(self, node: Node) -> None:
        adjoints = [self._adjoint(name) for name in node.outputs]
        if not any(adjoints):
            return
        rule = RULES[node.key]
        bound, places = rule.bind(self.graph.opsets.get(rule.domain, 1))
        op, needed = self.op, self.path.needed
        op.enter(rule.op_type, node.name, node)
        arguments, keywords = self._arguments(node, bound, adjoints)
        result = rule.function(op, *arguments, **keywords)
        operands = tuple(filter(None, node.inputs)) if rule.broadcast else ()
        mine: dict[str, list[str]] = {}
        for name, adjoint in self._assign(node, rule, places, result):
            if adjoint is None or name not in needed:
                continue
            if len(operands) > 1:
                adjoint = op.grad.BroadcastGradient(adjoint, name, operands)
            if name in self.graph.adjoint_types:
                adjoint = op.as_type(adjoint, self.graph.adjoint_types[name])
            if name in mine:
                mine[name].append(adjoint)
            else:
                mine[name] = [adjoint]
                self.contributions.setdefault(name, []).append(mine[name])

    def _arguments(
        self, node: Node, bound: tuple[Read, ...], adjoints: list[str | None]
    ) -> tuple[list[Any], dict[str, Any]]:
        """What the rule reads, in the order of its parameters."""
        attributes = node.attributes
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        for read in bound:
            if read.kind in _VALUES:
                where = adjoints if read.kind == "cotangent" else node.inputs if read.kind == "input" else node.outputs
                if read.variadic:
                    value: Any = [name or None for name in where[read.position :]]
                    if read.kind == "output" and None in value:
                        value = [name or self._add_output(node, read, k) for k, name in enumerate(value)]
                else:
                    value = where[read.position] or None if read.position < len(where) else None
                    if value is None and read.kind == "output":
                        value = self._add_output(node, read, 0)
            elif read.kind == "constant":
                value = attributes.get(read.name, read.default)
                value = None if value is None else self.op.const(value)
            elif read.kind == "keyword":
                keywords[read.name] = attributes.get(read.name, read.default)
                continue
            else:
                value = attributes.get(read.name, read.default)
            arguments.append(value)
        return arguments, keywords

    def _add_output(self, node: Node, read: Read, place: int) -> str:
        """Name an output that the node leaves out: an optional one, or the one at `place` among variadic ones."""
        name = self.op.fresh(f"{node.name}_{read.name}")
        node.add_output(read.position + place, name)
        self.op.describe_output(node, read.position, name)
        return name

    def _assign(
        self, node: Node, rule: Rule, places: tuple[tuple[int, bool], ...], result: Any
    ) -> Iterator[tuple[str, str | None]]:
        """Pair the inputs of a node with the adjoints that its rule returned for them."""
        if len(places) == 1 and not (isinstance(result, tuple) and len(result) == 1):
            result = (result,)
        if not isinstance(result, tuple) or len(result) != len(places):
            count = len(result) if isinstance(result, tuple) else 1
            raise RuleError(
                f"The rule for {rule.op_type} returned {count} adjoints for node {node.name!r}; "
                f"one each is due for {', '.join(rule.wrt)}."
            )
        for (position, variadic), adjoint in zip(places, result, strict=True):
            if variadic:
                yield from zip(node.inputs[position:], adjoint, strict=True)
            elif position < len(node.inputs):
                yield node.inputs[position], adjoint

    def _adjoint(self, name: str) -> str | None:
        """The adjoint of `name`, the sum of its contributions in the order of the nodes; None where there are none."""
        groups = self.contributions.get(name)
        if not groups:
            return None
        parts = [part for group in reversed(groups) for part in group]
        if len(parts) == 1:
            total = parts[0]
            if self.owner.get(total) == name:
                return total
            self.op.enter("identity", name)
            total = self._call(self._own(total), f"{name}_grad", name)
        else:
            self.op.enter("sum", name)
            parts = [self._call(self._own(part), f"{name}_grad_{k}", name) for k, part in enumerate(parts)]
            total = self._call(self.op.Sum(*parts), f"{name}_grad", name)
        self.op.describe(total, like=name)
        self.contributions[name] = [[total]]
        return total

    def _own(self, value: str) -> str:
        """`value`, or an alias of it where it has a name already."""
        return value if value in self.op.made and value not in self.rename else str(self.op.grad.Alias(value))

    def _call(self, value: str, name: str, primal: str) -> str:
        """Give an emitted value its name in the result, unless it has one there already."""
        if value in self.op.made and value not in self.rename:
            self.rename[value] = self.op.fresh(name)
            self.owner[value] = primal
        return value

    def _result(self, name: str) -> str:
        """The value that becomes the output `<name>_grad`: no graph input, and no other name's gradient."""
        adjoint = self._adjoint(name)
        if adjoint is None:
            self.op.enter("zero", name)
            adjoint = self.op.zeros_like(name)
        elif self.owner.get(adjoint) == name and adjoint in self.op.made:
            return adjoint
        else:
            self.op.enter("identity", name)
        return self._call(self.op.copy(adjoint), f"{name}_grad", name)

    # The result

    def model(self) -> ModelProto:
        """The gradient model: the nodes that an output needs, and nothing else."""
        source, graph = self.graph.source, self.graph
        live = set(self.gradients.values())
        kept = list(graph.outputs.values()) if self.keep_outputs else []
        live.update(value.name for value in kept)
        backward = []
        for emitted in reversed(self.op.nodes):
            if live.isdisjoint(emitted.outputs):
                continue
            if emitted.optional_outputs:
                emitted.outputs = [name if name in live else "" for name in emitted.outputs]
            live.update(emitted.inputs, emitted.captured)
            backward.append(emitted)
        forward = []
        for node in reversed(graph.nodes):
            if not live.isdisjoint(node.outputs):
                if node.name in self.op.training_forms:
                    self._settle(node, live)
                live.update(node.reads)
                forward.append(node.proto)
        final = ModelProto(ir_version=max(source.ir_version, _IR_VERSION), producer_name="refgrad")
        final.opset_import.extend(graph.model.opset_import)
        if "" not in graph.opsets:
            final.opset_import.append(helper.make_opsetid("", graph.opset))
        if MICROSOFT in {emitted.domain for emitted in backward} | {node.domain for node in forward}:
            import_domain(final, MICROSOFT)
        target = final.graph
        target.name = f"{graph.model.graph.name}_grad"
        target.node.extend(reversed(forward))
        for value, name in self.op.adjoint_of.items():
            self._call(value, f"{name}_grad", name)
        writer = Writer(target, self.rename)
        for emitted in reversed(backward):
            writer.add(emitted)
        target.input.extend(graph.inputs.values())
        for name in self.wrt:
            if name not in graph.inputs:
                target.input.add(name=name, type=self._type(name))
        for output, name in self.cotangents.items():
            target.input.add(name=name, type=self._type(output))
        for name, value in self.gradients.items():
            target.output.add(name=self.rename[value], type=self._type(name))
        target.output.extend(kept)
        live.update(self.wrt)
        live.update(graph.inputs)
        target.initializer.extend(tensor for name, tensor in graph.initializers.items() if name in live)
        target.initializer.extend(tensor for name, tensor in self.op.constants.items() if name in live)
        target.sparse_initializer.extend(graph.model.graph.sparse_initializer)
        target.value_info.extend(value for name, value in graph.values.items() if name in live)
        elsewhere = {*graph.inputs, *graph.initializers, *(value.name for value in kept)}
        target.value_info.extend(v for name, v in graph.outputs.items() if name in live and name not in elsewhere)
        for value, like in self.op.declared.items():
            if value in live and value not in self.gradients.values():
                shape = [dim if isinstance(dim, int) else None for dim in self.op.shape(like) or ()]
                named = self.rename.get(value, value)
                target.value_info.append(helper.make_tensor_value_info(named, self.op.type(like), shape))
        final.metadata_props.extend(p for p in source.metadata_props if not p.key.startswith("refgrad."))
        for key, names in (
            ("refgrad.gradients", {name: self.rename[value] for name, value in self.gradients.items()}),
            ("refgrad.cotangents", self.cotangents),
        ):
            final.metadata_props.add(key=key, value=json.dumps(names))
        return final

    def _settle(self, node: Node, live: set[str]) -> None:
        """Make a forward node its training form if one of the outputs that this has more is used, else take them away."""
        form = self.op.training_forms[node.name]
        if live.isdisjoint(form.more):
            node.drop_outputs(len(form.more))
        else:
            node.become(form.op_type, MICROSOFT, form.attributes)

    def _type(self, name: str) -> TypeProto:
        """The type and declared shape of an input, an output or an initializer."""
        declared = self.graph.inputs.get(name) or self.graph.outputs.get(name)
        if declared is not None:
            return declared.type
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
        pending = [graph_of for attribute in node.proto.attribute for graph_of in subgraphs(attribute)]
        while pending:
            inner = pending.pop()
            taken.update(value.name for value in inner.input)
            taken.update(tensor.name for tensor in inner.initializer)
            for proto in inner.node:
                taken.update((proto.name, *proto.input, *proto.output))
                pending += [graph_of for attribute in proto.attribute for graph_of in subgraphs(attribute)]
    return taken
