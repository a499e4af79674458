"""A model with its loss, from which a gradient for training starts, and the weights of a model.

The functions, their arguments and the graphs are those that experimental_experiment.gradient.loss_helper documents.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad.builder.nodes import NodeBuilder, constant_tensor
from refgrad.errors import InvalidModelError, OptionError, UnknownNameError, choices, did_you_mean
from refgrad.escaping import is_printable
from refgrad.model.checks.malformed import explained, refusal_of
from refgrad.model.external import ExternalData, place_of, values_of
from refgrad.model.graph import Graph
from refgrad.model.normalise import normalise
from refgrad.model.reading import read
from refgrad.protos.metadata import is_number
from refgrad.protos.traverse import fresh, graphs, import_onnx, names_of
from refgrad.protos.types import FLOATS, Shape, epsilon, is_unnamed
from refgrad.rewrites.scores import BINARY_OF_LOGITS, OF_CLASSES, check_probabilities, refuse_no_logits
from refgrad.rewrites.selection import select_model_inputs_outputs

_LOWEST_OPSET = 8  # operands broadcast from 7 on, the operands of Max and Min from 8 on
_LOWEST_IR = 4  # before it, every initializer is an input


@explained
def add_loss_output(
    onx: ModelProto | str | os.PathLike[str],
    score_name: str = "squared_error",
    loss_name: str = "loss",
    label_name: str = "label",
    weight_name: str | None = None,
    penalty: Mapping[str, Mapping[str, float] | float] | None = None,
    output_index: int | str | None = None,
    *,
    reduction: str = "sum",
    label_type: Any = None,
    **kwargs: float,
) -> ModelProto:
    """The model with the loss [1, 1] as its first output and the label, shaped as the compared output, as one more input.

    With f(x) the output, y the label, w the weights (1 where there are none) and θ the penalized tensors:
    loss = Σᵢ wᵢ·score(f(xᵢ), yᵢ) + Σ_θ l1·Σ|θ| + l2·Σθ². The scores:

    - "squared_error" or "l2": (f(x) − y)²
    - "half_squared_error": ½·(f(x) − y)²
    - "absolute_error" or "l1": |f(x) − y|
    - "elastic": l1_weight·|f(x) − y| + l2_weight·(f(x) − y)², both 0.5 by default
    - "huber": ½·(f(x) − y)² where |f(x) − y| ≤ delta, and delta·(|f(x) − y| − ½·delta) elsewhere; delta is 1 by default
    - "log": −(1 − y)·log(1 − p) − y·log(p), the binary log loss. p is the probability of the class 1: the second of two
      columns of f(x), or its only one; the label is [N, 1], or [N] like f(x), and 0 or 1. A `ModelWarning` says where f(x) may
      be any number. p is clipped to [eps, 1 − eps], so neither logarithm is infinite. eps is 1e-6 by default, in 16-bit types
      the distance of 1 to the next number; beyond the bounds the derivative is 0.
    - "binary_cross_entropy_with_logits": (1 − y)·log(1 + exp(z)) + y·log(1 + exp(−z)), the same loss of raw scores z = f(x),
      of which Sigmoid would make the probabilities. Nothing is clipped, and the derivative is Sigmoid(z) − y everywhere. The
      label has the shape of the scores.

    The loss has the type of the output, and so has the label unless `label_type` gives it another one. The result returns
    the loss and the compared output; the other outputs are left out, with the nodes that only they need. A result within
    the model that has the name of the loss, the label or the weights gets another name: classifiers of skl2onnx call one
    `label`. The constants of the loss are marked, so that they are not taken for weights.

    Where the documented graph is wrong, this one is right: the weights of the rows, [N], are put in a column before they
    multiply scores of [N, 1] (which would broadcast to [N, N]); the loss of an output with other axes is reshaped to [1, 1].
    The documented log loss is the mean over the rows of an INT64 label: reduction="mean", label_type="int64".
    The caller's model is not modified.

    :param onx: a model, or the path of one (external data is referenced, not read). Opset 8 or newer.
    :param weight_name: name of an input to add, one weight per row of the output; None for no weights.
    :param penalty: {name: {"l1": a, "l2": b}}, or {name: b} for l2 alone, of float inputs and initializers.
    :param output_index: position or name of the output that is compared; needed where there are several.
    :param reduction: "sum": the loss is the sum of the weighted scores; "mean": their sum divided by their number (not by
        the sum of the weights). Penalties are added to either.
    :param label_type: the NumPy type of the label, a float, an integer or bool; None for the type of the output.
    :param kwargs: l1_weight and l2_weight ("elastic"), delta ("huber"), eps ("log").
    :raises InvalidModelError: the model cannot be read, is refused by onnx, or is older than opset 8.
    :raises OptionError: an unknown score, setting or reduction, several outputs without output_index, a penalty that is zero
        or not a number, an output that is not a float tensor of known rank, a label that is not a number; for "log", an output
        that has neither one column nor two, or logarithms of probabilities; for raw scores, probabilities.
    :raises UnknownNameError: an output or a penalized tensor that does not exist, or a new name that an input, an
        initializer or the compared output has.

    >>> import onnx.parser, refgrad
    >>> line = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> line (float[N, 1] x) => (float[N, 1] y) <float a = {2}> { y = Mul(x, a) }'
    ... )
    >>> loss = refgrad.add_loss_output(line, penalty={"a": 0.1})
    >>> [value.name for value in loss.graph.input], [value.name for value in loss.graph.output]
    (['x', 'label'], ['loss', 'y'])
    """
    score, settings = _score(score_name, kwargs)
    if reduction not in tuple(REDUCTIONS):  # a list cannot be looked up in a dict
        raise OptionError(f"There is no reduction {reduction!r}; there are {choices(REDUCTIONS)}.")
    if penalty is not None and not isinstance(penalty, Mapping):
        raise OptionError(f"penalty is {{name: amount}}, as in {{'w': 0.1}}, not {penalty!r}.")
    source = read(onx)
    made = ModelProto()
    made.CopyFrom(source)
    if (opset := import_onnx(made)) < _LOWEST_OPSET:
        raise InvalidModelError(
            f"The model has opset {opset}; a loss needs {_LOWEST_OPSET} or newer. "
            "Convert it first with onnx.version_converter."
        )
    if refused := refusal_of(source):
        raise InvalidModelError(refused)
    graph = normalise(source)
    output = one_output(graph, output_index)
    kind, shape = graph.types.get(output), graph.shapes.get(output)
    if kind not in FLOATS or shape is None:
        raise OptionError(f"A loss compares a float tensor of known rank; output {output!r} is not declared as one.")
    if score_name == "log":
        check_probabilities(source, output, score_name)
    if score_name == BINARY_OF_LOGITS:
        refuse_no_logits(source, output, shape, score_name)
    label_kind = kind if label_type is None else _number_type(label_type)
    shape = tuple(None if is_unnamed(dim) else dim for dim in shape)
    new = [loss_name, label_name, *([weight_name] if weight_name is not None else [])]
    taken = make_room(made, new, output)
    builder = _LossBuilder(kind, taken)
    inputs = {label_name: (label_kind, _label_shape(score, output, shape))}
    if weight_name is not None:
        inputs[weight_name] = kind, shape[:1]
    label = label_name if label_kind == kind else builder.add("Cast", [label_name], f"cast_{label_name}", to=kind)
    if score is not _log and has_unknown_width(shape):
        label = builder.add("Reshape", [label, builder.add("Shape", [output], "label_shape")], "label_reshaped")
    if score is _log and shape[1:] not in (
        (),
        (1,),
    ):  # -1, the last column, is right for one column too, but needs opset 11
        settings["column"] = 1 if shape[1] == 2 or opset < 11 else -1
    scores = score(builder, output, label, **settings)
    if weight_name is not None:
        if len(shape) > 1:
            column = builder.vector("shape_weight", [-1] + [1] * (len(shape) - 1), TensorProto.INT64)
            column = builder.add("Reshape", [weight_name, column], "reshaped_weight")
        else:
            column = weight_name
        scores = builder.add("Mul", [scores, column], "loss_diff_weight")
    penalties = [_penalty(builder, graph, name, given) for name, given in (penalty or {}).items()]
    _total(builder, REDUCTIONS[reduction], scores, penalties, loss_name, is_matrix=len(shape) == 2)

    made.ir_version = max(made.ir_version, _LOWEST_IR)
    builder.put_into(made.graph)
    made.graph.input.extend(helper.make_tensor_value_info(name, of, dims) for name, (of, dims) in inputs.items())
    made.graph.name = made.graph.name or "loss"
    outputs = list(made.graph.output)
    del made.graph.output[:]
    made.graph.output.append(helper.make_tensor_value_info(loss_name, kind, [1, 1]))
    made.graph.output.extend(value for value in outputs if value.name == output)
    if len(outputs) == 1:
        return made
    return select_model_inputs_outputs(made, inputs=[value.name for value in made.graph.input])


def has_unknown_width(shape: Shape) -> bool:
    """True if a size after the first axis is unknown: a label of another size would be broadcast, unless it is reshaped."""
    return not all(isinstance(dim, int) for dim in shape[1:])


def make_room(model: ModelProto, new: Sequence[object], output: str) -> set[str]:
    """Free the names in `new`: a value within `model` that has one gets another name. Return the names that are taken.

    :raises UnknownNameError: an input, an initializer or the compared `output` has one of them, or two are the same.
    """
    graph = model.graph
    taken = names_of(graph) | {node.name for inner in graphs(graph) for node in inner.node}
    fixed = {output, *(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)}
    fixed.update(tensor.values.name for tensor in graph.sparse_initializer)
    for name in new:
        if not isinstance(name, str) or not name:
            raise OptionError(f"The name of an input or an output is a string, not {name!r}.")
        if not is_printable(name):
            raise OptionError(f"The name of an input or an output can be printed, unlike {name!r}.")
        if name in fixed:
            raise UnknownNameError(
                f"The name {name!r} is taken: the loss, the label and the weights have names of their own."
            )
        fixed.add(name)
    renamed = {name: fresh(name, taken) for name in sorted(taken.intersection(map(str, new)))}
    if renamed:
        rename_everywhere(graph, renamed)
    return taken | fixed


def rename_everywhere(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Give values and nodes in `graph` and its subgraphs other names."""
    for inner in graphs(graph):
        tensors = [*inner.initializer, *(sparse.values for sparse in inner.sparse_initializer)]
        named: list[Any] = [*inner.input, *inner.output, *inner.value_info, *tensors, *inner.node]
        for one in named:
            one.name = names.get(one.name, one.name)
        for node in inner.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        for annotation in inner.quantization_annotation:
            annotation.tensor_name = names.get(annotation.tensor_name, annotation.tensor_name)


def penalty_loss_onnx(
    name: str,
    dtype: Any,
    l1: float | None = None,
    l2: float | None = None,
    existing_names: list[str] | set[str] | None = None,
) -> tuple[list[TensorProto], list[NodeProto]]:
    """The initializers and the nodes of l1·Σ|w| + l2·Σw², shape [1], of the tensor `name`; the last output is the penalty.

    It is named `penalty_<name>`, or by the next free name.

    :param dtype: the NumPy type of the tensor, a float.
    :param l1: weight of the sum of absolute values; None or 0 for none.
    :param l2: weight of the sum of squares; None or 0 for none.
    :param existing_names: names that are taken, a list or a set; those that the result uses are added to it.
    :raises OptionError: the type is not a float, a weight is not a finite number, there is no weight, or existing_names is
        neither a list nor a set.
    """
    kind = _float_type(dtype)
    taken = [] if existing_names is None else existing_names
    if not isinstance(taken, list | set):
        raise OptionError(f"existing_names is a list or a set of names, not {type(taken).__name__}.")
    builder = _LossBuilder(kind, set(taken))
    _penalize(builder, name, l1, l2)
    if isinstance(taken, set):
        taken |= builder.taken
    else:
        taken += sorted(builder.taken.difference(taken))
    return list(builder.constants.values()), builder.take()


@explained
def get_train_initializer(onx: ModelProto | str | os.PathLike[str]) -> dict[str, tuple[np.ndarray, TensorProto]]:
    """The float initializers of a model, 16-bit and double ones too: {name: (value, tensor)}.

    Constants that refgrad wrote, such as the coefficients of `add_loss_output`, are left out: they are not to be trained.

    :param onx: a model, or the path of one. External data is read: beside the file, or in the current folder.
    :raises InvalidModelError: the model or its external data cannot be read.
    """
    tensors = train_tensors(read(onx))
    with ExternalData(place_of(onx)) as data:
        return {name: (values_of(tensor, data), tensor) for name, tensor in tensors.items()}


def train_tensors(model: ModelProto) -> dict[str, TensorProto]:
    """The initializers that `get_train_initializer` reads, by name."""
    return {t.name: t for t in model.graph.initializer if t.data_type in FLOATS and not is_number(t)}


class _LossBuilder(NodeBuilder):
    """The builder of a loss of element type `kind`; the second value of a name is `name_2`, as in the documented graphs."""

    def __init__(self, kind: int, taken: set[str]) -> None:
        super().__init__(taken, start=2)
        self.kind = kind

    def vector(self, name: str, values: Sequence[float], kind: int | None = None) -> str:
        """A constant; a float one is marked with the number that it was before rounding, as gradients mark theirs."""
        array = np.array(values, dtype=helper.tensor_dtype_to_np_dtype(self.kind if kind is None else kind))
        if kind is not None:
            return self.initializer(numpy_helper.from_array(array), name)
        exact = "" if float(array[0]) == values[0] else repr(float(values[0]))
        return self.initializer(constant_tensor(array, exact), name)


def _squared_error(op: _LossBuilder, output: str, label: str) -> str:
    diff = op.add("Sub", [output, label], "loss_diff")
    return op.add("Mul", [diff, diff], "loss_diff")


def _half_squared_error(op: _LossBuilder, output: str, label: str) -> str:
    return op.add("Mul", [_squared_error(op, output, label), op.vector("half_name", [0.5])], "loss_half")


def _absolute_error(op: _LossBuilder, output: str, label: str) -> str:
    return op.add("Abs", [op.add("Sub", [output, label], "loss_diff")], "loss_diff")


def _elastic(op: _LossBuilder, output: str, label: str, l1_weight: float = 0.5, l2_weight: float = 0.5) -> str:
    diff = op.add("Sub", [output, label], "loss_diff")
    square = op.add("Mul", [diff, diff], "loss_l2")
    absolute = op.add("Abs", [diff], "loss_l1")
    absolute = op.add("Mul", [absolute, op.vector("l1_name", [l1_weight])], "loss_l1")
    square = op.add("Mul", [square, op.vector("l2_name", [l2_weight])], "loss_l2")
    return op.add("Add", [absolute, square], "final_loss")


def _huber(op: _LossBuilder, output: str, label: str, delta: float = 1.0) -> str:
    """c·(d − c/2), where c is the difference d clipped to [−delta, delta]: no derivative depends on the ends."""
    if delta <= 0:
        raise OptionError(f"delta of the score 'huber' is a number above 0, not {delta!r}.")
    diff = op.add("Sub", [output, label], "loss_diff")
    clipped = op.add("Min", [diff, op.vector("delta_name", [delta])], "loss_clipped")
    clipped = op.add("Max", [clipped, op.vector("minus_delta_name", [-delta])], "loss_clipped")
    half = op.add("Mul", [clipped, op.vector("half_name", [0.5])], "loss_half")
    return op.add("Mul", [clipped, op.add("Sub", [diff, half], "loss_rest")], "loss_huber")


def _log(op: _LossBuilder, output: str, label: str, eps: float | None = None, column: int | None = None) -> str:
    if eps is None:
        eps = max(1e-6, epsilon(helper.tensor_dtype_to_np_dtype(op.kind)))
    if not 0 < eps < 0.5:
        raise OptionError(f"eps clips probabilities to [eps, 1 - eps]: it lies between 0 and 0.5, unlike {eps}.")
    one = op.vector("one_name", [1.0])
    p = output
    if column is not None:
        p = op.add("Gather", [p, op.vector("column_name", [column], TensorProto.INT64)], "probability", axis=1)
    p = op.add("Max", [p, op.vector("eps_name", [eps])], "probability")
    p = op.add("Min", [p, op.vector("one_eps_name", [1 - eps])], "probability")
    others = op.add("Log", [op.add("Sub", [one, p], "probability_0")], "log_0")
    others = op.add("Mul", [op.add("Sub", [one, label], "label_0"), others], "loss_0")
    own = op.add("Mul", [label, op.add("Log", [p], "log_1")], "loss_1")
    return op.add("Neg", [op.add("Add", [others, own], "loss_log")], "loss_log")


def _binary_cross_entropy(op: _LossBuilder, output: str, label: str) -> str:
    """By the LogSoftmax of −z/2 beside z/2, which has kernels for all floats, and derivatives of any order at 0 too."""
    column = op.vector("column_shape", [-1, 1], TensorProto.INT64)
    half = op.add("Reshape", [op.add("Mul", [output, op.vector("half_name", [0.5])], "score_half"), column], "score_1")
    both = op.add("Concat", [op.add("Neg", [half], "score_0"), half], "scores", axis=1)
    logs = op.add("LogSoftmax", [both], "logs", axis=1)
    expected = op.add("Reshape", [label, column], "label_1")
    parts = []
    for k, weight in enumerate((op.add("Sub", [op.vector("one_name", [1.0]), expected], "label_0"), expected)):
        log = op.add("Gather", [logs, op.vector("column_name", [k], TensorProto.INT64)], f"log_{k}", axis=1)
        parts.append(op.add("Mul", [weight, log], f"loss_{k}"))
    loss = op.add("Neg", [op.add("Add", parts, "loss_log")], "loss_log")
    return op.add("Reshape", [loss, op.add("Shape", [output], "score_shape")], "loss_log")


SCORES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {  # with the names of their settings
    "squared_error": (_squared_error, ()),
    "l2": (_squared_error, ()),
    "half_squared_error": (_half_squared_error, ()),
    "absolute_error": (_absolute_error, ()),
    "l1": (_absolute_error, ()),
    "elastic": (_elastic, ("l1_weight", "l2_weight")),
    "huber": (_huber, ("delta",)),
    "log": (_log, ("eps",)),
    BINARY_OF_LOGITS: (_binary_cross_entropy, ()),
}


REDUCTIONS = {"sum": "ReduceSum", "mean": "ReduceMean"}


def _score(name: object, settings: Mapping[str, float]) -> tuple[Callable[..., str], dict[str, float]]:
    if not isinstance(name, str) or name not in SCORES:
        hint = (
            f" {name} is a loss of refgrad.training.step_model, and a score of refgrad.recipes."
            if name in OF_CLASSES
            else ""
        )
        raise OptionError(f"There is no score {name!r}; there are {choices(SCORES)}.{hint}")
    function, known = SCORES[name]
    for setting, value in settings.items():
        if setting not in known:
            raise OptionError(f"The score {name!r} has no setting {setting!r}; it has {choices(known)}.")
        _check_number(f"{setting} of the score {name!r}", value)
    return function, dict(settings)


def _check_number(what: str, value: object) -> None:
    most: Any = sys.float_info.max  # a fraction is compared with it, too
    if isinstance(value, bool) or not isinstance(value, Real) or not -most <= value <= most:
        raise OptionError(f"{what} is a finite number, not {value!r}.")


def one_output(graph: Graph, index: object) -> str:
    """The output by its position or name; by default the only one.

    :raises OptionError: there is none, or several without a choice.
    :raises UnknownNameError: no output has the name.
    """
    outputs = list(graph.outputs)
    if index is None:
        if len(outputs) != 1:
            raise OptionError(f"The model has several outputs: choose one with output_index, of {choices(outputs)}.")
        return outputs[0]
    if isinstance(index, str):
        if index not in outputs:
            raise UnknownNameError(
                f"output_index={index!r} is not an output of the model.{did_you_mean(index, outputs)} "
                f"It has: {choices(outputs)}."
            )
        return index
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(outputs):
        raise OptionError(
            f"output_index={index!r}: the model has the outputs 0 to {len(outputs) - 1}, {choices(outputs)}."
        )
    return outputs[index]


def _label_shape(score: Callable[..., str], output: str, shape: Shape) -> Shape:
    if score is not _log:
        return shape
    if len(shape) not in (1, 2) or (len(shape) == 2 and isinstance(shape[1], int) and shape[1] not in (1, 2)):
        raise OptionError(
            f"The log loss needs probabilities of two classes, [N, 2], [N, 1] or [N]; output {output!r} has the shape "
            f"{list(shape)}. For more classes use log_loss."
        )
    return shape if len(shape) == 1 else (shape[0], 1)


def _penalty(op: _LossBuilder, graph: Graph, name: str, given: Mapping[str, float] | float) -> str:
    """Add the nodes of one penalty. Return its value, in the type of the loss."""
    known = [n for n in (*graph.inputs, *graph.initializers) if graph.types.get(n) in FLOATS]
    if name not in known:
        raise UnknownNameError(
            f"{name!r} in penalty is not a float input or initializer.{did_you_mean(name, known)} There are: {choices(known)}."
        )
    weights = dict(given) if isinstance(given, Mapping) else {"l2": given}
    for key in weights:
        if key not in ("l1", "l2"):
            raise OptionError(f"The penalty of {name!r} has {key!r}; there are 'l1' and 'l2'.")
    kind, op.kind = op.kind, graph.types[name]
    value = _penalize(op, name, weights.get("l1"), weights.get("l2"))
    op.kind, other = kind, op.kind
    return value if kind == other else op.add("Cast", [value], f"penalty_{name}", to=kind)


def _penalize(op: _LossBuilder, name: str, l1: float | None, l2: float | None) -> str:
    for what, weight in (("l1", l1), ("l2", l2)):
        if weight is not None:
            _check_number(f"{what} of the penalty of {name!r}", weight)
    if not l1 and not l2:
        raise OptionError(f"The penalty of {name!r} is zero: give l1, l2 or both.")
    flat = op.add("Reshape", [name, op.vector(f"shape_{name}", [-1], TensorProto.INT64)], f"reshaped_{name}")
    both = bool(l1 and l2)

    def part(order: int, elements: str, weight: float) -> str:
        weighted = op.vector(f"l{order}_weight_{name}", [weight])
        number = order if both else ""
        total = op.add("ReduceSum", [elements], f"reduced{number}_{name}")
        return op.add("Mul", [total, weighted], f"penalty{number}_{name}")

    parts = []
    if l2:
        parts.append(part(2, op.add("Mul", [flat, flat], f"reducedm_{name}"), l2))
    if l1:
        parts.append(part(1, op.add("Abs", [flat], f"absolute_{name}"), l1))
    return op.add("Add", [*reversed(parts)], f"penalty_{name}") if both else parts[0]


def _total(op: _LossBuilder, reduce: str, scores: str, penalties: Sequence[str], loss: str, is_matrix: bool) -> None:
    """The sum or the mean of the scores plus the penalties, as [1, 1]."""
    if is_matrix and not penalties:
        op.add_as(reduce, [scores], loss)
        return
    summed = op.add(reduce, [scores], "loss_diff")
    shape = op.vector("shapevect", [-1, 1], TensorProto.INT64)
    if not penalties:
        op.add_as("Reshape", [summed, shape], loss)
        return
    whole = penalties[0]
    for other in penalties[1:]:
        whole = op.add("Add", [whole, other], "sumop")
    whole = op.add("Reshape", [whole, shape], "penalty_reshape")
    summed = op.add("Reshape", [summed, shape], "loss_reshape")
    op.add_as("Add", [whole, summed], loss)


def _number_type(dtype: Any) -> int:
    try:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    except (TypeError, ValueError) as error:
        raise OptionError(f"A label has a float or an integer type, not {dtype!r}.") from error
    if kind not in FLOATS and np.dtype(dtype).kind not in "iub":
        raise OptionError(f"A label has a float or an integer type, not {np.dtype(dtype).name}.")
    return int(kind)


def _float_type(dtype: Any) -> int:
    try:
        kind = None if dtype is None else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    except (TypeError, ValueError) as error:
        raise OptionError(f"A penalty has a float type, not {dtype!r}.") from error
    if kind not in FLOATS:
        raise OptionError(f"A penalty has a float type, not {dtype if dtype is None else np.dtype(dtype).name}.")
    return int(kind)
