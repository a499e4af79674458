"""Forward mode and higher derivatives, all made with `gradient`: J·u, H·u, whole Jacobians and Hessians, as models."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad.builder.nodes import NodeBuilder
from refgrad.errors import NoGradientError, OptionError, choices
from refgrad.links import Folders
from refgrad.model.checks.malformed import explained
from refgrad.model.graph import read_nodes
from refgrad.model.normalise import normalise
from refgrad.model.reading import read
from refgrad.notices import quiet
from refgrad.protos.traverse import fresh, graphs, names_of, refill
from refgrad.protos.types import Shape, adjoint_of, element_type
from refgrad.reverse.assembly import names_in, note
from refgrad.reverse.gradient import gradient, preflight, transposable
from refgrad.reverse.report import say_useless
from refgrad.tables.conventions import ConventionOptions, Conventions
from refgrad.worker import limited

Model = ModelProto | str | os.PathLike[str]


@limited
@explained
def jvp(
    model: Model,
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    *,
    keep_outputs: bool = False,
    max_memory: int | None = None,
    max_seconds: float | None = None,
    data_folders: Folders | None = None,
    **conventions: Unpack[ConventionOptions],
) -> ModelProto:
    """The model that computes the Jacobian of `model` times a vector (forward mode): how the outputs move with the inputs.

    The result has the model's inputs, one input `<name>_tangent` per name in `wrt`, and one output `<output>_tangent` per
    differentiated output, each with the shape and type of `<name>` or `<output>`. A name that is taken becomes the next free
    one; the metadata `refgrad.directions` and `refgrad.derivatives` (JSON) map the names. Initializers in `wrt` become
    inputs that keep their value as default. It costs a small multiple of the model itself, however many inputs move.

    A vector-Jacobian product is linear in its cotangent v, so its own transpose is the Jacobian-vector product, whatever v
    is (Townsend, A new trick for calculating Jacobian vector products, 2017): no rule is written twice.

    :param model: a model, or the path of one; the other arguments and the errors are the same as in `gradient`.
    :param keep_outputs: also return the outputs of the model, after the tangents.
    :param max_memory: and `max_seconds`, `data_folders`: as in `gradient`.
    :param conventions: `kinks` and the other conventions of `gradient`.
    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    :raises UnknownNameError: a name in `wrt` or `outputs` that does not exist, is given twice, or is not a float.
    :raises NoGradientError: an operator between `wrt` and `outputs` has no derivative, or one of the gradient has none; an
        output is an optional.
    :raises OptionError: an unknown convention.
    :raises WorkerError: that process met a limit, or crashed.

    >>> import onnx.parser, refgrad
    >>> square = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> square (float[N] x) => (float[N] y) { y = Mul(x, x) }'
    ... )
    >>> forward = refgrad.jvp(square)
    >>> [value.name for value in forward.graph.input], [value.name for value in forward.graph.output]
    (['x', 'x_tangent'], ['y_tangent'])
    """
    first = transposable(model, wrt, outputs, Conventions.of("jvp", conventions))
    cotangents, gradients = names_in(first)
    for value in first.graph.output:
        if value.name in cotangents and value.type.HasField("optional_type"):
            raise NoGradientError(
                f"{value.name!r} is an optional, and forward mode needs to know that it holds something: take "
                "OptionalGetElement of it, or choose other outputs."
            )
    second = _again(first, list(cotangents.values()), list(gradients.values()), conventions)
    directions, tangents = names_in(second)
    _fill_with_zeros(second.graph, cotangents)
    moves = {name: directions[slope] for name, slope in gradients.items()}
    moved = {output: tangents[seed] for output, seed in cotangents.items()}
    kept = _outputs(first, but=gradients.values()) if keep_outputs else []
    made = _result(second, _renamed(second, moves, "tangent"), _renamed(second, moved, "tangent"), kept)
    if any(seed in node.output for node in made.graph.node for seed in cotangents.values()):
        _measure_elsewhere(made, cotangents.values())
        _keep(made, _outputs(made, but=()))
    return made


@limited
@explained
def hvp(
    model: Model,
    wrt: Sequence[str] | None = None,
    output: str | None = None,
    *,
    keep_outputs: bool = False,
    max_memory: int | None = None,
    max_seconds: float | None = None,
    data_folders: Folders | None = None,
    **conventions: Unpack[ConventionOptions],
) -> ModelProto:
    """The model that computes the Hessian of `output`, or of the sum of its elements, times a vector.

    The result has the model's inputs, one input `<name>_vector` per name in `wrt`, and one output `<name>_hvp` per name in
    `wrt`, each with the shape and type of `<name>`: the second derivatives with respect to `<name>` and each name in `wrt`,
    times the vector of that name, summed over all names. Names that are taken, initializers and metadata are as in `jvp`. It
    costs a few times as much as the model: the gradient is differentiated again (Pearlmutter 1994), and no Hessian is ever
    formed.

    :param model: a model, or the path of one; the other arguments and the errors are the same as in `gradient`.
    :param output: the float output to differentiate; by default the only one.
    :param keep_outputs: also return the outputs of the model, after the products.
    :param max_memory: and `max_seconds`, `data_folders`: as in `gradient`.
    :param conventions: `kinks` and the other conventions of `gradient`.
    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    :raises UnknownNameError: a name in `wrt`, or an `output`, that does not exist, is given twice, or is not a float.
    :raises NoGradientError: an operator between `wrt` and `output` has no derivative, or one of the gradient has none.
    :raises OptionError: no `output` where there are several, an unknown convention.
    :raises WorkerError: that process met a limit, or crashed.

    >>> import onnx.parser, refgrad
    >>> cube = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> cube (float[N] x) => (float[N] y) { s = Mul(x, x)  y = Mul(s, x) }'
    ... )
    >>> product = refgrad.hvp(cube)
    >>> [value.name for value in product.graph.input], [value.name for value in product.graph.output]
    (['x', 'x_vector'], ['x_hvp'])
    """
    first = _gradient_of_one(model, wrt, output, conventions)[0]
    gradients = names_in(first)[1]
    second = _again(first, list(gradients), list(gradients.values()), conventions)
    directions, products = names_in(second)
    vectors = {name: directions[slope] for name, slope in gradients.items()}
    kept = _outputs(first, but=gradients.values()) if keep_outputs else []
    return _result(second, _renamed(second, vectors, "vector"), _renamed(second, products, "hvp"), kept)


@limited
@explained
def jacobian(
    model: Model,
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    *,
    keep_outputs: bool = False,
    max_memory: int | None = None,
    max_seconds: float | None = None,
    data_folders: Folders | None = None,
    **conventions: Unpack[ConventionOptions],
) -> ModelProto:
    """The model that computes every derivative of the outputs of `model`, element by element.

    The result has the model's inputs and one output `<output>_by_<name>` per differentiated output and name in `wrt`,
    ordered by output, then by name. Its shape is the shape of `<output>` followed by the shape of `<name>`. Initializers in
    `wrt` become inputs that keep their value as default. A name that is taken becomes the next free one; the metadata
    `refgrad.derivatives` (JSON) has them by output and name.

    The model itself is evaluated once. The rest of the gradient is the body of a Loop, run once for each element of an output.

    :param model: a model, or the path of one; the other arguments and the errors are the same as in `gradient`.
    :param keep_outputs: also return the outputs of the model, after the derivatives.
    :param max_memory: and `max_seconds`, `data_folders`: as in `gradient`.
    :param conventions: `kinks` and the other conventions of `gradient`.
    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    :raises UnknownNameError: a name in `wrt` or `outputs` that does not exist, is given twice, or is not a float.
    :raises NoGradientError: an operator between `wrt` and `outputs` has no rule or no derivative, or one of them is a sequence.
    :raises OptionError: an unknown convention.
    :raises WorkerError: that process met a limit, or crashed.

    >>> import onnx.parser, refgrad
    >>> square = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> square (float[N] x) => (float[N] y) { y = Mul(x, x) }'
    ... )
    >>> [value.name for value in refgrad.jacobian(square).graph.output]
    ['y_by_x']
    """
    made, found = read(model), {}
    report = preflight(made, wrt, outputs, quantization=Conventions(**conventions).quantization)
    _refuse_sequences(made, (*report.wrt, *report.outputs))
    say_useless((*report.zeros, *report.leaks), wrt is not None)
    for output in report.outputs:
        made, found[output] = _by_element(made, report.wrt, output, output, conventions)
    return _of_elements(made, found, (), keep_outputs)


@limited
@explained
def hessian(
    model: Model,
    wrt: Sequence[str] | None = None,
    output: str | None = None,
    *,
    keep_outputs: bool = False,
    max_memory: int | None = None,
    max_seconds: float | None = None,
    data_folders: Folders | None = None,
    **conventions: Unpack[ConventionOptions],
) -> ModelProto:
    """The model that computes every second derivative of `output`, or of the sum of its elements.

    The result has the model's inputs and one output `<output>_by_<name>_by_<other>` per pair of names in `wrt`, of the shape of
    `<name>` followed by the shape of `<other>`. This is the Jacobian of the gradient: names that are taken and
    initializers are as in `jacobian`; the metadata `refgrad.derivatives` (JSON) has the outputs by both names.

    :param model: a model, or the path of one; the other arguments and the errors are the same as in `gradient`.
    :param output: the float output to differentiate; by default the only one.
    :param keep_outputs: also return the outputs of the model, after the derivatives.
    :param max_memory: and `max_seconds`, `data_folders`: as in `gradient`.
    :param conventions: `kinks` and the other conventions of `gradient`.
    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    :raises UnknownNameError: a name in `wrt`, or an `output`, that does not exist, is given twice, or is not a float.
    :raises NoGradientError: an operator between `wrt` and `output` has no derivative, or one of the gradient has none;
        a sequence in `wrt`.
    :raises OptionError: no `output` where there are several, an unknown convention.
    :raises WorkerError: that process met a limit, or crashed.

    >>> import onnx.parser, refgrad
    >>> square = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> square (float[N] x) => (float[N] y) { y = Mul(x, x) }'
    ... )
    >>> [value.name for value in refgrad.hessian(square).graph.output]
    ['y_by_x_by_x']
    """
    made, target = _gradient_of_one(model, wrt, output, conventions)
    gradients, found = names_in(made)[1], {}
    _refuse_sequences(made, gradients)
    for name, slope in gradients.items():
        with _of_the_gradient():
            made, found[name] = _by_element(made, list(gradients), slope, f"{target}_by_{name}", conventions)
    return _of_elements(made, found, gradients.values(), keep_outputs)


def _gradient_of_one(
    model: Model, wrt: Sequence[str] | None, output: str | None, conventions: ConventionOptions
) -> tuple[ModelProto, str]:
    """The gradient of the sum of one output, and the name of that output. The outputs of the model follow the gradients."""
    if output is None:
        found = preflight(model, wrt, quantization=Conventions(**conventions).quantization).outputs
        if len(found) > 1:
            raise OptionError(
                f"The model has several float outputs: {choices(found)}. Choose one: output={found[0]!r}."
            )
        [output] = found
    elif not isinstance(output, str):
        raise OptionError(f"output is one name (a string), not {reprlib.repr(output)}.")
    return gradient(model, wrt, [output], cotangent="ones", keep_outputs=True, **conventions), output


def _again(first: ModelProto, wrt: Sequence[str], outputs: Sequence[str], conventions: ConventionOptions) -> ModelProto:
    """The gradient of a gradient."""
    with _of_the_gradient(), quiet():
        return gradient(first, wrt, outputs, keep_outputs=True, **conventions)


def _refuse_sequences(model: ModelProto, names: Iterable[str]) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if value.name in names and adjoint_of(value.type).HasField("sequence_type"):
            raise NoGradientError(
                f"{value.name!r} is a sequence: its derivatives, element by element, are not a tensor. gradient, jvp and hvp "
                "take sequences; here, choose other inputs or outputs: wrt=[...] or outputs=[...]."
            )


@contextmanager
def _of_the_gradient() -> Iterator[None]:
    """Say in a refusal that it comes from the second differentiation."""
    try:
        yield
    except NoGradientError as error:
        raise NoGradientError(
            f"The model has a gradient, which cannot be differentiated again:\n{error}", error.nodes
        ) from error


def _fill_with_zeros(graph: GraphProto, cotangents: Mapping[str, str]) -> None:
    """Compute the cotangents, which were graph inputs, as zeros of the shape of their outputs. Unused zeros are pruned."""
    types = {value.name: value for value in graph.input}
    nodes, builder = list(graph.node), NodeBuilder(names_of(graph))
    for output, seed in cotangents.items():
        element = element_type(types[seed].type)
        kind = helper.tensor_dtype_to_np_dtype(element)
        whole = not types[seed].type.HasField("sequence_type")
        read, made = (output, seed) if whole else map(builder.fresh, (f"{seed}/element", f"{seed}/zeros"))
        zero = builder.add("Constant", [], f"{seed}/zero", value=numpy_helper.from_array(np.zeros((), kind)))
        shape = builder.add("Shape", [read], f"{seed}/shape")
        builder.append("Expand", [zero, shape], [made], f"{seed}/zeros")
        if not whole:
            start, end = (helper.make_tensor_value_info(name, element, None) for name in (read, made))
            body = helper.make_graph(builder.take(), f"{seed}/each", [start], [end])
            builder.append("SequenceMap", [output], [seed], f"{seed}/zeros", attributes={"body": body})
        behind = next((k for k, node in enumerate(nodes, 1) if output in node.output), 0)
        nodes[behind:behind] = builder.take()
        graph.input.remove(types[seed])
        graph.value_info.append(types[seed])
    refill(graph.node, nodes)


def _measure_elsewhere(model: ModelProto, seeds: Iterable[str]) -> None:
    """Let nodes that read only the size of a value that depends on `seeds` read another value of the same shape."""
    shapes, varied = normalise(model).shapes, set(seeds)
    found: dict[Shape, str] = {}

    def remember(names: Iterable[str]) -> None:
        for name in names:
            shape = shapes.get(name, (None,))
            if None not in shape and any(isinstance(size, str) for size in shape):  # known sizes need no other value
                found.setdefault(shape, name)

    remember(value.name for value in model.graph.input)
    for node in read_nodes(model.graph):
        if node.key in (("", "Shape"), ("", "Size")) and node.inputs[0] in varied:
            other = found.get(shapes.get(node.inputs[0], (None,)))
            if other is not None:
                node.proto.input[0] = other
                continue
        if varied.isdisjoint(node.reads):
            remember(node.outputs)
        else:
            varied.update(filter(None, node.outputs))


def _by_element(
    model: Model, wrt: Sequence[str], output: str, title: str, conventions: ConventionOptions
) -> tuple[ModelProto, dict[str, str]]:
    """`model` with the derivatives of every element of `output` in front of its outputs, and the name of each derivative.

    They are `<title>_by_<name>`. The part of the gradient that depends on the cotangent becomes the body of a Loop, whose
    k-th round sets the cotangent to 1 at the k-th element and to 0 elsewhere.
    """
    with quiet():  # one element after the other, or of a gradient
        made = gradient(model, wrt, [output], keep_outputs=True, **conventions)
    cotangents, gradients = names_in(made)
    graph, cotangent = made.graph, cotangents[output]
    types = {value.name: value.type for value in (*graph.input, *graph.output)}
    inside, outside, varied = _parted(graph, cotangent)
    taken = names_of(graph)

    def called(text: str) -> str:
        return fresh(f"{title}_by/{text}", taken)

    first, last, around, behind = (NodeBuilder(taken) for _ in range(4))

    def make(nodes: NodeBuilder, op_type: str, inputs: Sequence[str], *results: str, **attributes: Any) -> None:
        nodes.append(op_type, inputs, results, called(f"{op_type}_node"), attributes=attributes)

    shape, size, zero, one, places = map(called, ("shape", "size", "zero", "one", "places"))
    step, going, still_going, here, weight = map(called, ("step", "going", "still_going", "here", "weight"))
    body = GraphProto(name=called("body"))
    body.input.append(helper.make_tensor_value_info(step, TensorProto.INT64, []))
    body.input.append(helper.make_tensor_value_info(going, TensorProto.BOOL, []))
    body.output.append(helper.make_tensor_value_info(still_going, TensorProto.BOOL, []))
    make(first, "Identity", [going], still_going)
    make(first, "Equal", [places, step], here)
    make(first, "Cast", [here], weight, to=types[cotangent].tensor_type.elem_type)
    make(first, "Reshape", [weight, shape], cotangent, allowzero=1)
    rows, results, declared = [], {}, []
    for name, slope in gradients.items():
        row = slope
        if slope not in varied:  # a subgraph can only return what it computes itself
            row = called(f"{name}_row")
            make(last, "Identity", [slope], row)
        body.output.append(helper.make_value_info(row, types[slope]))
        rows.append(called(f"{name}_rows"))
        results[name] = fresh(f"{title}_by_{name}", taken)
        part, whole = called(f"{name}_shape"), called(f"{name}_whole")
        make(behind, "Shape", [name], part)
        make(behind, "Concat", [shape, part], whole, axis=0)
        make(behind, "Reshape", [rows[-1], whole], results[name], allowzero=1)
        declared.append(helper.make_tensor_value_info(results[name], types[name].tensor_type.elem_type, []))
        declared[-1].type.tensor_type.shape.dim.extend(types[output].tensor_type.shape.dim)
        declared[-1].type.tensor_type.shape.dim.extend(types[name].tensor_type.shape.dim)
    body.value_info.extend(value for value in graph.value_info if value.name in varied)
    body.node.extend([*first.take(), *inside, *last.take()])
    make(around, "Shape", [output], shape)
    make(around, "Size", [output], size)
    make(around, "Constant", [], zero, value_int=0)
    make(around, "Constant", [], one, value_int=1)
    make(around, "Range", [zero, size, one], places)
    make(around, "Loop", [size, ""], *rows, body=body)
    kept = [value for value in graph.output if value.name not in gradients.values()]
    refill(graph.node, [*outside, *around.take(), *behind.take()])
    refill(graph.input, [value for value in graph.input if value.name != cotangent])
    refill(graph.output, [*declared, *kept])
    refill(graph.value_info, [value for value in graph.value_info if value.name not in varied])
    return made, results


def _parted(graph: GraphProto, name: str) -> tuple[list[NodeProto], list[NodeProto], set[str]]:
    """The nodes that depend on `name`, the other nodes, and the values that depend on `name`."""
    inside, outside, varied = [], [], {name}
    for node in read_nodes(graph):
        if varied.isdisjoint(node.reads):
            outside.append(node.proto)
        else:
            inside.append(node.proto)
            varied.update(node.outputs)
    varied.discard("")
    return inside, outside, varied


def _of_elements(
    made: ModelProto, found: Mapping[str, Mapping[str, str]], between: Iterable[str], keep_outputs: bool
) -> ModelProto:
    """The model that returns the derivatives `found`; `between` are the outputs that only served to compute them."""
    derivatives = [name for row in found.values() for name in row.values()]
    kept = _outputs(made, but=(*derivatives, *between)) if keep_outputs else []
    _keep(made, [*derivatives, *kept])
    note(made, made, derivatives=found)
    return made


def _result(
    made: ModelProto, directions: Mapping[str, str], derivatives: Mapping[str, str], kept: Sequence[str]
) -> ModelProto:
    _keep(made, [*derivatives.values(), *kept])
    note(made, made, directions=directions, derivatives=derivatives)
    return made


def _outputs(model: ModelProto, but: Iterable[str]) -> list[str]:
    return [value.name for value in model.graph.output if value.name not in set(but)]


def _renamed(model: ModelProto, values: Mapping[str, str], suffix: str) -> dict[str, str]:
    """Call the value that belongs to `name` `<name>_<suffix>`, or by the next free name. Return the new names by `name`."""
    taken = names_of(model.graph)
    names = {name: fresh(f"{name}_{suffix}", taken) for name in values}
    new = {value: names[name] for name, value in values.items()}
    for graph in graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            value.name = new.get(value.name, value.name)
        for node in graph.node:
            node.input[:] = [new.get(name, name) for name in node.input]
            node.output[:] = [new.get(name, name) for name in node.output]
    return names


def _keep(model: ModelProto, outputs: Sequence[str]) -> None:
    """Remove everything from `model` except its inputs and the parts that `outputs` need."""
    graph = model.graph
    values = {value.name: value for value in graph.output}
    refill(graph.output, [values[name] for name in outputs])
    live, nodes = set(outputs), []
    for node in reversed(read_nodes(graph)):
        if not live.isdisjoint(node.outputs):
            live.update(node.reads)
            nodes.append(node.proto)
    refill(graph.node, nodes[::-1])
    live.update(value.name for value in graph.input)
    refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in live])
    left = [value for name, value in values.items() if name not in outputs]  # of which a node may need the type
    inputs = {value.name for value in graph.input}
    declared = {value.name: value for value in (*graph.value_info, *left) if value.name in live}
    refill(graph.value_info, [v for name, v in declared.items() if name not in inputs and name not in outputs])
