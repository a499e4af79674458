"""ONNX Runtime's kernels for broadcasting and arithmetic, each with the condition under which it is right."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.lowering.onnx.arithmetic import summed_axes
from refgrad.protos.types import is_unnamed
from refgrad.tables.registry import lowering


@lowering("BroadcastGradient", dialect="ort")
def broadcast_gradient(op: Emitter, dY: str, X: str, operands: tuple[str, ...]) -> str | None:
    """If the sizes are known, the axes are constants. If not, BroadcastGradientArgs finds them.

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
    return summed_at_run_time(op, dY, X, operands)


def summed_at_run_time(op: Emitter, dY: str, X: str, operands: tuple[str, ...]) -> str:
    """dY summed over the axes that BroadcastGradientArgs finds in the shapes of the two operands, of which X is one."""
    sizes, shapes = [op.measure(name) for name in operands], [op.shape(name) for name in operands]
    pair = op.com_microsoft("BroadcastGradientArgs", *sizes, outputs=2)
    mine = operands.index(X)
    own, other = shapes[mine], shapes[1 - mine]
    same_rank = own is not None and other is not None and len(own) >= len(other)
    full = same_rank or all(isinstance(dim, int) and dim for dim in own or (None,))
    summed = op.ReduceSum(dY, pair[mine], keepdims=1, noop_with_empty_axes=1)
    return op.Reshape(summed, sizes[mine], allowzero=None if full else 1)


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
