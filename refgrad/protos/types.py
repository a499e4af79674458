"""The types of values: tensors, and the sequences and optionals that hold them."""

from __future__ import annotations

from onnx import TensorProto, TensorShapeProto, TypeProto, ValueInfoProto, helper

SIXTEEN_BIT = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FLOATS = frozenset((*SIXTEEN_BIT, TensorProto.FLOAT, TensorProto.DOUBLE))
UNNAMED = "unk__"  # how shape inference names a dimension that it knows nothing of
Dim = int | str | None
Shape = tuple[Dim, ...]
Type = tuple[int, int | None]  # an element type, 0 where it is unknown, and a rank


def is_unnamed(dim: Dim) -> bool:
    """Whether nothing is known of a dimension but, at most, that it equals others."""
    return dim is None or (isinstance(dim, str) and dim.startswith(UNNAMED))


def is_container(kind: TypeProto) -> bool:
    """Whether it is the type of a sequence or of an optional."""
    return kind.HasField("sequence_type") or kind.HasField("optional_type")


def opened(kind: TypeProto) -> TypeProto:
    """The type of what an optional holds; of anything else its own."""
    return opened(kind.optional_type.elem_type) if kind.HasField("optional_type") else kind


def adjoint_of(kind: TypeProto) -> TypeProto:
    """The type of the adjoint of a value: of an optional tensor, which may be empty, the rank alone is known."""
    if not kind.HasField("optional_type"):
        return kind
    elements, shape = type_of(ValueInfoProto(type=opened(kind)))
    if not elements:
        return unname(opened(kind))
    return helper.make_tensor_type_proto(elements, None if shape is None else [None] * len(shape))


def held_by(kind: TypeProto) -> TypeProto:
    """The type of the tensors that a container holds; of anything else its own."""
    kind = opened(kind)
    return held_by(kind.sequence_type.elem_type) if kind.HasField("sequence_type") else kind


def element_type(kind: TypeProto) -> int:
    """The element type of a tensor, or of the tensors that a container holds; 0 where there are none."""
    return int(held_by(kind).tensor_type.elem_type)


def unname(kind: TypeProto) -> TypeProto:
    """A type without names of sizes."""
    plain = TypeProto()
    plain.CopyFrom(kind)
    for dim in held_by(plain).tensor_type.shape.dim:
        dim.ClearField("dim_param")
    return plain


def type_of(value: ValueInfoProto) -> tuple[int, Shape | None]:
    """The element type, 0 where there is none, and the shape, None where not even the rank is known."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, tuple([dimension(dim) for dim in tensor.shape.dim])


def dimension(dim: TensorShapeProto.Dimension) -> Dim:
    """Below 0 it is unknown: so ONNX Runtime reads it, and so some exporters write it."""
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    return dim.dim_param or None
