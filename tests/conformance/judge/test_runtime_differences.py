"""Differences of ONNX Runtime's forward kernels: they confirm right gradients, contradict planted ones, or are silent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
from onnx import parser
from runtime import needs_runtime

from refgrad.conformance.case import Case
from refgrad.conformance.cases import of_operators
from refgrad.conformance.judge.judge import GradientCheck
from refgrad.conformance.judge.running import runner
from refgrad.conformance.oracles import Directional, NotApplicable, Observation, get_oracle, runtime_differences
from refgrad.conformance.oracles.comparison import EXACT, against_directions
from refgrad.conformance.oracles.runtime_differences import NAME
from refgrad.conformance.problems.problem import Problem, ask
from refgrad.conformance.verdicts import RIGHT, WRONG
from refgrad.errors import RefgradError, WorkerError
from refgrad.worker import Worker

pytest.importorskip("onnxruntime")
pytestmark = [pytest.mark.stock, pytest.mark.slow]

X = np.array([[0.3, -0.7, 1.2], [-1.5, 0.4, 0.9]])
IMPORTS = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A kernel that ends its process ends this one."""
    with Worker() as started:
        yield started


def case(text: str, values: str = "smooth", **feeds: np.ndarray) -> Case:
    """A case of a model in onnx's text format."""
    return Case("by hand", parser.parse_model(f"{IMPORTS} g {text}"), feeds, values=values)


def matrix(body: str, x: np.ndarray = X, values: str = "smooth") -> Case:
    """A case of a model of z by x, in the type of `x`."""
    kind = {"float64": "double", "float32": "float", "float16": "float16"}[x.dtype.name]
    shape = ", ".join(map(str, x.shape))
    return case(f"({kind}[{shape}] x) => ({kind}[a,b] z) {{ {body} }}", values, x=x)


def said(asked: Case, seed: int = 0) -> Sequence[Observation]:
    """What the oracle says of a case."""
    return runner.observe(NAME, ask(asked, seed))


def silence(asked: Case) -> str:
    """Why it says nothing of a case."""
    found = said(asked)
    assert found
    assert all(isinstance(one, NotApplicable) for one in found), found
    return "; ".join(one.why for one in found if isinstance(one, NotApplicable))


SQUARE = "z = Mul(x, x)"
BY_HAND = {
    "square": (SQUARE, lambda x: 2 * x),
    "exponential": ("z = Exp(x)", np.exp),
    "tanh": ("z = Tanh(x)", lambda x: 1 - np.tanh(x) ** 2),
    "relu": ("z = Relu(x)", lambda x: x > 0),
    "QuickGelu": (
        "z = com.microsoft.QuickGelu <alpha = 1.5> (x)",
        lambda x: (1 + np.exp(-1.5 * x) * (1 + 1.5 * x)) / (1 + np.exp(-1.5 * x)) ** 2,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-3), ("float64", 1e-3)])
def test_derivatives_by_hand(name: str, dtype: str, error: float) -> None:
    """Each is what the formula gives, within an error that it claims and that is small."""
    body, slope = BY_HAND[name]
    asked = matrix(body, X.astype(dtype))
    v = ask(asked).wide_cotangents["z"]
    found = said(asked)
    assert len(found) == 2
    for one in found:
        assert isinstance(one, Directional)
        expected = float(np.sum(v * slope(asked.feeds["x"].astype(np.float64)) * one.direction))
        assert abs(one.value - expected) <= one.error <= error * abs(one.value)


def test_a_model_of_ai_onnx_runs_in_double() -> None:
    """Whatever its own type is: the error is that of double."""
    for dtype in ("float16", "float32", "float64"):
        for one in said(matrix("a = Sin(x) z = MatMul(a, a)", X[:, :2].astype(dtype))):
            assert isinstance(one, Directional)
            assert one.error <= 1e-9 * one.scale


# Operators of com.microsoft

PER_OPERATOR = 3
CASES = [case for family, case in of_operators() if family == "microsoft"]


@cache
def problems() -> dict[str, list[Case]]:
    """Some cases of each operator that ONNX Runtime might have a kernel for."""
    found: dict[str, list[Case]] = {}
    for one in CASES:
        if one.values == "smooth":
            found.setdefault(one.operator.rpartition(".")[2], []).append(one)
    return {name: some[:: max(len(some) // PER_OPERATOR, 1)][:PER_OPERATOR] for name, some in found.items()}


OPERATORS = sorted({one.operator.rpartition(".")[2] for one in CASES})


def verdicts(problem: Problem, observations: Sequence[Observation], factor: float) -> set[str]:
    """What is said of refgrad's gradient, times a factor, by the inputs that move something: one that is 0 has no factor."""
    check = GradientCheck(problem, tuple(observations))
    found = set()
    for name, gradient in check.own_gradient.gradients.items():
        if not np.any(gradient):
            continue
        along = [s for s in observations if isinstance(s, Directional) and s.name == name and s.step]
        if along:
            found.add(
                against_directions(
                    check.own_gradient, name, factor * gradient, along, EXACT, exact=True, compare_sides=False
                ).verdict
            )
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("operator", OPERATORS)
def test_right_gradients_are_not_blamed_and_wrong_ones_are(operator: str, worker: Worker) -> None:
    """By a factor near 1, and by a sign."""
    for one in problems().get(operator, []):
        problem = ask(one)
        observations = worker.call(runner.observe, NAME, problem)
        assert verdicts(problem, observations, 1.0) <= {RIGHT}, one
        for factor in (1.05, 0.95, -1.0):
            assert verdicts(problem, observations, factor) <= {WRONG}, one


@needs_runtime
def test_it_judges_every_operator_that_has_a_kernel(worker: Worker) -> None:
    """But two, all of whose inputs are rounded. The figures are in docs/oracles.md."""
    judged, silent = set(), set()
    for operator, some in problems().items():
        for one in some:
            try:
                worker.call(runner.run, "ort-cpu", one.model, dict(one.feeds))
            except WorkerError:  # no kernel of this form
                continue
            observations = worker.call(runner.observe, NAME, ask(one))
            (judged if any(isinstance(s, Directional) and s.step for s in observations) else silent).add(operator)
    assert silent - judged == {"DynamicQuantizeLSTM", "NhwcMaxPool"}
    assert len(judged) >= 55


TRANSPOSED = case(
    "(float[3,3] A, float[3,3] B) => (float[a,b] Y) { Y = com.microsoft.FusedMatMul <alpha = 0.5> (A, B) }",
    A=np.vstack([X, X[:1] ** 2]).astype(np.float32),
    B=np.vstack([X[:1] - X[1:], X]).astype(np.float32),
)


def test_a_transposed_operand_is_caught(worker: Worker) -> None:
    """It is of the right shape."""
    problem = ask(TRANSPOSED)
    observations = worker.call(runner.observe, NAME, problem)
    check = GradientCheck(problem, tuple(observations))
    v, a, b = (x.astype(np.float64) for x in (problem.cotangents["Y"], *problem.feeds.values()))
    for name, right, wrong in (("A", v @ b.T, v @ b), ("B", a.T @ v, a @ v)):
        along = [one for one in observations if isinstance(one, Directional) and one.name == name]
        for gradient, verdict in ((right, RIGHT), (wrong, WRONG)):
            judged = against_directions(
                check.own_gradient, name, gradient / 2, along, EXACT, exact=True, compare_sides=False
            )
            assert judged.verdict == verdict


# Silence


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (matrix("z = Round(x)"), "Round rounds"),
        (matrix("a = Round(x) z = Mul(a, x)"), "Round rounds"),
        (matrix("i = Cast <to = 6> (x) z = Cast <to = 11> (i)"), "Cast rounds"),
        (next(one for one in CASES if one.operator == "com.microsoft.BiasAdd"), "no kernel"),
        (matrix("z = Relu(x)", np.zeros((2, 3)), "kink"), "kink"),
        (matrix("z = Log(x)", np.zeros((2, 3)), "special"), "not finite"),
    ],
    ids=["rounded", "rounded beside", "cast", "no kernel", "kink", "not finite"],
)
def test_silent_with_a_reason(asked: Case, why: str) -> None:
    """Where it knows nothing."""
    try:
        reason = silence(asked)
    except RefgradError as error:
        reason = str(error)
    assert why in reason, reason


def test_an_input_beside_what_is_rounded_is_judged() -> None:
    """The oracle judges the scale of a DequantizeLinear, which nothing rounds."""
    asked = case(
        "(float[2,3] x, float y) => (float[a,b] z) <float s = {0.1}> { q = QuantizeLinear(x, s) z = DequantizeLinear(q, y) }",
        x=np.abs(X).astype(np.float32),
        y=np.array(0.3, np.float32),
    )
    kinds = {(type(one), one.name) for one in said(asked)}
    assert kinds == {(NotApplicable, "x"), (Directional, "y")}


def test_silent_where_the_interpreter_computes_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwards are to be compared first."""
    asked = matrix("z = Exp(x)")
    problem = ask(asked)
    truth = {"z": 1.001 * np.exp(X)}
    monkeypatch.setattr(runtime_differences, "truth_of", lambda _: truth)
    (found,) = runner.observe(NAME, problem)
    assert isinstance(found, NotApplicable)
    assert "another 'z' than the interpreter" in found.why


def test_silent_where_onnx_runtime_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what to install."""
    monkeypatch.setattr(runtime_differences.CpuBackend, "unavailable", lambda: "onnxruntime is not installed")
    (found,) = said(matrix(SQUARE))
    assert isinstance(found, NotApplicable)
    assert found.why == "onnxruntime is not installed"


# Kinks and stairs that are near


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("distance", [10.0**-k for k in range(1, 8)])
def test_a_kink_that_is_near_is_not_crossed_unseen(distance: float, dtype: str) -> None:
    """What is said holds within its error, however near the kink is to the point."""
    x = np.array([[distance, 0.5, -1.0], [1.5, -distance, 2.0]], dtype)
    # ONNX Runtime has no QuickGelu in double.
    asked = matrix("z = com.microsoft.QuickGelu <alpha = 2e9> (x)" if dtype == "float32" else "z = Relu(x)", x)
    for seed in range(10):
        problem = ask(asked, seed)
        for one in runner.observe(NAME, problem):
            if isinstance(one, Directional):
                expected = float(np.sum(problem.wide_cotangents["z"] * (x > 0) * one.direction))
                assert abs(one.value - expected) <= one.error


@pytest.mark.parametrize("steps", [3, 30, 300, 3000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_stairs_that_no_name_tells_of_are_seen(steps: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may round inside: its derivative is 0, and the slope of its stairs is not."""
    monkeypatch.setattr(runtime_differences, "_ROUNDING", frozenset())
    number = f"double s = {{{steps}.0}}" if dtype == "float64" else f"float s = {{{steps}.0}}"
    kind = {"float32": "float", "float64": "double"}[dtype]
    text = f"({kind}[2,3] x) => ({kind}[a,b] z) <{number}> {{ a = Mul(x, s) b = Round(a) z = Div(b, s) }}"
    for seed in range(5):
        for one in said(case(text, x=X.astype(dtype)), seed):
            if isinstance(one, Directional):
                assert abs(one.value) <= one.error


def test_the_oracle_is_listed() -> None:
    """With what it knows."""
    oracle = get_oracle(NAME)
    assert "own forward kernels" in oracle.trust
    assert not oracle.missing()
