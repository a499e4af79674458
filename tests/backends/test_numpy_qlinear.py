"""The interpreter's kernels of com.microsoft's quantized operators, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from runtime import needs_runtime, overflows

from refgrad.backends import get_backend
from refgrad.errors import BackendError

pytestmark = pytest.mark.interpreter

RNG = np.random.default_rng(0)
F32 = np.float32
KINDS = (np.uint8, np.int8)
Row = tuple[str, list[Any], dict[str, Any]]


def whole(kind: Any, *shape: int) -> Any:
    info = np.iinfo(kind)
    return np.asarray(RNG.integers(info.min, info.max + 1, shape).astype(kind))


def table() -> list[Row]:
    rows: list[Row] = []
    for kind in KINDS:
        zero, other = kind(7), kind(3)
        for op_type, scale in (("QLinearAdd", 0.5), ("QLinearMul", 8)):
            for left, right in (((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (4,)), ((1,), (3, 4)), ((2, 1, 4), (3, 1))):
                a, b = whole(kind, *left), whole(kind, *right)
                rows.append((op_type, [a, F32(0.25), zero, b, F32(0.5), other, F32(scale), kind(9)], {}))
        x = whole(kind, 3, 8)
        rows.append(("QLinearSigmoid", [x, F32(0.03), zero, F32(1 / 256), kind(0)], {}))
        for alpha in (0.25, -0.5):
            rows.append(("QLinearLeakyRelu", [x, F32(0.25), zero, F32(0.5), other], {"alpha": alpha}))
        for opset, axis in ((13, -1), (13, 0), (12, 1), (12, 0)):
            settings = {"axis": axis, "opset": opset}
            rows.append(("QLinearSoftmax", [whole(kind, 2, 3, 5), F32(0.02), zero, F32(1 / 256), kind(0)], settings))
        chosen = RNG.random((3, 8)) > 0.5
        there, back = [x, F32(0.25), zero], [whole(kind, 3, 1), F32(0.5), other]
        rows.append(("QLinearWhere", [chosen, *there, *back, F32(0.5), kind(9)], {}))
        rows.append(("QLinearConcat", [F32(0.5), kind(9), *there, *back], {"axis": 1}))
        rows.append(("QLinearConcat", [F32(0.5), kind(9), *there, x, F32(1), other, *there], {"axis": 0}))
        image, last = whole(kind, 2, 3, 8, 4), whole(kind, 2, 8, 4, 3)
        for pixels, channels_last in ((image, 0), (last, 1)):
            shared = [pixels, F32(0.25), zero, F32(0.125), other]
            rows.append(("QLinearGlobalAveragePool", shared, {"channels_last": channels_last}))
            for extra in (
                {},
                {"strides": [2, 2], "pads": [1, 0, 1, 0]},
                {"count_include_pad": 1, "pads": [1, 1, 1, 1]},
            ):
                settings = {"kernel_shape": [2, 2], "channels_last": channels_last, **extra}
                rows.append(("QLinearAveragePool", shared, settings))
        rows.append(("NhwcMaxPool", [last], {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}))
        a, b = whole(np.uint8, 4, 6), whole(kind, 6, 5)
        bias = RNG.integers(-999, 999, 5).astype(np.int32)
        shared = [a, F32(0.25), np.uint8(90), b, F32(0.5), zero]
        rows.append(("QGemm", [*shared, bias, F32(64), np.uint8(80)], {}))
        rows.append(("QGemm", [*shared, None, F32(64), np.uint8(80)], {}))
        rows.append(("QGemm", [*shared, bias], {"alpha": 2.0}))
        turned = [
            whole(np.uint8, 6, 4),
            F32(0.25),
            np.uint8(90),
            whole(kind, 5, 6),
            F32([0.5, 1, 2, 0.25, 4]),
            whole(kind, 5),
        ]
        rows.append(("QGemm", [*turned, bias, F32(256), np.uint8(80)], {"transA": 1, "transB": 1}))
    return rows


def model(op_type: str, inputs: list[Any], attributes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    arrays = [None if value is None else np.asarray(value) for value in inputs]
    feeds = {f"x{k}": array for k, array in enumerate(arrays) if array is not None}
    names = ["" if array is None else f"x{k}" for k, array in enumerate(arrays)]
    node = helper.make_node(op_type, names, ["y"], domain="com.microsoft", **attributes)
    data = next(array for array in arrays if array is not None and array.dtype.kind in "iu" and array.ndim)
    kind = helper.np_dtype_to_tensor_dtype(data.dtype)
    if op_type == "QGemm":
        kind = TensorProto.UINT8 if len(inputs) > 7 else TensorProto.FLOAT
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in feeds.items()
    ]
    # ONNX Runtime reads scales and zero points of some of these while it prepares them.
    constants = [numpy_helper.from_array(v, n) for n, v in feeds.items() if v.ndim == 0]
    values = [value for value in values if feeds[value.name].ndim]
    graph = helper.make_graph([node], "g", values, [helper.make_tensor_value_info("y", kind, None)], constants)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    fed = {name: array for name, array in feeds.items() if array.ndim}
    return helper.make_model(graph, opset_imports=imports, ir_version=10), fed


@needs_runtime
@pytest.mark.parametrize(("op_type", "inputs", "attributes"), table(), ids=lambda v: v if isinstance(v, str) else "")
def test_results_are_those_of_onnx_runtime(op_type: str, inputs: list[Any], attributes: dict[str, Any]) -> None:
    if overflows([op_type]):
        pytest.skip("ONNX Runtime's sums of products of 8 bits overflow on this processor")
    made, feeds = model(op_type, inputs, attributes)
    got, expected = (get_backend(name).prepare(made).run(feeds)["y"] for name in ("numpy", "ort-cpu"))
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_a_tensor_without_its_zero_point_is_refused() -> None:
    made, feeds = model("QLinearConcat", [F32(1), np.uint8(0), whole(np.uint8, 2, 2), F32(1)], {"axis": 0})
    with pytest.raises(BackendError, match=r"QLinearConcat.*2 inputs follow Y_zero_point"):
        get_backend("numpy").prepare(made).run(feeds)


def test_the_mean_of_quantized_numbers() -> None:
    """ONNX Runtime has no kernel: (0, 1, 2, 5)/2 have the means 1/4 and 7/4, which are 1 and 7 quarters above 10."""
    zero = np.array(1, np.uint8), np.array(10, np.uint8)
    numbers = np.array([[1, 2], [3, 6]], np.uint8)
    for axes, keepdims, expected in (([1], 0, [11, 17]), ([-1], 1, [[11], [17]]), ([0, 1], 0, 14)):
        attributes = {"keepdims": keepdims, "axes": axes}
        made, feeds = model("QLinearReduceMean", [numbers, F32(0.5), zero[0], F32(0.25), zero[1]], attributes)
        result = get_backend("numpy").prepare(made).run(feeds)["y"]
        np.testing.assert_array_equal(result, np.array(expected, np.uint8), strict=True)
