"""`precision="float64"`: a model of float16, bfloat16 or float32 run in double from end to end.

Nothing is rewritten beforehand: the plan asks here for every tensor it decodes, every node it binds and every value it
describes, so subgraphs and function bodies are covered and large weights exist once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from refgrad.backends.base import Value
from refgrad.backends.numpy.registry import Call, default_attributes, in_tuple
from refgrad.model.external import array_of
from refgrad.protos.metadata import CONSTANT

_NARROW_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_NARROW_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

# Attributes that hold a type of tensor; `to` of Cast, `dtype` of EyeLike and the random operators, and so on.
_TYPE_ATTRIBUTES = ("to", "dtype", "stash_type", "softmax_precision", "precision", "output_datatype", "output_dtype")


def _number_before(stored: np.ndarray, exact: str) -> float | None:
    """The number that was rounded to the elements of `stored`; None where that is not what the metadata says."""
    try:
        number = float(exact)
    except ValueError:
        return None
    with np.errstate(over="ignore"):
        return number if (np.array(number).astype(stored.dtype) == stored).all() else None


class Declared:
    """The types that the model declares: everything stays as it is."""

    widens = False

    def array(self, value: Any) -> Any:
        """Convert a constant or a result."""
        return value

    def tensor(self, tensor: onnx.TensorProto) -> Any:
        """Return the value of an initializer.

        :raises InvalidModelError: its type is unknown, or its data does not fit its shape, or lies in a file.
        """
        return self.array(array_of(tensor))

    def node(self, node: onnx.NodeProto, schema: onnx.defs.OpSchema | None) -> onnx.NodeProto:
        """Return the node to bind."""
        return node

    def value(self, value: Value) -> Value:
        """Describe an input or output."""
        return value

    def call(self, call: Call, node: onnx.NodeProto) -> Call:
        """Return what a bound node is called through."""
        return call


class Float64(Declared):
    """Every float16, bfloat16 and float32 becomes float64. Float8 stays: it is a quantisation, not a precision.

    A constant that a rule rounded to the model's type gets back the number before rounding: a gradient in double is exact
    to double.
    """

    widens = True

    def tensor(self, tensor: onnx.TensorProto) -> Any:
        """Return the value of an initializer, or the number that it was rounded from."""
        stored = array_of(tensor)
        exact = next((entry.value for entry in tensor.metadata_props if entry.key == CONSTANT), "")
        number = _number_before(stored, exact) if exact else None
        return self.array(stored) if number is None else np.full(stored.shape, number)

    def array(self, value: Any) -> Any:
        """Convert an array of a narrower float to double; sequences element by element."""
        if isinstance(value, list):
            return [self.array(item) for item in value]
        return value.astype(np.float64) if getattr(value, "dtype", None) in _NARROW_DTYPES else value

    def node(self, node: onnx.NodeProto, schema: onnx.defs.OpSchema | None) -> onnx.NodeProto:
        """Return a copy of `node` whose type attributes, given or by default, say DOUBLE; `node` itself if it has none."""
        given = {attribute.name: attribute for attribute in node.attribute}
        types = given if schema is None else default_attributes(schema) | given
        narrow = [name for name in _TYPE_ATTRIBUTES if name in types and types[name].i in _NARROW_TYPES]
        fills = node.op_type == "ConstantOfShape" and not node.domain
        if not narrow and not fills:
            return node
        wide = onnx.NodeProto()
        wide.CopyFrom(node)
        del wide.attribute[:]
        wide.attribute.extend(a for name, a in given.items() if name not in narrow and not (fills and name == "value"))
        wide.attribute.extend(onnx.helper.make_attribute(name, int(onnx.TensorProto.DOUBLE)) for name in narrow)
        if fills:
            value = array_of(given["value"].t) if "value" in given else np.zeros(1, np.float32)
            wide.attribute.append(
                onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(self.array(value), "value"))
            )
        return wide

    def value(self, value: Value) -> Value:
        """Declare `value` as float64 if it is a narrower float."""
        return replace(value, dtype=np.dtype(np.float64)) if value.dtype in _NARROW_DTYPES else value


class Rounded(Float64):
    """Float64 with every result rounded to `bits` significant bits: it shows what rounding alone does.

    Rounding is exact and monotone (Veltkamp 1968, x·(2ˢ+1) minus what it lost): equal values stay equal, and a number
    that the narrower type holds, such as a small integer, does not change. The kernels themselves add up in double.
    """

    tensor = Declared.tensor

    def __init__(self, bits: int) -> None:
        self._factor = 2.0 ** (np.finfo(np.float64).nmant + 1 - bits) + 1

    def call(self, call: Call, node: onnx.NodeProto) -> Call:
        """Round what `call` returns."""

        def rounded(*inputs: Any, **options: Any) -> tuple[Any, ...]:
            return tuple(map(self._round, in_tuple(call(*inputs, **options))))

        return rounded

    def _round(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._round(item) for item in value]
        if getattr(value, "dtype", None) != np.float64:
            return value
        scaled = value * self._factor
        high = scaled - (scaled - value)
        return np.where(np.isfinite(high), high, value)
