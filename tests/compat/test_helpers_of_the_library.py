"""The helpers of onnxcustom: losses, penalties and updates as graphs, other graphs for operators, devices, and split models."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.compat import get_max_opset
from refgrad.compat.training.ortgradient import OrtGradientForwardBackward
from refgrad.compat.utils.onnx_function import function_onnx_graph, get_supported_functions
from refgrad.compat.utils.onnx_helper import dtype_to_var_type, get_onnx_opset, proto_type_to_dtype
from refgrad.compat.utils.onnx_rewriter import _unique_name, onnx_rewrite_operator, unreduced_onnx_loss
from refgrad.compat.utils.onnx_split import OnnxSplitting, split_onnx
from refgrad.compat.utils.orttraining_helper import _rewrite_op_no_grad
from refgrad.errors import FeedError, InvalidModelError, OptionError, OptionTypeError

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]


def parse(graph: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {graph}')


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], backend: str = "numpy") -> dict[str, np.ndarray]:
    return get_backend(backend).prepare(model).run(feeds)


def points(seed: int = 0, dtype: Any = np.float64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((7, 1)).astype(dtype) for name in ("X1", "X2")}


# Functions as graphs

LOSSES: dict[str, tuple[dict[str, float], Any]] = {
    "square_error": ({}, lambda d: d**2),
    "absolute_error": ({}, np.abs),
    "elastic_error": ({"l1_weight": 0.2, "l2_weight": 0.7}, lambda d: 0.2 * np.abs(d) + 0.7 * d**2),
}


def differences(model: onnx.ModelProto, feeds: dict[str, np.ndarray], name: str, step: float = 1e-6) -> np.ndarray:
    """The derivative of Y by an input, by central differences."""
    slopes = np.empty_like(feeds[name])
    for place in np.ndindex(slopes.shape):
        ends = []
        for sign in (1, -1):
            moved = feeds[name].copy()
            moved[place] += sign * step
            ends.append(run(model, feeds | {name: moved})["Y"].item())
        slopes[place] = (ends[0] - ends[1]) / (2 * step)
    return slopes


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_derivatives(name: str, weighted: bool) -> None:
    settings, formula = LOSSES[name]
    weight_name = "w" if weighted else None
    value, slope, both = (
        function_onnx_graph(prefix + name, dtype=np.float64, weight_name=weight_name, **settings)
        for prefix in ("", "grad_", "grad_loss_")
    )
    feeds = points()
    weights = np.linspace(0.5, 2, 7)
    for given in ({"w": weights}, {}) if weighted else ({},):
        column = given["w"][:, None] if given else 1.0
        results = run(both, feeds | given)
        np.testing.assert_allclose(results["Y"], np.sum(column * formula(feeds["X1"] - feeds["X2"])), rtol=1e-12)
        np.testing.assert_allclose(results["Z"], differences(value, feeds | given, "X2"), atol=1e-7)
        np.testing.assert_array_equal(run(value, feeds | given)["Y"], results["Y"])
        np.testing.assert_array_equal(run(slope, feeds | given)["Y"], results["Z"])
        scores = run(unreduced_onnx_loss(both), feeds | given)["score"]
        np.testing.assert_allclose(scores, column * formula(feeds["X1"] - feeds["X2"]), rtol=1e-12)


@pytest.mark.parametrize("weight_name", [None, "w"])
def test_the_log_loss_is_clipped_and_its_derivative_is_not(weight_name: str | None) -> None:
    made = function_onnx_graph("grad_sigmoid_neg_log_loss_error", dtype=np.float64, weight_name=weight_name, eps=1e-3)
    scores, label = np.array([[0.3], [-2.0], [50.0], [50.0]]), np.array([[1], [0], [0], [1]])
    weights = np.array([1, 2, 3, 4.0]) if weight_name else np.ones(4)
    results = run(made, {"X1": label, "X2": scores} | ({"w": weights} if weight_name else {}))
    p = 1 / (1 + np.exp(-scores))
    clipped = np.clip(p, 1e-3, 1 - 1e-3)
    expected = -(np.log(np.where(label == 1, clipped, 1 - clipped)) * weights[:, None]).sum()
    np.testing.assert_allclose(results["Y"], expected, rtol=1e-12)
    np.testing.assert_allclose(results["Z"], (p - label) * weights[:, None], rtol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_penalties_and_updates(backend: str) -> None:
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal((3, 2)).astype(np.float32) for _ in range(2))
    alpha, beta = np.float32([-0.1]), np.float32([0.9])
    amounts = {"l1_weight": 0.1, "l2_weight": 0.7}

    def penalty(w: np.ndarray) -> float:
        return 0.1 * np.abs(w).sum() + 0.7 * (w**2).sum()

    def of(name: str, **settings: Any) -> dict[str, np.ndarray]:
        made = function_onnx_graph(name, **settings)
        feeds = {
            "X": x,
            "X1": x,
            "X2": g,
            "G": g,
            "alpha": alpha,
            "beta": beta,
            "loss": alpha[None],
            "W0": x,
            "W1": g[0],
        }
        return run(made, {value.name: feeds[value.name] for value in made.graph.input}, backend)

    slope = np.sign(x) * 0.1 + 1.4 * x
    for results, expected in (
        (of("copy"), {"Y": x}),
        (of("zero"), {"Y": 0 * x}),
        (of("axpy"), {"Y": g - 0.1 * x}),
        (of("axpyw"), {"Y": g - 0.1 * x + 0.9 * g, "Z": 0.9 * g - 0.1 * x}),
        (of("axpyw2"), {"Y": g - 0.1 * x + 0.9 * (0.9 * g - 0.1 * x), "Z": 0.9 * g - 0.1 * x}),
        (of("grad_penalty_elastic_error", **amounts), {"Y": np.float32([penalty(x)]), "Z": slope}),
        (of("n_penalty_elastic_error", n_tensors=2, **amounts), {"Y": alpha + penalty(x) + penalty(g[0])}),
        (of("update_penalty_elastic_error", l1=0.1, l2=0.7), {"Y": x - slope}),
    ):
        for name, value in expected.items():
            np.testing.assert_allclose(results[name], value, rtol=1e-5, atol=1e-6)
            assert results[name].shape == value.shape


def test_the_derivative_of_a_penalty_is_that_of_its_value() -> None:
    made = function_onnx_graph("grad_penalty_elastic_error", dtype=np.float64, l1_weight=0.3, l2_weight=0.2)
    feeds = {"X": np.random.default_rng(0).standard_normal((2, 3))}
    np.testing.assert_allclose(run(made, feeds)["Z"], differences(made, feeds, "X"), atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", get_supported_functions())
def test_every_function_has_a_graph_of_every_float(name: str, dtype: Any) -> None:
    oldest = function_onnx_graph(name, target_opset=13, dtype=dtype)
    assert get_onnx_opset(oldest) in (13, 16)
    get_backend("numpy").prepare(oldest)
    made = function_onnx_graph(name, target_opset=20, dtype=dtype, weight_name="w")
    assert get_onnx_opset(made) == 20
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    assert {value.type.tensor_type.elem_type for value in made.graph.output} == {kind}
    get_backend("numpy").prepare(made)


def test_what_functions_refuse() -> None:
    assert get_onnx_opset(function_onnx_graph("axpy")) == get_max_opset() == 15
    for name, arguments, said in (
        ("H", {}, "no function 'H'; there are 'copy'"),
        ("axpy", {"l1": 1}, "'axpy' does not take"),
        ("axpy", {"dtype": np.int64}, "dtype is a float, not int64"),
        ("axpy", {"target_opset": 12}, "target_opset=12; there are 13 to"),
        ("square_error", {"l1_weight": 1}, "no setting 'l1_weight'"),
        ("square_error", {"weight_name": "X1"}, "'X1' is taken"),
    ):
        with pytest.raises((OptionError, refgrad.errors.UnknownNameError), match=said):
            function_onnx_graph(name, **arguments)


# Other graphs for operators

DIVISION = "divide (float[] A) => (float[] B) <float one = {1}> { B = Div(one, A) }"


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operator_becomes_a_graph_wherever_it_is(backend: str) -> None:
    model = parse(
        "g (float[2] x, bool c) => (float[2] y, float[2] z) { r = Reciprocal(x) y = Add(r, r) "
        "z = If (c) <then_branch = t () => (float[2] p) { p = Reciprocal(y) }, "
        "else_branch = e () => (float[2] q) { q = Neg(y) }> }"
    )
    feeds = {"x": np.float32([2, 4]), "c": np.array(True)}
    made = onnx_rewrite_operator(model, "Reciprocal", parse(DIVISION, 13))
    assert "Reciprocal" not in str(made)
    assert get_onnx_opset(made) == 18
    outer = onnx_rewrite_operator(model, "Reciprocal", parse(DIVISION), recursive=False)
    assert str(outer).count('op_type: "Reciprocal"') == 1
    for changed in (made, outer, _rewrite_op_no_grad(model)):
        onnx.checker.check_model(changed, full_check=True)
        for name, value in run(model, feeds, backend).items():
            np.testing.assert_allclose(run(changed, feeds, backend)[name], value, rtol=1e-6)
    unchanged = onnx_rewrite_operator(model, "Sin", parse(DIVISION))
    assert unchanged.graph == model.graph


def test_what_cannot_be_rewritten() -> None:
    model = parse("g (float[2] x) => (float[2] y) { y = Add(x, x) }")
    with pytest.raises(InvalidModelError, match="has 2 inputs, and sub_onx has 1"):
        onnx_rewrite_operator(model, "Add", parse(DIVISION))
    with pytest.raises(OptionError, match="contains Div itself"):
        onnx_rewrite_operator(model, "Div", parse(DIVISION))
    with pytest.raises(OptionError, match="'y', is not a sum: it is made by Add"):
        unreduced_onnx_loss(model)


def test_names_are_numbered_from_2_on() -> None:
    taken = {"a"}
    assert [_unique_name(taken, name) for name in ("a", "a", "b")] == ["a_2", "a_3", "b"]
    assert taken == {"a", "a_2", "a_3", "b"}


# Types and devices


def test_opsets_and_types() -> None:
    model = parse("g (float[2] x) => (float[2] y) { y = Neg(x) }", 17)
    assert get_onnx_opset(model) == 17
    with pytest.raises(OptionError, match=r"the domain 'ai\.onnx\.ml'"):
        get_onnx_opset(model, "ai.onnx.ml")
    for given, expected in ((1, np.float32), (7, np.int64), (11, np.float64), ("tensor(float)", np.float32)):
        assert proto_type_to_dtype(given) is expected
    with pytest.raises(OptionError, match="There is no 9"):
        proto_type_to_dtype(9)


def test_classes_of_skl2onnx() -> None:
    types = pytest.importorskip("skl2onnx.common.data_types")
    assert dtype_to_var_type(np.float64) is types.DoubleTensorType
    assert dtype_to_var_type(np.dtype("int64")) is types.Int64TensorType
    with pytest.raises(OptionError, match="no class for int8"):
        dtype_to_var_type(np.int8)


@pytest.mark.skipif("ort-cpu" not in available(), reason="without ONNX Runtime")
def test_devices_and_values_of_onnxruntime() -> None:
    from onnxruntime import InferenceSession, OrtValue

    from refgrad.compat.utils import onnxruntime_helper as ort
    from refgrad.compat.utils import str_ortvalue

    for name, expected in {"cpu": "cpu", "gpu": "cuda", "cuda:0": "cuda", "cuda:2": "cuda:2"}.items():
        device = ort.get_ort_device(name)
        assert ort.get_ort_device(device) is device
        assert ort.ort_device_to_string(device) == expected
        assert ort.get_ort_device_type(name) == ort.get_ort_device_type(device) == (expected != "cpu")
        [provider] = ort.device_to_providers(name)
        assert ort.provider_to_device(provider) == expected.removesuffix(":2")
    session = InferenceSession(
        parse("g (float[2] x) => (float[2] y) { y = Neg(x) }").SerializeToString(), providers=["CPUExecutionProvider"]
    )
    assert ort.ort_device_to_string(ort.get_ort_device_from_session(session)) == "cpu"
    for wrong, error in (("cpu:1", OptionError), ("", OptionError), (["cpu"], OptionTypeError), (0, OptionTypeError)):
        with pytest.raises(error):
            ort.get_ort_device(wrong)
    with pytest.raises(OptionError, match="no provider 'NONE'"):
        ort.provider_to_device("NONE")
    with pytest.raises(OptionTypeError, match="Expected an OrtDevice, got str"):
        ort.ort_device_to_string("cpu")
    for array in (np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(3), np.zeros((0, 2), np.float16)):
        value = ort.numpy_to_ort_value(array)
        expected_array = array.copy()
        array.fill(7)  # the memory is not shared
        np.testing.assert_array_equal(value.numpy(), expected_array)
    with pytest.raises(FeedError, match="numbers, not of object"):
        ort.numpy_to_ort_value(np.array(["a"], dtype=object))
    assert str_ortvalue(ort.numpy_to_ort_value(np.float32([[1, 2]]))) == (
        "device=Cpu dtype=dtype('float32') shape=(1, 2) value=[1.0, 2.0]"
    )
    assert "value=[0, 1, 2, 3, 4, '...', 6, 7, 8, 9, 10]" in str_ortvalue(OrtValue.ortvalue_from_numpy(np.arange(11)))


# A function with forward and backward


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_and_cotangents_may_be_flat(backend: str) -> None:
    model = parse(
        "g (float[N, 2] x) => (float[N, 3] y) <float[2, 3] a = {1, 2, 3, 4, 5, 6}, float[1, 3] b = {1, 2, 3}> "
        "{ p = MatMul(x, a) y = Add(p, b) }"
    )
    made = OrtGradientForwardBackward(model, backend=backend)
    names, function = made.cls_type_, made.new_instance()
    assert names._onx_inp == ["x", "a", "b"]
    assert names._onx_out == ["x_grad", "a_grad", "b_grad"]
    x, a, b = np.float32([[1, 2], [3, 4]]), made.get_initializer("a"), made.get_initializer("b")
    [y] = function.forward([x, a, b.ravel()], training=True)
    assert [value.name for value in names._sess_eval.get_inputs()] == ["x", "a", "b"]
    np.testing.assert_array_equal(names._sess_eval.run(None, {"x": x, "a": a, "b": b})[0], y)
    d_y = np.arange(6, dtype=np.float32)
    flat = function.backward([d_y])
    for row in (d_y.reshape(1, -1), d_y.reshape(2, 3)):
        function.forward([x, a, b], training=True)
        for given, expected in zip(function.backward([row]), flat, strict=True):
            np.testing.assert_array_equal(given, expected)
    assert flat[2].tolist() == [[3, 5, 7]]
    function.forward([x, a, b], training=True)
    with pytest.raises(FeedError, match="y_grad"):
        function.backward([d_y.reshape(3, 2)])  # a transposed cotangent is not taken for a flat one


# Split models

CHAINS = {
    "line": """g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
        { a = MatMul(x, w) b = Tanh(a) c = MatMul(b, w) y = Exp(c) }""",
    "branches": """g (float[N, 2] x, float[N, 2] z) => (float[N, 2] y)
        { a = Exp(x) b = Neg(a) c = Add(a, b) d = Sub(c, z) e = Tanh(d) y = Mul(d, e) }""",
    "outputs on the way": """g (float[N, 2] x) => (float[N, 2] y, float[N, 2] a, float[N, 2] e)
        { a = Exp(x) b = Neg(a) e = Sin(a) c = Tanh(b) y = Neg(c) }""",
    "shapes": """g (float[N, 2] x) => (float[M] y) <int64[1] flat = {-1}>
        { a = Exp(x) s = Shape(a) b = Reshape(a, flat) c = Tanh(b) d = Reshape(c, s) e = Neg(d) y = Reshape(e, flat) }""",
    "a shape of the input": """g (float[N, 2] x) => (float[N, 2] y) <int64[1] flat = {-1}>
        { a = Reshape(x, flat) b = Neg(a) s = Shape(x) y = Reshape(b, s) }""",
    "constants": """g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
        { t = Transpose(w) a = MatMul(x, t) b = Exp(a) y = MatMul(b, t) }""",
    "a shape of values": """g (float[N] x, float[1] n) => (float[M, K] y)
        { k = Cast <to = 7> (n) a = Neg(x) b = Exp(a) s = Concat <axis = 0> (k, k) y = Expand(b, s) }""",
    "a subgraph": """g (float[2] x, bool c) => (float[2] y)
        { a = Exp(x) b = Neg(a)
        d = If (c) <then_branch = t () => (float[2] p) { p = Add(b, x) }, else_branch = e () => (float[2] q) { q = Neg(b) }>
        y = Tanh(d) }""",
    "a constant of a default": """g (float[N, 2] x, float[2] w) => (float[N, 2] y) <float[2] w = {1, 2}>
        { t = Neg(w) a = Mul(x, t) b = Exp(a) y = Add(b, t) }""",
    "a default": """g (float[N, 2] x, float[2] w) => (float[N, 2] y) <float[2] w = {1, 2}>
        { a = Mul(x, w) b = Exp(a) y = Add(b, w) }""",
}


def chained(parts: list[onnx.ModelProto], feeds: dict[str, np.ndarray], passed: list[str]) -> dict[str, np.ndarray]:
    """The results of the parts, each of which gets what the others before it return."""
    known = dict(feeds)
    for part in parts:
        onnx.checker.check_model(part, full_check=True)
        known |= run(part, {value.name: known[value.name] for value in part.graph.input if value.name in known})
    for (first, second), name in zip(pairwise(parts), passed, strict=True):
        assert first.graph.output[0].name == second.graph.input[0].name == name
    return known


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_parts_has_the_results_of_the_model(name: str) -> None:
    model = parse(CHAINS[name])
    rng = np.random.default_rng(0)
    values = {"x": rng.standard_normal((3, 2)), "z": rng.standard_normal((3, 2)), "c": True, "n": [3.0]}
    if name in ("a subgraph", "a shape of values"):
        values["x"] = rng.standard_normal(2 if name == "a subgraph" else 3)
    types = {"c": bool}
    feeds = {
        v.name: np.asarray(values[v.name], types.get(v.name, np.float32)) for v in model.graph.input if v.name != "w"
    }
    expected = run(model, feeds)
    splitting = OnnxSplitting(model)
    assert len(splitting.segments) > 1
    assert repr(splitting.segments[0]).startswith("OnnxSegment(0, None, ")
    assert all(segment.size > 0 for segment in splitting.segments)
    for number in range(1, len(splitting.segments) + 1):
        parts, stats = split_onnx(model, number, stats=True)
        assert len(parts) == number
        results = chained(parts, feeds, stats["split_points"])
        for output, value in expected.items():
            np.testing.assert_allclose(results[output], value, rtol=1e-6)


@pytest.mark.parametrize("name", ["a default", "a constant of a default"])
def test_parts_take_another_value_than_a_default(name: str) -> None:
    model = parse(CHAINS[name])
    feeds = {"x": np.float32([[1, 2]]), "w": np.float32([0.5, -3])}
    parts = split_onnx(model, 2)
    assert ["w" in {value.name for value in part.graph.input} for part in parts] == [True, True]
    np.testing.assert_allclose(chained(parts, feeds, ["a"])["y"], run(model, feeds)["y"], rtol=1e-6)


def test_parts_have_similar_sizes() -> None:
    ones = ", ".join(["1"] * 16)
    weights = ", ".join(f"float[4, 4] w{k} = {{{ones}}}" for k in range(4))
    model = parse(
        f"g (float[N, 4] x) => (float[N, 4] y) <{weights}> "
        "{ a = MatMul(x, w0) b = MatMul(a, w1) c = MatMul(b, w2) y = MatMul(c, w3) }"
    )
    assert split_onnx(model, 2, stats=True)[1]["split_points"] == ["b"]
    assert split_onnx(model, 4, stats=True)[1]["split_points"] == ["a", "b", "c"]


def test_shapes_are_passed_beside_the_tensor() -> None:
    splitting = OnnxSplitting(parse(CHAINS["shapes"]), doc_string=True)
    assert splitting.cutting_points == ["a", "b", "c", "d", "e"]
    assert splitting.shape_results == {"s", "flat"}
    assert [segment.shape_results for segment in splitting.segments] == [set(), {"s"}, set(), set(), set(), set()]
    assert splitting.display_shape_node_result().splitlines()[:3] == [
        "Exp(x) -> a", "Shape|NS(a) -> s|S", "Reshape(a, flat|S) -> b",
    ]  # fmt: skip
    part, names = splitting._make_onnx(1, 3)
    assert names == {"inputs": ["a"], "outputs": ["c", "s"]}
    assert part.doc_string.startswith("segments 1 to 2: 3 nodes")
    assert "s" not in OnnxSplitting(parse(CHAINS["a shape of values"])).shape_results  # it depends on numbers


def test_what_cannot_be_split() -> None:
    model = parse(CHAINS["line"])
    for arguments, error, said in (
        ({}, OptionError, "either n_parts or cut_points"),
        ({"n_parts": 2, "cut_points": ["a"]}, OptionError, "either n_parts or cut_points"),
        ({"n_parts": 2.0}, OptionTypeError, "n_parts is a number, not 2.0"),
        ({"n_parts": True}, OptionTypeError, "n_parts is a number"),
        ({"cut_points": "a"}, OptionTypeError, "cut_points is a list"),
        ({"cut_points": []}, OptionError, "cut_points are different names"),
        ({"cut_points": ["b", "a"]}, OptionError, "in the order of the model: 'a', 'b', 'c'"),
        ({"cut_points": ["y"]}, OptionError, "cannot be cut at 'y'. It can at: 'a', 'b', 'c'"),
        ({"n_parts": 5}, OptionError, "into 1 to 4 parts, not into 5"),
    ):
        with pytest.raises(error, match=said):
            split_onnx(model, **arguments)
    lines: list[str] = []
    split_onnx(model, cut_points=["a"], verbose=1, fLOG=lines.append)
    assert lines == ["[OnnxSplitting] 4 nodes, 3 cutting points"]
