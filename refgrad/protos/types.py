"""The types of values: tensors, and the sequences and optionals that hold them."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np
from onnx import TensorProto, TensorShapeProto, TypeProto, ValueInfoProto, helper

SIXTEEN_BIT = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FLOATS = frozenset((*SIXTEEN_BIT, TensorProto.FLOAT, TensorProto.DOUBLE))
KNOWN = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
FLOAT_DTYPES = frozenset(map(helper.tensor_dtype_to_np_dtype, FLOATS))
_FORMULA = re.compile(r"(?=.*[^\W\d])(?=.*[-+*/(])[\w\s.,()*/%^+-]+")  # such as "2*N + 1", "floor(N/2)"
UNNAMED = "unk__"  # how shape inference names a dimension that it knows nothing of
SIZE_OF = (
    "refgrad_size_"  # begins the name that a body gives to a size without a name, which no dimension of a model has
)
Dim = int | str | None
Shape = tuple[Dim, ...]
Type = tuple[int, int | None]  # an element type, 0 where it is unknown, and a rank


_SIZE = 64  # counts for a dimension that is not known


def smallest_normal(kind: np.dtype) -> float:
    """The smallest normal number of a float type. Its reciprocal is finite."""
    return float(ml_dtypes.finfo(kind).smallest_normal)  # type: ignore[no-untyped-call]


def epsilon(kind: np.dtype) -> float:
    """The distance of 1 to the next number of a float type."""
    return float(ml_dtypes.finfo(kind).eps)  # type: ignore[no-untyped-call]


def largest(kind: np.dtype) -> float:
    """The largest finite number of a float type."""
    return float(ml_dtypes.finfo(kind).max)  # type: ignore[no-untyped-call]


def nbytes(kind: int, shape: Shape | None) -> int:
    """About how many bytes a tensor has: an unknown dimension counts as 64, and an unknown rank as two of them."""
    size = math.prod(dim if isinstance(dim, int) else _SIZE for dim in ((None, None) if shape is None else shape))
    return size * helper.tensor_dtype_to_np_dtype(kind).itemsize


def is_unnamed(dim: Dim) -> bool:
    """True if a dimension has no size and no name of the model: at most it is known to equal others."""
    return dim is None or (isinstance(dim, str) and dim.startswith(UNNAMED))


def is_container(kind: TypeProto) -> bool:
    """True if `kind` is the type of a sequence or of an optional."""
    return kind.HasField("sequence_type") or kind.HasField("optional_type")


def unwrapped(kind: TypeProto) -> TypeProto:
    """The type of the value in an optional; any other type as it is."""
    return unwrapped(kind.optional_type.elem_type) if kind.HasField("optional_type") else kind


def adjoint_of(kind: TypeProto) -> TypeProto:
    """The type of the cotangent of a value. The cotangent of an optional tensor, which may be empty, has a known rank alone."""
    if not kind.HasField("optional_type"):
        return kind
    elements, shape = type_of(ValueInfoProto(type=unwrapped(kind)))
    if not elements:
        return unname(unwrapped(kind))
    return helper.make_tensor_type_proto(elements, None if shape is None else [None] * len(shape))


def held_by(kind: TypeProto) -> TypeProto:
    """The type of the tensors in a container; any other type as it is."""
    kind = unwrapped(kind)
    return held_by(kind.sequence_type.elem_type) if kind.HasField("sequence_type") else kind


def element_type(kind: TypeProto) -> int:
    """The element type of a tensor, or of the tensors in a container; 0 where it is not declared."""
    return int(held_by(kind).tensor_type.elem_type)


def unname(kind: TypeProto) -> TypeProto:
    """The type without the names of its dimensions."""
    plain = TypeProto()
    plain.CopyFrom(kind)
    for dim in held_by(plain).tensor_type.shape.dim:
        dim.ClearField("dim_param")
    return plain


def type_of(value: ValueInfoProto) -> tuple[int, Shape | None]:
    """The element type, 0 where it is unknown, and the shape, None where the rank is unknown."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, tuple([dimension(dim) for dim in tensor.shape.dim])


def dimension(dim: TensorShapeProto.Dimension) -> Dim:
    """The size or the name of a dimension; None where it is unknown.

    A size below 0 is unknown: ONNX Runtime reads it so. So is a text such as "?", which some exporters write on every axis that
    they do not know: only a name, or a formula of names, promises that equal texts are equal sizes.
    """
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    text = dim.dim_param
    return text if text.isidentifier() or _FORMULA.fullmatch(text) else None


def type_text(kind: TypeProto) -> str:
    """A tensor's type in words: "float[2, N]", with ? for a size that is not known."""
    elements, shape = type_of(ValueInfoProto(type=kind))
    name = str(helper.tensor_dtype_to_string(elements)).removeprefix("TensorProto.").lower() if elements else "tensor"
    return name if shape is None else f"{name}[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"
