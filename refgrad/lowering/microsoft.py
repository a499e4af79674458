"""The table of primitives read the other way: ONNX Runtime's training operators in ai.onnx operators, for `refgrad.lower`.

A form is a function. Its first parameter is the emitter, then come the operator's inputs (None by default: optional;
starred: variadic) and, keyword-only, its attributes; `_node`, which is no attribute, is the node itself. Where the operator
is a primitive the form emits that; else what is left of it in ai.onnx operators. The forward operators of com.microsoft
have function bodies in refgrad.functions.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from refgrad.emit import Emitter
from refgrad.functions import MICROSOFT, UnsupportedFormError
from refgrad.graph import MIN_OPSET, SIXTEEN_BIT, Node
from refgrad.lowering.onnx.loss import read_labels
from refgrad.lowering.onnx.normalization import by_normalized, widest
from refgrad.rules.convolution import conv_transpose
from refgrad.rules.resize import resize

Ints = Sequence[int] | None
Floats = Sequence[float] | None
_SPECIAL = "_node"


@dataclass(frozen=True)
class Form:
    """How an operator is lowered.

    `results` say of each output what its type and shape are: `X`, those of the input X; `:X`, the type of X; `shape:X`, the
    type of X and the shape that the input `shape` holds; `int64` or `bool`; `*`, those of the input at its place; `X!to`,
    those of X but for the type, which the attribute `to` has where it is given. Three dots repeat what is before them.
    `writes` maps the outputs that ONNX Runtime computes in the memory of an input to that input. `opset` is the lowest that
    the form needs, by the attributes.
    """

    function: Callable[..., Any]
    results: tuple[str, ...]
    writes: Mapping[int, str]
    opset: Callable[[Mapping[str, Any]], int]
    inputs: tuple[str, ...]
    required: int  # how many inputs a node has at least
    needed: frozenset[str]  # which of them it does not leave out
    variadic: bool
    attributes: Mapping[str, Any]

    def misfit(self, node: Node) -> str:
        """Why `node` is none of this operator, "" where it is one."""
        given = node.attributes
        attributes = f"the attributes are {', '.join(self.attributes) or 'none'}"
        if unknown := sorted(given.keys() - self.attributes.keys()):
            return f"its attribute {unknown[0]} is not known; {attributes}"
        required = (name for name, default in self.attributes.items() if default is inspect.Parameter.empty)
        if missing := sorted(set(required) - given.keys()):
            return f"it lacks the attribute {missing[0]}; {attributes}"
        count, inputs = len(node.inputs), f"the inputs are {', '.join(self.inputs)}"
        if count < self.required or (count > len(self.inputs) and not self.variadic):
            return f"it has {count} inputs; {inputs}"
        places = zip(self.inputs, node.inputs, strict=False)
        absent = [name for name, value in places if not value and name in self.needed]
        if absent:
            return f"it lacks the input {absent[0]}; {inputs}"
        if len(node.outputs) > len(self.results) and self.results[-1] not in ("...", "*"):
            return f"it has {len(node.outputs)} outputs, of {len(self.results)}"
        return ""

    def result(self, position: int) -> str:
        """What is known of the output at `position`."""
        listed = [result for result in self.results if result != "..."]
        return listed[min(position, len(listed) - 1)]

    def lower(self, op: Emitter, node: Node) -> tuple[str | None, ...]:
        """Emit what `node` computes; the values of its outputs."""
        inputs: list[str | None] = [name or None for name in node.inputs]
        names = inspect.signature(self.function).parameters
        keywords: dict[str, Any] = {}
        for name, default in self.attributes.items():
            keywords[name if name in names else f"{name}_"] = node.attributes.get(name, default)
        if _SPECIAL in names:
            keywords[_SPECIAL] = node
        made = self.function(op, *inputs, **keywords)
        return made if isinstance(made, tuple) else (made,)


FORMS: dict[tuple[str, str], Form] = {}


def form(
    *op_types: str,
    results: str,
    writes: Mapping[int, str] | None = None,
    domain: str = MICROSOFT,
    opset: Callable[[Mapping[str, Any]], int] = lambda attributes: MIN_OPSET,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the form of these operators; `results` are separated by spaces."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        inputs = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        attributes = {
            p.name.rstrip("_"): p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != _SPECIAL
        }
        required = sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in inputs)
        variadic = any(p.kind is p.VAR_POSITIONAL for p in inputs)
        names = tuple(p.name for p in inputs)
        needed = frozenset(p.name for p in inputs if p.default is p.empty and "None" not in str(p.annotation))
        for op_type in op_types:
            FORMS[domain, op_type] = Form(
                function, tuple(results.split()), writes or {}, opset, names, required, needed, variadic, attributes
            )
        return function

    return register


# What several forms need


def _scalar(op: Emitter, value: str, kind: int) -> str:
    return op.as_type(str(op.Reshape(value, np.zeros(0, np.int64))), kind)


def _wide_type(op: Emitter, value: str) -> int:
    """Float for floats of 16 bits, else their own type"""
    kind = op.type(value)
    return int(TensorProto.FLOAT) if kind in SIXTEEN_BIT else kind


def _wide(op: Emitter, *values: str) -> list[str]:
    """16-bit floats as float"""
    return [op.as_type(value, _wide_type(op, value)) for value in values]


# Broadcasting and arithmetic


@form("BroadcastGradientArgs", results="int64 int64")
def broadcast_gradient_args(op: Emitter, a_shape: str, b_shape: str) -> tuple[str, str]:
    """The axes along which each of two operands was broadcast, the last first"""
    a, b = op.dims(a_shape), op.dims(b_shape)
    if a is not None and b is not None and all(isinstance(dim, int) for dim in (*a, *b)):
        rank = max(len(a), len(b))
        padded = [(1,) * (rank - len(shape)) + shape for shape in (a, b)]
        first, second = (
            [k for k in range(rank) if k < rank - len(shape) or (own[k] == 1 and other[k] != 1)]
            for shape, own, other in ((a, *padded), (b, *reversed(padded)))
        )
        return op.const(np.array(first[::-1], np.int64)), op.const(np.array(second[::-1], np.int64))
    sizes = [op.Reshape(op.Size(shape), [1]) for shape in (a_shape, b_shape)]
    rank = op.Max(*sizes)
    missing = [op.Sub(rank, size) for size in sizes]
    own, other = (
        op.Concat(op.full(count, 1, like=shape), shape, axis=0)
        for count, shape in zip(missing, (a_shape, b_shape), strict=True)
    )
    last = op.Sub(op.Squeeze(rank, [0]), 1)
    places = op.Range(last, op.const(np.array(-1)), op.const(np.array(-1)))

    def axes(count: str, mine: str, facing: str) -> str:
        stretched = op.And(op.Equal(mine, 1), op.Not(op.Equal(facing, 1)))
        broadcast = op.Or(op.Less(places, count), op.Gather(stretched, places))
        return str(op.Compress(places, broadcast, axis=0))

    return axes(missing[0], own, other), axes(missing[1], other, own)


@form("DivGrad", results="A B")
def div_grad(op: Emitter, dY: str, A: str, B: str) -> tuple[str, str]:
    return op.grad.DivGrad(dY, A, B, None)


@form("Scale", results="X")
def scale(op: Emitter, X: str, scale: str, *, scale_down: int = 0) -> str:
    """X·scale, or X/scale with scale_down; the scale is one number of any type"""
    number = _scalar(op, scale, op.type(X))
    return str(op.Div(X, number) if scale_down else op.Mul(X, number))


@form("BatchScale", results="X X X")
def batch_scale(
    op: Emitter, X: str, *, scale_0: float, scale_1: float, scale_2: float | None = None
) -> tuple[str, ...]:
    """X·scale for each scale"""
    return tuple(op.Mul(X, factor) for factor in (scale_0, scale_1, scale_2) if factor is not None)


@form("ZeroGradient", results="X")
def zero_gradient(op: Emitter, X: str, like: str | None = None) -> str:
    return op.zeros_like(X)


@form("ReduceSumTraining", results=":X")
def reduce_sum_training(op: Emitter, X: str, axes: str, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> str:
    """ReduceSum"""
    return str(op.ReduceSum(X, axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes))


# Activations


@form("ReluGrad", results="dY")
def relu_grad(op: Emitter, dY: str, Y: str) -> str:
    """The kernel asks for Y > 0, so X will do in its place"""
    return str(op.Where(op.Greater(Y, 0.0), dY, 0.0))


@form("LeakyReluGrad", results="dY")
def leaky_relu_grad(op: Emitter, dY: str, X: str, *, alpha: float = 0.01) -> str:
    return str(op.grad.LeakyReluGrad(dY, X, alpha=alpha))


@form("SigmoidGrad", results="dY")
def sigmoid_grad(op: Emitter, dY: str, Y: str) -> str:
    return str(op.grad.SigmoidGrad(dY, Y))


@form("TanhGrad", results="dY")
def tanh_grad(op: Emitter, dY: str, Y: str) -> str:
    return str(op.grad.TanhGrad(dY, Y))


@form("GeluGrad", "BiasGeluGrad_dX", results="dY")
def gelu_grad(op: Emitter, dY: str, X: str, B: str | None = None) -> str:
    return str(op.grad.GeluGrad(dY, X, B, approximate="none"))


@form("FastGeluGrad", "BiasFastGeluGrad_dX", results="dY")
def fast_gelu_grad(op: Emitter, dY: str, X: str, B: str | None = None) -> str:
    return str(op.grad.GeluGrad(dY, X, B, approximate="tanh"))


@form("QuickGeluGrad", results="dY")
def quick_gelu_grad(op: Emitter, dY: str, X: str, *, alpha: float = 1.702) -> str:
    return str(op.grad.QuickGeluGrad(dY, X, alpha=alpha))


@form("SoftmaxGrad_13", results="dY")
def softmax_grad(op: Emitter, dY: str, Y: str, *, axis: int = -1) -> str:
    return _along_axis(op, "SoftmaxGrad", dY, Y, axis)


@form("LogSoftmaxGrad_13", results="dY")
def log_softmax_grad(op: Emitter, dY: str, Y: str, *, axis: int = -1) -> str:
    return _along_axis(op, "LogSoftmaxGrad", dY, Y, axis)


def _along_axis(op: Emitter, primitive: str, dY: str, Y: str, axis: int) -> str:
    """The sum is not one of 16 bits"""
    d, y = _wide(op, dY, Y)
    return op.as_type(getattr(op.grad, primitive)(d, y, axis=axis), op.type(dY))


@form("SoftmaxGrad", results="dY")
def softmax_grad_1(op: Emitter, dY: str, Y: str, *, axis: int = 1) -> str:
    """The axes from `axis` on are one"""
    rows = _along_axis(op, "SoftmaxGrad", op.Flatten(dY, axis=axis), op.Flatten(Y, axis=axis), 1)
    return op.reshape_like(rows, dY)


@form("LogSoftmaxGrad", results="dY")
def log_softmax_grad_1(op: Emitter, dY: str, Y: str, *, axis: int = 1) -> str:
    """The axes from `axis` on are one"""
    rows = _along_axis(op, "LogSoftmaxGrad", op.Flatten(dY, axis=axis), op.Flatten(Y, axis=axis), 1)
    return op.reshape_like(rows, dY)


@form("DropoutGrad", results="dY")
def dropout_grad(
    op: Emitter,
    dY: str,
    mask: str,
    ratio: str | None = None,
    training_mode: str | None = None,
    *,
    seed: int | None = None,
) -> str:
    return str(op.grad.DropoutGrad(dY, mask, ratio, training_mode))


@form("SoftmaxDropoutGrad", results="dY")
def softmax_dropout_grad(
    op: Emitter, dY: str, mask: str, softmax_y: str, ratio: str | None = None, *, axis: int, seed: int | None = None
) -> str:
    """The gradient of Softmax and Dropout, always in training"""
    d = op.grad.DropoutGrad(dY, mask, ratio, op.const(np.array(True)))
    return softmax_grad_1(op, op.declare(d, like=dY), softmax_y, axis=axis)


# Indexing and shapes


@form("SliceGrad", results="shape:dY")
def slice_grad(
    op: Emitter, dY: str, shape: str, starts: str, ends: str, axes: str | None = None, steps: str | None = None
) -> str:
    return str(op.grad.SliceGrad(dY, shape, starts, ends, axes, steps))


@form("GatherGrad", results="shape:dY")
def gather_grad(op: Emitter, shape: str, indices: str, dY: str, *, axis: int = 0) -> str:
    return str(op.grad.GatherGrad(shape, indices, dY, axis=axis))


@form("GatherElementsGrad", results="shape:dY")
def gather_elements_grad(op: Emitter, dY: str, shape: str, indices: str, *, axis: int = 0) -> str:
    return str(op.grad.GatherElementsGrad(dY, shape, indices, axis=axis))


@form("GatherNDGrad", results="shape:dY")
def gather_nd_grad(op: Emitter, shape: str, indices: str, dY: str, *, batch_dims: int = 0) -> str:
    return str(op.grad.GatherNDGrad(shape, indices, dY, batch_dims=batch_dims))


@form("Trilu", results=":X")
def trilu(op: Emitter, X: str, k: str | None = None, *, upper: int = 1) -> str:
    return str(op.grad.TriluGrad(X, k, upper=upper))


@form("SplitTraining", results=":X ...")
def split_training(op: Emitter, X: str, split: str, *, axis: int = 0, _node: Node) -> Any:
    """Split; where there are no lengths the parts are equal, the first of them longer by 1 where they do not fit"""
    count, static, length = len(_node.outputs), op.static(X), op.static(split)
    if length == (0,):
        size = op.const([static[axis]]) if static is not None else op.Gather(op.Shape(X), [axis])
        parts = op.const([count])
        least = op.Div(size, parts)
        longer = op.Less(op.const(np.arange(count)), op.Sub(size, op.Mul(least, parts)))
        split = op.Add(least, op.Cast(longer, to=TensorProto.INT64))
    elif length is not None and length != (count,):
        raise UnsupportedFormError(f"it has {count} outputs and {length[0] if length else 'no'} lengths")
    return op.Split(X, split, axis=axis, outputs=count)


@form("View", results=":X ...")
def view(op: Emitter, X: str, *shapes: str) -> tuple[str, ...]:
    """The elements of X in order, cut into tensors of the given shapes"""
    lengths = [op.ReduceProd(shape, keepdims=1) for shape in shapes]
    parts = op.Split(op.Reshape(X, [-1]), op.Concat(*lengths, axis=0), axis=0, outputs=len(shapes))
    parts = parts if isinstance(parts, tuple) else (parts,)
    return tuple(op.Reshape(part, shape, allowzero=1) for part, shape in zip(parts, shapes, strict=True))


# Convolutions and poolings


def _is_empty(op: Emitter, X: str) -> bool:
    """Whether it is known that there are no images: ONNX Runtime's Conv refuses them"""
    return (op.shape(X) or (None,))[0] == 0


def _nothing(op: Emitter, dY: str, X: str, W: str) -> tuple[str, str, str]:
    return op.zeros_like(X), op.zeros_like(W), op.full(op.Shape(dY, start=1, end=2), 0.0, like=W)


@form("ConvGrad", results="X W :W")
def conv_grad(
    op: Emitter,
    dY: str,
    X: str,
    W: str,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> tuple[str, str, str]:
    if _is_empty(op, X):
        return _nothing(op, dY, X, W)
    window: dict[str, Any] = {"dilations": dilations, "kernel_shape": kernel_shape, "pads": pads, "strides": strides}
    return op.grad.ConvGrad(dY, X, W, auto_pad=auto_pad, group=group, **window)


@form("ConvTransposeGrad", results="X W :W")
def conv_transpose_grad(
    op: Emitter,
    dY: str,
    X: str,
    W: str,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    output_padding: Ints = None,
    output_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> tuple[str, str, str]:
    """What the rule of ConvTranspose emits"""
    if _is_empty(op, X):
        return _nothing(op, dY, X, W)
    window: Any = auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides
    return conv_transpose(op, dY, X, W, *window)


def _pooled(op: Emitter, node: Node, op_type: str) -> str:
    """A value with the shape of what was pooled: builders call the gradient of x `x_grad`, and its nodes after the forward one.

    If there is none it is the result itself, whose shape has to be declared then.
    """
    named = re.fullmatch(r"(.+)_grad(_\d+)?", node.outputs[0])
    rank = op.rank(node.inputs[0])
    if named and named[1] in op.graph.types and op.rank(named[1]) == rank is not None:
        return named[1]
    forward = node.name.rpartition("_Grad/")[0]
    pools = (n for n in op.graph.nodes if n.name == forward and n.key == ("", op_type))
    return next((pool.inputs[0] for pool in pools), node.outputs[0])


@form("MaxPoolGrad", results=":dY", domain="")
@form("MaxPoolGrad", results=":dY")
def max_pool_grad(
    op: Emitter,
    dY: str,
    Indices: str,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints = None,
    kernel_shape: Sequence[int],
    pads: Ints = None,
    storage_order: int = 0,
    strides: Ints = None,
    _node: Node,
) -> str:
    """The shape of X is that of what the MaxPool read that made the indices; else it is found as for AveragePoolGrad"""
    pool = op.graph.producer.get(Indices)
    X = pool.inputs[0] if pool is not None and pool.key == ("", "MaxPool") else _pooled(op, _node, "MaxPool")
    window: dict[str, Any] = {"dilations": dilations, "kernel_shape": kernel_shape, "pads": pads, "strides": strides}
    window |= {"auto_pad": auto_pad, "ceil_mode": ceil_mode, "storage_order": storage_order}
    (d,) = _wide(op, dY)  # ONNX Runtime scatters no 16 bits on the CPU
    return op.as_type(op.grad.MaxPoolGrad(d, X, Indices, **window), op.type(dY))


@form("AveragePoolGrad", results=":dY", domain="")
@form("AveragePoolGrad", results=":dY")
def average_pool_grad(
    op: Emitter,
    dY: str,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints = None,
    kernel_shape: Sequence[int],
    pads: Ints = None,
    strides: Ints = None,
    _node: Node,
) -> str:
    """The shape of X is that of the value after which the result is named, or of the forward node's, or the declared one"""
    X = _pooled(op, _node, "AveragePool")
    window: dict[str, Any] = {"dilations": dilations, "kernel_shape": kernel_shape, "pads": pads, "strides": strides}
    window |= {"auto_pad": auto_pad, "ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
    return str(op.grad.AveragePoolGrad(dY, X, **window))


def _opset_of_resize(attributes: Mapping[str, Any]) -> int:
    """The first opset in which Resize has these attributes"""
    if attributes.get("coordinate_transformation_mode") == "half_pixel_symmetric":
        return 19
    stretches = attributes.get("keep_aspect_ratio_policy", "stretch") == "stretch"
    return 16 if stretches and "axes" not in attributes and not attributes.get("antialias") else 18


@form("ResizeGrad", results="X", opset=_opset_of_resize)
def resize_grad(
    op: Emitter,
    dY: str,
    X: str,
    roi: str | None = None,
    scales: str | None = None,
    *,
    antialias: int = 0,
    axes: Ints = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> str:
    """What the rule of Resize emits. Without scales the sizes are those of dY"""
    sizes = None
    roi = roi and _wide(op, roi)[0]
    if scales is None or op.static(scales) == (0,):
        scales, policy = None, keep_aspect_ratio_policy
        if policy == "stretch":
            sizes = op.shape_of(dY) if axes is None else op.Gather(op.shape_of(dY), list(axes))
        else:
            sizes = op.const(_deciding(op.static(X), op.static(dY), axes, policy))
    coordinates: Any = coordinate_transformation_mode
    options: Any = cubic_coeff_a, exclude_outside, keep_aspect_ratio_policy, mode, nearest_mode
    return str(resize(op, dY, X, roi, scales, sizes, antialias, axes, coordinates, *options))


def _deciding(before: tuple[int, ...] | None, after: tuple[int, ...] | None, axes: Ints, policy: str) -> list[int]:
    """Sizes from which Resize gets `after`: one axis decides the scale, the others are too long, or too short, to do so."""
    if before is None or after is None:
        raise UnsupportedFormError(f"the scale of keep_aspect_ratio_policy={policy!r} is not known before it runs")
    chosen = list(range(len(before)) if axes is None else axes)
    for axis in chosen:
        scale = after[axis] / before[axis]
        if all(math.floor(scale * before[k] + 0.5) == after[k] for k in chosen):
            if policy == "not_larger":
                return [after[k] if k == axis else math.ceil(scale * before[k]) + 1 for k in chosen]
            return [after[k] if k == axis else max(math.floor(scale * before[k]) - 1, 1) for k in chosen]
    raise UnsupportedFormError(f"the scale of keep_aspect_ratio_policy={policy!r} does not follow from its sizes")


# Normalizations


@form("LayerNormalizationGrad", results="X scale scale")
def layer_normalization_grad(
    op: Emitter,
    dY: str,
    X: str,
    scale: str,
    mean: str,
    inv_std_dev: str,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[str, str, str]:
    return op.grad.LayerNormalizationGrad(dY, X, scale, None, mean, inv_std_dev, axis=axis, epsilon=epsilon)


@form("InvertibleLayerNormalizationGrad", results="Y scale scale")
def invertible_layer_normalization_grad(
    op: Emitter,
    dY: str,
    Y: str,
    scale: str,
    bias: str,
    inv_std_dev: str,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[str, str, str]:
    """LayerNormalizationGrad from the result: x̂ = (Y − bias)/scale"""
    normalized = op.Div(op.Sub(Y, bias), scale)
    return by_normalized(op, dY, normalized, Y, scale, inv_std_dev, axis, centred=True)


@form("SimplifiedLayerNormalizationGrad", results="X scale")
def simplified_layer_normalization_grad(
    op: Emitter,
    dY: str,
    X: str,
    scale: str,
    inv_std_dev: str,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[str, str]:
    """x̂ = X·r and g = dY·scale: dX = r·(g − x̂·mean(g·x̂)), dscale = Σ dY·x̂"""
    wide = widest(op, X, inv_std_dev)
    normalized = op.Mul(op.as_type(X, wide), op.as_type(inv_std_dev, wide))
    return by_normalized(op, dY, normalized, X, scale, inv_std_dev, axis, centred=False)[:2]


@form("BatchNormalizationGrad", results="X scale scale")
def batch_normalization_grad(
    op: Emitter,
    dY: str,
    X: str,
    scale: str,
    mean: str,
    inv_std_dev: str,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 1,
) -> tuple[str, str, str]:
    """The statistics are the channels'."""
    kinds, shape, wide = (op.type(X), op.type(scale), op.type(scale)), op.shape(X), widest(op, X, scale, mean)
    d, x, factor, centre, r = (op.as_type(value, wide) for value in (dY, X, scale, mean, inv_std_dev))
    if shape is not None:
        op.assume(x, shape)
        op.assume(d, shape)
    axes = [0, *range(2, 3 if shape is None else len(shape))]
    centre, r = (op.Unsqueeze(value, axes) for value in (centre, r))
    found = op.grad.BatchNormalizationGrad(d, x, factor, None, centre, r, epsilon=epsilon)
    made = (op.as_type(value, kind) for value, kind in zip(found, kinds, strict=True))
    return next(made), next(made), next(made)


# Losses


@form("SoftmaxCrossEntropyLossGrad", results="log_prob")
def softmax_cross_entropy_loss_grad(
    op: Emitter,
    dY: str,
    log_prob: str,
    label: str,
    weight: str | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> str:
    return _class_gradient(op, dY, log_prob, label, weight, reduction, ignore_index, op.type(log_prob))


def _class_gradient(
    op: Emitter,
    dY: str,
    log_prob: str,
    label: str,
    weight: str | None,
    reduction: str,
    ignore_index: int | str | None,
    kind: int,
) -> str:
    """SoftmaxCrossEntropyLossGrad of type `kind`, never computed in 16 bits: ONNX Runtime scatters none on the CPU"""
    wide = widest(op, *_wide(op, *(value for value in (dY, log_prob, weight) if value is not None)))
    dY, log_prob = op.as_type(dY, wide), op.as_type(log_prob, wide)
    weight = weight and op.as_type(weight, wide)
    d = op.grad.SoftmaxCrossEntropyLossGrad(dY, log_prob, label, weight, reduction=reduction, ignore_index=ignore_index)
    return op.as_type(d, kind)


@form("SoftmaxCrossEntropyLossInternalGrad", results="log_prob!output_type")
def softmax_cross_entropy_loss_internal_grad(
    op: Emitter,
    dY: str,
    log_prob: str,
    label: str,
    weight: str | None = None,
    ignore_index: str | None = None,
    bias: str | None = None,
    *,
    output_type: int = 0,
    reduction: str = "mean",
) -> str:
    """SoftmaxCrossEntropyLossGrad with the index to ignore as an input, plus `bias`, of `output_type`"""
    kind = output_type or op.type(log_prob)
    ignored = None if ignore_index is None else _scalar(op, ignore_index, op.type(label))
    wide = _wide_type(op, log_prob)
    d = _class_gradient(op, dY, log_prob, label, weight, reduction, ignored, kind if bias is None else wide)
    if bias is None:
        return d
    return op.as_type(str(op.Add(d, op.reshape_like(op.as_type(bias, wide), log_prob))), kind)


@form("NegativeLogLikelihoodLossInternal", "NegativeLogLikelihoodLossInternal2", results=":log_prob")
def negative_log_likelihood_loss_internal(
    op: Emitter,
    log_prob: str,
    label: str,
    weight: str | None = None,
    ignore_index: str | None = None,
    *,
    reduction: str = "mean",
) -> str:
    """NegativeLogLikelihoodLoss with the index to ignore as an input: −w·log_prob at the label, for the mean over Σw"""
    if ignore_index is not None:
        ignore_index = _scalar(op, ignore_index, op.type(label))
    read = read_labels(op, op.const(1.0, like=log_prob), label, weight, ignore_index, "sum")
    picked = op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(read.classes, [1]), axis=1), [1])
    losses = op.Where(op.Equal(read.share, 0.0), 0.0, op.Neg(op.Mul(read.share, picked)))
    if reduction == "none":
        return str(losses)
    total = op.ReduceSum(losses, keepdims=0)
    return str(op.Div(total, op.ReduceSum(read.share, keepdims=0)) if reduction == "mean" else total)


@form("SoftmaxCrossEntropy", results=":logits logits")
def softmax_cross_entropy(op: Emitter, logits: str, label: str, *, reduction: str = "mean") -> tuple[str, str]:
    """−Σ label·log_prob along the last axis, of every row, their sum or their mean; and log_prob"""
    log_prob = op.LogSoftmax(logits, axis=-1)
    losses = op.Neg(op.ReduceSum(op.Mul(label, log_prob), [-1], keepdims=0))
    if reduction == "mean":
        losses = op.Mul(losses, _per_row(op, logits))
    return losses if reduction == "none" else op.ReduceSum(losses, keepdims=0), log_prob


def _per_row(op: Emitter, scores: str) -> str:
    """1 over the number of rows"""
    rows = op.ReduceProd(op.Shape(scores, end=-1), keepdims=0)
    return str(op.Reciprocal(op.Cast(rows, to=op.type(scores))))


@form("SoftmaxCrossEntropyGrad", results="log_prob")
def softmax_cross_entropy_grad(op: Emitter, dY: str, log_prob: str, label: str, *, reduction: str = "mean") -> str:
    """dY·(exp(log_prob)·Σ label − label), divided by the number of rows for the mean"""
    if reduction == "mean":
        dY = op.Mul(dY, _per_row(op, log_prob))
    elif reduction == "none":
        dY = op.Unsqueeze(dY, [-1])
    total = op.ReduceSum(label, [-1], keepdims=1)
    return str(op.Mul(dY, op.Sub(op.Mul(op.Exp(log_prob), total), label)))


@form("SparseSoftmaxCrossEntropy", results=":logits logits", domain="")
@form("SparseSoftmaxCrossEntropy", results=":logits logits")
def sparse_softmax_cross_entropy(
    op: Emitter, logits: str, label: str, weight: str | None = None, *, reduction: str = "mean"
) -> tuple[str, str]:
    """−weight·log_prob at the label along the last axis, of every row, their sum, or that over Σ weight; and log_prob"""
    log_prob = op.LogSoftmax(logits, axis=-1)
    losses = op.Neg(op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(label, [-1]), axis=-1), [-1]))
    if weight is not None:
        losses = op.Mul(losses, weight)
    if reduction == "none":
        return losses, log_prob
    total = op.ReduceSum(losses, keepdims=0)
    if reduction == "mean":
        total = op.Mul(total, _per_row(op, logits)) if weight is None else op.Div(total, _total(op, weight))
    return total, log_prob


def _total(op: Emitter, weight: str) -> str:
    return str(op.ReduceSum(weight, keepdims=0))


@form("SparseSoftmaxCrossEntropyGrad", results="log_prob", domain="")
@form("SparseSoftmaxCrossEntropyGrad", results="log_prob")
def sparse_softmax_cross_entropy_grad(
    op: Emitter, dY: str, log_prob: str, label: str, weight: str | None = None, *, reduction: str = "mean"
) -> str:
    """dY·weight·(exp(log_prob) − onehot(label)), for the mean divided by Σ weight"""
    kind = op.type(log_prob)
    dY, log_prob = _wide(op, dY, log_prob)
    weight = weight and op.as_type(weight, op.type(log_prob))
    if reduction == "mean":
        dY = op.Mul(dY, _per_row(op, log_prob)) if weight is None else op.Div(dY, _total(op, weight))
    share = op.Expand(dY, op.shape_of(label)) if weight is None else op.Mul(dY, weight)
    share = op.Unsqueeze(share, [-1])
    soft = op.Mul(op.Exp(log_prob), share)
    d = op.ScatterElements(soft, op.Unsqueeze(label, [-1]), op.Neg(share), axis=-1, reduction="add")
    return op.as_type(d, kind)


# Quantization


@form("FakeQuantGrad", results="dY")
def fake_quant_grad(op: Emitter, dY: str, mask: str) -> str:
    return str(op.grad.FakeQuantGrad(dY, mask))


# The steps of training. What ONNX Runtime's operators write into their inputs are results here.


def _flag(op: Emitter, node: Node, value: str | None, rank: int) -> str:
    """`value`, true where there is none, with the declared number of axes, or `rank`."""
    declared = op.rank(node.outputs[0]) if node.outputs and node.outputs[0] else None
    if declared is not None:
        rank = declared
    if value is None:
        return op.const(np.ones([1] * rank, bool))
    return str(op.Reshape(value, [1] if rank else np.zeros(0, np.int64)))


def _kept(op: Emitter, update: str | None, new: str, old: str) -> str:
    """`new`, of the type of `old`; `old` where there is no update."""
    new = op.as_type(new, op.type(old))
    return new if update is None else str(op.Where(_scalar(op, update, TensorProto.BOOL), new, old))


def _for_each(
    op: Emitter, sequences: Sequence[str], kinds: Sequence[int], function: Callable[..., Sequence[str]]
) -> tuple[str, ...]:
    """A sequence of each result that `function` has for the tensors at every place; its elements are of type `kinds`."""
    number = op.SequenceLength(sequences[0])
    going = op.const(np.array(True))
    empty = [op.emit("SequenceEmpty", "", (), 1, {"dtype": int(kind)}) for kind in kinds]
    for value, kind in zip(empty, kinds, strict=True):
        op.describe(value, like=op.const(np.zeros((), helper.tensor_dtype_to_np_dtype(kind))))

    def body(place: str, again: str, *made: str) -> list[str]:
        results = function(*(op.SequenceAt(sequence, place) for sequence in sequences))
        return [op.Identity(again), *(op.SequenceInsert(m, r) for m, r in zip(made, results, strict=True))]

    graph = op.subgraph(body, op.const(np.array(0)), going, *empty)
    for value_info in (*graph.input[:2], *graph.output[:1]):
        value_info.type.tensor_type.shape.SetInParent()  # scalars
    for value_info in (*graph.input[2:], *graph.output[1:]):
        element = value_info.type.tensor_type.elem_type
        value_info.CopyFrom(helper.make_tensor_sequence_value_info(value_info.name, element, None))
    done = op.emit("Loop", "", (number, going, *empty), len(kinds), {"body": graph})
    return (done,) if len(kinds) == 1 else tuple(done)


def _after(op: Emitter, step: str, base: float, kind: int) -> str:
    """1 − baseⁿ after n steps, in double: in float, 0.999¹ has three digits left"""
    double = TensorProto.DOUBLE
    power = op.Pow(op.const(np.array(base)), _scalar(op, step, double))
    return op.as_type(op.Sub(op.const(np.array(1.0)), power), kind)


def _moments(op: Emitter, g: str, m: str, v: str, alpha: float, beta: float) -> tuple[str, str]:
    """The running averages of the gradient and of its square"""
    next_m = op.Add(op.Mul(m, alpha), op.Mul(g, 1 - alpha))
    return next_m, op.Add(op.Mul(v, beta), op.Mul(op.Mul(g, g), 1 - beta))


@form("SGDOptimizer", results="W W")
def sgd_optimizer(op: Emitter, R: str, W: str, G: str) -> tuple[str, str]:
    """W − R·G, and −R·G"""
    step = op.Mul(op.Neg(_scalar(op, R, op.type(G))), G)
    return op.Add(W, step), step


@form("SGDOptimizerV2", results="bool weights", writes={1: "weights"})
def sgd_optimizer_v2(
    op: Emitter, R: str, weights: str, gradients: str, update: str | None = None, *, _node: Node
) -> tuple[str, str]:
    """W − R·G for every tensor of a sequence, or W where `update` is false"""
    rate = _scalar(op, R, _wide_type(op, weights))

    def step(W: str, G: str) -> list[str]:
        w, g = _wide(op, W, G)
        return [_kept(op, update, op.Sub(w, op.Mul(g, rate)), W)]

    return _flag(op, _node, update, 0), _for_each(op, (weights, gradients), [op.type(weights)], step)[0]


@form(
    "AdamWOptimizer",
    results="bool weights momentums_1 momentums_2",
    writes={1: "weights", 2: "momentums_1", 3: "momentums_2"},
)
def adamw_optimizer(
    op: Emitter,
    R: str,
    step: str,
    weights: str,
    gradients: str,
    momentums_1: str,
    momentums_2: str,
    update: str | None = None,
    *,
    adam_mode: int = 0,
    alpha: float = 0.9,
    beta: float = 0.999,
    correct_bias: int = 1,
    epsilon: float = 1e-8,
    weight_decay: float = 1e-2,
    _node: Node,
) -> tuple[str, ...]:
    """Every W, m and v after a step of AdamW (Loshchilov and Hutter 2019), or as they were where `update` is false

    adam_mode=0: W·(1 − R·decay), then − R/c₁·m/(√v/√c₂ + ε), as in torch. adam_mode=1: first − R·√c₂/c₁·m/(√v + ε), then
    ·(1 − R·decay), as in transformers. c = 1 − baseⁿ corrects an average after n steps, with correct_bias.
    """
    kind = _wide_type(op, weights)
    rate, root_correction = _scalar(op, R, kind), None
    size, shrunk = rate, op.Mul(rate, weight_decay)
    if correct_bias:
        first, second = (_after(op, step, base, kind) for base in (alpha, beta))
        root_correction = op.Sqrt(second)
        size = op.Div(op.Mul(rate, root_correction) if adam_mode else rate, first)

    def new(W: str, G: str, m: str, v: str) -> list[str]:
        w, g, old_m, old_v = _wide(op, W, G, m, v)
        next_m, next_v = _moments(op, g, old_m, old_v, alpha, beta)
        root = op.Sqrt(next_v)
        if root_correction is not None and not adam_mode:
            root = op.Div(root, root_correction)
        if not adam_mode:
            w = op.Sub(w, op.Mul(w, shrunk))
        w = op.Sub(w, op.Mul(size, op.Div(next_m, op.Add(root, epsilon))))
        if adam_mode:
            w = op.Sub(w, op.Mul(w, shrunk))
        return [_kept(op, update, n, o) for n, o in ((w, W), (next_m, m), (next_v, v))]

    kinds = [op.type(sequence) for sequence in (weights, momentums_1, momentums_2)]
    sequences = weights, gradients, momentums_1, momentums_2
    return _flag(op, _node, update, 0), *_for_each(op, sequences, kinds, new)


@form("AdamOptimizer", results="step m v W G :half")
def adam_optimizer(
    op: Emitter,
    R: str,
    step: str,
    W: str,
    G: str,
    m: str,
    v: str,
    half: str | None = None,
    loss_scale: str | None = None,
    norm: str | None = None,
    update: str | None = None,
    *,
    alpha: float = 0.9,
    beta: float = 0.999,
    do_bias_correction: int = 1,
    epsilon: float = 1e-8,
    lambda_: float = 0.0,
    max_norm_clip: float = 1.0,
    weight_decay_mode: int = 0,
) -> tuple[str | None, ...]:
    """The next step number, m, v, W, the step that W took, and W in the type of `half` (Kingma and Ba 2015)

    The gradient is divided by the loss scale, and by its norm where that is above `max_norm_clip`. The step is
    −R·(m̂/(√v̂ + ε) + λ·W); with weight_decay_mode=1 −R·√c₂·m̂/(√v + ε), and then W − R·λ·W.
    """
    w, g, old_m, old_v = _wide(op, W, G, m, v)
    kind = op.type(w)
    if loss_scale is not None:
        g = op.Div(g, _scalar(op, loss_scale, kind))
    if norm is not None:
        length = _scalar(op, norm, kind)
        if loss_scale is not None:
            length = op.Div(length, _scalar(op, loss_scale, kind))
        g = op.Div(g, op.Max(op.Div(length, max_norm_clip), op.const(1.0, like=length)))
    rate = _scalar(op, R, kind)
    next_m, next_v = _moments(op, g, old_m, old_v, alpha, beta)
    corrected, square, size = next_m, next_v, rate
    if do_bias_correction:
        first, second = (_after(op, step, base, kind) for base in (alpha, beta))
        corrected = op.Div(next_m, first)
        if weight_decay_mode:
            size = op.Mul(rate, op.Sqrt(second))
        else:
            square = op.Div(next_v, second)
    direction, shrunk = op.Div(corrected, op.Add(op.Sqrt(square), epsilon)), op.Mul(rate, lambda_)
    move = op.Mul(size, direction)
    move = op.Add(move, op.Mul(shrunk, op.Sub(w, move) if weight_decay_mode else w))
    new = op.Sub(w, move)
    kept = [(op.Add(step, 1), step), (next_m, m), (next_v, v), (new, W), (op.Neg(move), G)]
    results = [_kept(op, update, n, o) for n, o in kept]
    return *results, None if half is None else _kept(op, update, new, half)


@form("InPlaceAccumulator", results="total")
def in_place_accumulator(op: Emitter, total: str, value: str, update: str | None = None) -> str:
    """Total + value, or the total where `update` is false"""
    return _kept(op, update, op.Add(*_wide(op, total, value)), total)


@form("InPlaceAccumulatorV2", results="bool total", writes={1: "total"})
def in_place_accumulator_v2(
    op: Emitter, total: str, value: str, overwrite: str | None = None, *, _node: Node
) -> tuple[str, str]:
    """True, and total + value, or the value alone where `overwrite` is true"""
    new = op.as_type(op.Add(*_wide(op, total, value)), op.type(total))
    if overwrite is not None:
        new = op.Where(_scalar(op, overwrite, TensorProto.BOOL), op.as_type(value, op.type(total)), new)
    return _flag(op, _node, None, 1), new


@form("InplaceClipGradNorm", results="gradients")
def inplace_clip_grad_norm(op: Emitter, gradients: str, *, max_norm: float = 1.0, norm_type: str = "fro") -> str:
    """Every gradient times min(1, max_norm/(norm + 1e-6)), the norm over all of them"""
    if norm_type != "fro":
        raise UnsupportedFormError(f"norm_type={norm_type!r} is not known; there is 'fro'")

    kind, wide = op.type(gradients), _wide_type(op, gradients)

    def square(G: str) -> list[str]:
        g = op.as_type(G, wide)
        return [op.ReduceSum(op.Mul(g, g), keepdims=0)]

    (squares,) = _for_each(op, (gradients,), [wide], square)
    norm = op.Sqrt(op.ReduceSum(op.ConcatFromSequence(squares, axis=0, new_axis=1), keepdims=0))
    factor = op.Min(op.Div(op.const(max_norm, like=norm), op.Add(norm, 1e-6)), op.const(1.0, like=norm))
    clipped = _for_each(op, (gradients,), [kind], lambda G: [op.as_type(op.Mul(op.as_type(G, wide), factor), kind)])
    return str(clipped[0])


@form("ReduceAllL2", results=":xs")
def reduce_all_l2(op: Emitter, *xs: str) -> str:
    """√Σx² over every element of every input"""
    sums = [op.ReduceSum(op.Mul(x, x), keepdims=0) for x in _wide(op, *xs)]
    return op.as_type(op.Sqrt(op.Sum(*sums)), op.type(xs[0]))


@form("IsFinite", results="bool")
def is_finite(op: Emitter, X: str) -> str:
    """Whether each element is neither infinite nor NaN"""
    (x,) = _wide(op, X)
    return str(op.Not(op.Or(op.IsInf(x), op.IsNaN(x))))


@form("IsAllFinite", results="bool")
def is_all_finite(op: Emitter, *xs: str, isinf_only: int = 0, isnan_only: int = 0) -> str:
    """Whether no element of any input is infinite or NaN; with an attribute only one of the two counts"""
    if isinf_only and isnan_only:
        raise UnsupportedFormError("isinf_only and isnan_only exclude each other")
    wrong = []
    for x in _wide(op, *xs):
        found = ([] if isnan_only else [op.IsInf(x)]) + ([] if isinf_only else [op.IsNaN(x)])
        wrong += [op.ReduceSum(op.Cast(one, to=TensorProto.INT64), keepdims=0) for one in found]
    total = wrong[0]
    for more in wrong[1:]:
        total = op.Add(total, more)
    return str(op.Equal(total, 0))


@form("All", results="bool")
def all_(op: Emitter, X: str) -> str:
    """Whether every element is true"""
    return str(op.Equal(op.ReduceSum(op.Cast(op.Not(X), to=TensorProto.INT64), keepdims=0), 0))


@form("MixedPrecisionScale", results=":scale!to ...")
def mixed_precision_scale(op: Emitter, scale: str, *xs: str, fuse_outputs: int = 0, to: int) -> tuple[str, ...]:
    """scale·x of type `to` for every x, or all of them in one vector"""
    scaled = [op.as_type(op.Mul(x, _scalar(op, scale, op.type(x))), to) for x in _wide(op, *xs)]
    return (op.Concat(*(op.Reshape(y, [-1]) for y in scaled), axis=0),) if fuse_outputs else tuple(scaled)


@form("Group", results="bool")
def group(op: Emitter, *xs: str) -> str:
    """True"""
    return op.const(np.array(True))


@form("PassThrough", results="*")
def pass_through(op: Emitter, *xs: str) -> tuple[str, ...]:
    """The inputs"""
    return xs


# Recurrent networks. Every array has the axes time, direction, batch, hidden unit, or no time.


def _with_rank(op: Emitter, *values: str | None) -> None:
    """What a step has, of every step."""
    for value in values:
        if value is not None and op.rank(value) is None:
            op.assume(value, (None,) * 4)


def _until(op: Emitter, values: str, sequence_lens: str | None) -> str:
    """`values`, 0 after the end of each sequence"""
    if sequence_lens is None:
        return values
    count = op.Cast(op.Squeeze(op.Shape(values, end=1), [0]), to=op.type(sequence_lens))
    zero, one = (op.const(number, like=sequence_lens) for number in (0, 1))
    inside = op.Less(op.Unsqueeze(op.Range(zero, count, one), [1]), sequence_lens)
    return str(op.Where(op.Unsqueeze(inside, [1, 3]), values, 0.0))


def _forward(op: Emitter, op_type: str, inputs: Sequence[str | None], outputs: int, attributes: dict[str, Any]) -> Any:
    """The forward operator; what it returns first is Y"""
    made = op.emit(op_type, "", inputs, outputs, attributes)
    _with_rank(op, made[0])
    return made


@form("GRUTraining", results=":X :X :X")
def gru_training(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    B: str | None = None,
    sequence_lens: str | None = None,
    initial_h: str | None = None,
    *,
    activation_alpha: Floats = None,
    activation_beta: Floats = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    linear_before_reset: int = 0,
    output_sequence: int = 1,
) -> tuple[str, ...]:
    """GRU, and the gates of every step"""
    attributes = {"activation_alpha": activation_alpha, "activation_beta": activation_beta, "activations": activations}
    attributes |= {"clip": clip, "direction": direction, "hidden_size": hidden_size}
    attributes |= {"linear_before_reset": linear_before_reset}
    inputs = X, W, R, B, sequence_lens, initial_h
    Y, Y_h = _forward(op, "GRU", inputs, 2, dict(attributes))
    zrh, _ = op.grad.GRUGates(*inputs, Y, layout=0, **attributes)
    return Y, Y_h, _until(op, zrh, sequence_lens)


@form("GRUGrad", results="X W R B initial_h")
def gru_grad(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    HAll: str,
    zrh: str,
    dHAll: str | None = None,
    dHt: str | None = None,
    *,
    activation_alpha: Floats = None,
    activation_beta: Floats = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    linear_before_reset: int = 0,
) -> tuple[str, ...]:
    attributes = {"activation_alpha": activation_alpha, "activation_beta": activation_beta, "activations": activations}
    attributes |= {"clip": clip, "direction": direction, "hidden_size": hidden_size}
    attributes |= {"linear_before_reset": linear_before_reset}
    _with_rank(op, HAll, zrh, dHAll)
    given, arguments = (X, W, R, B, sequence_lens, initial_h, HAll), None
    if activations is not None or clip is not None:  # then the gates alone do not tell the slopes
        _, arguments = op.grad.GRUGates(*given, layout=0, **attributes)
    return op.grad.GRUGrad(*given, zrh, dHAll, dHt, arguments, **attributes)


@form("LSTMTraining", results=":X :X :X :X :X")
def lstm_training(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    B: str | None = None,
    sequence_lens: str | None = None,
    initial_h: str | None = None,
    initial_c: str | None = None,
    P: str | None = None,
    *,
    activation_alpha: Floats = None,
    activation_beta: Floats = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    output_sequence: int = 1,
) -> tuple[str, ...]:
    """LSTM, and the cells and gates of every step"""
    attributes = {"activation_alpha": activation_alpha, "activation_beta": activation_beta, "activations": activations}
    attributes |= {"clip": clip, "direction": direction, "hidden_size": hidden_size, "input_forget": input_forget}
    inputs = X, W, R, B, sequence_lens, initial_h, initial_c, P
    Y, Y_h, Y_c = _forward(op, "LSTM", inputs, 3, dict(attributes))
    CAll, iofc, _ = op.grad.LSTMGates(*inputs, Y, layout=0, **attributes)
    return Y, Y_h, Y_c, CAll, _until(op, iofc, sequence_lens)


@form("LSTMGrad", results="X W R :X initial_h initial_c :X")
def lstm_grad(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    sequence_lens: str | None,
    initial_h: str | None,
    initial_c: str | None,
    HAll: str,
    CAll: str,
    iofc: str,
    dHAll: str | None = None,
    dHt: str | None = None,
    dCt: str | None = None,
    *,
    activation_alpha: Floats = None,
    activation_beta: Floats = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
) -> tuple[str, ...]:
    attributes = {"activation_alpha": activation_alpha, "activation_beta": activation_beta, "activations": activations}
    attributes |= {"clip": clip, "direction": direction, "hidden_size": hidden_size, "input_forget": input_forget}
    _with_rank(op, HAll, CAll, iofc, dHAll)
    arguments = None
    if activations is not None or clip is not None:  # then the gates alone do not tell the slopes
        forward = op.graph.producer.get(iofc)
        if forward is None or forward.op_type != "LSTMTraining":
            raise UnsupportedFormError("with activations or clip it needs the LSTMTraining that made iofc beside it")
        inputs = [name or None for name in forward.inputs] + [None] * (8 - len(forward.inputs))
        _, _, arguments = op.grad.LSTMGates(*inputs, HAll, layout=0, **attributes)
    starts, results = (initial_h, initial_c), (HAll, CAll, iofc, dHAll, dHt, dCt)
    return op.grad.LSTMGrad(X, W, R, sequence_lens, *starts, *results, None, arguments, **attributes)
