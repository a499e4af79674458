"""The gradients among the operators of ONNX Runtime's training: cases of them, and how they are run and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from refgrad.backends import get_backend
from refgrad.conformance.known.bugs.bug import TRAINING, VERSIONS, installed

MICROSOFT = "com.microsoft"
NUMPY = get_backend("numpy")
trains = pytest.mark.skipif(
    installed().get(TRAINING) != VERSIONS[TRAINING], reason=f"{TRAINING} {VERSIONS[TRAINING]} is not installed"
)

NO_KERNEL = "there is no CPU kernel"
FAULT = "a finding shows that it is wrong"  # conformance/known/bugs
STATISTICS = ("mean", "r")  # LayerNormalization has them in float32 whatever the rest is in


@dataclass(eq=False)
class Case:
    """A forward operator, its gradient operator and how the second reads the first.

    `wrt` maps differentiated inputs to shapes (or arrays), `other` holds the rest. `results` names the forward outputs.
    `reads` is what the gradient operator takes: "d_Y", a forward input or output, "shape" (of the first differentiated
    input), or None (left out). `ort` says why it is not compared with ONNX Runtime.
    """

    op: str
    wrt: dict[str, Any]
    grad: str
    reads: list[str | None]
    attrs: dict[str, Any] = field(default_factory=dict)
    grad_attrs: dict[str, Any] | None = None
    other: dict[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ("Y",)
    domain: str = ""
    grad_domain: str = MICROSOFT
    opset: int = 17
    grad_opset: int = 17
    ort: str | None = None
    wanted: tuple[bool, ...] | None = None

    def __str__(self) -> str:
        shapes = ["x".join(map(str, getattr(v, "shape", v))) or "scalar" for v in self.wrt.values()]
        attrs = self.attrs if self.grad_attrs is None else self.grad_attrs
        options = [f"{k}={v}" for k, v in attrs.items()] + [f"{k}:{np.shape(v)}" for k, v in self.other.items()]
        return "-".join((self.grad, *shapes, *options)).replace(" ", "")


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal(shape)


def spread(*shape: int) -> np.ndarray:
    """Numbers at least 0.05 apart, none near 0: no ties and no kinks within a step."""
    values = np.random.default_rng(0).permutation(int(np.prod(shape)))
    return ((values - np.prod(shape) // 2) * 0.1 + 0.05).reshape(shape)


def positive(*shape: int) -> np.ndarray:
    return np.asarray(np.random.default_rng(5).random(shape) + 0.5)


def whole(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, high, shape)


SHAPES: tuple[tuple[int, ...], ...] = ((), (5,), (2, 3, 4), (0, 3), (1, 1, 1, 1, 2))


def unary(op: str, grad: str, reads: str, shape: tuple[int, ...] = (2, 3, 4), domain: str = "", **attrs: Any) -> Case:
    return Case(op, {"X": spread(*shape)}, grad, ["d_Y", reads], attrs, domain=domain, opset=20)


def bias_gelu(op: str, grad: str, *shape: int) -> Case:
    other = {"B": positive(shape[-1])}
    return Case(op, {"X": shape}, grad, ["d_Y", "X", "B"], other=other, domain=MICROSOFT)


def softmax(op: str, old: bool, shape: tuple[int, ...], axis: int | None, ort: str | None = None) -> Case:
    attrs = {} if axis is None else {"axis": axis}
    reads: list[str | None] = ["d_Y", "Y"]
    return Case(op, {"X": shape}, f"{op}Grad{'' if old else '_13'}", reads, attrs, opset=11 if old else 13, ort=ort)


def div(a: tuple[int, ...], b: tuple[int, ...], **options: Any) -> Case:
    return Case("Div", {"A": a, "B": positive(*b)}, "DivGrad", ["d_Y", "A", "B"], **options)


def dropout(shape: tuple[int, ...], ratio: float | None, training: bool | None, bits: bool = False) -> Case:
    other = {
        "ratio": None if ratio is None else np.array(ratio),
        "training": None if training is None else np.array(training),
    }
    op = "BitmaskDropout" if bits else "Dropout"
    ort = NO_KERNEL if bits else None if training or ratio == 0 else FAULT
    reads = ["d_Y", "mask", *(name if value is not None else None for name, value in other.items())]
    domain = MICROSOFT if bits else ""
    return Case(
        op, {"X": shape}, f"{op}Grad", reads, {"seed": 3}, {}, other, ("Y", "mask"), domain=domain, opset=13, ort=ort
    )


def conv(x: tuple[int, ...], w: tuple[int, ...], ort: str | None = None, **attrs: Any) -> Case:
    wrt = {"X": x, "W": w, "B": (w[0],)}
    return Case("Conv", wrt, "ConvGrad", ["d_Y", "X", "W"], attrs, ort=ort)


def conv_transpose(x: tuple[int, ...], w: tuple[int, ...], **attrs: Any) -> Case:
    wrt = {"X": x, "W": w, "B": (w[1] * attrs.get("group", 1),)}
    return Case("ConvTranspose", wrt, "ConvTransposeGrad", ["d_Y", "X", "W"], attrs, ort=NO_KERNEL)


def max_pool(x: tuple[int, ...], ort: str | None = None, **attrs: Any) -> Case:
    wrt = {"X": spread(*x)}
    return Case("MaxPool", wrt, "MaxPoolGrad", ["d_Y", "I"], attrs, results=("Y", "I"), grad_domain="", ort=ort)


def average_pool(x: tuple[int, ...], ort: str | None = None, **attrs: Any) -> Case:
    return Case("AveragePool", {"X": x}, "AveragePoolGrad", ["d_Y"], attrs, grad_domain="", ort=ort, opset=19)


def gather(op: str, x: tuple[int, ...], indices: Any, ort: str | None = None, **attrs: Any) -> Case:
    reads: list[str | None] = ["d_Y", "shape", "i"] if op == "GatherElements" else ["shape", "i", "d_Y"]
    return Case(op, {"X": x}, f"{op}Grad", reads, attrs, other={"i": np.asarray(indices)}, ort=ort)


def slice_(shape: tuple[int, ...], ort: str | None = None, **parts: Any) -> Case:
    other = {name: np.array(parts[name]) if name in parts else None for name in ("starts", "ends", "axes", "steps")}
    reads = ["d_Y", "shape", *(name if name in parts else None for name in other)]
    return Case("Slice", {"X": shape}, "SliceGrad", reads, other=other, ort=ort)


def norm(op: str, x: tuple[int, ...], scale: tuple[int, ...], ort: str | None = None, **attrs: Any) -> Case:
    results = ("Y", "mean", "r") if op == "LayerNormalization" else ("Y", "r")
    wrt = {"X": x, "S": scale} | ({"B": scale} if op == "LayerNormalization" else {})
    return Case(op, wrt, f"{op}Grad", ["d_Y", "X", "S", *results[1:]], attrs, results=results, ort=ort)


def invertible(x: tuple[int, ...], scale: tuple[int, ...], ort: str | None = None, **attrs: Any) -> Case:
    wrt = {"X": x, "S": positive(*scale), "B": scale}
    reads: list[str | None] = ["d_Y", "Y", "S", "B", "r"]
    grad = "InvertibleLayerNormalizationGrad"
    return Case("LayerNormalization", wrt, grad, reads, attrs, results=("Y", "mean", "r"), ort=ort)


def batch_norm(*x: int, epsilon: float = 1e-3) -> Case:
    c = x[1]
    return Case(
        "BatchNormInternal",
        {"X": x, "S": (c,), "B": (c,)},
        "BatchNormalizationGrad",
        ["d_Y", "X", "S", "saved_mean", "saved_r"],
        {"epsilon": epsilon, "training_mode": 1},
        {"epsilon": epsilon},
        {"mean": positive(c), "var": positive(c)},
        ("Y", "running_mean", "running_var", "saved_mean", "saved_r"),
        domain=MICROSOFT,
    )


def loss(x: tuple[int, ...], weights: bool, internal: bool = False, ort: str | None = None, **attrs: Any) -> Case:
    """`internal`: the index to ignore is an input."""
    labels = whole(x[1], x[0], *x[2:])
    other: dict[str, Any] = {"labels": labels, "weights": positive(x[1]) if weights else None}
    op, domain = ("SoftmaxCrossEntropyLossInternal", MICROSOFT) if internal else ("SoftmaxCrossEntropyLoss", "")
    if internal and "ignore_index" in attrs:
        other["ignored"] = np.array(attrs.pop("ignore_index"))
    reads = ["d_Y", "log_prob", *(name if value is not None else None for name, value in other.items())]
    results = ("Y", "log_prob")
    return Case(op, {"X": x}, f"{op}Grad", reads, attrs, None, other, results, domain=domain, opset=13, ort=ort)


def dense_loss(*x: int, reduction: str, ort: str | None = None) -> Case:
    label = np.eye(x[-1])[whole(x[-1], *x[:-1])]
    reads: list[str | None] = ["d_Y", "log_prob", "label"]
    attrs, grad = {"reduction": reduction}, "SoftmaxCrossEntropyGrad"
    other, results = {"label": label}, ("Y", "log_prob")
    return Case("SoftmaxCrossEntropy", {"X": x}, grad, reads, attrs, None, other, results, domain=MICROSOFT, ort=ort)


def sparse_loss(*x: int, weight: bool, reduction: str, ort: str | None = None) -> Case:
    other = {"label": whole(x[-1], *x[:-1])} | ({"weight": positive(*x[:-1])} if weight else {})
    reads: list[str | None] = ["d_Y", "log_prob", *other]
    attrs, grad = {"reduction": reduction}, "SparseSoftmaxCrossEntropyGrad"
    results = ("Y", "log_prob")
    return Case(
        "SparseSoftmaxCrossEntropy", {"X": x}, grad, reads, attrs, None, other, results, grad_domain="", ort=ort
    )


def resize(x: tuple[int, ...], factors: Any = None, sizes: Any = None, roi: Any = None, **attrs: Any) -> Case:
    other: dict[str, Any] = {
        "roi": None if roi is None else np.array(roi, np.float64),
        "scales": None if factors is None else np.array(factors, np.float32),
        "sizes": None if sizes is None else np.array(sizes),
    }
    reads = ["d_Y", "X", None if roi is None else "roi", None if factors is None else "scales"]
    return Case("Resize", {"X": x}, "ResizeGrad", reads, attrs, other=other, opset=19, ort=NO_KERNEL)


def dropped_softmax(*x: int, axis: int, ratio: float | None) -> Case:
    attrs = {"axis": axis, "is_inner_broadcast": 0, "seed": 3}
    other: dict[str, Any] = {"bias": numbers(*x)} | ({} if ratio is None else {"ratio": np.array(ratio)})
    reads: list[str | None] = ["d_Y", "mask", "shares", "ratio" if ratio is not None else None]
    results = ("Y", "mask", "shares")
    return Case(
        "BiasSoftmaxDropout",
        {"X": x},
        "SoftmaxDropoutGrad",
        reads,
        attrs,
        {"axis": axis},
        other,
        results,
        domain=MICROSOFT,
        ort=NO_KERNEL,
    )


REDUCTIONS = ("mean", "sum", "none")
MODES = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "align_corners", "asymmetric")
WINDOW: tuple[dict[str, Any], ...] = (
    {},
    {"strides": [2, 3], "pads": [1, 0, 2, 1], "dilations": [2, 1]},
    {"strides": [3, 3]},
    {"pads": [0, 2, 1, 0]},
    {"auto_pad": "VALID"},
)

CASES = [
    *(unary("Relu", "ReluGrad", reads, shape) for reads in "XY" for shape in SHAPES),
    *(unary("LeakyRelu", "LeakyReluGrad", reads, shape, alpha=0.2) for reads in "XY" for shape in SHAPES),
    unary("LeakyRelu", "LeakyReluGrad", "Y"),
    *(
        unary(op, f"{op}Grad", reads, shape)
        for op, reads in (("Sigmoid", "Y"), ("Tanh", "Y"), ("Gelu", "X"))
        for shape in SHAPES
    ),
    *(unary("FastGelu", "FastGeluGrad", "X", shape, MICROSOFT) for shape in SHAPES),
    *(unary("QuickGelu", "QuickGeluGrad", "X", shape, MICROSOFT, alpha=1.3) for shape in SHAPES),
    unary("QuickGelu", "QuickGeluGrad", "X", (3,), MICROSOFT),
    *(
        bias_gelu(op, grad, *shape)
        for op, grad in (("BiasGelu", "BiasGeluGrad_dX"), ("FastGelu", "BiasFastGeluGrad_dX"))
        for shape in ((4,), (2, 3, 4), (0, 4))
    ),
    *(
        softmax(op, old, shape, axis)
        for op in ("Softmax", "LogSoftmax")
        for old in (True, False)
        for shape, axes in (((2, 3, 4), (0, 1, 2, -1, -2, None)), ((5,), (0, -1)), ((2, 1, 3, 2), (1, -3)))
        for axis in axes
        if not (old and axis is None and len(shape) < 2)
    ),
    *(
        softmax(op, False, shape, axis, ort)
        for op in ("Softmax", "LogSoftmax")
        for shape, axis, ort in (((0, 3), -1, None), ((3, 0), 1, None), ((2, 0, 3), 0, FAULT), ((2, 0, 3), 1, FAULT))
    ),
    *(
        div(a, b)
        for a, b in (
            ((2, 3, 4), (2, 3, 4)),
            ((2, 3, 4), (3, 1)),
            ((2, 3, 4), ()),
            ((), (2, 3)),
            ((), ()),
            ((4,), (3, 1, 1)),
            ((1, 3), (2, 1)),
            ((2, 1, 4), (1, 3, 1)),
            ((1,), ()),
        )
    ),
    div((0,), (), ort=FAULT),
    div((2, 3), (3,), wanted=(True, False)),
    div((2, 3), (3,), wanted=(False, True)),
    *(div(a, b, ort=FAULT) for a, b in (((0, 3), (0, 3)), ((0, 3), (1, 3)), ((1, 3), (0, 3)), ((), (0, 3)))),
    *(
        dropout(shape, ratio, training, bits)
        for shape in ((), (40,), (2, 3, 4), (0, 3))
        for ratio in (None, 0.0, 0.3)
        for training in (None, False, True)
        for bits in (False, True)
    ),
    *(dropped_softmax(2, 3, 4, axis=axis, ratio=ratio) for axis in (0, 1, 2, -1) for ratio in (None, 0.0, 0.3)),
    # gathers and slices
    *(
        gather("Gather", shape, indices, axis=axis)
        for shape, axis, indices in (
            ((2, 3, 4), 1, [[0, 2, 2], [1, -1, 0]]),
            ((2, 3, 4), -3, [1, 1, 1]),
            ((2, 3, 4), -1, [[[0, -4]]]),
            ((3, 4), 0, 1),
            ((3, 4), 0, np.zeros(0, np.int64)),
            ((3, 4), 0, np.zeros((0, 2), np.int64)),
            ((5,), 0, [4, 0, 4, 4]),
            ((5,), 0, -2),
            ((3, 4), 1, np.array([0, 3, 3], np.int32)),
            ((0, 4), 1, [1, 2]),
        )
    ),
    *(
        gather("GatherElements", shape, indices, axis=axis)
        for shape, axis, indices in (
            ((2, 3, 4), -2, [[[0, -1]], [[2, 2]]]),
            ((2, 3, 4), 0, np.zeros((5, 3, 4), np.int64)),
            ((3, 4), 1, [[0, -4, 1, 1, 1]]),
            ((3, 4), 0, np.array([[0, 2, -3, 1], [2, 2, 2, 2]], np.int32)),
            ((4,), 0, [3, 3, -1]),
            ((4,), -1, np.zeros(0, np.int64)),
        )
    ),
    *(
        gather("GatherND", shape, indices, batch_dims=batch_dims)
        for shape, batch_dims, indices in (
            ((2, 3, 4), 1, [[0], [2]]),
            ((2, 3, 4), 0, [[0, 1], [1, -1], [0, 1]]),
            ((2, 3, 4), 0, [[0, 1, 3], [1, -1, -4], [0, 1, 3]]),
            ((2, 3, 4), 0, [1]),
            ((2, 3, 4), 2, [[[1], [0], [-1]], [[3], [3], [3]]]),
            ((2, 3, 4), 1, [[[0, 1], [0, 1]], [[2, 3], [1, -1]]]),
            ((5,), 0, [[[4], [4]], [[0], [-5]]]),
            ((2, 3), 0, np.zeros((0, 1), np.int64)),
            ((2, 3), 0, np.zeros((2, 0), np.int64)),
        )
    ),
    gather("GatherND", (0, 3), np.zeros((0, 1), np.int64), FAULT, batch_dims=1),
    slice_((3, 5), starts=[0, 1], ends=[2, 2**31 - 1]),
    slice_((3, 5), starts=[-100], ends=[-1], axes=[-1]),
    slice_((3, 5), starts=[-1], ends=[-(2**63)], axes=[0], steps=[-2]),
    slice_((3, 5), starts=[0, 0], ends=[3, 5], axes=[1, 0], steps=[2, 2]),
    slice_((3, 5), starts=[2], ends=[2]),
    slice_((3, 5), starts=[1], ends=[100], axes=[1], steps=[3]),
    slice_((7,), starts=[1], ends=[-1], steps=[2], axes=[0]),
    slice_((2, 3, 4, 5), starts=[0, 1, 1], ends=[2, 3, 3], axes=[0, 1, -2]),
    slice_((0, 5), starts=[1], ends=[3], axes=[1]),
    slice_((3, 5), starts=np.array([1], np.int32), ends=np.array([3], np.int32), axes=np.array([1], np.int32)),
    slice_((3, 5), starts=[4], ends=[0], axes=[1], steps=[-2], ort=FAULT),
    slice_((5,), starts=[-1], ends=[-(2**63)], axes=[0], steps=[-1], ort=FAULT),
    Case(
        "FlattenAndUnpad",
        {"X": (2, 3, 4)},
        "PadAndUnflatten",
        ["d_Y", "i", "dims"],
        other={"i": np.array([5, 0, 3])},
        results=("Y", "dims"),
        domain=MICROSOFT,
        ort=NO_KERNEL,
    ),
    Case(
        "FlattenAndUnpad",
        {"X": (2, 3)},
        "PadAndUnflatten",
        ["d_Y", "i", "dims"],
        other={"i": np.zeros(0, np.int64)},
        results=("Y", "dims"),
        domain=MICROSOFT,
        ort=NO_KERNEL,
    ),
    # convolutions and poolings
    *(conv((2, 3, 8, 9), (4, 3, 3, 2), **window) for window in WINDOW),
    *(conv((2, 4, 8, 9), (m, 4 // g, 3, 3), group=g, pads=[1, 1, 1, 1]) for m, g in ((6, 2), (4, 4), (8, 4))),
    conv((2, 3, 8, 9), (4, 3, 3, 2), kernel_shape=[3, 2]),
    conv((1, 1, 3, 3), (1, 1, 3, 3)),
    conv((2, 3, 4, 4), (5, 3, 1, 1)),
    conv((2, 3, 6, 6), (4, 3, 3, 3), pads=[4, 0, 5, 1], dilations=[3, 2]),
    conv((1, 2, 3, 4, 3, 4), (2, 2, 2, 2, 2, 2)),
    conv((2, 4, 10), (6, 4, 3), strides=[2]),
    conv((2, 4, 10), (6, 2, 3), group=2, dilations=[3], pads=[2, 1]),
    conv((1, 2, 5, 6, 7), (3, 2, 2, 3, 2), strides=[1, 2, 1]),
    conv((1, 2, 5, 6, 7), (4, 1, 2, 3, 2), group=2, pads=[1, 0, 1, 0, 1, 2], dilations=[2, 1, 1]),
    conv((2, 3, 8, 9), (4, 3, 3, 3), FAULT, auto_pad="SAME_UPPER", strides=[2, 2]),
    conv((2, 3, 8, 9), (4, 3, 2, 2), FAULT, auto_pad="SAME_LOWER"),
    conv((0, 3, 8, 9), (4, 3, 3, 3), FAULT),
    conv_transpose((2, 4, 4, 5), (4, 3, 3, 3)),
    conv_transpose(
        (2, 4, 4, 5), (4, 3, 3, 2), strides=[2, 3], pads=[1, 0, 0, 1], output_padding=[1, 2], dilations=[2, 1]
    ),
    conv_transpose((2, 4, 4), (4, 3, 3), group=2, strides=[2]),
    conv_transpose((2, 4, 3, 3), (4, 2, 3, 3), strides=[2, 2], auto_pad="SAME_UPPER"),
    conv_transpose((2, 4, 3, 3), (4, 2, 3, 3), strides=[2, 2], auto_pad="SAME_LOWER"),
    conv_transpose((2, 4, 3, 3), (4, 2, 3, 3), strides=[3, 3], output_shape=[10, 8]),
    conv_transpose((1, 2, 2, 3, 2), (2, 1, 2, 2, 3), strides=[1, 2, 1], group=2),
    conv_transpose((0, 4, 4), (4, 3, 3)),
    max_pool((2, 3, 8, 9), kernel_shape=[2, 2], strides=[2, 2]),
    max_pool((2, 3, 8, 9), kernel_shape=[3, 3], strides=[2, 1], pads=[1, 1, 1, 1]),
    max_pool((2, 3, 8, 9), kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1),
    max_pool((2, 3, 8, 9), kernel_shape=[2, 2], dilations=[2, 3]),
    max_pool((2, 3, 9), kernel_shape=[3], strides=[2], dilations=[2]),
    max_pool((1, 2, 5, 6, 7), kernel_shape=[2, 2, 2]),
    max_pool((1, 2, 5, 6, 7), kernel_shape=[2, 1, 3], strides=[2, 2, 1], pads=[1, 0, 1, 0, 0, 1]),
    max_pool((2, 3, 8, 9), kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
    max_pool((2, 3, 8, 9), kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_LOWER"),
    max_pool((2, 3, 8, 9), kernel_shape=[3, 3], strides=[2, 2], auto_pad="VALID"),
    max_pool((2, 3, 4, 5), FAULT, kernel_shape=[2, 2], storage_order=1),
    max_pool((0, 3, 4, 5), kernel_shape=[2, 2]),
    average_pool((2, 3, 8, 9), kernel_shape=[3, 3], strides=[2, 1], pads=[1, 1, 1, 1]),
    average_pool((2, 3, 8, 9), kernel_shape=[3, 2], pads=[0, 1, 2, 0]),
    average_pool((2, 3, 8, 9), kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
    average_pool((2, 3, 8, 9), kernel_shape=[2, 2], strides=[3, 2], auto_pad="VALID"),
    average_pool((2, 3, 9), kernel_shape=[3], strides=[2]),
    average_pool((2, 3, 9), kernel_shape=[3], pads=[1, 2], count_include_pad=1),
    average_pool((2, 3, 8, 9), kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1),
    average_pool((2, 3, 8, 9), FAULT, kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1, count_include_pad=1),
    average_pool((1, 2, 5, 6, 7), FAULT, kernel_shape=[2, 2, 2]),
    average_pool((2, 3, 8, 9), FAULT, kernel_shape=[2, 2], dilations=[2, 2]),
    average_pool((2, 3, 8, 9), FAULT, kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
    average_pool((2, 3, 8, 9), FAULT, kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
    average_pool((0, 3, 4, 5), kernel_shape=[2, 2]),
    # normalizations
    *(
        norm(op, (2, 3, 5), scale, axis=axis, epsilon=1e-3)
        for op in ("LayerNormalization", "SimplifiedLayerNormalization")
        for axis, scale in ((-1, (5,)), (2, (5,)), (1, (3, 5)), (-2, (3, 5)), (0, (2, 3, 5)))
    ),
    *(norm(op, (4, 3), (3,)) for op in ("LayerNormalization", "SimplifiedLayerNormalization")),
    *(norm(op, (6,), (6,)) for op in ("LayerNormalization", "SimplifiedLayerNormalization")),
    *(norm(op, (0, 3), (3,)) for op in ("LayerNormalization", "SimplifiedLayerNormalization")),
    *(
        norm(op, (2, 3, 5), scale, FAULT, axis=1)
        for op in ("LayerNormalization", "SimplifiedLayerNormalization")
        for scale in ((5,), (3, 1), (1,))
    ),
    *(norm(op, (3, 1), (1,), FAULT) for op in ("LayerNormalization", "SimplifiedLayerNormalization")),
    invertible((3, 1), (1,), FAULT),
    invertible((0, 3), (3,)),
    *(invertible((2, 3, 5), scale, axis=axis) for axis, scale in ((-1, (5,)), (1, (3, 5)), (0, (2, 3, 5)))),
    batch_norm(4, 3, 5),
    batch_norm(4, 3),
    batch_norm(2, 3, 2, 3, 2),
    batch_norm(1, 2, 7),
    batch_norm(0, 3, 2),
    # losses
    *(
        loss(x, weights, internal, reduction=reduction, **ignore)
        for x in ((4, 3), (2, 3, 4), (1, 2, 2, 3))
        for weights in (False, True)
        for internal in (False, True)
        for reduction in REDUCTIONS
        for ignore in ({}, {"ignore_index": 1}, {"ignore_index": -1})
    ),
    *(
        loss(x, False, internal, FAULT, reduction=reduction)
        for x in ((0, 3), (2, 3, 0))
        for internal in (False, True)
        for reduction in ("sum", "none")
    ),
    dense_loss(0, 3, reduction="sum"),
    sparse_loss(0, 3, weight=True, reduction="sum"),
    *(
        dense_loss(*x, reduction=reduction, ort=FAULT if reduction == "none" else None)
        for x in ((4, 3), (2, 3, 4))
        for reduction in REDUCTIONS
    ),
    *(
        sparse_loss(*x, weight=weight, reduction=reduction, ort=FAULT if reduction == "none" else None)
        for x in ((4, 3), (2, 3, 4))
        for weight in (False, True)
        for reduction in REDUCTIONS
    ),
    # resizing
    *(
        resize((1, 2, 4, 5), factors, mode=mode, coordinate_transformation_mode=coordinates)
        for mode in ("nearest", "linear", "cubic")
        for coordinates in MODES
        for factors in ([1, 1, 1.5, 2], [1, 1, 0.6, 0.5])
    ),
    *(
        resize((1, 1, 4, 5), None, [1, 1, 7, 3], mode="nearest", nearest_mode=how)
        for how in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    ),
    resize((1, 1, 4, 5), None, [1, 1, 7, 3], mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1),
    *(resize((2, 9, 8), None, [2, 4, 3], mode=mode, antialias=1) for mode in ("linear", "cubic")),
    *(
        resize((2, 5, 6), None, sizes, mode="linear", axes=axes, coordinate_transformation_mode="half_pixel")
        for axes, sizes in (([2, 1], [4, 7]), ([-1], [9]), ([0, 1, 2], [3, 3, 3]))
    ),
    resize((2, 5, 6), [2, 0.5], mode="linear", axes=[-1, 0]),
    *(
        resize(
            (3, 4),
            None,
            [5, 6],
            roi,
            mode=mode,
            coordinate_transformation_mode="tf_crop_and_resize",
            extrapolation_value=7.0,
        )
        for mode in ("linear", "nearest", "cubic")
        for roi in ([0.1, -0.2, 0.8, 1.3], [0, 0, 1, 1])
    ),
    resize((3, 4), None, [6, 9], mode="linear", keep_aspect_ratio_policy="not_larger"),
    resize((7, 2), None, [9, 2], mode="linear", keep_aspect_ratio_policy="not_smaller"),
    resize((7, 2), None, [9, 3], mode="linear", keep_aspect_ratio_policy="not_larger"),
    resize((2, 3), [1, 1], mode="linear"),
    resize((0, 3), [1, 2], mode="linear"),
]

# How exact ONNX Runtime is in double, where it has that. Some have constants, a ratio or the statistics in float.
DOUBLE = {
    "DivGrad": 1e-14,
    "DropoutGrad": 1e-7,
    "FastGeluGrad": 1e-8,
    "GatherElementsGrad": 1e-14,
    "GatherGrad": 1e-14,
    "GatherNDGrad": 1e-14,
    "LayerNormalizationGrad": 1e-6,
    "SigmoidGrad": 1e-14,
    "SliceGrad": 1e-14,
    "SoftmaxCrossEntropyLossGrad": 1e-14,
    "SoftmaxCrossEntropyLossInternalGrad": 1e-14,
    "SoftmaxGrad": 1e-14,
    "TanhGrad": 1e-14,
}


def one_node(
    op: str,
    domain: str,
    opset: int,
    feeds: Mapping[str, np.ndarray],
    reads: list[str | None],
    names: tuple[str, ...],
    outputs: list[tuple[int, ...] | None],
    attrs: dict[str, Any],
    kind: Any = np.float32,
) -> onnx.ModelProto:
    """A model of one node; `outputs` are the shapes of its outputs, None for one that is not declared."""
    node = helper.make_node(op, [n or "" for n in reads], names, domain=domain, name="node", **attrs)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in names]
    for result, shape in zip(results, outputs, strict=True):
        if shape is not None:
            element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
            result.CopyFrom(helper.make_tensor_value_info(result.name, element, shape))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    graph = helper.make_graph([node], "g", inputs, [r for r in results if r.name])
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def typed(values: Mapping[str, np.ndarray], kind: Any) -> dict[str, np.ndarray]:
    """The floats of `values` of that type, the statistics of a normalization in float32."""
    return {
        name: v.astype(np.float32 if name in STATISTICS else kind) if v.dtype == np.float64 else v
        for name, v in values.items()
    }


@dataclass
class Built:
    forward: Callable[[dict[str, np.ndarray]], np.ndarray]
    primals: dict[str, np.ndarray]
    d_output: np.ndarray
    gradient: Callable[[Any], onnx.ModelProto]
    feeds: dict[str, np.ndarray]


@cache
def build(case: Case) -> Built:
    primals = {k: v if isinstance(v, np.ndarray) else numbers(*v) for k, v in case.wrt.items()}
    inputs = primals | {k: np.asarray(v) for k, v in case.other.items() if v is not None}
    reads: list[str | None] = [name if name in inputs else None for name in (*case.wrt, *case.other)]
    nothing: list[tuple[int, ...] | None] = [None] * len(case.results)
    declared = typed(inputs, np.float32)
    model = one_node(case.op, case.domain, case.opset, declared, reads, case.results, nothing, case.attrs)
    prepared = NUMPY.prepare(model, precision="float64")

    def forward(changed: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(prepared.run(inputs | changed, outputs=["Y"])["Y"])

    values = inputs | prepared.run(inputs)
    d_output = np.random.default_rng(4).standard_normal(values["Y"].shape)
    values |= {"d_Y": d_output, "shape": np.array(next(iter(primals.values())).shape, np.int64)}
    feeds = {name: values[name] for name in case.reads if name is not None}
    wanted = case.wanted or (True,) * len(primals)
    names = tuple(f"d{k}" if w else "" for k, w in zip(primals, wanted, strict=True))
    shapes: list[tuple[int, ...] | None] = [v.shape for v in primals.values()]
    attrs = case.attrs if case.grad_attrs is None else case.grad_attrs

    def gradient(kind: Any) -> onnx.ModelProto:
        read = typed(feeds, kind)
        return one_node(case.grad, case.grad_domain, case.grad_opset, read, case.reads, names, shapes, attrs, kind)

    return Built(forward, primals, d_output, gradient, feeds)


def load(model: onnx.ModelProto) -> Any:
    """A session of ONNX Runtime for the model as it is written."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def run_onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
    session = load(model)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(feeds)), strict=True))


def check_equal(actual: Any, expected: Any, tolerance: float) -> None:
    """The error of a result is measured against its largest element."""
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            check_equal(one, other, tolerance)
        return
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(actual, expected)
        return
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(initial=0.0, where=np.isfinite(b)))
