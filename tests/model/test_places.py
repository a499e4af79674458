"""Weights that lie in Constant nodes and in bodies: found by name, trained, and written back where they were."""

import copy

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

import refgrad
from refgrad.backends import get_backend
from refgrad.errors import UnknownNameError
from refgrad.model.places import lifted, places
from refgrad.model.reading import read
from refgrad.training import SGD, Training, lora, merge_adapters, step_model

pytestmark = pytest.mark.interpreter

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 2)).astype(np.float32)

# name: (nodes, the weight's name)
MODELS = {
    "a Constant": ("w = Constant<value=float[2, 2] {1.5, -2, 3, 0.25}>() y = MatMul(x, w)", "w"),
    "a list of floats": ("w = Constant<value_floats=[1.5, -2.0]>() y = PRelu(x, w)", "w"),
    "behind Identity": ("w = Constant<value=float[2, 2] {1.5, -2, 3, 0.25}>() i = Identity(w) y = MatMul(x, i)", "w"),
    "behind Cast": (
        "w = Constant<value=float16[2, 2] {15872, 49152, 16896, 13312}>() i = Cast<to=1>(w) y = MatMul(x, i)",
        "w",
    ),
    "behind Transpose": (
        "w = Constant<value=float[2, 2] {1.5, -2, 3, 0.25}>() i = Transpose<perm=[1, 0]>(w) y = MatMul(x, i)",
        "w",
    ),
    "behind Unsqueeze": (
        "w = Constant<value=float[2] {1.5, -2}>() a = Constant<value_ints=[0]>() i = Unsqueeze(w, a) y = Mul(x, i)",
        "w",
    ),
    "a bias of one element": (
        "k = Constant<value=float[2, 1] {1.5, -2}>() b = Constant<value=float[1] {0.5}>() y = Gemm(x, k, b)",
        "b",
    ),
    "the body of a Loop": (
        """n = Constant<value_int=2>() t = Constant<value=bool {1}>()
        y = Loop(n, t, x) <body = step (int64 i, bool c, float[N, 2] h) => (bool again, float[N, 2] out) {
            w = Constant<value=float[2, 2] {0.5, -2, 1, 0.25}>() again = Identity(c) p = MatMul(h, w) out = Tanh(p) }>""",
        "w",
    ),
    "an initializer of a body": (
        """t = Constant<value=bool {1}>()
        y = If(t) <then_branch = a () => (float[N, 2] p) <float[2, 2] w = {1.5, -2, 3, 0.25}> { p = MatMul(x, w) },
            else_branch = b () => (float[N, 2] q) { q = Tanh(x) }>""",
        "w",
    ),
    "one name in two bodies": (
        """s = ReduceSum<keepdims=0>(x) z = Constant<value=float {0}>() t = Less(s, z)
        y = If(t) <then_branch = a () => (float[N, 2] p) { w = Constant<value=float[2, 2] {3, 1, 4, 1}>() p = MatMul(x, w) },
            else_branch = b () => (float[N, 2] q) {
                w = Constant<value=float[2, 2] {1.5, -2, 3, 0.25}>() q = MatMul(x, w) }>""",
        "w_1",
    ),
}


def parsed(text: str) -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> m {text}')


def model_of(name: str) -> tuple[ModelProto, str]:
    nodes, weight = MODELS[name]
    width = 1 if "bias" in name else 2
    model = parsed(f"(float[N, 2] x) => (float[N, {width}] y) {{ {nodes} }}")
    onnx.checker.check_model(model)
    return model, weight


def values_of(model: ModelProto) -> dict[str, np.ndarray]:
    return {one.name: numpy_helper.to_array(one.tensor) for one in places(model)}


def run(model: ModelProto, feeds: dict[str, np.ndarray], **options: str) -> dict[str, np.ndarray]:
    return get_backend("numpy").prepare(model, **options).run(feeds)


@pytest.fixture(params=MODELS)
def given(request) -> tuple[ModelProto, str]:
    return model_of(request.param)


def test_a_weight_is_found_where_it_lies(given) -> None:
    model, weight = given
    found = refgrad.weights(model)
    assert found[weight].kind == "parameter"
    assert weight in refgrad.get_train_initializer(model)
    assert weight in [value.name.removesuffix("_grad") for value in refgrad.gradient(model).graph.output]


def test_the_model_with_initializers_computes_the_same(given) -> None:
    model, weight = given
    before = copy.deepcopy(model)
    made = lifted(model)
    onnx.checker.check_model(made, full_check=True)
    assert weight in {tensor.name for tensor in made.graph.initializer}
    for feeds in ({"x": X}, {"x": -X}):
        np.testing.assert_array_equal(run(made, feeds)["y"], run(model, feeds)["y"])
    assert model == before
    assert lifted(made) is made


def test_its_gradient_is_that_of_differences(given) -> None:
    """Differences run the model with changed values written back, so they do not depend on `lifted`."""
    model, weight = given
    feeds = {"x": X if X.sum() > 0 else -X}  # the second branch of two
    gradient = refgrad.gradient(model, wrt=[weight])
    seed = RNG.standard_normal(run(model, feeds)["y"].shape).astype(np.float32)
    found = run(gradient, {**feeds, "y_grad": seed}, precision="float64")[f"{weight}_grad"]
    value = values_of(model)[weight]
    step = 2.0**-6
    for place in np.ndindex(value.shape):
        ends = []
        for sign in (1, -1):
            moved = value.copy()
            moved[place] += sign * step
            y = run(refgrad.write_back(model, {weight: moved}), feeds, precision="float64")["y"]
            ends.append(float((y * seed).sum()))
        assert found[place] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=2e-3, abs=1e-4)


def test_a_value_goes_back_where_it_came_from(given) -> None:
    model, weight = given
    value = values_of(model)[weight]
    written = refgrad.write_back(model, {weight: value + np.ones_like(value)})
    onnx.checker.check_model(written, full_check=True)
    assert [t.name for t in written.graph.initializer] == [t.name for t in model.graph.initializer]
    assert [(n.op_type, *n.input, *n.output) for n in written.graph.node] == [
        (n.op_type, *n.input, *n.output) for n in model.graph.node
    ]
    after = values_of(written)
    np.testing.assert_array_equal(after.pop(weight), value + 1)
    assert all(np.array_equal(after[name], one) for name, one in values_of(model).items() if name != weight)
    back = values_of(refgrad.write_back(written, {weight: value}))
    assert all(np.array_equal(back[name], one) for name, one in values_of(model).items())


def test_it_is_trained_and_saved_in_its_place(given) -> None:
    model, weight = given
    step = step_model(model, "squared_error", SGD(), trainable=[weight])
    training = Training(step, 0.01)
    feeds = {"x": X if X.sum() > 0 else -X}
    batch = {**feeds, "label": run(model, feeds)["y"] + 1}
    losses = [training.train_on(batch, 0.01) for _ in range(4)]
    assert losses[-1] < losses[0]
    saved = training.write_to(model)
    before, after = values_of(model), values_of(saved)
    assert {name for name in before if not np.array_equal(before[name], after[name])} == {weight}
    assert [n.op_type for n in saved.graph.node] == [n.op_type for n in model.graph.node]


@pytest.mark.parametrize("name", ["a Constant", "behind Identity", "behind Cast", "behind Transpose"])
def test_an_adapter_is_merged_into_it(name: str) -> None:
    model, weight = model_of(name)
    adapted = lora(model, "*", rank=1)
    np.testing.assert_array_equal(run(adapted, {"x": X})["y"], run(model, {"x": X})["y"])
    training = Training(step_model(adapted, "squared_error", SGD()), 0.05)
    for _ in range(3):
        training.train_on({"x": X, "label": X + 1}, 0.05)
    trained = training.write_to(adapted)
    merged = merge_adapters(trained)
    assert [n.op_type for n in merged.graph.node] == [n.op_type for n in model.graph.node]
    assert not merged.graph.initializer
    assert not np.array_equal(values_of(merged)[weight], values_of(model)[weight])
    np.testing.assert_allclose(
        run(merged, {"x": X})["y"], run(trained, {"x": X})["y"], rtol=5e-3 if "Cast" in name else 1e-5
    )


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ("w = Constant<value=float[4] {1, 2, 4, 8}>() y = Mul(x, w)", "constant"),  # a progression
        ("w = Constant<value=float[2, 4] {0, 1, 0, 1, 1, 0, 1, 0}>() y = Mul(x, w)", "mask"),
        ("w = Constant<value=float[1] {2}>() y = Pow(x, w)", "scalar"),
        (
            """q = Constant<value=int8[4, 4] {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2}>() s = Constant<value=float {0.5}>()
            w = DequantizeLinear(q, s) y = MatMul(x, w)""",
            "quantized",
        ),
    ],
)
def test_what_is_not_trained_stays_where_it_is_and_says_why(nodes: str, kind: str) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> m (float[2, 4] x) => (float[2, 4] y) {{ {nodes} }}'
    )
    name = "q" if kind == "quantized" else "w"
    assert lifted(model) is model
    assert refgrad.weights(model)[name].kind == kind
    assert read(model) is model
    with pytest.raises(UnknownNameError, match="trainable"):
        step_model(model, "squared_error")


def test_a_name_that_another_body_has_for_something_else_is_not_mixed_up() -> None:
    model = parsed(
        """(float[N, 2] x) => (float[N, 2] y) { s = ReduceSum<keepdims=0>(x) z = Constant<value=float {0}>() t = Less(s, z)
        y = If(t) <then_branch = a () => (float[N, 2] p) { w = Constant<value=float[2, 2] {3, 1, 4, 1}>() p = MatMul(x, w) },
            else_branch = b () => (float[N, 2] q) { w = Tanh(x) q = Neg(w) }> }"""
    )
    made = lifted(model)
    onnx.checker.check_model(made, full_check=True)
    for feeds in ({"x": X}, {"x": -X}):
        np.testing.assert_array_equal(run(made, feeds)["y"], run(model, feeds)["y"])


def test_weights_of_a_graph_and_of_bodies_within_bodies_are_lifted_together() -> None:
    model = parsed(
        """(float[N, 2] x) => (float[N, 2] y) {
        w = Constant<value=float[2, 2] {1, 2, 4, 3}>() h = MatMul(x, w)
        n = Constant<value_int=2>() t = Constant<value=bool {1}>()
        y = Loop(n, t, h) <body = step (int64 i, bool c, float[N, 2] v) => (bool again, float[N, 2] out) {
            again = Identity(c) k = Constant<value=float[2] {3, 5}>() m = Mul(v, k)
            out = If(c) <then_branch = a () => (float[N, 2] p) { b = Constant<value=float[2] {1, 3}>() p = Add(m, b) },
                else_branch = d () => (float[N, 2] q) { q = Identity(m) }> }> }"""
    )
    made = lifted(model)
    onnx.checker.check_model(made, full_check=True)
    assert {tensor.name for tensor in made.graph.initializer} == {"w", "k", "b"}
    assert [node.op_type for node in made.graph.node] == ["MatMul", "Constant", "Constant", "Loop"]
    np.testing.assert_array_equal(run(made, {"x": X})["y"], run(model, {"x": X})["y"])
    gradient = run(refgrad.gradient(model), {"x": X, "y_grad": np.ones_like(X)})
    np.testing.assert_allclose(gradient["b_grad"], [4 * 4, 6 * 4])


def test_a_result_of_the_model_stays_one() -> None:
    model = parsed(
        "(float[N, 2] x) => (float[N, 2] y, float[2, 2] w) { w = Constant<value=float[2, 2] {1, 2, 4, 3}>() y = MatMul(x, w) }"
    )
    assert lifted(model) is model


def test_statistics_of_a_normalization_are_found() -> None:
    model = parsed(
        """(float[N, 2] x) => (float[N, 2] y) {
        s = Constant<value=float[2] {1, 2}>() b = Constant<value=float[2] {0.5, 1}>()
        u = Constant<value=float[2] {0.25, 1}>() v = Constant<value=float[2] {2, 1}>()
        y = BatchNormalization(x, s, b, u, v) }"""
    )
    assert [one.kind for one in refgrad.weights(model).values()] == ["parameter", "parameter", "statistic", "statistic"]
    step = step_model(model, "squared_error", SGD(), batch_norm="training")
    training = Training(step, 0.01)
    training.train_on({"x": X, "label": X + 1}, 0.01)
    saved = training.write_to(model)
    before, after = values_of(model), values_of(saved)
    assert all(not np.array_equal(before[name], after[name]) for name in "sbuv")


def test_before_ir_version_4_a_weight_is_an_input_too() -> None:
    model, _ = model_of("a Constant")
    model.ir_version = 3
    made = lifted(model)
    assert [value.name for value in made.graph.input] == ["x", "w"]
    assert [value.name for value in refgrad.gradient(model).graph.output] == ["x_grad", "w_grad"]


def test_a_model_that_is_only_rewritten_keeps_its_constants() -> None:
    """Lowering, the expansion of Gradient and `lift_weights` leave the rest of a model as it is."""
    model, _ = model_of("a Constant")
    for rewritten in (refgrad.lower, refgrad.expand_gradients, refgrad.lift_weights):
        assert rewritten(model) == model
    trained = parsed(
        """(float[N, 2] x, float[N, 2] d) => (float[N, 2] y) { w = Constant<value=float[2, 2] {1.5, -2, 3, 0.25}>()
        h = MatMul(x, w) y = com.microsoft.TanhGrad(h, d) }"""
    )
    trained.opset_import.add(domain="com.microsoft", version=1)
    lowered = refgrad.lower(trained)
    assert [node.op_type for node in lowered.graph.node][:2] == ["Constant", "MatMul"]
    assert "w" not in {tensor.name for tensor in lowered.graph.initializer}
