"""What "straight-through" and "clipped" mean, without any rule: the model with rounding replaced by adding a constant.

At the point of interest rounding adds δ to a value; the surrogate adds the same δ to every value nearby, so that it is
differentiable and computes the same there. Quantised values are float64 arrays. Everything else is left to the interpreter,
node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from checking import widened
from onnx import NodeProto, helper, numpy_helper

from refgrad.backends import get_backend
from refgrad.backends.base import Prepared
from refgrad.microsoft.kernels.quantization import in_order
from refgrad.protos.domains import MICROSOFT

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
        if node.domain == MICROSOFT and node.op_type in _ON_REALS:
            return self._on_reals(node, inputs, attributes)
        if node.domain == MICROSOFT and node.op_type in _PRODUCTS:
            y, *scale = _PRODUCTS[node.op_type](self, node.output[0], given, attributes)
            return [self._rounded(node.output[0], y / scale[0] + scale[1])] if len(scale) == 2 else [y, *scale]
        match node.op_type:
            case "DynamicQuantizeLSTM":
                return _dynamic_quantize_lstm(self, node.output[0], given, attributes)
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

    def _on_reals(self, node: NodeProto, inputs: list[Any], attributes: dict[str, Any]) -> list[np.ndarray]:
        starts, target, function = _ON_REALS[node.op_type]
        inputs = [*inputs, None]
        starts = starts or tuple(range(2, len(inputs) - 1, 3))
        reals = [(inputs[k] - _laid(inputs[k + 2], inputs[k], 1)) * inputs[k + 1].reshape(()) for k in starts]
        scale, zero = inputs[target].reshape(()), _laid(inputs[target + 1], inputs[target], 1)
        return [self._rounded(node.output[0], function(self, reals, attributes, inputs) / scale + zero)]

    def dynamic(self, name: str, x: np.ndarray) -> np.ndarray:
        """What x is read as behind a DynamicQuantizeLinear that no output of the model shows."""
        scale = (max(x.max(), 0) - min(x.min(), 0)) / 255
        zero = self.added.setdefault(f"{name} zero", np.rint(-min(x.min(), 0) / scale))
        value = x / scale + zero
        if self.clipped:
            value = np.clip(value, 0, 255)
        here = np.clip(np.rint(x / scale) + zero, 0, 255)
        return (value + self.added.setdefault(name, here - value) - zero) * scale

    def through_int8(self, name: str, y: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
        """What y is read as behind a quantization to int8 that no output of the model shows; y without a scale."""
        if scale is None:
            return y
        value = y / scale
        here = np.clip(np.rint(value), -128, 127)
        if self.clipped:
            value = np.clip(value, -128, 127)
        return (value + self.added.setdefault(name, here - value)) * scale

    def _rounded(self, name: str, value: np.ndarray) -> np.ndarray:
        truth = self.truth[name]
        if self.clipped:
            info = (ml_dtypes.iinfo if "int" in truth.dtype.name else ml_dtypes.finfo)(truth.dtype)
            value = np.clip(value, float(info.min), float(info.max))
        return value + self.added.setdefault(name, truth.astype(np.float64) - value)

    def node(self, op_type: str, *inputs: Any, **attributes: Any) -> np.ndarray:
        """The result of an operator of ai.onnx."""
        return self._node(op_type, inputs, ["y"], attributes)[0]

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


def _softmax(x: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def _pooled(run: Surrogate, x: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    window = {k: v for k, v in attributes.items() if k != "channels_last"}
    if not attributes.get("channels_last"):
        return run.node("AveragePool", x, **window)
    return np.moveaxis(run.node("AveragePool", np.moveaxis(x, -1, 1), **window), 1, -1)


def _global(x: np.ndarray, channels_last: int) -> np.ndarray:
    return x.mean(tuple(range(1, x.ndim - 1)) if channels_last else tuple(range(2, x.ndim)), keepdims=True)


Function = Callable[["Surrogate", list[np.ndarray], dict[str, Any], list[Any]], np.ndarray]

# Operators of com.microsoft that read tensors with a scale and a zero point each and quantize what they compute of them:
# where these tensors are, where the scale of the result is, and what is computed.
_ON_REALS: dict[str, tuple[tuple[int, ...] | None, int, Function]] = {
    "QLinearAdd": ((0, 3), 6, lambda run, x, a, i: x[0] + x[1]),
    "QLinearMul": ((0, 3), 6, lambda run, x, a, i: x[0] * x[1]),
    "QLinearSigmoid": ((0,), 3, lambda run, x, a, i: 1 / (1 + np.exp(-x[0]))),
    "QLinearLeakyRelu": ((0,), 3, lambda run, x, a, i: np.where(x[0] < 0, a.get("alpha", 0.01), 1) * x[0]),
    "QLinearSoftmax": (
        (0,),
        3,
        lambda run, x, a, i: _softmax(
            x[0], a.get("axis", -1) if a["opset"] >= 13 else tuple(range(a.get("axis", -1) % x[0].ndim, x[0].ndim))
        ),
    ),
    "QLinearConcat": (None, 0, lambda run, x, a, i: np.concatenate(x, a["axis"])),
    "QLinearWhere": ((1, 4), 7, lambda run, x, a, i: np.where(i[0], x[0], x[1])),
    "QLinearAveragePool": ((0,), 3, lambda run, x, a, i: _pooled(run, x[0], a)),
    "QLinearGlobalAveragePool": ((0,), 3, lambda run, x, a, i: _global(x[0], a.get("channels_last", 0))),
    "QLinearReduceMean": ((0,), 3, lambda run, x, a, i: x[0].mean(tuple(a["axes"]), keepdims=bool(a["keepdims"]))),
}


def _or_zero(zero_point: Any) -> Any:
    return 0.0 if zero_point is None else zero_point


def _dynamic_quantize_matmul(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    a, b, scale, zero, bias = given[:5]
    return (run.dynamic(name, a) @ ((b - _or_zero(zero)) * scale) + _or_zero(bias),)


def _dynamic_quantize_lstm(
    run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]
) -> tuple[np.ndarray, ...]:
    """Sequence by sequence and step by step, with the zero points and what rounding adds for all sequences together"""
    x, w, r, bias, lengths, h0, c0, peepholes, *scales = given[:12]
    way = attributes.get("direction", b"forward").decode()
    names = attributes.get("activations", [b"Sigmoid", b"Tanh", b"Tanh"] * len(w))
    alphas, betas = (list(attributes.get(f"activation_{which}", ())) for which in ("alpha", "beta"))
    w, r = (
        ((q - zero.reshape(len(q), 1, -1)) * scale.reshape(len(q), 1, -1)).swapaxes(1, 2)
        for q, scale, zero in ((w, *scales[:2]), (r, *scales[2:]))
    )
    (time, batch, _), (count, _, hidden) = x.shape, r.shape
    lengths = np.full(batch, time) if lengths is None else lengths
    y = np.zeros((time, count, batch, hidden))
    h, c = (np.zeros((count, batch, hidden)) if v is None else v.copy() for v in (h0, c0))
    x = run.dynamic(f"{name} x", x[: lengths.max()])
    for d in range(count):
        own: dict[str, Any] = {"activations": [n.decode() for n in names[3 * d : 3 * d + 3]], "hidden_size": hidden}
        own |= {k: attributes[k] for k in ("clip", "input_forget") if k in attributes}
        for which, numbers in (("alpha", alphas), ("beta", betas)):
            due = [n for n in own["activations"] if n in _PARAMETERS[which]][: len(numbers)]
            if due:
                own[f"activation_{which}"] = [numbers.pop(0) for _ in due]
        backward = way == "reverse" or d == 1
        weights = [v if v is None else v[d : d + 1] for v in (w, r, bias, peepholes)]
        for k in range(len(x)):
            read = np.where((k <= lengths)[:, None], h[d], 0.0)
            before = run.dynamic(f"{name} {d} {k}", read) if read.any() else read
            for n in np.flatnonzero(k < lengths):
                t = lengths[n] - 1 - k if backward else k
                states = None, before[None, [n]], c[d][None, [n]]
                step = [x[t][None, [n]], *weights[:3], *states, weights[3]]
                _, after, cell = run._node("LSTM", step, ["Y", "Y_h", "Y_c"], own)
                h[d, n], c[d, n] = after[0, 0], cell[0, 0]
                y[t, d, n] = h[d, n]
    return y, h, c


# Which activations have such a parameter.
_PARAMETERS = {
    "alpha": ("Affine", "Elu", "HardSigmoid", "LeakyRelu", "ScaledTanh", "ThresholdedRelu"),
    "beta": ("Affine", "HardSigmoid", "ScaledTanh"),
}


def _matmul_integer_to_float(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    a, b, sa, sb, za, zb, bias = given[:7]
    return (((a - _or_zero(za)) * sa) @ ((b - _or_zero(zb)) * sb) + _or_zero(bias),)


def _qgemm(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    a, sa, za, b, sb, zb, c, sy, zy = given[:9]
    a = (a.T if attributes.get("transA") else a) - za
    b = (b.T if attributes.get("transB") else b) - zb
    y = (a @ b + _or_zero(c)) * attributes.get("alpha", 1.0) * sa * sb
    return (y,) if sy is None else (y, sy.reshape(()), zy)


def _qattention(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    x, w, bias, sx, sw, mask, zx, zw, past = given[:9]
    heads = attributes["num_heads"]
    projected = ((x - _or_zero(zx)) * sx) @ ((w - _or_zero(zw)) * sw) + bias
    batch, length, width = projected.shape
    q, k, v = projected.reshape(batch, length, 3, heads, width // heads // 3).transpose(2, 0, 3, 1, 4)
    if past is not None:
        k, v = np.concatenate([past[0], k], 2), np.concatenate([past[1], v], 2)
    scores = q @ k.swapaxes(2, 3) * attributes.get("scale", q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores + np.where(mask[:, None, None] > 0, 0, attributes.get("mask_filter_value", -10000.0))
    if attributes.get("unidirectional"):
        scores = np.where(np.tri(length, k.shape[2], k.shape[2] - length, bool), scores, -np.inf)
    return np.einsum("bhst,bhtd->bshd", _softmax(scores, -1), v).reshape(batch, length, -1), np.stack([k, v])


def _qlinear_conv(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    x, sx, zx, w, sw, zw, sy, zy, bias = given[:9]
    window = {k: v for k, v in attributes.items() if k != "channels_last"}
    last = attributes.get("channels_last", 0)
    reals = [(np.moveaxis(x, -1, 1) if last else x) * 1.0 - zx, w - _laid(zw, w, 0)]
    reals = [reals[0] * sx, reals[1] * _laid(sw, w, 0)]
    y = run.node("Conv", *reals, *([] if bias is None else [bias * sx * sw]), **window)
    return np.moveaxis(y, 1, -1) if last else y, sy, zy


def _qembed(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    ids, segments, words, positions, types, gamma, beta = given[:7]
    tables = (words, positions, types, gamma, beta)
    read = [None if q is None else (q - z) * s for q, s, z in zip(tables, given[8:13], given[13:18], strict=True)]
    total = read[0][ids] + read[1][: ids.shape[1]] + (0.0 if segments is None else read[2][segments])
    centre = total - total.mean(-1, keepdims=True)
    y = centre / np.sqrt((centre**2).mean(-1, keepdims=True) + attributes.get("epsilon", 1e-12)) * read[3] + read[4]
    return y, np.zeros(len(ids), np.int32)  # the second is nothing that is differentiated


def _matmul_integer16(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    return (given[0] @ given[1],)


def _mul_integer(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    a, za, b, zb = given[:4]
    return ((a - _or_zero(za)) * (b - _or_zero(zb)),)


def _reduce_sum_integer(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    return (given[0].sum(tuple(attributes["axes"]), keepdims=bool(attributes["keepdims"])),)


def _with_order(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    x = in_order(in_order(given[0], attributes["order_input"], back=True), attributes["order_output"])
    return (x * given[1],) if "to" in attributes else (x, given[1], 0.0)


def _qordered_matmul(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    a, sa, b, sb, sy, bias, c, sc = given[:8]
    y = (a * sa) @ (in_order(b, 0, back=True) * sb) + _or_zero(bias)
    return (y if c is None else y + c * sc), sy, 0.0


def _qordered_gelu(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    return run.node("Gelu", given[0] * given[1]), given[2], 0.0


def _qordered_normalization(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    x, sx, scale, bias, sy = given[:5]
    order = attributes.get("order_X", 1)
    x = in_order(x, order, back=True) * sx
    axes = tuple(range(attributes.get("axis", -1) % x.ndim, x.ndim))
    centre = x - x.mean(axes, keepdims=True)
    y = centre / np.sqrt((centre**2).mean(axes, keepdims=True) + attributes.get("epsilon", 1e-5)) * scale
    return in_order(y + _or_zero(bias), order), sy, 0.0


def _qordered_attention(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    x, heads, parts = given[0] * given[1], attributes["num_heads"], []
    for k, part in enumerate("QKV"):
        y = x @ (in_order(given[5 + k], 0, back=True) * given[8 + k]) + given[11 + k]
        y = run.through_int8(f"{name} {part}", y, given[2 + k])
        parts.append(y.reshape(*y.shape[:2], heads, -1).swapaxes(1, 2))
    q, k_, v = parts
    scores = run.through_int8(f"{name} scores", q @ k_.swapaxes(2, 3), given[14]) / q.shape[-1] ** 0.5
    if len(given) > 17 and given[17] is not None:
        scores = scores + np.where(given[17][:, None, None] > 0, 0, -10000.0)
    if attributes.get("unidirectional"):
        scores = np.where(np.tri(*scores.shape[2:], dtype=bool), scores, -np.inf)
    shares = run.through_int8(f"{name} shares", _softmax(scores, -1), given[15])
    return np.einsum("bhst,bhtd->bshd", shares, v).reshape(*x.shape[:2], -1), given[16], 0.0


def _qordered_longformer(run: Surrogate, name: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    x, heads, mixed, mask, seeing = given[0] * given[1], attributes["num_heads"], [], given[7], given[12] != 0
    away = np.abs(np.subtract.outer(*[np.arange(x.shape[1])] * 2)) > attributes["window"]
    for k, unseen in ((2, away & ~seeing[:, None, None]), (8, np.zeros_like(away))):
        gemm = given[6] if k == 2 else given[11]
        y = x @ (in_order(given[k], 0, back=True) * given[k + 1]) + given[4 if k == 2 else 10]
        y = run.through_int8(f"{name} {k}", y, gemm)
        parts = [v.reshape(*v.shape[:2], heads, -1).swapaxes(1, 2) for v in np.split(y, 3, -1)]
        scores = parts[0] @ parts[1].swapaxes(2, 3) / parts[0].shape[-1] ** 0.5 + mask[:, None, None]
        mixed.append(
            np.einsum("bhst,bhtd->bshd", _softmax(np.where(unseen, -1e30, scores), -1), parts[2]).reshape(x.shape)
        )
    y = np.where(seeing[..., None], mixed[1], mixed[0])
    return np.where(mask[..., None] < 0, 0.0, y), given[13], 0.0


# Others: what they compute; the scale and the zero point follow where it is quantized.
_PRODUCTS: dict[str, Callable[[Surrogate, str, list[Any], dict[str, Any]], Any]] = {
    "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    "MatMulIntegerToFloat": _matmul_integer_to_float,
    "QGemm": _qgemm,
    "QAttention": _qattention,
    "QLinearConv": _qlinear_conv,
    "QEmbedLayerNormalization": _qembed,
    "MatMulInteger16": _matmul_integer16,
    "MulInteger": _mul_integer,
    "ReduceSumInteger": _reduce_sum_integer,
    "QuantizeWithOrder": _with_order,
    "DequantizeWithOrder": _with_order,
    "QOrderedAttention": _qordered_attention,
    "QOrderedLongformerAttention": _qordered_longformer,
    "QOrderedMatMul": _qordered_matmul,
    "QOrderedGelu": _qordered_gelu,
    "QOrderedLayerNormalization": _qordered_normalization,
}
