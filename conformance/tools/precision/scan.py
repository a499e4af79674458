"""The scan: gradients on an executor against derivatives in mpmath."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from mpmath import mp, mpf

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import node_case
from refgrad.conformance.tools.precision import exact, points
from refgrad.conformance.tools.precision.functions import OutsideError, ScalarFunction
from refgrad.errors import BackendError, ModelWarning
from refgrad.tables.schemas import find_schema

BOUND = 8.0  # units: what a few roundings explain
EXECUTORS = ("numpy", "ort-cpu")
ORDERS = (1, 2)
_TENSORS = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
_MOST = mpf(10) ** 300  # the largest error that is written


@dataclass(frozen=True)
class Miss:
    """A derivative, and the number that the gradient has. `error` is in units, `absolute` in rounding errors of 1 (eps)."""

    at: tuple[float, ...]
    by: int
    got: float
    expected: str
    error: float
    absolute: float


@dataclass(frozen=True)
class Measured:
    """The derivatives of one order of an operator in a type on an executor.

    `points` were compared. `worst` has the largest error; `beyond` are those whose error is above `BOUND`.
    """

    function: str
    dtype: str
    executor: str
    order: int
    points: int
    worst: Miss
    beyond: tuple[Miss, ...]


def scan(
    functions: Iterable[ScalarFunction], dtypes: Sequence[str] = points.TYPES, executors: Sequence[str] = EXECUTORS
) -> Iterator[Measured]:
    """Every function, type, order and executor; without the types that the operator or the executor does not have."""
    for function in functions:
        for dtype in dtypes:
            if not supports(function, dtype):
                continue
            for order, truths in derivatives(function, dtype).items():
                for executor in executors:
                    got = gradients(function, dtype, executor, order)
                    if got is not None:
                        yield _measured(function, dtype, executor, order, truths, got)


def supports(function: ScalarFunction, dtype: str) -> bool:
    """True if the operator takes this type."""
    schema = find_schema(function.operator, function.domain, function.opset)
    return f"tensor({_TENSORS[dtype]})" in schema.inputs[0].types


@dataclass(frozen=True)
class ExactDerivative:
    """The derivative by the number `by` at the point in a row of the table, and the unit in which errors are told."""

    row: int
    at: tuple[float, ...]
    by: int
    value: Any
    unit: Any


@cache
def derivatives(function: ScalarFunction, dtype: str) -> Mapping[int, Sequence[ExactDerivative]]:
    """The derivatives by order, without those at kinks and outside of the domain. Second ones of functions of one number."""
    least = int(math.log2(float(points.info(dtype).smallest_subnormal)))
    found: dict[int, list[ExactDerivative]] = {1: []} if function.arity > 1 else {1: [], 2: []}
    for row, numbers in enumerate(table(function, dtype)):
        at = tuple(float(x) for x in numbers)
        with mp.workprec(exact.precision(at, least)):
            point = [mpf(x) for x in at]
            sizes = [_ulp(x, dtype) for x in point]
            for k in range(function.arity):
                try:
                    slope = exact.slope(function.forward, point, k)
                    moves = exact.moves(function.forward, point, k, sizes)
                    found[1].append(ExactDerivative(row, at, k, slope, max(_ulp(slope, dtype), moves)))
                    if function.arity == 1:
                        second, third = exact.second(function.forward, point[0])
                        unit = max(_ulp(second, dtype), _ulp(slope, dtype), abs(third) * sizes[0])
                        found[2].append(ExactDerivative(row, at, k, second, unit))
                except (exact.OneSidedError, OutsideError):
                    continue
    return found


def table(function: ScalarFunction, dtype: str) -> np.ndarray:
    """The points, a row each."""
    if function.arity == 1:
        return points.line(dtype, function.ends)[:, None]
    return points.rows(dtype, function.arity)


def _ulp(x: Any, dtype: str) -> Any:
    """The distance of the numbers of the type at x."""
    kind = points.info(dtype)
    least = mpf(float(kind.smallest_subnormal))
    return max(least, mp.ldexp(mpf(float(kind.eps)), int(mp.mag(x)) - 1)) if x else least


def gradients(function: ScalarFunction, dtype: str, executor: str, order: int) -> np.ndarray | None:
    """The derivatives at every point, by row and number; None where the executor has no kernel for the type."""
    numbers = table(function, dtype)
    inputs = [numbers, np.array([-1])] if function.row else [numbers[:, k].copy() for k in range(function.arity)]
    case = node_case(
        function.operator,
        *inputs,
        domain=function.domain,
        opset=function.opset,
        constant=("axes",) if function.row else (),
        **function.attributes,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)  # a second derivative of 0
        model = refgrad.gradient(case.model)
        for _ in range(order - 1):
            model = refgrad.gradient(model, wrt=[*case.feeds], outputs=[value.name for value in model.graph.output])
    try:
        prepared = get_backend(executor).prepare(model)
        ones = {v.name: np.ones(len(numbers), dtype) for v in prepared.inputs if v.name not in case.feeds}
        with np.errstate(all="ignore"):
            results = prepared.run({**case.feeds, **ones})
    except BackendError:
        return None
    made = [np.asarray(results[value.name]).astype(np.float64) for value in model.graph.output]
    return made[0] if function.row else np.stack(made, axis=1)


def _measured(
    function: ScalarFunction, dtype: str, executor: str, order: int, truths: Sequence[ExactDerivative], got: np.ndarray
) -> Measured:
    misses = [_miss(truth, float(got[truth.row, truth.by]), dtype) for truth in truths]
    beyond = tuple(miss for miss in misses if miss.error > BOUND)
    worst = max(misses, key=lambda miss: miss.error)
    return Measured(function.name, dtype, executor, order, len(truths), worst, beyond)


def _miss(truth: ExactDerivative, got: float, dtype: str) -> Miss:
    """The error of `got`. A derivative that the type cannot hold has to be infinite, or nearly so."""
    kind = points.info(dtype)
    most = mpf(float(kind.max))
    expected = mp.sign(truth.value) * most if abs(truth.value) > most else truth.value
    if math.isfinite(got):
        error, absolute = (float(min(abs(got - expected) / by, _MOST)) for by in (truth.unit, mpf(float(kind.eps))))
    else:
        reached = math.isinf(got) and (got > 0) == (truth.value > 0) and abs(truth.value) + BOUND * truth.unit > most
        error = absolute = 0.0 if reached else math.inf
    return Miss(truth.at, truth.by, got, mp.nstr(truth.value, 6), error, absolute)
