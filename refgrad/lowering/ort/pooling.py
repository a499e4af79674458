"""ONNX Runtime's kernels for poolings, each with the condition under which it is right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from refgrad.builder.op import Emitter
from refgrad.formulas.windows import make_windows, spatial
from refgrad.lowering.ort.kernels import WIDE
from refgrad.lowering.ort.windows import SAME, known_pads
from refgrad.tables.registry import lowering


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
    if auto_pad in SAME:
        known = known_pads(op, X, dY, kernel_shape, auto_pad, attributes)
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
    if op.type(dY) not in WIDE or 0 in (shape or ()):
        return None
    if size is None:
        one = op.const(np.ones((), np.int64))
        count = op.Max(op.Div(op.Size(X), op.Max(op.Size(Y), one)), one)
    else:
        count = op.const(np.array([math.prod(size)], tensor_dtype_to_np_dtype(op.type(dY))))
    scaled = op.com_microsoft("Scale", dY, count, scale_down=1)
    return op.Expand(scaled, op.measure(X))
