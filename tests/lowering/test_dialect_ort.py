"""Where dialect "ort" takes a kernel of ONNX Runtime, and where that would fail, be wrong or does not exist."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checking import assert_gradient

import refgrad
from refgrad.conformance.case import Case, node_case
from refgrad.protos.domains import MICROSOFT

X = np.linspace(-1, 2, 6, dtype=np.float32).reshape(2, 3)
ROW = X[0]


def _case(op_type: str, *inputs: np.ndarray | None, dtype: type = np.float32, **options: Any) -> Case:
    return node_case(op_type, *(None if a is None else a.astype(dtype) for a in inputs), opset=21, **options)


def _contrib(op_type: str, *inputs: np.ndarray, dtype: type = np.float32, **options: Any) -> Case:
    return node_case(op_type, *(a.astype(dtype) for a in inputs), domain=MICROSOFT, opset=1, **options)


def _dropout(training: bool, **options: Any) -> Case:
    return node_case("Dropout", X, None, np.array(training), opset=21, wrt=["data"], **options)


def _grouped(*sizes: int) -> Case:
    window = np.linspace(0.5, 1, 4 * 2 ** len(sizes), dtype=np.float32).reshape(4, 1, *(2 for _ in sizes))
    return _case("Conv", np.linspace(-1, 2, 4 * int(np.prod(sizes))).reshape(1, 4, *sizes), window, group=4)


KERNELS: dict[str, tuple[Case, set[str]]] = {
    "a convolution in groups": (_grouped(3, 3), {"ConvGrad"}),
    "a convolution of a row in groups": (_grouped(9), set()),
    "a convolution of a volume in groups": (_grouped(3, 3, 3), set()),
    "a mean": (_case("ReduceMean", X), {"Scale"}),
    "a mean of a scalar": (_case("ReduceMean", X[0, 0]), {"Scale"}),
    "a mean in float16": (_case("ReduceMean", X, dtype=np.float16), {"Scale"}),
    "a mean in double": (_case("ReduceMean", X, dtype=np.float64), set()),
    "no means": (_case("ReduceMean", X[:0]), set()),
    "perhaps no means": (_case("ReduceMean", X, shapes="symbolic"), set()),
    "a quotient": (_case("Div", X, X + 3), {"DivGrad"}),
    "a quotient by its denominator": (_case("Div", X, X + 3, wrt=["B"]), {"DivGrad"}),
    "a quotient by its numerator": (_case("Div", X, X + 3, wrt=["A"]), set()),
    "a bias": (_contrib("BiasGelu", X, ROW), {"BiasGeluGrad_dX"}),
    "a bias of the tanh form": (_contrib("FastGelu", X, ROW), {"BiasFastGeluGrad_dX"}),
    "a bias without elements": (_contrib("BiasGelu", X[:, :0], ROW[:0]), {"GeluGrad"}),
    "a bias perhaps without elements": (_contrib("FastGelu", X, ROW, shapes="symbolic"), {"FastGeluGrad"}),
    "a bias in double": (_contrib("BiasGelu", X, ROW, dtype=np.float64), set()),
    "the tanh form": (_case("Gelu", X, approximate="tanh"), {"FastGeluGrad"}),
    "an approximation": (_contrib("QuickGelu", X), {"QuickGeluGrad"}),
    "an approximation in double": (_contrib("QuickGelu", X, dtype=np.float64), {"SigmoidGrad"}),
    "a mask in training": (_dropout(True, constant=["training_mode"]), {"DropoutGrad"}),
    "a mask in inference": (_dropout(False, constant=["training_mode"]), set()),
    "a mask in who knows what": (_dropout(True), set()),
    "rows of probabilities": (_case("Softmax", X, shapes="symbolic"), {"SoftmaxGrad_13"}),
    "columns of probabilities": (_case("Softmax", X, axis=0), {"SoftmaxGrad_13"}),
    "columns of perhaps no probabilities": (_case("Softmax", X, axis=0, shapes="symbolic"), set()),
}


@pytest.mark.parametrize("what", KERNELS)
def test_a_kernel_is_taken_where_it_is_right(what: str) -> None:
    case, expected = KERNELS[what]
    gradient = refgrad.gradient(case.model, case.wrt, dialect="ort")
    forward = {node.op_type for node in case.model.graph.node}
    kernels = {node.op_type for node in gradient.graph.node if node.domain == MICROSOFT} - forward
    assert kernels - {"BroadcastGradientArgs"} == expected


@pytest.mark.parametrize(("alpha", "read"), [(0.1, "Y"), (0.0, "Y"), (-0.5, "X")])
def test_the_kernel_of_leaky_relu_reads_what_has_the_sign_of_the_input(alpha: float, read: str) -> None:
    gradient = refgrad.gradient(_case("LeakyRelu", X, alpha=alpha).model, dialect="ort")
    [kernel] = [node for node in gradient.graph.node if node.op_type == "LeakyReluGrad"]
    assert list(kernel.input) == ["Y_grad", read]


@pytest.mark.parametrize(("quantization", "expected"), [("clipped", 1), ("straight-through", 0), ("zero", 0)])
def test_fake_quantization_has_a_kernel_for_the_clipped_estimate(quantization: str, expected: int) -> None:
    case = _contrib("FakeQuant", X, np.array(0.5), np.array(3.0), outputs=2)
    gradient = refgrad.gradient(case.model, ["input_tensor"], dialect="ort", quantization=quantization)
    assert sum(node.op_type == "FakeQuantGrad" for node in gradient.graph.node) == expected


def test_a_bias_of_layer_normalization_whose_sizes_only_the_run_tells_may_broadcast():
    x, scale, bias = (
        np.random.default_rng(k).standard_normal(s).astype(np.float32) for k, s in enumerate(((2, 2), (2, 2), (2, 1)))
    )
    case = node_case("LayerNormalization", x, scale, bias, constant=["Scale"], axis=0, shapes="symbolic", opset=21)
    assert_gradient(case, "ort", runtime=False)
