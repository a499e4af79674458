"""What "straight-through" and "clipped" mean, without any rule: the model with rounding replaced by adding a constant.

At the point of interest rounding adds δ to a value; the surrogate adds the same δ to every value nearby, so that it is
differentiable and computes the same there. Quantised values are float64 arrays. Everything else is left to the interpreter,
node by node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from checking import widened
from onnx import NodeProto, helper, numpy_helper

from refgrad.backends import get_backend
from refgrad.backends.base import Prepared

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_WIDE = ("int64", "int32", "bool", *_FLOATS)


class Surrogate:
    """A function of float64 arrays by name, for the neighbourhood of `feeds`."""

    def __init__(self, model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], quantization: str) -> None:
        self.model, self.clipped = model, quantization == "clipped"
        self.opsets = list(model.opset_import)
        self.constants = {t.name: _wide(numpy_helper.to_array(t)) for t in model.graph.initializer}
        self.truth = get_backend("numpy").prepare(model, precision="float64").run(widened(feeds), trace=True)
        self.added: dict[str, np.ndarray] = {}
        self.prepared: dict[Any, Prepared] = {}
        self(feeds)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        values: dict[str, Any] = {"": None} | self.constants | {n: _wide(v) for n, v in feeds.items()}
        for node in self.model.graph.node:
            results = self._run(node, [values[name] for name in node.input])
            values.update(zip(node.output, results, strict=False))
        return {value.name: values[value.name] for value in self.model.graph.output}

    def _run(self, node: NodeProto, inputs: list[Any]) -> Sequence[np.ndarray]:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        axis, block = attributes.get("axis", 1), attributes.get("block_size", 0)
        window = {k: v for k, v in attributes.items() if k not in ("axis", "block_size")}
        given = [*inputs, None, None, None, None]
        match node.op_type:
            case "QuantizeLinear":
                x, scale, zero = given[:3]
                ratio = x / _laid(scale, x, axis, block) + _laid(zero, x, axis, block)
                return [self._rounded(node.output[0], ratio)]
            case "DynamicQuantizeLinear":
                [x] = inputs
                scale = (max(x.max(), 0) - min(x.min(), 0)) / 255
                zero = self.truth[node.output[2]].astype(np.float64)
                return [self._rounded(node.output[0], x / scale + zero), np.asarray(scale), zero]
            case "DequantizeLinear":
                x, scale, zero = given[:3]
                return [(x - _laid(zero, x, axis, block)) * _laid(scale, x, axis, block)]
            case "QLinearConv":
                x, sx, zx, w, sw, zw, sy, zy, bias = given[:9]
                whole = [(x - zx) * sx, (w - _laid(zw, w, 0)) * _laid(sw, w, 0)]
                if bias is not None:
                    whole.append(bias * sx * sw)
                [y] = self._node("Conv", whole, ["y"], window)
                return [self._rounded(node.output[0], y / sy + zy)]
            case "QLinearMatMul":
                a, sa, za, b, sb, zb, sy, zy = given[:8]
                y = ((a - _rows(za)) * _rows(sa)) @ ((b - zb) * sb)
                return [self._rounded(node.output[0], y / sy + zy)]
            case "MatMulInteger":
                a, b, za, zb = given[:4]
                return [(a - _rows(_laid(za, a, 0))) @ (b - (0.0 if zb is None else zb))]
            case "ConvInteger":
                x, w, zx, zw = given[:4]
                return self._node("Conv", [x - _laid(zx, x, 0), w - _laid(zw, w, 0)], ["y"], window)
            case "Cast" | "CastLike":
                target = self.truth.get(node.output[0])
                small = target is not None and target.dtype.name not in _WIDE and target.dtype.name.startswith("float")
                return [self._rounded(node.output[0], inputs[0]) if small else inputs[0]]
        return self._node(node.op_type, inputs, list(node.output), attributes)

    def _rounded(self, name: str, value: np.ndarray) -> np.ndarray:
        truth = self.truth[name]
        if self.clipped:
            info = (ml_dtypes.iinfo if "int" in truth.dtype.name else ml_dtypes.finfo)(truth.dtype)
            value = np.clip(value, float(info.min), float(info.max))
        return value + self.added.setdefault(name, truth.astype(np.float64) - value)

    def _node(
        self, op_type: str, inputs: Sequence[Any], outputs: list[str], attributes: Mapping[str, Any]
    ) -> list[np.ndarray]:
        schema = onnx.defs.get_schema(op_type)
        kinds = [schema.inputs[min(k, len(schema.inputs) - 1)].type_str for k in range(len(inputs))]
        wide = {k for k, v in zip(kinds, inputs, strict=True) if v is not None and v.dtype == np.float64}
        names = [f"i{k}" if v is not None else "" for k, v in enumerate(inputs)]
        feeds = {
            n: np.asarray(v, np.float64) if k in wide else v for n, v, k in zip(names, inputs, kinds, strict=True) if n
        }
        types = {n: (helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in feeds.items()}
        key = op_type, *names, *outputs, *types.items(), repr(attributes)
        if key not in self.prepared:
            graph = helper.make_graph(
                [helper.make_node(op_type, names, outputs, **attributes)],
                "node",
                [helper.make_tensor_value_info(n, *kind) for n, kind in types.items()],
                [helper.make_value_info(n, onnx.TypeProto()) for n in outputs],
            )
            model = helper.make_model(graph, opset_imports=self.opsets, ir_version=10)
            self.prepared[key] = get_backend("numpy").prepare(onnx.shape_inference.infer_shapes(model))
        got = self.prepared[key].run(feeds)
        return [got[name] for name in outputs]


def _wide(value: np.ndarray) -> np.ndarray:
    return value if value.dtype.name in ("int64", "int32", "bool", "float64") else value.astype(np.float64)


def _laid(parameter: np.ndarray | None, x: np.ndarray, axis: int, block_size: int = 0) -> Any:
    if parameter is None or parameter.size == 1:
        return 0.0 if parameter is None else parameter.reshape(())
    if block_size:
        return np.repeat(parameter, block_size, axis).take(range(x.shape[axis]), axis)
    return parameter.reshape([-1 if k == axis % x.ndim else 1 for k in range(x.ndim)])


def _rows(parameter: Any) -> Any:
    return parameter.reshape(-1, 1) if np.ndim(parameter) == 1 else parameter
