"""Forms of a gradient that are chosen by what is known of sizes and of the operators behind: each side of each choice."""

import tracemalloc

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto, helper

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import node_case
from refgrad.lowering.onnx import indexing


def run(model, feeds, backend="numpy", **options):
    return get_backend(backend).prepare(model, **options).run(feeds)


def op_types(model):
    return [node.op_type for node in model.graph.node]


def parsed(text, opset=21):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]>\n{text}')


CONVOLUTIONS = {
    "large images": ((2, 2, 48, 48), (3, 2, 3, 3), {"pads": [1, 1, 1, 1]}),
    "small images": ((2, 2, 9, 8), (3, 2, 3, 3), {"pads": [1, 1, 1, 1]}),
    "large images, many channels": ((2, 6, 48, 47), (5, 6, 3, 3), {"pads": [2, 1, 0, 2]}),
    "large images, strides along the last axis": (
        (2, 6, 48, 95),
        (5, 6, 3, 2),
        {"strides": [1, 2], "dilations": [2, 1], "pads": [3, 0, 2, 1]},
    ),
    "large images, strides": ((1, 2, 95, 96), (3, 2, 3, 2), {"strides": [2, 1], "pads": [1, 0, 0, 1]}),
    "large images, many channels, strides": ((1, 8, 95, 95), (3, 8, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "three axes, many channels, strides": (
        (2, 7, 9, 7, 7),
        (2, 7, 5, 4, 3),
        {"pads": [2, 1, 2, 1, 0, 1], "strides": [3, 2, 2]},
    ),
    "few windows": ((3, 2, 7, 6), (3, 2, 3, 2), {"pads": [1, 1, 1, 0], "dilations": [1, 2]}),
    "small images, strides": ((3, 2, 9, 8), (3, 2, 3, 3), {"strides": [2, 3], "pads": [1, 0, 2, 1]}),
    "small images, dilations": ((2, 2, 9, 8), (3, 2, 3, 2), {"dilations": [2, 3], "pads": [1, 3, 2, 0]}),
    "one small image": ((1, 2, 9, 8), (3, 2, 3, 3), {"pads": [1, 1, 1, 1]}),
    "many maps of one axis": ((2, 2, 30), (3, 2, 5), {"strides": [2], "pads": [2, 1]}),
    "large images, one element": ((1, 2, 48, 48), (3, 2, 1, 1), {}),
    "a channel each": ((2, 4, 9, 8), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}),
    "a channel each, strides": ((2, 4, 9, 8), (4, 1, 3, 3), {"group": 4, "strides": [2, 2], "pads": [1, 0, 2, 1]}),
    "a channel each, dilations": (
        (2, 3, 12, 11),
        (3, 1, 3, 2),
        {"group": 3, "dilations": [2, 3], "pads": [2, 0, 1, 3]},
    ),
    "a channel each, strides along the last axis": (
        (2, 4, 9, 8),
        (4, 1, 3, 3),
        {"group": 4, "strides": [1, 2], "pads": [1, 0, 2, 1]},
    ),
    "a channel each, strides along the first axis": ((2, 4, 9, 8), (4, 1, 3, 3), {"group": 4, "strides": [2, 1]}),
    "a channel each, strides beyond the kernel": (
        (2, 3, 11, 8),
        (3, 1, 3, 3),
        {"group": 3, "strides": [4, 2], "pads": [2, 1, 3, 0]},
    ),
    "a channel each, strides and dilations": (
        (2, 3, 12, 11),
        (3, 1, 3, 3),
        {"group": 3, "strides": [2, 2], "dilations": [2, 1], "pads": [2, 1, 2, 0]},
    ),
    "a channel each, a large kernel, strides": (
        (2, 3, 13, 12),
        (3, 1, 7, 3),
        {"group": 3, "strides": [3, 2], "pads": [5, 1, 4, 1]},
    ),
    "a channel each, pads beyond the kernel, strides": (
        (2, 3, 7, 6),
        (3, 1, 3, 3),
        {"group": 3, "strides": [2, 2], "pads": [4, 1, 1, 0]},
    ),
    "a channel each, pads beyond the kernel": ((2, 3, 5, 6), (3, 1, 2, 3), {"group": 3, "pads": [2, 1, 1, 0]}),
    "a channel each, pads beyond the kernel along the last axis": (
        (2, 3, 5, 6),
        (3, 1, 2, 3),
        {"group": 3, "pads": [1, 4, 0, 3]},
    ),
    "a channel each, one axis of the kernel": ((2, 3, 7, 6), (3, 1, 3, 1), {"group": 3, "pads": [2, 0, 1, 0]}),
    "a channel each, three axes": (
        (2, 3, 5, 6, 7),
        (3, 1, 3, 2, 3),
        {"group": 3, "pads": [2, 0, 1, 1, 1, 2], "dilations": [1, 2, 1]},
    ),
    "a channel each, three axes, strides along the second": (
        (2, 3, 5, 6, 7),
        (3, 1, 3, 2, 3),
        {"group": 3, "pads": [1, 0, 1, 0, 1, 1], "strides": [1, 2, 1]},
    ),
    "a channel each, three axes, strides along all": (
        (2, 3, 7, 9, 8),
        (3, 1, 3, 5, 3),
        {"group": 3, "pads": [1, 2, 1, 0, 3, 1], "strides": [2, 3, 2]},
    ),
    "two maps a channel": ((2, 3, 9, 8), (6, 1, 3, 3), {"group": 3, "pads": [1, 1, 1, 1]}),
    "groups": ((2, 4, 9, 8), (6, 2, 3, 3), {"group": 2, "pads": [2, 2, 1, 0]}),
    "groups, pads beyond the kernel": ((1, 4, 5, 5), (4, 2, 2, 2), {"group": 2, "pads": [2, 3, 1, 2]}),
    "a large kernel": ((2, 2, 11, 12), (3, 2, 5, 5), {"pads": [2, 2, 2, 2]}),
    "one element": ((2, 3, 7, 6), (4, 3, 1, 1), {}),
    "one axis": ((2, 3, 12), (3, 1, 4), {"group": 3, "pads": [3, 0]}),
    "three axes": ((2, 2, 5, 6, 7), (3, 2, 3, 2, 3), {"pads": [1, 1, 1, 1, 0, 1]}),
    "three axes, many channels": (
        (2, 7, 5, 6, 7),
        (3, 7, 3, 3, 3),
        {"pads": [1, 2, 1, 2, 0, 1], "dilations": [1, 1, 2]},
    ),
    "three axes, many maps": ((2, 3, 5, 6, 7), (5, 3, 3, 3, 3), {"pads": [1, 2, 1, 2, 0, 1]}),
    "three axes, strides": ((1, 2, 7, 6, 7), (3, 2, 3, 2, 3), {"strides": [2, 1, 2], "pads": [1, 1, 1, 1, 0, 1]}),
}


@pytest.mark.parametrize("shapes", ["static", "symbolic"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, shapes):
    """Conv is linear in both operands: Σ dY·Conv(V, W) = Σ dX·V and Σ dY·Conv(X, U) = Σ dW·U for any V and U."""
    rng = np.random.default_rng(0)
    size, kernel, attributes = CONVOLUTIONS[name]
    x, v = rng.standard_normal((2, *size))
    w, u = rng.standard_normal((2, *kernel))
    case = node_case("Conv", x, w, shapes=shapes, opset=21, **attributes)
    y = run(case.model, {"X": x, "W": w})["Y"]
    d_y = rng.standard_normal(y.shape)
    gradient = refgrad.gradient(case.model)
    found = run(gradient, {"X": x, "W": w, "Y_grad": d_y})
    for given, other, moved in (("X", {"W": w}, v), ("W", {"X": x}, u)):
        expected = (d_y * run(case.model, {given: moved, **other})["Y"]).sum()
        np.testing.assert_allclose((found[f"{given}_grad"] * moved).sum(), expected, rtol=1e-10)
    pytest.importorskip("onnxruntime")
    single = node_case("Conv", x.astype("f4"), w.astype("f4"), shapes=shapes, opset=21, **attributes)
    feeds = {"X": x.astype("f4"), "W": w.astype("f4"), "Y_grad": d_y.astype("f4")}
    for key, value in run(refgrad.gradient(single.model), feeds, "ort-cpu").items():
        np.testing.assert_allclose(value, found[key], rtol=0, atol=3e-6 * np.abs(found[key]).max())


@pytest.mark.parametrize(
    ("name", "at_once", "in_phases"),  # dX of all images at once; dW by rows of the image in phases
    [
        ("few windows", True, False),
        ("small images", False, False),
        ("small images, strides", True, False),
        ("many maps of one axis", True, False),
        ("groups, pads beyond the kernel", False, False),
        ("one small image", False, False),
        ("large images", False, False),
        ("three axes", False, False),
        ("a channel each, strides", True, True),
        ("a channel each, strides beyond the kernel", True, False),
        ("a channel each, a large kernel, strides", True, True),
        ("a channel each, pads beyond the kernel, strides", True, False),
        ("a channel each, strides and dilations", True, False),
        ("a channel each, strides along the last axis", True, False),
        ("large images, many channels, strides", False, True),
        ("three axes, many channels, strides", False, True),
    ],
)
def test_which_form_a_convolution_has(name, at_once, in_phases):
    """The cases above are on both sides of each choice."""
    size, kernel, attributes = CONVOLUTIONS[name]
    model = node_case("Conv", np.zeros(size, "f4"), np.zeros(kernel, "f4"), opset=21, **attributes).model
    found = op_types(refgrad.gradient(model))
    assert ("Squeeze" in found, "Gather" in found) == (at_once, in_phases)


@pytest.mark.parametrize(("count", "in_rows"), [(5, None), (64, None), (65, None), (65, 1)])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_rows(monkeypatch, count, in_rows, kind):
    """Few rows are a product, many are scattered: in one row, or if there are very many, in rows."""
    if in_rows is not None:
        monkeypatch.setattr(indexing, "_IN_ROWS", in_rows)
    rng = np.random.default_rng(0)
    data, indices = rng.standard_normal((count, 3)).astype(kind), rng.integers(-count, count, (4, 25))
    case = node_case("Gather", data, indices, constant=())
    gradient = refgrad.gradient(case.model)
    d_y = rng.standard_normal((4, 25, 3)).astype(kind)
    found = run(gradient, {"data": data, "indices": indices, "output_grad": d_y})["data_grad"]
    expected = np.zeros((count, 3))
    np.add.at(expected, indices, d_y.astype("f8"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=np.finfo(kind).eps * np.abs(expected).max() * 4)
    assert ("Gemm" in op_types(gradient)) == (count <= 64 and kind != np.float16)


def test_rows_before_a_logarithm_are_scattered():
    """A product would spread what is infinite over all rows."""
    model = parsed("agraph (float[3, 2] x, int64[2] i) => (float[2, 2] y) { t = Gather(x, i)  y = Log(t) }")
    feeds = {"x": np.float32([[0, 1], [2, 3], [4, 5]]), "i": np.int64([0, 1]), "y_grad": np.ones((2, 2), "f4")}
    with np.errstate(divide="ignore"):
        found = run(refgrad.gradient(model, ["x"]), feeds)["x_grad"]
    np.testing.assert_allclose(found, [[np.inf, 1], [0.5, 1 / 3], [0, 0]], rtol=1e-6)


MASKS = {
    "Relu": "Relu(x)",
    "ThresholdedRelu": "ThresholdedRelu<alpha = 0.5>(x)",
    "Shrink": "Shrink<lambd = 1.0>(x)",
    "Clip": "Clip(x, zero, four)",
    "Max": "Max(x, zero)",
    "HardSigmoid": "HardSigmoid<alpha = 0.5, beta = 0.0>(x)",
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """Where an infinite cotangent may come, what does not pass is selected away; elsewhere it is a product."""
    text = (
        f"agraph (float[4] x) => (float[4] y) <float zero = {{0}}, float four = {{4}}> "
        f"{{ c = Greater(x, zero)  t = {MASKS[name]}  y = BEHIND(t) }}"
    )
    x, d_y = np.float32([-3, -0.25, 1.5, 3]), np.float32([1, 2, 3, 4])
    plain = refgrad.gradient(parsed(text.replace("BEHIND", "Sin")), ["x"])
    singular = refgrad.gradient(parsed(text.replace("BEHIND", "Sqrt")), ["x"])
    assert op_types(plain).count("Where") < op_types(singular).count("Where")
    with np.errstate(divide="ignore", invalid="ignore"):
        found = run(singular, {"x": x, "y_grad": d_y})["x_grad"]
    assert found[0] == 0 or name == "Shrink"
    assert found[1] == 0
    whole = parsed(text.replace("BEHIND", "Sin"))
    got = run(plain, {"x": x, "y_grad": d_y})["x_grad"]
    step = np.float32(2**-7)
    up, down = (run(whole, {"x": x + s})["y"] for s in (step, -step))
    np.testing.assert_allclose(got, d_y * (up - down) / (2 * step), atol=2e-3)


DIVIDING = {
    "LayerNormalization": "LayerNormalization<axis = -1, epsilon = EPSILON>(r, s)",
    "RMSNormalization": "RMSNormalization<axis = -1, epsilon = EPSILON>(r, s)",
    "GroupNormalization": "GroupNormalization<num_groups = 1, epsilon = EPSILON>(r, s, b)",
    "InstanceNormalization": "InstanceNormalization<epsilon = EPSILON>(r, s, b)",
    "BatchNormalization": "BatchNormalization<epsilon = EPSILON>(r, s, b, b, b)",
    "LRN": "LRN<size = 1, bias = EPSILON>(r)",
}


@pytest.mark.parametrize("name", DIVIDING)
def test_a_mask_before_what_may_divide_by_0_selects(name):
    """A Where passes no cotangent to the element that is divided by 0: NaN comes from 0·∞, and the mask is 0 there."""
    text = (
        "agraph (float[2, 2, 2] x, bool[2, 1, 1] ok) => (float[2, 2, 2] y) "
        "<float[2] s = {1, 1}, float[2] b = {0, 0}, float zero = {0}> "
        f"{{ r = Relu(x)  n = {DIVIDING[name]}  y = Where(ok, n, zero) }}"
    )
    guarded, plain = (refgrad.gradient(parsed(text.replace("EPSILON", e), 23), ["x"]) for e in ("0.0", "0.5"))
    assert op_types(guarded).count("Where") > op_types(plain).count("Where")
    x = np.float32([[[1, 2], [3, 5]], [[-1, -1], [-1, -1]]])
    feeds = {"x": x, "ok": np.array([[[True]], [[False]]]), "y_grad": np.ones_like(x)}
    with np.errstate(divide="ignore", invalid="ignore"):
        found = run(guarded, feeds)["x_grad"]
    np.testing.assert_array_equal(found[1], 0)


def test_a_mask_in_a_body_selects():
    """Of what lies behind a body nothing is known."""
    body = helper.make_graph(
        [helper.make_node("Relu", ["a"], ["r"], "relu"), helper.make_node("Add", ["r", "e"], ["n"], "add")],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("a", "e")],
        [helper.make_tensor_value_info("n", TensorProto.FLOAT, [2])],
    )
    scan = helper.make_node("Scan", ["x", "es"], ["y"], "scan", body=body, num_scan_inputs=1)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [scan],
        "agraph",
        [value("x", TensorProto.FLOAT, [2]), value("es", TensorProto.FLOAT, [3, 2])],
        [value("y", TensorProto.FLOAT, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    gradient = refgrad.gradient(model)
    [backward] = [node for node in gradient.graph.node if node.op_type == "Scan" and node.name != "scan"]
    assert "Where" in [node.op_type for node in backward.attribute[0].g.node]


@pytest.mark.parametrize("perm", ["1, 0", None])
def test_a_weight_that_is_transposed_already(perm):
    """Its transpose is what was transposed."""
    how = f"<perm = [{perm}]>" if perm else ""
    model = parsed(
        f"agraph (float[2, 3, 4] x, float[5, 4] w) => (float[2, 3, 5] y) {{ t = Transpose{how}(w)  y = MatMul(x, t) }}"
    )
    gradient = refgrad.gradient(model, ["x"])
    assert "Transpose" not in op_types(gradient)
    rng = np.random.default_rng(0)
    x, w, d_y = (rng.standard_normal(shape).astype("f4") for shape in ((2, 3, 4), (5, 4), (2, 3, 5)))
    found = run(gradient, {"x": x, "w": w, "y_grad": d_y})["x_grad"]
    np.testing.assert_allclose(found, d_y @ w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op_type", ["LayerNormalization", "RMSNormalization"])
@pytest.mark.parametrize(("scale", "rows"), [(5, 3), (1, 3), (5, 0), (5, 1)])
@pytest.mark.parametrize("shapes", ["static", "symbolic"])
def test_normalizations(op_type, scale, rows, shapes):
    """A scale for each element and a size that is known make products of means; another scale does not."""
    rng = np.random.default_rng(0)
    x, s = rng.standard_normal((rows, 2, 5)), rng.standard_normal(scale)
    inputs = [x, s, rng.standard_normal(5)][: 3 if op_type == "LayerNormalization" and scale > 1 else 2]
    double = node_case(op_type, *inputs, opset=23, shapes=shapes)
    names = list(double.feeds)
    seed = rng.standard_normal(x.shape)
    found = run(refgrad.gradient(double.model), {**double.feeds, "Y_grad": seed})
    step = 1e-6
    for name in names:
        moved = rng.standard_normal(double.feeds[name].shape)
        up, down = (
            run(double.model, {**double.feeds, name: double.feeds[name] + sign * step * moved})["Y"] for sign in (1, -1)
        )
        slope = (seed * (up - down)).sum() / (2 * step)
        np.testing.assert_allclose((found[f"{name}_grad"] * moved).sum(), slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("op_type", ["Elu", "Celu", "Selu"])
@pytest.mark.parametrize("alpha", [1.0, 2.5, 0.25, -0.75])
def test_exponentials_of_either_sign(op_type, alpha):
    x = np.array([-2.0, -0.25, 0.5, 3.0], np.float32)
    gamma = 1.5 if op_type == "Selu" else 1.0
    below = np.exp(x / alpha) if op_type == "Celu" else gamma * alpha * np.exp(x)
    more = {"gamma": gamma} if op_type == "Selu" else {}
    case = node_case(op_type, x, alpha=alpha, **more)
    found = run(refgrad.gradient(case.model), {"X": x, "Y_grad": np.ones(4, "f4")})["X_grad"]
    np.testing.assert_allclose(found, np.where(x > 0, gamma, below), rtol=0, atol=2e-6)


def test_a_where_keeps_what_is_masked_from_a_nan():
    """A row of scores that are all hidden has no softmax; what hides them lets no NaN through."""
    model = parsed(
        "agraph (float[2, 2] x, bool[2, 2] hidden) => (float[2, 2] y) <float low = {-inf}> "
        "{ s = Where(hidden, low, x)  y = Softmax(s) }".replace("-inf", "0")
    )
    model.graph.initializer[0].float_data[:] = [-np.inf]
    feeds = {"x": np.ones((2, 2), "f4"), "hidden": np.array([[True, True], [False, False]])}
    with np.errstate(invalid="ignore"):
        found = run(refgrad.gradient(model, ["x"]), feeds | {"y_grad": np.float32([[0, 0], [1, 2]])})["x_grad"]
    np.testing.assert_allclose(found, [[0, 0], [-0.25, 0.25]], atol=1e-6)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize(
    ("size", "pads", "in_pieces"),
    [
        ((7, 5), (2, 1, 1, 3), {"reflect": False, "edge": True, "wrap": True}),
        ((7, 9), (2, 0, 1, 3), {"reflect": True, "edge": True, "wrap": True}),
        ((4, 3), (3, 0, 3, 0), {"reflect": False, "edge": True, "wrap": False}),
        ((4, 3), (2, 0, 0, 2), {"reflect": True, "edge": True, "wrap": True}),
        ((4, 3), (-1, 2, 2, 0), dict.fromkeys(("reflect", "edge", "wrap"), False)),
        ((5, 1), (0, 0, 0, 0), dict.fromkeys(("reflect", "edge", "wrap"), True)),
        ((1, 3), (1, 0, 1, 0), {"reflect": False, "edge": False, "wrap": False}),
    ],
)
@pytest.mark.parametrize("kind", [np.float64, np.float16])
def test_padding_by_copies(mode, size, pads, in_pieces, kind):
    """Where the copies of an axis come from places apart, their cotangents are cut off and added; else they are scattered."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, size).astype(kind)
    if mode == "reflect" and any(p >= n for n, p in zip(size * 2, pads, strict=True)):
        pytest.skip("Pad reflects no more than the axis has.")
    case = node_case("Pad", x, np.array(pads, np.int64), constant=["pads"], mode=mode)
    y = run(case.model, {"data": x})["output"]
    d_y = rng.integers(-4, 5, y.shape).astype(kind)
    gradient = refgrad.gradient(case.model)
    found = run(gradient, {"data": x, "output_grad": d_y})["data_grad"]
    moved = rng.integers(-4, 5, size).astype(kind)
    np.testing.assert_array_equal((found * moved).sum(), (d_y * run(case.model, {"data": moved})["output"]).sum())
    assert ("ScatterElements" not in op_types(gradient)) == in_pieces[mode]


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_padding_of_a_declared_size_takes_no_memory(mode):
    """A file may declare any size: nothing is made as large as that."""
    huge = 2**50
    model = parsed(
        f"agraph (float[{huge}] x) => (float[N] y) <int64[2] pads = {{{huge // 4}, {huge // 4}}}> "
        f'{{ y = Pad<mode = "{mode}">(x, pads) }}'
    )
    tracemalloc.start()
    gradient = refgrad.gradient(model, ["x"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24
    assert "ScatterElements" not in op_types(gradient)


SLICES = {  # the slices of x, the nodes that follow, and how many Pad and Concat nodes the gradient has
    "halves": ("a = Slice(x, n0, n2, last) b = Slice(x, n2, n5, last) y = Concat<axis = -1>(b, a)", 0, 1),
    "of one axis among several": (
        "a = Slice(x, n0, n2, first) b = Slice(x, n2, n4, first) y = Concat<axis = 0>(b, a)",
        0,
        1,
    ),
    "and the whole": (
        "a = Slice(x, n0, n2, last) b = Slice(x, n2, n5, last) c = Concat<axis = -1>(b, a) y = Add(x, c)",
        0,
        1,
    ),
    "twice": (
        "a = Slice(x, n0, n2, last) b = Slice(x, n2, n5, last) c = Slice(x, n0, n2, last) "
        "y = Concat<axis = -1>(b, a, c)",
        0,
        1,
    ),
    "along two axes": (
        "a = Slice(x, n0, n2, last) b = Slice(x, n2, n5, last) c = Slice(x, n0, n2, first) d = Slice(x, n2, n4, first) "
        "e = Concat<axis = -1>(b, a) f = Concat<axis = 0>(d, c) y = Add(e, f)",
        0,
        2,
    ),
    "with another that crosses them": (
        "a = Slice(x, n0, n2, last) b = Slice(x, n2, n5, last) c = Slice(x, n1, n4, last) y = Concat<axis = -1>(a, b, c)",
        1,
        1,
    ),
    "turned round": (
        "a = Slice(x, n1, below, last, down) b = Slice(x, n2, n5, last) y = Concat<axis = -1>(a, b)",
        0,
        1,
    ),
    "with a gap": ("a = Slice(x, n0, n2, last) b = Slice(x, n4, n5, last) y = Concat<axis = -1>(b, a)", 2, 0),
    "without the last": ("a = Slice(x, n0, n2, last) b = Slice(x, n2, n4, last) y = Concat<axis = -1>(b, a)", 2, 0),
    "that overlap": ("a = Slice(x, n0, n4, last) b = Slice(x, n2, n5, last) y = Concat<axis = -1>(b, a)", 2, 0),
    "all of it": ("a = Slice(x, n0, n5, last) b = Slice(x, n0, n5, last) y = Concat<axis = -1>(b, a)", 0, 0),
    "of two axes": ("a = Slice(x, zeros, both, axes) b = Slice(x, both, ends, axes) y = Concat<axis = -1>(a, b)", 2, 0),
    "rows by number": (
        "a = Gather<axis = 1>(x, at0) b = Gather<axis = 1>(x, at1) c = Gather<axis = 1>(x, at2) "
        "d = Concat<axis = 0>(c, a, b) y = Unsqueeze(d, first)",
        0,
        1,
    ),
}


def sliced(what, dims="4, 3, 5", kind="float"):
    numbers = ", ".join(f"int64[1] n{n} = {{{n}}}" for n in (0, 1, 2, 4, 5))
    return parsed(
        f"agraph ({kind}[{dims}] x) => ({kind}[a, b, c] y) <{numbers}, int64[1] last = {{-1}}, int64[1] first = {{0}}, "
        "int64[1] below = {-9}, int64[1] down = {-1}, int64[2] zeros = {0, 0}, int64[2] both = {2, 2}, int64[2] ends = {4, 5}, "
        f"int64[2] axes = {{0, 2}}, int64 at0 = {{0}}, int64 at1 = {{1}}, int64 at2 = {{-1}}> {{ {SLICES[what][0]} }}"
    )


@pytest.mark.parametrize("kind", ["float", "double", "float16"])
@pytest.mark.parametrize("what", SLICES)
def test_slices(what, kind):
    """Slices that fill an axis are put side by side again; others lie between zeros."""
    rng = np.random.default_rng(0)
    model, dtype = sliced(what, kind=kind), {"float": "f4", "double": "f8", "float16": "f2"}[kind]
    x, moved = rng.integers(-4, 5, (2, 4, 3, 5)).astype(dtype)
    d_y = rng.integers(-4, 5, run(model, {"x": x})["y"].shape).astype(dtype)
    gradient = refgrad.gradient(model)
    found = run(gradient, {"x": x, "y_grad": d_y})["x_grad"]
    np.testing.assert_array_equal((found * moved).sum(), (d_y * run(model, {"x": moved})["y"]).sum())
    assert (op_types(gradient).count("Pad"), op_types(gradient).count("Concat")) == SLICES[what][1:]
    ort = run(refgrad.gradient(model, dialect="ort"), {"x": x, "y_grad": d_y})["x_grad"]
    np.testing.assert_array_equal(ort, found)
    pytest.importorskip("onnxruntime")
    np.testing.assert_array_equal(run(gradient, {"x": x, "y_grad": d_y}, "ort-cpu")["x_grad"], found)


def test_slices_of_sizes_that_the_run_tells():
    """An axis whose size is not known is not known to be filled, and other axes need not be known."""
    assert op_types(refgrad.gradient(sliced("halves", dims="N, 3, 5"))).count("Pad") == 0
    gradient = refgrad.gradient(sliced("halves", dims="4, 3, N"))
    assert op_types(gradient).count("Pad") == 2
    x = np.arange(60, dtype="f4").reshape(4, 3, 5)
    np.testing.assert_array_equal(run(gradient, {"x": x, "y_grad": x})["x_grad"], np.roll(x, 2, -1))


def test_slices_keep_what_is_not_finite_apart():
    """An infinity and a NaN stay in their places: no product with 0 spreads them."""
    d_y = np.zeros((4, 3, 5), "f4")
    d_y[0, 0] = [np.inf, -np.inf, np.nan, 1, 2]
    found = run(refgrad.gradient(sliced("halves")), {"x": d_y, "y_grad": d_y})["x_grad"]
    np.testing.assert_array_equal(found, np.roll(d_y, 2, -1))


def test_the_second_derivative_of_slices():
    """The gradient of a gradient that puts slices side by side takes them apart again."""
    model = parsed(
        "agraph (double[2, 4] x) => (double[2, 4] y) <int64[1] o = {0}, int64[1] h = {2}, int64[1] e = {4}, int64[1] l = {1}> "
        "{ a = Slice(x, o, h, l) b = Slice(x, h, e, l) c = Mul(a, b) d = Mul(c, a) y = Concat<axis = 1>(c, d) }"
    )
    first = refgrad.gradient(model, ["x"])
    rng = np.random.default_rng(0)
    x, d_y, v = rng.standard_normal((3, 2, 4))
    h = 1e-6
    sides = [run(first, {"x": x + s * h * v, "y_grad": d_y})["x_grad"] for s in (1, -1)]
    second = refgrad.gradient(first, ["x"], outputs=["x_grad"])
    found = run(second, {"x": x, "y_grad": d_y, "x_grad_grad": v})
    [(name, value)] = found.items()
    assert name.startswith("x_grad")
    np.testing.assert_allclose(value, (sides[0] - sides[1]) / (2 * h), rtol=1e-6, atol=1e-8)
