from __future__ import annotations

import numpy as np
import pytest
from checking import assert_gradient

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.conformance.cases.attention import RECURRENCES, attention, cases, numbers, recurrence
from refgrad.derivatives import ortbuilder
from refgrad.tables.dialects import DIALECTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    # ONNX Runtime takes the scores of inputs of unknown rank for a scalar.
    scores = len(case.node.output) == 4 and case.node.op_type == "Attention" and "unknown" in str(case)
    runtime = not scores and all(array.size for array in case.feeds.values())
    assert_gradient(case, dialect, directions=1, runtime=runtime)


@pytest.mark.parametrize(("attributes", "gates", "rates"), [row for row in RECURRENCES if row[1]], ids=str)
def test_a_decay_of_minus_infinity_begins_anew(attributes: dict[str, str], gates: int, rates: int) -> None:
    case = recurrence(attributes, gates, rates, 4, 5, True)
    case.feeds["decay"][:, 2, :1] = -np.inf
    floats = tuple(name for name in case.feeds if name != "decay")
    assert_gradient(Case(str(case), case.model, case.feeds, floats), directions=1)
    gradient = get_backend("numpy").prepare(refgrad.gradient(case.model, cotangent="ones")).run(case.feeds)
    np.testing.assert_allclose(gradient["decay_grad"][:, 2, :1], 0, atol=1e-6)
    assert all(np.isfinite(value).all() for value in gradient.values())


@pytest.mark.parametrize("backend", ["numpy"] if ortbuilder.available() else available())  # 1.19.2 has no Attention
def test_a_query_without_a_key_takes_no_part(backend: str) -> None:
    """Whatever its row of Q holds, NaN or infinity, the gradients are those of the other queries."""
    mask = np.array([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]], bool)
    case = attention(mask, opset=23)
    run = get_backend(backend).prepare(refgrad.gradient(case.model, dialect="onnx")).run
    seed = {"Y_grad": numbers(2, 2, 3, 3)}
    expected = run(case.feeds | seed)
    for value in (np.nan, np.inf):
        q = case.feeds["Q"].copy()
        q[:, :, 1] = value
        for name, gradient in run(case.feeds | seed | {"Q": q}).items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-6)
    assert not expected["Q_grad"][:, :, 1].any()


@pytest.mark.parametrize("tokens", [None, 70, 130])
def test_similar_keys_do_not_cancel(tokens: int | None) -> None:
    """A sum of powers of the triangle would grow like binomial coefficients."""
    count = tokens or 100
    query, value = numbers(1, count, 4), numbers(1, count, 3)
    key = np.full((1, count, 4), 0.5, np.float32)
    beta = np.full((1, count, 1), 0.9, np.float32)
    case = node_case(
        "LinearAttention",
        *(query, key, value, None, None, beta),
        q_num_heads=1,
        kv_num_heads=1,
        update_rule="delta",
        outputs=2,
        opset=27,
        shapes="static" if tokens else "symbolic",
    )
    model = refgrad.gradient(case.model)
    assert not {"Loop", "Scan", "If"} & {node.op_type for node in model.graph.node}
    seeds = {"output_grad": numbers(1, count, 3), "present_state_grad": numbers(1, 1, 4, 3)}
    single, double = (
        get_backend("numpy").prepare(model, precision=p).run(case.feeds | seeds) for p in (None, "float64")
    )
    for name, gradient in single.items():
        scale = np.abs(double[name]).max()
        np.testing.assert_allclose(gradient, double[name], rtol=0, atol=1e-5 * scale)
