from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from checking import assert_gradient

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.resize import cases
from refgrad.errors import BackendError, NoGradientError

CASES = list(cases())
NUMPY = get_backend("numpy")


def rounds_the_width(case: Case) -> bool:
    """Whether ONNX Runtime computes something else: the node tests of onnx do not round the width of align_corners."""
    return "align_corners-" in case.name and "-scales=" in case.name


def ends_the_process(case: Case) -> bool:
    """Whether an ONNX Runtime under test does not survive the model itself: with axes below 0, or with nothing in X."""
    return "axes=[-" in case.name or not all(array.size for array in case.feeds.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_agrees_with_differences(case: Case) -> None:
    assert_gradient(case, runtime=not rounds_the_width(case) and not ends_the_process(case))


@pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")
@pytest.mark.parametrize("case", [case for case in CASES if rounds_the_width(case)], ids=str)
def test_gradient_on_a_runtime_is_the_adjoint_of_what_it_computes(case: Case) -> None:
    run = get_backend("ort-cpu").prepare(case.model).run
    [y] = run(case.feeds).values()
    d_y = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    gradient = get_backend("ort-cpu").prepare(refgrad.gradient(case.model, wrt=["X"])).run
    d_x = gradient({**case.feeds, "Y_grad": d_y})["X_grad"]
    np.testing.assert_allclose(np.vdot(d_x, case.feeds["X"]), np.vdot(d_y, y), rtol=1e-4)


@pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if "Resize" in c.name and c.static and not rounds_the_width(c) and not ends_the_process(c)],
    ids=str,
)
def test_kernel_is_that_of_onnx_runtime(case: Case) -> None:
    try:
        expected = get_backend("ort-cpu").prepare(case.model).run(case.feeds)["Y"]
    except BackendError:
        pytest.skip("ONNX Runtime does not have this form")
    np.testing.assert_allclose(NUMPY.prepare(case.model).run(case.feeds)["Y"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")
@pytest.mark.parametrize("scales", [(1, 1, 2, 1.5), (1, 1, 0.6, 0.55), (1, 1, 2, 0.6)], ids=str)
@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("op_type", "opset"), [("Upsample", 7), ("Upsample", 9), ("Resize", 10)])
def test_kernel_of_an_old_version(op_type: str, opset: int, mode: str, scales: tuple[float, ...]) -> None:
    if op_type == "Upsample" and min(scales) < 1:
        pytest.skip("ONNX Runtime only enlarges by it")
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 5)).astype(np.float32)
    if opset == 7:
        case = node_case(op_type, x, opset=opset, mode=mode, scales=list(scales))
    else:
        case = node_case(op_type, x, np.float32(scales), opset=opset, mode=mode)
    expected = get_backend("ort-cpu").prepare(case.model).run(case.feeds)["Y"]
    np.testing.assert_allclose(NUMPY.prepare(case.model).run(case.feeds)["Y"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float16], ids=lambda d: d.__name__)
def test_kernel_rounds_what_it_weighs_to_the_type_of_x(dtype: type) -> None:
    case = node_case("Resize", np.array([0, 1, 200], dtype), None, np.float32([2]), mode="linear", wrt=[])
    result = NUMPY.prepare(case.model).run(case.feeds)["Y"]
    assert result.dtype == dtype
    np.testing.assert_allclose(result, np.array([0, 0.25, 0.75, 50.75, 150.25, 200]).astype(dtype), atol=1)


def test_a_float64_model_has_float64_weights() -> None:
    x = np.random.default_rng(0).standard_normal(5)
    case = node_case("Resize", x, None, np.float32([1.7]), mode="cubic", constant=["scales"], opset=19)
    d_y = np.random.default_rng(1).standard_normal(8)
    d_x = NUMPY.prepare(refgrad.gradient(case.model)).run({"X": x, "Y_grad": d_y})["X_grad"]
    np.testing.assert_allclose(np.vdot(d_x, x), np.vdot(d_y, NUMPY.prepare(case.model).run({"X": x})["Y"]), rtol=1e-14)


def test_the_sizes_are_taken_where_the_scales_are_empty() -> None:
    x = np.random.default_rng(0).standard_normal((1, 1, 3, 4)).astype(np.float32)
    empty, sizes = np.zeros(0, np.float32), np.array((1, 1, 5, 7))
    case = node_case("Resize", x, empty, empty, sizes, constant=["roi", "scales", "sizes"], opset=16, wrt=["X"])
    assert_gradient(case, runtime=False)


@pytest.mark.parametrize("name", ["roi", "scales"])
def test_a_derivative_by_what_moves_the_points_is_refused(name: str) -> None:
    x, numbers = np.zeros((3, 4), np.float32), np.float32([2, 2])
    case = node_case(
        "Resize", x, np.float32([0, 0, 1, 1]), numbers, coordinate_transformation_mode="tf_crop_and_resize"
    )
    with pytest.raises(NoGradientError, match=f"Resize has no derivative: .*by {name}: it moves the points"):
        refgrad.gradient(case.model, wrt=[name])


def test_an_initializer_of_scales_is_no_weight() -> None:
    """Exporters keep scales and the empty roi as float initializers: they must not be what the gradient is asked for."""
    x, scales = np.zeros((3, 4), np.float32), np.float32([2, 2])
    case = node_case("Resize", x, np.zeros(0, np.float32), scales, constant=["roi", "scales"])
    assert [value.name for value in refgrad.gradient(case.model).graph.output] == ["X_grad"]


def test_values_that_are_quantised_are_resized_too() -> None:
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 19]>
        g (float[2, 3] x) => (float[N, M] y) <float s = {0.1}, uint8 z = {128}, float[2] k = {2.0, 3.0}> {
            q = QuantizeLinear(x, s, z)
            r = Resize<mode = "linear">(q, , k)
            y = DequantizeLinear(r, s, z)
        }""")
    gradient = refgrad.gradient(model, wrt=["x"], quantization="straight-through")
    feeds = {"x": np.ones((2, 3), np.float32), "y_grad": np.ones((4, 9), np.float32)}
    np.testing.assert_allclose(NUMPY.prepare(gradient).run(feeds)["x_grad"].sum(), 36, rtol=1e-6)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("constant", [True, False])
def test_a_crop_that_keeps_the_size(constant: bool, shapes: str) -> None:
    """ONNX Runtime copies such an axis, but from where the crop begins."""
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear"}
    form = {"constant": ("roi", "scales") if constant else (), "shapes": shapes, "wrt": ["X"], "opset": 19}
    roi, scales = np.array([0.13, -0.3, 0.8, 0.9], np.float32), np.ones(2, np.float32)
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    assert_gradient(node_case("Resize", x, roi, scales, **crop, **form), runtime=False)
