"""The element types in which a formula is computed: 16-bit floats are widened."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from refgrad.builder.op import Emitter
from refgrad.protos.types import SIXTEEN_BIT, largest


def as_scalar(op: Emitter, value: str, kind: int) -> str:
    """The one element of `value` as a scalar of type `kind`."""
    return op.as_type(op.Reshape(value, np.zeros(0, np.int64)), kind)


def wide_type(op: Emitter, value: str) -> int:
    """The element type of `value`, but float for 16-bit floats."""
    kind = op.type(value)
    return int(TensorProto.FLOAT) if kind in SIXTEEN_BIT else kind


def widened(op: Emitter, *values: str) -> list[str]:
    """The values, 16-bit floats as float."""
    return [op.as_type(value, wide_type(op, value)) for value in values]


def of_shape(op: Emitter, like: str, kind: int, *values: str) -> list[str]:
    """Values of the shape of `like` as elements of type `kind`; what is known of that shape is known of them."""
    shape, made = op.shape(like), [op.as_type(value, kind) for value in values]
    if shape is not None:
        for value in made:
            op.assume(value, shape)
    return made


def widest(op: Emitter, *values: str) -> int:
    """The element type in which values of several float types are computed together."""
    order = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)
    return max((op.type(value) for value in values), key=order.index)


def in_range(op: Emitter, value: str) -> str:
    """The value, and where it has overflowed the largest finite number of its type."""
    most = largest(helper.tensor_dtype_to_np_dtype(op.type(value)))
    return str(op.Clip(value, -most, most))
