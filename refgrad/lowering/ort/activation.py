"""ONNX Runtime's kernels for activations, each with the condition under which it is right."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.lowering.ort.kernels import NARROW, SINGLE
from refgrad.tables.registry import lowering


@lowering("ReluGrad", dialect="ort")
def relu_grad(op: Emitter, dY: str, Y: str) -> str | None:
    return op.com_microsoft("ReluGrad", dY, Y) if op.type(dY) in NARROW else None


@lowering("LeakyReluGrad", dialect="ort")
def leaky_relu_grad(op: Emitter, dY: str, X: str, alpha: float) -> str | None:
    """The kernel only asks for a sign: given X instead of Y, it is right for a negative alpha too."""
    return op.com_microsoft("LeakyReluGrad", dY, X, alpha=alpha) if op.type(dY) in NARROW else None


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
        if op.type(dY) in SINGLE and size is not None and 0 not in size:
            return op.com_microsoft("BiasFastGeluGrad_dX" if approximate == "tanh" else "BiasGeluGrad_dX", dY, X, B)
        X = op.Add(X, B)
    if approximate == "tanh":
        return op.com_microsoft("FastGeluGrad", dY, X)
    return op.com_microsoft("GeluGrad", dY, X) if op.type(dY) in NARROW else None


@lowering("QuickGeluGrad", dialect="ort")
def quick_gelu_grad(op: Emitter, dY: str, X: str, alpha: float) -> str | None:
    return op.com_microsoft("QuickGeluGrad", dY, X, alpha=alpha) if op.type(dY) in SINGLE else None


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
    return op.type(dY) in NARROW and (last or (static is not None and 0 not in static))


@lowering("DropoutGrad", dialect="ort")
def dropout_grad(
    op: Emitter, dY: str, mask: str, ratio: str | None, training_mode: str | None, seed: int | None = None
) -> str | None:
    """The kernel does not look at training_mode: it scales in inference too."""
    training = op.constant(training_mode)
    if training is None or not training.all():
        return None
    return op.com_microsoft("DropoutGrad", dY, mask, ratio, training_mode, seed=seed)
