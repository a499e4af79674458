"""The operators of ONNX Runtime's training: against float64 differences of the forward operator, and against its kernels.

A `Case` is a gradient operator with the forward one; a `Step` an operator of the training loop, which has none. Without the
training build of ONNX Runtime 1.19.2 the differences alone are run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from refgrad.backends import get_backend
from refgrad.backends.numpy import registry
from refgrad.conformance.findings import findings
from refgrad.conformance.findings.finding import TRAINING, VERSIONS, installed
from refgrad.errors import BackendError

pytestmark = pytest.mark.slow

MICROSOFT = "com.microsoft"
NUMPY = get_backend("numpy")
trains = pytest.mark.skipif(
    installed().get(TRAINING) != VERSIONS[TRAINING], reason=f"{TRAINING} {VERSIONS[TRAINING]} is not installed"
)

NO_KERNEL = "there is no CPU kernel"
FAULT = "a finding shows that it is wrong"  # conformance/findings
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
# What has no kernel in float16 runs in float between two casts, but for these: there is none, or it ends the process.
NO_HALF = {"SliceGrad", "MaxPoolGrad", "AveragePoolGrad"}


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


def check_differences(case: Case) -> None:
    built = build(case)
    gradients = NUMPY.prepare(built.gradient(np.float32), precision="float64").run(built.feeds)
    moved = [name for name in built.primals if f"d{name}" in gradients]
    rng = np.random.default_rng(3)
    directions = {name: rng.standard_normal(built.primals[name].shape) for name in moved}
    step = 1e-6
    ahead = built.forward({k: built.primals[k] + step * directions[k] for k in moved})
    behind = built.forward({k: built.primals[k] - step * directions[k] for k in moved})
    expected = np.sum(built.d_output * (ahead - behind)) / (2 * step)
    for name in moved:
        assert gradients[f"d{name}"].shape == built.primals[name].shape
        assert gradients[f"d{name}"].dtype == np.float64
    terms = [gradients[f"d{name}"] * directions[name] for name in moved]
    size = sum(float(np.abs(term).sum()) for term in terms)
    assert abs(sum(float(term.sum()) for term in terms) - expected) <= 1e-7 * size + 1e-8


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


def check_onnxruntime(case: Case, kind: Any = np.float32, tolerance: float = 1e-5) -> None:
    built = build(case)
    model, feeds = built.gradient(kind), typed(built.feeds, kind)
    expected = run_onnxruntime(model, feeds)
    actual = NUMPY.prepare(model).run(feeds)
    assert actual.keys() == expected.keys()
    for name in expected:
        check_equal(actual[name], expected[name], tolerance)


def check_missing(case: Case, kind: Any = np.float32) -> None:
    built = build(case)
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        run_onnxruntime(built.gradient(kind), typed(built.feeds, kind))


COMPARED = [case for case in CASES if case.ort is None]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_is_the_derivative(case: Case):
    check_differences(case)


@trains
@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_gradient_is_that_of_onnx_runtime(case: Case):
    check_onnxruntime(case)


@trains
@pytest.mark.parametrize("case", [c for c in COMPARED if c.grad not in NO_HALF], ids=str)
def test_half_gradient_is_that_of_onnx_runtime(case: Case):
    check_onnxruntime(case, np.float16, 2e-3)


@trains
@pytest.mark.parametrize("case", [c for c in COMPARED if c.grad in DOUBLE], ids=str)
def test_double_gradient_is_that_of_onnx_runtime(case: Case):
    check_onnxruntime(case, np.float64, DOUBLE[case.grad])


@trains
def test_what_has_no_kernel_has_none():
    for case in CASES:
        if case.ort == NO_KERNEL:
            check_missing(case)
    for grad, case in {case.grad: case for case in COMPARED}.items():
        if grad not in DOUBLE:
            check_missing(case, np.float64)
    check_missing(slice_((3, 5), starts=[0], ends=[2]), np.float16)


def test_what_is_not_compared_is_a_finding():
    shown = {finding.operator for finding in findings() if finding.system == TRAINING}
    assert {case.grad for case in CASES if case.ort == FAULT} <= shown


# The operators of the training loop

W, G = np.array([1.0, -2.0, 3.0]), np.array([0.5, 0.25, -1.0])
M, V = np.array([0.1, 0.2, 0.3]), np.array([0.4, 0.5, 0.6])
ADAM = {"R": np.array(0.1), "T": np.array(3), "W": W, "G": G, "m": M, "v": V}
ADAM_RESULTS = ("T_next", "m_next", "v_next", "W_next", "step")
SEQUENCES = {"R": np.array(0.1), "T": np.array(3), "W": [W, W[:2]], "G": [G, G[:2]], "m": [M, M[:2]], "v": [V, V[:2]]}
MATRIX = numbers(2, 3)


@dataclass(eq=False)
class Step:
    """An operator that reads `feeds`, of which None are left out, and makes `results`."""

    op: str
    feeds: dict[str, Any]
    results: tuple[str, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    domain: str = MICROSOFT
    double: bool = False

    def __str__(self) -> str:
        shapes = [str(np.shape(v)) for v in self.feeds.values() if not isinstance(v, list)]
        return "-".join((self.op, *shapes, *(f"{k}={v}" for k, v in self.attrs.items()))).replace(" ", "")


def quantized(zero_point: float, **attrs: int) -> Step:
    feeds = {"X": spread(4, 5), "scale": np.array(0.3), "zero_point": np.array(zero_point)}
    return Step("FakeQuant", feeds, ("Y", "mask"), attrs)


def fused(a: tuple[int, ...], b: tuple[int, ...], **attrs: Any) -> Step:
    return Step("FusedMatMul", {"A": numbers(*a), "B": numbers(*b)}, ("Y",), attrs)


STEPS = [
    *(
        Step("AdamOptimizer", ADAM, ADAM_RESULTS, attrs)
        for attrs in (
            {},
            {"alpha": 0.5, "beta": 0.75, "epsilon": 0.1},
            {"epsilon": 0.1, "do_bias_correction": 0},
            {"epsilon": 0.1, "weight_decay_mode": 1},
            {"epsilon": 0.1, "weight_decay_mode": 1, "do_bias_correction": 0},
        )
    ),
    Step("AdamOptimizer", ADAM | {"R": np.array([0.1]), "T": np.array([1])}, ADAM_RESULTS[:4]),
    *(
        Step("AdamWOptimizer", SEQUENCES | flag, ("done", "W_next", "m_next", "v_next"), attrs)
        for flag in ({}, {"update": np.array(True)}, {"update": np.array(False)})
        for attrs in (
            {},
            {"alpha": 0.5, "beta": 0.75, "epsilon": 0.1, "weight_decay": 0.5},
            {"adam_mode": 1, "epsilon": 0.1, "weight_decay": 0.5},
            {"adam_mode": 1, "correct_bias": 0},
        )
    ),
    Step("SGDOptimizer", {"R": np.array(0.1), "W": W, "G": G}, ("W_next", "step")),
    *(
        Step("SGDOptimizerV2", {k: SEQUENCES[k] for k in "RWG"} | flag, ("done", "W_next"))
        for flag in ({}, {"update": np.array(True)}, {"update": np.array(False)})
    ),
    *(Step("InplaceClipGradNorm", {"G": SEQUENCES["W"]}, ("Y",), {"max_norm": n}) for n in (1.0, 100.0, 0.0)),
    *(
        Step(op, {"old": MATRIX, "new": 2 * MATRIX} | flag, results)
        for op, results in (("InPlaceAccumulator", ("Y",)), ("InPlaceAccumulatorV2", ("done", "Y")))
        for flag in ({}, {"flag": np.array([True])}, {"flag": np.array([False])})
    ),
    *(Step("ReduceAllL2", feeds, ("Y",)) for feeds in ({"A": W}, {"A": W, "B": MATRIX, "C": np.array(2.0)})),
    Step("ZeroGradient", {"X": MATRIX, "signal": np.zeros(0, np.int64)}, ("Y",)),
    *(
        Step("Scale", {"X": MATRIX, "scale": np.asarray(scale)}, ("Y",), {"scale_down": down}, double=True)
        for scale in (2.5, 3, np.array([2.5]), np.array(3, np.int32))
        for down in (0, 1)
    ),
    *(
        Step("BroadcastGradientArgs", {"a": np.array(a, np.int64), "b": np.array(b, np.int64)}, ("a_axes", "b_axes"))
        for a, b in (
            ([2, 3], [2, 3]),
            ([2, 3], []),
            ([], [4, 5]),
            ([], []),
            ([2, 1, 4], [3, 1]),
            ([1, 1], [1, 1, 1]),
            ([2, 16, 1024, 1], [1, 1024, 1024]),
            ([0, 3], [1, 3]),
            ([1], [0]),
        )
    ),
    *(
        Step("ReduceSumTraining", {"X": numbers(2, 3, 4), "axes": np.array(axes, np.int64)}, ("Y",), attrs, double=True)
        for axes in ([], [1], [-1, 0], [0, 1, 2])
        for attrs in ({}, {"keepdims": 0}, {"noop_with_empty_axes": 1})
        if not (attrs == {"noop_with_empty_axes": 1} and axes)
    ),
    *(
        Step("ConcatTraining", {f"x{i}": numbers(*s) for i, s in enumerate(shapes)}, ("Y", "lengths"), {"axis": axis})
        for shapes, axis in (
            (((2, 3),), 0),
            (((2, 3), (2, 1), (2, 0)), 1),
            (((2, 3), (4, 3)), -2),
            (((2, 3, 4), (2, 3, 4)), -1),
        )
    ),
    *(
        Step("SplitTraining", {"X": numbers(2, 6, 2), "split": np.array(split)}, ("a", "b", "c"), {"axis": axis})
        for split, axis in (([1, 2, 3], 1), ([2, 2, 2], -2), ([0, 5, 1], 1))
    ),
    Step("SplitTraining", {"X": numbers(6, 2), "split": np.zeros(0, np.int64)}, ("a", "b", "c")),
    *(
        Step("Trilu", {"X": numbers(2, 3, 4), **k}, ("Y",), {"upper": upper})
        for upper in (0, 1)
        for k in ({}, {"k": np.array(-1)}, {"k": np.array(2)})
    ),
    *(
        Step("ShrunkenGather", {"X": numbers(4, 5), "i": np.array(i, kind)}, ("Y",), {"axis": axis})
        for i, axis in (([0], 0), ([1, -1, 1], 1), ([3, 0], -2))
        for kind in (np.int64, np.int32)
    ),
    fused((2, 3), (3, 4)),
    fused((3, 2), (3, 4), transA=1, alpha=0.5),
    fused((2, 3), (4, 3), transB=1),
    fused((2, 5, 3, 2), (5, 4, 3), transA=1, transB=1),
    fused((2, 5, 3), (5, 3, 4), transBatchA=1),
    fused((5, 2, 3), (3, 5, 4), transBatchB=1, alpha=2.0),
    fused((2, 5, 3), (4, 5, 3), transBatchA=1, transBatchB=1, transB=1),
    quantized(2.0),
    quantized(0.0, quant_min=-3, quant_max=2),
    quantized(-1.0, quant_min=-8, quant_max=7),
    Step("FakeQuantGrad", {"dY": MATRIX, "mask": MATRIX > 0}, ("dX",)),
    *(
        Step("BatchNormInternal", {"X": numbers(4, 3, 2), "S": W, "B": G, "mean": M, "var": V}, results, attrs)
        for results, attrs in (
            (("Y", "running_mean", "running_var", "batch_mean", "r"), {"epsilon": 0.1, "momentum": 0.3}),
            (("Y",), {"training_mode": 0}),
        )
    ),
    *(
        Step("SoftmaxCrossEntropyLossInternal", feeds, ("Y", "log_prob"), {"reduction": reduction})
        for feeds in (
            {"X": numbers(4, 3), "label": whole(3, 4)},
            {"X": numbers(2, 3, 5), "label": whole(3, 2, 5), "weight": positive(3)},
            {"X": numbers(4, 3), "label": whole(3, 4), "weight": None, "ignored": np.array(1)},
            {"X": numbers(2, 3), "label": np.array([1, 1]), "weight": positive(3), "ignored": np.array(1)},
        )
        for reduction in REDUCTIONS
    ),
    *(
        Step("NegativeLogLikelihoodLossInternal2", feeds, ("Y",), {"reduction": reduction})
        for feeds in (
            {"X": numbers(2, 3, 5), "label": whole(3, 2, 5), "weight": positive(3)},
            {"X": numbers(4, 3), "label": whole(3, 4), "weight": None, "ignored": np.array(1)},
            {"X": numbers(2, 3), "label": np.array([1, 1]), "weight": None, "ignored": np.array(1)},
        )
        for reduction in REDUCTIONS
    ),
    *(
        Step(op, {"X": numbers(2, 3, 4), **label}, ("Y", "log_prob"), {"reduction": reduction}, domain)
        for op, domain, label in (
            ("SoftmaxCrossEntropy", MICROSOFT, {"label": positive(2, 3, 4)}),
            ("SparseSoftmaxCrossEntropy", "", {"label": whole(4, 2, 3)}),
            ("SparseSoftmaxCrossEntropy", "", {"label": whole(4, 2, 3), "weight": positive(2, 3)}),
        )
        for reduction in ("mean", "sum")
    ),
]


def step_model(step: Step, feeds: Mapping[str, Any]) -> onnx.ModelProto:
    def declare(name: str, value: Any) -> onnx.ValueInfoProto:
        if isinstance(value, list):
            element = helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value[0].dtype), None)
            return helper.make_value_info(name, helper.make_sequence_type_proto(element))
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

    reads = [name if value is not None else "" for name, value in step.feeds.items()]
    node = helper.make_node(step.op, reads, step.results, "node", domain=step.domain, **step.attrs)
    inputs = [declare(name, value) for name, value in feeds.items()]
    outputs = [helper.make_empty_tensor_value_info(name) for name in step.results if name]
    if step.op == "ReduceAllL2":  # its output's type follows from nothing
        outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []) for name in step.results]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets, ir_version=8)


def check_step(step: Step, kind: Any, tolerance: float) -> None:
    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(item) for item in value]
        return np.array(value, kind if value.dtype == np.float64 else value.dtype)

    feeds = {name: convert(value) for name, value in step.feeds.items() if value is not None}
    model = step_model(step, feeds)
    actual = NUMPY.prepare(model).run(feeds)
    expected = run_onnxruntime(model, feeds)  # it may write into the feeds
    assert actual.keys() == expected.keys()
    for name in expected:
        check_equal(actual[name], expected[name], tolerance)


@trains
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_step_is_that_of_onnx_runtime(step: Step):
    check_step(step, np.float32, 1e-5)


@trains
@pytest.mark.parametrize("step", [s for s in STEPS if s.double], ids=str)
def test_double_step_is_that_of_onnx_runtime(step: Step):
    check_step(step, np.float64, 1e-7 if step.attrs.get("scale_down") else 1e-14)  # 1/scale is in float


# Every operator of training that the wheel has is in one of the tables.

WORDS = (
    "Grad|Training|Optimizer|Accumulator|CrossEntropy|LogLikelihood|Dropout|FlattenAndUnpad|PadAndUnflatten|FakeQuant"
    "|ShrunkenGather|ReduceAllL2|BatchScale|ScaledSum|MixedPrecisionScale|BatchNormInternal|IsFinite|IsAllFinite"
)
SHORT = ("All", "Group", "PassThrough", "Scale", "View")  # names that a compiler keeps out of the strings of a program
ELSEWHERE = {
    "LSTMGrad",  # test_numpy_recurrent
    "LSTMTraining",
    "GRUGrad",
    "GRUTraining",
    "PythonOpGrad",  # it calls Python
}
UNCOMPARED = {
    # there is no CPU kernel
    "BatchScale",
    "BiasDropout",
    "BiasSoftmaxDropout",
    "BitmaskBiasDropout",
    "BitmaskDropout",
    "FlattenAndUnpad",
    "IsAllFinite",
    "IsFinite",
    "LambOptimizer",
    "MixedPrecisionScale",
    "ScaledSum",
    "All",
    "View",
    # findings show that they are wrong or fail
    "Group",
    "NegativeLogLikelihoodLossInternal",
    "PassThrough",
}


def mentioned(path: Path) -> set[str]:
    """The names in a program that could be those of training operators: strings, and classes as a compiler writes them."""
    data = path.read_bytes()
    names = {match.decode() for match in re.findall(rb"[A-Z][A-Za-z0-9]{3,60}(?:_(?:13|dX))?", data)}
    for match in re.finditer(rb"(\d{1,2})([A-Z][A-Za-z0-9_]{3,60})", data):
        names.add(match[2][: int(match[1])].decode())
    return {name for name in names if re.search(WORDS, name)} | set(SHORT)


def is_registered(op: str, domain: str) -> bool:
    """Whether ONNX Runtime has a schema: without one it says so, with one it says what is wrong with the node."""
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    node = helper.make_node(op, ["x"], ["y"], domain=domain)
    graph = helper.make_graph([node], "g", [value], [helper.make_empty_tensor_value_info("y")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    try:
        load(model)
    except Exception as error:
        return not re.search("is not a registered function/op|No Op registered", str(error))
    return True


@trains
def test_every_operator_of_training_is_in_a_table():
    import onnxruntime

    (program,) = Path(onnxruntime.__file__).parent.glob("capi/onnxruntime_pybind11_state*")
    compared = {case.grad for case in CASES} | {step.op for step in STEPS}
    known = compared | ELSEWHERE | UNCOMPARED
    onnx_has = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    found = {
        name
        for name in mentioned(program)
        for domain in ("", MICROSOFT)
        if (domain or name not in onnx_has) and is_registered(name, domain)
    }
    assert "ReluGrad" in found
    assert len(found) > 60
    assert not found - known
    assert all(is_registered(name, MICROSOFT) or is_registered(name, "") for name in known)


def test_every_operator_of_training_has_a_kernel():
    for name in {case.grad for case in CASES} | {step.op for step in STEPS} | UNCOMPARED:
        assert registry.find(MICROSOFT, name, 1) or registry.find("", name, 17), name


# What hypothesis draws. `draw` makes a case; where ONNX Runtime is known to be wrong the case says so.

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def check(case: Case) -> None:
    check_differences(case)
    if case.ort is None and installed().get(TRAINING) == VERSIONS[TRAINING]:
        check_onnxruntime(case)


def dims(least: int = 0, most: int = 4, low: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(low, 4), min_size=least, max_size=most).map(tuple)


@few
@given(st.data())
def test_elementwise(data: st.DataObject):
    op, grad, reads, domain = data.draw(
        st.sampled_from(
            [
                ("Relu", "ReluGrad", "Y", ""),
                ("Sigmoid", "SigmoidGrad", "Y", ""),
                ("Tanh", "TanhGrad", "Y", ""),
                ("Gelu", "GeluGrad", "X", ""),
                ("FastGelu", "FastGeluGrad", "X", MICROSOFT),
                ("QuickGelu", "QuickGeluGrad", "X", MICROSOFT),
            ]
        )
    )
    check(unary(op, grad, reads, data.draw(dims(low=0)), domain))


@few
@given(st.data())
def test_softmax(data: st.DataObject):
    shape = data.draw(dims(1))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    check(softmax(data.draw(st.sampled_from(["Softmax", "LogSoftmax"])), data.draw(st.booleans()), shape, axis))


@few
@given(st.data())
def test_broadcast_quotients(data: st.DataObject):
    shape = data.draw(dims())
    pair = []
    for _ in range(2):
        kept = shape[data.draw(st.integers(0, len(shape))) :]
        pair.append(tuple(n if data.draw(st.booleans()) else 1 for n in kept))
    check(div(*pair))


@few
@given(st.data())
def test_gathers(data: st.DataObject):
    op = data.draw(st.sampled_from(["Gather", "GatherElements", "GatherND"]))
    shape = data.draw(dims(1))
    rank = len(shape)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    if op == "GatherND":
        batch = data.draw(st.integers(0, rank - 1))
        depth = data.draw(st.integers(1, rank - batch))
        where = (*shape[:batch], *data.draw(dims(0, 2)))
        if not where:
            where = (1,)
        limits = shape[batch : batch + depth]
        check(gather(op, shape, np.stack([rng.integers(-n, n, where) for n in limits], -1), batch_dims=batch))
        return
    axis = data.draw(st.integers(-rank, rank - 1))
    n = shape[axis]
    if op == "Gather":
        where = data.draw(dims(0, 3))
    else:
        where = tuple(data.draw(st.integers(1, 6 if i == axis % rank else m)) for i, m in enumerate(shape))
    check(gather(op, shape, rng.integers(-n, n, where), axis=axis))


@few
@given(st.data())
def test_slices(data: st.DataObject):
    shape = data.draw(dims(1))
    rank = len(shape)
    axes = data.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
    bound = st.integers(-6, 6)
    starts, ends = ([data.draw(bound) for _ in axes] for _ in range(2))
    steps = [data.draw(st.sampled_from([1, 2, 3, -1, -2])) for _ in axes]
    turned = any(step < 0 and axis == rank - 1 for step, axis in zip(steps, axes, strict=True))
    negative = [axis - rank if data.draw(st.booleans()) else axis for axis in axes]
    check(slice_(shape, FAULT if turned else None, starts=starts, ends=ends, axes=negative, steps=steps))


@few
@given(st.data())
def test_convolutions(data: st.DataObject):
    rank, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    kernel, strides, dilations = ([data.draw(st.integers(1, most)) for _ in range(rank)] for most in (3, 3, 2))
    pads = [data.draw(st.integers(0, 2)) for _ in range(2 * rank)]
    size = [(k - 1) * d + data.draw(st.integers(1, 4)) for k, d in zip(kernel, dilations, strict=True)]
    c, m = group * data.draw(st.integers(1, 2)), group * data.draw(st.integers(1, 2))
    n, window = data.draw(st.integers(1, 2)), {"strides": strides, "dilations": dilations, "pads": pads}
    check(conv((n, c, *size), (m, c // group, *kernel), group=group, **window))
    check(conv_transpose((n, c, *size), (c, m // group, *kernel), group=group, **window | {"pads": [0] * 2 * rank}))


@few
@given(st.data())
def test_poolings(data: st.DataObject):
    rank = data.draw(st.integers(1, 3))
    kernel, strides = ([data.draw(st.integers(1, 3)) for _ in range(rank)] for _ in range(2))
    dilations = [data.draw(st.integers(1, 2)) for _ in range(rank)]
    pads = [data.draw(st.integers(0, k - 1)) for k in kernel * 2]
    size = [(k - 1) * d + data.draw(st.integers(1, 4)) for k, d in zip(kernel, dilations, strict=True)]
    n, c, ceil = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(0, 1))
    window: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": ceil}
    check(max_pool((n, c, *size), dilations=dilations, **window))
    included = data.draw(st.integers(0, 1))
    ort = FAULT if (ceil and included) or rank == 3 or max(dilations) > 1 else None
    check(average_pool((n, c, *size), ort, dilations=dilations, count_include_pad=included, **window))


@few
@given(st.data())
def test_normalizations(data: st.DataObject):
    shape = data.draw(dims(1))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    scale, options = shape[axis:], {"axis": axis, "epsilon": 1.0}
    ort = FAULT if np.prod(scale) == 1 else None
    check(norm("LayerNormalization", shape, scale, ort, **options))
    check(norm("SimplifiedLayerNormalization", shape, scale, ort, **options))
    check(invertible(shape, scale, ort, **options))
    if len(shape) > 1:
        check(batch_norm(*shape, epsilon=1.0))


@few
@given(st.data())
def test_losses(data: st.DataObject):
    n, c, rest = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), data.draw(dims(0, 2))
    weights, internal = data.draw(st.booleans()), data.draw(st.booleans())
    attrs: dict[str, Any] = {"reduction": data.draw(st.sampled_from(REDUCTIONS))}
    check(dense_loss(n, *rest, c, reduction=attrs["reduction"], ort=FAULT if attrs["reduction"] == "none" else None))
    if data.draw(st.booleans()):
        attrs["ignore_index"] = data.draw(st.sampled_from([-1, -100, c, c - 1] if c > 1 else [-1, -100]))
    case = loss((n, c, *rest), weights, internal, **attrs)
    if "ignore_index" in attrs and (case.other["labels"] == attrs["ignore_index"]).all():
        return  # the mean of nothing is not differentiable
    check(case)


@few
@given(st.data())
def test_resizes(data: st.DataObject):
    shape = data.draw(dims(1, 3, 2))
    axes = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(1, len(shape)))]
    attrs: dict[str, Any] = {
        "axes": axes,
        "mode": data.draw(st.sampled_from(["nearest", "linear", "cubic"])),
        "coordinate_transformation_mode": data.draw(st.sampled_from(MODES)),
        "exclude_outside": data.draw(st.integers(0, 1)),
        "antialias": data.draw(st.integers(0, 1)),
    }
    if data.draw(st.booleans()):
        check(resize(shape, [data.draw(st.sampled_from([0.5, 0.75, 1, 1.3, 2.5])) for _ in axes], **attrs))
    else:
        check(resize(shape, None, [data.draw(st.integers(1, 7)) for _ in axes], **attrs))


def test_the_scale_of_a_resize_has_to_follow():
    case = resize((3, 4), None, [7, 9], mode="linear")
    case.attrs["keep_aspect_ratio_policy"] = "not_smaller"
    built = build(case)
    with pytest.raises(BackendError, match=r"no one scale makes the sizes \[3, 4\] become \[7, 9\]"):
        NUMPY.prepare(built.gradient(np.float32)).run(typed(built.feeds, np.float32))


# What has no CPU kernel and no derivative to compare with: results that can be worked out by hand.

X = np.array([[1.0, -2.0], [3.0, 4.0]])
INF = np.array([1.0, np.inf, np.nan])
SEED = 3
MASK = NUMPY.prepare(
    step_model(
        Step("Dropout", {"X": X, "r": np.array(0.2), "t": np.array(True)}, ("Y", "mask"), {"seed": SEED}, ""),
        {"X": X, "r": np.array(0.2), "t": np.array(True)},
    )
).run({"X": X, "r": np.array(0.2), "t": np.array(True)})["mask"]
DROPPING = {"r": np.array(0.2), "t": np.array(True)}
LAMB = {"update": None, "loss_scale": None, "norm": None, "R": np.array(0.5), "T": np.array(1)}
GROUP = {"W": np.array([3.0, 4.0]), "G": np.array([2.0, -2.0]), "m": np.zeros(2), "v": np.zeros(2)}
LAMB_STEP = np.array([1.0, -1.0]) * 2.5 / np.sqrt(2)

BY_HAND: list[tuple[Step, dict[str, Any]]] = [
    (Step("BatchScale", {"X": X}, ("a", "b"), {"scale_0": 2.0, "scale_1": 0.5}), {"a": 2 * X, "b": 0.5 * X}),
    (
        Step("BatchScale", {"X": X}, ("a", "b", "c"), {"scale_0": 2.0, "scale_1": 0.5, "scale_2": -1.0}),
        {"a": 2 * X, "b": 0.5 * X, "c": -X},
    ),
    (Step("ScaledSum", {"A": X, "B": X}, ("Y",), {"scale_0": 2.0, "scale_1": 0.5}), {"Y": 2.5 * X}),
    (
        Step("ScaledSum", {"A": X, "B": X, "C": X}, ("Y",), {"scale_0": 2.0, "scale_1": 0.5, "scale_2": 1.5}),
        {"Y": 4 * X},
    ),
    (
        Step("BiasDropout", {"X": X, "B": X[0], "residual": X, **DROPPING}, ("Y", "mask"), {"seed": SEED}),
        {"Y": np.where(MASK, 1.25 * (X + X[0]), 0) + X, "mask": MASK},
    ),
    (Step("BiasDropout", {"X": X, "B": X[0]}, ("Y",)), {"Y": X + X[0]}),
    (
        Step("BitmaskBiasDropout", {"X": X, "B": X[0], "residual": X, **DROPPING}, ("Y", "mask"), {"seed": SEED}),
        {
            "Y": np.where(MASK, 1.25 * (X + X[0]), 0) + X,
            "mask": np.array([sum(1 << i for i, kept in enumerate(MASK.flat) if kept)], np.uint32),
        },
    ),
    (
        Step("BitmaskDropout", {"X": np.ones((3, 11))}, ("Y", "mask")),
        {"Y": np.ones((3, 11)), "mask": np.array([2**32 - 1, 1], np.uint32)},
    ),
    (
        Step(
            "BitmaskDropoutGrad", {"dY": np.arange(1.0, 35.0), "mask": np.array([5, 2], np.uint32), **DROPPING}, ("dX",)
        ),
        {"dX": 1.25 * np.array([1.0, 0.0, 3.0, *[0.0] * 30, 34.0])},
    ),
    (
        Step("FlattenAndUnpad", {"X": X, "i": np.array([3, 0])}, ("Y", "dims")),
        {"Y": np.array([4.0, 1.0]), "dims": np.array([2, 2])},
    ),
    (Step("IsFinite", {"X": INF}, ("Y",)), {"Y": np.array([True, False, False])}),
    (Step("IsAllFinite", {"A": X, "B": X[0]}, ("Y",)), {"Y": np.array(True)}),
    (Step("IsAllFinite", {"A": X, "B": INF}, ("Y",)), {"Y": np.array(False)}),
    (Step("IsAllFinite", {"A": INF[:2]}, ("Y",), {"isnan_only": 1}), {"Y": np.array(True)}),
    (Step("IsAllFinite", {"A": INF[:2]}, ("Y",), {"isinf_only": 1}), {"Y": np.array(False)}),
    (Step("IsAllFinite", {"A": INF[::2]}, ("Y",), {"isinf_only": 1}), {"Y": np.array(True)}),
    (Step("IsAllFinite", {"A": INF[::2]}, ("Y",), {"isnan_only": 1}), {"Y": np.array(False)}),
    (
        Step("BitmaskDropout", {"X": X, **DROPPING}, ("Y", "mask"), {"seed": SEED}),
        {
            "Y": np.where(MASK, 1.25 * X, 0),
            "mask": np.array([sum(1 << i for i, kept in enumerate(MASK.flat) if kept)], np.uint32),
        },
    ),
    *(
        (
            Step(
                "BiasSoftmaxDropout",
                {"X": 0 * X[None], "B": 0 * X[None], "r": np.array(0.2)},
                ("Y", "mask", "shares"),
                {"axis": axis, "is_inner_broadcast": 0, "seed": SEED},
            ),
            {"Y": np.where(MASK, 1.25 * share, 0)[None], "mask": MASK[None], "shares": np.full((1, 2, 2), share)},
        )
        for axis, share in ((1, 0.25), (2, 0.5))
    ),
    *(
        (
            Step("NegativeLogLikelihoodLossInternal", feeds, ("Y",), {"reduction": reduction}),
            {"Y": np.array(expected)},
        )
        for feeds, reduction, expected in (
            ({"X": X, "label": np.array([1, 0])}, "sum", -1.0),
            ({"X": X, "label": np.array([1, 0]), "weight": np.array([3.0, 1.0])}, "mean", -7 / 4),
            ({"X": X, "label": np.array([1, 0]), "weight": None, "ignored": np.array(1)}, "none", [0.0, -3.0]),
        )
    ),
    (Step("All", {"X": X > -3}, ("Y",)), {"Y": np.array(True)}),
    (Step("All", {"X": X > 0}, ("Y",)), {"Y": np.array(False)}),
    (
        Step("View", {"X": X, "a": np.array([3]), "b": np.array([1, 1])}, ("Y", "Z")),
        {"Y": np.array([1.0, -2.0, 3.0]), "Z": np.array([[4.0]])},
    ),
    (
        Step("MixedPrecisionScale", {"s": np.array(2.0), "A": X, "B": X[0]}, ("Y", "Z"), {"to": 10}),
        {"Y": (2 * X).astype(np.float16), "Z": (2 * X[0]).astype(np.float16)},
    ),
    (
        Step("MixedPrecisionScale", {"s": np.array([2.0]), "A": X, "B": X[0]}, ("Y",), {"to": 11, "fuse_outputs": 1}),
        {"Y": np.array([2.0, -4.0, 6.0, 8.0, 2.0, -4.0])},
    ),
    # m/(1 − α) = G and v/(1 − β) = G², so d = G/|G| = (1, −1); the step is −0.5·(‖W‖/‖d‖ = 5/√2)·d, or −0.5·2·d
    (
        Step(
            "LambOptimizer",
            LAMB | GROUP,
            ("T_next", "W_next", "step"),
            {"alpha": [0.5], "beta": [0.5], "epsilon": [0.0]},
        ),
        {"T_next": np.array(2), "W_next": GROUP["W"] - LAMB_STEP, "step": -LAMB_STEP},
    ),
    (
        Step(
            "LambOptimizer", LAMB | GROUP, ("", "W_next", "", "m_next", "v_next"), {"epsilon": [1e-9], "ratio_max": 2.0}
        ),
        {"W_next": np.array([2.0, 5.0]), "m_next": np.array([0.2, -0.2]), "v_next": np.array([0.004, 0.004])},
    ),
    (
        Step(
            "LambOptimizer",
            LAMB | GROUP,
            ("", "W_next", "", "", "v_next"),
            {"alpha": [0.0], "beta": [0.75], "epsilon": [1.0], "do_bias_correction": 0, "ratio_min": 9.0},
        ),
        {"W_next": GROUP["W"] - 4.5 * np.array([1.0, -1.0]), "v_next": np.array([1.0, 1.0])},
    ),
    (
        Step("LambOptimizer", LAMB | {"update": np.array(False)} | GROUP, ("T_next", "W_next")),
        {"T_next": np.array(1), "W_next": GROUP["W"]},
    ),
    (
        Step(
            "LambOptimizer", LAMB | {"loss_scale": np.array(4.0), "norm": np.array(2.0)} | GROUP, ("", "", "", "m_next")
        ),
        {"m_next": np.array([0.05, -0.05])},
    ),
    (
        Step("LambOptimizer", LAMB | {"norm": np.array(6.0)} | GROUP, ("", "", "", "m_next"), {"max_norm_clip": [3.0]}),
        {"m_next": np.array([0.1, -0.1])},
    ),
    # the gradient is divided by 4, and its norm 6/4 is above 1: by 6
    (
        Step(
            "LambOptimizer",
            LAMB | {"loss_scale": np.array(4.0), "norm": np.array(6.0)} | GROUP,
            ("", "", "", "m_next"),
            {"alpha": [0.5]},
        ),
        {"m_next": np.array([1 / 6, -1 / 6])},
    ),
    (
        Step("AdamOptimizer", ADAM | {"narrow": W.astype(np.float16)}, (*ADAM_RESULTS, "half"), {"epsilon": 1e9}),
        {"W_next": W, "half": W.astype(np.float16)},
    ),
    (
        Step(
            "AdamOptimizer",
            ADAM | {"narrow": None, "loss_scale": np.array(4.0), "norm": np.array(6.0)},
            ADAM_RESULTS[:2],
            {"alpha": 0.5},
        ),
        {"m_next": 0.5 * M + 0.5 * G / 6},
    ),
    (
        Step(
            "AdamOptimizer",
            ADAM | {"narrow": None, "loss_scale": np.array(4.0), "norm": np.array(2.0)},
            ADAM_RESULTS[:2],
            {"alpha": 0.5},
        ),
        {"m_next": 0.5 * M + 0.5 * G / 4},
    ),
    (
        Step(
            "AdamOptimizer",
            ADAM | {"narrow": None, "loss_scale": None, "norm": np.array(6.0)},
            ADAM_RESULTS[:2],
            {"alpha": 0.5, "max_norm_clip": 3.0},
        ),
        {"m_next": 0.5 * M + 0.5 * G / 2},
    ),
    (
        Step("AdamOptimizer", ADAM | dict.fromkeys(("a", "b", "c")) | {"update": np.array(False)}, ADAM_RESULTS[:4]),
        {"T_next": np.array(3), "m_next": M, "v_next": V, "W_next": W},
    ),
    (
        Step(
            "SoftmaxCrossEntropyLossInternal",
            {"X": np.zeros((1, 2)), "label": np.array([0])},
            ("Y",),
            {"output_type": 10},
        ),
        {"Y": np.array(np.log(2), np.float16)},
    ),
    (
        Step(
            "SoftmaxCrossEntropyLossInternalGrad",
            {
                "dY": np.array(1.0),
                "p": np.log([[0.5, 0.5]]),
                "label": np.array([0]),
                "w": None,
                "i": None,
                "bias": X[:1],
            },
            ("dX",),
            {"output_type": 10},
        ),
        {"dX": np.array([[0.5, -1.5]], np.float16)},
    ),
    (Step("SplitTraining", {"X": X[1], "s": np.zeros(0, np.int64)}, ("a", "b", "c")), {"a": X[1, :1], "c": X[1, 2:]}),
    (Step("Group", {"X": X, "Y": INF}, ("done",)), {"done": np.array(True)}),
    (Step("PassThrough", {"X": X, "Y": INF}, ("a", "b")), {"a": X, "b": INF}),
]


@pytest.mark.parametrize(("step", "expected"), BY_HAND, ids=lambda value: str(value) if isinstance(value, Step) else "")
def test_result_by_hand(step: Step, expected: dict[str, Any]):
    feeds = {name: value for name, value in step.feeds.items() if value is not None}
    actual = NUMPY.prepare(step_model(step, feeds)).run(feeds)
    for name, value in expected.items():
        check_equal(actual[name], value, 1e-7)


@pytest.mark.parametrize(
    ("case", "narrow", "wide"),
    [
        (norm("LayerNormalization", (2, 3), (3,)), ("X",), ("d_Y", "S", "mean", "r")),
        (norm("LayerNormalization", (2, 3), (3,)), ("d_Y", "S"), ("X", "mean", "r")),
        (norm("SimplifiedLayerNormalization", (2, 3), (3,)), ("X",), ("d_Y", "S", "r")),
        (batch_norm(2, 3, 2), ("d_Y", "X"), ("S", "saved_mean", "saved_r")),
        (batch_norm(2, 3, 2), ("S",), ("d_Y", "X", "saved_mean", "saved_r")),
    ],
    ids=str,
)
def test_each_gradient_has_the_type_of_its_tensor(case: Case, narrow: tuple[str, ...], wide: tuple[str, ...]):
    """The schemas let X, the scale and the statistics have different types."""
    built = build(case)
    kinds = {**dict.fromkeys(narrow, np.float16), **dict.fromkeys(wide, np.float32)}
    feeds = {name: value.astype(kinds[name]) for name, value in built.feeds.items()}
    model = built.gradient(np.float32)
    for value in model.graph.input:
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(kinds[value.name]))
    for value in model.graph.output:
        kind = kinds["X" if value.name == "dX" else "S"]
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    rough = NUMPY.prepare(model).run(feeds)
    exact = NUMPY.prepare(model, precision="float64").run(built.feeds)
    for name, value in rough.items():
        check_equal(value, exact[name].astype(kinds["X" if name == "dX" else "S"]), 4e-3)


def test_there_is_one_norm_to_clip_by():
    step = Step("InplaceClipGradNorm", {"G": SEQUENCES["W"]}, ("Y",), {"norm_type": "inf"})
    with pytest.raises(BackendError, match=r"norm_type 'inf' is not supported; there is 'fro'"):
        NUMPY.prepare(step_model(step, step.feeds)).run(step.feeds)
