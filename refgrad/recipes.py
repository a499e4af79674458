"""Named recipes: models for common uses of a gradient. Recipes build models and do not run them.

Each puts a few nodes around `refgrad.gradient`: before it, `select` turns the chosen output into one number; after it,
the gradient becomes a saliency map, an adversarial input, forces, or a ranking of the weights. In all of them

- `wrt` names the input of the derivative; by default the only float input that has no default value;
- `of` is the output to differentiate, "logits", or some of its elements, "logits[:, 3]", whose sum is taken. Indices
  and slices are as in NumPy, so with a batch axis "logits[:, 3]" is the fourth logit of every sample, and the sum lets
  every sample have its own gradient. A name in place of an index, "logits[:, target]", is an integer scalar input of the
  result. By default it is the only float output;
- `conventions` are `kinks`, `quantization` and the other conventions of `refgrad.gradient`, by the names that they have there;
- a name that the model has already becomes the next free one: `x_saliency_1`;
- models before opset 16 are converted to 16, and the caller's model is not modified.

Every one raises InvalidModelError, UnknownNameError and OptionError, and NoGradientError, as `refgrad.gradient` does.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, Unpack, cast

import numpy as np
from google.protobuf.message import Message
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from refgrad.builder.nodes import NodeBuilder, write
from refgrad.builder.op import Emitter
from refgrad.errors import OptionError, UnknownNameError, choices, did_you_mean
from refgrad.model.checks.malformed import explained
from refgrad.model.external import refuse_mismatch
from refgrad.model.graph import Graph, Node, taken_names
from refgrad.model.normalise import normalise
from refgrad.model.reading import is_large, read
from refgrad.notices import notice
from refgrad.protos.traverse import graphs, refill
from refgrad.protos.types import FLOATS, SIXTEEN_BIT
from refgrad.ranges import RANGES
from refgrad.reverse.assembly import IR_VERSION, names_in, note, noted
from refgrad.reverse.gradient import gradient, preflight
from refgrad.reverse.requested import of_maps, place_of
from refgrad.rewrites.losses import SCORES, add_loss_output
from refgrad.rewrites.scores import (
    OF_CLASSES,
    check_probabilities,
    logs_of_classes,
    loss_of_classes,
    refuse_no_logits,
)
from refgrad.tables.conventions import ConventionOptions, Conventions

_FAR = 2**63 - 1  # further than any index
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
CROSS_ENTROPY, LOG_LOSS = OF_CLASSES
RECIPE_SCORES = (*OF_CLASSES, *SCORES)  # what compares an output with a label

Model = ModelProto | str | os.PathLike[str]
Item = int | slice | str
Recipe = TypeVar("Recipe", bound=Callable[..., ModelProto])


def _weights_aside(recipe: Recipe) -> Recipe:
    """Let `recipe`, which copies models, work without the data of large initializers. Its result holds the data."""

    @explained
    @wraps(recipe)
    def made(model: Model, *arguments: Any, **options: Any) -> ModelProto:
        source = read(model)
        large = {tensor.name: tensor for tensor in source.graph.initializer if is_large(tensor)}
        for tensor in large.values():  # onnx checks the others
            refuse_mismatch(tensor)
        light = ModelProto()
        _merge(light, source, "graph")
        _merge(light.graph, source.graph, "initializer")
        for tensor in source.graph.initializer:
            light.graph.initializer.append(_without_data(tensor) if tensor.name in large else tensor)
        result = recipe(light, *arguments, **options)
        for tensor in result.graph.initializer:
            if tensor.name in large:
                tensor.CopyFrom(large[tensor.name])
        return result

    return cast(Recipe, made)


def _merge(target: Message, source: Message, but: str) -> None:
    """Copy every field of `source` except the field `but`."""
    for field, value in source.ListFields():
        if field.name == but:
            continue
        if isinstance(value, str | int | float | bytes):
            setattr(target, field.name, value)
        else:
            getattr(target, field.name).MergeFrom(value)


def _without_data(tensor: TensorProto) -> TensorProto:
    """The same tensor with its data elsewhere: recipes do not read external data."""
    tensor_without_data = TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL
    )
    tensor_without_data.external_data.add(key="location", value="elsewhere")
    return tensor_without_data


@_weights_aside
def select(model: Model, of: str | None = None) -> ModelProto:
    """The model with one more output in front: the sum of the elements `of` of an output, a scalar `<output>_selected`.

    :param of: "logits", "logits[3]", "logits[:, -1]", "logits[..., 0:8:2]", "logits[0, target]": an output, or in brackets,
        one for each axis, integers, slices, "..." and names of integer scalar inputs. A new name is a new int64 input.

    >>> import onnx.parser, refgrad
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3] x) => (float[N, 3] y) { y = Mul(x, x) }'
    ... )
    >>> picked = refgrad.recipes.select(model, "y[:, target]")
    >>> [value.name for value in picked.graph.input], [value.name for value in picked.graph.output]
    (['x', 'target'], ['y_selected', 'y'])
    """
    edit = _Edit(model, "select")
    output, items = _parse(edit.graph, of)
    return edit.with_scalar(f"{output}_selected", _pick(edit, output, items))


@_weights_aside
def saliency(
    model: Model,
    wrt: str | None = None,
    of: str | None = None,
    *,
    axis: int | None = None,
    **conventions: Unpack[ConventionOptions],
) -> ModelProto:
    """The model of |d of / d wrt|, the saliency map: its output is `<wrt>_saliency`, of the shape and type of `wrt`.

    The formula is from Simonyan, Vedaldi and Zisserman, "Deep inside convolutional networks" (2014), section 3.

    :param of: by default the largest element of every sample of the only float output. The samples lie along axis 0; an
        output of fewer than two axes is one sample.
    :param axis: take the maximum over this axis of `wrt` and drop the axis: 1 for the channels of an image.
    """
    if of is None:
        edit = _Edit(model, "largest")
        output, _ = _parse(edit.graph, None)
        chosen = edit.with_scalar(f"{output}_selected", _largest(edit, output))
    else:
        chosen = select(model, of)
    editor, wrt, slope = _differentiated(chosen, wrt, "saliency", conventions)
    op, kind = editor.op, editor.graph.inputs[wrt].type
    result = op.Abs(slope)
    if axis is not None:
        rank = len(kind.tensor_type.shape.dim)
        if not _is_integer(axis) or not -rank <= axis < rank:
            raise OptionError(f"axis={axis}: {wrt!r} has the axes {-rank} to {rank - 1}.")
        axes = op.const([axis])
        result = op.Squeeze(op.reduce("ReduceMax", result, axes), axes)
        whole, kind = kind, TypeProto()
        kind.CopyFrom(whole)
        del kind.tensor_type.shape.dim[axis]
    return editor.model({result: (f"{wrt}_saliency", kind)})


@_weights_aside
def integrated_gradients(
    model: Model,
    wrt: str | None = None,
    of: str | None = None,
    *,
    steps: int = 64,
    **conventions: Unpack[ConventionOptions],
) -> ModelProto:
    """The model of the integrated gradients along the line from a baseline x₀ to x, the input `wrt`.

    Its output `<wrt>_attribution`, of the shape and type of `wrt`, is (x − x₀)·(1/k)·Σᵢ ∇f(x₀ + (i + ½)/k·(x − x₀)) for
    i = 0, ..., k − 1: the integral by the midpoint rule. Up to the error of that rule, O(1/k²) where f is smooth, its sum is
    f(x) − f(x₀). One Scan holds the gradient, so memory does not grow with the steps. 16-bit gradients are summed in float32.
    Its last input is `<wrt>_baseline`, of any shape with the axes of `wrt` that broadcasts to it; by default it is 0.

    Sundararajan, Taly and Yan, "Axiomatic attribution for deep networks" (2017), equations 1 and 3.

    :param of: f, one target for the whole line: one class, such as "logits[:, 3]". The class that the model finds may change
        on the line. By default the only float output, if it has one element for each sample.
    :param steps: k, at least 1.
    """
    if due := RANGES["steps"].why_not(steps):
        raise OptionError(f"steps={steps!r}: the line has at least one step; give {due}.")
    if of is None:
        _refuse_several(normalise(model))
    edit, wrt, slope = _differentiated(select(model, of), wrt, "integrated_gradients", conventions)
    op, graph = edit.op, edit.graph
    kind, rank = op.type(wrt), len(graph.inputs[wrt].type.tensor_type.shape.dim)
    wide = TensorProto.FLOAT if kind in SIXTEEN_BIT else kind
    numpy_type = helper.tensor_dtype_to_np_dtype(kind)
    baseline = edit.default_input(f"{wrt}_baseline", np.zeros((1,) * rank, numpy_type), [None] * rank)
    whole = op.Sub(wrt, baseline)

    body, varying = _varying(graph.nodes, wrt)
    alpha, total, part, point, term, more = (
        op.fresh(f"{wrt}_{name}") for name in ("alpha", "total", "part", "point", "term", "more")
    )
    _rename(body, wrt, point)
    first, last = NodeBuilder(op.emission.taken), NodeBuilder(op.emission.taken)
    first.append("Mul", [whole, alpha], [part])
    first.append("Add", [baseline, part], [point])
    last.append("Cast", [slope], [term], attributes={"to": wide})
    last.append("Add", [total, term], [more])
    refill(body.node, [*first.take(), *body.node, *last.take()])
    body.name = op.fresh("step")
    body.input.append(helper.make_tensor_value_info(total, wide, [None] * rank))
    body.input.append(helper.make_tensor_value_info(alpha, kind, []))
    body.output.append(helper.make_tensor_value_info(more, wide, [None] * rank))

    alphas = op.const(((np.arange(steps) + 0.5) / steps).astype(numpy_type))
    start = op.as_type(op.zeros_like(wrt), wide)
    summed = op.Scan(start, alphas, body=body, num_scan_inputs=1)
    mean = op.as_type(op.Div(summed, op.const(float(steps), like=start)), kind)
    result = op.Mul(whole, mean)
    fixed = [node.proto for node in graph.nodes if node.name not in varying]
    return edit.model({result: (f"{wrt}_attribution", graph.inputs[wrt].type)}, nodes=fixed)


@_weights_aside
def fgsm(
    model: Model,
    wrt: str | None = None,
    of: str | None = None,
    *,
    score: str | None = None,
    eps: float = 0.007,
    clip: tuple[float, float] | None = None,
    **conventions: Unpack[ConventionOptions],
) -> ModelProto:
    """The model of wrt + eps·sign(d loss / d wrt), the fast gradient sign method: its output is `<wrt>_adversarial`.

    Its last input is the scalar `eps`, with a default value. Goodfellow, Shlens and Szegedy, "Explaining and harnessing
    adversarial examples" (2015), section 4.

    :param of: the loss; with a score, the output that it compares. By default the only float output.
    :param score: the loss is made of the output and one more input `label`: "cross_entropy" of logits [N, C, ...], or
        "log_loss" of probabilities [N, C, ...], and int64 labels [N, ...], summed, or a score of `refgrad.add_loss_output`.
        Where a result of the model is called `label`, the input gets the next free name, and a `ModelWarning` says which.
    :param eps: the default of the input `eps`, 0.007 as in the paper.
    :param clip: the lowest and the highest value that an element of the result may have.
    """
    if RANGES["eps"].why_not(eps):
        raise OptionError(f"eps={eps!r}: give a finite number.")
    if clip is not None and not _are_bounds(clip):
        raise OptionError(f"clip={clip!r}: give the lowest value and the highest.")
    edit, wrt, slope = _differentiated(_with_loss(model, of, score), wrt, "fgsm", conventions, aside=1 if score else 0)
    op = edit.op
    numpy_type = helper.tensor_dtype_to_np_dtype(op.type(wrt))
    step = edit.default_input("eps", np.array(eps, numpy_type), [])
    result = op.Add(wrt, op.Mul(op.Sign(slope), step))
    if clip is not None:
        low, high = (op.const(float(bound), like=wrt) for bound in clip)
        result = op.Clip(result, low, high)
    return edit.model({result: (f"{wrt}_adversarial", edit.graph.inputs[wrt].type)})


@_weights_aside
def forces(
    model: Model, wrt: str | None = None, of: str | None = None, **conventions: Unpack[ConventionOptions]
) -> ModelProto:
    """The model of the forces −dE/dx: its first output is `forces`, then come the outputs of the model.

    :param wrt: the positions x; `forces` has their shape and type.
    :param of: the energy E. Where it has several elements, one for each molecule of a batch, every molecule has its own forces.
    """
    edit, wrt, slope = _differentiated(select(model, of), wrt, "forces", conventions, keep_outputs=True)
    kept = list(edit.graph.outputs.values())[2:]  # after the gradient and the selected sum
    return edit.model({edit.op.Neg(slope): ("forces", edit.graph.inputs[wrt].type)}, kept=kept)


@_weights_aside
def sensitivity(
    model: Model, of: str | None = None, *, score: str | None = None, **conventions: Unpack[ConventionOptions]
) -> ModelProto:
    """The model of how much a loss depends on every weight: two scalars for each float initializer w of n elements.

    `<w>_norm` is ‖∂L/∂w‖₂: how fast the loss moves as the weight does. `<w>_effect` is (1/n)·Σᵢ |wᵢ·∂L/∂wᵢ|: to first order, by
    how much the loss changes where one element is set to zero, which ranks weights of any scale and size. They are computed
    in float32 where w has 16 bits. The weights are inputs of the result and keep their values as defaults. The
    metadata `refgrad.sensitivities` (JSON) name the outputs of each weight.

    The effect is the criterion of Molchanov et al., "Pruning convolutional neural networks for resource efficient inference"
    (2017), section 2.2, but with the absolute value inside the sum.

    :param of: the loss L; with a score, the output that it compares. By default the only float output.
    :param score: as in `fgsm`.
    """
    chosen = _with_loss(model, of, score)
    loss = chosen.graph.output[0].name
    initialized = {tensor.name for tensor in chosen.graph.initializer}
    floats = preflight(chosen, None, [loss], quantization=Conventions(**conventions).quantization).wrt
    weights = [name for name in floats if name in initialized]
    if not weights:
        raise UnknownNameError("The loss depends on no float initializer: there is no weight to rank.")
    slopes = gradient(chosen, weights, [loss], cotangent="ones", **conventions)
    named = names_in(slopes)[1]
    edit = _Edit(slopes, "sensitivity")
    op, results = edit.op, {}
    for name in weights:
        kind = TensorProto.FLOAT if op.type(name) in SIXTEEN_BIT else op.type(name)
        slope, weight = op.as_type(named[name], kind), op.as_type(name, kind)
        size = max(math.prod(op.static(name) or ()), 1)
        scalar = helper.make_tensor_type_proto(kind, [])
        results[op.ReduceL2(slope, keepdims=0)] = f"{name}_norm", scalar
        effect = op.ReduceSum(op.Abs(op.Mul(slope, weight)), keepdims=0)
        results[op.Div(effect, op.const(float(size), like=effect))] = f"{name}_effect", scalar
    ranked = edit.model(results)
    outputs = [value.name for value in ranked.graph.output]
    table = {name: {"norm": outputs[2 * k], "effect": outputs[2 * k + 1]} for k, name in enumerate(weights)}
    note(ranked, ranked, sensitivities=table)
    return ranked


def sensitivities_in(model: ModelProto) -> dict[str, dict[str, str]]:
    """The outputs "norm" and "effect" of every weight, as `sensitivity` noted them; {} for any other model."""
    return dict(noted(model, "sensitivities"))


# What all of them do


class _Edit:
    """A model, the nodes that are emitted into it, and its new inputs."""

    def __init__(self, model: Model, recipe: str) -> None:
        self.graph = normalise(model)
        self.op = Emitter.over(self.graph, taken_names(self.graph))
        self.op.enter(recipe, recipe)
        self.inputs: list[ValueInfoProto] = []
        self._defaults: list[TensorProto] = []

    def add_input(self, name: str, kind: int, shape: Sequence[int | str | None]) -> str:
        """Add an input called `name`, a free name."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def default_input(self, name: str, value: np.ndarray, shape: Sequence[int | str | None]) -> str:
        """Add an input with a default value, called `name` or by the next free name."""
        name = self.op.fresh(name)
        self._defaults.append(numpy_helper.from_array(value, name))
        return self.add_input(name, self._defaults[-1].data_type, shape)

    def with_scalar(self, name: str, value: str) -> ModelProto:
        """The model with one more output in front: `value`, a scalar, as `name` or by the next free name."""
        kind = helper.make_tensor_type_proto(self.op.type(value), [])
        return self.model({self.op.copy(value): (name, kind)}, kept=list(self.graph.outputs.values()))

    def model(
        self,
        results: Mapping[str, tuple[str, TypeProto]],
        *,
        kept: Sequence[ValueInfoProto] = (),
        nodes: Sequence[NodeProto] | None = None,
    ) -> ModelProto:
        """The model that returns `results`, emitted values with a name and a type each, and after them the outputs `kept`.

        :param nodes: the nodes of the model that stay; by default all.
        """
        graph, op = self.graph, self.op
        rename = {value: op.fresh(name) for value, (name, _) in results.items()}
        model = ModelProto()
        model.CopyFrom(graph.model)
        model.ir_version = max(model.ir_version, IR_VERSION)
        note(model, graph.source)
        target = model.graph
        for field in (target.input, target.output, target.initializer, *((target.node,) if nodes is not None else ())):
            del field[:]
        target.node.extend(nodes or ())
        write(target, op.emission.nodes, rename)
        target.input.extend((*graph.inputs.values(), *self.inputs))
        target.initializer.extend((*graph.initializers.values(), *op.emission.constants.values(), *self._defaults))
        for value, (_, kind) in results.items():
            target.output.add(name=rename[value], type=kind)
        target.output.extend(kept)
        return model


def _differentiated(
    chosen: ModelProto,
    wrt: str | None,
    recipe: str,
    conventions: ConventionOptions,
    *,
    aside: int = 0,
    keep_outputs: bool = False,
) -> tuple[_Edit, str, str]:
    """The gradient of the first output of `chosen` for a recipe to build on, and the names of the input and of its gradient.

    :param aside: how many of the last inputs cannot be `wrt`.
    """
    initialized = {tensor.name for tensor in chosen.graph.initializer}
    values = chosen.graph.input[: len(chosen.graph.input) - aside]
    floats = [value.name for value in values if value.type.tensor_type.elem_type in FLOATS]
    if wrt is None:
        free = [name for name in floats if name not in initialized]
        if len(free) != 1:
            raise OptionError(
                f"Choose the input: wrt={(free or floats or ['x'])[0]!r}. The float inputs are: {choices(free)}."
            )
        [wrt] = free
    elif wrt not in floats:
        inner = any(wrt in node.output for node in chosen.graph.node)
        advice = (
            f" It is a result within the model: refgrad.select_model_inputs_outputs(model, None, [{wrt!r}], keep_inputs=True) "
            "makes an input of it."
        )
        raise UnknownNameError(
            f"wrt={wrt!r} is not a float input of the model.{advice if inner else did_you_mean(wrt, floats)} "
            f"There are: {choices(floats)}."
        )
    loss = chosen.graph.output[0].name
    differentiated = gradient(chosen, [wrt], [loss], cotangent="ones", keep_outputs=keep_outputs, **conventions)
    return _Edit(differentiated, recipe), wrt, names_in(differentiated)[1][wrt]


def _with_loss(model: Model, of: str | None, score: str | None) -> ModelProto:
    """The model with its loss as first output and, where the loss is a score, the label as last input."""
    edit = _Edit(model, "loss")
    op = edit.op
    output, items = _parse(edit.graph, of)
    shape = edit.graph.shapes.get(output)
    if score is None:
        if of is None and (shape is None or any(dim != 1 for dim in shape)):
            raise OptionError(
                f"Output {output!r} of shape {_text(shape)} is not a loss: give "
                f"score={loss_of_classes(edit.graph.source, output, shape or ())!r} or another to compare it with a label, "
                f"or of={output!r} to take the sum of its elements."
            )
        return select(model, of)
    if items is not None:
        raise OptionError(f"of={of!r}: a score compares a whole output with its label. Give of={output!r}.")
    loss, label = op.fresh("loss"), op.fresh("label")
    if score not in RECIPE_SCORES:
        raise OptionError(f"There is no score {score!r}; there are {choices(RECIPE_SCORES)}.")
    if label != "label":
        notice(f"The model has a result 'label' of its own: the input for the expected values is called {label!r}.")
    if score in SCORES:
        return add_loss_output(model, score, loss_name=loss, label_name=label, output_index=output)
    what = "logits" if score == CROSS_ENTROPY else "probabilities"
    if shape is None or not shape or (len(shape) < 2 and score == LOG_LOSS):
        raise OptionError(f"{score} needs {what} [N, C, ...]; output {output!r} has the shape {_text(shape)}.")
    edit.add_input(label, TensorProto.INT64, [dim for axis, dim in enumerate(shape) if axis != 1])
    if score == CROSS_ENTROPY:
        refuse_no_logits(edit.graph.source, output, shape, score, "score")
        return edit.with_scalar(loss, op.SoftmaxCrossEntropyLoss(output, label, reduction="sum"))
    check_probabilities(edit.graph.source, output, score)
    logarithms = logs_of_classes(op, output, op.type(output), shape)
    return edit.with_scalar(loss, op.NegativeLogLikelihoodLoss(logarithms, label, reduction="sum"))


def _text(shape: Sequence[int | str | None] | None) -> str:
    return "unknown" if shape is None else f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


# A selection


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _are_bounds(clip: Any) -> bool:
    pair = isinstance(clip, Sequence) and len(clip) == 2 and not any(map(RANGES["clip"].why_not, clip))
    return pair and bool(clip[0] <= clip[1])


def _parse(graph: Graph, of: str | None) -> tuple[str, list[Item] | None]:
    """The output that `of` names, and the items in its brackets, "..." spelt out; None where it has none."""
    outputs = [name for name in graph.outputs if graph.types.get(name) in FLOATS]
    if not outputs:
        raise UnknownNameError(f"The model has no float output; its outputs: {choices(graph.outputs)}.{of_maps(graph)}")
    if of is None:
        if len(outputs) != 1:
            raise OptionError(f"Choose an output: of={outputs[0]!r}. The float outputs are: {choices(outputs)}.")
        return outputs[0], None
    if not isinstance(of, str):
        raise OptionError(f"of={of!r}: give the name of an output, or some of its elements, as in 'logits[:, 3]'.")
    if of in outputs:
        return of, None
    match = re.fullmatch(r"(.+?)\s*\[([^\[\]]*)\]", of.strip())
    output, inside = (match[1], match[2]) if match else (of, "")
    if output not in outputs:
        raise UnknownNameError(
            f"of={of!r}: {output!r} is not a float output of the model{place_of(graph, output, 'outputs')}."
            f"{'' if output in graph.producer else did_you_mean(output, outputs)} There are: {choices(outputs)}."
        )
    words = [word.strip() for word in inside.split(",")]
    shape = graph.shapes.get(output)
    if "..." in words:
        if shape is None or words.count("...") > 1:
            raise OptionError(f"of={of!r}: '...' may stand once, and only where the rank of {output!r} is known.")
        place = words.index("...")
        words[place : place + 1] = [":"] * (len(shape) - len(words) + 1)
    items = [_item(of, word) for word in words]
    if shape is not None:
        _check_range(of, output, items, shape)
    return output, items


def _refuse_several(graph: Graph) -> None:
    """Refuse the only float output as a target if it has several elements for each sample: their sum is seldom meant.

    The elements of one symbolic axis are samples. The sum of probabilities is always 1.

    :raises OptionError: it has.
    """
    output, _ = _parse(graph, None)
    shape = graph.shapes.get(output) or ()
    is_of_samples = len(shape) > 1 or (len(shape) == 1 and not isinstance(shape[0], int))
    several = [axis for axis, dim in enumerate(shape) if dim != 1 and (axis or not is_of_samples)]
    if several:
        before = ":, " * several[0]
        raise OptionError(
            f"Output {output!r} of shape {_text(shape)} has several elements for each sample: give one of them, such as "
            f"of='{output}[{before}1]' or of='{output}[{before}target]', or of={output!r} to take their sum."
        )


def _item(of: str, word: str) -> Item:
    if re.fullmatch(r"[+-]?\d+", word):
        return _number(of, word)
    if re.fullmatch(r"[+-]?\d*\s*:\s*[+-]?\d*\s*(:\s*[+-]?\d*)?", word):
        bounds = [_number(of, part.strip()) if part.strip() else None for part in word.split(":")]
        if bounds[2:] == [0]:
            raise OptionError(f"of={of!r}: the step of a slice is not 0.")
        return slice(*bounds)
    if word.isidentifier():
        return word
    raise OptionError(
        f"of={of!r}: {word!r} is not an index. There are integers (3, -1), slices (:, 2:8, ::2), '...', and names of integer "
        "scalar inputs, one for each axis."
    )


def _number(of: str, word: str) -> int:
    number = int(word) if len(word) < 30 else _FAR + 1
    if abs(number) > _FAR:
        raise OptionError(f"of={reprlib.repr(of)}: {reprlib.repr(word)} is larger than any index.")
    return number


def _check_range(of: str, output: str, items: Sequence[Item], shape: Sequence[int | str | None]) -> None:
    if len(items) > len(shape):
        raise OptionError(f"of={of!r}: {output!r} has {len(shape)} axes, {_text(shape)}, fewer than there are indices.")
    for axis, (item, dim) in enumerate(zip(items, shape, strict=False)):
        if not isinstance(dim, int):
            continue
        if isinstance(item, int) and not -dim <= item < dim:
            wider = [k for k, size in enumerate(shape) if k > axis and isinstance(size, int) and -size <= item < size]
            hint = (
                f" Along axis {wider[0]} it is {output}[{':, ' * wider[0]}{item}]." if wider and len(items) == 1 else ""
            )
            raise OptionError(f"of={of!r}: axis {axis} of {output!r}, {_text(shape)}, has no element {item}.{hint}")
        if isinstance(item, slice) and not range(dim)[item]:
            raise OptionError(f"of={of!r}: the slice of axis {axis} of {output!r}, {_text(shape)}, is empty.")


def _pick(edit: _Edit, output: str, items: Sequence[Item] | None) -> str:
    """The sum of the elements of `output` that `items` select.

    Slices come first, then indices from the last axis on: an index takes its axis away. One that is out of range is an error
    in the executor, not an empty slice.
    """
    op, value = edit.op, output
    parts = [(axis, item) for axis, item in enumerate(items or ()) if isinstance(item, slice) and item != slice(None)]
    if parts:
        steps = [item.step or 1 for _, item in parts]
        starts = [_bound(item.start, 0 if step > 0 else _FAR) for (_, item), step in zip(parts, steps, strict=True)]
        ends = [_bound(item.stop, _FAR if step > 0 else -_FAR) for (_, item), step in zip(parts, steps, strict=True)]
        value = op.Slice(value, starts, ends, [axis for axis, _ in parts], steps)
    for axis, item in reversed(list(enumerate(items or ()))):
        if not isinstance(item, slice):
            index = _index(edit, item) if isinstance(item, str) else op.const(np.array(item, np.int64))
            value = op.Gather(value, index, axis=axis)
    return op.ReduceSum(value, keepdims=0)


def _bound(index: int | None, otherwise: int) -> int:
    return otherwise if index is None else index


def _index(edit: _Edit, name: str) -> str:
    """The integer scalar input `name`; it is added where the model does not have it."""
    graph = edit.graph
    if name not in graph.inputs:
        if name not in {value.name for value in edit.inputs}:
            if edit.op.fresh(name) != name:
                raise UnknownNameError(
                    f"The index {name!r} is the name of another value of the model. Choose a name that the model does not have."
                )
            edit.add_input(name, TensorProto.INT64, [])
        return name
    if graph.types.get(name) not in _INTEGERS or graph.shapes.get(name) != ():
        raise UnknownNameError(f"The index {name!r} is an input of the model, but not an int64 or int32 scalar.")
    return name


def _largest(edit: _Edit, output: str) -> str:
    """The sum over the samples of the largest element of each."""
    op, rank = edit.op, edit.op.rank(output)
    if rank is None:
        raise OptionError(
            f"The rank of output {output!r} is not known. Name the elements to differentiate: of='{output}[:, 0]'."
        )
    rows = op.Flatten(output, axis=min(rank, 2) // 2)
    return op.ReduceSum(op.GatherElements(rows, op.ArgMax(rows, axis=1), axis=1), keepdims=0)


# The body of a Scan


def _varying(nodes: Sequence[Node], name: str) -> tuple[GraphProto, set[str]]:
    """A graph of the nodes that depend on the value `name`, and their names."""
    values, names, graph = {name}, set(), GraphProto()
    for node in nodes:
        if not values.isdisjoint(node.reads):
            values.update(filter(None, node.outputs))
            names.add(node.name)
            graph.node.append(node.proto)
    return graph, names


def _rename(graph: GraphProto, name: str, other: str) -> None:
    """Let `graph` and its subgraphs read the value `other` where they read `name`."""
    for inner in graphs(graph):
        for node in inner.node:
            node.input[:] = [other if read == name else read for read in node.input]
        for value in inner.output:
            if value.name == name:
                value.name = other
