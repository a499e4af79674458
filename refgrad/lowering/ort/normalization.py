"""ONNX Runtime's kernels for normalizations, each with the condition under which it is right."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.lowering.ort.kernels import SINGLE
from refgrad.protos.types import Shape
from refgrad.tables.registry import lowering


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
    return all(op.type(v) == TensorProto.FLOAT and not op.is_emitted(v) for v in given) and 0 not in (op.shape(X) or ())


@lowering("LayerNormalizationGrad", dialect="ort")
def layer_normalization_grad(
    op: Emitter, dY: str, X: str, Scale: str, B: str | None, Mean: str, InvStdDev: str, axis: int, epsilon: float
) -> tuple[str, str, str] | None:
    """The kernel takes Scale and B as long as a row of X, without looking: here they are.

    In double it fails, and on rows of one element.
    """
    x, scale = op.shape(X), op.static(Scale)
    if op.type(X) not in SINGLE or scale is None or all(dim == 1 for dim in scale) or op.static(B or Scale) != scale:
        return None
    if x is not None and not _may_be(scale, x[axis:]):
        return None
    inputs = dY, X, Scale, Mean, InvStdDev
    dX, dScale, dB = op.every_adjoint("LayerNormalizationGrad", inputs, (X, Scale, B), axis=axis, epsilon=epsilon)
    return dX, dScale, dB


def _may_be(sizes: Sequence[int], shape: Shape) -> bool:
    """True if a tensor of this shape may have these sizes."""
    return len(shape) == len(sizes) and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(shape, sizes, strict=True)
    )
