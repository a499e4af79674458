"""Gradients in double are exact in double, whatever side outputs and constants an operator has in float32."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
import pytest

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.conformance.judge.running.sources import select, tables
from refgrad.conformance.oracles import get_oracle
from refgrad.conformance.oracles.differences import direction_at
from refgrad.conformance.problems.observation import Built, Directional
from refgrad.conformance.problems.point import rms, with_defaults
from refgrad.conformance.problems.problem import Problem, ask
from refgrad.errors import RefgradError

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

CLOSE = 1e-9
STEPS = (1e-3, 0.02, 0.1)  # of the first difference, each halved `_HALVINGS` times; larger ones may cross kinks
_HALVINGS = 5
_EACH = 5  # cases of an operator that the quick suite looks at

# The operators with a side output or a precision of their own, and those that compute a factor from a size.
OPERATORS = (
    *("LayerNormalization", "RMSNormalization", "GroupNormalization", "BatchNormalization", "InstanceNormalization"),
    *("Attention", "SoftmaxCrossEntropyLoss", "Dropout", "GRU", "LSTM"),
    *("com.microsoft.SkipLayerNormalization", "com.microsoft.EmbedLayerNormalization"),
    *("com.microsoft.SimplifiedLayerNormalization", "com.microsoft.SkipSimplifiedLayerNormalization"),
    *("com.microsoft.BatchNormInternal", "ai.onnx.preview.FlexAttention"),
)

# The results of these are floats by their schemas, so that their derivatives are too.
SINGLE = ("ai.onnx.ml.LinearClassifier", "ai.onnx.ml.LinearRegressor", "ai.onnx.ml.Normalizer")


def extrapolated(function: Callable[[float], float], step: float) -> tuple[float, float]:
    """The derivative at 0 by Romberg's extrapolation of central differences, and how far off it may be."""
    best, before = (np.nan, np.inf), list[float]()
    for level in range(_HALVINGS + 1):
        h = step / 2**level
        row = [(function(h) - function(-h)) / (2 * h)]
        for j, coarse in enumerate(before, 1):
            row.append(row[-1] + (row[-1] - coarse) / (4**j - 1))
            error = max(abs(row[j] - row[j - 1]), abs(row[j] - coarse))
            best = min(best, (row[j], error), key=lambda found: found[1])
        before = row
    return best


def by_differences(problem: Problem, name: str) -> Iterable[tuple[np.ndarray, float]]:
    """A direction and the derivative along it, of the model in the types that it declares; nothing where none settles."""
    forward = get_backend("numpy").prepare(with_defaults(problem.model, problem.wrt))
    u = direction_at(problem.at[name], np.random.default_rng(5))
    u = np.where(problem.kinked.get(name, False), 0, u)
    at = {**problem.feeds, **{n: problem.at[n] for n in problem.wrt if n not in problem.feeds}}

    def terms(t: float) -> np.ndarray:
        results = forward.run({**at, name: problem.at[name] + t * u}, list(problem.cotangents))
        found = [np.where(v == 0, 0, v * results[n]).ravel() for n, v in problem.wide_cotangents.items()]
        return np.concatenate(found)

    def along(t: float) -> float:
        return float(np.sum(terms(t)))

    noise = 8 * np.finfo(np.float64).eps * float(np.sum(np.abs(terms(0))))
    for step in STEPS:
        try:
            value, error = extrapolated(along, step)
        except (RefgradError, ValueError):  # out of the domain, or another shape there
            continue
        if error + noise / step <= CLOSE * abs(value):
            yield u, value
            return


def apart(gradient: np.ndarray, u: np.ndarray, value: float) -> float:
    """The relative error of a gradient along a direction."""
    found = np.where(u == 0, 0, gradient)
    size = max(float(np.linalg.norm(found)) * rms(u), abs(value))
    return abs(float(np.sum(found * u)) - value) / size if size else 0.0


def off(case: Case) -> list[str]:
    """The gradients of a case in double that neither complex steps nor differences confirm, though one of them speaks."""
    problem = ask(case, 0)
    built = Built.of(refgrad.gradient(problem.model, problem.wrt, list(problem.cotangents)))
    results = get_backend("numpy").prepare(built.model).run(built.feeds(problem.feeds, problem.cotangents))
    told = [said for said in get_oracle("complex-step").observe(problem) if isinstance(said, Directional)]
    wrong = []
    for name, gradient in built.named(results).items():
        if gradient.dtype != np.float64 or any(v.dtype != np.float64 for v in problem.cotangents.values()):
            continue
        if not np.all(np.isfinite(gradient)):
            continue
        errors = [
            apart(gradient, said.direction, said.value)
            for said in told
            if said.name == name and said.scale <= 1e3 * abs(said.value)
        ]
        if errors and max(errors) <= CLOSE:
            continue
        errors = [apart(gradient, *found) for found in by_differences(problem, name)]
        if errors and max(errors) > CLOSE:
            wrong.append(f"{name} is off by {max(errors):.2g}")
    return wrong


@cache
def in_double(every: bool = False) -> list[Case]:
    return list(select(tables(), None if every else OPERATORS, dtype="float64", values="smooth"))


def of(operator: str) -> list[Case]:
    return [case for case in in_double() if case.operator == operator]


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_of_operators_with_side_outputs_are_exact_in_double(operator):
    listed = of(operator)
    assert listed
    chosen = [*listed[:: max(len(listed) // _EACH, 1)], *[c for c in listed if "stash_type" in c.name][:2]]
    assert not {case.name: wrong for case in chosen if (wrong := off(case))}


def test_every_gradient_is_exact_in_double():
    """On every nth case of each operator, the first included; REFGRAD_EVERY=1 takes all of them, which is minutes."""
    seen: Counter[str] = Counter()
    chosen = []
    for case in in_double(every=True):
        if case.operator not in SINGLE and seen[case.operator] % int(os.environ.get("REFGRAD_EVERY", "25")) == 0:
            chosen.append(case)
        seen[case.operator] += 1
    assert not {case.name: wrong for case in chosen if (wrong := off(case))}


def test_side_outputs_have_exact_gradients_in_double():
    """Mean and InvStdDev are read by others too: their share of the gradient comes from the same statistics."""
    case = next(case for case in of("LayerNormalization") if len(case.node.output) > 2)
    problem = ask(case, 0)
    built = Built.of(refgrad.gradient(problem.model, problem.wrt, list(problem.cotangents)))
    results = built.named(get_backend("numpy").prepare(built.model).run(built.feeds(problem.feeds, problem.cotangents)))
    told = [said for said in get_oracle("complex-step").observe(problem) if isinstance(said, Directional)]
    assert told
    for said in told:
        assert apart(results[said.name], said.direction, said.value) <= CLOSE
