"""The primitives that ONNX Runtime has a kernel for, each with the condition under which that kernel is right.

A lowering that returns None leaves the case to the ai.onnx one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from refgrad.emit import Emitter
from refgrad.functions import MICROSOFT
from refgrad.graph import Shape, is_unnamed
from refgrad.lowering.onnx.arithmetic import summed_axes
from refgrad.lowering.onnx.shape import same_or_known, tile_grad_at_run_time
from refgrad.lowering.onnx.windows import make_windows, spatial
from refgrad.registry import lowering

# ONNX Runtime has no double for these on the CPU; what it has in float alone runs in float16 between two casts.
_NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_SINGLE = (TensorProto.FLOAT, TensorProto.FLOAT16)
_WIDE = (TensorProto.FLOAT, TensorProto.DOUBLE)
_SAME = ("SAME_UPPER", "SAME_LOWER")
_GATHERED = (*_WIDE, TensorProto.FLOAT16)  # the types of the three kernels that undo a gathering


@lowering("Alias", dialect="ort")
def alias(op: Emitter, X: str) -> str:
    """ONNX Runtime's builder names the adjoint of every tensor, and every contribution to a sum."""
    return op.copy(X)


@lowering("ShapeOf", dialect="ort")
def shape_of(op: Emitter, X: str) -> str:
    return op.measure(X)


@lowering("ReshapeLike", dialect="ort")
def reshape_like(op: Emitter, dY: str, X: str) -> str:
    """ONNX Runtime's builder never sets allowzero, so that it fails where X is empty but for these cases."""
    return op.Reshape(dY, op.measure(X), allowzero=None if _keeps_zeros(op.shape(dY), op.shape(X)) else 1)


@lowering("ReshapeGrad", dialect="ort")
def reshape_grad(op: Emitter, dY: str, X: str) -> str:
    """ONNX Runtime's builder writes sizes that are known beforehand in the adjoint of Reshape alone."""
    given = op.shape(dY)
    sizes = None if given is None or any(map(is_unnamed, given)) else same_or_known(op, dY, X)
    return op.reshape_like(dY, X) if sizes is None else op.Reshape(dY, sizes)


@lowering("Length", dialect="ort")
def length(op: Emitter, X: str, axis: int) -> str:
    return str(op.Gather(op.measure(X), [axis]))


@lowering("TileGrad", dialect="ort")
def tile_grad(op: Emitter, dY: str, X: str, repeats: str) -> str:
    return tile_grad_at_run_time(op, dY, X, repeats)


@lowering("PadGrad", dialect="ort")
def pad_grad(op: Emitter, dY: str, pads: str, axes: str | None) -> str:
    """ONNX Runtime's builder forgets the axes."""
    return str(op.Pad(dY, op.Neg(pads), None, axes))


@lowering("TriluGrad", dialect="ort")
def trilu_grad(op: Emitter, dY: str, k: str | None, upper: int) -> str:
    return str(op.com_microsoft("Trilu", dY, k, upper=upper))


@lowering("SplitTraining", dialect="ort")
def split_training(op: Emitter, dY: str, lengths: str, axis: int, count: int) -> tuple[str, ...]:
    """The kernel writes to every output, so all have names."""
    parts = op.emit("SplitTraining", MICROSOFT, (dY, lengths), count, {"axis": axis})
    return (parts,) if count == 1 else parts


def _keeps_zeros(given: Shape | None, wanted: Shape | None) -> bool:
    """Whether every 0 in the wanted shape stands where a tensor of the given shape, as large, has a 0 too."""
    if wanted is None:
        return False
    may_be_zero = [axis for axis, dim in enumerate(wanted) if not isinstance(dim, int) or not dim]
    if not may_be_zero:
        return True
    if given is None:
        return False
    if all(axis < len(given) and given[axis] == wanted[axis] is not None for axis in may_be_zero):
        return True
    return may_be_zero == [axis for axis, dim in enumerate(given) if not isinstance(dim, int) or not dim] and (
        len(may_be_zero) == 1
    )


@lowering("BroadcastGradient", dialect="ort")
def broadcast_gradient(op: Emitter, dY: str, X: str, operands: tuple[str, ...]) -> str | None:
    """Where the sizes are known the axes are constants. Where they are not, BroadcastGradientArgs finds them.

    ONNX Runtime's builder takes two sizes of different names for equal; here they may be broadcast. It asks
    BroadcastGradientArgs about a size of 0 as well, but then ReduceSum gets no axes, and reduces an empty tensor along all.
    """
    shapes = [op.shape(name) for name in operands]
    if len(operands) > 2 or len(set(operands)) == 1:
        return None
    if not any(shape is None or any(map(is_unnamed, shape)) for shape in shapes):
        axes = summed_axes(*(op.shape(name) for name in (X, *(name for name in operands if name != X))))
        if axes is not None:
            return _sum_over(op, dY, X, *axes)
    return _at_run_time(op, dY, X, operands)


def _at_run_time(op: Emitter, dY: str, X: str, operands: tuple[str, ...]) -> str:
    """dY summed over the axes that BroadcastGradientArgs finds in the shapes of the two operands, of which X is one."""
    sizes, shapes = [op.measure(name) for name in operands], [op.shape(name) for name in operands]
    pair = op.com_microsoft("BroadcastGradientArgs", *sizes, outputs=2)
    mine = operands.index(X)
    own, other = shapes[mine], shapes[1 - mine]
    same_rank = own is not None and other is not None and len(own) >= len(other)
    full = all(isinstance(dim, int) and dim for dim in own or (None,))
    summed = op.ReduceSum(dY, pair[mine], keepdims=1, noop_with_empty_axes=1)
    return str(op.Reshape(summed, sizes[mine], allowzero=None if same_rank or full else 1))


def _sum_over(op: Emitter, dY: str, X: str, leading: list[int], inner: list[int]) -> str:
    if not leading and not inner:
        return dY
    if not inner:
        return op.ReduceSum(dY, leading[::-1], keepdims=0)
    summed = op.ReduceSum(dY, inner[::-1] + leading[::-1], keepdims=1)
    return op.Reshape(summed, op.measure(X)) if leading else summed


@lowering("DivGrad", dialect="ort")
def div_grad(op: Emitter, dC: str, A: str, B: str, C: str | None) -> tuple[str, str] | None:
    """The kernel fails on an empty tensor that was broadcast. Where dB is not asked for, dA is a Div."""
    if not op.is_needed(B) or any(0 in (op.static(value) or ()) for value in (A, B)):
        return None
    return op.com_microsoft("DivGrad", dC, A, B, outputs=2)


@lowering("Averaged", dialect="ort")
def averaged(op: Emitter, dY: str, means: str, X: str, count: int | None) -> str | None:
    """The sizes are divided as integers, which fails where they are 0; in double the quotient would be rounded to float."""
    shape = op.static(X)
    if op.type(dY) not in _SINGLE or shape is None or 0 in shape:
        return None
    scale = op.Div(op.Size(X), op.Size(means))
    return str(op.com_microsoft("Scale", dY, scale, scale_down=1))


@lowering("OverNorm", dialect="ort")
def over_norm(op: Emitter, dY: str, Y: str) -> str:
    return str(op.Where(op.Equal(Y, 0.0), 0.0, op.Div(dY, Y)))


@lowering("FakeQuantGrad", dialect="ort")
def fake_quant_grad(op: Emitter, dY: str, mask: str) -> str | None:
    return op.com_microsoft("FakeQuantGrad", dY, mask) if op.type(dY) == TensorProto.FLOAT else None


@lowering("ReluGrad", dialect="ort")
def relu_grad(op: Emitter, dY: str, Y: str) -> str | None:
    return op.com_microsoft("ReluGrad", dY, Y) if op.type(dY) in _NARROW else None


@lowering("LeakyReluGrad", dialect="ort")
def leaky_relu_grad(op: Emitter, dY: str, X: str, alpha: float) -> str | None:
    """The kernel only asks for a sign: given X instead of Y, it is right for a negative alpha too."""
    return op.com_microsoft("LeakyReluGrad", dY, X, alpha=alpha) if op.type(dY) in _NARROW else None


@lowering("SigmoidGrad", dialect="ort")
def sigmoid_grad(op: Emitter, dY: str, Y: str) -> str:
    return op.com_microsoft("SigmoidGrad", dY, Y)


@lowering("TanhGrad", dialect="ort")
def tanh_grad(op: Emitter, dY: str, Y: str) -> str:
    return op.com_microsoft("TanhGrad", dY, Y)


@lowering("GeluGrad", dialect="ort")
def gelu_grad(op: Emitter, dY: str, X: str, B: str | None = None, approximate: str = "none") -> str | None:
    """ONNX Runtime's builder takes GeluGrad for the tanh form as well, whose derivative is FastGeluGrad's.

    The kernels with a bias divide by its size: where that is 0 the process ends.
    """
    if B is not None:
        size = op.static(B)
        if op.type(dY) in _SINGLE and size is not None and 0 not in size:
            return op.com_microsoft("BiasFastGeluGrad_dX" if approximate == "tanh" else "BiasGeluGrad_dX", dY, X, B)
        X = op.Add(X, B)
    if approximate == "tanh":
        return op.com_microsoft("FastGeluGrad", dY, X)
    return op.com_microsoft("GeluGrad", dY, X) if op.type(dY) in _NARROW else None


@lowering("QuickGeluGrad", dialect="ort")
def quick_gelu_grad(op: Emitter, dY: str, X: str, alpha: float) -> str | None:
    return op.com_microsoft("QuickGeluGrad", dY, X, alpha=alpha) if op.type(dY) in _SINGLE else None


@lowering("SoftmaxGrad", dialect="ort")
def softmax_grad(op: Emitter, dY: str, Y: str, axis: int) -> str | None:
    return op.com_microsoft("SoftmaxGrad_13", dY, Y, axis=axis) if _has_softmax_kernel(op, dY, Y, axis) else None


@lowering("LogSoftmaxGrad", dialect="ort")
def log_softmax_grad(op: Emitter, dY: str, Y: str, axis: int) -> str | None:
    return op.com_microsoft("LogSoftmaxGrad_13", dY, Y, axis=axis) if _has_softmax_kernel(op, dY, Y, axis) else None


def _has_softmax_kernel(op: Emitter, dY: str, Y: str, axis: int) -> bool:
    """Along an axis that is not the last, the kernels divide by the size of Y: where that is 0 the process ends."""
    rank, static = op.rank(Y), op.static(Y)
    last = axis == -1 or (rank is not None and axis == rank - 1)
    return op.type(dY) in _NARROW and (last or (static is not None and 0 not in static))


@lowering("DropoutGrad", dialect="ort")
def dropout_grad(
    op: Emitter, dY: str, mask: str, ratio: str | None, training_mode: str | None, seed: int | None = None
) -> str | None:
    """The kernel does not look at training_mode: it scales in inference too."""
    training = op.constant(training_mode)
    if training is None or not training.all():
        return None
    return op.com_microsoft("DropoutGrad", dY, mask, ratio, training_mode, seed=seed)


@lowering("SoftmaxCrossEntropyLossGrad", dialect="ort")
def softmax_cross_entropy_loss_grad(
    op: Emitter,
    d_output: str,
    log_prob: str,
    labels: str,
    weights: str | None,
    reduction: str,
    ignore_index: int | None,
) -> str | None:
    """Where there are no labels the process ends."""
    if 0 in (op.shape(log_prob) or ()):
        return None
    return op.com_microsoft(
        "SoftmaxCrossEntropyLossGrad",
        d_output,
        log_prob,
        labels,
        weights,
        reduction=reduction,
        ignore_index=ignore_index,
    )


@lowering("SliceGrad", dialect="ort")
def slice_grad(
    op: Emitter, dY: str, shape: str, starts: str, ends: str, axes: str | None, steps: str | None
) -> str | None:
    """The kernel fails on a negative step along the last axis, and has no 16-bit floats."""
    if op.type(dY) not in _WIDE or (steps is not None and _may_end_backwards(op, dY, axes, steps)):
        return None
    return str(op.com_microsoft("SliceGrad", dY, shape, starts, ends, axes, steps))


def _may_end_backwards(op: Emitter, dY: str, axes: str | None, steps: str) -> bool:
    """Whether a step along the last axis may be negative."""
    by, rank = op.constant(steps), op.rank(dY)
    along = op.constant(axes) if axes is not None or by is None else np.arange(by.size)
    if by is None or along is None:
        return by is None or any(by < 0)
    return any(step < 0 and (rank is None or axis in (-1, rank - 1)) for step, axis in zip(by, along, strict=True))


@lowering("GatherGrad", dialect="ort")
def gather_grad(op: Emitter, shape: str, indices: str, dY: str, axis: int) -> str | None:
    if op.type(dY) not in _GATHERED:
        return None
    return str(op.com_microsoft("GatherGrad", shape, indices, dY, axis=axis))


@lowering("GatherElementsGrad", dialect="ort")
def gather_elements_grad(op: Emitter, dY: str, shape: str, indices: str, axis: int) -> str | None:
    if op.type(dY) not in _GATHERED:
        return None
    return str(op.com_microsoft("GatherElementsGrad", dY, shape, indices, axis=axis))


@lowering("GatherNDGrad", dialect="ort")
def gather_nd_grad(op: Emitter, shape: str, indices: str, dY: str, batch_dims: int) -> str | None:
    """Where the batch is empty the process ends."""
    if op.type(dY) not in _GATHERED or (batch_dims and 0 in (op.shape(indices) or ())):
        return None
    return str(op.com_microsoft("GatherNDGrad", shape, indices, dY, batch_dims=batch_dims))


@lowering("FusedMatMul", dialect="ort")
def fused_matmul(op: Emitter, A: str, B: str, transA: int, transB: int) -> str | None:
    """ONNX Runtime's builder takes it for every type; on the CPU there is a kernel for float alone.

    Of a Transpose and a MatMul in double its optimizer makes one that it cannot run.
    """
    if op.type(A) == TensorProto.DOUBLE:
        return str(op.Einsum(A, B, equation=_product(op.rank(A), op.rank(B), transA, transB)))
    if op.type(A) != TensorProto.FLOAT:
        return None
    return str(op.com_microsoft("FusedMatMul", A, B, transA=transA or None, transB=transB or None))


def _product(rank_a: int | None, rank_b: int | None, trans_a: int, trans_b: int) -> str:
    """The equation of a matrix product. The axes of "..." are as many in both; where a rank is unknown, they are anyway."""
    surplus = max(rank_a or 2, 2) - max(rank_b or 2, 2)
    alone = ascii_uppercase[: abs(surplus)]
    rows = "" if rank_a == 1 else "i"
    left = f"{alone if surplus > 0 else ''}...{'ji' if trans_a else rows + 'j'}"
    right = f"{alone if surplus < 0 else ''}...{'kj' if trans_b else 'jk'}"
    return f"{left},{right}->{alone}...{rows}k"


@lowering("MatrixGrad", dialect="ort")
def matrix_grad(op: Emitter, dY: str, A: str, B: str) -> tuple[str, str] | None:
    """Of sizes without a name ONNX Runtime's builder asks at run time along which an operand was broadcast."""
    a, b = op.shape(A), op.shape(B)
    if op.type(A) != TensorProto.FLOAT or a is None or b is None or not any(map(is_unnamed, (*a, *b))):
        return None
    dA = op.grad.FusedMatMul(dY, B, transA=0, transB=1)
    op.assume(dA, a)
    dA = _at_run_time(op, dA, A, (A, dA))
    if op.static(B) is not None and isinstance(a[-1], int):
        return dA, op.Gemm(op.grad.Rows(A), op.grad.Rows(dY), transA=1)
    dB = op.grad.FusedMatMul(A, dY, transA=1, transB=0)
    op.assume(dB, (*a[:-2], *b))
    return dA, _at_run_time(op, dB, B, (dB, B))


@lowering("Rows", dialect="ort")
def rows(op: Emitter, X: str) -> str | None:
    """ONNX Runtime's builder reads a size that is not known off B when the model runs, which fails where it is 0."""
    width = (op.shape(X) or (None,))[-1]
    return str(op.Reshape(X, [-1, width])) if isinstance(width, int) and width else None


@lowering("BatchGradient", dialect="ort")
def batch_gradient(op: Emitter, dY: str, X: str, operands: tuple[str, ...]) -> str | None:
    """ONNX Runtime's builder keeps the axes of A alone, which changes nothing."""
    if any(is_unnamed(dim) for name in operands for dim in op.shape(name) or (None,)):
        return None
    axes = summed_axes(*(op.shape(name) for name in (X, *(name for name in operands if name != X))))
    if axes is None or not any(axes):
        return None
    leading, inner = axes
    keepdims = None if operands[0] == X else 0
    return str(op.Reshape(op.ReduceSum(dY, inner[::-1] + leading[::-1], keepdims=keepdims), op.measure(X)))


@lowering("ConvGrad", dialect="ort")
def conv_grad(
    op: Emitter, dY: str, X: str, W: str, auto_pad: str, pads: Sequence[int] | None, **attributes: Any
) -> tuple[str, str, str] | None:
    """The kernel takes auto_pad SAME for no pads at all, so it is told them; where the batch is empty the process ends."""
    if op.type(dY) not in _SINGLE or 0 in (op.shape(X) or ()):
        return None
    if auto_pad in _SAME:
        kernel = attributes["kernel_shape"] or spatial(op, W)
        known = None if kernel is None else _pads_of(op, X, dY, kernel, auto_pad, attributes)
        if known is None:
            return None
        auto_pad, pads = known
    attributes |= {"auto_pad": auto_pad, "pads": pads}
    return op.com_microsoft("ConvGrad", dY, X, W, outputs=3, **attributes)


def _pads_of(
    op: Emitter, X: str, Y: str, kernel: Sequence[int], auto_pad: str, attributes: Mapping[str, Any]
) -> tuple[str, Sequence[int] | None] | None:
    """auto_pad and pads that say the same as this auto_pad SAME, of which the kernels pad nothing; None where unknown."""
    windows = make_windows(
        op, X, Y, kernel, attributes["strides"], attributes["dilations"], None, auto_pad, len(kernel)
    )
    if isinstance(windows.begin, str):
        return None
    return ("NOTSET", windows.pads) if any(windows.pads) else (auto_pad, None)


@lowering("MaxPoolGrad", dialect="ort")
def max_pool_grad(
    op: Emitter, dY: str, X: str, Indices: str, kernel_shape: Sequence[int], storage_order: int, **attributes: Any
) -> str | None:
    """The kernel reads the sizes of X but the first off the declaration of its output: without one the process ends.

    So it does in float16: the casts around the kernel give it an output that nothing declares. It does not look at
    storage_order.
    """
    sizes = (op.shape(X) or (None, None))[1:]
    known = all(isinstance(size, int) for size in sizes)
    if op.type(dY) != TensorProto.FLOAT or not known or (storage_order and len(kernel_shape) > 1):
        return None
    attributes |= {"kernel_shape": kernel_shape, "storage_order": storage_order}
    return op.declare(op.emit("MaxPoolGrad", "", (dY, Indices), 1, attributes), like=X)


@lowering("AveragePoolGrad", dialect="ort")
def average_pool_grad(
    op: Emitter,
    dY: str,
    X: str,
    auto_pad: str,
    ceil_mode: int,
    dilations: Sequence[int] | None,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None,
    count_include_pad: int,
    **attributes: Any,
) -> str | None:
    """It reads every size of X as MaxPoolGrad does, and is wrong with dilations and for three spatial axes.

    So it is with auto_pad SAME, unless it is told the pads; and with count_include_pad it divides by the size of a window
    even where ceil_mode lets that reach beyond the pads.
    """
    if op.type(dY) != TensorProto.FLOAT or op.static(X) is None:
        return None
    if len(kernel_shape) > 2 or any(d != 1 for d in dilations or ()):
        return None
    attributes |= {"dilations": dilations, "kernel_shape": kernel_shape, "count_include_pad": count_include_pad}
    if auto_pad in _SAME:
        known = _pads_of(op, X, dY, kernel_shape, auto_pad, attributes)
        if known is None:
            return None
        auto_pad, pads = known
        ceil_mode = 0  # every window lies within those pads
    elif ceil_mode and count_include_pad and _reach_beyond(op, X, dY, auto_pad, pads, attributes):
        return None
    attributes |= {"auto_pad": auto_pad, "ceil_mode": ceil_mode, "pads": pads}
    return op.declare(op.emit("AveragePoolGrad", "", (dY,), 1, attributes), like=X)


def _reach_beyond(
    op: Emitter, X: str, Y: str, auto_pad: str, pads: Sequence[int] | None, attributes: Mapping[str, Any]
) -> bool:
    kernel, strides = attributes["kernel_shape"], attributes["strides"]
    windows = make_windows(op, X, Y, kernel, strides, None, pads, auto_pad, len(kernel), ceil_mode=1)
    return windows.rest is None or min(windows.rest) < 0


@lowering("GlobalAveragePoolGrad", dialect="ort")
def global_average_pool_grad(op: Emitter, dY: str, X: str, Y: str) -> str | None:
    """ONNX Runtime's builder divides by the size of Y even where it may be 0, which ends the process."""
    shape, size = op.shape(X), spatial(op, X)
    if op.type(dY) not in _WIDE or 0 in (shape or ()):
        return None
    if size is None:
        one = op.const(np.ones((), np.int64))
        count = op.Max(op.Div(op.Size(X), op.Max(op.Size(Y), one)), one)
    else:
        count = op.const(np.array([math.prod(size)], tensor_dtype_to_np_dtype(op.type(dY))))
    scaled = op.com_microsoft("Scale", dY, count, scale_down=1)
    return str(op.Expand(scaled, op.measure(X)))


@lowering("BatchStatistics", dialect="ort")
def batch_statistics(op: Emitter, X: str, Scale: str, input_mean: str, epsilon: float) -> tuple[str, str] | None:
    """The forward node becomes BatchNormInternal, as ONNX Runtime's module builder has it, but in training alone.

    That one takes a node in inference for one in training.
    """
    if not _has_batch_kernel(op, X, Scale, input_mean):
        return None
    mean, r = op.training_form("BatchNormInternal", ("saved_mean", "saved_inv_std"))
    return mean, r


@lowering("BatchNormalizationGrad", dialect="ort")
def batch_normalization_grad(
    op: Emitter, dY: str, X: str, Scale: str, B: str | None, Mean: str, InvStdDev: str, epsilon: float
) -> tuple[str, str, str] | None:
    if not _has_batch_kernel(op, X, Scale, Mean):
        return None
    inputs = dY, X, Scale, Mean, InvStdDev
    dX, dScale, dB = op.every_adjoint("BatchNormalizationGrad", inputs, (X, Scale, B), epsilon=epsilon)
    return dX, dScale, dB


def _has_batch_kernel(op: Emitter, X: str, Scale: str, statistic: str) -> bool:
    """In float, and what was cast is not what the forward node reads."""
    given = X, Scale, statistic
    return all(op.type(v) == TensorProto.FLOAT and v not in op.made for v in given) and 0 not in (op.shape(X) or ())


@lowering("LayerNormalizationGrad", dialect="ort")
def layer_normalization_grad(
    op: Emitter, dY: str, X: str, Scale: str, B: str | None, Mean: str, InvStdDev: str, axis: int, epsilon: float
) -> tuple[str, str, str] | None:
    """The kernel takes Scale and B as long as a row of X, without looking; the forward kernel refuses others.

    In double it fails, and on rows of one element.
    """
    x, scale, bias = op.shape(X), op.static(Scale), op.shape(B or Scale)
    if op.type(X) not in _SINGLE or scale is None or all(dim == 1 for dim in scale):
        return None
    if any(row is not None and not _may_be(scale, row) for row in (bias, x and x[axis:])):
        return None
    inputs = dY, X, Scale, Mean, InvStdDev
    dX, dScale, dB = op.every_adjoint("LayerNormalizationGrad", inputs, (X, Scale, B), axis=axis, epsilon=epsilon)
    return dX, dScale, dB


def _may_be(sizes: Sequence[int], shape: Shape) -> bool:
    """Whether a tensor of this shape may have these sizes."""
    return len(shape) == len(sizes) and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(shape, sizes, strict=True)
    )


_DEFAULTS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"]}


@lowering("LSTMGates", dialect="ort")
def lstm_gates(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    initial_c: str | None,
    P: str | None,
    Y: str,
    input_forget: int,
    layout: int,
    **attributes: Any,
) -> tuple[str, str, None] | None:
    """The forward node becomes LSTMTraining; its gates tell the slopes of Sigmoid and Tanh."""
    if layout or not _has_lstm_kernel(op, X, sequence_lens, P, input_forget, attributes):
        return None
    settings = _recurrent_settings(attributes, input_forget=input_forget)
    CAll, iofc = op.training_form("LSTMTraining", ("CAll", "iofc"), settings)
    return CAll, iofc, None


@lowering("LSTMGrad", dialect="ort")
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
    dHAll: str | None,
    dHt: str | None,
    dCt: str | None,
    P: str | None,
    arguments: str | None,
    input_forget: int,
    **attributes: Any,
) -> tuple[str | None, ...] | None:
    """The kernel writes to every output, so all have names; it has no input P."""
    if not _has_lstm_kernel(op, X, sequence_lens, P, input_forget, attributes):
        return None
    inputs = X, W, R, None, initial_h, initial_c, HAll, CAll, iofc, dHAll, dHt, dCt
    settings = _recurrent_settings(attributes, input_forget=input_forget)
    return *op.emit("LSTMGrad", MICROSOFT, inputs, 6, settings), None


def _has_lstm_kernel(
    op: Emitter, X: str, sequence_lens: str | None, P: str | None, input_forget: int, attributes: dict[str, Any]
) -> bool:
    return P is None and not input_forget and _has_recurrent_kernel(op, "LSTM", X, sequence_lens, **attributes)


@lowering("GRUGates", dialect="ort")
def gru_gates(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    Y: str,
    linear_before_reset: int,
    layout: int,
    **attributes: Any,
) -> tuple[str, None] | None:
    """The forward node becomes GRUTraining; its gates tell the slopes of Sigmoid and Tanh."""
    if layout or not _has_recurrent_kernel(op, "GRU", X, sequence_lens, **attributes):
        return None
    settings = _recurrent_settings(attributes, linear_before_reset=linear_before_reset)
    [zrh] = op.training_form("GRUTraining", ("zrh",), settings)
    return zrh, None


@lowering("GRUGrad", dialect="ort")
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
    dHAll: str | None,
    dHt: str | None,
    arguments: str | None,
    linear_before_reset: int,
    **attributes: Any,
) -> tuple[str, ...] | None:
    """The kernel writes to every output, so all have names."""
    if not _has_recurrent_kernel(op, "GRU", X, sequence_lens, **attributes):
        return None
    inputs = X, W, R, B, None, initial_h, HAll, zrh, dHAll, dHt
    settings = _recurrent_settings(attributes, linear_before_reset=linear_before_reset)
    made: tuple[str, ...] = op.emit("GRUGrad", MICROSOFT, inputs, 5, settings)
    return made


def _recurrent_settings(attributes: dict[str, Any], **others: int) -> dict[str, Any]:
    """Every attribute that the kernels take: activations has to be left out, even where it names the defaults."""
    return {"direction": attributes["direction"], "hidden_size": attributes["hidden_size"], **others}


def _has_recurrent_kernel(
    op: Emitter,
    operator: str,
    X: str,
    sequence_lens: str | None,
    hidden_size: int | None,
    direction: str,
    activations: Sequence[str] | None,
    clip: float | None,
    **scales: Any,
) -> bool:
    """In float, one direction, forwards, all sequences of one length; the process ends where X is empty."""
    names = [name.lower() for name in activations or _DEFAULTS[operator]]
    plain = direction == "forward" and names == _DEFAULTS[operator] and clip is None and sequence_lens is None
    return plain and hidden_size is not None and op.type(X) == TensorProto.FLOAT and 0 not in (op.shape(X) or ())
