"""Forward mode and higher derivatives: by the adjoint identity, formulas, complex steps, and torch's autograd."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from checking import by_operator, names_of
from onnx import ModelProto, numpy_helper, parser

import refgrad
from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.conformance.case import Case
from refgrad.conformance.oracles.central import directional
from refgrad.conformance.problems.feeds import widened
from refgrad.errors import NoGradientError, OptionError, RefgradError, UnknownNameError
from refgrad.tables import registry

pytestmark = pytest.mark.interpreter

Arrays = dict[str, np.ndarray]
ROUNDED = 1e-12  # of the identity in float64, relative to the sizes of what is added up

FIRST = {key: cases[0] for key, cases in by_operator(lambda case: bool(case.dtype)).items()}


def model_of(text: str, opset: int = 21, **weights: np.ndarray) -> ModelProto:
    """A model in onnx's text format, with weights."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def run(model: ModelProto, feeds: Mapping[str, Any], backend: str = "numpy", **options: Any) -> Arrays:
    """The outputs, of a model that onnx finds valid."""
    onnx.checker.check_model(model, full_check=True)
    return get_backend(backend).prepare(model, **options).run(dict(feeds))


def noted(model: ModelProto, key: str) -> dict[str, Any]:
    """What the metadata say."""
    [text] = [entry.value for entry in model.metadata_props if entry.key == f"refgrad.{key}"]
    return dict(json.loads(text))


# J·u


def both_sides(case: Case) -> tuple[float, float, float]:
    """<v, J·u>, <Jᵀ·v, u>, and the size of what was added up for them, of random u and v, in float64."""
    rng = np.random.default_rng((0, 7))
    feeds = widened(case.feeds)
    gradient = refgrad.gradient(case.model, case.wrt, case.outputs, keep_outputs=True)
    forward = refgrad.jvp(case.model, case.wrt, case.outputs, keep_outputs=True)
    slopes, seeds = names_of(gradient, "gradients"), names_of(gradient, "cotangents")
    moves, moved = noted(forward, "directions"), noted(forward, "derivatives")
    assert list(moves) == list(slopes)
    assert list(moved) == list(seeds)
    in_double = [get_backend("numpy").prepare(model, precision="float64") for model in (case.model, gradient, forward)]
    outputs = in_double[0].run(feeds)
    v = {output: rng.standard_normal(outputs[output].shape) for output in seeds}
    backwards = in_double[1].run({**feeds, **{seeds[output]: value for output, value in v.items()}})
    u = {name: rng.standard_normal(backwards[slope].shape) for name, slope in slopes.items()}
    forwards = in_double[2].run({**feeds, **{moves[name]: value for name, value in u.items()}})
    for output in v:
        assert forwards[moved[output]].shape == v[output].shape
    left = [v[output] * forwards[moved[output]] for output in v]
    right = [u[name] * backwards[slopes[name]] for name in u]
    size = max(sum(float(np.sum(np.abs(term))) for term in terms) for terms in (left, right))
    return sum(map(np.sum, left)), sum(map(np.sum, right)), size


@pytest.mark.matrix
@pytest.mark.parametrize("key", sorted(FIRST), ids=".".join)
def test_the_adjoint_identity_of_every_operator(key: tuple[str, str]) -> None:
    left, right, size = both_sides(FIRST[key])
    assert np.isfinite(size)
    assert abs(left - right) <= ROUNDED * size


def test_the_identity_tells_a_rule_that_is_not_linear_in_its_cotangent(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = registry.RULES["", "Exp"]

    def squared(op: Any, d_output: str, output: str) -> Any:
        return op.Mul(op.Mul(d_output, d_output), output)

    monkeypatch.setitem(registry.RULES, ("", "Exp"), replace(rule, function=squared))
    left, right, size = both_sides(FIRST["", "Exp"])
    assert abs(left - right) > 0.01 * size


def test_the_identity_tells_a_wrong_transposition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of Exp has a Mul, whose rule only the second sweep needs."""
    rule = registry.RULES["", "Mul"]

    def halved(op: Any, d_C: str, A: str, B: str) -> Any:
        return op.Mul(d_C, B), op.Mul(op.Mul(d_C, A), 0.5)

    monkeypatch.setitem(registry.RULES, ("", "Mul"), replace(rule, function=halved))
    left, right, size = both_sides(FIRST["", "Exp"])  # whose gradient is dy·exp(x)
    assert abs(left - right) <= ROUNDED * size  # by dy: the first operand, which is right
    monkeypatch.setitem(registry.RULES, ("", "Mul"), replace(rule, function=lambda op, *read: halved(op, *read)[::-1]))
    left, right, size = both_sides(FIRST["", "Exp"])
    assert abs(left - right) > 0.01 * size


# By complex steps: the Jacobian of a function that NumPy computes of complex numbers

W = np.array([[0.5, -0.3, 0.8], [0.2, 0.7, -0.6]])
NETWORK = model_of(
    "net (double[N, 2] x, double[3] b) => (double[N, 3] y, double total) "
    "{ h = MatMul(x, w) s = Add(h, b) t = Tanh(s) y = Mul(t, h) e = Exp(y) total = ReduceSum <keepdims = 0> (e) }",
    w=W,
)


def network(x: np.ndarray, b: np.ndarray, w: np.ndarray) -> Arrays:
    h = x @ w
    y = np.tanh(h + b) * h
    return {"y": y, "total": np.sum(np.exp(y))}


POINT = {"x": np.array([[0.3, -0.7], [1.1, 0.4]]), "b": np.array([0.1, -0.2, 0.5])}


def by_complex_step(function: Callable[..., Arrays], at: Arrays, name: str) -> Arrays:
    """d output / d name, of the shape of both."""
    columns = []
    for place in np.ndindex(at[name].shape):
        moved = at[name].astype(np.complex128)
        moved[place] += 1e-20j
        columns.append({output: np.imag(value) / 1e-20 for output, value in function(**{**at, name: moved}).items()})
    shape = at[name].shape
    return {o: np.stack([c[o] for c in columns], axis=-1).reshape(*np.shape(columns[0][o]), *shape) for o in columns[0]}


@pytest.mark.parametrize("backend", ["numpy", "ort-cpu"])
def test_jacobians_by_complex_steps(backend: str) -> None:
    """By inputs and by a weight, of a scalar and of a matrix, and the whole times a vector."""
    if backend not in refgrad.backends.available():
        pytest.skip(f"{backend} is not available")
    at = {**POINT, "w": W}
    found = run(refgrad.jacobian(NETWORK), POINT, backend)
    assert list(found) == [f"{output}_by_{name}" for output in ("y", "total") for name in ("x", "b", "w")]
    rng = np.random.default_rng(0)
    u = {name: rng.standard_normal(value.shape) for name, value in at.items()}
    moved = run(refgrad.jvp(NETWORK), {**POINT, **{f"{name}_tangent": value for name, value in u.items()}}, backend)
    exact = {name: by_complex_step(network, at, name) for name in at}
    for output in ("y", "total"):
        along = sum(np.tensordot(exact[name][output], u[name], u[name].ndim) for name in at)
        np.testing.assert_allclose(moved[f"{output}_tangent"], along, rtol=1e-12, atol=1e-12)
        for name in at:
            np.testing.assert_allclose(found[f"{output}_by_{name}"], exact[name][output], rtol=1e-12, atol=1e-13)


def test_hessians_by_differences_of_the_gradient() -> None:
    """All pairs, and their product with vectors."""
    at = {**POINT, "w": W}
    gradient = get_backend("numpy").prepare(refgrad.gradient(NETWORK, outputs=["total"], cotangent="ones"))
    found = run(refgrad.hessian(NETWORK, output="total"), POINT)
    assert list(found) == [f"total_by_{one}_by_{other}" for one in at for other in at]
    rng = np.random.default_rng(0)
    u, v = ({name: rng.standard_normal(value.shape) for name, value in at.items()} for _ in range(2))
    product = run(refgrad.hvp(NETWORK, output="total"), {**POINT, **{f"{name}_vector": u[name] for name in at}})
    for one in at:
        whole = sum(np.tensordot(found[f"total_by_{one}_by_{other}"], u[other], u[other].ndim) for other in at)
        np.testing.assert_allclose(product[f"{one}_hvp"], whole, rtol=1e-12, atol=1e-12)
        expected = directional(gradient.run, at, u, {f"{one}_grad": v[one]})
        assert abs(float(np.sum(whole * v[one])) - expected.value) <= expected.error + 1e-7 * abs(expected.value)


# By formulas: derivatives of any order

X = np.array([0.3, -0.7, 1.2, 0.0])
E = np.exp(X**2)
TOWERS: dict[str, tuple[str, list[np.ndarray]]] = {
    "exp(x²)": (
        "s = Mul(x, x) y = Exp(s)",
        [2 * X * E, (2 + 4 * X**2) * E, (12 * X + 8 * X**3) * E, (12 + 48 * X**2 + 16 * X**4) * E],
    ),
    "sin(x)": ("y = Sin(x)", [np.cos(X), -np.sin(X), -np.cos(X), np.sin(X)]),
    "1/(2+x)": (
        "two = Constant <value_float = 2.0> () c = CastLike(two, x) s = Add(x, c) y = Reciprocal(s)",
        [-((2 + X) ** -2), 2 * (2 + X) ** -3.0, -6 * (2 + X) ** -4.0, 24 * (2 + X) ** -5.0],
    ),
    "x⁵": (
        "a = Mul(x, x) b = Mul(a, a) y = Mul(b, x)",
        [5 * X**4, 20 * X**3, 60 * X**2, 120 * X],
    ),
}
TOWER = "tower (double[N] x) => (double[N] y) "


@pytest.mark.parametrize("name", TOWERS)
def test_four_gradients_of_gradients(name: str) -> None:
    text, expected = TOWERS[name]
    model, target = model_of(f"{TOWER} {{ {text} }}"), "y"
    for order, wanted in enumerate(expected, 1):
        model = refgrad.gradient(model, ["x"], [target], cotangent="ones")
        target = names_of(model, "gradients")["x"]
        np.testing.assert_allclose(
            run(model, {"x": X})[target], wanted, rtol=1e-12, atol=1e-13, err_msg=f"order {order}"
        )


@pytest.mark.parametrize("name", TOWERS)
def test_four_forward_modes_of_forward_modes(name: str) -> None:
    text, expected = TOWERS[name]
    model, target, feeds = model_of(f"{TOWER} {{ {text} }}"), "y", {"x": X}
    for order, wanted in enumerate(expected, 1):
        model = refgrad.jvp(model, ["x"], [target])
        target, moves = noted(model, "derivatives")[target], noted(model, "directions")
        feeds[moves["x"]] = np.ones_like(X)
        np.testing.assert_allclose(run(model, feeds)[target], wanted, rtol=1e-12, atol=1e-13, err_msg=f"order {order}")


@pytest.mark.parametrize("name", TOWERS)
def test_mixed_orders(name: str) -> None:
    """The Hessian is diagonal; forward over the Hessian's product is the third derivative, its Jacobian's diagonal too."""
    text, expected = TOWERS[name]
    model, ones = model_of(f"{TOWER} {{ {text} }}"), np.ones_like(X)
    hessian = refgrad.hessian(model)
    np.testing.assert_allclose(run(hessian, {"x": X})["y_by_x_by_x"], np.diag(expected[1]), rtol=1e-12, atol=1e-13)
    product = refgrad.hvp(model)
    third = run(refgrad.jvp(product, ["x"]), {"x": X, "x_vector": ones, "x_tangent": ones})["x_hvp_tangent"]
    np.testing.assert_allclose(third, expected[2], rtol=1e-12, atol=1e-13)
    matrix = run(refgrad.jacobian(product, ["x"]), {"x": X, "x_vector": ones})["x_hvp_by_x"]
    np.testing.assert_allclose(matrix, np.diag(expected[2]), rtol=1e-12, atol=1e-13)
    [again] = run(refgrad.gradient(hessian, ["x"], cotangent="ones"), {"x": X}).values()
    np.testing.assert_allclose(again, expected[2], rtol=1e-12, atol=1e-13)
    [twice] = run(refgrad.jacobian(refgrad.jacobian(model)), {"x": X}).values()
    assert twice.shape == (4, 4, 4)
    np.testing.assert_allclose(np.einsum("iii->i", twice), expected[1], rtol=1e-12, atol=1e-13)
    assert np.count_nonzero(twice) <= 4


# By torch: Hessians and Jacobians of small networks in double

HEAD = "(double[2, 4] x) => (double[N, M] y, double loss)"
MLP = f"mlp {HEAD} {{ h = MatMul(x, a) t = Tanh(h) y = MatMul(t, b) s = Softplus(y) loss = ReduceSum <keepdims = 0> (s) }}"
ATTENTION = f"""attention {HEAD} {{
    q = MatMul(x, a) k = Transpose(q) z = MatMul(q, k) p = Softmax(z) o = MatMul(p, x) n = LayerNormalization(o, g)
    y = MatMul(n, b) s = Mul(y, y) loss = ReduceMean <keepdims = 0> (s)
}}"""
CONVOLUTION = """convolution (double[1, 2, 4, 3] x) => (double[N, C, H, W] y, double loss) {
    c = Conv <pads = [1, 0, 1, 1], strides = [2, 1]> (x, a) t = Sigmoid(c)
    y = ConvTranspose <strides = [1, 2]> (t, b) s = Mul(y, y) loss = ReduceSum <keepdims = 0> (s)
}"""
SIZES = {
    "mlp": {"x": (2, 4), "a": (4, 3), "b": (3, 2)},
    "attention": {"x": (2, 4), "a": (4, 4), "g": (4,), "b": (4, 3)},
    "convolution": {"x": (1, 2, 4, 3), "a": (3, 2, 3, 2), "b": (3, 2, 2, 2)},
}


def in_torch(torch: Any, name: str, at: Any) -> Any:
    """The outputs of one of the networks."""
    functional = torch.nn.functional
    if name == "mlp":
        y = torch.tanh(at["x"] @ at["a"]) @ at["b"]
        return y, functional.softplus(y).sum()
    if name == "attention":
        q = at["x"] @ at["a"]
        o = torch.softmax(q @ q.T, -1) @ at["x"]
        y = functional.layer_norm(o, (4,), at["g"], eps=1e-5) @ at["b"]
        return y, (y * y).mean()
    padded = functional.pad(at["x"], (0, 1, 1, 1))
    y = functional.conv_transpose2d(
        torch.sigmoid(functional.conv2d(padded, at["a"], stride=(2, 1))), at["b"], stride=(1, 2)
    )
    return y, (y * y).sum()


@pytest.mark.torch
@pytest.mark.parametrize("text", [MLP, ATTENTION, CONVOLUTION], ids=SIZES)
def test_hessians_and_jacobians_equal_autograds(text: str) -> None:
    """On the interpreter: ONNX Runtime has no kernel for Conv in double."""
    torch = pytest.importorskip("torch")
    name = text.split()[0]
    rng = np.random.default_rng(1)
    at = {n: rng.standard_normal(size) for n, size in SIZES[name].items()}
    model = model_of(text, **{n: array for n, array in at.items() if n != "x"})
    assert set(SIZES[name]) == {"x", *(t.name for t in model.graph.initializer)}
    u = {n: rng.standard_normal(array.shape) for n, array in at.items()}
    tensors = tuple(torch.from_numpy(array) for array in at.values())

    def outputs(*values: Any) -> Any:
        return in_torch(torch, name, dict(zip(at, values, strict=True)))

    hessians = torch.autograd.functional.hessian(lambda *values: outputs(*values)[1], tensors)
    jacobians = torch.autograd.functional.jacobian(lambda *values: outputs(*values)[0], tensors)
    _, products = torch.autograd.functional.hvp(
        lambda *values: outputs(*values)[1], tensors, tuple(torch.from_numpy(u[n]) for n in at)
    )
    feeds = {"x": at["x"]}
    whole = run(refgrad.hessian(model, list(at), "loss"), feeds)
    first = run(refgrad.jacobian(model, list(at), ["y"], keep_outputs=True), feeds)
    vectors = {f"{n}_vector": u[n] for n in at}
    along = run(refgrad.hvp(model, list(at), "loss"), {**feeds, **vectors})
    close(first["y"], outputs(*tensors)[0])
    for k, one in enumerate(at):
        close(first[f"y_by_{one}"], jacobians[k])
        close(along[f"{one}_hvp"], products[k])
        for j, other in enumerate(at):
            close(whole[f"loss_by_{one}_by_{other}"], hessians[k][j])


def close(ours: np.ndarray, theirs: Any) -> None:
    """Equal to 1e-6 of the largest element, and of one shape."""
    expected = theirs.numpy()
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


# What a result is

MAKERS: dict[str, Callable[..., ModelProto]] = {
    "jvp": refgrad.jvp,
    "hvp": refgrad.hvp,
    "jacobian": refgrad.jacobian,
    "hessian": refgrad.hessian,
}
CURVE = (
    "curve (float[N] x, int64[M] k) => (float y) "
    "{ e = Gather(x, k) s = Mul(e, w) z = Exp(s) y = ReduceSum <keepdims = 0> (z) }"
)
ENDS = {
    "jvp": (["x", "k", "w", "x_tangent", "w_tangent"], ["y_tangent"]),
    "hvp": (["x", "k", "w", "x_vector", "w_vector"], ["x_hvp", "w_hvp"]),
    "jacobian": (["x", "k", "w"], ["y_by_x", "y_by_w"]),
    "hessian": (["x", "k", "w"], ["y_by_x_by_x", "y_by_x_by_w", "y_by_w_by_x", "y_by_w_by_w"]),
}


def curve() -> ModelProto:
    """A model with an integer input and a weight."""
    return model_of(CURVE, w=np.array(0.5, np.float32))


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("keep", [False, True])
def test_names_types_and_what_is_left_alone(maker: str, keep: bool) -> None:
    model = curve()
    before = model.SerializeToString()
    made = MAKERS[maker](model, keep_outputs=keep)
    onnx.checker.check_model(made, full_check=True)
    inputs, outputs = ENDS[maker]
    assert [value.name for value in made.graph.input] == inputs
    assert [value.name for value in made.graph.output] == outputs + ["y"] * keep
    types = {value.name: value.type for value in (*made.graph.input, *made.graph.output)}
    for name in ("x", "w"):
        for suffix in ("tangent", "vector", "hvp"):
            assert types.get(f"{name}_{suffix}", types[name]) == types[name]
    assert {node.domain for node in made.graph.node} <= {""}
    assert model.SerializeToString() == before


def test_the_metadata_say_which_is_whose() -> None:
    model = curve()
    assert noted(refgrad.jvp(model), "directions") == {"x": "x_tangent", "w": "w_tangent"}
    assert noted(refgrad.jvp(model), "derivatives") == {"y": "y_tangent"}
    assert noted(refgrad.hvp(model), "directions") == {"x": "x_vector", "w": "w_vector"}
    assert noted(refgrad.hvp(model, ["w"]), "derivatives") == {"w": "w_hvp"}
    assert noted(refgrad.jacobian(model, ["x"]), "derivatives") == {"y": {"x": "y_by_x"}}
    assert noted(refgrad.hessian(model, ["x"]), "derivatives") == {"x": {"x": "y_by_x_by_x"}}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_name_that_is_taken_becomes_the_next_free_one(maker: str) -> None:
    taken = {"jvp": "y_tangent", "hvp": "x_hvp", "jacobian": "y_by_x", "hessian": "y_by_x_by_x"}[maker]
    model = model_of(f"g (double[N] x) => (double[N] y) {{ {taken} = Exp(x) y = Mul({taken}, x) }}")
    made = MAKERS[maker](model)
    onnx.checker.check_model(made, full_check=True)
    assert [value.name for value in made.graph.output] == [f"{taken}_1"]


@pytest.mark.parametrize("maker", MAKERS)
def test_a_weight_keeps_its_value_and_another_may_be_fed(maker: str) -> None:
    model = curve()
    feeds = {"x": np.float32([0.1, 0.2]), "k": np.array([1, 1, 0])}
    made = MAKERS[maker](model, ["x"])
    moves = {value.name: np.float32([1, -1]) for value in made.graph.input if value.name.startswith("x_")}
    with_weight = MAKERS[maker](model)
    moves_too = {value.name: np.float32(0) for value in with_weight.graph.input if value.name.startswith("w_")}
    [name, *_] = run(made, {**feeds, **moves})
    usual = run(made, {**feeds, **moves})[name]
    np.testing.assert_array_equal(run(with_weight, {**feeds, **moves, **moves_too})[name], usual)
    other = run(with_weight, {**feeds, **moves, **moves_too, "w": np.float32(0.9)})[name]
    assert not np.allclose(other, usual)


@pytest.mark.parametrize("maker", MAKERS)
def test_data_beside_the_model_is_referenced(tmp_path: Any, maker: str) -> None:
    weights = np.arange(1000, dtype=np.float32)
    model = model_of(
        "g (float[1000] x) => (float y) { p = Mul(x, w) q = Mul(p, p) y = ReduceSum <keepdims = 0> (q) }", w=weights
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    made = MAKERS[maker](path, ["x"])
    [tensor] = [t for t in made.graph.initializer if t.name == "w"]
    assert tensor.data_location == onnx.TensorProto.EXTERNAL
    assert not tensor.raw_data
    assert len(made.SerializeToString()) < 20_000


@pytest.mark.parametrize("backend", ["numpy", "ort-cpu"])
@pytest.mark.parametrize(("rows", "inputs"), [(0, 3), (2, 0), (0, 0)])
def test_jacobians_of_nothing(rows: int, inputs: int, backend: str) -> None:
    """No elements of the output, of the input, or of both: the shapes are right."""
    if backend not in refgrad.backends.available():
        pytest.skip(f"{backend} is not available")
    model = model_of("g (double[N] x, double[M, 1] s) => (double[M, N] y) { y = Mul(x, s) }")
    found = run(refgrad.jacobian(model), {"x": np.ones(inputs), "s": np.ones((rows, 1))}, backend)
    assert {name: value.shape for name, value in found.items()} == {
        "y_by_x": (rows, inputs, inputs),
        "y_by_s": (rows, inputs, rows, 1),
    }


def test_derivatives_by_what_does_not_matter_are_zero() -> None:
    model = model_of(
        "g (double[2] x, double[3] other) => (double[2] y, double[3] copy) { y = Exp(x) copy = Identity(other) }"
    )
    feeds = {"x": np.ones(2), "other": np.ones(3)}
    found = run(refgrad.jacobian(model), feeds)
    assert {name: value.shape for name, value in found.items()} == {
        "y_by_x": (2, 2),
        "y_by_other": (2, 3),
        "copy_by_x": (3, 2),
        "copy_by_other": (3, 3),
    }
    assert not found["y_by_other"].any()
    assert not found["copy_by_x"].any()
    np.testing.assert_array_equal(found["copy_by_other"], np.eye(3))
    [second] = run(refgrad.hessian(model, ["other"], "copy"), feeds).values()
    np.testing.assert_array_equal(second, np.zeros((3, 3)))
    moved = run(refgrad.jvp(model, ["x"]), {**feeds, "x_tangent": np.ones(2)})
    np.testing.assert_array_equal(moved["copy_tangent"], np.zeros(3))


def test_the_loop_of_a_jacobian_holds_nothing_that_the_model_computes() -> None:
    made = refgrad.jacobian(NETWORK)
    loops = [node for node in made.graph.node if node.op_type == "Loop"]
    inside = [node for loop in loops for node in loop.attribute[0].g.node]
    assert len(loops) == 2
    assert {"Tanh", "Exp"}.isdisjoint(node.op_type for node in inside)
    assert sum(node.op_type == "Tanh" for node in made.graph.node) == 1


def test_forward_mode_has_no_backward_mode_left() -> None:
    """What computed the gradient is gone, sizes that are not known beforehand or not: no product with transposed weights."""
    made = refgrad.jvp(NETWORK, ["x"])
    assert sum(node.op_type in ("MatMul", "Gemm") for node in made.graph.node) == 2
    made = refgrad.jvp(NETWORK)
    assert sum(node.op_type in ("MatMul", "Gemm") for node in made.graph.node) == 3  # w moves as well
    assert names_in_graph(made).isdisjoint(["y_grad", "total_grad"])


def names_in_graph(model: ModelProto) -> set[str]:
    """What its nodes compute."""
    return {name for node in model.graph.node for name in node.output}


def test_quantization_and_kinks_are_passed_on() -> None:
    rounds = model_of(
        "g (float[N] x) => (float[N] y) { q = QuantizeLinear(x, s) d = DequantizeLinear(q, s) y = Relu(d) }",
        s=np.float32(0.5),
    )
    feeds = {"x": np.float32([1.2, 0.0]), "x_tangent": np.float32([1, 1])}
    through = run(refgrad.jvp(rounds, ["x"], quantization="straight-through"), feeds)["y_tangent"]
    np.testing.assert_array_equal(through, [1, 0])
    np.testing.assert_array_equal(run(refgrad.jvp(rounds, ["x"]), feeds)["y_tangent"], [0, 0])
    empty = model_of("g (float[2] x) => (float y) { y = ReduceLogSumExp <keepdims = 0> (x) }")
    nowhere = {"x": np.float32([-np.inf, -np.inf]), "x_tangent": np.float32([1, 1])}
    ours, torchs = (run(refgrad.jvp(empty, kinks=whose), nowhere)["y_tangent"] for whose in ("refgrad", "torch"))
    assert ours == 0
    assert np.isnan(torchs)


# Errors

TWO = model_of("g (float[N] x) => (float[N] y, float[N] z) { y = Exp(x) z = Sin(x) }")
STRINGS = model_of("g (float[N] x) => (float[N] y) { t = Cast <to = 8> (x) y = Cast <to = 1> (t) }")
LISTED = model_of("g (float[N] x) => (seq(float[N]) s) { s = SequenceConstruct (x, x) }")
READ = model_of("g (seq(float[N]) s, int64 k) => (float[N] y) { y = SequenceAt (s, k) }")
HELD = model_of("g (float[N] x) => (optional(float[N]) o) { o = Optional (x) }")
BRANCHES = model_of("""g (bool c, float[2] x) => (float[2] y) {
    [mean] m = Exp (x)
    [choose] y = If (c) <then_branch = t () => (float[2] a) { w = Abs (m) a = Mul (m, w) },
                         else_branch = e () => (float[2] b) { b = Neg (m) }>
}""")
ERRORS: list[tuple[str, ModelProto, dict[str, Any], type[RefgradError], str]] = [
    ("jvp", TWO, {"wrt": ["w"]}, UnknownNameError, "'w' in wrt is not a float input or initializer .* There are: 'x'"),
    ("jvp", TWO, {"outputs": ["y", "y"]}, UnknownNameError, "outputs has 'y' twice"),
    ("jvp", TWO, {"wrt": "x"}, OptionError, "wrt is a list of names"),
    ("jvp", TWO, {"kinks": "mine"}, OptionError, "no choice of kinks 'mine'"),
    ("jvp", TWO, {"quantization": "mine"}, OptionError, "no quantization 'mine'"),
    ("jvp", STRINGS, {}, NoGradientError, "Cast has no derivative"),
    ("hvp", TWO, {}, OptionError, "several float outputs: 'y', 'z'. Choose one: output='y'"),
    ("hvp", TWO, {"output": ["y"]}, OptionError, r"output is one name \(a string\), not \['y'\]"),
    ("hvp", TWO, {"output": "w"}, UnknownNameError, "'w' in outputs is not an output .* There are: 'y', 'z'"),
    ("hvp", STRINGS, {}, NoGradientError, "Cast has no derivative"),
    ("jacobian", TWO, {"outputs": []}, OptionError, "outputs is empty; the model has: 'y', 'z'"),
    ("jacobian", TWO, {"kinks": "mine"}, OptionError, "no choice of kinks 'mine'"),
    ("jacobian", STRINGS, {}, NoGradientError, "Cast has no derivative"),
    ("hessian", TWO, {}, OptionError, "several float outputs"),
    ("hessian", TWO, {"output": "y", "wrt": ["x", "x"]}, UnknownNameError, "wrt has 'x' twice"),
    ("hessian", STRINGS, {}, NoGradientError, "Cast has no derivative"),
    ("jvp", HELD, {}, NoGradientError, "'o' is an optional, .* take OptionalGetElement of it"),
    ("jacobian", LISTED, {}, NoGradientError, "'s' is a sequence: .* are not a tensor"),
    ("jacobian", READ, {}, NoGradientError, "'s' is a sequence: .* are not a tensor"),
    ("hessian", READ, {}, NoGradientError, "'s' is a sequence: .* are not a tensor"),
    (
        "jacobian",
        BRANCHES,
        {"wrt": ["w"]},
        UnknownNameError,
        "but a value in the body of node 'choose'.* There are: 'x'",
    ),
    (
        "jvp",
        BRANCHES,
        {"wrt": ["m"]},
        UnknownNameError,
        "an intermediate result of node 'mean'. Make it an input .* There are: 'x'",
    ),
    (
        "jvp",
        BRANCHES,
        {"outputs": ["a"]},
        UnknownNameError,
        "but a value in the body of node 'choose'.* There are: 'y'",
    ),
]


@pytest.mark.parametrize(("maker", "model", "arguments", "error", "message"), ERRORS)
def test_errors(
    maker: str, model: ModelProto, arguments: dict[str, Any], error: type[RefgradError], message: str
) -> None:
    with pytest.raises(error, match=message):
        MAKERS[maker](model, **arguments)


@pytest.mark.parametrize("maker", ["jvp", "hvp", "hessian"])
def test_a_gradient_without_a_derivative_is_told_apart(maker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("g (float[N] x) => (float[N] y) { y = Exp(x) }")
    monkeypatch.delitem(registry.RULES, ("", "Mul"))
    with pytest.raises(
        NoGradientError, match=r"has a gradient, which cannot be differentiated again:\nMul has no rule"
    ):
        MAKERS[maker](model)


# The command line

COMMANDS = [
    (("jvp",), "inputs  x, k, w, x_tangent, w_tangent\noutputs y_tangent\n"),
    (("hvp", "--wrt", "x", "--keep-outputs"), "inputs  x, k, x_vector\noutputs x_hvp, y\n"),
    (("jacobian", "--outputs", "y", "--wrt", "w"), "inputs  x, k, w\noutputs y_by_w\n"),
    (("hessian", "--of", "y", "--wrt", "x"), "inputs  x, k\noutputs y_by_x_by_x\n"),
]


@pytest.mark.parametrize(("arguments", "listed"), COMMANDS)
def test_commands(arguments: tuple[str, ...], listed: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(curve(), tmp_path / "curve.onnx")
    command, *options = arguments
    assert main([command, str(tmp_path / "curve.onnx"), "-o", str(tmp_path / "made.onnx"), *options]) == 0
    assert capsys.readouterr().out.endswith(listed)
    onnx.checker.check_model(onnx.load(tmp_path / "made.onnx"), full_check=True)


def test_a_command_selects_elements(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model_of("g (double[3] x) => (double[3] y) { y = Exp(x) }"), path)
    assert main(["hessian", str(path), "-o", str(tmp_path / "made.onnx"), "--of", "y[1]"]) == 0
    assert "y_selected_by_x_by_x" in capsys.readouterr().out
    [found] = run(onnx.load(tmp_path / "made.onnx"), {"x": np.array([0.0, 1.0, 2.0])}).values()
    np.testing.assert_allclose(found, np.diag([0, np.e, 0]), rtol=1e-12)


def test_a_command_refuses_in_one_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(TWO, tmp_path / "two.onnx")
    assert main(["hvp", str(tmp_path / "two.onnx"), "-o", str(tmp_path / "made.onnx")]) == 2
    assert capsys.readouterr().err == "refgrad: The model has several float outputs: 'y', 'z'. Choose one: --of y.\n"
    assert not (tmp_path / "made.onnx").exists()
