"""The gradient kernels: against float64 differences of the forward operator, and against ONNX Runtime's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from refgrad.backends import available, get_backend
from refgrad.errors import BackendError

MICROSOFT = "com.microsoft"
NUMPY = get_backend("numpy")


@dataclass
class Case:
    """A forward operator, its gradient operator and how the second reads the first.

    `wrt` maps differentiated inputs to shapes (or arrays), `other` holds the rest. `reads` names what the gradient
    operator takes: "d_<output>", a forward input or output, "shape" (of the first differentiated input), None (left
    out), or an array. `ort` says why ONNX Runtime 1.19.2 disagrees, where it does.
    """

    op: str
    wrt: dict[str, Any]
    grad: str
    reads: list[Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    grad_attrs: dict[str, Any] | None = None
    other: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    domain: str = ""
    grad_domain: str = MICROSOFT
    opset: int = 17
    ort: str | None = None

    def __str__(self) -> str:
        shapes = ["x".join(map(str, getattr(v, "shape", v))) for v in self.wrt.values()]
        return f"{self.grad}-{'-'.join(shapes)}-{'-'.join(f'{k}={v}' for k, v in self.attrs.items())}"


def spread(*shape: int) -> np.ndarray:
    """Numbers at least 0.05 apart, none near 0: no ties and no kinks within a step."""
    values = np.random.default_rng(0).permutation(int(np.prod(shape)))
    return ((values - np.prod(shape) // 2) * 0.1 + 0.05).reshape(shape)


def positive(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).random(shape) + 0.5


def conv(x: tuple[int, ...], w: tuple[int, ...], ort: str | None = None, **attrs: Any) -> Case:
    wrt = {"X": x, "W": w, "B": (w[0],)}
    return Case("Conv", wrt, "ConvGrad", ["d_0", "X", "W"], attrs, ort=ort)


def conv_transpose(x: tuple[int, ...], w: tuple[int, ...], **attrs: Any) -> Case:
    wrt = {"X": x, "W": w, "B": (w[1] * attrs.get("group", 1),)}
    return Case("ConvTranspose", wrt, "ConvTransposeGrad", ["d_0", "X", "W"], attrs, ort="there is no CPU kernel")


def max_pool(x: tuple[int, ...], ort: str | None = None, **attrs: Any) -> Case:
    wrt = {"X": spread(*x)}
    return Case("MaxPool", wrt, "MaxPoolGrad", ["d_0", "1"], attrs, outputs=2, grad_domain="", ort=ort)


def average_pool(x: tuple[int, ...], ort: str | None = None, **attrs: Any) -> Case:
    return Case("AveragePool", {"X": x}, "AveragePoolGrad", ["d_0"], attrs, grad_domain="", ort=ort, opset=19)


def unary(op: str, grad: str, reads: str, domain: str = "", **attrs: Any) -> Case:
    return Case(op, {"X": spread(2, 3, 4)}, grad, ["d_0", reads], attrs, domain=domain, opset=20)


def loss(x: tuple[int, ...], weights: bool, **attrs: Any) -> Case:
    labels = np.random.default_rng(1).integers(0, x[1], (x[0], *x[2:]))
    other = {"labels": labels} | ({"weights": positive(x[1])} if weights else {})
    reads = ["d_0", "1", *other]
    return Case(
        "SoftmaxCrossEntropyLoss",
        {"X": x},
        "SoftmaxCrossEntropyLossGrad",
        reads,
        attrs,
        other=other,
        outputs=2,
        opset=13,
    )


def gather(op: str, x: tuple[int, ...], indices: Any, **attrs: Any) -> Case:
    reads = ["d_0", "shape", "i"] if op == "GatherElements" else ["shape", "i", "d_0"]
    return Case(op, {"X": x}, f"{op}Grad", reads, attrs, other={"i": np.array(indices)})


def slice_(ort: str | None = None, **parts: list[int]) -> Case:
    other = {name: np.array(value) for name, value in parts.items()}
    return Case("Slice", {"X": (3, 5)}, "SliceGrad", ["d_0", "shape", *parts], other=other, ort=ort)


def norm(op: str, scale: tuple[int, ...], *statistics: str, **attrs: Any) -> Case:
    """The statistics follow the result in the outputs, and the scale in the inputs of the gradient."""
    reads = ["d_0", "X", "S", *(str(i + 1) for i in range(len(statistics)))]
    wrt = {"X": (2, 3, 5), "S": scale} | ({"B": scale} if op == "LayerNormalization" else {})
    return Case(op, wrt, f"{op}Grad", reads, attrs, outputs=1 + len(statistics))


SAME = "it ignores auto_pad and takes the pads as 0"

CASES = [
    unary("Relu", "ReluGrad", "X"),
    unary("Relu", "ReluGrad", "0"),
    unary("LeakyRelu", "LeakyReluGrad", "0", alpha=0.2),
    unary("Sigmoid", "SigmoidGrad", "0"),
    unary("Tanh", "TanhGrad", "0"),
    unary("Gelu", "GeluGrad", "X"),
    unary("FastGelu", "FastGeluGrad", "X", MICROSOFT),
    unary("QuickGelu", "QuickGeluGrad", "X", MICROSOFT, alpha=1.3),
    Case(
        "BiasGelu", {"X": (2, 3, 4)}, "BiasGeluGrad_dX", ["d_0", "X", "B"], other={"B": positive(4)}, domain=MICROSOFT
    ),
    Case(
        "FastGelu", {"X": (2, 4)}, "BiasFastGeluGrad_dX", ["d_0", "X", "B"], other={"B": positive(4)}, domain=MICROSOFT
    ),
    *(
        Case(op, {"X": (2, 3, 4)}, f"{op}Grad{suffix}", ["d_0", "0"], {"axis": axis}, opset=opset)
        for op in ("Softmax", "LogSoftmax")
        for suffix, opset in (("", 11), ("_13", 13))
        for axis in (0, 1, -1)
    ),
    Case("Div", {"A": (2, 3, 4), "B": positive(3, 1)}, "DivGrad", ["d_0", "A", "B"]),
    Case("Div", {"A": (), "B": positive(2, 3)}, "DivGrad", ["d_0", "A", "B"]),
    gather("Gather", (2, 3, 4), [[0, 2, 2], [1, -1, 0]], axis=1),
    gather("Gather", (3, 4), 1, axis=0),
    gather("Gather", (3, 4), np.zeros(0, np.int64), axis=0),
    gather("GatherElements", (2, 3, 4), [[[0, -1]], [[2, 2]]], axis=-2),
    gather("GatherND", (2, 3, 4), [[0], [2]], batch_dims=1),
    gather("GatherND", (2, 3, 4), [[0, 1], [1, -1], [0, 1]], batch_dims=0),
    slice_(starts=[0, 1], ends=[2, 2**31 - 1]),
    slice_(starts=[-100], ends=[-1], axes=[-1]),
    slice_(starts=[-1], ends=[-(2**63)], axes=[0], steps=[-2]),
    slice_(starts=[4], ends=[0], axes=[1], steps=[-2], ort="a negative step on the last axis: narrowing_error"),
    conv((2, 3, 8, 9), (4, 3, 3, 3)),
    conv((2, 3, 8, 9), (4, 3, 3, 2), strides=[2, 3], pads=[1, 0, 2, 1], dilations=[2, 1]),
    conv((2, 4, 8, 9), (6, 2, 3, 3), group=2),
    conv((2, 4, 8, 9), (4, 1, 3, 3), group=4, pads=[1, 1, 1, 1]),
    conv((2, 4, 10), (6, 4, 3), strides=[2]),
    conv((1, 2, 5, 6, 7), (3, 2, 2, 3, 2), strides=[1, 2, 1]),
    conv((2, 3, 8, 9), (4, 3, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2], ort=SAME),
    conv((2, 3, 8, 9), (4, 3, 2, 2), auto_pad="SAME_LOWER", ort=SAME),
    conv((2, 3, 8, 9), (4, 3, 3, 3), auto_pad="VALID"),
    conv_transpose((2, 4, 4, 5), (4, 3, 3, 3)),
    conv_transpose(
        (2, 4, 4, 5), (4, 3, 3, 2), strides=[2, 3], pads=[1, 0, 0, 1], output_padding=[1, 2], dilations=[2, 1]
    ),
    conv_transpose((2, 4, 4), (4, 3, 3), group=2, strides=[2]),
    conv_transpose((2, 4, 3, 3), (4, 2, 3, 3), strides=[2, 2], auto_pad="SAME_UPPER"),
    conv_transpose((2, 4, 3, 3), (4, 2, 3, 3), strides=[3, 3], output_shape=[10, 8]),
    max_pool((2, 3, 8, 9), kernel_shape=[2, 2], strides=[2, 2]),
    max_pool((2, 3, 8, 9), kernel_shape=[3, 3], strides=[2, 1], pads=[1, 1, 1, 1]),
    max_pool((2, 3, 8, 9), kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1),
    max_pool((2, 3, 9), kernel_shape=[3], strides=[2], dilations=[2]),
    max_pool((1, 2, 5, 6, 7), kernel_shape=[2, 2, 2]),
    max_pool((2, 3, 8, 9), kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
    max_pool((2, 3, 4, 5), kernel_shape=[2, 2], storage_order=1, ort="it reads the indices as row major"),
    average_pool((2, 3, 8, 9), kernel_shape=[3, 3], strides=[2, 1], pads=[1, 1, 1, 1]),
    average_pool((2, 3, 8, 9), kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
    average_pool((2, 3, 8, 9), kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1),
    average_pool((1, 2, 5, 6, 7), kernel_shape=[2, 2, 2], ort="its loop over three axes is wrong"),
    average_pool((2, 3, 8, 9), kernel_shape=[2, 2], dilations=[2, 2], ort="it ignores dilations"),
    average_pool((2, 3, 8, 9), kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER", ort=SAME),
    average_pool((2, 3, 8, 9), kernel_shape=[2, 2], auto_pad="SAME_LOWER", ort=SAME),
    norm("LayerNormalization", (5,), "mean", "r", axis=-1, epsilon=1e-3),
    norm("LayerNormalization", (3, 5), "mean", "r", axis=1),
    norm("SimplifiedLayerNormalization", (5,), "r", axis=-1, epsilon=1e-3),
    Case(
        "BatchNormInternal",
        {"X": (4, 3, 5), "S": (3,), "B": (3,)},
        "BatchNormalizationGrad",
        ["d_0", "X", "S", "3", "4"],
        {"epsilon": 1e-3, "training_mode": 1},
        {"epsilon": 1e-3},
        {"mean": positive(3), "var": positive(3)},
        outputs=5,
        domain=MICROSOFT,
    ),
    *(
        loss(x, weights, reduction=reduction, **ignore)
        for x in ((4, 3), (2, 3, 4))
        for weights in (False, True)
        for reduction in ("mean", "sum", "none")
        for ignore in ({}, {"ignore_index": 1})
    ),
]


def one_node(
    case: Case, op: str, domain: str, feeds: dict[str, Any], reads: list[Any], outputs: list[Any], attrs: dict[str, Any]
):
    """A model of one node; `outputs` are the shapes of its outputs, None for one that is not declared."""
    names = ["" if name is None else name for name in reads]
    node = helper.make_node(op, names, [f"o{i}" for i in range(len(outputs))], domain=domain, name="node", **attrs)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in node.output]
    for result, shape in zip(results, outputs, strict=True):
        if shape is not None:
            result.CopyFrom(helper.make_tensor_value_info(result.name, TensorProto.FLOAT, shape))
    opsets = [helper.make_opsetid("", case.opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(helper.make_graph([node], "g", inputs, results), opset_imports=opsets, ir_version=8)


def narrow(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32) if value.dtype == np.float64 else value


@dataclass
class Built:
    forward: Callable[[dict[str, np.ndarray]], list[np.ndarray]]
    primals: dict[str, np.ndarray]
    d_output: np.ndarray
    gradient: onnx.ModelProto
    feeds: dict[str, np.ndarray]


def build(case: Case) -> Built:
    rng = np.random.default_rng(2)
    primals = {k: v if isinstance(v, np.ndarray) else rng.standard_normal(v) for k, v in case.wrt.items()}
    others = {k: np.asarray(v) for k, v in case.other.items()}
    inputs = primals | others
    model = one_node(
        case,
        case.op,
        case.domain,
        {k: narrow(v) for k, v in inputs.items()},
        list(inputs),
        [None] * case.outputs,
        case.attrs,
    )
    prepared = NUMPY.prepare(model, precision="float64")

    def forward(changed: dict[str, np.ndarray]) -> list[np.ndarray]:
        return list(prepared.run(inputs | changed).values())

    results = forward({})
    values = inputs | {str(i): r for i, r in enumerate(results)}
    d_output = rng.standard_normal(results[0].shape)
    values |= {"d_0": d_output, "shape": np.array(next(iter(primals.values())).shape)}
    feeds = {name: values[name] for name in case.reads if name is not None}
    gradient = one_node(
        case,
        case.grad,
        case.grad_domain,
        {k: narrow(v) for k, v in feeds.items()},
        case.reads,
        [v.shape for v in primals.values()],
        case.attrs if case.grad_attrs is None else case.grad_attrs,
    )
    return Built(forward, primals, d_output, gradient, feeds)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_is_the_derivative(case: Case):
    built = build(case)
    gradients = NUMPY.prepare(built.gradient, precision="float64").run(built.feeds).values()
    rng = np.random.default_rng(3)
    directions = {name: rng.standard_normal(value.shape) for name, value in built.primals.items()}
    step = 1e-6
    ahead = built.forward({k: v + step * directions[k] for k, v in built.primals.items()})[0]
    behind = built.forward({k: v - step * directions[k] for k, v in built.primals.items()})[0]
    expected = np.sum(built.d_output * (ahead - behind)) / (2 * step)
    for gradient, value in zip(gradients, built.primals.values(), strict=True):
        assert gradient.shape == value.shape
        assert gradient.dtype == np.float64
    actual = sum(np.sum(g * d) for g, d in zip(gradients, directions.values(), strict=True))
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_is_that_of_onnx_runtime(case: Case):
    import onnxruntime

    built = build(case)
    feeds = {name: narrow(value) for name, value in built.feeds.items()}
    expected = NUMPY.prepare(built.gradient).run(feeds)
    try:
        actual = get_backend("ort-cpu").prepare(built.gradient).run(feeds)
    except BackendError as error:
        if not onnxruntime.__version__.startswith("1.19.2"):
            pytest.skip("this build of onnxruntime has no training kernels")
        if case.ort is None:
            raise
        pytest.skip(f"{case.ort}: {error}")
    agrees = all(
        actual[name].dtype == expected[name].dtype and np.allclose(actual[name], expected[name], rtol=1e-4, atol=1e-5)
        for name in expected
    )
    assert agrees == (case.ort is None), case.ort
