"""Tensors and their shapes, as ONNX Runtime's builder writes them."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.lowering.onnx.shape import same_or_known, tile_grad_at_run_time
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.types import Shape, is_unnamed
from refgrad.tables.registry import lowering


@lowering("Alias", dialect="ort")
def alias(op: Emitter, X: str) -> str:
    """ONNX Runtime's builder names the cotangent of every tensor, and every contribution to a sum."""
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
    """ONNX Runtime's builder writes sizes that are known beforehand in the gradient of Reshape alone."""
    given = op.shape(dY)
    sizes = None if given is None or any(map(is_unnamed, given)) else same_or_known(op, dY, X)
    return op.reshape_like(dY, X) if sizes is None else op.Reshape(dY, sizes)


@lowering("Length", dialect="ort")
def length(op: Emitter, X: str, axis: int) -> str:
    return op.Gather(op.measure(X), [axis])


@lowering("TileGrad", dialect="ort")
def tile_grad(op: Emitter, dY: str, X: str, repeats: str) -> str:
    """With Size, as ONNX Runtime's builder has it."""
    return tile_grad_at_run_time(op, dY, X, repeats, op.Size)


@lowering("PadGrad", dialect="ort")
def pad_grad(op: Emitter, dY: str, pads: str, axes: str | None) -> str:
    """ONNX Runtime's builder forgets the axes."""
    return op.Pad(dY, op.Neg(pads), None, axes)


@lowering("TriluGrad", dialect="ort")
def trilu_grad(op: Emitter, dY: str, k: str | None, upper: int) -> str:
    return op.com_microsoft("Trilu", dY, k, upper=upper)


@lowering("SplitTraining", dialect="ort")
def split_training(op: Emitter, dY: str, lengths: str, axis: int, count: int) -> tuple[str, ...]:
    """The kernel writes to every output, so all have names."""
    parts = op.emit("SplitTraining", MICROSOFT, (dY, lengths), count, {"axis": axis})
    return (parts,) if count == 1 else parts


def _keeps_zeros(given: Shape | None, wanted: Shape | None) -> bool:
    """True if every 0 in the wanted shape stands where a tensor of the given shape, as large, has a 0 too."""
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
