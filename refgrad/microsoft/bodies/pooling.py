"""ONNX Runtime's poolings, and the gradients of poolings as it has them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, Emitter, UnsupportedFormError, body, form
from refgrad.formulas.types import widened
from refgrad.microsoft.bodies.convolution import channels_first, channels_last
from refgrad.model.graph import Node
from refgrad.protos.domains import MICROSOFT
from refgrad.rewrites.results import typed
from refgrad.tables.definitions import REQUIRED, Ints, Shapes


@body("NhwcMaxPool", "y", types={"x": ["tensor(int8)", "tensor(uint8)"], "y": "x"}, domain=MICROSOFT)
def nhwc_max_pool(
    op: FunctionEmitter,
    x: str,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    kernel_shape: Ints,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> str:
    """MaxPool of 8-bit images whose channels are the last axis"""
    rank = len(kernel_shape) + 2
    window: dict[str, Any] = {"auto_pad": auto_pad, "ceil_mode": ceil_mode, "dilations": dilations, "pads": pads}
    y = op.MaxPool(channels_first(op, x, rank), outputs=1, kernel_shape=kernel_shape, strides=strides, **window)
    return channels_last(op, y, rank)


def _check_kernel(shapes: Shapes, args: Arguments) -> None:
    if not args.kernel_shape:
        raise UnsupportedFormError("it has no kernel_shape: give it one")


@body(
    "MaxpoolWithMask",
    "Y",
    types={"X": ["tensor(float)", "tensor(double)"], "Y": "X", "M": ["tensor(int32)"]},
    check=_check_kernel,
    domain=MICROSOFT,
)
def maxpool_with_mask(
    op: FunctionEmitter,
    X: str,
    M: str,
    *,
    auto_pad: str = "NOTSET",
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    storage_order: int = 0,
    strides: Ints | None = None,
) -> str:
    """The maximum of each window: of each of its rows the elements before the first where M is 0

    ONNX Runtime reads M so, which is a mask for all images and channels, and of two axes and more it does not ask it about
    the first element of an image. A window without elements has the lowest number of 32 bits.
    """
    assert kernel_shape is not None
    axes, width = len(kernel_shape), kernel_shape[-1]
    steps, around = list(strides or [1] * axes), list(pads or [0] * (2 * axes))
    size = op.Shape(X, start=-1)
    if auto_pad.startswith("SAME"):
        count = op.Div(op.Add(size, [steps[-1] - 1]), [steps[-1]])
        total = op.Max(op.Sub(op.Add(op.Mul(op.Sub(count, [1]), [steps[-1]]), [width]), size), [0])
        begin = op.Div(total if auto_pad == "SAME_UPPER" else op.Add(total, [1]), [2])
    else:
        around = [0] * (2 * axes) if auto_pad == "VALID" else around
        begin = op.const([around[axes - 1]])
        count = op.Add(op.Div(op.Add(size, [around[axes - 1] + around[-1] - width]), [steps[-1]]), [1])
    numbers = op.up_to(count)
    starts = op.Unsqueeze(op.Sub(op.Mul(numbers, [steps[-1]]), begin), [1])
    places = op.Add(starts, op.up_to(op.const([width])))  # in the last axis, of each element of each window
    inside = op.And(op.GreaterOrEqual(places, op.const([0])), op.Less(places, size))
    there = op.Max(op.Min(places, op.Sub(size, [1])), [0])
    masked = op.Cast(op.Equal(M, op.const(np.array([0], np.int32))), to=TensorProto.INT64)
    if axes > 1:
        first = op.Equal(op.Range(op.const(np.array(0)), op.Size(M), op.const(np.array(1))), op.const([0]))
        masked = op.Where(first, op.const([0]), op.Reshape(masked, [-1]))
    image = op.Concat([1, 1], op.Shape(X, start=2), axis=0)
    masked = op.Gather(op.Reshape(masked, image, allowzero=1), there, axis=-1)
    before = op.CumSum(op.Where(inside, masked, op.const([0])), op.const(np.array(-1)))
    kept = op.And(inside, op.Equal(before, op.const([0])))
    row = op.Concat(op.Shape(X, end=-1), op.Mul(count, [width]), axis=0)  # the windows side by side
    kept = op.Reshape(kept, op.Concat([1, 1], op.Slice(row, [2], [axes + 2]), axis=0), allowzero=1)
    seen = op.Gather(X, op.Reshape(there, [-1]), axis=-1)
    return op.MaxPool(
        op.Where(kept, seen, op.const(LOWEST, like=X)),
        outputs=1,
        auto_pad=auto_pad,
        kernel_shape=kernel_shape,
        strides=[*steps[:-1], width],
        pads=None if auto_pad != "NOTSET" else [*around[: axes - 1], 0, *around[axes:-1], 0],
    )


LOWEST = float(np.finfo(np.float32).min)

_POOL: dict[str, Any] = {
    "auto_pad": "NOTSET",
    "ceil_mode": 0,
    "dilations": None,
    "kernel_shape": REQUIRED,
    "pads": None,
    "strides": None,
}


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


@form("MaxPoolGrad", results=[typed("dY")], attributes=_POOL | {"storage_order": 0}, domains=("", MICROSOFT))
def max_pool_grad(op: Emitter, dY: str, Indices: str, *, _node: Node, **attributes: Any) -> str:
    """X has the shape of the input of the MaxPool that made the indices; else it is found as for AveragePoolGrad"""
    pool = op.graph.producer.get(Indices)
    X = pool.inputs[0] if pool is not None and pool.key == ("", "MaxPool") else _pooled(op, _node, "MaxPool")
    (d,) = widened(op, dY)  # ONNX Runtime scatters no 16 bits on the CPU
    return op.as_type(op.grad.MaxPoolGrad(d, X, Indices, **attributes), op.type(dY))


@form("AveragePoolGrad", results=[typed("dY")], attributes=_POOL | {"count_include_pad": 0}, domains=("", MICROSOFT))
def average_pool_grad(op: Emitter, dY: str, *, _node: Node, **attributes: Any) -> str:
    """X has the shape of the value after which the result is named, or of the forward node's input, or the declared one"""
    X = _pooled(op, _node, "AveragePool")
    sizes = op.static(X)
    if (
        _node.outputs[0] == X and sizes is not None and op.static(dY) is None
    ):  # the windows are counted where the model runs
        X = op.full(op.const(list(sizes)), 0.0, like=dY)
    return op.grad.AveragePoolGrad(dY, X, **attributes)
