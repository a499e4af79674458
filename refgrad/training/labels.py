"""Turn y into the label of a step, in its type and with its axes, classes as their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from refgrad import traits
from refgrad.errors import FeedError, choices
from refgrad.model.external import array_of
from refgrad.protos.domains import ML
from refgrad.protos.traverse import attribute_value
from refgrad.protos.types import FLOAT_DTYPES

_CLASSES = ("classlabels_ints", "classlabels_int64s", "classlabels_strings")


def labels_of(y: Any, value: ValueInfoProto, classes: Sequence[Any] | None = None) -> np.ndarray:
    """`y` in the type of an input and with its axes: [N] becomes [N, 1], and [N, 1] becomes [N]. See `StepModel.labels`."""
    tensor = value.type.tensor_type
    array = np.asarray(y)
    rank = len(tensor.shape.dim)
    if tensor.elem_type == TensorProto.INT64:
        array = positions(array, classes)
    elif kind_of(array.dtype) not in "biuf":
        raise FeedError(f"The label {value.name!r} has numbers, and y is an array of {type_name(array.dtype)}.")
    elif kind_of(array.dtype) == "f" and not np.isfinite(array).all():
        raise FeedError(f"The label {value.name!r} has numbers that are not finite.")
    if array.ndim == rank - 1:
        array = array[..., None]
    elif array.ndim == rank + 1 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim != rank:
        raise FeedError(f"The label {value.name!r} has {rank} axes, and y has the shape {array.shape}.")
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    due = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim[1:]]
    if any(n not in (-1, given) for n, given in zip(due, array.shape[1:], strict=True)):
        raise FeedError(f"The label {value.name!r} has the shape {['N', *due]}, and y has {list(array.shape)}.")
    return np.ascontiguousarray(narrowed(array, dtype, f"The label {value.name!r}"))


def narrowed(array: np.ndarray, dtype: np.dtype, what: str) -> np.ndarray:
    """`array` in another type.

    :param what: the name of the array in an error.
    :raises FeedError: a number is too large for a float type.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(dtype)
    if kind_of(array.dtype) == "f" and kind_of(cast.dtype) == "f":
        lost = np.isfinite(array) & ~np.isfinite(cast)
        if lost.any():
            raise FeedError(f"{what} has {first_of(lost, array)}, which is too large for {dtype}.")
    return cast


def kind_of(dtype: np.dtype) -> str:
    """The `kind` of a type; "f" for bfloat16 too, which NumPy does not know."""
    return "f" if dtype in FLOAT_DTYPES else dtype.kind


def type_name(dtype: np.dtype) -> str:
    """The name of a type in a message: "text" for text of any length."""
    return "text" if dtype.kind in "US" else str(dtype)


def first_of(where: np.ndarray, array: np.ndarray) -> str:
    """The first element of `array` that `where` marks, and its place."""
    place = tuple(int(k) for k in np.argwhere(where)[0])
    return f"{array[place]} at {list(place)}"


def positions(array: np.ndarray, classes: Sequence[Any] | None) -> np.ndarray:
    """The positions of the elements in `classes`, or the elements if that is None.

    Floats that are integers, and booleans, count as integers.

    :raises FeedError: a number is no integer, or no class.
    """
    if kind_of(array.dtype) in "fb":
        whole = array.astype(np.int64)
        if not np.array_equal(whole, array):
            raise FeedError(
                "The label has classes, and y has numbers that are not integers. A regression has such labels."
            )
        array = whole
    if classes is None:
        if array.dtype.kind not in "iu":
            raise FeedError(
                f"The label is the position of a class, but y is an array of {type_name(array.dtype)}. Give the classes too."
            )
        return array
    known = np.asarray(classes)
    if known.dtype.kind in "US":
        array = array.astype(object)
    place = {one: k for k, one in enumerate(known.tolist())}
    flat = array.ravel().tolist()
    if unknown := next((one for one in flat if one not in place), None) if flat else None:
        raise FeedError(f"The label {unknown!r} is not one of the model's classes: {choices(place)}.")
    if 0 not in place and 0 in flat:
        raise FeedError(f"The label 0 is not one of the model's classes: {choices(place)}.")
    return np.array([place[one] for one in flat], np.int64).reshape(array.shape)


def classes_of(model: ModelProto) -> list[Any] | None:
    """The classes of a classifier in the order of its scores, or None where the model does not say.

    They stand in attributes of ai.onnx.ml, or in an initializer of which the position of the largest score takes one.
    """
    for node in reversed(model.graph.node):
        for attribute in node.attribute:
            if node.domain == ML and attribute.name in _CLASSES and (value := attribute_value(attribute)):
                return [one.decode() if isinstance(one, bytes) else one for one in value]
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in reversed(model.graph.node):
        if node.op_type in ("ArrayFeatureExtractor", "Gather") and node.input[0] in held:
            maker = makers.get(node.input[1])
            while maker is not None and maker.op_type in traits.RESHAPES | traits.CASTS:
                maker = makers.get(maker.input[0])
            if maker is not None and maker.op_type in ("ArgMax", "Greater"):
                values = array_of(held[node.input[0]]).ravel().tolist()
                return [one.decode() if isinstance(one, bytes) else one for one in values]
    return None
