"""Small values that follow from shapes and constants: what models compute shapes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from refgrad.protos.external import array_of

Shapes = Sequence[tuple[int, ...] | None]
Values = Sequence[np.ndarray | None]


def folded(node: NodeProto, attributes: Mapping[str, Any], shapes: Shapes, values: Values) -> np.ndarray | None:
    """The value of a node's only output, None where it is not known. It is small if its inputs are.

    :param shapes: and `values`: the shapes and values of the inputs, None where they are not known.
    """
    if node.op_type == "Constant":
        return _constant(node)
    if node.op_type in ("Shape", "Size"):
        shape = shapes[0]
        if shape is None:
            return None
        if node.op_type == "Size":
            return np.array(int(np.prod(shape)), np.int64)
        return np.array(shape[attributes.get("start", 0) : attributes.get("end")], np.int64)
    make = _VALUES.get(node.op_type)
    if make is None or any(name and value is None for name, value in zip(node.input, values, strict=True)):
        return None
    try:
        return np.asarray(make(attributes, *values))
    except (LookupError, ValueError, TypeError, ZeroDivisionError, OverflowError, MemoryError):
        return None  # the run reports the fault of the node


def _constant(node: NodeProto) -> np.ndarray | None:
    attribute = node.attribute[0] if node.attribute else None
    if attribute is None:
        return None
    if attribute.name == "value":
        return array_of(attribute.t) if np.prod(attribute.t.dims) <= 2**16 else None
    kind = {"f": np.float32, "i": np.int64}.get(attribute.name.removeprefix("value_")[:1])
    if kind is None or not attribute.name.startswith("value_"):
        return None
    return np.array(helper.get_attribute_value(attribute), kind)


def _axes(attributes: Mapping[str, Any], given: np.ndarray | None) -> tuple[int, ...] | None:
    axes = attributes.get("axes") if given is None else given.tolist()
    return None if axes is None else tuple(axes)


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(attributes: Mapping[str, Any], x: np.ndarray, axes: np.ndarray | None = None) -> Any:
        return function(x, axis=_axes(attributes, axes), keepdims=bool(attributes.get("keepdims", 1))).astype(x.dtype)

    return reduce


def _slice(attributes: Mapping[str, Any], x: np.ndarray, *given: np.ndarray | None) -> np.ndarray:
    starts, ends, axes, steps = (*given, None, None, None, None)[:4]
    if starts is None or ends is None:
        starts, ends = np.array(attributes["starts"]), np.array(attributes["ends"])
        axes = np.array(attributes["axes"]) if "axes" in attributes else None
    over = range(starts.size) if axes is None else axes.tolist()
    by = np.ones(starts.size, np.int64) if steps is None else steps
    at = [slice(None)] * x.ndim
    for axis, start, end, step in zip(over, starts.tolist(), ends.tolist(), by.tolist(), strict=True):
        at[axis] = slice(max(start, -x.shape[axis]), end, step)
    return x[tuple(at)]


def _expanded(attributes: Mapping[str, Any], x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    return np.expand_dims(x, _axes(attributes, axes) or ())


def _reshaped(attributes: Mapping[str, Any], x: np.ndarray, shape: np.ndarray) -> np.ndarray:
    dims = [x.shape[k] if n == 0 and not attributes.get("allowzero") else n for k, n in enumerate(shape.tolist())]
    return x.reshape(dims)


def _div(attributes: Mapping[str, Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return np.asarray(a / b, a.dtype)
    if not b.all():
        raise ZeroDivisionError
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), a.dtype)


def _range(attributes: Mapping[str, Any], start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> np.ndarray:
    if abs((limit.item() - start.item()) / delta.item()) > 2**16:
        raise OverflowError
    return np.arange(start.item(), limit.item(), delta.item()).astype(start.dtype)


def _filled(attributes: Mapping[str, Any], shape: np.ndarray) -> np.ndarray:
    if np.prod(shape) > 2**16:
        raise OverflowError
    value = attributes.get("value")
    fill = np.float32(0) if value is None else array_of(value).reshape(())
    return np.full(tuple(shape.tolist()), fill, np.asarray(fill).dtype)


def _squeezed(attributes: Mapping[str, Any], x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    return np.squeeze(x, _axes(attributes, axes))


def _widened(attributes: Mapping[str, Any], x: np.ndarray, shape: np.ndarray) -> np.ndarray:
    to = np.broadcast_shapes(x.shape, tuple(shape.tolist()))
    if np.prod(to) > 2**16:
        raise OverflowError
    return np.broadcast_to(x, to)


_BINARY: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Mod": np.mod,
    "Max": np.maximum,
    "Min": np.minimum,
}
_VALUES: dict[str, Callable[..., Any]] = {
    **{name: lambda attributes, a, b, f=function: f(a, b) for name, function in _BINARY.items()},
    "Identity": lambda attributes, x: x,
    "Not": lambda attributes, x: ~x,
    "Neg": lambda attributes, x: -x,
    "Abs": lambda attributes, x: abs(x),
    "Floor": lambda attributes, x: np.floor(x),
    "Ceil": lambda attributes, x: np.ceil(x),
    "Sqrt": lambda attributes, x: np.sqrt(x),
    "Cast": lambda attributes, x: x.astype(helper.tensor_dtype_to_np_dtype(attributes["to"])),
    "Concat": lambda attributes, *xs: np.concatenate(xs, attributes["axis"]),
    "Gather": lambda attributes, x, at: np.take(x, at, attributes.get("axis", 0)),
    "Where": lambda attributes, c, x, y: np.where(c, x, y),
    "Transpose": lambda attributes, x: np.transpose(x, attributes.get("perm")),
    "Div": _div,
    "Range": _range,
    "ConstantOfShape": _filled,
    "Expand": _widened,
    "Reshape": _reshaped,
    "Slice": _slice,
    "Squeeze": _squeezed,
    "Unsqueeze": _expanded,
    "ReduceSum": _reduced(np.sum),
    "ReduceProd": _reduced(np.prod),
    "ReduceMax": _reduced(np.max),
    "ReduceMin": _reduced(np.min),
}
