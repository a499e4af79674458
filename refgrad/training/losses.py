"""The loss of a model, with the label as one more input, and its derivatives by the weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from refgrad.builder.function import FunctionEmitter
from refgrad.errors import OptionError, choices
from refgrad.markup import shape_text
from refgrad.model import native
from refgrad.model.external import array_of
from refgrad.model.graph import Graph
from refgrad.model.normalise import normalise
from refgrad.model.reading import read, skeleton_of
from refgrad.model.upgrading.upgrade import upgrade
from refgrad.protos.traverse import fresh, names_of, refill, rename_values, versions_of
from refgrad.protos.types import FLOATS, SIXTEEN_BIT, Shape, is_unnamed, type_of
from refgrad.reverse.assembly import names_in, note
from refgrad.reverse.gradient import training_gradient
from refgrad.rewrites.losses import REDUCTIONS, SCORES, add_loss_output, has_unknown_width, make_room, one_output
from refgrad.rewrites.scores import OF_CLASSES, loss_of_classes
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.tables.conventions import DEFAULT, Conventions
from refgrad.training.class_losses import with_loss_of_classes
from refgrad.training.outputs import compared_output
from refgrad.training.term import LossTerm

# The losses of an element whose derivative is written at once: of the difference d, the loss and what it is by d.
_DIRECT: dict[str, Callable[[FunctionEmitter, str], tuple[str, str]]] = {
    "squared_error": lambda op, d: (op.Mul(d, d), op.Add(d, d)),
    "half_squared_error": lambda op, d: (op.Mul(op.Mul(d, d), 0.5), d),
    "absolute_error": lambda op, d: (op.Abs(d), op.Sign(d)),
}
_DIRECT |= {"l2": _DIRECT["squared_error"], "l1": _DIRECT["absolute_error"]}
LOSSES = (*SCORES, *OF_CLASSES)


def differentiated(
    model: ModelProto | str | os.PathLike[str],
    wrt: Sequence[str],
    loss: str | ModelProto | os.PathLike[str] | None,
    output: str | None,
    label: str,
    sample_weight: str | None,
    reduction: str,
    settings: Mapping[str, Any] | None = None,
    conventions: Conventions = DEFAULT,
    scale: str = "",
) -> tuple[ModelProto, str]:
    """The model that returns the gradients by `wrt`, which are inputs, and the loss; and what the loss is called there.

    The losses of step_model compute in float32 if the output has 16 bits.

    :param scale: the name of an input to add, a float32 scalar by which the gradients are multiplied.
    :raises NoGradientError: the gradient of every weight is 0.
    :raises OptionError: there is no such loss, or it does not fit the output.
    :raises UnknownNameError: a new name that the model has.
    """
    source = _with_sigmoids(read(model))
    settings = dict(settings or {})
    if settings and (not isinstance(loss, str) or loss not in (*SCORES, "cross_entropy")):
        what = "A loss that is a model" if isinstance(loss, ModelProto | os.PathLike) else f"loss={loss!r}"
        raise OptionError(f"{what} has no settings, such as {next(iter(settings))!r}.")
    if loss is None:
        name = _loss_of(normalise(source), output)
    elif isinstance(loss, ModelProto | os.PathLike):
        if sample_weight is not None or reduction != "mean":
            raise OptionError(
                "A loss that is a model reduces and weighs by itself: leave out reduction and sample_weight."
            )
        source, name = _composed(source, read(loss), output)
    else:
        term = LossTerm(loss, output, label, reduction=reduction, sample_weight=sample_weight, settings=settings)
        _check_named(term)
        _refuse_one_number(source, loss, output)
        if loss in _DIRECT and not settings:
            return _direct(source, wrt, term, conventions, scale)
        source, name = _with_named(source, term)
    if not scale:
        return training_gradient(source, wrt, name, "ones", conventions), name
    return _scaled(training_gradient(source, wrt, name, "input", conventions), name, scale), name


def _refuse_one_number(source: ModelProto, loss: str, output: str | None) -> None:
    """Refuse an output without axes, which is the loss itself in most models.

    :raises OptionError: the output is one number.
    """
    graph = normalise(source)
    compared = one_output(graph, output)
    if graph.shapes.get(compared) == ():
        raise OptionError(
            f"loss={loss!r} compares a result for each sample, and {compared!r} is one number. If it is the loss itself, take "
            "loss=None."
        )


def with_loss(model: ModelProto | str | os.PathLike[str], term: LossTerm) -> tuple[ModelProto, str]:
    """The model that returns a loss with a name, unweighted, and the name of the output for the loss.

    :raises OptionError: there is no such loss, or it does not fit the output.
    :raises UnknownNameError: a new name that the model has.
    """
    _check_named(term)
    return _with_named(_with_sigmoids(read(model)), term)


def _check_named(term: LossTerm) -> None:
    if term.loss not in LOSSES:
        path = f" The loss in a file is a Path: loss=Path({term.loss!r})." if str(term.loss).endswith(".onnx") else ""
        raise OptionError(
            f"There is no loss {term.loss!r}; there are {choices(LOSSES)}, and None where the model returns its loss.{path}"
        )
    if term.reduction not in REDUCTIONS:
        raise OptionError(f"There is no reduction {term.reduction!r}; there are {choices(REDUCTIONS)}.")


def _with_named(source: ModelProto, term: LossTerm) -> tuple[ModelProto, str]:
    """The model that returns a loss with a name, and the name of the output for the loss."""
    if term.loss in OF_CLASSES:
        return with_loss_of_classes(source, term)
    name = fresh("total_loss", names_of(source.graph))
    source, output, label_type = _with_wide_output(source, term.output)
    made = add_loss_output(
        source,
        term.loss,
        name,
        term.label,
        term.sample_weight,
        None,
        output,
        reduction=term.reduction,
        label_type=label_type,
        **term.settings,
    )
    if label_type is not None and term.sample_weight is not None:
        _narrow_input(made, term.sample_weight, helper.np_dtype_to_tensor_dtype(label_type))
    return made, name


def _narrow_input(model: ModelProto, name: str, kind: int) -> None:
    """Give a float32 input of the model a type of 16 bits; in place."""
    wide = fresh(f"{name}_float32", names_of(model.graph))
    for node in model.graph.node:
        rename_values(node, {name: wide})
    cast = helper.make_node("Cast", [name], [wide], name=wide, to=TensorProto.FLOAT)
    refill(model.graph.node, [cast, *model.graph.node])
    value = next(value for value in model.graph.input if value.name == name)
    value.type.tensor_type.elem_type = kind


def _with_wide_output(source: ModelProto, output: str | None) -> tuple[ModelProto, str | None, np.dtype | None]:
    """The model with a 16-bit output in float32, the name of this output, and the type of its label."""
    graph = normalise(source)
    compared = one_output(graph, output)
    kind = graph.types.get(compared, 0)
    if kind not in SIXTEEN_BIT:
        return source, output, None
    made = ModelProto()
    made.CopyFrom(source)
    wide = fresh(f"{compared}_float32", names_of(made.graph))
    made.graph.node.append(helper.make_node("Cast", [compared], [wide], name=wide, to=TensorProto.FLOAT))
    value = next(value for value in made.graph.output if value.name == compared)
    value.name, value.type.tensor_type.elem_type = wide, TensorProto.FLOAT
    return made, wide, helper.tensor_dtype_to_np_dtype(kind)


def _loss_of(graph: Graph, output: str | None) -> str:
    """The output that is the loss.

    :raises OptionError: it has more than one element.
    """
    name = one_output(graph, output)
    shape = graph.shapes.get(name) or ()
    if any(dim != 1 and not is_unnamed(dim) for dim in shape):
        raise OptionError(
            f"loss=None needs an output that is one number, and {name!r} has the shape [{', '.join(map(str, shape))}]. For "
            f"class numbers use loss={loss_of_classes(graph.source, name, shape)!r}, else loss='squared_error'."
        )
    return name


def _direct(
    source: ModelProto,
    wrt: Sequence[str],
    term: LossTerm,
    conventions: Conventions,
    scale: str,
) -> tuple[ModelProto, str]:
    """With the derivative of the loss in the place of the cotangent: no node finds out which shapes it has."""
    graph = normalise(source)
    compared = one_output(graph, term.output)
    kind, shape = graph.types.get(compared), graph.shapes.get(compared)
    if kind not in FLOATS or shape is None:
        raise OptionError(f"A loss compares a float tensor of known rank; output {compared!r} is not declared as one.")
    alone = ModelProto()
    alone.CopyFrom(source)
    make_room(alone, term.added, compared)
    source = select_model_inputs_outputs(alone, [compared], [value.name for value in source.graph.input])
    made = training_gradient(source, wrt, compared, "input", conventions)
    seed = names_in(made)[0][compared]
    taken = names_of(made.graph) | {node.name for node in made.graph.node}
    taken.update(name for name in (*term.added, scale) if name)
    op = FunctionEmitter.into_graph(versions_of(made)[""], "loss", taken)
    op.types |= {compared: (kind, len(shape)), term.label: (kind, len(shape))}
    expected = op.wide(term.label)
    if has_unknown_width(shape):
        expected = op.Reshape(expected, op.Shape(compared))
    score, slope = _DIRECT[term.loss](op, op.Sub(op.wide(compared), expected))
    inputs = [helper.make_tensor_value_info(term.label, kind, shape)]
    if term.sample_weight is not None:
        inputs.append(helper.make_tensor_value_info(term.sample_weight, kind, shape[:1]))
        op.types[term.sample_weight] = (kind, 1)
        weights = op.wide(term.sample_weight)
        weights = op.Reshape(weights, [-1] + [1] * (len(shape) - 1)) if len(shape) > 1 else weights
        score, slope = op.Mul(score, weights), op.Mul(slope, weights)
    total: str = op.emit(REDUCTIONS[term.reduction], "", (score,), 1, {"keepdims": 0})
    if term.reduction == "mean":
        slope = op.Div(slope, op.Cast(op.Size(score), to=op.type(score)))
    if scale:
        op.types[scale] = (TensorProto.FLOAT, 0)
        slope = op.Mul(slope, op.Cast(scale, to=op.type(slope)))
        inputs.append(helper.make_tensor_value_info(scale, TensorProto.FLOAT, []))
    if op.type(slope) != kind:
        slope = op.Cast(slope, to=kind)
    _seeded(made, seed, compared, slope, op)
    made.graph.input.extend(inputs)
    refill(made.graph.output, [value for value in made.graph.output if value.name != compared])
    made.graph.output.append(helper.make_tensor_value_info(total, op.type(score), []))
    return made, total


def _scaled(made: ModelProto, loss: str, scale: str) -> ModelProto:
    """The gradient model with the input `scale` as the cotangent of the loss, in the type and shape of the loss; in place."""
    seed = names_in(made)[0][loss]
    kind = next(value.type.tensor_type.elem_type for value in made.graph.output if value.name == loss)
    op = FunctionEmitter.into_graph(versions_of(made)[""], "loss", {scale, *names_of(made.graph)})
    op.types |= {scale: (TensorProto.FLOAT, 0), loss: (kind, None)}
    _seeded(made, seed, loss, op.Reshape(op.Cast(scale, to=kind), op.Shape(loss)), op)
    made.graph.input.append(helper.make_tensor_value_info(scale, TensorProto.FLOAT, []))
    return made


def _seeded(made: ModelProto, seed: str, value: str, cotangent: str, op: FunctionEmitter) -> None:
    """Put the nodes of `op` behind `value`, and its result `cotangent` in the place of the input `seed`."""
    nodes = list(made.graph.node)
    place = next((k + 1 for k, node in enumerate(nodes) if value in node.output), 0)
    nodes[place:place] = [
        *op.builder.take(),
        NodeProto(op_type="Identity", name=seed, input=[cotangent], output=[seed]),
    ]
    refill(made.graph.node, nodes)
    refill(made.graph.input, [value for value in made.graph.input if value.name != seed])
    made.graph.initializer.extend(op.builder.constants.values())
    note(made, made, gradients=names_in(made)[1], cotangents={})


def compared_outputs(model: ModelProto, loss: object, output: str | int | None) -> tuple[str | None, list[str]]:
    """The output to compare, None if a loss that is a model chooses its own, and all outputs that the loss reads.

    :param loss: as in `differentiated`.
    :raises OptionError: no output is chosen, and several could be.
    :raises UnknownNameError: no output has the name.
    """
    if output is None and isinstance(loss, ModelProto | os.PathLike):
        whole = read(loss, weights=False)
        return None, [name for name, _ in _joined(model, whole, None)] if whole.graph.input else []
    chosen = compared_output(model, output)
    return chosen, [chosen]


def _joined(source: ModelProto, loss: ModelProto, output: str | None) -> list[tuple[str, str]]:
    """The outputs of the model that a loss reads, each with the input of the loss that it becomes."""
    known = {value.name for value in source.graph.output}
    inputs = [value.name for value in loss.graph.input]
    joined = [(name, name) for name in inputs if name in known]
    if not joined or output is not None:
        joined = [(one_output(normalise(source), output), inputs[0])]
    return joined


def _composed(source: ModelProto, loss: ModelProto, output: str | None) -> tuple[ModelProto, str]:
    """The model followed by the loss: the inputs of the loss that are called as outputs are these, or else the first one."""
    if len(loss.graph.output) != 1 or not loss.graph.input:
        raise OptionError("A loss that is a model has one output, the loss, and the prediction as an input.")
    declared = loss.graph.output[0].type.tensor_type
    if any(dim.dim_value != 1 for dim in declared.shape.dim):
        raise OptionError(
            f"The loss returns {loss.graph.output[0].name!r}, which is declared with more than one element."
        )
    newest = max(versions_of(one).get("", 0) for one in (source, loss))
    source, loss = upgrade(source, newest), upgrade(loss, newest)
    joined = _joined(source, loss, output)
    _refuse_other_inputs(source, loss, joined)
    weights = {tensor.name: tensor for tensor in source.graph.initializer}  # which may lie in files, and are large
    first, second = skeleton_of(source, weights), native.with_prefix(loss, "loss/")
    first.metadata_props.extend(source.metadata_props)
    second.ir_version = first.ir_version = max(first.ir_version, loss.ir_version)
    result = second.graph.output[0]
    if not result.type.tensor_type.HasField("shape"):
        shape = normalise(loss).shapes.get(loss.graph.output[0].name)
        result.CopyFrom(helper.make_tensor_value_info(result.name, declared.elem_type, shape or ()))
    try:
        made = native.merge_models(first, second, joined, [result.name])
    except native.ValidationError as error:
        raise OptionError(f"The loss does not fit the model: {str(error).strip()}.") from error
    listed = {value.name for value in source.graph.input}
    refill(made.graph.input, [v for v in made.graph.input if v.name in listed or v.name not in weights])
    made.graph.initializer.extend(weights.values())
    return made, result.name


def _may_be_equal(one: Shape, other: Shape) -> bool:
    """True if the ranks are equal, and the sizes that both know."""
    known = [pair for pair in zip(one, other, strict=False) if all(isinstance(size, int) for size in pair)]
    return len(one) == len(other) and all(first == second for first, second in known)


def _refuse_other_inputs(source: ModelProto, loss: ModelProto, joined: Sequence[tuple[str, str]]) -> None:
    """Refuse a loss whose inputs are declared differently from the outputs that it gets, or have names of the model's inputs.

    :raises OptionError: a type or a shape differs, so that the loss would broadcast, or a name is taken.
    """
    graph = normalise(source)
    fed, gets = {value.name for value in source.graph.input}, {name: output for output, name in joined}
    for value in loss.graph.input:
        if value.name not in gets:
            if value.name in fed:
                raise OptionError(
                    f"The loss has an input {value.name!r}, and so has the model. Rename the input of the loss."
                )
            continue
        output = gets[value.name]
        kind, shape = type_of(value)
        own_kind, found = graph.types.get(output, 0), graph.shapes.get(output)
        own = None if found is None else tuple(None if is_unnamed(dim) else dim for dim in found)
        if shape is not None and own is not None and not _may_be_equal(shape, own):
            raise OptionError(
                f"The loss takes {value.name!r} of the shape {shape_text(shape)}, and the model returns {output!r} of the "
                f"shape {shape_text(own)}. Declare both alike."
            )
        if kind and own_kind and kind != own_kind:
            names = [helper.tensor_dtype_to_np_dtype(one).name for one in (kind, own_kind)]
            raise OptionError(
                f"The loss takes {value.name!r} in {names[0]}, and the model returns {output!r} in {names[1]}. Declare both "
                "alike, and cast in the loss."
            )


def _with_sigmoids(model: ModelProto) -> ModelProto:
    """The model with Sigmoid(x) in place of 1 / (1 + exp(−x)), as skl2onnx writes it: its derivative is 0·∞ for large x."""
    makers = {name: node for node in model.graph.node for name in node.output}
    held = {t.name: array_of(t) for t in model.graph.initializer if math.prod(t.dims) == 1}

    def other(node: NodeProto | None, op_type: str, number: float) -> str:
        """The operand beside a number."""
        if node is None or node.op_type != op_type:
            return ""
        left, right = node.input
        if right in held and held[right].item() == number:
            return left
        return right if left in held and held[left].item() == number else ""

    found = {}
    for k, node in enumerate(model.graph.node):
        power = makers.get(other(makers.get(node.input[0]), "Add", 1)) if node.op_type == "Reciprocal" else None
        if power is not None and power.op_type == "Exp":
            negated = makers.get(power.input[0])
            is_negated = negated is not None and negated.op_type == "Neg"
            score = negated.input[0] if negated is not None and is_negated else other(negated, "Mul", -1)
            if score:
                found[k] = NodeProto(op_type="Sigmoid", name=node.name, input=[score], output=node.output)
    if not found:
        return model
    made = ModelProto()
    made.CopyFrom(model)
    refill(made.graph.node, [found.get(k, node) for k, node in enumerate(model.graph.node)])
    return made
