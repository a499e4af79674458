from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from checking import assert_gradient, assert_second_derivative
from onnx.reference import ReferenceEvaluator

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.resize import COORDINATES, FILTERS, cases, moved
from refgrad.conformance.problems.feeds import widened
from refgrad.errors import BackendError

pytestmark = pytest.mark.slow

CASES = list(cases())
MOVED = list(moved())
NUMPY = get_backend("numpy")


def rounds_the_width(case: Case) -> bool:
    """True if ONNX Runtime computes something else: the node tests of onnx do not round the width of align_corners."""
    return "align_corners-" in case.name and "-scales=" in case.name


def ends_the_process(case: Case) -> bool:
    """True if an ONNX Runtime under test does not survive the model itself: with axes below 0, or with nothing in X."""
    return "axes=[-" in case.name or not all(array.size for array in case.feeds.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_agrees_with_differences(case: Case) -> None:
    assert_gradient(case, runtime=not rounds_the_width(case) and not ends_the_process(case))


@pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")
@pytest.mark.parametrize("case", [case for case in CASES if rounds_the_width(case)], ids=str)
def test_gradient_on_a_runtime_is_the_adjoint_of_what_it_computes(case: Case) -> None:
    try:
        [y] = get_backend("ort-cpu").prepare(case.model).run(case.feeds).values()
    except BackendError:
        assert "mode=linear-exclude_outside" in case.name, "ONNX Runtime has that attribute for cubic alone"
        return
    d_y = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    gradient = get_backend("ort-cpu").prepare(refgrad.gradient(case.model, wrt=["X"])).run
    d_x = gradient({**case.feeds, "Y_grad": d_y})["X_grad"]
    np.testing.assert_allclose(np.vdot(d_x, case.feeds["X"]), np.vdot(d_y, y), rtol=1e-4)


@pytest.mark.matrix
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


# By what moves the points: the scales and the roi


@pytest.mark.parametrize("case", [c for c in MOVED if "static" in c.name], ids=str)
def test_the_derivatives_have_derivatives(case: Case) -> None:
    if case.name.startswith("Resize-4x5") and "cubic" in case.name and "antialias" not in case.name:
        return  # as many nodes as with antialias, and fewer terms
    assert_second_derivative(case)


def by_reference(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """What onnx.reference computes in float64, the scales too."""
    return ReferenceEvaluator(model).run(None, dict(feeds))[0]


@pytest.mark.parametrize("filter_", [f for f in FILTERS if f["mode"] != "nearest"], ids=str)
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_derivatives_agree_with_differences_of_the_reference(coordinates: str, filter_: dict[str, Any]) -> None:
    """onnx.reference shares nothing with the interpreter. It reads a crop by a size that it does not round: give the sizes.

    It computes the weights of cubic in float32, whatever the type of X.
    """
    x = np.random.default_rng(0).standard_normal((4, 5))
    crop = coordinates == "tf_crop_and_resize"
    roi = np.array([0.13, -0.31, 0.83, 1.23]) if crop else None
    scales, sizes = (None, np.array([6, 3])) if crop else (np.array([1.7, 0.7], np.float32), None)
    name = "roi" if crop else "scales"
    case = node_case("Resize", x, roi, scales, sizes, opset=19, coordinate_transformation_mode=coordinates, **filter_)
    feeds = {key: value.astype(np.float64) if value.dtype == np.float32 else value for key, value in case.feeds.items()}
    d_y = np.random.default_rng(1).standard_normal(by_reference(case.model, feeds).shape)
    gradient = NUMPY.prepare(refgrad.gradient(case.model, wrt=[name]), precision="float64").run(
        {**feeds, "Y_grad": d_y}
    )
    expected = np.zeros(feeds[name].size)
    step, tolerance = (3e-3, 2e-3) if filter_["mode"] == "cubic" else (1e-6, 1e-6)
    for k, way in enumerate(np.eye(expected.size)):
        ends = [by_reference(case.model, feeds | {name: feeds[name] + sign * step * way}) for sign in (1, -1)]
        expected[k] = np.vdot(d_y, ends[0] - ends[1]) / (2 * step)
    np.testing.assert_allclose(gradient[f"{name}_grad"], expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("antialias", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 2.0, 3.0, 0.5, 0.25, 1.5])
@pytest.mark.parametrize("coordinates", COORDINATES[:-1])
def test_at_a_whole_size_it_is_the_derivative_towards_a_larger_scale(
    coordinates: str, scale: float, antialias: int
) -> None:
    """A smaller scale takes an element off Y, and many points lie on elements of X: one side alone has a derivative."""
    x = np.random.default_rng(0).standard_normal((2, 4))
    named: dict[str, Any] = {"coordinate_transformation_mode": coordinates, "mode": "linear", "antialias": antialias}
    case = node_case("Resize", x, None, np.array([scale], np.float32), axes=[1], opset=19, wrt=["scales"], **named)
    forward = NUMPY.prepare(case.model, precision="float64").run
    at = [forward({"X": x, "scales": np.array([scale + k * 1e-6])})["Y"] for k in range(3)]
    d_y = np.random.default_rng(1).standard_normal(at[0].shape)
    gradient = NUMPY.prepare(refgrad.gradient(case.model, wrt=["scales"]), precision="float64")
    got = gradient.run({"X": x, "scales": np.array([scale]), "Y_grad": d_y})["scales_grad"]
    expected = np.vdot(d_y, -3 * at[0] + 4 * at[1] - at[2]) / 2e-6
    np.testing.assert_allclose(got, [expected], rtol=1e-6, atol=1e-8)


def test_a_crop_of_everything_has_the_derivatives_from_within() -> None:
    """The last point lies on the last element: beyond it there is nothing, so the slope is that of the elements before."""
    x, roi, scales = np.array([1.0, 2.0, 4.0]), np.array([0.0, 1.0]), np.float32([1])
    case = node_case("Resize", x, roi, scales, coordinate_transformation_mode="tf_crop_and_resize", mode="linear")
    gradient = NUMPY.prepare(refgrad.gradient(case.model, wrt=["roi", "scales"]))
    found = gradient.run({**case.feeds, "Y_grad": np.ones(3)})
    # dY/dx = (1, 2, 2); the points are 2·start, start + end and 2·end
    np.testing.assert_allclose(found["roi_grad"], [1 * 2 + 2 * 1, 2 * 1 + 2 * 2])
    np.testing.assert_allclose(found["scales_grad"], [0])


@pytest.mark.parametrize("name", ["roi", "scales"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_what_resize_does_not_read_has_a_derivative_of_zero(mode: str, name: str) -> None:
    """The scales are not read beside sizes, nor in a crop without antialias, the roi not without a crop."""
    x, roi, scales = np.ones((3, 4), np.float32), np.float32([0.1, 0.1, 0.8, 0.8]), np.float32([1.7, 1.3])
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize"} if name == "scales" else {}
    gradient = refgrad.gradient(node_case("Resize", x, roi, scales, mode=mode, **crop).model, wrt=[name])
    feeds = {"X": x, "roi": roi, "scales": scales, "Y_grad": np.ones((5, 5), np.float32)}
    found = NUMPY.prepare(gradient).run({k: v for k, v in feeds.items() if k in {i.name for i in gradient.graph.input}})
    np.testing.assert_array_equal(found[f"{name}_grad"], np.zeros(feeds[name].shape))


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float64], ids=lambda k: np.dtype(k).name)
@pytest.mark.parametrize("of_roi", [np.float16, np.float64], ids=lambda k: np.dtype(k).name)
def test_each_adjoint_has_the_type_of_its_input(kind: type, of_roi: type) -> None:
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(kind)
    roi, scales = np.array([0.13, -0.31, 0.83, 1.23], of_roi), np.array([1.7, 0.7], np.float32)
    crop: dict[str, Any] = {"coordinate_transformation_mode": "tf_crop_and_resize", "antialias": 1, "mode": "linear"}
    case = node_case("Resize", x, roi, scales, opset=19, **crop)
    gradient = refgrad.gradient(case.model, wrt=["X", "roi", "scales"])
    onnx.checker.check_model(gradient, full_check=True)
    feeds = {**case.feeds, "Y_grad": np.ones((6, 3), kind)}
    found = NUMPY.prepare(gradient).run(feeds)
    exact = NUMPY.prepare(gradient, precision="float64").run(widened(feeds))
    for name, value in (("X", x), ("roi", roi), ("scales", scales)):
        assert found[f"{name}_grad"].dtype == value.dtype
        error = np.abs(found[f"{name}_grad"].astype(np.float64) - exact[f"{name}_grad"]).max()
        eps = max(ml_dtypes.finfo(t).eps for t in (kind, value.dtype))
        assert error <= 8 * eps * max(1, np.abs(exact[f"{name}_grad"]).max())


@pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")
@pytest.mark.parametrize("constant", [(), ("roi",)], ids=str)
def test_a_crop_in_float16_on_a_runtime(constant: tuple[str, ...]) -> None:
    """It reads a roi in float16 only beside an X in float16, and the weights are float32."""
    x, roi = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float16), np.float16([0.13, -0.31, 0.83, 1.23])
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear"}
    case = node_case("Resize", x, roi, None, np.array([6, 3]), opset=19, constant=constant, **crop)
    gradient = refgrad.gradient(case.model, wrt=["X", "roi"])
    feeds = {**case.feeds, "Y_grad": np.ones((6, 3), np.float16)}
    expected = NUMPY.prepare(gradient).run(feeds)
    for name, value in get_backend("ort-cpu").prepare(gradient).run(feeds).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("op_type", "opset"), [("Upsample", 9), ("Resize", 10), ("Resize", 11)])
def test_computed_scales_of_an_old_opset(op_type: str, opset: int) -> None:
    roi = ", roi" if opset == 11 else ""
    asymmetric = ', coordinate_transformation_mode = "asymmetric"' if opset == 11 else ""
    model = onnx.parser.parse_model(f"""<ir_version: 7, opset_import: ["" : {opset}]>
        g (float[3, 4] x, float[2] s) => (float[N, M] y) <float[2] two = {{2.0, 2.0}}, float[0] roi = {{}}> {{
            scales = Mul(s, two)
            y = {op_type}<mode = "linear"{asymmetric}>(x{roi}, scales)
        }}""")
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32), "s": np.float32([0.85, 0.65])}
    assert_gradient(Case(f"{op_type}-{opset}", model, feeds, ("x", "s")), runtime=False)


def test_scales_that_move_quantised_values() -> None:
    """X holds whole numbers then; the cotangent of the scales is a float all the same."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 19]>
        g (float[2, 3] x, float[2] k) => (float[N, M] y) <float s = {0.1}, uint8 z = {128}> {
            q = QuantizeLinear(x, s, z)
            r = Resize<mode = "linear">(q, , k)
            y = DequantizeLinear(r, s, z)
        }""")
    gradient = refgrad.gradient(model, wrt=["k"], quantization="straight-through")
    feeds = {"x": np.float32([[0, 1, 3], [0, 1, 3]]), "k": np.float32([1.3, 1.3])}
    found = NUMPY.prepare(gradient).run({**feeds, "y_grad": np.ones((2, 3), np.float32)})["k_grad"]
    plain = node_case("Resize", feeds["x"], None, feeds["k"], mode="linear", opset=19)
    expected = NUMPY.prepare(refgrad.gradient(plain.model, wrt=["scales"])).run(
        {"X": feeds["x"], "scales": feeds["k"], "Y_grad": np.ones((2, 3), np.float32)}
    )["scales_grad"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_nothing_to_resize(mode: str, coordinates: str) -> None:
    """No element of X, none of Y along one axis, or one alone."""
    roi = np.float32([0.1, 0.1, 0.9, 0.9]) if coordinates == "tf_crop_and_resize" else None
    for shape, scales in (((0, 3), (1.3, 1.3)), ((2, 3), (0.3, 1.3)), ((1, 1), (1.3, 1.0)), ((3, 3), (0.4, 0.4))):
        x, factors = np.ones(shape, np.float32), np.float32(scales)
        case = node_case("Resize", x, roi, factors, coordinate_transformation_mode=coordinates, mode=mode, antialias=1)
        gradient = refgrad.gradient(case.model)
        y = NUMPY.prepare(case.model).run(case.feeds)["Y"]
        for name, value in NUMPY.prepare(gradient).run({**case.feeds, "Y_grad": np.ones_like(y)}).items():
            assert np.isfinite(value).all(), (name, shape)


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
