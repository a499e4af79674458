"""The oracles: against derivatives worked out by hand, on planted wrong gradients, and silent where they know nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from refgrad.conformance.case import Case, is_float
from refgrad.conformance.cases import every_case
from refgrad.conformance.oracles import Built, Directional, NotApplicable, Property, get_oracle, oracles
from refgrad.conformance.oracles.analytic import FORWARDS, KNOWN, PARTS, STEADY, KinkError, NotAnalyticError, call, erf
from refgrad.conformance.oracles.central import directional
from refgrad.conformance.oracles.differences import STEPS, direction_at, forward
from refgrad.conformance.oracles.field import Field
from refgrad.conformance.oracles.program import ComplexProgram
from refgrad.conformance.problems.point import ShapeMovedError
from refgrad.conformance.problems.problem import Problem, ask
from refgrad.conformance.problems.systems.builders import build
from refgrad.errors import BackendError, FeedError, RefgradError
from refgrad.tables.registry import RULES

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

Arrays = dict[str, np.ndarray]

OBSERVING = ("differences", "reference", "complex-step")
EXACT = {"differences": 1e-6, "reference": 1e-6, "complex-step": 1e-13}  # the error that may be claimed, relative


def case(text: str, values: str = "smooth", opset: int = 21, **feeds: object) -> Case:
    """A case of a model in onnx's text format; feeds are in double where they are floats."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
    return Case("by hand", model, {name: np.asarray(value) for name, value in feeds.items()}, values=values)


def said(oracle: str, problem: Problem) -> Sequence[Directional]:
    """What an oracle says, which has to be of every input."""
    observe = get_oracle(oracle).observe
    assert observe is not None
    found = observe(problem)
    assert not [one for one in found if isinstance(one, NotApplicable)]
    assert {one.name for one in found if isinstance(one, Directional)} == set(problem.wrt)
    return [one for one in found if isinstance(one, Directional)]


def examined(oracle: str, problem: Problem, built: Built) -> Sequence[Property | NotApplicable]:
    """What an oracle finds of a gradient."""
    examine = get_oracle(oracle).examine
    assert examine is not None
    return examine(problem, built)


# Derivatives by hand

X = np.array([[0.3, -0.7, 1.2], [-1.5, 0.4, 0.9]])
Y = np.array([[1.1, 0.6, -0.8], [0.5, -1.3, 0.7]])
W = np.array([[0.2, -0.5], [0.9, 0.4], [-0.3, 0.8]])
MATRIX = "g (double[2,3] x) => (double[a,b] z)"
PAIR = "g (double[2,3] x, double[2,3] y) => (double[a,b] z)"


def softmax(x: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    return np.exp(x) / np.sum(np.exp(x), axis=-1, keepdims=True)


Gradient = Callable[[np.ndarray, Arrays], Arrays]
BY_HAND: dict[str, tuple[str, Arrays, Gradient]] = {
    "product": (f"{PAIR} {{ z = Mul(x, y) }}", {"x": X, "y": Y}, lambda v, f: {"x": v * f["y"], "y": v * f["x"]}),
    "quotient": (
        f"{PAIR} {{ z = Div(x, y) }}",
        {"x": X, "y": Y},
        lambda v, f: {"x": v / f["y"], "y": -v * f["x"] / f["y"] ** 2},
    ),
    "power": (
        f"{PAIR} {{ z = Pow(x, y) }}",
        {"x": np.abs(X), "y": Y},
        lambda v, f: {
            "x": v * f["y"] * f["x"] ** (f["y"] - 1),
            "y": v * f["x"] ** f["y"] * np.log(f["x"]),
        },
    ),
    "matrix product": (
        "g (double[2,3] x, double[3,2] w) => (double[a,b] z) { z = MatMul(x, w) }",
        {"x": X, "w": W},
        lambda v, f: {"x": v @ f["w"].T, "w": f["x"].T @ v},
    ),
    "exponential": (f"{MATRIX} {{ z = Exp(x) }}", {"x": X}, lambda v, f: {"x": v * np.exp(f["x"])}),
    "logarithm": (f"{MATRIX} {{ z = Log(x) }}", {"x": np.abs(X)}, lambda v, f: {"x": v / f["x"]}),
    "root": (f"{MATRIX} {{ z = Sqrt(x) }}", {"x": np.abs(X)}, lambda v, f: {"x": v / 2 / np.sqrt(f["x"])}),
    "tanh": (f"{MATRIX} {{ z = Tanh(x) }}", {"x": X}, lambda v, f: {"x": v * (1 - np.tanh(f["x"]) ** 2)}),
    "sigmoid": (
        f"{MATRIX} {{ z = Sigmoid(x) }}",
        {"x": X},
        lambda v, f: {"x": v / (1 + np.exp(f["x"])) / (1 + np.exp(-f["x"]))},
    ),
    "erf": (
        f"{MATRIX} {{ z = Erf(x) }}",
        {"x": 3 * X},
        lambda v, f: {"x": v * 2 / np.sqrt(np.pi) * np.exp(-(f["x"] ** 2))},
    ),
    "relu": (f"{MATRIX} {{ z = Relu(x) }}", {"x": X}, lambda v, f: {"x": v * (f["x"] > 0)}),
    "absolute": (f"{MATRIX} {{ z = Abs(x) }}", {"x": X}, lambda v, f: {"x": v * np.sign(f["x"])}),
    "softmax": (
        f"{MATRIX} {{ z = Softmax(x) }}",
        {"x": X},
        lambda v, f: {"x": softmax(f["x"]) * (v - np.sum(v * softmax(f["x"]), axis=-1, keepdims=True))},
    ),
    "transposed": (f"{MATRIX} {{ z = Transpose(x) }}", {"x": X}, lambda v, f: {"x": v.T}),
    "norm": (
        f"{MATRIX} {{ z = ReduceL2 <keepdims = 1> (x) }}",
        {"x": X},
        lambda v, f: {"x": v * f["x"] / np.linalg.norm(f["x"])},
    ),
    "largest": (
        f"{MATRIX} {{ z = ReduceMax <keepdims = 1> (x) }}",
        {"x": X},
        lambda v, f: {"x": v * (f["x"] == np.max(f["x"]))},
    ),
    "broadcast": (
        "g (double[2,3] x, double[3] y) => (double[a,b] z) { z = Add(x, y) }",
        {"x": X, "y": Y[0]},
        lambda v, f: {"x": v, "y": v.sum(0)},
    ),
    "padded with a constant": (
        f"{MATRIX} <int64[4] p = {{0, 1, 0, 0}}, double c = {{2.5}}> {{ z = Pad(x, p, c) }}",
        {"x": X},
        lambda v, f: {"x": v[:, 1:]},
    ),
    "sorted": (
        "g (double[4] x) => (double[n] z) { z = Unique(x) }",
        {"x": np.array([0.4, -1.2, 2.0, 0.1])},
        lambda v, f: {"x": v[[2, 0, 3, 1]]},
    ),
    "a chain": (
        f"{MATRIX} {{ a = Sin(x) b = Mul(a, x) z = Exp(b) }}",
        {"x": X},
        lambda v, f: {
            "x": v * np.exp(np.sin(f["x"]) * f["x"]) * (np.cos(f["x"]) * f["x"] + np.sin(f["x"])),
        },
    ),
}


@pytest.mark.parametrize("oracle", OBSERVING)
@pytest.mark.parametrize("name", BY_HAND)
def test_derivatives_by_hand(name: str, oracle: str) -> None:
    """Each says what the formula gives, within an error that it claims and that is small."""
    text, feeds, gradient = BY_HAND[name]
    problem = ask(case(text, **feeds))
    expected = gradient(problem.cotangents["z"], feeds)
    for one in said(oracle, problem):
        wanted = float(np.sum(expected[one.name] * one.direction))
        assert abs(one.value - wanted) <= one.error + 1e-15 * one.scale
        assert one.error <= EXACT[oracle] * max(one.scale, abs(wanted))


# Planted wrong gradients

NET = (
    "g (float[2,2] x, float[2,2] w, float[2] b) => (float[p,q] z) "
    "{ m = MatMul(x, w) s = Add(m, b) t = Tanh(s) z = Mul(t, m) }"
)
NET_FEEDS = {
    "x": np.array([[0.3, -0.7], [1.1, 0.4]], np.float32),
    "w": np.array([[0.5, 0.9], [-0.6, 0.2]], np.float32),
    "b": np.array([0.1, -0.3], np.float32),
}
Spoil = tuple[
    str, dict[str, object], Sequence[np.ndarray]
]  # an operator on a gradient, its attributes, its other inputs
PLANTED: dict[str, tuple[Sequence[str], Spoil]] = {
    "a factor": (("w",), ("Mul", {}, [np.array(2.001, np.float32)])),
    "a factor throughout": (("x", "w", "b"), ("Mul", {}, [np.array(2.001, np.float32)])),
    "a sign": (("w",), ("Neg", {}, [])),
    "transposed": (("w",), ("Transpose", {"perm": [1, 0]}, [])),
    "a dropped term": (("x",), ("Mul", {}, [np.array([[1.0, 1.0], [0.0, 1.0]], np.float32)])),
    "a bias": (("b",), ("Add", {}, [np.array([0.01, 0.0], np.float32)])),
    "zero": (("w",), ("Mul", {}, [np.array(0.0, np.float32)])),
}
BLIND = {
    ("second-order", "a factor throughout"),
    ("second-order", "a bias"),
}  # such a gradient is one of something else


def spoiled(built: Built, names: Sequence[str], spoil: Spoil) -> Built:
    """The gradient with an operator more behind those by `names`."""
    model = onnx.ModelProto()
    model.CopyFrom(built.model)
    gradients = dict(built.gradients)
    op_type, attributes, inputs = spoil
    for number, array in enumerate(inputs):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"planted_{number}"))
    for name in names:
        gradients[name] = f"{built.gradients[name]}_wrong"
        others = [f"planted_{number}" for number in range(len(inputs))]
        node = helper.make_node(op_type, [built.gradients[name], *others], [gradients[name]], **attributes)
        model.graph.node.append(node)
        model.graph.output.append(helper.make_tensor_value_info(gradients[name], TensorProto.FLOAT, None))
    return replace(built, model=model, gradients=gradients)


@cache
def net() -> tuple[Problem, Built]:
    """A small network, and its gradient."""
    problem = ask(case(NET, **NET_FEEDS))
    return problem, build("refgrad", problem)


@pytest.mark.parametrize("oracle", ["adjoint", "second-order"])
def test_a_right_gradient_has_every_property(oracle: str) -> None:
    """And by far."""
    found = examined(oracle, *net())
    assert found
    for one in found:
        assert isinstance(one, Property), one
        assert one.holds
        assert one.error < 1e-8


@pytest.mark.parametrize("oracle", ["adjoint", "second-order"])
@pytest.mark.parametrize("name", PLANTED)
def test_properties_catch_what_is_planted(name: str, oracle: str) -> None:
    """All but what another function's gradient would be."""
    problem, built = net()
    found = examined(oracle, problem, spoiled(built, *PLANTED[name]))
    held = [one.holds for one in found if isinstance(one, Property)]
    assert held
    assert all(held[:1]) == ((oracle, name) in BLIND)


@pytest.mark.parametrize("oracle", OBSERVING)
@pytest.mark.parametrize("name", PLANTED)
def test_witnesses_tell_what_is_planted(name: str, oracle: str) -> None:
    """What they say is that of the right gradient, and not that of a wrong one."""
    problem, built = net()
    names, spoil = PLANTED[name]
    right, wrong = Field(problem, built), Field(problem, spoiled(built, names, spoil))
    at, v = problem.at, problem.wide_cotangents
    for one in said(oracle, problem):
        for field, ok in ((right, True), (wrong, one.name not in names)):
            error = abs(float(np.sum(field(at, v)[one.name] * one.direction)) - one.value)
            assert (error <= one.error + 1e-7 * one.scale) == ok


def test_a_gradient_that_is_not_linear_in_its_cotangent_is_caught() -> None:
    """It is right for the cotangent of ones alone."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> '
        "g (double[2,3] x, double[2,3] dz) => (double[2,3] dx) { s = Mul(dz, dz) e = Exp(x) dx = Mul(s, e) }"
    )
    problem = ask(case(BY_HAND["exponential"][0], x=X))
    (found,) = examined("adjoint", problem, Built(model, {"z": "dz"}, {"x": "dx"}))
    assert isinstance(found, Property)
    assert not found.holds


def test_a_gradient_with_another_shape_has_no_property() -> None:
    """It is not compared, and says so."""
    problem, built = net()
    for oracle in ("adjoint", "second-order"):
        (found,) = examined(oracle, problem, spoiled(built, ["b"], ("Unsqueeze", {}, [np.array([0])])))
        assert isinstance(found, NotApplicable)
        assert "shape" in found.why


# Forward mode

OF_A_REGION = case(
    "g (double[2,3] x) => (double[a,b,c,d] z) <double[1,5] region = {0, 0, 0, 2, 1}, int64[4] one = {1, 1, 2, 3}> "
    "{ t = Sin(x) r = Reshape(t, one) z = MaxRoiPool <pooled_shape = [2, 3]> (r, region) }",
    x=X,
)


def test_forward_mode_that_differences_confirm_is_exact() -> None:
    """Where no complex forward is known."""
    problem = ask(OF_A_REGION)
    (found,) = examined("adjoint", problem, build("refgrad", problem))
    assert isinstance(found, Property)
    assert found.holds
    assert "forward mode, which differences confirm" in found.note
    assert found.error < 1e-13


def test_forward_mode_that_is_wrong_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences are taken instead, and the gradient of the same rule is caught."""
    monkeypatch.setitem(RULES, ("", "Sin"), replace(RULES["", "Sin"], function=lambda op, d, x: op.Mul(d, 1.5)))
    problem = ask(OF_A_REGION)
    (found,) = examined("adjoint", problem, build("refgrad", problem))
    assert isinstance(found, Property)
    assert not found.holds
    assert "by differences" in found.note


# Silence

KINK = case(f"{MATRIX} {{ z = Relu(x) }}", "kink", x=np.zeros((2, 3)))
LOOP = case(
    f"{MATRIX} <int64 n = {{3}}, bool c = {{1}}> {{ z = Loop (n, c, x) <body = b (int64 i, bool k, double[2,3] s) "
    "=> (bool k2, double[2,3] t) { k2 = Identity(k) t = Sin(s) }> }",
    x=X,
)
SILENT: list[tuple[str, Case, str]] = [
    ("complex-step", KINK, "kink"),
    ("complex-step", case(f"{MATRIX} {{ z = Round(x) }}", "kink", x=np.full((2, 3), 0.5)), "kink"),
    ("complex-step", case(f"{PAIR} {{ z = Max(x, y) }}", "kink", x=X, y=X), "kink"),
    ("complex-step", case(f"{MATRIX} {{ z = ReduceL2(x) }}", "kink", x=np.zeros((2, 3))), "kink"),
    ("complex-step", OF_A_REGION, "MaxRoiPool has no complex forward"),
    ("complex-step", case(f"{PAIR} {{ z = Pow(x, y) }}", "special", x=-np.abs(X), y=Y), "finite|above 0"),
    ("differences", case(f"{MATRIX} {{ z = Log(x) }}", "special", x=np.zeros((2, 3))), "not finite"),
    ("reference", case(f"{MATRIX} {{ z = Log(x) }}", "special", x=np.zeros((2, 3))), "not finite"),
    ("reference", next(c for c in every_case() if c.name.startswith("GRU-4x3x2,1x9x2,1x9x3,1x18,3")), "another"),
]


@pytest.mark.parametrize(("oracle", "asked", "why"), SILENT, ids=lambda v: v if isinstance(v, str) else v.name)
def test_silent_where_it_knows_nothing(oracle: str, asked: Case, why: str) -> None:
    """With a reason."""
    observe = get_oracle(oracle).observe
    assert observe is not None
    found = observe(ask(asked))
    assert found
    reasons = [one.why for one in found if isinstance(one, NotApplicable)]
    assert reasons
    assert any(part in reason for reason in reasons for part in why.split("|"))


def test_oracles_speak_of_a_loop() -> None:
    """On both forwards, and the complex step goes through the steps."""
    problem = ask(LOOP)
    for oracle in ("differences", "reference", "complex-step"):
        for one in said(oracle, problem):
            y = np.cos(X) * np.cos(np.sin(X)) * np.cos(np.sin(np.sin(X)))
            assert np.isclose(one.value, np.sum(problem.cotangents["z"] * y * one.direction), rtol=1e-8)


@pytest.mark.parametrize("oracle", ["adjoint", "second-order"])
def test_no_property_at_a_kink(oracle: str) -> None:
    """A convention is no error."""
    problem = ask(KINK)
    found = examined(oracle, problem, build("refgrad", problem))
    assert [type(one) for one in found] == [NotApplicable] * len(found)


# Points that are not ordinary

INFINITE = np.array([[np.inf, -0.7, 1.2], [-1.5, 0.4, np.nan]])


@pytest.mark.parametrize("oracle", OBSERVING)
def test_what_is_not_finite_does_not_move(oracle: str) -> None:
    """The rest is differentiated."""
    asked = case(
        "g (double[2,3] x) => (double[a] z) <int64[1] k = {1}> { c = Gather <axis = 1> (x, k) z = Exp(c) }", x=INFINITE
    )
    problem = ask(asked)
    for one in said(oracle, problem):
        assert np.all(one.direction[~np.isfinite(INFINITE)] == 0)
        expected = np.sum(problem.cotangents["z"] * np.exp(INFINITE[:, 1:2]) * one.direction[:, 1:2])
        assert abs(one.value - expected) <= one.error + 1e-12 * one.scale


@pytest.mark.parametrize("oracle", OBSERVING)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e5, 1e30])
def test_sizes(size: float, oracle: str) -> None:
    """The direction is of the size of the point."""
    problem = ask(case(f"{PAIR} {{ z = Mul(x, y) }}", x=X * size, y=Y))
    for one in said(oracle, problem):
        other = Y if one.name == "x" else X * size
        assert np.isclose(one.value, np.sum(problem.cotangents["z"] * other * one.direction), rtol=1e-6)


def test_elements_of_very_different_sizes_each_move_by_their_own() -> None:
    """And those that are 0 by the median."""
    direction = direction_at(np.array([1e-20, 0.0, 1.0, 1e20, np.inf]), np.random.default_rng(0))
    sizes = np.abs(direction)
    assert sizes[0] < 1e-19
    assert 0.01 < sizes[1] < 100
    assert sizes[3] > 1e18
    assert sizes[4] == 0


@pytest.mark.parametrize("oracle", ["differences", "reference"])
def test_equal_elements_of_unique_stay_equal(oracle: str) -> None:
    """The shape of its result depends on it."""
    x = np.array([3.0, 1.0, 3.0, 2.0])
    problem = ask(case("g (double[4] x) => (double[n] z) { u = Unique <sorted = 1> (x) z = Exp(u) }", x=x))
    for one in said(oracle, problem):
        assert one.direction[0] == one.direction[2]
        expected = np.sum(problem.cotangents["z"] * np.exp([1.0, 2.0, 3.0]) * one.direction[[1, 3, 0]])
        assert abs(one.value - expected) <= one.error + 1e-9 * one.scale


@pytest.mark.parametrize("oracle", OBSERVING)
def test_an_input_without_elements(oracle: str) -> None:
    """Its derivative is 0, whatever is added up."""
    problem = ask(
        case("g (double[0,3] x, double[2,3] y) => (double[a,b] z) { z = Concat <axis = 0> (x, y) }", x=X[:0], y=Y)
    )
    nothing = next(one for one in said(oracle, problem) if one.name == "x")
    assert (nothing.value, nothing.error) == (0.0, 0.0)


def test_erf_of_complex_numbers() -> None:
    """Against erf on the real line, and erfi on the imaginary one."""
    x = np.linspace(-8, 8, 101)
    assert np.allclose(erf(x + 0j), [math.erf(v) for v in x], rtol=1e-15, atol=0)
    small = np.array([0.1, 0.01])
    series = 2 / np.sqrt(np.pi) * (small + small**3 / 3 + small**5 / 10 + small**7 / 42)
    assert np.allclose(erf(1j * small).imag, series, rtol=1e-11)


def test_seeds_make_other_directions() -> None:
    """And the same seed the same."""
    asked = case(BY_HAND["product"][0], x=X, y=Y)
    values = [[one.value for one in said("complex-step", ask(asked, seed))] for seed in (0, 0, 1)]
    assert values[0] == values[1]
    assert values[0] != values[2]


# The table of complex forwards

PER_OPERATOR = 4


@cache
def problems(operator: str) -> list[Problem]:
    """A few cases of an operator; at a kink there is no derivative for the oracles to agree on."""
    cases = [one for one in every_case() if one.operator == operator and one.values != "kink"]
    made = []
    for one in cases[:: max(len(cases) // PER_OPERATOR, 1)][:PER_OPERATOR]:
        with suppress(FeedError, RefgradError):
            made.append(ask(one))
    return made


@cache
def spoke(operator: str, oracle: str) -> list[Sequence[object]]:
    """The observations of an oracle on the problems of an operator."""
    return [get_oracle(oracle).observe(problem) for problem in problems(operator)]  # type: ignore[misc]


OPERATORS = sorted({one.operator for one in every_case()})


@pytest.mark.matrix
@pytest.mark.parametrize("operator", OPERATORS)
def test_oracles_agree(operator: str) -> None:
    """A derivative by complex step is what differences of the same direction give, and so with both forwards."""
    for problem, found in zip(problems(operator), spoke(operator, "complex-step"), strict=True):
        for one in found:
            if not isinstance(one, Directional) or not one.direction.size:
                continue
            function, at = forward(problem), problem.at
            tried = []
            for step in STEPS:
                try:
                    tried.append(directional(function, at, {one.name: one.direction}, problem.wide_cotangents, step))
                except (BackendError, ShapeMovedError):  # another step may stay where it runs
                    continue
            best = min(tried, key=lambda found: found.error)
            assert abs(one.value - best.value) <= 10 * best.error + one.error + 1e-7 * abs(best.value), problem.case


# Operators that fewer than two oracles apply to, and why.
LONELY: dict[str, str] = {}


@pytest.mark.matrix
@pytest.mark.parametrize("operator", OPERATORS)
def test_two_oracles_apply(operator: str) -> None:
    """Of some case of each operator, of every input."""
    if not problems(operator):
        pytest.skip("no case of it has a derivative")
    said_of = [
        sum(any(isinstance(one, Directional) and one.direction.size for one in found) for found in of_problem)
        for of_problem in zip(*(spoke(operator, name) for name in OBSERVING), strict=True)
    ]
    assert (max(said_of) >= 2) == (operator not in LONELY)


STEPS_OF = {  # x times what x decides, and its derivative along x
    **{
        name: f"{MATRIX} <double h = {{0.35}}> {{ c = {name}(x, h) d = Cast <to = 11> (c) z = Mul(x, d) }}"
        for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    },
    **{
        name: f"{MATRIX} {{ c = {name}(x) d = Cast <to = 11> (c) z = Mul(x, d) }}"
        for name in ("Sign", "Floor", "Ceil", "Round", "IsNaN", "IsInf", "Hardmax", "Shape", "Size")
    },
    **{
        name: f"{MATRIX} {{ c = {name} <axis = 1> (x) d = Cast <to = 11> (c) z = Mul(x, d) }}"
        for name in ("ArgMax", "ArgMin")
    },
    "NonZero": f"{MATRIX} {{ c = NonZero(x) d = Cast <to = 11> (c) e = ReduceSum(d) z = Mul(x, e) }}",
}


@cache
def steady(name: str) -> Problem:
    """A problem of what a float decides in steps."""
    x = 0.9 * (X[:, :2] if name == "Shape" else X)  # not on a half
    text = STEPS_OF[name].replace("double[2,3] x", f"double[{x.shape[0]},{x.shape[1]}] x")
    return ask(case(text, x=x))


@pytest.mark.parametrize("name", STEPS_OF)
def test_what_a_float_decides_does_not_move(name: str) -> None:
    """Its factor has the derivative 0."""
    problem = steady(name)
    factor = np.zeros(problem.at["x"].shape)
    for j in np.ndindex(factor.shape):  # by differences of the output, which is linear in x nearby
        moved = dict(problem.at, x=problem.at["x"].copy())
        moved["x"][j] += 1e-6
        factor[j] = (forward(problem)(moved)["z"][j] - forward(problem)(problem.at)["z"][j]) * 1e6
    for one in said("complex-step", problem):
        expected = np.sum(problem.cotangents["z"] * factor * one.direction)
        assert np.isclose(one.value, expected, rtol=1e-7, atol=1e-8)


def computed(problem: Problem) -> set[str]:
    """The operators that the complex step computes."""
    at = {name: x + 0j if is_float(x) else x for name, x in problem.at.items()}
    operators: set[str] = set()
    for upgraded in (False, True):
        program = ComplexProgram(problem, KNOWN, call, upgraded)
        try:
            program.run(at)
        except (BackendError, KinkError, NotAnalyticError, ShapeMovedError):
            operators |= program.operators
        else:
            return program.operators
    return operators


def test_every_forward_in_the_table_is_met() -> None:
    """By a problem that the complex step solves: what is not met is not verified."""
    met: set[str] = set()
    observe = get_oracle("complex-step").observe
    assert observe is not None
    for problem in (problem for operator in OPERATORS for problem in problems(operator)):
        with suppress(BackendError):  # the complex step does not apply to it
            new = computed(problem) & KNOWN - met
            if new and any(isinstance(one, Directional) and one.direction.size for one in observe(problem)):
                met |= new
    others = [*map(steady, STEPS_OF), *(ask(case(text, **feeds)) for text, feeds, _ in BY_HAND.values())]
    met |= {operator for problem in others for operator in computed(problem)}
    assert sorted(KNOWN - met) == []
    assert not set(FORWARDS) & set(PARTS)
    assert not STEADY & (set(FORWARDS) | set(PARTS))


def test_the_oracles_are_listed() -> None:
    """Each with what it knows."""
    assert {*OBSERVING, "adjoint", "second-order"} <= set(oracles())
    for name in (*OBSERVING, "adjoint", "second-order"):
        assert get_oracle(name).trust
        assert not get_oracle(name).missing()
